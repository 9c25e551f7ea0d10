"""The native op with a gradient: attention with maps or on given features, with a softmax window, and maps alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from linearize.attention.native import engine
from linearize.attention.native.options import NEVER, Attended, Attending, AttendOptions, WindowAttended
from linearize.core.errors import ConfigError
from linearize.kernels.base import MAP_WEIGHTS, MapSpec, weights_of
from linearize.ops import Mapped, Window, window_attention
from linearize.ops.state import FLOOR, Context, real_tokens, without_padding

MOST = 60.0
"""Exponent beyond which a row's kernel weights, which cannot exceed its level, are too small to matter."""

Fallback = Callable[..., Tensor]
"""The same attention in PyTorch: q, k, v, log-scales -> output, with gradients for the weights too."""
Grads = TypeVar("Grads")


def first_order(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Refuse second derivatives: PyTorch would leave out the op's part of them without an error."""

    def once(ctx: Context, *grads: Tensor | None) -> Grads:
        if torch.is_grad_enabled():
            raise ConfigError(
                "got create_graph=True, but the compiled ops have no second derivative; set LINEARIZE_NATIVE=0 and "
                "LINEARIZE_TRITON=0 to use the ops in PyTorch"
            )
        return backward(ctx, *grads)

    return once


def attend_with_gradient(
    maps: Sequence[MapSpec], q: Tensor, k: Tensor, v: Tensor, fallback: Fallback, options: AttendOptions
) -> Tensor:
    """Attend from q [B, H, T, D] to k [B, K, T, D] and v [B, K, T, V] -> [B, H, T, V].

    Args:
        maps: the maps of keys and queries, or the single map that they share; empty if q and k are features.
        q: queries.
        k: keys.
        v: values.
        fallback: computes the gradient if log-scales are too steep for the native gradient.
        options: options of `Engine.attend`.
    """
    weights = itertools.chain.from_iterable(map(weights_of, maps))
    log_scale, others = options.log_scale, options._replace(log_scale=None, exact=True)
    out: Tensor = _Native.apply(maps, fallback, others, q, k, v, log_scale, *weights)
    return out


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, maps: Sequence[MapSpec], fallback: Fallback, options: AttendOptions, *tensors: Tensor | None
    ) -> Tensor:
        """Attend; `tensors` are q, k, v, the log-scales and the weights of the maps."""
        ctx.maps, ctx.fallback, ctx.options, ctx.engine = maps, fallback, options, engine()
        attended: Attended = ctx.engine.attend(maps, *tensors[:3], options._replace(log_scale=tensors[3]))
        # Save the weights too, so that autograd notices if they are changed in place before the backward pass.
        ctx.save_for_backward(*attended, *tensors)
        return attended.out

    @staticmethod
    @first_order
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs, given that of the output."""
        out, kv, top, q, k, v, log_scale, *weights = ctx.saved_tensors
        size = len(MAP_WEIGHTS)
        maps = [
            map._replace(**dict(zip(MAP_WEIGHTS, weights[size * i : size * (i + 1)], strict=True)))
            for i, map in enumerate(ctx.maps)
        ]
        options = ctx.options._replace(log_scale=log_scale)
        grads = ctx.engine.gradients(maps, q, k, v, Attended(out, kv, top), grad, options)
        if grads is None:
            return None, None, None, *_differentiated(ctx.fallback, (q, k, v, log_scale), weights, grad)
        scale = None if log_scale is None else grads.log_scale.sum_to_size(log_scale.shape).to(log_scale.dtype)
        return None, None, None, grads.q, grads.k, grads.v, scale, *grads.weights


class MappedTokens(torch.autograd.Function):
    """The map of x [B, K, T, D] times `scale`: features [B, K, T, F] and log-scales [B, K, T] or None, both fp32.

    The gradient relies on how features are used: of a key, only exp(log-scale) phi matters; of a query, either that or
    only the direction of phi.
    """

    @staticmethod
    def forward(
        ctx: Context, native: object, map: MapSpec, scale: float, x: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return features and log-scales, as described above; `native` is the engine."""
        ctx.map, ctx.scale, ctx.engine = map, scale, native
        ctx.save_for_backward(x, *weights)
        found: tuple[Tensor, Tensor | None] = ctx.engine.features(map, x, scale=scale)
        return found

    @staticmethod
    @first_order
    def backward(ctx: Context, grad: Tensor, grad_scale: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the weights, given those of features and log-scales."""
        x, *weights = ctx.saved_tensors
        map = ctx.map._replace(**dict(zip(MAP_WEIGHTS, weights, strict=True)))
        grad_x, grads = ctx.engine.features_gradient(map, x, grad, grad_scale, scale=ctx.scale)
        return None, None, None, grad_x, *grads


def _differentiated(
    fallback: Fallback, inputs: tuple[Tensor | None, ...], weights: list[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Differentiate the ops in PyTorch, which can handle steep log-scales."""
    leaves: list[Tensor | None] = [None if x is None else x.detach().requires_grad_() for x in inputs]
    asked = [*leaves, *(w if w is not None and w.requires_grad else None for w in weights)]
    wanted = [x for x in asked if x is not None]
    with torch.enable_grad(), torch.autocast(device_type=grad.device.type, enabled=False):
        grads = iter(torch.autograd.grad(fallback(*leaves), wanted, grad, allow_unused=True))
    return [None if x is None else next(grads) for x in asked]


class WindowedAttention(torch.autograd.Function):
    """Attention with a softmax window; the gradient reaches the maps through the features.

    Its inputs are the result of `Engine.window` (of `Engine.routed` with routed blocks) and its options, the window,
    q [B, H, T, D], k [B, K, T, D] and v [B, K, T, V] with the padding of each row last, and the features and log-scales
    of queries and keys. Its output is [B, H, T, V].
    """

    @staticmethod
    def forward(
        ctx: Context, result: WindowAttended, options: AttendOptions, form: Window, *tensors: Tensor | None
    ) -> Tensor:
        """Return the output [B, H, T, V]."""
        ctx.form, ctx.engine = form, engine()
        ctx.save_for_backward(*tensors, options.mask, result.out, result.tops, result.sums, result.until, result.chosen)
        return result.out

    @staticmethod
    @first_order
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, features and log-scales, given that of the output."""
        q, k, v, phi_q, query_scale, phi_k, key_scale, mask, out, tops, sums, until, chosen = ctx.saved_tensors
        form, groups = ctx.form, q.shape[1] // k.shape[1]
        mask = real_tokens(k, mask)
        linear = (mask & (torch.arange(k.shape[2]) >= form.sinks))[:, None]
        linear = linear if until is None else linear & (until != NEVER)
        scale = torch.zeros(k.shape[:3]) if key_scale is None else key_scale.float()
        scale = scale.masked_fill(~linear, FLOOR)
        level = scale.amax(dim=-1, keepdim=True)
        key_factor = torch.exp(scale - level).masked_fill(~linear, 0.0)[..., None]
        exponent = level.repeat_interleave(groups, dim=1) - tops + (0.0 if query_scale is None else query_scale)
        if form.causal:
            # Leave out queries that see no key beyond their window.
            seen = mask & (torch.arange(k.shape[2]) - form.size >= form.sinks + form.exact_keys)
            exponent = exponent.masked_fill(~seen[:, None], FLOOR)
            if key_scale is not None and bool((exponent > MOST).any()):
                # One scale for all keys is not enough: the largest is far above the scales that an early query sees.

                def fallback(
                    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, a: Tensor | None, phi_k: Tensor, c: Tensor | None
                ) -> Tensor:
                    sides = Mapped(q, phi_q, a), Mapped(k, phi_k, c)
                    return window_attention(*sides, v, form, key_padding_mask=mask)[0]

                return None, None, None, *_differentiated(fallback, ctx.saved_tensors[:7], [], grad)
        query_factor = torch.exp(exponent.masked_fill(exponent > MOST, FLOOR))[..., None]
        # A sum that was clamped to its least magnitude is a constant.
        held = sums.abs() < form.eps
        divisor = torch.where(held, torch.where(sums < 0, -form.eps, form.eps), sums)
        grad = grad.float() / divisor[..., None]
        slope = -(grad * out.float()).sum(dim=-1).masked_fill(held, 0.0)
        # The op does not read padding keys, but it does read padding queries, as zeros.
        exact_q = without_padding(q.float() * form.scaling, mask)
        inputs = Attending(exact_q, k, v, phi_q * query_factor, phi_k * key_factor)
        count = mask.sum(dim=1)
        back = ctx.engine.window_gradient(inputs, grad, slope, tops, count, form, until)
        if chosen is not None:
            back = ctx.engine.routed_gradient(inputs, grad, slope, tops, count, form, chosen, back)
        scales = [
            None if x is None else (grad * phi).sum(dim=-1)
            for x, grad, phi in ((query_scale, back.phi_q, inputs.phi_q), (key_scale, back.phi_k, inputs.phi_k))
        ]
        grad_q = without_padding(back.q * form.scaling, mask)
        exact = (grad_q.to(q.dtype), back.k.to(k.dtype), back.v.to(v.dtype))
        through_maps = (back.phi_q * query_factor, scales[0], back.phi_k * key_factor, scales[1])
        return None, None, None, *exact, *through_maps
