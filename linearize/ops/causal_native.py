"""The causal op on given features through the native op, with and without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linearize.native import engine
from linearize.ops.state import State

Plain = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The same op in PyTorch: phi_q, phi_k, v, log_scale -> output."""


def native_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    log_scale: Tensor | None,
    state: State | None,
    return_state: bool,
    eps: float,
    plain: Plain,
) -> tuple[Tensor, State | None] | None:
    """Attend causally; None where the native op is not there or cannot read these.

    Shapes as of `causal_attention`; `plain` is asked where log-scales are too steep for the native gradient.
    """
    native = engine()
    if native is None or not native.takes(phi_q, phi_k, v):
        return None
    given = [x for x in (phi_q, phi_k, v, log_scale) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        # With a gradient through states, too, the ops in PyTorch are the ones that know how.
        if state is not None or return_state:
            return None
        return _Native.apply(plain, mask, eps, phi_q, phi_k, v, log_scale), None
    found = native.attend(
        [], phi_q, phi_k, v, causal=True, scale=1.0, eps=eps, mask=mask, log_scale=log_scale, start=state
    )
    return found[0], State(*found[1:])


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plain: Plain,
        mask: Tensor | None,
        eps: float,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        log_scale: Tensor | None,
    ) -> Tensor:
        ctx.plain, ctx.mask, ctx.eps = plain, mask, eps
        options = {"causal": True, "scale": 1.0, "eps": eps, "mask": mask, "log_scale": log_scale}
        out, kv, top = engine().attend([], phi_q, phi_k, v, **options)
        ctx.save_for_backward(phi_q, phi_k, v, log_scale, out, kv, top)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        phi_q, phi_k, v, log_scale, out, kv, top = ctx.saved_tensors
        options = {"causal": True, "scale": 1.0, "eps": ctx.eps, "mask": ctx.mask, "log_scale": log_scale}
        found = engine().gradients([], phi_q, phi_k, v, out, grad, (kv, top), **options)
        if found is not None:
            scale = None if log_scale is None else found.log_scale.sum_to_size(log_scale.shape).to(log_scale.dtype)
            return None, None, None, found.q, found.k, found.v, scale
        leaves = [None if x is None else x.detach().requires_grad_() for x in (phi_q, phi_k, v, log_scale)]
        with torch.enable_grad():
            again = ctx.plain(*leaves)
            asked = [x for x in leaves if x is not None]
            grads = iter(torch.autograd.grad(again, asked, grad))
        return None, None, None, *(None if x is None else next(grads) for x in leaves)
