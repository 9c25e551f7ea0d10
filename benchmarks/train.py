"""One training step of a whole model: with softmax, with kernels, and without attention as the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from linearize.attention.interface import observed
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.models import ModelSuite, side
from linearize.fidelity.teacher import run_body

LEARNING_RATE = 1e-6
"""Small enough that minutes of training steps hardly change a model."""
FIRST = 8
"""Tokens of the warm-up step."""


@dataclass(frozen=True)
class TrainSuite(ModelSuite):
    """One training step of a whole model: forward, backward and AdamW over all weights.

    The loss is the mean square of every other feature of the last hidden states (the mean square of all features is
    constant after a LayerNorm); a task's own loss would cost both sides the same. Dropout is off, because SDPA with
    dropout takes a slower path on the CPU, which would favour the kernels.
    """

    name: ClassVar[str] = "train"
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ("softmax",)

    @property
    def what(self) -> str:
        return f"{self.model.label}, training step, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        model, observer = side(self.model, variant)
        weights = [parameter.requires_grad_(True) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)

        def step(batch: Mapping[str, Tensor]) -> None:
            with observed(model, observer):
                optimizer.zero_grad(set_to_none=False)
                run_body(model, batch).last_hidden_state[..., ::2].float().square().mean().backward()
                optimizer.step()

        # Allocate gradients and moments, as large as the weights on either side, before the timed steps.
        step(self.model.inputs(FIRST))
        return partial(step, self.model.inputs(tokens))
