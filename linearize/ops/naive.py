"""The full T x T weights of kernel attention in fp32, for reports."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.ops.state import FLOOR, LinearOptions, Options, divide, held


def kernel_weights(
    phi_q: Tensor, phi_k: Tensor, *, causal: bool = False, floor: float = 0.0, **options: Unpack[LinearOptions]
) -> Tensor:
    """Return the attention weights of a feature map; quadratic in T, as a reference and for reports.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, S, F]; with `causal`, S >= T and the queries are the last T tokens.
        causal: whether query i sees only keys up to its own position.
        floor: c of `linearize.ops.floored`; 0 for no floor.
        **options: the fields of `linearize.ops.state.Options`, except an initial state, which has no weights.

    Returns:
        Weights [B, H, T, S] in fp32, zero at padded and later keys.
    """
    groups, given = phi_q.shape[1] // phi_k.shape[1], Options(**options)
    keys = given.keys(phi_k).repeat_interleave(groups, dim=1)
    scores = phi_q.float() @ keys.transpose(-1, -2)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        visible = visible.tril(scores.shape[-1] - scores.shape[-2])
    if given.key_padding_mask is not None:
        visible = visible & given.key_padding_mask[:, None, None, :].bool()
    scale = given.scale(phi_k)
    if scale is not None:
        scale = scale.repeat_interleave(groups, dim=1)[:, :, None, :]
        seen = scale.masked_fill(~visible, FLOOR)
        shift = seen.detach().amax(dim=-1, keepdim=True)
        scores = scores * torch.exp(seen - shift)
    scores = scores.masked_fill(~visible, 0.0)
    if not given.normalize:
        return scores
    if floor:
        signless: LinearOptions = {**options, "normalize": False}
        with torch.no_grad():
            sizes = kernel_weights(phi_q.abs(), phi_k.abs(), causal=causal, **signless)
        least = (floor * sizes.sum(dim=-1, keepdim=True)).clamp(min=given.eps)
        return scores / held(scores.sum(dim=-1, keepdim=True), least)
    return divide(torch.cat([scores, scores.sum(dim=-1, keepdim=True)], dim=-1), given.eps)
