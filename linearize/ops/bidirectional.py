"""Bidirectional linear attention: two matrix products per head, linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import EPS, State, divide, key_weight, masked_log_scale, with_ones


def bidirectional_attention(
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
) -> Tensor | tuple[Tensor, State]:
    """Attend from every query to every key; arguments and results as in `naive_attention(causal=False)`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, S, F], `v` [B, K, S, V] -> [B, H, T, V]. Sums over tokens are fp32.
    """
    batch, heads, tokens, features = phi_q.shape
    key_heads = phi_k.shape[1]
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    shift = phi_k.new_zeros(phi_k.shape[:2], dtype=torch.float32) if scale is None else scale.detach().amax(dim=-1)
    if initial_state is not None:
        shift = torch.maximum(shift, initial_state.log_scale)
    values = with_ones(v, normalize)
    weight = key_weight(key_padding_mask, scale, shift[..., None])
    if weight is not None:
        values = values * weight[..., None]
    kv = phi_k.float().transpose(-1, -2) @ values
    if initial_state is not None:
        kv = kv + initial_state.kv * torch.exp(initial_state.log_scale - shift)[..., None, None]
    # The query heads of a group share keys: they are just more rows of the same product.
    mixed = phi_q.float().reshape(batch, key_heads, -1, features) @ kv
    mixed = mixed.reshape(batch, heads, tokens, -1)
    out = (divide(mixed, eps) if normalize else mixed).to(v.dtype)
    return (out, State(kv, shift)) if return_state else out
