"""The errors of candidates' outputs, and of the whole model's output for a choice of kernels, on held-out data.

The errors of all candidates take one pass of the frozen model. For a choice, the model runs with each layer's output
replaced by the chosen candidate's, so a choice costs one forward pass, and the model is not changed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention, Mask
from linearize.core.errors import ConfigError
from linearize.core.events import Advanced, Callback, ignore
from linearize.fidelity.teacher import frozen_output, show, softmax_output
from linearize.kernel_search.candidates import Candidates, Key
from linearize.kernel_search.table import Choice, Table
from linearize.modeling.plan import SOFTMAX
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.objective import Objective, Share, is_regression, summed
from linearize.training.alignment.pair import Outputs, find_blocks
from linearize.training.processes import autocast

ROUNDING = 1e-10
"""Scores up to this are rounding in fp32: a hidden state that differs by 1e-5 of its norm."""


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


class WholeModel:
    """Tries choices on the whole model.

    Attributes:
        known: errors by choice; each choice is measured only once.
        on_event: called with `Advanced` after every candidate and every choice, once per batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: Candidates,
        held_out: Sequence[Mapping[str, Tensor]],
        accelerator: Accelerator,
        precision: str = "no",
        *,
        head: bool = True,
        on_event: Callback = ignore,
    ) -> None:
        self.model, self.candidates, self.on_event = model, candidates, on_event
        self.held_out = send_to_device(held_out, accelerator.device)
        self.accelerator, self.precision = accelerator, precision
        self.known: dict[Choice, WholeError] = {}
        blocks: dict[str, str] = {}
        with contextlib.suppress(ConfigError):
            # Only the last state is compared: the last block's, in a model without a norm after it.
            blocks = {name: name for name in list(find_blocks(model))[-1:]}
        self.objective = Objective(model, model, AlignConfig(logits_weight=float(head)), blocks)

    @property
    def figure(self) -> str:
        """Name of the error figure, for display."""
        if all(error.logits is None for error in self.known.values()):
            return "last hidden state"
        return "logits, share of variance" if is_regression(self.model.config) else "logits, nats"

    @torch.no_grad()
    def errors_of(self, keys: Iterable[Key]) -> dict[Key, float]:
        """Return the errors of candidates' outputs: the norm of the difference from softmax's, over softmax's norm.

        Args:
            keys: the candidates to measure, which are left in evaluation mode.

        Returns:
            The errors, infinite or NaN if an output is. All processes measure all of the data, so their errors are
            equal.
        """
        modules = {key: self.candidates.modules[key].eval() for key in keys}
        error, power = dict.fromkeys(modules, 0.0), dict.fromkeys(self.candidates.hosts, 0.0)
        done, total = itertools.count(1), len(modules) * len(self.held_out)

        def visit(
            name: str, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
        ) -> Tensor | None:
            number = self.candidates.number_of[id(layer)]
            target = softmax_output(layer, q.float(), k.float(), v.float(), mask, scaling)
            padding = None if mask is None else ~mask[:, None, :, None].bool()
            power[number] += _square_sum(target, padding)
            for key in (key for key in modules if key[0] == number):
                error[key] += _square_sum(modules[key](q, k, v, mask, scaling).float() - target, padding)
                # A layer that stands in several places of the model is visited more often.
                self.on_event(Advanced(min(next(done), total), total))
            # The host itself would build a T x T mask from the causal mask and the padding.
            return target.to(v.dtype) if layer.shape.causal else None

        with autocast(self.accelerator, self.precision):
            show(self.model, self.held_out, visit)
        return {key: math.sqrt(value / max(power[key[0]], 1e-30)) for key, value in error.items()}

    @torch.no_grad()
    def errors(self, choices: Sequence[Choice]) -> list[WholeError]:
        """Return the errors of choices; the original runs once per batch for all new ones.

        All processes measure all of the data, so their errors are equal.
        """
        objective, new = self.objective, [choice for choice in dict.fromkeys(choices) if choice not in self.known]
        done = itertools.count(1)

        def terms(batch: Mapping[str, Tensor], share: Share) -> dict[tuple[Choice, str], Tensor]:
            original, found = objective.teach(batch), {}
            for choice in new:
                of_choice = objective.terms_of(self._run(batch, choice), original, share)
                found.update({(choice, name): term for name, term in of_choice.items()})
                self.on_event(Advanced(next(done), len(new) * len(self.held_out)))
            return found

        if new:
            with autocast(self.accelerator, self.precision):
                if not objective.scales:
                    objective.measure_scales(self.held_out)
                sums = summed(terms, self.held_out)
        for choice in new:
            figures = objective.closeness({name: term for (of, name), term in sums.items() if of == choice})
            self.known[choice] = WholeError(list(figures.layers.values())[-1], figures.cosine, figures.logits)
        return [self.known[choice] for choice in choices]

    def decide(self, table: Table, labels: Choice, *others: Choice | None) -> Choice:
        """Return the choice with the smallest error of the whole model.

        Errors of single layers misrank choices, as their effect on the output depends on all later layers. So each
        layer's errors are weighted by the effect of one of its candidates alone: the whole model's error with only this
        layer replaced, over the layer's own. The best choice by weighted errors is tried on the whole model, along with
        others and with one kernel in every layer.

        Args:
            table: a table with the errors of the candidates; its weights are set.
            labels: the candidate of each layer to weigh it by.
            *others: other choices to try, such as the best by plain errors; None is ignored.
        """
        softmax = (SOFTMAX,) * len(labels)
        alone = [(*softmax[:place], label, *softmax[place + 1 :]) for place, label in enumerate(labels)]
        for (number, row), label, whole in zip(table.rows.items(), labels, self.errors(alone), strict=True):
            own = (row[label].error or 0.0) ** 2
            table.weights[number] = whole.score / own if own > 0 else 0.0
        tried = (*others, table.best(), *table.uniform())
        choices = [choice for choice in tried if choice is not None]
        # Of choices whose error is only rounding, the first: rounding says nothing about them.
        return min(zip(self.errors(choices), choices, strict=True), key=lambda pair: max(pair[0].score, ROUNDING))[1]

    def _run(self, batch: Mapping[str, Tensor], choice: Choice) -> Outputs:
        """Run the frozen model with the chosen candidates' outputs in place of its layers'."""
        labels = dict(zip(self.candidates.hosts, choice, strict=True))

        def observe(
            layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float
        ) -> Tensor | None:
            number = self.candidates.number_of[id(layer)]
            if labels[number] == SOFTMAX:
                return frozen_output(layer, q, k, v, mask, scaling)
            return self.candidates.modules[number, labels[number]](q, k, v, mask, scaling)

        with observed(self.model, observe):
            return self.objective.learn(batch)


def _square_sum(values: Tensor, padding: Tensor | None) -> float:
    """Sum the squares outside the padding, which is filled, not multiplied, with 0, as it may hold NaN."""
    squares = values.square() if padding is None else values.square().masked_fill(padding, 0.0)
    return float(squares.sum())
