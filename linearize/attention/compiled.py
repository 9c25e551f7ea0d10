"""A feature-map kernel through the native op, with a gradient: q, k, v and the map's weights are all it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linearize.attention.streamed import Call
from linearize.native import NativeMap, engine

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer


def attend_with_gradient(
    mixer: FeatureMapMixer, map: NativeMap, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
) -> Tensor:
    """Attend from q [B, H, T, D] to k [B, K, T, D] and v [B, K, T, V] -> [B, H, T, V]; queries and keys share a map."""
    return _Compiled.apply(mixer, map, call, scale, q, k, v, map.first, map.second, map.bias, map.tau)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixer: FeatureMapMixer,
        map: NativeMap,
        call: Call,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        ctx.mixer, ctx.map, ctx.call, ctx.scale = mixer, map, call, scale
        causal = mixer.shape.causal
        out, kv, log_scale = engine().attend([map], q, k, v, causal=causal, scale=scale, eps=mixer.eps, mask=call.mask)
        # The weights too, so that a change in place before the backward is noticed.
        ctx.save_for_backward(q, k, v, out, kv, log_scale, *weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, kv, log_scale, *weights = ctx.saved_tensors
        mixer, map, call = ctx.mixer, ctx.map._replace(**dict(zip(NAMES, weights, strict=True))), ctx.call
        found = engine().gradients(
            [map],
            q,
            k,
            v,
            out,
            grad,
            (kv, log_scale),
            causal=mixer.shape.causal,
            scale=ctx.scale,
            eps=mixer.eps,
            mask=call.mask,
        )
        if found is None:
            return None, None, None, None, *_again(mixer, call, (q, k, v), weights, grad)
        return None, None, None, None, found.q, found.k, found.v, *found.weights


NAMES = ("first", "second", "bias", "tau")
"""The weights of a `NativeMap`."""


def _again(
    mixer: FeatureMapMixer, call: Call, inputs: tuple[Tensor, ...], weights: list[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Differentiate the ops in PyTorch, which have an answer to steep log-scales."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    wanted = [*leaves, *(w for w in weights if w is not None and w.requires_grad)]
    with torch.enable_grad():
        out, _ = mixer.at_once(leaves[0], leaves[1], leaves[2], call, None, False)
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
    first: list[Tensor | None] = [next(found) for _ in leaves]
    return first + [next(found) if w is not None and w.requires_grad else None for w in weights]
