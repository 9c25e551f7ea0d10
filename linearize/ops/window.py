"""Softmax near, a feature map far: two kinds of weights under one denominator, linear in T.

The unnormalised weight of key j for query i is

    exp(scaling q_i . k_j)                               where j is in the window of i,
    exp(a_i + c_j) phi(q_i) . phi(k_j)                   where it is not (a, c: log-scales of query and key),

and every row is divided by its sum. Causally the window of i is the last W tokens, i - W < j <= i. Bidirectionally it
is |i - j| <= W // 2, so W tokens for odd W and W + 1 for even W. Tokens are counted without padding. Both parts are
computed under one shift m_i, the larger of their magnitudes, which cancels.

Papers: the hybrid of Zhang et al. 2024 (LoLCATs), https://arxiv.org/abs/2410.10254, section 3.3; there the linear part
is not divided by exp(m_i).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.causal import causal_attention
from linearize.ops.compact import put_back, real_first, take
from linearize.ops.recurrent import recurrent_attention
from linearize.ops.state import EPS, FLOOR, State, divide, empty_state, masked_log_scale, with_ones, without_padding

TINY = 1e-30
"""A part of smaller magnitude, relative to its own shift, counts as absent."""


class WindowState(NamedTuple):
    """What is remembered: a linear state of the tokens beyond the window, and the last W tokens themselves.

    Attributes:
        kv: see `linearize.ops.state.State`.
        log_scale: the same.
        ring_k: [B, K, W, D], the newest token last.
        ring_v: [B, K, W, V].
        ring_phi: [B, K, W, F] fp32.
        ring_scale: [B, K, W] fp32.
        ring_mask: [B, W] bool, where there is a token.
    """

    kv: Tensor
    log_scale: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_phi: Tensor
    ring_scale: Tensor
    ring_mask: Tensor


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
    phi_q: Tensor,
    phi_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    query_log_scale: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: WindowState | None = None,
    return_state: bool = False,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, WindowState]:
    """Attend with softmax inside a window and with a feature map outside it; no T x T matrix is made.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, T, F], K divides H.
        q: queries [B, H, T, D].
        k: keys [B, K, T, D].
        v: values [B, K, T, V].
        window: W, see above.
        scaling: what softmax's scores are multiplied with.
        causal: whether query i sees keys up to its own position only.
        key_padding_mask: [B, T], true or 1 where there is a token.
        query_log_scale: [B, H, T] or None (all 0).
        log_scale: the keys', [B, K, T] or None (all 0).
        initial_state: what was seen before these tokens (causal only).
        return_state: whether to return the state after the last token as well (causal only).
        eps: smallest magnitude of a row's sum, relative to its largest part.

    Returns:
        Output [B, H, T, V] in `v`'s dtype; with `return_state` also the final state.
    """
    batch, tokens = q.shape[0], q.shape[2]
    mask = torch.ones(batch, tokens, dtype=torch.bool, device=q.device)
    mask = mask if key_padding_mask is None else key_padding_mask.bool()
    scale = torch.zeros(phi_k.shape[:3], device=q.device) if log_scale is None else log_scale.float()
    own = torch.zeros(phi_q.shape[:3], device=q.device) if query_log_scale is None else query_log_scale.float()
    q, k, v, phi_k = (without_padding(x, key_padding_mask) for x in (q, k, v, phi_k.float()))
    keys = _Keys(k, v, phi_k, scale, mask)
    order = real_first(mask) if key_padding_mask is not None and tokens > 1 else None
    if order is not None:
        phi_q, q, own, keys = take(phi_q, order), take(q, order), take(own, order), keys.taken(order)
    state = None
    if causal:
        ring, past = _resume(keys, window, initial_state)
        whole = ring.then(keys)
        # The key that leaves the window when a token enters it; padding at the end lets none leave.
        leaving = whole.part(slice(0, tokens))
        leaving = leaving._replace(mask=leaving.mask & keys.mask)
        far, after = _linear(phi_q, own, leaving, past)
        parts = [far, _softmax(q, whole.part(slice(1, None)), window, scaling)]
        if return_state:
            end = keys.mask.sum(dim=1, keepdim=True) + torch.arange(window, device=q.device)
            state = WindowState(*after, *whole.taken(end))
    else:
        reach = window // 2
        behind, _ = _linear(phi_q, own, keys.padded(reach + 1, 0).part(slice(0, tokens)), None)
        ahead, _ = _linear(phi_q.flip(2), own.flip(2), keys.flipped().padded(reach + 1, 0).part(slice(0, tokens)), None)
        near = _softmax(q, keys.padded(reach, reach), 2 * reach + 1, scaling)
        parts = [behind, (ahead[0].flip(2), ahead[1].flip(2)), near]
    out = divide(_join(parts), eps)
    out = (out if order is None else put_back(out, order)).to(v.dtype)
    return out if state is None else (out, state)


def _resume(keys: _Keys, window: int, state: WindowState | None) -> tuple[_Keys, State]:
    """Return the ring and the linear state to start from."""
    if state is not None:
        kv, log_scale, *ring = state
        return _Keys(*ring), State(kv, log_scale)
    return keys.part(slice(0, 0)).padded(window, 0), empty_state(keys.phi, keys.v, scaled=True)


def _linear(phi_q: Tensor, own: Tensor, keys: _Keys, past: State | None) -> tuple[tuple[Tensor, Tensor], State]:
    """Sum over the keys up to each query's place: ([B, H, T, V + 1], its log-scale [B, H, T]) and the state."""
    values = with_ones(keys.v, True)
    past = empty_state(keys.phi, keys.v, scaled=True) if past is None else past
    op: Any = recurrent_attention if phi_q.shape[2] == 1 else causal_attention
    mixed, after = op(
        phi_q,
        keys.phi,
        values,
        key_padding_mask=keys.mask,
        log_scale=keys.scale,
        initial_state=past,
        return_state=True,
        normalize=False,
    )
    scale = masked_log_scale(keys.phi, keys.scale, keys.mask)
    assert scale is not None
    # The op's own stabiliser, which it does not return.
    shift = torch.maximum(scale.detach().cummax(dim=-1).values, past.log_scale[..., None])
    return (mixed, own + shift.repeat_interleave(phi_q.shape[1] // shift.shape[1], dim=1)), after


def _softmax(q: Tensor, keys: _Keys, span: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Sum softmax's weights over `span` keys per query, in blocks.

    Query t [B, H, T, D] sees the keys t to t + span - 1 of the T + span - 1 given.

    Returns:
        Sums [B, H, T, V + 1] and their log-scale [B, H, T].
    """
    batch, heads, tokens, size = q.shape
    key_heads = keys.k.shape[1]
    block = min(tokens, max(span, 32))
    count = -(-tokens // block)
    seen = block + span - 1
    keys = keys.padded(0, count * block - tokens)
    queries = F.pad(q.float(), (0, 0, 0, count * block - tokens)) * scaling
    queries = queries.reshape(batch, key_heads, heads // key_heads, count, block, size)
    near = keys.k.float().unfold(2, seen, block)[:, :, None]
    values = with_ones(keys.v, True).unfold(2, seen, block)[:, :, None].transpose(-1, -2)
    distance = torch.arange(seen, device=q.device) - torch.arange(block, device=q.device)[:, None]
    visible = (distance >= 0) & (distance < span) & keys.mask.unfold(1, seen, block)[:, None, None, :, None]
    scores = (queries @ near).masked_fill(~visible, FLOOR)
    top = scores.detach().amax(dim=-1)
    mixed = torch.exp(scores - top[..., None]).masked_fill(~visible, 0.0) @ values
    return mixed.reshape(batch, heads, count * block, -1)[:, :, :tokens], top.reshape(batch, heads, -1)[:, :, :tokens]


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add parts (sums [B, H, T, V + 1], log-scale [B, H, T]) under one shift, the largest part's true magnitude."""
    levels = []
    for mixed, shift in parts:
        size = mixed.detach().abs().amax(dim=-1)
        levels.append(torch.where(size <= TINY, FLOOR, shift.detach() + size.clamp(min=TINY).log()))
    top = torch.stack(levels).amax(dim=0)
    # The clamp only meets parts that count as absent: exp(80) times less than TINY.
    scaled = [mixed * torch.exp((shift - top).clamp(max=80.0))[..., None] for mixed, shift in parts]
    return torch.stack(scaled).sum(dim=0)
