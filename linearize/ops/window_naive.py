"""The reference of `window_attention`: its weights written out, T x T, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.exact_keys import strongest
from linearize.ops.state import FLOOR, divide, without_padding
from linearize.ops.window_parts import TINY, Mapped, Window


def window_weights(queries: Mapped, keys: Mapped, window: Window, *, key_padding_mask: Tensor | None = None) -> Tensor:
    """Write out the weights of `linearize.ops.window.window_attention` (arguments as there); quadratic in T.

    Returns:
        Weights [B, H, T, S] in fp32, rows summing to one; the queries are the last T of the S tokens.
    """
    (q, phi_q, query_log_scale), (k, phi_k, log_scale) = queries, keys
    groups = q.shape[1] // k.shape[1]
    rows, columns = q.shape[2], k.shape[2]
    real = torch.ones(q.shape[0], columns, dtype=torch.bool, device=q.device)
    real = real if key_padding_mask is None else key_padding_mask.bool()
    k, phi_k = (without_padding(x, key_padding_mask) for x in (k, phi_k))
    q = without_padding(q, None if key_padding_mask is None else key_padding_mask[:, -rows:])
    log_scale = None if log_scale is None else log_scale.float().masked_fill(~real[:, None], 0.0)
    place = real.long().cumsum(dim=-1)
    distance = place[:, -rows:, None] - place[:, None, :]
    near = window.holds(distance)
    sinks = (place <= window.sinks)[:, None]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    visible = (visible.tril(columns - rows) if window.causal else visible) & real[:, None]
    candidates = (visible & ~sinks & (~near if window.causal else torch.ones_like(near)))[:, None]
    near, visible = (near | sinks)[:, None], visible[:, None]
    if window.exact_keys:
        priority = k.new_zeros(k.shape[:3]) if log_scale is None else log_scale.detach()
        form = (-1, k.shape[1], rows, -1)
        kept = strongest(priority[:, :, None].expand(form), candidates.expand(form), window.exact_keys)
        near = near | kept.repeat_interleave(groups, dim=1)
    products = phi_q.float() @ phi_k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    scores = (q.float() * window.scaling) @ k.float().repeat_interleave(groups, 1).transpose(-1, -2)
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
    return divide(torch.cat([weights, weights.sum(dim=-1, keepdim=True)], dim=-1), window.eps)
