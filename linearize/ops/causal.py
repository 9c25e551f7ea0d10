"""Causal linear attention, in chunks and one token at a time.

The chunked form is quadratic inside a chunk and keeps a running state between chunks, so it is linear in T. The CPU
computes one chunk after the other. A GPU would wait for every launch of such a loop, so it computes all chunks at once
(`parallel_sums`), in a number of plain tensor operations that does not depend on the length. A traced graph is then the
same for every length. There is nothing in place and no branch on values.

Every row is relative to its own running maximum of log-scales, and the state before every chunk to its running maximum.
With log-scales the states come from one product of the chunks' sums with a lower triangular matrix of factors: that is
quadratic in the number of chunks, but much smaller than all else up to a million tokens.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import FLOOR, LinearOptions, Options, State, group_queries, is_tracing, weigh, without_padding

CHUNK = 64
"""Tokens per chunk: larger chunks cost more inside each chunk, but less for the products with the state."""


def causal_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i: o_i = (sum_j w_ij v_j + rest) / (sum_j w_ij + rest) over the keys j it sees.

    w_ij = exp(c_j - m_i) phi(q_i) . phi(k_j). m_i is the largest of their log-scales c_j and cancels; "rest" is the
    contribution of the initial state.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        **options: the fields of `linearize.ops.state.Options`.

    Returns:
        Output [B, H, T, V] in `v`'s dtype and the `State` after the last token. Sums and states are fp32.
    """
    given = Options(**options)
    keys, values, scale = given.keys(phi_k), given.values(v), given.scale(phi_k)
    mixed, _, after = causal_sums(phi_q, keys, values, scale, given.start(phi_k, v))
    return given.divided(mixed).to(v.dtype), after


def causal_sums(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, scale: Tensor | None, state: State
) -> tuple[Tensor, Tensor, State]:
    """Sum up the weighted values that each query sees; arguments and results as in `parallel_sums`."""
    if values.shape[2] == 1:
        return _one_token(phi_q, phi_k, values, scale, state)
    if values.device.type != "cpu" or is_tracing():
        return parallel_sums(phi_q, phi_k, values, scale, state)
    # On the CPU one chunk after the other, so that its intermediate results stay in the cache.
    sums, levels = [], []
    tokens = [x.split(CHUNK, dim=2) for x in (phi_q, phi_k, values)]
    scales = [None] * len(tokens[0]) if scale is None else scale.split(CHUNK, dim=2)
    for q, k, v, log_scale in zip(*tokens, scales, strict=True):
        mixed, level, state = parallel_sums(q, k, v, log_scale, state)
        sums.append(mixed)
        levels.append(level)
    return torch.cat(sums, dim=2), torch.cat(levels, dim=2), state


def parallel_sums(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, scale: Tensor | None, state: State
) -> tuple[Tensor, Tensor, State]:
    """Sum up the weighted values that each query sees.

    Shapes below: n chunks of C tokens, the query heads of a group concatenated to G C rows.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F] in fp32, zero at padding.
        values: [B, K, T, V] in fp32, zero at padding.
        scale: log-scales of the keys [B, K, T], `FLOOR` at padding; None: all 0.
        state: the state before these tokens.

    Returns:
        The sums [B, H, T, V], their log-scales [B, K, T], and the state after the last token.
    """
    tokens = values.shape[2]
    # At least three chunks in a traced graph: a slice of size one would make the length a constant.
    size, count = CHUNK, (tokens + CHUNK - 1) // CHUNK + 2
    if not isinstance(tokens, torch.SymInt):
        size, count = min(CHUNK, tokens), count - 2

    def cut(x: Tensor, fill: float = 0.0) -> Tensor:
        """Cut x [..., T, X] into chunks [..., n, C, X]."""
        return F.pad(x, (0, 0, 0, count * size - tokens), value=fill).unflatten(-2, (count, size))

    queries = cut(group_queries(phi_q, phi_k.shape[1]).float())
    groups = queries.shape[2]
    q = queries.transpose(2, 3).flatten(3, 4)
    k, values = cut(phi_k), cut(values)
    later = torch.ones(size, size, dtype=torch.bool, device=phi_k.device).triu(1)
    scores = (q @ k.transpose(-1, -2)).unflatten(3, (groups, size)).masked_fill(later, 0.0)
    if scale is None:
        sums = k.transpose(-1, -2) @ values
        through = sums.cumsum(dim=2) + state.kv[:, :, None]
        before = torch.cat([state.kv[:, :, None], through[:, :, :-1]], dim=2)
        near = weigh(scores, values, later).flatten(3, 4)
        mixed, after = near + q @ before, State(through[:, :, -1], state.log_scale)
        rows = state.log_scale[:, :, None, None].expand(-1, -1, count, size)
    else:
        chunks = cut(scale[..., None], FLOOR)[..., 0]
        rows, start, end, carry = _levels(chunks, state.log_scale, later)
        sums = k.transpose(-1, -2) @ (values * torch.exp(chunks - end[..., None])[..., None])
        before = torch.exp(state.log_scale[..., None] - start)[..., None, None] * state.kv[:, :, None]
        # A lone chunk has no others before it.
        if count != 1:
            itself = torch.ones(count, count, dtype=torch.bool, device=carry.device).triu()
            carried = weigh(carry[:, :, None], sums.flatten(-2), itself)[:, :, 0]
            before = before + carried.unflatten(-1, sums.shape[-2:])
        decay = torch.exp((chunks[..., None, :] - rows[..., None]).masked_fill(later, FLOOR))
        past = torch.exp(start[..., None] - rows)[..., None]
        near = weigh(scores * decay[:, :, :, None], values, later).flatten(3, 4)
        mixed = near + (q.unflatten(3, (groups, size)) * past[:, :, :, None]).flatten(3, 4) @ before
        fade = torch.exp(start[..., -1] - end[..., -1])[..., None, None]
        after = State(before[:, :, -1] * fade + sums[:, :, -1], end[..., -1])
    mixed = mixed.unflatten(3, (groups, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens]
    return mixed, rows.flatten(2)[:, :, :tokens], after


@torch.no_grad()
def _levels(chunks: Tensor, start: Tensor, later: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return running maxima of log-scales [B, K, n, C] after a state of log-scale `start` [B, K], without a gradient.

    They are the maxima up to each token [B, K, n, C], before each chunk [B, K, n], and after each chunk [B, K, n]; the
    last result is the factor [B, K, n, n] that brings the sums of chunk m to the level before chunk n; 0 unless m < n.
    """
    count = torch.arange(chunks.shape[2], device=chunks.device)
    tops = chunks.amax(dim=-1)[..., None, :].masked_fill(count > count[:, None], FLOOR)
    after = torch.maximum(tops.amax(dim=-1), start[..., None])
    before = torch.cat([start[..., None], after[..., :-1]], dim=-1)
    rows = torch.maximum(chunks[..., None, :].masked_fill(later, FLOOR).amax(dim=-1), before[..., None])
    gaps = (after[..., None, :] - before[..., None]).masked_fill(count >= count[:, None], FLOOR)
    return rows, before, after, torch.exp(gaps)


def _one_token(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, scale: Tensor | None, state: State
) -> tuple[Tensor, Tensor, State]:
    """Do the same for a single token, with fewer operations."""
    kv, level = state
    if scale is not None:
        level = torch.maximum(level, scale[..., 0].detach())
        kv = kv * torch.exp(state.log_scale - level)[..., None, None]
        values = values * torch.exp(scale - level[..., None])[..., None]
    kv = kv + phi_k.transpose(-1, -2) * values
    mixed = group_queries(phi_q.float(), kv.shape[1])[..., 0, :] @ kv
    return mixed.flatten(1, 2)[:, :, None], level[..., None], State(kv, level)


def recurrent_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i, step by step; arguments and results as in `causal_attention`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V] -> [B, H, T, V].
    """
    given, outputs = Options(**options), []
    keys, values, scale, state = given.keys(phi_k), given.values(v), given.scale(phi_k), given.start(phi_k, v)
    for i in range(v.shape[2]):
        q, k, value = (x[:, :, i : i + 1] for x in (phi_q, keys, values))
        mixed, _, state = _one_token(q, k, value, None if scale is None else scale[:, :, i : i + 1], state)
        outputs.append(mixed)
    return given.divided(torch.cat(outputs, dim=2)).to(v.dtype), state


def advance(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, state: State, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Run `recurrent_attention` for one token and update `state` in place: for decoding, without a gradient.

    Shapes: `phi_q` [B, H, 1, F], `phi_k` [B, K, 1, F], `v` [B, K, 1, V] -> [B, H, 1, V].
    """
    given = Options(**options)
    batch, key_heads, _, features = phi_k.shape
    count, mask = batch * key_heads, given.key_padding_mask
    kv = state.kv if state.kv.is_contiguous() else state.kv.contiguous()
    flat = kv.view(count, features, -1)
    values = v.reshape(count, 1, -1).float()
    if given.normalize:
        values = F.pad(values, (0, 1), value=1.0)
    shift = state.log_scale
    scale = given.scale(phi_k)
    if scale is not None:
        shift = torch.maximum(shift, scale[..., 0])
        # The largest log-scale is usually an earlier one; then the state need not be rescaled.
        if phi_k.device.type != "cpu" or not torch.equal(shift, state.log_scale):
            flat.mul_(torch.exp(state.log_scale - shift).reshape(count, 1, 1))
        values = values * torch.exp(scale - shift[..., None]).reshape(count, 1, 1)
    if mask is not None:
        padding = ~mask.bool().repeat_interleave(key_heads, dim=0)[..., None]
        values, phi_k = values.masked_fill(padding, 0.0), without_padding(phi_k, mask)
    flat.baddbmm_(phi_k.reshape(count, features, 1), values)
    mixed = torch.bmm(phi_q.reshape(count, -1, features), flat)
    mixed = given.divided(mixed)
    return mixed.reshape(batch, -1, 1, mixed.shape[-1]), State(kv, shift)
