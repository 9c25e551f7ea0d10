"""The reference: kernel attention with its T x T weights written out, in fp32. Everything fast is tested against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.ops.floored import held
from linearize.ops.state import EPS, FLOOR, State, divide, masked_log_scale, with_ones, without_padding


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
        options: Any = {"key_padding_mask": key_padding_mask, "log_scale": log_scale, "causal": causal}
        with torch.no_grad():
            sizes = kernel_weights(phi_q.abs(), phi_k.abs(), normalize=False, **options)
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
    return_state: bool = False,
    normalize: bool = True,
    eps: float = EPS,
) -> Tensor | tuple[Tensor, State]:
    """Kernel attention, token by token sums written out (reference for `bidirectional`, `causal` and `recurrent`).

    Args:
        phi_q: [B, H, T, F].
        phi_k: [B, K, T, F], K divides H.
        v: [B, K, T, V].
        causal: whether query i sees keys up to its own position only.
        key_padding_mask: [B, T], true or 1 where there is a token.
        log_scale: [B, K, T] or None, see `linearize.ops.state`.
        initial_state: what was seen before these tokens, or None.
        return_state: whether to return the state after the last token as well.
        normalize: whether to divide by the sum of the weights.
        eps: smallest magnitude of that sum.

    Returns:
        Output [B, H, T, V] in `v`'s dtype; with `return_state` also the final `State`.
    """
    groups = phi_q.shape[1] // phi_k.shape[1]
    queries, keys = phi_q.float(), without_padding(phi_k.float(), key_padding_mask)
    values = with_ones(v, normalize, key_padding_mask)
    scale = masked_log_scale(phi_k, log_scale, key_padding_mask)
    scale = torch.zeros(keys.shape[:-1], device=keys.device) if scale is None else scale
    past = scale.new_full(scale.shape[:2], 0.0 if log_scale is None else FLOOR)
    past = past if initial_state is None else initial_state.log_scale
    tokens = v.shape[2]
    mixed = []
    for i in range(tokens):
        seen = slice(0, i + 1 if causal else tokens)
        shift = torch.maximum(past, scale[:, :, seen].detach().amax(dim=-1))
        weight = torch.exp(scale[:, :, seen] - shift[..., None])
        scores = queries[:, :, i, None] @ keys[:, :, seen].repeat_interleave(groups, 1).transpose(-1, -2)
        row = (scores * weight.repeat_interleave(groups, 1)[:, :, None]) @ values[:, :, seen].repeat_interleave(
            groups, 1
        )
        if initial_state is not None:
            before = initial_state.kv * torch.exp(past - shift)[..., None, None]
            row = row + queries[:, :, i, None] @ before.repeat_interleave(groups, 1)
        mixed.append(row)
    out = torch.cat(mixed, dim=2)
    out = (divide(out, eps) if normalize else out).to(v.dtype)
    if not return_state:
        return out
    shift = torch.maximum(past, scale.detach().amax(dim=-1))
    weight = torch.exp(scale - shift[..., None])
    kv = keys.transpose(-1, -2) @ (values * weight[..., None])
    if initial_state is not None:
        kv = kv + initial_state.kv * torch.exp(past - shift)[..., None, None]
    return out, State(kv, shift)
