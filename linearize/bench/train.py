"""One training step of a whole model: forward, backward and AdamW over all weights, softmax through SDPA and kernels.

The loss is the mean square of every other feature of the last hidden states (that of all is constant behind a
LayerNorm): any loss of the task's own costs both sides alike. Dropout is off, because SDPA with dropout takes a slower
path on the CPU, which would flatter the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from linearize.attention.interface import observed
from linearize.attention.layer import Observer
from linearize.bench.models import values_only
from linearize.bench.timing import Call
from linearize.bench.whole_model import ModelSuite

LEARNING_RATE = 1e-6
"""Small enough that a model which is measured for minutes stays what it is."""
FIRST = 8
"""Tokens of the step before the first that counts."""


@dataclass(frozen=True)
class TrainSuite(ModelSuite):
    """One step."""

    name: ClassVar[str] = "train"
    may_run_out_of_memory: ClassVar[tuple[str, ...]] = ("softmax",)

    @property
    def what(self) -> str:
        """See `Suite`."""
        return f"{self.model.label}, training step, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`."""
        from linearize.teacher.observe import run_body

        softmax = variant == "softmax"
        model = self.model.original if softmax and not self.model.converted else self.model.linear
        # Of a converted checkpoint its own weights compute softmax: an observer that gives nothing leaves it to SDPA.
        observers: dict[str, Observer] = {"softmax": lambda *_: None, "no attention": values_only}
        observer = observers.get(variant)
        weights = [parameter.requires_grad_(True) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)

        def step(batch: Mapping[str, Tensor]) -> None:
            with observed(model, observer):
                optimizer.zero_grad(set_to_none=False)
                run_body(model, batch).last_hidden_state[..., ::2].float().square().mean().backward()
                optimizer.step()

        # Gradients and moments, as large as the weights on either side, are there before the first step that counts.
        step(self.model.inputs(FIRST))
        return functools.partial(step, self.model.inputs(tokens))
