"""Steps of stage two: reported one by one, cut into passes, and with activations that are computed again."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import make_original, make_text, texts
from support.command_lines import run

from linearize.checkpoint.loading import load_processor
from linearize.training.stage_two import hooks
from linearize.training.stage_two.config import DataOptions, TuneConfig
from linearize.training.stage_two.load import load_for_task
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.tasks import task
from linearize.training.stage_two.trainer import checkpointing, finetune

TASK = "--task text-classification --dataset texts.jsonl --columns text --max-length 16 --batch-size 8 --device cpu"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("steps")
    texts(root, 48)
    make_text(root / "linear")
    make_original(root / "gpt2", "gpt2", "AutoModelForCausalLM")
    return root


def tuned(place, folder, name="linear", kind="text-classification", dropout=0.1, **options):
    columns = ("text",)
    data = prepare(
        task(kind, columns=columns), load_processor(str(place / name), "text"), DataOptions(max_length=16),
        data=str(place / "texts.jsonl"),
    )  # fmt: skip
    model = load_for_task(str(place / name), data)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            # Other passes draw other masks.
            module.p = dropout
    steps = []
    config = replace(TuneConfig(learning_rate=1e-2, batch_size=8, steps=6, eval_every=3, log_every=2), **options)
    result = finetune(model, data, config, folder=folder, on_step=steps.append)
    return {n: p.clone() for n, p in model.state_dict().items()}, steps, result


def test_every_step_is_reported_with_its_loss(place, tmp_path):
    _, steps, result = tuned(place, tmp_path / "a")
    assert [(one.step, one.steps) for one in steps] == [(step, 6) for step in range(1, 7)]
    logged = [one["loss"] for one in result.history if "loss" in one]
    means = [(steps[i].loss + steps[i + 1].loss) / 2 for i in (0, 2, 4)]
    assert logged == pytest.approx(means, abs=1e-3)
    assert steps[-1].left == 0 and all(one.left > 0 for one in steps[:-1])
    assert [one.seconds for one in steps] == sorted(one.seconds for one in steps)


def test_measuring_the_start_says_nothing_about_the_time_left(place, tmp_path, monkeypatch):
    clock = iter(range(9))
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(hooks.Tuner, "keep_start", lambda self: [next(clock) for _ in range(2)])
    _, steps, _ = tuned(place, tmp_path / "a", selection_rows=8)
    assert [(one.seconds, one.left) for one in steps] == [(step, 6 - step) for step in range(1, 7)]


@pytest.mark.sampled("one")
@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "text-classification"), ("gpt2", "causal-lm")], ids=["linear", "softmax"]
)
def test_passes_add_up_to_the_step(place, tmp_path, name, kind):
    """The rows of a step in one pass or in four: the same losses and weights, within rounding."""
    whole, one, _ = tuned(place, tmp_path / "a", name, kind, 0.0, batch_size=8)
    parts, four, _ = tuned(place, tmp_path / "b", name, kind, 0.0, batch_size=2, gradient_accumulation=4)
    assert [s.loss for s in four] == pytest.approx([s.loss for s in one], rel=1e-4)
    assert len(four) == len(one) == 6
    for key, value in whole.items():
        assert torch.allclose(value, parts[key], atol=2e-4), key


@pytest.mark.sampled("one")
@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "text-classification"), ("gpt2", "causal-lm")], ids=["linear", "softmax"]
)
def test_checkpointing_changes_no_bit(place, tmp_path, name, kind):
    plain, _, _ = tuned(place, tmp_path / "a", name, kind)
    again, _, _ = tuned(place, tmp_path / "b", name, kind, gradient_checkpointing=True)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


def test_checkpointing_computes_again_and_is_turned_off_afterwards(place):
    data = prepare(
        task("text-classification", columns=("text",)), load_processor(str(place / "linear"), "text"),
        DataOptions(max_length=16), data=str(place / "texts.jsonl"),
    )  # fmt: skip
    model = load_for_task(str(place / "linear"), data).train()
    batch = data.collate([data.train[0], data.train[1]])
    calls = []
    layer = model.get_submodule("bert.encoder.layer.0.attention.self")
    layer.register_forward_hook(lambda *_: calls.append(1))
    with checkpointing(model, True):
        model(**batch).loss.backward()
    assert len(calls) == 2 and not model.is_activation_checkpointing
    calls.clear()
    with checkpointing(model, False):
        model(**batch).loss.backward()
    assert len(calls) == 1


def test_a_model_without_checkpointing_is_refused(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("transformers.BertPreTrainedModel.supports_gradient_checkpointing", False)
    code, _, err = run(
        capsys, "finetune", "linear", *TASK.split(), "--output", tmp_path / "out", "--gradient-checkpointing"
    )
    assert code == 2 and err.count("\n") == 1
    assert re.search(r"gradient_checkpointing: .* does not support it; .*gradient_accumulation", err)
    assert list(tmp_path.iterdir()) == []


def test_fp16_on_a_cpu_is_refused(place, tmp_path, capsys, monkeypatch):
    """It was trained in fp32 without a word."""
    monkeypatch.chdir(place)
    line = f"finetune linear {TASK} --device cpu --precision fp16 --output {tmp_path / 'out'}"
    code, _, err = run(capsys, *line.split())
    assert code == 2 and err.count("\n") == 1 and "got fp16 on a CPU" in err and "expected bf16 or no" in err
    assert list(tmp_path.iterdir()) == []


def test_a_log_says_how_long_it_has_to_go(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    line = f"finetune linear {TASK} --steps 6 --eval-every 3 --log-every 2 --output {tmp_path / 'out'}"
    code, out, err = run(capsys, *line.split())
    assert code == 0, err
    assert re.search(r"^step 1/6, \d+ s, \d+ s left, [\d,]+ tokens/s: loss 0\.\d{4}$", out, re.MULTILINE)
    assert re.search(r"^step 4/6, \d+ s, \d+ s left, [\d,]+ tokens/s: loss 0\.\d+, gradient norm ", out, re.MULTILINE)
    assert re.search(r"^step 3/6, \d+ s, \d+ s left, [\d,]+ tokens/s: validation loss ", out, re.MULTILINE)
