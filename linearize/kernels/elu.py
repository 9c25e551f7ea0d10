"""1 + elu: the map of the first linear attention; nothing to learn.

Paper: Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
https://arxiv.org/abs/2006.16236, eq. 7.

    phi(x) = 1 + elu(x)      [B, H, T, D] -> [B, H, T, D], positive

Computed as exp(min(x, 0)) + max(x, 0), which is equal but does not cancel 1 against -1 for negative x.
"""

from __future__ import annotations

from torch import Tensor

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels.base import Features, FixedMap, NoArguments


class Elu(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, D], positive."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        return Features(one_plus_elu(x))


def one_plus_elu(x: Tensor) -> Tensor:
    """Return 1 + elu(x), accurate even for very negative x."""
    return x.clamp(max=0.0).exp() + x.relu()


register_kernel(
    KernelInfo(
        name="elu",
        summary="1 + elu of each entry",
        choose="the simplest map, for models trained from scratch; far from a pretrained softmax",
        formula="phi(x) = 1 + elu(x)",
        source="Katharopoulos et al. 2020 (Transformers are RNNs), eq. 7",
        url="https://arxiv.org/abs/2006.16236",
        config=NoArguments,
        build=Elu,
        feature_dim=lambda config, d: d,
        positive=True,
    )
)
