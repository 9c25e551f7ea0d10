"""Second-order Taylor expansion of the exponential, exact as a feature map.

Paper: Arora et al. 2024, "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff" (Based),
https://arxiv.org/abs/2402.18668, section 4; after Keles et al. 2023, https://arxiv.org/abs/2209.04881.

    phi(x) = [1 ; x ; vec(x x^T) / sqrt(2)],   phi(x) . phi(y) = 1 + x . y + (x . y)^2 / 2 >= 1/2

[B, H, T, D] -> [B, H, T, 1 + D + D^2]; x is scaled by scaling^1/2, so x . y is the softmax score. Individual features
can be negative, but the weights are positive. F grows with the square of the head size.
Differs from the paper: queries and keys keep their size D (Based trains from scratch and projects them down to 16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels.base import Features, FixedMap, NoArguments


class Taylor(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, 1 + D + D^2]."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) * 0.5**0.5
        return Features(torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1))


register_kernel(
    KernelInfo(
        name="taylor",
        summary="second-order Taylor expansion of exp",
        choose="close to exp for small scores without training, at the price of the largest state",
        formula="phi(x) = [1 ; x ; vec(x x^T) / sqrt(2)], x scaled by scaling^1/2",
        source="Arora et al. 2024 (Based), section 4",
        url="https://arxiv.org/abs/2402.18668",
        config=NoArguments,
        build=Taylor,
        feature_dim=lambda config, d: 1 + d + d * d,
        positive=True,
        max_head_dim=128,
    )
)
