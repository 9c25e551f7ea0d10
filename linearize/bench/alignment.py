"""One step of the alignment on one sequence, beside what it cannot do without.

- "softmax": a plain forward of the softmax model.
- "passes": the teacher's forward, the student's forward and its backward from the last hidden state: no losses, no
  optimizer.
- "step": an end to end step of `linearize align` (whole blocks trained), optimizer included.
- "blockwise": a blockwise step with kernels alone trained, so that its memory is that of the passes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from linearize.attention.interface import linear_attentions
from linearize.bench.rows import Row, ratio
from linearize.bench.timing import Call
from linearize.bench.whole_model import OfModel

if TYPE_CHECKING:
    from torch import nn

    from linearize.alignment.pair import Pair
    from linearize.alignment.trainer import AlignTrainer


@dataclass(frozen=True)
class AlignmentSuite(OfModel):
    """One step."""

    name: ClassVar[str] = "alignment"
    variants: ClassVar[tuple[str, ...]] = ("softmax", "passes", "step", "blockwise")
    pair: ClassVar[tuple[str, str]] = ("passes", "step")
    memory_variants: ClassVar[tuple[str, ...]] = ("softmax", "passes", "step", "blockwise")

    @property
    def what(self) -> str:
        """See `Suite`."""
        return f"alignment, {self.model.label}, one step, {self.model.dtype}"

    def prepare(self, variant: str, tokens: int) -> Call:
        """See `Suite`."""
        if variant == "softmax":
            return self.model.observed_forward(tokens, lambda *_: None)
        if variant == "passes":
            return self._passes(tokens)
        trainer = self._trainer(variant, tokens)
        batches = itertools.repeat(self.model.inputs(tokens))
        return lambda: trainer.step(batches, 1)

    def _passes(self, tokens: int) -> Call:
        from linearize.alignment.pair import make_pair

        student = self.model.linear
        pair = make_pair(student, None, shared=False)
        parameters = _trained(pair, "blocks")
        batch = self.model.inputs(tokens)

        def call() -> None:
            for parameter in parameters.values():
                parameter.grad = None
            pair.teach(batch, head=False)
            pair.learn(batch, head=False).last.float().square().mean().backward()

        return call

    def _trainer(self, variant: str, tokens: int) -> AlignTrainer:
        from linearize.alignment.config import BLOCKWISE, END_TO_END, AlignConfig
        from linearize.alignment.objective import Objective
        from linearize.alignment.pair import make_pair
        from linearize.alignment.trainer import AlignTrainer
        from linearize.distillation.loop import make_accelerator

        train, phase = ("kernels", BLOCKWISE) if variant == "blockwise" else ("blocks", END_TO_END)
        config = AlignConfig(train=train)
        pair = make_pair(self.model.linear, None, shared=train == "kernels")
        objective = Objective(pair, config)
        objective.measure_scales([self.model.inputs(min(tokens, 64))])
        return AlignTrainer(objective, _trained(pair, train), config, make_accelerator(pair.student), phase, 2)

    def figures(self, row: Row, rate: float) -> dict[str, float | None]:
        """See `Suite`: the step against the passes, and the blockwise step's memory against a plain forward's.

        Memory is allowed the gradients and the optimizer's moments of the kernels beside the forward's.
        """
        kernels = sum(p.nbytes for layer in linear_attentions(self.model.linear).values() for p in layer.parameters())
        forward, blockwise = row.memory("softmax"), row.memory("blockwise")
        allowed = None if forward is None else float(forward + 3 * kernels)
        return {
            "step_over_passes": row.times("step", over="passes"),
            "blockwise_over_passes": row.times("blockwise", over="passes"),
            "blockwise_memory_ratio": ratio(None if blockwise is None else float(blockwise), allowed),
        }


def _trained(pair: Pair, train: str) -> dict[str, nn.Parameter]:
    from linearize.alignment.trainer import trained_parameters

    pair.student.eval().requires_grad_(False)
    found = trained_parameters(pair.student, pair.blocks, train)
    for parameter in found.values():
        parameter.requires_grad_(True)
    return dict(found)
