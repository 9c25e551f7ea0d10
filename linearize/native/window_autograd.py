"""Attention with a softmax window in the native op, with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.base import Features, MapSpec
from linearize.native import engine
from linearize.native.gradient import differentiated
from linearize.native.options import NEVER, Attending, AttendOptions
from linearize.ops import Mapped, Window, window_attention
from linearize.ops.state import FLOOR, without_padding

MOST = 60.0
"""Exponent beyond which a row's kernel weights, which cannot be above its level, are too small to count."""


def attend_window_with_gradient(
    maps: Sequence[MapSpec],
    inputs: tuple[Tensor, Tensor, Tensor],
    features: tuple[Features, Features],
    options: AttendOptions,
    form: Window,
) -> Tensor:
    """Attend from q [B, H, T, D] to k [B, K, T, D] and v [B, K, T, V] -> [B, H, T, V].

    Args:
        maps: of keys and queries; one where they share it.
        inputs: q, k and v, each row's real tokens in front.
        features: what the maps make of q and of k; through them the gradient reaches the maps.
        options: of `WindowCalls.window`.
        form: the window.
    """
    queries, keys = features
    tensors = (*inputs, queries.phi, queries.log_scale, keys.phi, keys.log_scale)
    out: Tensor = _Windowed.apply(maps, options, form, *tensors)
    return out


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        maps: Sequence[MapSpec],
        options: AttendOptions,
        form: Window,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *features: Tensor | None,
    ) -> Tensor:
        ctx.form, ctx.engine = form, engine()
        found = ctx.engine.window(maps, q, k, v, options, form)
        ctx.save_for_backward(q, k, v, *features, options.mask, found.out, found.tops, found.sums, found.until)
        out: Tensor = found.out
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, phi_q, query_scale, phi_k, key_scale, mask, out, tops, sums, until = ctx.saved_tensors
        form, groups = ctx.form, q.shape[1] // k.shape[1]
        if mask is None:
            mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
        linear = (mask & (torch.arange(k.shape[2]) >= form.sinks))[:, None]
        linear = linear if until is None else linear & (until != NEVER)
        scale = torch.zeros(k.shape[:3]) if key_scale is None else key_scale.float()
        scale = scale.masked_fill(~linear, FLOOR)
        level = scale.amax(dim=-1, keepdim=True)
        key_factor = torch.exp(scale - level).masked_fill(~linear, 0.0)[..., None]
        exponent = level.repeat_interleave(groups, dim=1) - tops + (0.0 if query_scale is None else query_scale)
        if form.causal:
            # Queries that see nothing beyond their window.
            seen = mask & (torch.arange(k.shape[2]) - form.size >= form.sinks + form.exact_keys)
            exponent = exponent.masked_fill(~seen[:, None], FLOOR)
            if key_scale is not None and bool((exponent > MOST).any()):
                # One scale for all keys will not do: the largest is far above those that an early query sees.

                def fallback(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, a: Any, phi_k: Tensor, c: Any) -> Tensor:
                    sides = Mapped(q, phi_q, a), Mapped(k, phi_k, c)
                    return window_attention(*sides, v, form, key_padding_mask=mask)[0]

                return None, None, None, *differentiated(fallback, ctx.saved_tensors[:7], [], grad)
        query_factor = torch.exp(exponent.masked_fill(exponent > MOST, FLOOR))[..., None]
        # Where the sum's magnitude was held at its least, it is a constant.
        held = sums.abs() < form.eps
        divisor = torch.where(held, torch.where(sums < 0, -form.eps, form.eps), sums)
        grad = grad.float() / divisor[..., None]
        slope = -(grad * out.float()).sum(dim=-1).masked_fill(held, 0.0)
        # Keys of padding are not looked at; its queries are, as zeros.
        exact_q = without_padding(q.float() * form.scaling, mask)
        inputs = Attending(exact_q, k, v, phi_q * query_factor, phi_k * key_factor)
        back = ctx.engine.window_gradient(inputs, grad, slope, tops, mask.sum(dim=1), form, until)
        scales = [
            None if given is None else (of * made).sum(dim=-1)
            for given, of, made in ((query_scale, back.phi_q, inputs.phi_q), (key_scale, back.phi_k, inputs.phi_k))
        ]
        grad_q = without_padding(back.q * form.scaling, mask)
        exact = (grad_q.to(q.dtype), back.k.to(k.dtype), back.v.to(v.dtype))
        through_maps = (back.phi_q * query_factor, scales[0], back.phi_k * key_factor, scales[1])
        return None, None, None, *exact, *through_maps
