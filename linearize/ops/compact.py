"""Bring the real tokens of a padded batch to the front, so that what counts tokens does not count padding."""

from __future__ import annotations

import torch
from torch import Tensor


def real_first(mask: Tensor) -> Tensor:
    """Return the order [B, T] that puts the real tokens of `mask` [B, T] first and keeps their order."""
    real = mask.bool()
    # By counting: ONNX has no sort that keeps the order of equals.
    place = torch.where(real, real.cumsum(dim=-1), real.sum(dim=-1, keepdim=True) + (~real).cumsum(dim=-1)) - 1
    return inverse(place)


def inverse(order: Tensor) -> Tensor:
    """Return the order [B, T] that undoes another."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, places)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Pick tokens `order` [B, N] of x [B, H, T, D] or [B, H, T] -> [B, H, N, D] or [B, H, N]."""
    index = order[:, None] if x.ndim == 3 else order[:, None, :, None]
    return x.gather(2, index.expand(*x.shape[:2], -1, *x.shape[3:]))


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undo `take` with a whole order: [B, H, T, D] -> [B, H, T, D]."""
    return take(x, inverse(order))
