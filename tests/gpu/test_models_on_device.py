"""Tiny models on a device: converted, trained, saved and reloaded there, and decoded."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from support.checkpoints import make_original, texts
from support.generation import GREEDY, causal, generate_and_check, prompts
from support.tiny import converted, inputs_of, outputs
from support.training import ALIGN, Fixed, batches, loud_converted, sharp

import linearize
from linearize.cli import main
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill

# On the CPU a few cases say that the tests are right; `make gpu` runs them all.
pytestmark = pytest.mark.sampled("values")
MODELS = [("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForCausalLM"), ("vit", "AutoModel")]


def moved(inputs, device):
    return {name: value.to(device) for name, value in inputs.items()}


@pytest.mark.parametrize(("name", "head"), MODELS)
def test_the_output_is_that_of_the_cpu(name, head, device):
    model = converted(name, head)
    inputs = inputs_of(model)
    wanted = outputs(model, inputs)
    found = outputs(model.to(device), moved(inputs, device))
    for one, other in zip(found, wanted, strict=True):
        assert one.device.type == device.type
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "head"), MODELS)
def test_saved_and_reloaded_to_the_bit(name, head, device, dtype, tmp_path):
    """Weights saved from the device come back unchanged, and there give the very same output."""

    def load(folder):
        return getattr(transformers, head).from_pretrained(tmp_path / folder, dtype=dtype).to(device).eval()

    linearize.save(converted(name, head).to(device), tmp_path / "first")
    model = load("first")
    linearize.save(model, tmp_path / "second")
    again = load("second")
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    inputs = moved(inputs_of(model), device)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    for one, other in zip(outputs(model, inputs), outputs(again, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_greedy_generation_equals_full_forwards(name, device):
    model, inputs = causal(name).to(device), moved(prompts(), device)
    generate_and_check(model, inputs, **GREEDY)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_stage_one_and_alignment_come_closer(name, device):
    head = "AutoModelForCausalLM" if name == "gpt2" else "AutoModel"
    model = sharp(name, head).to(device)
    found = distill(model, Fixed(batches(model)), DistillConfig(steps=30, eval_every=10))
    assert found.after.mean("kl") < 0.85 * found.before.mean("kl")
    model = loud_converted(name, head).to(device)
    result = align(model, Fixed(batches(model)), AlignConfig(**ALIGN))
    assert result.after.loss < 0.8 * result.before.loss
    assert all(parameter.device.type == device.type for parameter in model.parameters())


def test_the_command_line_converts_and_aligns(device, tmp_path, capsys):
    make_original(tmp_path / "bert", "bert", "AutoModelForMaskedLM")
    words = ["convert", tmp_path / "bert", "--dataset", texts(tmp_path, 40), "--text-column", "text", "--json"]
    words += ["--distill-steps", 6, "--align-steps", 4, "--distill-length", 16, "--batch-size", 4, "--holdout", 8]
    code = main([str(word) for word in [*words, "--device", device, "--output", tmp_path / "out"]])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert found["distillation"]["steps"] == 6 and found["alignment"]["steps"] == 4
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").to(device)
    assert all(torch.isfinite(x).all() for x in outputs(model, moved(inputs_of(model), device)))
