"""Distances between a converted model and its teacher: of hidden states, the pooled output, logits.

Hidden states follow CALD (ICLR 2025, arXiv 2410.06846) and the second stage of MOHAWK (arXiv 2408.10189), logits
Hinton et al. 2015 (arXiv 1503.02531). A squared error is divided by the variance of the teacher's value, so that it is
the share that is not explained, comparable between layers and models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-12
LOGITS_AT_ONCE = 1 << 24
"""How many log-probabilities are in memory at once (64 MiB of fp32); more are computed in chunks."""


def masked_rows(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the vectors [N, C] of `states` [B, ..., C] in fp32: with a mask [B, T] only those of tokens."""
    if mask is not None and states.ndim == 3 and mask.shape == states.shape[:2]:
        return states[mask.bool()].float()
    return states.flatten(0, -2).float()


def variance(states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the variance of `states` [B, T, C] around their mean vector, summed over channels: a scalar."""
    rows = masked_rows(states, mask)
    return (rows - rows.mean(dim=0)).square().sum(dim=-1).mean().clamp(min=TINY)


def squared_error(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the squared difference of two states [B, T, C], summed over channels and tokens (mask [B, T])."""
    return (masked_rows(student, mask) - masked_rows(teacher, mask)).square().sum()


def hidden_state_loss(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    mask: Tensor | None,
) -> Tensor:
    """Return the mean over layers of the squared error of hidden states, over the variance of the teacher's.

    Args:
        student: one state [B, T, C] per layer.
        teacher: as many.
        mask: [B, T], true at tokens; None if there is no padding.

    Returns:
        A scalar: 0 if all are equal, 1 if the student knows no more than the teacher's mean.
    """
    terms = []
    for mine, target in zip(student, teacher, strict=True):
        tokens = masked_rows(target, mask).shape[0]
        terms.append(squared_error(mine, target, mask) / (max(tokens, 1) * variance(target, mask)))
    return torch.stack(terms).mean()


def pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of states [B, T, C] over the tokens of a row (mask [B, T]): [B, C] in fp32."""
    states = states.float()
    if mask is None or mask.shape != states.shape[:2]:
        return states.mean(dim=1)
    keep = mask.bool()[..., None]
    # Filled, not multiplied by zero: padding may hold NaN.
    return states.masked_fill(~keep, 0.0).sum(dim=1) / keep.sum(dim=1).clamp(min=1)


def pooled_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum over rows of 1 - cosine of two pooled outputs [B, C]."""
    return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)).sum()


def divergence(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return KL(teacher || student), summed over rows, times temperature squared; logits [N, V].

    A large vocabulary is computed for some rows at a time, and again for the gradient, so that at most `LOGITS_AT_ONCE`
    log-probabilities are in memory.
    """
    size = max(1, LOGITS_AT_ONCE // student.shape[-1])
    if student.shape[0] <= size:
        return _divergence(student, teacher, temperature)
    parts = []
    for begin in range(0, student.shape[0], size):
        rows = slice(begin, begin + size)
        if torch.is_grad_enabled() and student.requires_grad:
            from torch.utils.checkpoint import checkpoint

            parts.append(checkpoint(_divergence, student[rows], teacher[rows], temperature, use_reentrant=False))
        else:
            parts.append(_divergence(student[rows], teacher[rows], temperature))
    return torch.stack(parts).sum()


def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    mine = (student.float() / temperature).log_softmax(dim=-1)
    target = (teacher.float() / temperature).log_softmax(dim=-1)
    return F.kl_div(mine, target, reduction="sum", log_target=True) * temperature**2


def logits_loss(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    regression: bool = False,
) -> Tensor:
    """Return how far the student's logits are from the teacher's, as a mean over rows or tokens.

    Args:
        student: [B, V], or [B, T, V] with one prediction per token.
        teacher: the same shape.
        temperature: of both softmaxes; the divergence is multiplied by its square.
        mask: [B, T], true at tokens; used with one prediction per token.
        regression: whether the logits are numbers: then the squared error instead of a divergence.

    Returns:
        A scalar.
    """
    mine, target = masked_rows(student, mask), masked_rows(teacher, mask)
    if regression:
        return F.mse_loss(mine, target)
    return divergence(mine, target, temperature=temperature) / max(mine.shape[0], 1)
