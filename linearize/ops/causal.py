"""Causal linear attention in chunks: quadratic inside a chunk, a running state between chunks, linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import (
    EPS,
    FLOOR,
    State,
    divide,
    empty_state,
    group_queries,
    masked_log_scale,
    with_ones,
)

CHUNK = 64
"""Tokens per chunk: the cost of the part inside a chunk grows with it, that of the state's products falls."""


def causal_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    normalize: bool = True,
    eps: float = EPS,
    chunk: int = CHUNK,
) -> Tensor | tuple[Tensor, State]:
    """Attend from query i to keys up to i; arguments and results as in `naive_attention(causal=True)`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V] -> [B, H, T, V]. Sums and states are fp32.
    The stabiliser of a query is the largest log-scale among the keys it sees (and the state before them), so that a
    later token changes no earlier output.
    """
    queries = group_queries(phi_q, phi_k.shape[1])
    state = (
        initial_state
        if initial_state is not None
        else empty_state(phi_k, v, scaled=log_scale is not None, normalize=normalize)
    )
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    values = with_ones(v, normalize)
    if key_padding_mask is not None:
        values = values * key_padding_mask[:, None, :, None].float()
    outputs = []
    for start in range(0, v.shape[2], chunk):
        part = slice(start, start + chunk)
        piece = None if scale is None else scale[:, :, part]
        mixed, state = _chunk(
            queries[:, :, :, part].float(), phi_k[:, :, part].float(), values[:, :, part], piece, state
        )
        outputs.append(divide(mixed, eps) if normalize else mixed)
    out = torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)
    return (out, state) if return_state else out


def _chunk(q: Tensor, k: Tensor, values: Tensor, scale: Tensor | None, state: State) -> tuple[Tensor, State]:
    """Advance by one chunk. q [B, K, G, C, F], k [B, K, C, F], values [B, K, C, V + 1], scale [B, K, C] or None."""
    scores = (q @ k[:, :, None].transpose(-1, -2)).tril()
    if scale is None:
        mixed = scores @ values[:, :, None] + q @ state.kv[:, :, None]
        return mixed, State(state.kv + k.transpose(-1, -2) @ values, state.log_scale)
    past = state.log_scale[..., None]
    shift = torch.maximum(scale.detach().cummax(dim=-1).values, past)
    # Above the diagonal the exponent may be large, and 0 times infinity is NaN: cut before exp, not after.
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    decay = torch.exp((scale[:, :, None, :] - shift[..., None]).masked_fill(later, FLOOR))
    before = torch.exp(past - shift)
    mixed = (scores * decay[:, :, None]) @ values[:, :, None]
    mixed = mixed + (q * before[:, :, None, :, None]) @ state.kv[:, :, None]
    last = shift[..., -1]
    weighted = values * torch.exp(scale - last[..., None])[..., None]
    kv = state.kv * torch.exp(state.log_scale - last)[..., None, None] + k.transpose(-1, -2) @ weighted
    return mixed, State(kv, last)
