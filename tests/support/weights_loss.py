"""The block loss as a function with a gradient, to be held against autograd through the full matrices."""

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.base import Features
from linearize.ops import Window
from linearize.training.stage_one.loss import Targets, cross_entropy


def weights_loss(
    phi_q: Tensor,
    phi_k: Tensor,
    log_scale: Tensor | None,
    targets: Targets,
    *,
    negative_penalty: float | None = None,
    window: Window | None = None,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropy of the kernel's weights against softmax's over valid queries and heads.

    Args:
        phi_q: [B, H, R, F] features of `targets.q`.
        phi_k: [B, K, T, F] features of `targets.k`.
        log_scale: [B, K, T] or None.
        targets: the frozen layer.
        negative_penalty: weight of the negative mass for maps whose weights can be negative; None for positive maps.
        window: joined to the map, or None.
        query_scale: [B, H, R] or None.

    Returns:
        A scalar with a gradient to the features; memory is linear in T.
    """
    return _WeightsLoss.apply(phi_q, query_scale, phi_k, log_scale, targets, negative_penalty, window)


class _WeightsLoss(torch.autograd.Function):
    """The gradient is made in the forward pass, block by block."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        total, gradients = cross_entropy(Features(*given[:2]), Features(*given[2:4]), *given[4:], gradient=True)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *(None if grad is None else grad * grad_output for grad in ctx.saved_tensors), None, None, None
