"""The errors of candidates' outputs, and of the whole model's output for a choice of kernels, on held-out data.

The errors of all candidates take one pass of the frozen model. For a choice, the model runs with each layer's output
replaced by the chosen candidate's, so a choice costs one forward pass, and the model is not changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention
from linearize.core.errors import ConfigError
from linearize.fidelity.teacher import body_of, frozen_output, show, softmax_output
from linearize.kernel_search.candidates import Candidates, Key
from linearize.kernel_search.table import Choice, Table
from linearize.modeling.plan import SOFTMAX
from linearize.training.alignment.objective import FAR_BELOW, divergence, flat, is_regression, masked_rows, pooled
from linearize.training.alignment.pair import Outputs, find_blocks, run
from linearize.training.stage_one.processes import autocast


@dataclass(frozen=True)
class WholeError:
    """A choice compared with the original, on held-out data.

    Attributes:
        hidden: error of the last hidden state: norm of the difference, divided by the norm of the original's deviation
            from its mean.
        cosine: mean cosine of the pooled outputs (means over the tokens of a row).
        logits: mean divergence of the logits in nats, or for regression the error as a share of their variance; None
            if the model has no head.
    """

    hidden: float
    cosine: float
    logits: float | None = None

    @property
    def score(self) -> float:
        """Score for comparing choices: the logits' divergence, or else the squared error of the hidden state."""
        score = self.hidden**2 if self.logits is None else self.logits
        return score if math.isfinite(score) else math.inf

    @property
    def error(self) -> float:
        """Figure for display: the logits' divergence, or else the error of the hidden state."""
        return self.hidden if self.logits is None else self.logits


class _Moments:
    """Count, sum and sum of squares of vectors [N, C], accumulated over batches."""

    def __init__(self) -> None:
        self.count, self.square = 0, 0.0
        self.sum: Tensor | float = 0.0

    def add(self, vectors: Tensor) -> None:
        vectors = vectors.double()
        self.count += len(vectors)
        self.sum = self.sum + vectors.sum(dim=0)
        self.square += float(vectors.square().sum())

    @property
    def spread(self) -> float:
        """Sum of the squared distances from the mean."""
        return self.square - float(torch.as_tensor(self.sum).square().sum()) / max(self.count, 1)


class WholeModel:
    """Tries choices on the whole model.

    Attributes:
        known: errors by choice; each choice is measured only once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: Candidates,
        held_out: Iterable[Mapping[str, Tensor]],
        accelerator: Accelerator,
        precision: str = "no",
    ) -> None:
        self.model, self.candidates, self.held_out = model, candidates, list(held_out)
        self.accelerator, self.precision = accelerator, precision
        self.head = body_of(model) is not model
        self.numbers = is_regression(model.config)
        self.known: dict[Choice, WholeError] = {}
        self.blocks: list[str] = []
        with contextlib.suppress(ConfigError):
            self.blocks = list(find_blocks(model))[-1:]

    @property
    def figure(self) -> str:
        """Name of the error figure, for display."""
        if all(error.logits is None for error in self.known.values()):
            return "last hidden state"
        return "logits, share of variance" if self.numbers else "logits, nats"

    @torch.no_grad()
    def errors_of(self, keys: Iterable[Key]) -> dict[Key, float]:
        """Return the errors of candidates' outputs: the norm of the difference from softmax's, over softmax's norm.

        Args:
            keys: the candidates to measure, which are left in evaluation mode.

        Returns:
            The errors, infinite or NaN if an output is. All processes measure all of the data, so their errors are
            equal.
        """
        of_layer: dict[int, list[Key]] = {}
        for key in keys:
            self.candidates.modules[key].eval()
            of_layer.setdefault(key[0], []).append(key)
        error = {key: torch.zeros((), dtype=torch.float64) for row in of_layer.values() for key in row}
        power = {number: torch.zeros((), dtype=torch.float64) for number in of_layer}

        def visit(
            name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
        ) -> Tensor | None:
            number = self.candidates.number_of[id(layer)]
            target = softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
            padding = None if mask is None else ~mask[:, None, :, None].bool()
            power[number] += _square_sum(target, padding)
            for key in of_layer[number]:
                out = self.candidates.modules[key](q, k, v, mask, scaling).float()
                error[key] += _square_sum(out - target, padding)
            # The host itself would build a T x T mask from the causal mask and the padding.
            return target.to(v.dtype) if layer.shape.causal else None

        with autocast(self.accelerator, self.precision):
            show(self.model, self.held_out, visit)
        return {key: float((value / power[key[0]].clamp(min=1e-30)).sqrt()) for key, value in error.items()}

    @torch.no_grad()
    def errors(self, choices: Sequence[Choice]) -> list[WholeError]:
        """Return the errors of choices; the original runs once per batch for all new ones.

        All processes measure all of the data, so their errors are equal.
        """
        new = [choice for choice in dict.fromkeys(choices) if choice not in self.known]
        if not new:
            return [self.known[choice] for choice in choices]
        rows, states, predictions = 0, _Moments(), _Moments()
        sums = torch.zeros(len(new), 3, dtype=torch.float64)
        for batch in self.held_out:
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            original = self._run(batch, (SOFTMAX,) * len(self.candidates.hosts))
            rows += len(original.last)
            states.add(masked_rows(flat(original.last), original.mask))
            for logits in original.logits.values():
                predictions.add(_predictions(logits, original.mask))
            for place, choice in enumerate(new):
                sums[place] += self._compare(self._run(batch, choice), original)
        divisor = max(predictions.spread, 1e-12) if self.numbers else predictions.count
        for choice, (squares, cosine, error) in zip(new, sums.tolist(), strict=True):
            hidden = math.sqrt(squares / states.spread) if states.spread > 0 and squares >= 0 else math.nan
            self.known[choice] = WholeError(
                hidden, cosine / max(rows, 1), error / divisor if predictions.count else None
            )
        return [self.known[choice] for choice in choices]

    def decide(self, table: Table, labels: Choice, limit: float, softmax: int, *others: Choice | None) -> Choice:
        """Return the choice with the smallest error of the whole model.

        Errors of single layers misrank choices, as their effect on the output depends on all later layers. So each
        layer's errors are weighted by the effect of one of its candidates alone (`weigh`), and the best choice by
        weighted errors is tried on the whole model, along with others and with one kernel in every layer.

        Args:
            table: a table with the errors of the candidates.
            labels: the candidate of each layer to weigh it by.
            limit: maximum cost.
            softmax: maximum number of layers that may stay softmax.
            *others: other choices to try, such as the best by plain errors; None is ignored.
        """
        self.weigh(table, labels)
        tried = (table.best(limit, softmax), *others, *table.uniform(limit))
        choices = [choice for choice in tried if choice is not None]
        return min(zip(self.errors(choices), choices, strict=True), key=lambda pair: pair[0].score)[1]

    def weigh(self, table: Table, labels: Choice) -> None:
        """Set each layer's weight in a table: the error with only this layer replaced, over the layer's own.

        Args:
            table: a table with the errors of these candidates.
            labels: the candidate of each layer.
        """
        softmax = (SOFTMAX,) * len(labels)
        alone = [(*softmax[:place], label, *softmax[place + 1 :]) for place, label in enumerate(labels)]
        for (number, row), label, whole in zip(table.rows.items(), labels, self.errors(alone), strict=True):
            own = (row[label].error or 0.0) ** 2
            table.weights[number] = whole.score / own if own > 0 else 0.0

    def _compare(self, replaced: Outputs, original: Outputs) -> Tensor:
        """Return a batch's sums: squared error of the hidden states, cosine, and error of the logits."""
        mask = original.mask
        states, targets = (flat(outputs.last) for outputs in (replaced, original))
        squares = (masked_rows(states, mask) - masked_rows(targets, mask)).double().square().sum()
        cosine = cosine_similarity(pooled(states, mask), pooled(targets, mask), dim=-1).sum()
        error = 0.0
        for name, logits in original.logits.items():
            first, second = (_predictions(x, mask) for x in (replaced.logits[name], logits))
            error += float((first - second).double().square().sum() if self.numbers else divergence(first, second))
        return torch.tensor([float(squares), float(cosine), error], dtype=torch.float64)

    def _run(self, batch: Mapping[str, Tensor], choice: Choice) -> Outputs:
        """Run the frozen model with the chosen candidates' outputs in place of its layers'."""
        labels = dict(zip(self.candidates.hosts, choice, strict=True))

        def observe(
            layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
        ) -> Tensor | None:
            number = self.candidates.number_of[id(layer)]
            if labels[number] == SOFTMAX:
                return frozen_output(layer, q, k, v, mask, scaling)
            return self.candidates.modules[number, labels[number]](q, k, v, mask, scaling)

        with observed(self.model, observe), autocast(self.accelerator, self.precision):
            return run(self.model, self.blocks, batch, head=self.head)


def _square_sum(values: Tensor, padding: Tensor | None) -> Tensor:
    """Sum the squares outside the padding, which is filled, not multiplied, with 0, as it may hold NaN."""
    squares = values.square() if padding is None else values.square().masked_fill(padding, 0.0)
    return squares.sum().double().cpu()


def _predictions(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits [N, V] of the predictions: one per row, or one per token outside the padding."""
    if mask is not None and logits.shape == mask.shape:
        # One logit per token, from which one token is chosen (the start of an answer), which is never padding.
        return logits.float().masked_fill(~mask.bool(), FAR_BELOW)
    return masked_rows(logits, mask)
