"""No kernel: nothing outside the window has any weight. It is the control of a kernel joined to a softmax window.

    phi(x) = 0        [B, H, T, D] -> [B, H, T, 1]

With a window of W tokens this is sliding-window attention, with sinks that of Xiao et al. 2024 (StreamingLLM),
https://arxiv.org/abs/2309.17453. What a kernel is worth is what it brings over this one.
"""

from __future__ import annotations

from torch import Tensor

from linearize.kernels.base import Features, FixedMap, NoArguments
from linearize.registry import KernelInfo, register_kernel


class Nothing(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, 1], zero."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """See the module's formula."""
        return Features(x.new_zeros(*x.shape[:-1], 1))


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
