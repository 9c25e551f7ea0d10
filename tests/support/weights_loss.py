"""The block loss as a function with a gradient, to be held against autograd through the full matrices."""

from typing import Any

import torch
from torch import Tensor

from linearize.distillation.blocks import cross_entropy_
from linearize.distillation.targets import Targets


def weights_loss(
    phi_q: Tensor, phi_k: Tensor, log_scale: Tensor | None, targets: Targets, *, negative_penalty: float | None = None
) -> Tensor:
    """Sum the cross-entropy of the kernel's weights against softmax's over valid queries and heads.

    Args:
        phi_q: [B, H, R, F] features of `targets.q`.
        phi_k: [B, K, T, F] features of `targets.k`.
        log_scale: [B, K, T] or None.
        targets: the frozen layer.
        negative_penalty: weight of the negative mass for maps whose weights can be negative; None for positive maps.

    Returns:
        A scalar with a gradient to the features; memory is linear in T.
    """
    return _WeightsLoss.apply(phi_q, phi_k, log_scale, targets, negative_penalty)


class _WeightsLoss(torch.autograd.Function):
    """The gradient is made in the forward pass, block by block, in a copy of the features."""

    @staticmethod
    def forward(
        ctx: Any, phi_q: Tensor, phi_k: Tensor, log_scale: Tensor | None, targets: Targets, penalty: float | None
    ) -> Tensor:
        phi_q, phi_k = phi_q.clone(), phi_k.clone()
        log_scale = None if log_scale is None else log_scale.clone()
        total = cross_entropy_(phi_q, phi_k, log_scale, targets, penalty, gradient=True)
        ctx.save_for_backward(phi_q, phi_k, log_scale)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_q, grad_k, grad_scale = ctx.saved_tensors
        scale = None if grad_scale is None else grad_scale * grad_output
        return grad_q * grad_output, grad_k * grad_output, scale, None, None
