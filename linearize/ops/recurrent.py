"""Causal linear attention one token at a time: what decoding runs. Cost and memory do not depend on the context."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import (
    EPS,
    State,
    divide,
    empty_state,
    guarded,
    masked_log_scale,
    with_ones,
    without_padding,
)


def recurrent_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    normalize: bool = True,
    eps: float = EPS,
) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i, step by step; arguments and results as in `causal_attention`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V] -> [B, H, T, V]; T is 1 when decoding.
    """
    batch, heads, tokens, features = phi_q.shape
    key_heads = phi_k.shape[1]
    queries, keys = phi_q.float(), without_padding(phi_k.float(), key_padding_mask)
    values = with_ones(v, normalize, key_padding_mask)
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    state = (
        initial_state
        if initial_state is not None
        else empty_state(phi_k, v, scaled=log_scale is not None, normalize=normalize)
    )
    outputs = []
    for i in range(tokens):
        kv, value = state.kv, values[:, :, i]
        last = state.log_scale
        if scale is not None:
            last = torch.maximum(last, scale[:, :, i].detach())
            kv = kv * torch.exp(state.log_scale - last)[..., None, None]
            value = value * torch.exp(scale[:, :, i] - last)[..., None]
        kv = kv + keys[:, :, i, :, None] * value[:, :, None, :]
        state = State(kv, last)
        mixed = queries[:, :, i].reshape(batch, key_heads, -1, features) @ kv
        outputs.append(mixed.reshape(batch, heads, 1, -1))
    mixed = torch.cat(outputs, dim=2)
    return (divide(mixed, eps) if normalize else mixed).to(v.dtype), state


def advance(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    state: State,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    normalize: bool = True,
    eps: float = EPS,
) -> tuple[Tensor, State]:
    """Do `recurrent_attention` for one token, T = 1, in the state's own memory: for decoding, without a gradient.

    Shapes: `phi_q` [B, H, 1, F], `phi_k` [B, K, 1, F], `v` [B, K, 1, V] -> [B, H, 1, V].
    """
    batch, key_heads, _, features = phi_k.shape
    count = batch * key_heads
    kv = state.kv if state.kv.is_contiguous() else state.kv.contiguous()
    flat = kv.view(count, features, -1)
    values = v.reshape(count, 1, -1).float()
    if normalize:
        values = torch.nn.functional.pad(values, (0, 1), value=1.0)
    shift = state.log_scale
    if log_scale is not None:
        scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
        assert scale is not None
        shift = torch.maximum(shift, scale[..., 0])
        # As a rule the largest log-scale is an old one, and nothing fades.
        if phi_k.device.type != "cpu" or not torch.equal(shift, state.log_scale):
            flat.mul_(torch.exp(state.log_scale - shift).view(count, 1, 1))
        values = values * torch.exp(scale - shift[..., None]).view(count, 1, 1)
    if key_padding_mask is not None:
        padding = ~key_padding_mask.bool().repeat_interleave(key_heads, dim=0)[..., None]
        values, phi_k = values.masked_fill(padding, 0.0), without_padding(phi_k, key_padding_mask)
    flat.baddbmm_(phi_k.reshape(count, features, 1), values)
    mixed = torch.bmm(phi_q.reshape(count, -1, features), flat)
    if normalize:
        mixed = mixed[..., :-1] / guarded(mixed[..., -1:], eps)
    return mixed.reshape(batch, -1, 1, mixed.shape[-1]), State(kv, shift)
