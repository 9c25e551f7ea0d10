"""The reference of `window_attention`: its weights written out, T x T, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.state import EPS, FLOOR, divide, without_padding

TINY = 1e-30


def window_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    window: int,
    scaling: float,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    query_log_scale: Tensor | None = None,
    log_scale: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Write out the weights of `linearize.ops.window.window_attention` (arguments as there); quadratic in T.

    Returns:
        Weights [B, H, T, S] in fp32, rows summing to one; the queries are the last T of the S tokens.
    """
    groups = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    real = torch.ones(q.shape[0], keys, dtype=torch.bool, device=q.device)
    real = real if key_padding_mask is None else key_padding_mask.bool()
    k, phi_k = (without_padding(x, key_padding_mask) for x in (k, phi_k))
    q = without_padding(q, None if key_padding_mask is None else key_padding_mask[:, -queries:])
    log_scale = None if log_scale is None else log_scale.float().masked_fill(~real[:, None], 0.0)
    place = real.long().cumsum(dim=-1)
    distance = place[:, -queries:, None] - place[:, None, :]
    near = distance < window if causal else distance.abs() <= window // 2
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    visible = (visible.tril(keys - queries) if causal else visible) & real[:, None]
    near, visible = near[:, None], visible[:, None]
    products = phi_q.float() @ phi_k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    scores = (q.float() * scaling) @ k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    exponents = torch.zeros_like(scores)
    if query_log_scale is not None:
        exponents = exponents + query_log_scale.float()[..., None]
    if log_scale is not None:
        exponents = exponents + log_scale.float().repeat_interleave(groups, 1)[..., None, :]
    factors = torch.where(near, torch.ones_like(products), products).masked_fill(~visible, 0.0)
    exponents = torch.where(near, scores, exponents)
    size = factors.detach().abs()
    levels = torch.where(size <= TINY, FLOOR, exponents.detach() + size.clamp(min=TINY).log())
    shift = levels.amax(dim=-1, keepdim=True)
    weights = factors * torch.exp((exponents - shift).clamp(max=80.0))
    return divide(torch.cat([weights, weights.sum(dim=-1, keepdim=True)], dim=-1), eps)
