"""Apple's GPUs have no fp64, so it may be used on the CPU only: here, tensors that were not moved there refuse it."""

from __future__ import annotations

import pytest
import torch
from support.tiny import inputs_of, original
from support.training import ALIGN, Fixed, batches, sharp
from torch import Tensor

from linearize.fidelity import measure
from linearize.fidelity.ablate import kernel_merit
from linearize.fidelity.heads import keep_heads
from linearize.modeling.plan import Plan
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.loop import align
from linearize.training.stage_one import DistillConfig
from linearize.training.stage_one.loop import distill


class OnCPU(Tensor):
    """The result of `.cpu()`, and what is computed from it."""


@pytest.fixture
def no_fp64(monkeypatch):
    made, moved, doubled = torch.tensor, Tensor.cpu, Tensor.double

    def double(x):
        if not isinstance(x, OnCPU):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return doubled(x)

    def tensor(*values, dtype=None, device=None, **options):
        assert dtype != torch.float64 or device is None
        return made(*values, dtype=dtype, device=device, **options)

    monkeypatch.setattr(Tensor, "cpu", lambda x: moved(x).as_subclass(OnCPU))
    monkeypatch.setattr(Tensor, "double", double)
    monkeypatch.setattr(torch, "tensor", tensor)


@pytest.mark.usefixtures("no_fp64")
def test_conversion_training_and_measurements_use_fp64_on_the_cpu_only():
    model = sharp("llama", "AutoModelForCausalLM", window=3)
    data = Fixed(batches(model))
    distilled = distill(model, data, DistillConfig(steps=4))
    assert distilled.after.mean("kl") is not None
    aligned = align(model, data, AlignConfig(**ALIGN | {"steps": 4}))
    assert aligned.steps == 4
    assert measure(original("llama", "AutoModelForCausalLM"), model, [inputs_of(model)]).outputs is not None
    assert kernel_merit(model, [inputs_of(model)]) is not None
    kept = keep_heads(model, Plan.from_dict(model.config.linearize), 1, [inputs_of(model)], lambda event: None)
    assert sum(len(layer.hybrid.softmax_heads) for layer in kept.converted) == 1
