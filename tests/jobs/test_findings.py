"""What a stage says when it is over: the trend of its loss, the worst layer, and lines that do what they say."""

from __future__ import annotations

import math
import shlex
from types import SimpleNamespace

import pytest
import torch
from support.tiny import original

import linearize
from linearize.alignment.loop import AlignStep
from linearize.alignment.measure import Closeness
from linearize.attention.shape import HeadShape
from linearize.cli._options import take_options
from linearize.cli.main import build_parser
from linearize.distillation.loop import StepReport
from linearize.fidelity.measure import Fidelity, LayerFidelity
from linearize.jobs import findings
from linearize.jobs.command import command_of, data_options
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob
from linearize.jobs.task_config import EvaluateJob, TuneJob
from linearize.jobs.trend import trend
from linearize.modeling.plan import LayerPlan, Plan
from linearize.registry import Hybrid, kernel_infos, make_config

STEPS = range(100, 1001, 100)


def curve(of):
    return [(step, of(step)) for step in STEPS]


def test_a_power_law_is_continued_to_where_it_stops_paying():
    found = trend(curve(lambda t: 1 + 2 * t**-0.5), 1000)
    assert (found.verdict, found.capped, found.best_step) == ("falling", False, 1000)
    # By hand: 2 (1000 + n)^-0.5 - 2 (2000 + n)^-0.5 is below 5 % of the fall from n = 1,313 on; by quarters 1,500.
    assert found.more == 1500
    fell = 2 * (100**-0.5 - 1000**-0.5)
    assert found.gain == pytest.approx(2 * (1000**-0.5 - 2500**-0.5) / fell, rel=1e-6)
    assert "about 1,500 steps more" in found.text and "17%" in found.text


def test_what_falls_as_a_line_falls_on_without_end():
    found = trend(curve(lambda t: 3 - t / 1000), 1000)
    assert (found.verdict, found.more, found.capped) == ("falling", 4000, True)
    assert "at least 4,000 steps more" in found.text


@pytest.mark.parametrize("of", [lambda t: 1 + math.exp(-t / 100), lambda t: 1.0, lambda t: 1 + t % 300 / 1e4])
def test_what_has_converged_is_flat(of):
    assert trend(curve(of), 1000).verdict == "flat"


def test_what_rises_names_the_kept_step():
    found = trend(curve(lambda t: 1 + (t - 400) ** 2 / 1e5), 1000)
    assert (found.verdict, found.best_step) == ("rising", 400) and "since step 400" in found.text


def test_noise_is_no_trend():
    generator = torch.Generator().manual_seed(0)
    verdicts = []
    for _ in range(40):
        noise = torch.randn(10, generator=generator).tolist()
        verdicts.append(trend([(t, 1 + 0.01 * n) for t, n in zip(STEPS, noise, strict=True)], 1000).verdict)
    assert verdicts.count("flat") >= 32


def test_few_evaluations_say_nothing():
    assert trend(curve(lambda t: 1 / t)[:3], 300).verdict == "unknown"
    assert findings.stage_two_trend([{"loss": 1.0, "step": 3}], 3, 3).verdict == "unknown"


def test_nothing_better_than_the_start():
    log = [{"step": s, "eval_selection": 1 + s / 10} for s in range(11)]
    found = findings.stage_two_trend(log, 10, 0)
    assert found.verdict == "start" and found.text.startswith("none of 10 steps measured better")
    falling = [{"step": 0, "eval_selection": 0.5}, *({"step": s, "eval_selection": 2 - s / 10} for s in range(1, 11))]
    assert findings.stage_two_trend(falling, 10, 0).verdict == "falling"


def test_only_the_last_part_of_a_run_is_judged():
    """Groups of layers and phases of the alignment have losses of their own."""
    groups = [
        StepReport(s, 2000, {"a": 1.0}, 9.0 if s <= 1000 else 1 + math.exp(-(s - 1000) / 100), 0.1, 1.0)
        for s in range(100, 2001, 100)
    ]
    found = findings.stage_one_trend(SimpleNamespace(history=groups), 1000)
    assert (found.verdict, found.steps, found.best_step) == ("flat", 1000, 1000)
    phases = [AlignStep(s, 14, "blockwise", {}, 1.0, 5.0, 0.1, 1.0) for s in range(1, 5)]
    phases += [AlignStep(s, 14, "end to end", {}, 1.0, 3 - s / 10, 0.1, 1.0) for s in range(5, 15)]
    found = findings.alignment_trend(SimpleNamespace(history=phases))
    assert (found.verdict, found.steps, found.more) == ("falling", 10, 40)
    log = [{"step": s, "eval_loss": 1.0, "eval_selection": 2 - s / 10} for s in range(1, 11)] + [{"train_loss": 1}]
    assert findings.stage_two_trend(log, 10, 10).verdict == "falling"
    log = [{"step": s, "eval_loss": 1.0} for s in range(1, 11)]
    assert findings.stage_two_trend(log, 10, 10).verdict == "flat"


def layer(index, kernel="flexformer_n", window=None, size=32):
    return LayerPlan(f"encoder.layer.{index}.attention.self", index, kernel, HeadShape(2, 2, size, size, False),
                     hybrid=Hybrid(window=window))  # fmt: skip


def measured(*kl, kernel="flexformer_n", negative=0.0):
    names = [f"bert.encoder.layer.{i}.attention.self" for i in range(len(kl))]
    return Fidelity(tuple(LayerFidelity(n, kernel, k, k, negative, k, {}) for n, k in zip(names, kl, strict=True)), 9)


def test_the_worst_layer_and_what_helps_it():
    plan = Plan("BertModel", "bert", tuple(layer(i) for i in range(4)))
    found = findings.worst_of_layers(measured(0.1, 0.1, 0.9, 0.1), plan)
    assert (found.index, found.figure, found.value, found.mean) == (2, "KL", 0.9, pytest.approx(0.3))
    assert [help.partition(" (")[2] for help in found.helps] == [
        "--keep-softmax 2)", "--kernel-arg frequencies=64)", "--window 64)",
    ]  # fmt: skip
    # Not far from the others: softmax need not stay.
    assert "--keep-softmax" not in findings.worst_of_layers(measured(0.3, 0.3, 0.4, 0.3), plan).text
    assert findings.worst_of_layers(measured(0.001, 0.002), plan).helps == ()
    assert "cannot be negative" in findings.worst_of_layers(measured(0.1, 0.2, negative=0.1), plan).text
    assert findings.worst_of_layers(measured(0.1), plan) is None
    fixed = Plan("BertModel", "bert", tuple(layer(i, "elu", window=8) for i in range(2)))
    assert findings.worst_of_layers(measured(0.1, 0.2), fixed).helps == ("a kernel that learns (--kernel hedgehog)",)


def test_the_block_in_which_the_error_grows_most():
    plan = Plan("BertModel", "bert", tuple(layer(i, "hedgehog") for i in range(3)))
    errors = {"bert.encoder.layer.0": 0.1, "bert.encoder.layer.1": 0.5, "bert.encoder.layer.2": 0.6, "output": 0.9}
    found = findings.worst_of_blocks(Closeness(errors, 1.0, None, 1.0), plan)
    assert (found.index, found.value, found.mean) == (1, pytest.approx(0.4), pytest.approx(0.2))
    assert found.helps[0] == "softmax stays in it (--keep-softmax 1)"


@pytest.mark.parametrize("info", [i for i in kernel_infos() if i.preset is None], ids=lambda info: info.name)
def test_a_wider_kernel_has_twice_the_features(info):
    one = layer(0, info.name)
    found = findings.wider_argument(one)
    if found is None:
        learned = ("hedgehog", "flexformer_n", "flexformer_s", "luna", "t2r")
        assert info.name not in (*learned, "rfa", "performer", "macformer_exp")
        return
    name, _, value = found.partition("=")
    before, after = (info.feature_dim(make_config(info, args), 32) for args in ({}, {name: value}))
    assert after == 2 * before


def test_lengths_are_counted_without_padding():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    assert findings.longest_row([{"input_ids": mask, "attention_mask": mask}, {"input_ids": mask[:, :2]}]) == 3
    assert findings.longest_row([{"pixel_values": mask}]) is None and findings.longest_row([]) is None
    found = findings.lengths_of(256, 8192)
    assert "up to 256 tokens" in found.text and "8,192" in found.text and "not been measured" in found.text
    assert "whole length" in findings.lengths_of(900, 512).text and findings.lengths_of(1, None) is None


def test_the_loading_line_is_that_of_the_class(tmp_path):
    for name, head, said in (
        ("bert", "AutoModelForSequenceClassification", "AutoModelForSequenceClassification"),
        ("gpt2", "AutoModelForCausalLM", "AutoModelForCausalLM"),
        ("bert", "AutoModel", "AutoModel"),
        ("vit", "AutoModelForImageClassification", "AutoModelForImageClassification"),
    ):
        model = original(name, head)
        assert not findings.load_lines(model, "x").startswith("import linearize")
        folder = tmp_path / f"{name}-{head}"
        linearize.save(linearize.convert(model), folder)
        line = findings.load_lines(model, folder)
        assert line == f"import linearize; from transformers import {said}; {said}.from_pretrained({str(folder)!r})"
        loaded = eval(
            compile(line.rpartition("; ")[2], "line", "eval"), {said: getattr(__import__("transformers"), said)}
        )
        assert type(loaded).__name__ == type(model).__name__
    assert "SentenceTransformer('x')" in findings.load_lines(model, "x", embedder=True)


LINES = [
    ("convert", ConvertJob, "bert --kernel performer --kernel-arg features=8 --kernel-arg orthogonal=false --layers "
     "0=elu --keep-softmax 0,2 --dataset a.jsonl=0.7,b.txt=0.3 --text-column a,b --distill-steps 500 --patience 0 "
     "--learning-rate 0.001 --align-train kernels --max-length 99 --device cpu --output 'my folder'"),
    ("convert", ConvertJob, "bert --distill-steps 50 --align-steps 7 --seed 3 --packing --precision bf16"),
    ("convert", ConvertJob, "bert"),
    ("distill", DistillJob, "dir --distill-length 64 --query-sample 9 --feed student --loss output"),
    ("align", AlignJob, "dir --teacher bert --steps 9 --blockwise 0.5 --length 12 --bucket-by-length"),
    ("finetune", TuneJob, "dir --task text-classification --dataset d.jsonl --columns a,b --label-column mood --labels "
     "up,down --split test --lora r=4,alpha=8.0,dropout=0.0 --max-length 9 --epochs 1.5"),
    ("evaluate", EvaluateJob, "dir --task cola --compare bert --max-length 9"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "config", "words"), LINES, ids=[line[0] for line in LINES])
def test_a_job_as_a_line_is_the_same_job(verb, config, words):
    job = take_options(build_parser(verb).parse_args(shlex.split(words)), config)
    line = command_of(verb, job)
    said = shlex.split(line)
    assert said[:2] == ["linearize", verb]
    assert take_options(build_parser(verb).parse_args(said[2:]), config) == job
    assert len(said) <= 2 + len(shlex.split(words)), "nothing that was not given"


def test_a_line_with_changes_and_one_that_travels(tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}")
    path = str(tmp_path / "mine.jsonl")
    job = ConvertJob.of(model=str(tmp_path), dataset=path, output="here", device="cpu", distill_steps=10, resume=True)
    again = command_of("convert", job, {"distill_steps": 20, "overwrite": True})
    assert "--resume" not in again and "--distill-steps 20" in again and "--overwrite" in again
    assert f"--dataset {path}" in again and "--output here" in again
    travels = command_of("convert", job, travels=True)
    assert travels == f"linearize convert {tmp_path.name} --dataset mine.jsonl --distill-steps 10"
    assert data_options(job) == {"dataset": path, "device": "cpu"}
