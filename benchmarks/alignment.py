"""One step of the alignment on one sequence, compared with the passes that it needs in any case.

- "softmax": a plain forward pass of the softmax model.
- "passes": the teacher's forward pass, and the student's forward and backward pass from the last hidden state, without
  losses or optimizer.
- "step": an end-to-end step of `linearize align` (whole blocks trained), including the optimizer.
- "blockwise": a blockwise step that trains only kernels, so that its memory is that of the passes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from linearize.attention.interface import linear_attentions
from linearize.evaluation.bench.meter import Call
from linearize.evaluation.bench.models import OfModel
from linearize.evaluation.bench.rows import Row, ratio
from linearize.training.alignment.config import BLOCKWISE, END_TO_END, AlignConfig
from linearize.training.alignment.loop import trained_parameters
from linearize.training.alignment.objective import Objective
from linearize.training.alignment.pair import make_teacher
from linearize.training.alignment.trainer import AlignTrainer
from linearize.training.sharding import make_accelerator


@dataclass(frozen=True)
class AlignmentSuite(OfModel):
    """One step of the alignment."""

    name: ClassVar[str] = "alignment"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "passes", "step", "blockwise")
    pair: ClassVar[tuple[str, str]] = ("passes", "step")
    memory_variants: ClassVar[tuple[str, ...]] = ("softmax", "passes", "step", "blockwise")

    @property
    def what(self) -> str:
        return f"alignment, {self.model.label}, one step, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        if variant == "softmax":
            return self.model.forward(tokens, observer=lambda *_: None)
        if variant == "passes":
            return self._passes(tokens)
        trainer = self._trainer(variant, tokens)
        batches = itertools.repeat(self.model.inputs(tokens))

        def step() -> None:
            [given], _ = trainer.get_batch_samples(batches, 1, trainer.args.device)
            trainer.training_step(self.model.linear, given)
            trainer._clip_grad_norm(self.model.linear)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        return step

    def _passes(self, tokens: int) -> Call:
        student = self.model.linear
        objective = Objective(student, make_teacher(student, None, shared=False), AlignConfig(logits_weight=0.0))
        parameters = _trained(objective, "blocks")
        batch = self.model.inputs(tokens)

        def call() -> None:
            for parameter in parameters.values():
                parameter.grad = None
            objective.teach(batch)
            objective.learn(batch).last.float().square().mean().backward()

        return call

    def _trainer(self, variant: str, tokens: int) -> AlignTrainer:
        train, phase = ("kernels", BLOCKWISE) if variant == "blockwise" else ("blocks", END_TO_END)
        student = self.model.linear
        teacher = make_teacher(student, None, shared=train == "kernels")
        objective = Objective(student, teacher, AlignConfig(train=train))
        objective.measure_scales([self.model.inputs(min(tokens, 64))])
        return AlignTrainer(objective, _trained(objective, train), make_accelerator(student), phase, 2)

    def figures(self, row: Row) -> dict[str, float | None]:
        """Return the steps' times divided by the passes', and the blockwise step's memory by that of a forward pass.

        The kernels' gradients and optimizer moments are added to the memory of the forward pass.
        """
        kernels = sum(p.nbytes for layer in linear_attentions(self.model.linear).values() for p in layer.parameters())
        forward, blockwise = row.memory("softmax"), row.memory("blockwise")
        return {
            "step_over_passes": row.times("step", over="passes"),
            "blockwise_over_passes": row.times("blockwise", over="passes"),
            "blockwise_memory_ratio": ratio(blockwise, None if forward is None else forward + 3 * kernels),
        }


def _trained(objective: Objective, train: str) -> dict[str, nn.Parameter]:
    objective.student.eval().requires_grad_(False)
    parameters = dict(trained_parameters(objective.student, objective.blocks, train))
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters
