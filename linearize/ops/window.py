"""Softmax near, a feature map far: two kinds of weights under one denominator, linear in T.

The unnormalised weight of key j for query i is

    exp(scaling q_i . k_j)                               where j is in the window of i,
    exp(a_i + c_j) phi(q_i) . phi(k_j)                   where it is not (a, c: log-scales of query and key),

and every row is divided by its sum. Causally the window of i is the last W tokens, i - W < j <= i. Bidirectionally it
is |i - j| <= W // 2, so W tokens for odd W and W + 1 for even W. The first S tokens, the sinks, get softmax's weights
from everywhere (causally: from all tokens behind them). Tokens are counted without padding. All parts are computed
under one shift m_i, the largest of their magnitudes, which cancels.

Papers: the hybrid of Zhang et al. 2024 (LoLCATs), https://arxiv.org/abs/2410.10254, section 3.3; there the linear part
is not divided by exp(m_i). Sinks: Xiao et al. 2024, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.causal import causal_attention
from linearize.ops.compact import put_back, real_first, take
from linearize.ops.recurrent import recurrent_attention
from linearize.ops.state import (
    EPS,
    FLOOR,
    LinearOp,
    State,
    divide,
    empty_state,
    group_queries,
    masked_log_scale,
    with_ones,
    without_padding,
)
from linearize.ops.tracing import overlapping, running_max

TINY = 1e-30
"""A part of smaller magnitude, relative to its own shift, counts as absent."""


@dataclass(frozen=True)
class Window:
    """The form of the attention.

    Attributes:
        size: W, see above.
        scaling: what softmax's scores are multiplied with.
        causal: whether query i sees keys up to its own position only.
        eps: smallest magnitude of a row's sum, relative to its largest part.
        sinks: S, see above.
    """

    size: int
    scaling: float
    causal: bool
    eps: float = EPS
    sinks: int = 0


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

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> WindowState:
        """Take what `present` gave, out of whatever else a layer keeps."""
        return cls(**{name: tensor for name, tensor in tensors.items() if name in cls._fields})

    def present(self) -> dict[str, Tensor]:
        """Return what there is by its name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class _Queries(NamedTuple):
    """All that belongs to the queries."""

    q: Tensor
    phi: Tensor
    scale: Tensor

    def taken(self, order: Tensor) -> _Queries:
        return _Queries(take(self.q, order), take(self.phi, order), take(self.scale, order))

    def flipped(self) -> _Queries:
        return _Queries(self.q.flip(2), self.phi.flip(2), self.scale.flip(2))


class _Keys(NamedTuple):
    """All that belongs to a run of keys."""

    k: Tensor
    v: Tensor
    phi: Tensor
    scale: Tensor
    mask: Tensor

    def part(self, tokens: slice) -> _Keys:
        return self._each(lambda x: x[:, :, tokens], self.mask[:, tokens])

    def then(self, other: _Keys) -> _Keys:
        k, v, phi, scale = (torch.cat([x, y], dim=2) for x, y in zip(self[:4], other[:4], strict=True))
        return _Keys(k, v, phi, scale, torch.cat([self.mask, other.mask], dim=1))

    def taken(self, order: Tensor) -> _Keys:
        return self._each(lambda x: take(x, order), self.mask.gather(1, order))

    def flipped(self) -> _Keys:
        return self._each(lambda x: x.flip(2), self.mask.flip(1))

    def padded(self, before: int, after: int) -> _Keys:
        ends = (before, after)
        return self._each(lambda x: F.pad(x, ends if x.ndim == 3 else (0, 0, *ends)), F.pad(self.mask, ends))

    def _each(self, change: Callable[[Tensor], Tensor], mask: Tensor) -> _Keys:
        return _Keys(change(self.k), change(self.v), change(self.phi), change(self.scale), mask)


def window_attention(
    queries: Mapped,
    keys: Mapped,
    v: Tensor,
    window: Window,
    *,
    key_padding_mask: Tensor | None = None,
    initial_state: WindowState | None = None,
    op: LinearOp = causal_attention,
) -> tuple[Tensor, WindowState | None]:
    """Attend with softmax inside a window and with a feature map outside it; no T x T matrix is made.

    Args:
        queries: of H heads.
        keys: of K heads, K divides H.
        v: values [B, K, T, V].
        window: its size and direction.
        key_padding_mask: [B, T], true or 1 where there is a token.
        initial_state: what was seen before these tokens (causal only).
        op: sums up what lies outside the window, causally.

    Returns:
        Output [B, H, T, V] in `v`'s dtype, and the state after the last token; None where not causal.
    """
    mask = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
    mask = mask if key_padding_mask is None else key_padding_mask.bool()
    q, k, v, phi_k = (without_padding(x, key_padding_mask) for x in (queries.x, keys.x, v, keys.phi.float()))
    side = _Queries(q, queries.phi, queries.scale())
    run = _Keys(k, v, phi_k, keys.scale(), mask)
    order = real_first(mask) if key_padding_mask is not None and v.shape[2] > 1 else None
    if order is not None:
        side, run = side.taken(order), run.taken(order)
    if window.causal:
        parts, state = _causal_parts(side, run, window, initial_state, op)
    else:
        parts, state = _bidirectional_parts(side, run, window, op), None
    out = divide(_join(parts), window.eps)
    return (out if order is None else put_back(out, order)).to(v.dtype), state


def _causal_parts(
    queries: _Queries, keys: _Keys, window: Window, initial_state: WindowState | None, op: LinearOp
) -> tuple[list[tuple[Tensor, Tensor]], WindowState]:
    """Return what lies beyond the window and inside it, as `_join` takes them, and the state after."""
    tokens = queries.q.shape[2]
    ring, past = _resume(keys, window.size, initial_state)
    whole = ring.then(keys)
    # The key that leaves the window when a token enters it; padding at the end lets none leave.
    leaving = whole.part(slice(0, tokens))
    leaving = leaving._replace(mask=leaving.mask & keys.mask)
    parts, sinks = [], None
    if window.sinks:
        sinks = _collect(keys, window.sinks, initial_state)
        place = sinks.before[:, None] + torch.arange(tokens, device=keys.mask.device)
        leaving = leaving._replace(mask=leaving.mask & (place - window.size >= window.sinks))
        behind = place[:, :, None] - torch.arange(window.sinks, device=place.device) >= window.size
        parts.append(_exact(queries.q, sinks, behind & sinks.mask[:, None], window.scaling))
    far, after = _linear(queries, leaving, past, op)
    near = _softmax(queries.q, whole.part(slice(1, None)), window.size, window.scaling)
    count = keys.mask.sum(dim=1)
    end = count[:, None] + torch.arange(window.size, device=keys.mask.device)
    state = WindowState(*after, *whole.taken(end))
    if sinks is not None:
        state = state._replace(sink_k=sinks.k, sink_v=sinks.v, tokens=sinks.before + count)
    return [far, near, *parts], state


def _bidirectional_parts(queries: _Queries, keys: _Keys, window: Window, op: LinearOp) -> list[tuple[Tensor, Tensor]]:
    """Return what lies behind the window, ahead of it and inside it, as `_join` takes them."""
    tokens, half = queries.q.shape[2], window.size // 2
    near = _softmax(queries.q, keys.padded(half, half), 2 * half + 1, window.scaling)
    parts = [near]
    if window.sinks:
        sinks = _collect(keys, window.sinks, None)
        place = torch.arange(tokens, device=keys.mask.device)
        outside = (place[:, None] - place[: window.sinks]).abs() > half
        outside = F.pad(outside, (0, window.sinks - outside.shape[1]))
        parts.append(_exact(queries.q, sinks, outside & sinks.mask[:, None], window.scaling))
        keys = keys._replace(mask=keys.mask & (place >= window.sinks))
    behind, _ = _linear(queries, keys.padded(half + 1, 0).part(slice(0, tokens)), None, op)
    ahead, _ = _linear(queries.flipped(), keys.flipped().padded(half + 1, 0).part(slice(0, tokens)), None, op)
    return [behind, (ahead[0].flip(2), ahead[1].flip(2)), *parts]


def _resume(keys: _Keys, window: int, state: WindowState | None) -> tuple[_Keys, State]:
    """Return the ring and the linear state to start from."""
    if state is not None:
        ring = (state.ring_k, state.ring_v, state.ring_phi, state.ring_scale, state.ring_mask)
        return _Keys(*ring), State(state.kv, state.log_scale)
    return keys.part(slice(0, 0)).padded(window, 0), empty_state(keys.phi, keys.v, scaled=True)


class _Sinks(NamedTuple):
    """The first S tokens, and how many there were before these keys [B]; mask [B, S]: which are there by now."""

    k: Tensor
    v: Tensor
    mask: Tensor
    before: Tensor


def _collect(keys: _Keys, sinks: int, state: WindowState | None) -> _Sinks:
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
    return _Sinks(k, v, slot < (before + count)[:, None], before)


def _exact(q: Tensor, sinks: _Sinks, visible: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Sum softmax's weights over the sinks that a query sees (`visible` [B, T, S]), as `_join` takes them."""
    grouped = group_queries(q, sinks.k.shape[1])
    shape = grouped.shape[:4]
    # A matrix product for each key head, all queries of its group at once.
    queries = grouped.float().flatten(2, 3).flatten(0, 1) * scaling
    scores = torch.bmm(queries, sinks.k.float().flatten(0, 1).transpose(1, 2))
    weights, top = _weigh(scores.view(*shape, -1), visible[:, None, None])
    mixed = torch.bmm(weights.view(scores.shape), with_ones(sinks.v, True).flatten(0, 1))
    return mixed.view(*shape, -1).flatten(1, 2), top.flatten(1, 2)


def _linear(queries: _Queries, keys: _Keys, past: State | None, op: LinearOp) -> tuple[tuple[Tensor, Tensor], State]:
    """Sum over the keys up to each query's place: ([B, H, T, V + 1], its log-scale [B, H, T]) and the state."""
    values = with_ones(keys.v, True)
    past = empty_state(keys.phi, keys.v, scaled=True) if past is None else past
    mixed, after = (recurrent_attention if values.shape[2] == 1 else op)(
        queries.phi,
        keys.phi,
        values,
        key_padding_mask=keys.mask,
        log_scale=keys.scale,
        initial_state=past,
        normalize=False,
    )
    scale = masked_log_scale(keys.phi, keys.scale, keys.mask)
    assert scale is not None
    # The op's own stabiliser, which it does not return.
    shift = torch.maximum(running_max(scale.detach()), past.log_scale[..., None])
    groups = queries.phi.shape[1] // shift.shape[1]
    return (mixed, queries.scale + shift.repeat_interleave(groups, dim=1)), after


def _softmax(q: Tensor, keys: _Keys, span: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Sum softmax's weights over `span` keys per query, in blocks.

    Query t [B, H, T, D] sees the keys t to t + span - 1 of the T + span - 1 given.

    Returns:
        Sums [B, H, T, V + 1] and their log-scale [B, H, T].
    """
    tokens, key_heads = q.shape[2], keys.k.shape[1]
    open_length = isinstance(tokens, torch.SymInt)
    block = max(span, 32) if open_length else min(tokens, max(span, 32))
    # In a graph always several: of one, the length would be taken for a constant.
    count = (tokens + block - 1) // block + int(open_length)
    seen = block + span - 1
    keys = keys.padded(0, count * block - tokens)
    queries = F.pad(q.float(), (0, 0, 0, count * block - tokens)) * scaling
    queries = group_queries(queries, key_heads).unflatten(3, (count, block)).transpose(2, 3)
    shape = queries.shape[:5]
    # A matrix product for each key head and block, all queries of the group at once.
    near = overlapping(keys.k.float(), 2, count, seen, block).flatten(0, 2)
    values = overlapping(with_ones(keys.v, True), 2, count, seen, block).flatten(0, 2)
    scores = torch.bmm(queries.flatten(3, 4).flatten(0, 2), near.transpose(1, 2))
    distance = torch.arange(seen, device=q.device) - torch.arange(block, device=q.device)[:, None]
    visible = (distance >= 0) & (distance < span)
    visible = visible & overlapping(keys.mask, 1, count, seen, block)[:, None, :, None, None]
    weights, top = _weigh(scores.view(*shape, seen), visible)
    mixed = torch.bmm(weights.view(scores.shape), values).view(*shape, -1)
    # [B, K, blocks, G, block] -> [B, H, T].
    mixed, top = (x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens] for x in (mixed, top))
    return mixed, top


def _weigh(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponentials of the visible scores, and the largest score that they leave out."""
    scores = scores.masked_fill(~visible, FLOOR)
    top = scores.detach().amax(dim=-1)
    return torch.exp(scores - top[..., None]).masked_fill(~visible, 0.0), top


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
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
