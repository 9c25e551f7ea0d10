"""Whole models on held-out data: what a choice of kernels does to the output, with nothing put into the model.

The frozen model runs with each layer's output replaced by the chosen candidate's, so that a choice costs no more than a
forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from linearize.alignment.losses import divergence, masked_rows, pooled
from linearize.alignment.objective import flat, is_regression
from linearize.alignment.pair import Block, Outputs, find_blocks, run
from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.distillation.processes import autocast
from linearize.errors import ConfigError
from linearize.kernel_search.trainer import Bench
from linearize.modeling.plan import SOFTMAX
from linearize.teacher.observe import body_of, softmax_output

Choice = tuple[str, ...]
"""One label per layer, or "softmax"."""


@dataclass(frozen=True)
class WholeError:
    """A choice against the original, on held-out data.

    Attributes:
        hidden: last hidden state: norm of the difference over that of the original's spread around its mean.
        cosine: mean cosine of the pooled outputs (means over the tokens of a row).
        logits: mean divergence of the logits in nats, or share of their variance where they are numbers; None where the
            model has no head.
    """

    hidden: float
    cosine: float
    logits: float | None = None

    @property
    def score(self) -> float:
        """What choices are compared by: the logits' divergence, else the squared error of the hidden state."""
        found = self.hidden**2 if self.logits is None else self.logits
        return found if math.isfinite(found) else math.inf

    @property
    def error(self) -> float:
        """The same as people read it: the divergence, or the hidden state's error."""
        return self.hidden if self.logits is None else self.logits


class _Sums:
    """What is added up over batches for one choice."""

    def __init__(self) -> None:
        self.error = self.cosine = self.logits = 0.0

    def result(self, total: _Totals) -> WholeError:
        hidden = math.sqrt(self.error / total.spread) if total.spread > 0 and self.error >= 0 else math.nan
        logits = None
        if total.predictions:
            logits = self.logits / (total.logit_spread if total.numbers else total.predictions)
        return WholeError(hidden, self.cosine / max(total.rows, 1), logits)


class _Totals:
    """What is added up over batches for the original."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.square = 0.0
        self.tokens = self.rows = self.predictions = 0
        self.numbers = False
        self.logit_sum = self.logit_square = 0.0

    def add(self, taught: Outputs) -> None:
        rows = masked_rows(flat(taught.last), taught.mask).double()
        self.sum = rows.sum(dim=0) if self.sum is None else self.sum + rows.sum(dim=0)
        self.square += float(rows.square().sum())
        self.tokens += len(rows)
        self.rows += len(taught.last)

    @property
    def spread(self) -> float:
        """Sum of the squared distances of the states from their mean."""
        if self.sum is None:
            return 0.0
        return self.square - float(self.sum.square().sum()) / max(self.tokens, 1)

    @property
    def logit_spread(self) -> float:
        return max(self.logit_square - self.logit_sum**2 / max(self.predictions, 1), 1e-12)


class WholeModel:
    """Tries choices on the whole model.

    Attributes:
        known: errors by choice; each is measured once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bench: Bench,
        held_out: Iterable[Mapping[str, Tensor]],
        accelerator: Accelerator,
        precision: str = "no",
    ) -> None:
        self.model, self.bench, self.held_out = model, bench, list(held_out)
        self.accelerator, self.precision = accelerator, precision
        self.head = body_of(model) is not model
        self.numbers = is_regression(model.config)
        self.known: dict[Choice, WholeError] = {}
        self.blocks: list[Block] = []
        with contextlib.suppress(ConfigError):
            self.blocks = find_blocks(model)[-1:]

    @torch.no_grad()
    def errors(self, choices: Sequence[Choice]) -> list[WholeError]:
        """Return the errors of choices; the original is run once per batch for all that are new.

        Nothing is kept of a batch. All processes measure all of the data, and find the same.
        """
        new = [one for one in dict.fromkeys(choices) if one not in self.known]
        sums, total = {one: _Sums() for one in new}, _Totals()
        if new:
            for module in self.bench.modules.values():
                module.eval()
            for batch in self.held_out:
                self._batch({name: x.to(self.accelerator.device) for name, x in batch.items()}, sums, total)
            self.known |= {one: found.result(total) for one, found in sums.items()}
        return [self.known[one] for one in choices]

    def _batch(self, batch: Mapping[str, Tensor], sums: Mapping[Choice, _Sums], total: _Totals) -> None:
        with self._as(None):
            taught = run(self.model, self.blocks, batch, head=self.head)
        total.add(taught)
        total.numbers = self.numbers and bool(taught.logits)
        for name, logits in taught.logits.items():
            rows = self._predictions(name, taught, logits)
            total.predictions += len(rows)
            if total.numbers:
                total.logit_sum += float(rows.double().sum())
                total.logit_square += float(rows.double().square().sum())
        for choice, found in sums.items():
            with self._as(choice):
                learned = run(self.model, self.blocks, batch, head=self.head)
            self._add(found, learned, taught)

    def _add(self, found: _Sums, learned: Outputs, taught: Outputs) -> None:
        mine, target = (masked_rows(flat(side.last), taught.mask) for side in (learned, taught))
        found.error += float((mine - target).double().square().sum())
        one, two = (pooled(flat(side.last), taught.mask) for side in (learned, taught))
        found.cosine += float(torch.nn.functional.cosine_similarity(one, two, dim=-1).sum())
        for name, logits in taught.logits.items():
            first, second = (self._predictions(name, taught, x) for x in (learned.logits[name], logits))
            if self.numbers:
                found.logits += float((first.double() - second.double()).square().sum())
            else:
                found.logits += float(divergence(first, second))

    @staticmethod
    def _predictions(name: str, taught: Outputs, logits: Tensor) -> Tensor:
        """Return logits [N, V] of what is predicted: rows, or the tokens that are no padding."""
        mask = taught.mask
        if mask is not None and logits.shape == mask.shape:
            # One logit per token, of which one is chosen (the start of an answer): padding cannot be.
            return logits.float().masked_fill(~mask.bool(), -1e4)
        return masked_rows(logits, mask)

    @contextlib.contextmanager
    def _as(self, choice: Choice | None) -> Iterator[None]:
        """Have the frozen model's layers give a choice's outputs while the block runs; None: softmax's."""
        labels = dict(zip(self.bench.hosts, choice or (), strict=False))

        def observe(
            layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
        ) -> Tensor | None:
            number = self.bench.number_of[id(layer)]
            label = labels.get(number, SOFTMAX)
            if label != SOFTMAX:
                return self.bench.modules[number, label](q, k, v, mask, scaling)
            # The host's own way would make a T x T mask of a causal one with padding.
            return softmax_output(layer, q, k, v, mask, scaling) if layer.shape.causal else None

        with observed(self.model, observe), autocast(self.accelerator, self.precision):
            yield
