"""No kernel: keys outside the window have no weight. The control for kernels joined to a softmax window.

    phi(x) = 0        [B, H, T, D] -> [B, H, T, 1]

With a window of W tokens this is sliding-window attention, and with sinks that of Xiao et al. 2024 (StreamingLLM),
https://arxiv.org/abs/2309.17453. The value of a kernel is its gain over this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels.base import Features, FixedMap, MapSpec, NoArguments


def nothing(heads: int, head_dim: int) -> MapSpec:
    """Describe a map whose only feature is zero to the native op: relu(0 x)."""
    return MapSpec("relu", torch.zeros(heads, 1, head_dim))


class Nothing(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, 1], zero."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        return Features(x.new_zeros(*x.shape[:-1], 1))

    def map_spec(self) -> MapSpec:
        return nothing(self.heads, self.head_dim)


register_kernel(
    KernelInfo(
        name="none",
        summary="no kernel: the softmax window alone",
        choose="as the control of a window: what a kernel must be better than",
        formula="phi(x) = 0",
        source="Xiao et al. 2024 (StreamingLLM): a window with sinks",
        url="https://arxiv.org/abs/2309.17453",
        config=NoArguments,
        build=Nothing,
        feature_dim=lambda config, d: 1,
        parameters=lambda config, d: 0,
        parameters_formula="0",
        learnable=False,
        positive=True,
        needs_window=True,
    )
)
