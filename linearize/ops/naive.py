"""The reference: kernel attention with its T x T weights written out, in fp32. Everything fast is tested against it."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import EPS, FLOOR, LinearOptions, Options, State, divide, group_queries, held


def kernel_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    causal: bool = False,
    normalize: bool = True,
    eps: float = EPS,
    floor: float = 0.0,
) -> Tensor:
    """Write out the attention weights of a feature map; quadratic in T, for the reference and reports.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, S, F]; with `causal`, S >= T and the queries are the last T tokens.
        key_padding_mask: [B, S], true or 1 at tokens; None if there is no padding.
        log_scale: [B, K, S] log-scales of the keys (`linearize.ops.state` defines them); None: all 0.
        causal: whether query i sees keys up to its own position only.
        normalize: whether the rows are divided by their sums.
        eps: smallest magnitude of a row's sum.
        floor: c of `linearize.ops.floored`; 0 for no floor.

    Returns:
        Weights [B, H, T, S] in fp32, zero at padded and later keys.
    """
    groups, options = phi_q.shape[1] // phi_k.shape[1], Options(key_padding_mask, log_scale)
    keys = options.keys(phi_k).repeat_interleave(groups, dim=1)
    scores = phi_q.float() @ keys.transpose(-1, -2)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :].bool()
    scale = options.scale(phi_k)
    if scale is not None:
        scale = scale.repeat_interleave(groups, dim=1)[:, :, None, :]
        seen = scale.masked_fill(~visible, FLOOR)
        shift = seen.detach().amax(dim=-1, keepdim=True)
        scores = scores * torch.exp(seen - shift)
    scores = scores.masked_fill(~visible, 0.0)
    if not normalize:
        return scores
    if floor:
        with torch.no_grad():
            sizes = kernel_weights(
                phi_q.abs(),
                phi_k.abs(),
                key_padding_mask=key_padding_mask,
                log_scale=log_scale,
                causal=causal,
                normalize=False,
            )
        least = (floor * sizes.sum(dim=-1, keepdim=True)).clamp(min=eps)
        return scores / held(scores.sum(dim=-1, keepdim=True), least)
    return divide(torch.cat([scores, scores.sum(dim=-1, keepdim=True)], dim=-1), eps)


def naive_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, *, causal: bool = False, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend with the T x T weights written out: the reference for `bidirectional`, `causal` and `recurrent`.

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
