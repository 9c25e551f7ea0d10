"""The reference: kernel attention with its T x T weights written out, in fp32. Everything fast is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.floored import held
from linearize.ops.state import (
    EPS,
    FLOOR,
    State,
    divide,
    empty_state,
    group_queries,
    masked_log_scale,
    with_ones,
    without_padding,
)


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
    """Write out the attention weights of a feature map; quadratic in T, for reference, reports and stage one.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, S, F]; with `causal`, S >= T and the queries are the last T tokens.
        key_padding_mask: [B, S], true or 1 where there is a token.
        log_scale: [B, K, S] or None, see `linearize.ops.state`.
        causal: whether query i sees keys up to its own position only.
        normalize: whether the rows are divided by their sums.
        eps: smallest magnitude of a row's sum.
        floor: c of `linearize.ops.floored`, 0 for none.

    Returns:
        Weights [B, H, T, S] in fp32, zero at padded and later keys.
    """
    groups = phi_q.shape[1] // phi_k.shape[1]
    keys = without_padding(phi_k.float(), key_padding_mask).repeat_interleave(groups, dim=1)
    scores = phi_q.float() @ keys.transpose(-1, -2)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :].bool()
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
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
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    log_scale: Tensor | None = None,
    initial_state: State | None = None,
    normalize: bool = True,
) -> tuple[Tensor, State]:
    """Kernel attention with its T x T weights (reference for `bidirectional`, `causal` and `recurrent`).

        w_ij = exp(c_j - m_i) phi(q_i) . phi(k_j),   o_i = (sum_j w_ij v_j + rest) / (sum_j w_ij + rest)

    over the keys j that query i sees; m_i is the largest of their log-scales c_j, and "rest" what the state before
    adds. It cancels.

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        causal: whether query i sees keys up to its own position only.
        key_padding_mask: [B, T], true or 1 where there is a token.
        log_scale: [B, K, T] or None, see `linearize.ops.state`.
        initial_state: what was seen before these tokens, or None.
        normalize: whether to divide by the sum of the weights.

    Returns:
        Output [B, H, T, V] in `v`'s dtype and the `State` after the last token.
    """
    state = initial_state or empty_state(phi_k, v, scaled=log_scale is not None, normalize=normalize)
    queries, keys = group_queries(phi_q.float(), phi_k.shape[1]), without_padding(phi_k.float(), key_padding_mask)
    values, scale = with_ones(v, normalize, key_padding_mask), masked_log_scale(phi_k, log_scale, key_padding_mask)
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
    return (divide(mixed, EPS) if normalize else mixed).to(v.dtype), State(kv, last)
