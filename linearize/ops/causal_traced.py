"""The causal chunks as plain tensor operations, for tracing compilers: no loop in place, no choice by numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.causal_plan import CHUNK
from linearize.ops.state import FLOOR, State, divide, group_queries, masked_log_scale, with_ones, without_padding


def traced_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None,
    log_scale: Tensor | None,
    initial_state: State,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, State]:
    """Attend as `causal_attention` does, arguments and results as there; every row has a stabiliser of its own."""
    state = initial_state
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    queries = group_queries(phi_q, phi_k.shape[1])
    phi_k, values = without_padding(phi_k, key_padding_mask), with_ones(v, normalize, key_padding_mask)
    outputs = []
    for start in range(0, v.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        piece = None if scale is None else scale[:, :, part]
        mixed, state = _chunk(
            queries[:, :, :, part].float(), phi_k[:, :, part].float(), values[:, :, part], piece, state
        )
        outputs.append(divide(mixed, eps) if normalize else mixed)
    return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype), state


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
