"""The reference of the ops: kernel attention with its T x T weights written out, in fp32."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops import LinearOptions, State
from linearize.ops.state import FLOOR, Options, group_queries


def naive_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, *, causal: bool = False, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend with the T x T weights written out.

        w_ij = exp(c_j - m_i) phi(q_i) . phi(k_j),   o_i = (sum_j w_ij v_j + rest) / (sum_j w_ij + rest)

    over the keys j that query i sees. m_i is the largest of their log-scales c_j and cancels; "rest" is the part of the
    state before.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        causal: whether query i sees keys up to its own position only.
        **options: the fields of `linearize.ops.state.Options`.

    Returns:
        Output [B, H, T, V] in `v`'s dtype and the `State` after the last token.
    """
    given = Options(**options)
    state = given.start(phi_k, v)
    queries, keys = group_queries(phi_q.float(), phi_k.shape[1]), given.keys(phi_k)
    values, scale = given.values(v), given.scale(phi_k)
    scale = torch.zeros(keys.shape[:-1], device=keys.device) if scale is None else scale
    tokens, past = v.shape[2], state.log_scale
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=v.device)
    seen = seen.tril() if causal else seen
    exponents = scale[:, :, None, :].expand(-1, -1, tokens, -1).masked_fill(~seen, FLOOR)
    m = torch.maximum(exponents.detach().amax(dim=-1), past[..., None])
    weights = torch.einsum("bkgif,bkjf->bkgij", queries, keys) * torch.exp(exponents - m[..., None])[:, :, None] * seen
    rest = torch.einsum("bkgif,bkfv->bkgiv", queries, state.kv) * torch.exp(past[..., None] - m)[:, :, None, :, None]
    mixed = (torch.einsum("bkgij,bkjv->bkgiv", weights, values) + rest).flatten(1, 2)
    last = torch.maximum(past, scale.detach().amax(dim=-1))
    kv = torch.einsum("bkj,bkjf,bkjv->bkfv", torch.exp(scale - last[..., None]), keys, values)
    kv = kv + state.kv * torch.exp(past - last)[..., None, None]
    return given.divided(mixed).to(v.dtype), State(kv, last)
