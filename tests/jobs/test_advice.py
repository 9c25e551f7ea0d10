"""What a finished stage says: the worst layer, lengths, and the lines that it proposes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from support.tiny import original

import linearize
from linearize.attention.shape import HeadShape
from linearize.checkpoint.provenance import add_command
from linearize.core.registry import Hybrid
from linearize.jobs import advice
from linearize.jobs.advice import data_options, line, worst_layer
from linearize.jobs.config import AlignJob, ConvertJob
from linearize.jobs.stages import longest_row
from linearize.modeling.plan import LayerPlan, Plan


def layer(index, kernel="flexformer_n", window=None, size=32):
    return LayerPlan(f"encoder.layer.{index}.attention.self", index, kernel, HeadShape(2, 2, size, size, False),
                     hybrid=Hybrid(window=window))  # fmt: skip


def worst(plan, *figures):
    names = [f"bert.encoder.layer.{i}.attention.self" for i in range(len(figures))]
    return worst_layer(dict(zip(names, figures, strict=True)), "KL", plan)


def test_the_worst_layer():
    plan = Plan("BertModel", "bert", tuple(layer(i) for i in range(4)))
    found = worst(plan, 0.1, 0.1, 0.9, 0.1)
    assert (found.index, found.figure, found.value, found.mean) == (2, "KL", 0.9, pytest.approx(0.3))
    assert worst(plan, 0.1) is None and worst(plan, 0.0, -1e-9, 1e-7, 0.0) is None
    assert advice.Findings(found, None, "load", "next", "why").lines()[0] == (
        "Worst layer: 2 (bert.encoder.layer.2.attention.self), KL 0.900, 0.300 on average; --keep-softmax 2 keeps it "
        "softmax."
    )


def test_the_block_in_which_the_error_grows_most():
    plan = Plan("BertModel", "bert", tuple(layer(i, "hedgehog") for i in range(3)))
    errors = {"bert.encoder.layer.0": 0.1, "bert.encoder.layer.1": 0.5, "bert.encoder.layer.2": 0.6, "output": 0.9}
    found = worst_layer(advice.growth(errors), "growth", plan)
    assert (found.index, found.value, found.mean) == (1, pytest.approx(0.4), pytest.approx(0.2))


def test_lengths_are_counted_without_padding():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    assert longest_row([{"input_ids": mask, "attention_mask": mask}, {"input_ids": mask[:, :2]}]) == 3
    assert longest_row([{"pixel_values": mask}]) is None and longest_row([]) is None
    model = original("bert")
    takes = model.config.max_position_embeddings
    assert advice.lengths_of(9, model) == advice.Lengths(9, takes)
    assert (
        advice.lengths_of(takes + 1, model) == advice.Lengths(takes, takes) and advice.lengths_of(None, model) is None
    )


def test_the_loading_line_is_that_of_the_class(tmp_path):
    for name, head, said in (
        ("bert", "AutoModelForSequenceClassification", "AutoModelForSequenceClassification"),
        ("gpt2", "AutoModelForCausalLM", "AutoModelForCausalLM"),
        ("bert", "AutoModel", "AutoModel"),
        ("vit", "AutoModelForImageClassification", "AutoModelForImageClassification"),
    ):
        model = original(name, head)
        assert not advice.load_lines(model, "x").startswith("import linearize")
        folder = tmp_path / f"{name}-{head}"
        linearize.save(linearize.convert(model), folder)
        line = advice.load_lines(model, folder)
        assert line == f"import linearize; from transformers import {said}; {said}.from_pretrained({str(folder)!r})"
        loaded = eval(
            compile(line.rpartition("; ")[2], "line", "eval"), {said: getattr(__import__("transformers"), said)}
        )
        assert type(loaded).__name__ == type(model).__name__
    assert "SentenceTransformer('x')" in advice.load_lines(model, "x", embedder=True)


@pytest.fixture
def typed(monkeypatch):
    return lambda *words: monkeypatch.setattr(sys, "argv", ["/usr/bin/linearize", *words])


def test_a_line_is_recorded_as_it_was_typed_but_for_places(typed, tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}")
    path = str(tmp_path / "mine.jsonl")
    typed(
        "convert", str(tmp_path), "--dataset", f"{path}=0.7,hub/set=0.3", "--output=here", "--device", "cpu", "--resume"
    )
    line = f"linearize convert {tmp_path.name} --dataset mine.jsonl=0.7,hub/set=0.3"
    assert add_command({}) == {"commands": [line]}
    assert add_command({"commands": ["before"]}) == {"commands": ["before", line]}
    assert add_command({"commands": [line]}) == {"commands": [line]}, "stages of one line"
    typed("distill", "--config", path)
    assert add_command({}) == {"commands": ["linearize distill --config mine.jsonl"]}


def test_python_callers_record_no_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "convert", "bert"])
    assert add_command({"commands": ["before"]}) == {"commands": ["before"]}


def test_lines_are_made_of_options():
    options = {"text_column": ("a", "b"), "steps": 3, "packing": True, "teacher": None, "learning_rate": 1e-4}
    assert line("align", "out", options) == (
        "linearize align out --text-column a,b --steps 3 --packing --learning-rate 0.0001"
    )
    job = ConvertJob.of(model="a", dataset="b.jsonl=2,c=1", device="cpu", distill_steps=10, text_column="x,y")
    assert line("align", "out", data_options(job)).split()[3:] == [
        "--dataset", "b.jsonl=2.0,c=1.0", "--text-column", "x,y", "--device", "cpu",
    ]  # fmt: skip


def context(job, **more):
    kernel = more.pop("kernel", "hedgehog")
    loaded = SimpleNamespace(model=linearize.convert(original("bert"), kernel))
    shown = {"alignment": None, "distillation": SimpleNamespace(), "provenance": {}, "loaded": loaded, **more}
    return SimpleNamespace(job=job, target="out", **shown)


def test_the_next_command_follows_from_what_was_done():
    job = ConvertJob.of(model="bert", distill_length=32, text_column="x,y")
    assert advice.next_command(context(job, distillation=None)) == (
        "to train the kernels", "linearize distill out --text-column x,y --distill-length 32",
    )  # fmt: skip
    closer = ("to bring the whole model closer", "linearize align out --text-column x,y")
    assert advice.next_command(context(job)) == closer
    assert advice.next_command(context(job, distillation=None, kernel="elu")) == closer, "nothing to train in stage one"
    long = ConvertJob.of(model="llama", preset="recall")
    assert advice.next_command(context(long)) == (
        "to bring the whole model closer", "linearize align out --batch-size 2 --packing",
    )  # fmt: skip
    report = ("to look at every layer", "linearize report out --original bert --text-column x")
    assert advice.next_command(context(job, alignment=True)) == report
    job, tuned = AlignJob.of(model="out", teacher="mine"), {"finetuning": {}, "base_model": "theirs"}
    assert advice.next_command(context(job, provenance=tuned))[1] == "linearize report out --original mine"
    job = AlignJob.of(model="out")
    assert advice.next_command(context(job, provenance=tuned))[1] == "linearize report out"


def test_measuring_that_takes_most_of_a_run_is_said():
    history = [{"loss": 1.0}, {"eval_loss": 1.0, "eval_runtime": 40.0}, {"eval_loss": 1.0, "eval_runtime": 20.0}]
    text = advice.long_measuring(history, 100.0, 40_000)
    assert text is not None and text.startswith("Measuring 40,000 rows took 60 of 100 s; --validation-limit 500 ")
    assert advice.long_measuring(history, 130.0, 40_000) is advice.long_measuring(history, 100.0, 500) is None
