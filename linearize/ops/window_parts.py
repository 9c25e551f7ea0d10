"""What attention with a softmax window is made of, in either direction: form, tokens, sinks, and how parts are joined.

A *part* is a sum of weighted values [B, H, T, V + 1], the last column the sum of the weights, and its log-scale
[B, H, T]: the sum is to be read as `exp(log-scale) * sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.compact import take
from linearize.ops.state import EPS, FLOOR, group_queries, with_ones

TINY = 1e-30
"""A part of smaller magnitude, relative to its own shift, counts as absent."""


Part = tuple[Tensor, Tensor]
"""See above."""


@dataclass(frozen=True)
class Window:
    """The form of the attention.

    Attributes:
        size: W, see `linearize.ops.window`.
        scaling: what softmax's scores are multiplied with.
        causal: whether query i sees keys up to its own position only.
        eps: smallest magnitude of a row's sum, relative to its largest part.
        sinks: how many first tokens get softmax's weights.
        exact_keys: S, see `linearize.ops.exact_keys`.
    """

    size: int
    scaling: float
    causal: bool
    eps: float = EPS
    sinks: int = 0
    exact_keys: int = 0

    def holds(self, distance: Tensor) -> Tensor:
        """Tell whether a key lies in a query's window, by the query's place minus the key's (later keys are hidden)."""
        return distance < self.size if self.causal else distance.abs() <= self.size // 2


class Mapped(NamedTuple):
    """Queries or keys, and their features.

    Attributes:
        x: [B, H, T, D].
        phi: [B, H, T, F].
        log_scale: [B, H, T] or None (all 0).
    """

    x: Tensor
    phi: Tensor
    log_scale: Tensor | None = None

    def scale(self) -> Tensor:
        """Return the log-scale in fp32."""
        if self.log_scale is None:
            return torch.zeros(self.phi.shape[:3], device=self.phi.device)
        return self.log_scale.float()


class WindowState(NamedTuple):
    """What is remembered: a linear state of the tokens beyond the window, the last W tokens themselves, and the sinks.

    Attributes:
        kv: see `linearize.ops.state.State`.
        log_scale: the same.
        ring_k: [B, K, W, D], the newest token last.
        ring_v: [B, K, W, V].
        ring_phi: [B, K, W, F] fp32.
        ring_scale: [B, K, W] fp32.
        ring_mask: [B, W] bool, where there is a token.
        sink_k: [B, K, S, D]; None without sinks.
        sink_v: [B, K, S, V]; None without sinks.
        tokens: [B] how many there were; None without sinks.
        kept_k: [B, K, S, D] the exact keys outside the window; None without exact keys, as all that follows.
        kept_v: [B, K, S, V].
        kept_phi: [B, K, S, F] fp32.
        kept_scale: [B, K, S] fp32.
        kept_mask: [B, S] bool, where there is one.
    """

    kv: Tensor
    log_scale: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_phi: Tensor
    ring_scale: Tensor
    ring_mask: Tensor
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None
    tokens: Tensor | None = None
    kept_k: Tensor | None = None
    kept_v: Tensor | None = None
    kept_phi: Tensor | None = None
    kept_scale: Tensor | None = None
    kept_mask: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> WindowState:
        """Take what `present` gave, out of whatever else a layer keeps."""
        return cls(**{name: tensor for name, tensor in tensors.items() if name in cls._fields})

    def present(self) -> dict[str, Tensor]:
        """Return what there is by its name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Queries(NamedTuple):
    """All that belongs to the queries."""

    q: Tensor
    phi: Tensor
    scale: Tensor

    def taken(self, order: Tensor) -> Queries:
        return Queries(take(self.q, order), take(self.phi, order), take(self.scale, order))

    def heads(self, first: int, last: int) -> Queries:
        """Return some of the heads."""
        return Queries(self.q[:, first:last], self.phi[:, first:last], self.scale[:, first:last])


class Keys(NamedTuple):
    """All that belongs to a run of keys."""

    k: Tensor
    v: Tensor
    phi: Tensor
    scale: Tensor
    mask: Tensor

    def part(self, tokens: slice) -> Keys:
        return self._each(lambda x: x[:, :, tokens], self.mask[:, tokens])

    def then(self, other: Keys) -> Keys:
        k, v, phi, scale = (torch.cat([x, y], dim=2) for x, y in zip(self[:4], other[:4], strict=True))
        return Keys(k, v, phi, scale, torch.cat([self.mask, other.mask], dim=1))

    def heads(self, first: int, last: int) -> Keys:
        """Return some of the heads."""
        return self._each(lambda x: x[:, first:last], self.mask)

    def picked(self, tokens: Tensor, mask: Tensor) -> Keys:
        """Return tokens [B, K, N] that each head chose for itself, and which of them are there [B, N]."""
        return self._each(lambda x: pick(x, tokens), mask)

    def taken(self, order: Tensor) -> Keys:
        return self._each(lambda x: take(x, order), self.mask.gather(1, order))

    def padded(self, before: int, after: int) -> Keys:
        ends = (before, after)
        return self._each(lambda x: F.pad(x, ends if x.ndim == 3 else (0, 0, *ends)), F.pad(self.mask, ends))

    def _each(self, change: Callable[[Tensor], Tensor], mask: Tensor) -> Keys:
        return Keys(change(self.k), change(self.v), change(self.phi), change(self.scale), mask)


class Sinks(NamedTuple):
    """The first S tokens, and how many there were before these keys [B]; mask [B, S]: which are there by now."""

    k: Tensor
    v: Tensor
    mask: Tensor
    before: Tensor


def pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Pick tokens [B, K, N] of x [B, K, T, D] or [B, K, T], other ones for each head."""
    return x.gather(2, tokens if x.ndim == 3 else tokens[..., None].expand(-1, -1, -1, x.shape[-1]))


def collect(keys: Keys, sinks: int, state: WindowState | None) -> Sinks:
    """Take the sinks from the state where they came before, else from these keys, whose real tokens stand in front."""
    count = keys.mask.sum(dim=1)
    slot = torch.arange(sinks, device=keys.mask.device).expand(count.shape[0], -1)
    before = torch.zeros_like(count) if state is None or state.tokens is None else state.tokens
    # Tokens that are not there yet are masked; any will do in their place.
    order = (slot - before[:, None]).clamp(min=0, max=keys.k.shape[2] - 1)
    k, v = take(keys.k, order), take(keys.v, order)
    if state is not None and state.sink_k is not None and state.sink_v is not None:
        old = (slot < before[:, None])[:, None, :, None]
        k, v = torch.where(old, state.sink_k.to(k.dtype), k), torch.where(old, state.sink_v.to(v.dtype), v)
    return Sinks(k, v, slot < (before + count)[:, None], before)


def exact(q: Tensor, sinks: Sinks, visible: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Sum softmax's weights over the keys that a query sees (`visible` [B, 1 or K, T, S]), as `join` takes them."""
    grouped = group_queries(q, sinks.k.shape[1])
    shape = grouped.shape[:4]
    # A matrix product for each key head, all queries of its group at once.
    queries = grouped.float().flatten(2, 3).flatten(0, 1) * scaling
    scores = torch.bmm(queries, sinks.k.float().flatten(0, 1).transpose(1, 2))
    weights, top = weigh(scores.view(*shape, -1), visible[:, :, None])
    mixed = torch.bmm(weights.view(scores.shape), with_ones(sinks.v, True).flatten(0, 1))
    return mixed.view(*shape, -1).flatten(1, 2), top.flatten(1, 2)


def weigh(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponentials of the visible scores, and the largest score that they leave out."""
    scores = scores.masked_fill(~visible, FLOOR)
    top = scores.detach().amax(dim=-1)
    return torch.exp(scores - top[..., None]).masked_fill(~visible, 0.0), top


def join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add parts (sums [B, H, T, V + 1], log-scale [B, H, T]) under one shift, the largest part's true magnitude."""
    sizes = [mixed.detach().abs().amax(dim=-1) for mixed, _ in parts]
    absent = [size <= TINY for size in sizes]
    levels = [
        torch.where(gone, FLOOR, shift.detach() + size.clamp(min=TINY).log())
        for (_, shift), size, gone in zip(parts, sizes, absent, strict=True)
    ]
    top = torch.stack(levels).amax(dim=0)
    # What counts as absent is left out, its gradient too: under its own shift, any number, that would overflow.
    scaled = [
        mixed * torch.exp((shift - top).masked_fill(gone, FLOOR))[..., None]
        for (mixed, shift), gone in zip(parts, absent, strict=True)
    ]
    return torch.stack(scaled).sum(dim=0)
