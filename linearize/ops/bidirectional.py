"""Bidirectional linear attention: gather the keys into a state, read it with every query. Linear in T."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import EPS, State, divide, masked_log_scale, with_ones, without_padding


def bidirectional_attention(
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
    """Attend from every query to every key; arguments and results as in `naive_attention(causal=False)`.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, S, F], `v` [B, K, S, V] -> [B, H, T, V]. Sums over tokens are fp32.
    """
    state = gather_keys(
        phi_k,
        v,
        key_padding_mask=key_padding_mask,
        log_scale=log_scale,
        initial_state=initial_state,
        normalize=normalize,
    )
    return read_state(phi_q, state, normalize=normalize, eps=eps).to(v.dtype), state


def gather_keys(
    phi_k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    normalize: bool = True,
    shift: Tensor | None = None,
) -> State:
    """Add keys to a state.

    Args:
        phi_k: [B, K, S, F].
        v: [B, K, S, V].
        key_padding_mask: [B, S], true or 1 where there is a token.
        log_scale: [B, K, S] or None.
        initial_state: the state before, or None.
        normalize: whether the state has a column for the denominator.
        shift: [B, K] log-scale that the state shall have; None: the largest so far.
    """
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    if shift is None:
        shift = phi_k.new_zeros(phi_k.shape[:2], dtype=torch.float32) if scale is None else scale.detach().amax(dim=-1)
        if initial_state is not None:
            shift = torch.maximum(shift, initial_state.log_scale)
    values = with_ones(v, normalize, key_padding_mask)
    if scale is not None:
        values = values * torch.exp(scale - shift[..., None])[..., None]
    kv = without_padding(phi_k.float(), key_padding_mask).transpose(-1, -2) @ values
    if initial_state is not None:
        kv = kv + initial_state.kv * torch.exp(initial_state.log_scale - shift)[..., None, None]
    return State(kv, shift)


def read_state(phi_q: Tensor, state: State, *, normalize: bool = True, eps: float = EPS) -> Tensor:
    """Read a state [B, K, F, V + 1] with query features [B, H, T, F] -> [B, H, T, V] in fp32."""
    batch, heads, tokens, features = phi_q.shape
    # The query heads of a group share keys: they are just more rows of the same product.
    mixed = phi_q.float().reshape(batch, state.kv.shape[1], -1, features) @ state.kv
    mixed = mixed.reshape(batch, heads, tokens, -1)
    return divide(mixed, eps) if normalize else mixed
