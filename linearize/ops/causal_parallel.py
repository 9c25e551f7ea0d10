"""The causal op with all chunks at once, in plain tensor operations; the CPU gives it one chunk at a time.

A GPU would wait for every launch of a loop over the chunks. Here the number of operations does not depend on the
length, and a traced graph is the same for every length. There is nothing in place and no branch on values.

Every row is relative to its own running maximum of log-scales, and the state before every chunk to its running maximum.
With log-scales the states come from one product of the chunks' sums with a lower triangular matrix of factors: that is
quadratic in the number of chunks, but much smaller than all else up to a million tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import FLOOR, State, group_queries

CHUNK = 64
"""Tokens per chunk: larger chunks cost more inside each chunk, but less for the products with the state."""


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
        mixed, after = scores.flatten(3, 4) @ values + q @ before, State(through[:, :, -1], state.log_scale)
        rows = state.log_scale[:, :, None, None].expand(-1, -1, count, size)
    else:
        chunks = cut(scale[..., None], FLOOR)[..., 0]
        rows, start, end, carry = _levels(chunks, state.log_scale, later)
        sums = k.transpose(-1, -2) @ (values * torch.exp(chunks - end[..., None])[..., None])
        before = torch.exp(state.log_scale[..., None] - start)[..., None, None] * state.kv[:, :, None]
        # A lone chunk has no others before it; zeros times its sums would spread a NaN.
        if count != 1:
            before = before + (carry @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
        decay = torch.exp((chunks[..., None, :] - rows[..., None]).masked_fill(later, FLOOR))
        past = torch.exp(start[..., None] - rows)[..., None]
        near = (scores * decay[:, :, :, None]).flatten(3, 4) @ values
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
