"""Bidirectional linear attention: gather the keys into a state and read it with every query. Linear in T."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import EPS, LinearOptions, Options, State, divide


def bidirectional_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend from every query to every key; arguments and results as in `linearize.ops.causal_attention`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, S, F], `v` [B, K, S, V] -> [B, H, T, V]. Sums over tokens are fp32.
    """
    given = Options(**options)
    state = gather_keys(phi_k, v, **options)
    return read_state(phi_q, state, normalize=given.normalize, eps=given.eps).to(v.dtype), state


def gather_keys(phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> State:
    """Add keys `phi_k` [B, K, S, F] with values `v` [B, K, S, V] to a state; options are the fields of `Options`."""
    given = Options(**options)
    scale, before = given.scale(phi_k), given.initial_state
    shift = phi_k.new_zeros(phi_k.shape[:2], dtype=torch.float32) if scale is None else scale.detach().amax(dim=-1)
    if before is not None:
        shift = torch.maximum(shift, before.log_scale)
    values = given.values(v)
    if scale is not None:
        values = values * torch.exp(scale - shift[..., None])[..., None]
    kv = given.keys(phi_k).transpose(-1, -2) @ values
    if before is not None:
        kv = kv + before.kv * torch.exp(before.log_scale - shift)[..., None, None]
    return State(kv, shift)


def read_state(phi_q: Tensor, state: State, *, normalize: bool = True, eps: float = EPS) -> Tensor:
    """Read a state [B, K, F, V + 1] with query features [B, H, T, F] -> [B, H, T, V] in fp32."""
    batch, heads, tokens, features = phi_q.shape
    # The query heads of a group share keys, so they are extra rows of the same product.
    mixed = phi_q.float().reshape(batch, state.kv.shape[1], -1, features) @ state.kv
    mixed = mixed.reshape(batch, heads, tokens, -1)
    return divide(mixed, eps) if normalize else mixed
