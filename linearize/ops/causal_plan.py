"""The plan of a causal call in chunks: its chunks, and powers of two in place of log-scales.

A key's log-scale is split into a power of two and a factor between 1 and 2. Powers of two multiply without rounding. So
a whole chunk can share one, the largest up to its end, and still no later token changes a bit of an earlier output. If
the running maximum climbs by more than `CLIMB` inside a chunk, each of its rows gets its own power.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.ops.state import EPS, FLOOR

CHUNK = 64
"""Tokens per chunk: the cost of the part inside a chunk grows with it, that of the state's products falls."""

CLIMB = 40.0
"""By how many powers of two a row's own maximum may lie below its chunk's: 2^-40 is far from fp32's end."""

LN2_HIGH, LN2_LOW = 0.693359375, math.log(2.0) - 0.693359375
"""The logarithm of 2 in two parts: the first has 9 bits, so its multiples by whole numbers are exact in fp32."""


def powers(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split log-scales: exp(scale) = 2^n exp(r) with a whole number n and 0 <= r < log 2, up to rounding."""
    n = torch.floor(scale.detach() / math.log(2.0))
    rest = (scale - n * LN2_HIGH) - n * LN2_LOW
    return n, torch.where(scale <= FLOOR / 2, 0.0, rest)


def cut(tokens: int) -> list[tuple[int, int]]:
    """Cut tokens into chunks."""
    return [(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]


class Plan(NamedTuple):
    """Everything about a call that has no gradient. All powers are powers of two.

    Attributes:
        spans: the chunks.
        normalize: whether rows are divided by their sums.
        eps: smallest magnitude of a sum, relative to the row's own maximum.
        padding: [B, 1, T, 1] bool, true at padding, or None.
        power: [B, K, T] the keys' powers; this and all that follows is None if nothing is scaled.
        top: [B, K, T] running maximum of the powers.
        unit: [B, K, T] the power under which a row is summed: its chunk's, or its own if the chunk is steep.
        key_rescale: [B, K, T] factor that brings a key to its chunk's power.
        before: [B, K, N] the state's power before chunk n.
        decay: [B, K, N] factor that brings the state to the power of chunk n.
        steep: whether each row of chunk n has its own power.
    """

    spans: list[tuple[int, int]]
    normalize: bool
    eps: float
    padding: Tensor | None = None
    power: Tensor | None = None
    top: Tensor | None = None
    unit: Tensor | None = None
    key_rescale: Tensor | None = None
    before: Tensor | None = None
    decay: Tensor | None = None
    steep: list[bool] | None = None

    def least(self, part: slice) -> Tensor | float:
        """Return the smallest magnitude of a row's sum, in the row's unit: a number or [B, K, 1, C]."""
        if self.top is None or self.unit is None:
            return self.eps
        return (torch.exp2(self.top[..., part] - self.unit[..., part]) * self.eps).clamp(min=EPS)[:, :, None]

    def own(self, part: slice) -> Tensor:
        """Return the factors that bring rows from their unit to their own maximum [B, K, 1, C, 1]."""
        assert self.top is not None and self.unit is not None
        # A row that has seen nothing is zero, and has no maximum.
        gap = (self.unit[..., part] - self.top[..., part]).clamp(max=CLIMB)
        return torch.exp2(gap)[:, :, None, :, None]


@torch.no_grad()
def make_plan(power: Tensor, start: Tensor, normalize: bool, eps: float, padding: Tensor | None) -> Plan:
    """Plan a call from the powers of the keys, `power` [B, K, T], and of the state before, `start` [B, K]."""
    spans = cut(power.shape[-1])
    top = torch.maximum(power.cummax(dim=-1).values, start[..., None])
    lengths = torch.tensor([stop - first for first, stop in spans], device=top.device)
    ends = top[..., lengths.cumsum(0) - 1]
    before = torch.cat([start[..., None], ends[..., :-1]], dim=-1)
    chunk = ends.repeat_interleave(lengths, dim=-1)
    # A row that has seen nothing has no maximum to lose.
    far = ((chunk - top > CLIMB) & (top > FLOOR / 2)).flatten(0, 1).any(dim=0)
    steep = torch.nn.functional.pad(far, (0, len(spans) * CHUNK - len(far))).view(-1, CHUNK).any(dim=1)
    unit = torch.where(steep.repeat_interleave(lengths), top, chunk)
    key_rescale, decay = torch.exp2(power - chunk), torch.exp2(before - ends)
    return Plan(spans, normalize, eps, padding, power, top, unit, key_rescale, before, decay, steep.tolist())
