"""Causal linear attention one token at a time, for decoding. Cost and memory do not depend on the context."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import LinearOptions, Options, State, guarded, without_padding


def recurrent_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend from query i to keys up to i, step by step; arguments and results as in `causal_attention`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V] -> [B, H, T, V]; T is 1 when decoding.
    """
    given = Options(**options)
    batch, heads, tokens, features = phi_q.shape
    queries, keys, values, scale = phi_q.float(), given.keys(phi_k), given.values(v), given.scale(phi_k)
    state = given.start(phi_k, v)
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
        mixed = queries[:, :, i].reshape(batch, phi_k.shape[1], -1, features) @ kv
        outputs.append(mixed.reshape(batch, heads, 1, -1))
    return given.divided(torch.cat(outputs, dim=2)).to(v.dtype), state


def advance(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, state: State, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Do `recurrent_attention` for one token in the memory of `state`: for decoding, without a gradient.

    Shapes: `phi_q` [B, H, 1, F], `phi_k` [B, K, 1, F], `v` [B, K, 1, V] -> [B, H, 1, V].
    """
    given = Options(**options)
    batch, key_heads, _, features = phi_k.shape
    count, mask = batch * key_heads, given.key_padding_mask
    kv = state.kv if state.kv.is_contiguous() else state.kv.contiguous()
    flat = kv.view(count, features, -1)
    values = v.reshape(count, 1, -1).float()
    if given.normalize:
        values = torch.nn.functional.pad(values, (0, 1), value=1.0)
    shift = state.log_scale
    scale = given.scale(phi_k)
    if scale is not None:
        shift = torch.maximum(shift, scale[..., 0])
        # The largest log-scale is usually an old one; then nothing fades.
        if phi_k.device.type != "cpu" or not torch.equal(shift, state.log_scale):
            flat.mul_(torch.exp(state.log_scale - shift).view(count, 1, 1))
        values = values * torch.exp(scale - shift[..., None]).view(count, 1, 1)
    if mask is not None:
        padding = ~mask.bool().repeat_interleave(key_heads, dim=0)[..., None]
        values, phi_k = values.masked_fill(padding, 0.0), without_padding(phi_k, mask)
    flat.baddbmm_(phi_k.reshape(count, features, 1), values)
    mixed = torch.bmm(phi_q.reshape(count, -1, features), flat)
    if given.normalize:
        mixed = mixed[..., :-1] / guarded(mixed[..., -1:], given.eps)
    return mixed.reshape(batch, -1, 1, mixed.shape[-1]), State(kv, shift)
