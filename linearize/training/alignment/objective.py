"""A student's error on a batch: end to end against the teacher's outputs, or block by block on the teacher's inputs.

Every term is a mean over the batch's tokens or rows, times the batch's share of the tokens or rows of the whole step.
So the gradient is that of one mean over the step, however it is split over batches or processes. Squared errors are
divided by the teacher's variances on held-out data, which stay fixed. `measure` sums the terms over held-out data.

Hidden states follow CALD (ICLR 2025, arXiv 2410.06846) and the second stage of MOHAWK (arXiv 2408.10189), logits
Hinton et al. 2015 (arXiv 1503.02531). An error divided by the variance is the unexplained share, which is comparable
across layers and models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.attention.interface import observed
from linearize.core.errors import DataError
from linearize.fidelity.teacher import run_body
from linearize.modeling.compat import unrecorded
from linearize.training.alignment.config import AlignConfig
from linearize.training.alignment.pair import OUTPUT, Outputs, find_blocks, hooked, keeper, noting, run, state_of

Name = TypeVar("Name")
TINY = 1e-12
LOGITS_AT_ONCE = 1 << 24
"""Most log-probabilities in memory at once (64 MiB of fp32); larger inputs are computed in chunks."""


def masked_rows(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the vectors [N, C] of `states` [B, ..., C] in fp32: with a mask [B, T] only those of tokens."""
    if mask is not None and states.ndim == 3 and mask.shape == states.shape[:2]:
        return states[mask.bool()].float()
    return states.flatten(0, -2).float()


def variance(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the variance of `states` [B, T, C] around their mean vector, summed over channels: a scalar."""
    rows = masked_rows(states, mask)
    return (rows - rows.mean(dim=0)).square().sum(dim=-1).mean().clamp(min=TINY)


def _moments(rows: Tensor) -> Tensor:
    """Return the number of vectors [N, C], the sum of their squares, and their sum, as one vector in fp64."""
    mean, count = rows.mean(dim=0), float(len(rows))
    around = float((rows - mean).square().sum())
    mean = mean.cpu().double()
    both = torch.tensor([count, around + count * float(mean.square().sum())], dtype=torch.float64)
    return torch.cat([both, count * mean])


def relative_error(student: Tensor, teacher: Tensor, mask: Tensor | None, scale: Tensor | float) -> Tensor:
    """Return the mean over tokens (mask [B, T]) of the squared difference of two states [B, T, C], over `scale`."""
    mine, target = masked_rows(student, mask), masked_rows(teacher, mask)
    return (mine - target).square().sum() / (max(len(target), 1) * scale)


def hidden_state_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean over layers of the hidden states' squared error, divided by the variance of the teacher's.

    Args:
        student: one state [B, T, C] per layer.
        teacher: the teacher's states, of the same shapes.
        mask: [B, T], true at tokens; None if there is no padding.

    Returns:
        A scalar: 0 if all are equal, 1 if the student knows no more than the teacher's mean.
    """
    pairs = zip(student, teacher, strict=True)
    return torch.stack([relative_error(mine, target, mask, variance(target, mask)) for mine, target in pairs]).mean()


def pooled(states: Tensor, mask: Tensor | None, how: str = "mean") -> Tensor:
    """Return the "mean" of states [B, T, C] over the tokens of a row (mask [B, T]), the "first" or the "last": [B, C].

    The result is in fp32.
    """
    states = states.float()
    if mask is not None and mask.shape != states.shape[:2]:
        mask = None
    if how != "mean":
        last, rows = how == "last", torch.arange(len(states), device=states.device)
        mask = torch.ones(states.shape[:2], device=states.device) if mask is None else mask
        place = (mask.flip(1) if last else mask).long().argmax(dim=1)
        return states[rows, states.shape[1] - 1 - place if last else place]
    if mask is None:
        return states.mean(dim=1)
    keep = mask.bool()[..., None]
    # Filled, not multiplied by zero: padding may hold NaN.
    return states.masked_fill(~keep, 0.0).sum(dim=1) / keep.sum(dim=1).clamp(min=1)


def pooled_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum over rows of 1 - cosine of two pooled outputs [B, C]."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).sum()


def divergence(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return KL(teacher || student), summed over rows, times temperature squared; logits [N, V].

    With a large vocabulary, rows are computed in chunks, and again for the gradient, so that at most `LOGITS_AT_ONCE`
    log-probabilities are in memory.
    """
    size = max(1, LOGITS_AT_ONCE // student.shape[-1])
    chunks = list(zip(student.split(size), teacher.split(size), strict=True))
    compute: Callable[..., Tensor] = _divergence
    if len(chunks) > 1 and torch.is_grad_enabled() and student.requires_grad:
        compute = partial(checkpoint, _divergence, use_reentrant=False)
    return torch.stack([compute(*rows, temperature) for rows in chunks]).sum()


def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    mine = (student.float() / temperature).log_softmax(dim=-1)
    target = (teacher.float() / temperature).log_softmax(dim=-1)
    return F.kl_div(mine, target, reduction="sum", log_target=True) * temperature**2


def logits_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None, regression: bool = False
) -> Tensor:
    """Return how far the student's logits are from the teacher's, as a mean over rows or tokens.

    Args:
        student: [B, V], or [B, T, V] with one prediction per token.
        teacher: the same shape.
        temperature: temperature of both softmaxes; the divergence is multiplied by its square.
        mask: [B, T], true at tokens; used with one prediction per token.
        regression: whether the logits are numbers: if so, use the squared error instead of the divergence.

    Returns:
        A scalar.
    """
    mine, target = masked_rows(student, mask), masked_rows(teacher, mask)
    if regression:
        return F.mse_loss(mine, target)
    return divergence(mine, target, temperature=temperature) / max(mine.shape[0], 1)


POOLED, LOGITS, ATTENTION = "pooled", "logits", "attention of "
FAR_BELOW = -1e4
"""The logit of padding among logits over tokens, so that padding is never an answer."""


Share = tuple[float, float]
"""A batch's number of tokens (of rows, if it has no mask) and of rows; or its share of those of a step."""


def size_of(batch: Mapping[str, Tensor]) -> Share:
    """Return a batch's number of tokens, counted in its mask [B, T] (of rows, if it has no mask), and of rows."""
    rows = len(next(iter(batch.values())))
    mask = batch.get("attention_mask")
    return (rows if mask is None else int(mask.sum())), rows


def is_regression(config: PreTrainedConfig) -> bool:
    """Tell whether a head's logits are numbers, not classes."""
    problem = getattr(config, "problem_type", None)
    return problem == "regression" or (problem is None and getattr(config, "num_labels", 2) == 1)


class Objective:
    """Computes the terms of the alignment.

    Attributes:
        student: the converted model that is trained.
        teacher: a converted model that runs with softmax; the student itself if only kernels are trained.
        config: weights and temperature.
        blocks: the blocks whose states are compared, by default all (`find_blocks`).
        scales: divisors of squared errors, from `measure_scales`: the teacher's variances per token, summed over
            channels, of the states by their names, of the attentions' outputs after the output projection
            (`ATTENTION` and the block's name), and of regression logits by the names of their terms.
        padded: whether the batches' mask is that of a block, by name, as far as known (`pair.noting`).
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        config: AlignConfig,
        blocks: Mapping[str, str] | None = None,
    ) -> None:
        self.student, self.teacher, self.config = student, teacher, config
        self.blocks = find_blocks(student) if blocks is None else blocks
        self.scales: dict[str, float] = {}
        self.padded: dict[str, bool] = {}

    @torch.no_grad()
    def teach(self, batch: Mapping[str, Tensor]) -> Outputs:
        """Run the teacher on a batch (such as `input_ids` [B, T])."""
        with noting(self.teacher, self.blocks, batch, self.padded) as masks:
            outputs = run(self.teacher, self.blocks, batch, head=self.config.logits_weight > 0)
        outputs.masks = masks
        if outputs.last_mask is not None:
            masks[OUTPUT] = outputs.last_mask
        return outputs

    def learn(self, batch: Mapping[str, Tensor]) -> Outputs:
        """Run the student on a batch (such as `input_ids` [B, T]), with gradients if they are enabled."""
        return run(self.student, self.blocks, batch, head=self.config.logits_weight > 0)

    @torch.no_grad()
    def measure_scales(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Measure the teacher's variances over all held-out batches together, however the rows are split over them.

        Args:
            batches: model inputs, such as `input_ids` and `attention_mask` [B, T].

        Raises:
            DataError: if there is no batch.
        """

        def moments(batch: Mapping[str, Tensor], _: Share) -> dict[str, Tensor]:
            with self._attentions(self.teacher, self.blocks) as kept:
                taught = self.teach(batch)
            masks = taught.masks
            found = {name: _moments(masked_rows(x, masks.get(name))) for name, x in taught.states.items()}
            found |= {ATTENTION + name: _moments(masked_rows(x, masks.get(name))) for name, x in kept.items()}
            if is_regression(self.teacher.config):
                found |= {f"{LOGITS}/{name}": _moments(masked_rows(x, None)) for name, x in taught.logits.items()}
            return found

        for name, sums in summed(moments, batches).items():
            count, squares, vector = sums[0], sums[1], sums[2:]
            spread = squares / count - (vector / count).square().sum()
            self.scales[name] = max(float(spread), TINY)

    def end_to_end(self, batch: Mapping[str, Tensor], share: Share) -> dict[str, Tensor]:
        """Return the terms of whole models, all scalars: one per hidden state, `POOLED`, and one per kind of logits."""
        taught = self.teach(batch)
        return self.terms_of(self.learn(batch), taught, share)

    def terms_of(self, learned: Outputs, taught: Outputs, share: Share) -> dict[str, Tensor]:
        """Return `end_to_end`'s terms for given outputs of the student and the teacher on a batch."""
        (share_of_tokens, share_of_rows), masks = share, taught.masks
        terms = {
            name: self._error(learned.states[name], x, masks.get(name), name, share)
            for name, x in taught.states.items()
        }
        mask = taught.last_mask
        mine, target = (pooled(side.last, mask, self.config.pooling) for side in (learned, taught))
        terms[POOLED] = share_of_rows * pooled_loss(mine, target) / len(mine)
        for name, target in taught.logits.items():
            term, mine = f"{LOGITS}/{name}", learned.logits[name]
            if (scale := self.scales.get(term)) is not None:
                squared = (mine.float() - target.float()).square().sum()
                terms[term] = share_of_rows * squared / (target.shape[0] * scale)
                continue
            per_token = mask is not None and target.ndim == 3 and target.shape[:2] == mask.shape
            # Logits of pairs of a text and an image have two axes as well.
            if mask is not None and not per_token and target.shape == mask.shape and "_per_" not in name:
                # One logit per token: the chosen token (the start of an answer) must not be padding.
                mine, target = (x.float().masked_fill(~mask.bool(), FAR_BELOW) for x in (mine, target))
            mean = logits_loss(mine, target, temperature=self.config.temperature, mask=mask)
            terms[term] = (share_of_tokens if per_token else share_of_rows) * mean
        return terms

    def _error(self, student: Tensor, teacher: Tensor, mask: Tensor | None, scale: str, share: Share) -> Tensor:
        """Return the relative error of a state [B, T, C], times the batch's share of its tokens.

        A state without padding, such as that of an image, has as many tokens in every row.
        """
        own = share[1] if mask is None else share[0]
        return own * relative_error(student, teacher, mask, self.scales[scale])

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of `end_to_end`'s terms, a scalar; of the hidden states' terms their mean counts."""
        hidden, logits = _by_kind(terms)
        loss = self.config.hidden_weight * torch.stack(list(hidden.values())).mean()
        loss = loss + self.config.pooled_weight * terms[POOLED]
        return loss + self.config.logits_weight * torch.stack(logits).mean() if logits else loss

    def closeness(self, terms: Mapping[str, Tensor]) -> Closeness:
        """Return the figures for the sums of `end_to_end`'s terms over all held-out data."""
        hidden, logits = _by_kind(terms)
        return Closeness(
            {name: math.sqrt(float(value)) for name, value in hidden.items()},
            1 - float(terms[POOLED]),
            sum(map(float, logits)) / len(logits) if logits else None,
            float(self.total(terms)),
        )

    def blockwise(self, batch: Mapping[str, Tensor], share: Share, *, train: bool) -> dict[str, float]:
        """Run the teacher, and each of the student's blocks on the inputs of the teacher's block.

        A block's error is that of its attention after the output projection plus that of its output. With `train` its
        gradient is computed as soon as it has run, and no intermediate result is kept.

        Args:
            batch: model inputs, such as `input_ids` and `attention_mask` [B, T].
            share: the batch's share of the step.
            train: whether to compute gradients.

        Returns:
            The error of each block, by its name; the sum over its calls if it is shared (ALBERT).
        """
        terms: dict[str, float] = {}
        # The teacher's blocks that have called the student's, which may be the same modules.
        inside: set[str] = set()
        student = self.student

        def after(name: str, attention: str) -> Callable[..., None]:
            module, own = student.get_submodule(name), {name: attention}

            def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
                if name in inside:
                    return
                inside.add(name)
                target, attended = state_of(module, output).detach(), kept[name]
                mask = masks.get(name)
                attentions = self._attentions(student, own)
                with unrecorded(), torch.set_grad_enabled(train), observed(module, None), attentions as mine:
                    state = state_of(module, module(*args, **kwargs))
                    error = self._error(state, target, mask, name, share)
                    if attention != name:
                        error = error + self._error(mine[name], attended, mask, ATTENTION + name, share)
                    if train and error.requires_grad:
                        # The teacher's pass may run under autocast; gradients are computed outside it, as usual.
                        with torch.autocast(device_type=error.device.type, enabled=False):
                            error.backward()
                terms[name] = terms.get(name, 0.0) + float(error.detach())
                kept.pop(name, None)
                inside.discard(name)

            return hook

        teacher, blocks = self.teacher, self.blocks
        hooks = {name: after(name, attention) for name, attention in blocks.items()}
        softmax = noting(teacher, blocks, batch, self.padded)
        with self._attentions(teacher, blocks) as kept, hooked(teacher, hooks), softmax as masks, torch.no_grad():
            run_body(teacher, batch)
        return terms

    @staticmethod
    @contextlib.contextmanager
    def _attentions(model: nn.Module, blocks: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
        """Keep the outputs of attentions, after their output projection, by block."""
        kept: dict[str, Tensor] = {}
        # If teacher and student are one model, the student's call inside the teacher's comes second.
        with hooked(model, {attention: keeper(kept, name, first=True) for name, attention in blocks.items()}):
            yield kept


def _by_kind(terms: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the terms of the hidden states, by their names, and those of the logits."""
    hidden = {name: term for name, term in terms.items() if name != POOLED and not name.startswith(LOGITS)}
    return hidden, [term for name, term in terms.items() if name.startswith(LOGITS)]


@dataclass(frozen=True)
class Closeness:
    """Figures of a student against its teacher on held-out data.

    Attributes:
        layers: relative error of the hidden state after each block, and of the last one ("output"): the norm of the
            difference divided by that of the teacher's spread around its mean.
        cosine: mean cosine of the pooled outputs (means over the tokens of a row).
        logits: mean divergence of the logits in nats, or share of their variance for regression; None without a head.
        loss: the weighted sum that the alignment minimises.
    """

    layers: dict[str, float]
    cosine: float
    logits: float | None
    loss: float


@torch.no_grad()
def measure(objective: Objective, batches: Sequence[Mapping[str, Tensor]]) -> Closeness:
    """Compare student and teacher on batches.

    Args:
        objective: student and teacher, with the teacher's variances.
        batches: model inputs on the models' device, such as `input_ids` and `attention_mask` [B, T].

    Raises:
        DataError: if there is no batch.
    """
    return objective.closeness(summed(objective.end_to_end, batches))


def summed(
    terms_of: Callable[[Mapping[str, Tensor], Share], Mapping[Name, Any]],
    batches: Sequence[Mapping[str, Tensor]],
) -> dict[Name, Any]:
    """Add up the terms of batches, each with its share of all tokens and rows.

    Args:
        terms_of: returns the terms of a batch with a share.
        batches: model inputs, such as `input_ids` and `attention_mask` [B, T].

    Raises:
        DataError: if there is no batch.
    """
    sums: dict[Name, Any] = {}
    for batch, share in zip(batches, shares(batches), strict=True):
        for name, term in terms_of(batch, share).items():
            sums[name] = sums.get(name, 0.0) + term
    return sums


def shares(
    batches: Sequence[Mapping[str, Tensor]], over_processes: Callable[[list[int]], list[int]] = list
) -> list[Share]:
    """Return the shares of batches (such as `input_ids` and `attention_mask` [B, T]) of all tokens and rows.

    Args:
        batches: model inputs.
        over_processes: adds up the numbers of tokens and rows over the processes if these share the batches.

    Raises:
        DataError: if there is no batch.
    """
    if not batches:
        raise DataError("alignment: got no held-out batch to measure on; set some rows aside (--holdout)")
    sizes = [size_of(batch) for batch in batches]
    tokens, rows = over_processes([sum(column) for column in zip(*sizes, strict=True)])
    return [(size[0] / max(tokens, 1), size[1] / rows) for size in sizes]
