"""ReLU of each entry, nothing to learn.

Paper: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
https://arxiv.org/abs/2402.04347, section 3 (compared feature maps); after Kasai et al. 2021, https://arxiv.org/abs/2103.13076.

    phi(x) = max(x, 0)      [B, H, T, D] -> [B, H, T, D], non-negative

A query without a positive entry gives no key any weight: its output is 0.
"""

from __future__ import annotations

from torch import Tensor

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels.base import Features, FixedMap, NoArguments


class Relu(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, D], non-negative."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        return Features(x.relu())


register_kernel(
    KernelInfo(
        name="relu",
        summary="ReLU of each entry",
        choose="sparse features without training; far from a pretrained softmax",
        formula="phi(x) = max(x, 0)",
        source="Zhang et al. 2024 (Hedgehog), section 3; after Kasai et al. 2021",
        url="https://arxiv.org/abs/2402.04347",
        config=NoArguments,
        build=Relu,
        feature_dim=lambda config, d: d,
        positive=True,
    )
)
