"""No kernel: keys outside the window have no weight. The baseline for kernels combined with a softmax window.

    phi(x) = 0        [B, H, T, D] -> [B, H, T, 1]

With a window of W tokens this is sliding-window attention, and with sinks the attention of Xiao et al. 2024
(StreamingLLM), https://arxiv.org/abs/2309.17453. The benefit of a kernel is its gain over this baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels.base import Features, FixedMap, MapSpec, NoArguments


def nothing(heads: int, head_dim: int) -> MapSpec:
    """Describe, for the native op, a map whose only feature is zero, whatever x is."""
    return MapSpec("relu", torch.zeros(heads, 1, head_dim), amplitude=0.0)


class Nothing(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, 1], zero."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        return Features(x.new_zeros(*x.shape[:-1], 1))

    def map_spec(self) -> MapSpec:
        """Describe the map for the native op."""
        return nothing(self.heads, self.head_dim)


register_kernel(
    KernelInfo(
        name="none",
        summary="no kernel: the softmax window alone",
        choose="the baseline for a window: a kernel should do better than this",
        formula="phi(x) = 0",
        source="Xiao et al. 2024 (StreamingLLM): a window with sinks",
        url="https://arxiv.org/abs/2309.17453",
        config=NoArguments,
        build=Nothing,
        feature_dim=lambda config, d: 1,
        positive=True,
        needs_window=True,
    )
)
