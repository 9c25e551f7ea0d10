"""The full T x T weights of kernel attention in fp32, for reports."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import EPS, FLOOR, Options, divide, held


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
    """Return the attention weights of a feature map; quadratic in T, as a reference and for reports.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, S, F]; with `causal`, S >= T and the queries are the last T tokens.
        key_padding_mask: [B, S], true or 1 at tokens; None if there is no padding.
        log_scale: [B, K, S] log-scales of the keys (`linearize.ops.state` defines them); None: all 0.
        causal: whether query i sees only keys up to its own position.
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
