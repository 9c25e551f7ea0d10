"""The native op with a gradient: attention for maps and for given features alike, and maps by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.base import MAP_WEIGHTS, MapSpec
from linearize.native import engine
from linearize.native.options import Attended, AttendOptions

Fallback = Callable[..., Tensor]
"""The same attention in PyTorch's operations: q, k, v, log-scales -> output, its gradient reaching the weights too."""


def attend_with_gradient(
    maps: Sequence[MapSpec],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fallback: Fallback,
    options: AttendOptions,
) -> Tensor:
    """Attend from q [B, H, T, D] to k [B, K, T, D] and v [B, K, T, V] -> [B, H, T, V].

    Args:
        maps: of keys and queries; one where they share it; none where q and k are features.
        q: queries.
        k: keys.
        v: values.
        fallback: asked for the gradient where log-scales are too steep for the native one.
        options: of `Engine.attend`.
    """
    weights = [getattr(map, name) for map in maps for name in MAP_WEIGHTS]
    log_scale, others = options.log_scale, options._replace(log_scale=None, exact=True)
    out: Tensor = _Native.apply(maps, fallback, others, q, k, v, log_scale, *weights)
    return out


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        maps: Sequence[MapSpec],
        fallback: Fallback,
        options: AttendOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *log_scale_and_weights: Tensor | None,
    ) -> Tensor:
        ctx.maps, ctx.fallback, ctx.options, ctx.engine = maps, fallback, options, engine()
        attended = ctx.engine.attend(maps, q, k, v, options._replace(log_scale=log_scale_and_weights[0]))
        # The weights too, so that a change in place before the backward is noticed.
        ctx.save_for_backward(*attended, q, k, v, *log_scale_and_weights)
        out: Tensor = attended.out
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, kv, top, q, k, v, log_scale, *weights = ctx.saved_tensors
        size = len(MAP_WEIGHTS)
        maps = [
            map._replace(**dict(zip(MAP_WEIGHTS, weights[size * i : size * (i + 1)], strict=True)))
            for i, map in enumerate(ctx.maps)
        ]
        options = ctx.options._replace(log_scale=log_scale)
        found = ctx.engine.gradients(maps, q, k, v, Attended(out, kv, top), grad, options)
        if found is None:
            return None, None, None, *differentiated(ctx.fallback, (q, k, v, log_scale), weights, grad)
        scale = None if log_scale is None else found.log_scale.sum_to_size(log_scale.shape).to(log_scale.dtype)
        return None, None, None, found.q, found.k, found.v, scale, *found.weights


def map_with_gradient(map: MapSpec, x: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """Map x [B, K, T, D] times `scale` -> features [B, K, T, F] and log-scales [B, K, T] or None, both fp32.

    The gradient takes for granted what holds for every use of features: of a key only exp(log-scale) phi counts, of a
    query that or the direction of phi.
    """
    weights = tuple(getattr(map, name) for name in MAP_WEIGHTS)
    found: tuple[Tensor, Tensor | None] = _Mapped.apply(map, scale, x, *weights)
    return found


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, map: MapSpec, scale: float, x: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.map, ctx.scale, ctx.engine = map, scale, engine()
        ctx.save_for_backward(x, *weights)
        found: tuple[Tensor, Tensor | None] = ctx.engine.features(map, x, scale=scale)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_scale: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        map = ctx.map._replace(**dict(zip(MAP_WEIGHTS, weights, strict=True)))
        found, grads = ctx.engine.features_gradient(map, x, grad, grad_scale, scale=ctx.scale)
        return None, None, found, *grads


def differentiated(
    fallback: Fallback, inputs: tuple[Tensor | None, ...], weights: list[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Differentiate the ops in PyTorch, which have an answer to steep log-scales."""
    leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in inputs]
    asked = [*leaves, *(w if w is not None and w.requires_grad else None for w in weights)]
    wanted = [x for x in asked if x is not None]
    with torch.enable_grad(), torch.autocast(device_type=grad.device.type, enabled=False):
        found = iter(torch.autograd.grad(fallback(*leaves), wanted, grad, allow_unused=True))
    return [None if x is None else next(found) for x in asked]
