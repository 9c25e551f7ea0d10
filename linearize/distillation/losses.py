"""The loss of stage one on head outputs; that on weights is in `linearize.distillation.blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.distillation.row_loss import TINY
from linearize.distillation.targets import Targets


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
