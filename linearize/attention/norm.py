"""NormAttention: linear attention without a denominator, its output normalised instead.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, eq. 13-14,
section 4.2, appendix D.

    o_i = g * RMSNorm(phi(q_i) . sum_j phi(k_j) v_j^T),   RMSNorm(x) = x / sqrt(mean(x^2) + 1e-6)

g: [V] learned per query head, 1 at the start: after softmax the next projection expects vectors of a size that
RMSNorm alone cannot give.
Differs from the paper: the norm is taken per head (a converted layer's heads have different sizes), and g is per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import HeadShape
from linearize.kernels.base import Features, FixedMap
from linearize.registry import KernelInfo

NORM_EPS = 1e-6


def rms_norm(x: Tensor) -> Tensor:
    """Divide x [..., V] by its root mean square."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + NORM_EPS)


class EluMap(FixedMap):
    """`elu(x)`, or `1 + elu(x)` with `shift`: [B, H, T, D] -> [B, H, T, D]. Inputs come unscaled."""

    scale_inputs = False

    def __init__(self, config: Any, heads: int, head_dim: int, shift: bool) -> None:
        super().__init__(config, heads, head_dim)
        self.shift = shift

    def forward(self, x: Tensor, *, keys: bool, positions: Tensor | None = None) -> Features:
        """See above; without a detour over 1 where elu is close to 0."""
        return Features(x.clamp(max=0.0).exp() + x.relu() if self.shift else F.elu(x))


class NormAttention(FeatureMapMixer):
    """See the module's formula.

    Attributes:
        shift: whether phi is 1 + elu instead of elu.
    """

    normalize = False
    shift = False

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape) -> None:
        super().__init__(info, config, shape)
        self.gain = nn.Parameter(torch.empty(shape.heads, shape.value_dim, dtype=torch.float32))

    def build_map(self, heads: int) -> EluMap:
        """Build phi."""
        return EluMap(self.config, heads, self.shape.head_dim, self.shift)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with a gain of 1."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.gain.fill_(1.0)

    def finish(self, mixed: Tensor) -> Tensor:
        """Normalise the sums [B, H, T, V]."""
        return rms_norm(mixed) * self.gain.float()[:, None]
