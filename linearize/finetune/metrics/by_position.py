"""Loss of a language model by how many tokens stand before the predicted one: whether it uses a long context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EDGES = (1, *(64 * 2**power for power in range(15)))
"""Positions where a range begins: 1 to 63 tokens before, 64 to 127, 128 to 255 and so on; the last one has no end."""


@dataclass(frozen=True)
class PositionLoss:
    """The loss over one range of positions.

    Attributes:
        first: fewest tokens before the predicted one.
        last: most of them, as far as there were any.
        nll: mean negative log-likelihood, nats per token.
        tokens: how many were predicted.
    """

    first: int
    last: int
    nll: float
    tokens: int


def range_sums(nll: Tensor, counted: Tensor) -> Tensor:
    """Sum losses over ranges of positions.

    Args:
        nll: [B, T], of the token at place t + 1, before which t + 1 tokens stand; 0 where it does not count.
        counted: [B, T] where it counts.

    Returns:
        [B, 3 R] for R ranges: sums, counts, and the most tokens before any counted one.
    """
    before = torch.arange(1, nll.shape[1] + 1, device=nll.device)
    owner = torch.bucketize(before, torch.tensor(EDGES, device=nll.device), right=True) - 1
    inside = torch.nn.functional.one_hot(owner, len(EDGES)).to(nll.dtype)
    last = (counted * before)[:, :, None] * inside
    empty = last.new_zeros(len(nll), 1, len(EDGES))
    return torch.cat([nll @ inside, counted.to(nll.dtype) @ inside, torch.cat([last, empty], dim=1).amax(dim=1)], dim=1)


def losses_by_position(sums: np.ndarray) -> tuple[PositionLoss, ...]:
    """Return the mean loss of every range with tokens in it; sums as `range_sums` gives them for N rows [N, 3 R]."""
    nll, tokens, last = np.split(np.asarray(sums, dtype=np.float64), 3, axis=1)
    return tuple(
        PositionLoss(EDGES[place], int(last[:, place].max()), float(nll[:, place].sum() / count), int(count))
        for place, count in enumerate(tokens.sum(axis=0))
        if count
    )
