"""Losses of stage one: how far a layer's kernel is from the frozen softmax, summed over queries and heads.

Cross-entropy of the weights (hedgehog eq. 6, flexformer L_awd): see `linearize.distillation.row_loss`. Loss and
gradient come from one pass over blocks of rows, as fused cross-entropies do it; no T x T matrix is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.distillation.blocks import cross_entropy_
from linearize.distillation.row_loss import TINY
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


def output_loss(out: Tensor, target: Tensor, targets: Targets) -> Tensor:
    """Sum the squared error of the head outputs over valid queries, relative to the target's mean square.

    A target's own size is divided out per head, so that one learning rate serves every layer and model.

    Args:
        out: [B, H, T, V] of the kernel.
        target: [B, H, T, V] of softmax.
        targets: the frozen layer, for its padding.
    """
    valid = targets.valid_queries()
    keep = torch.ones_like(target[:, 0, :, 0]) if valid is None else valid
    keep = keep[:, None, :, None]
    error = ((out.float() - target.float()).square() * keep).sum(dim=(0, 2, 3))
    power = (target.float().square() * keep).sum(dim=(0, 2, 3)).clamp(min=TINY)
    return (error / power).mean() * keep.sum() * target.shape[1]
