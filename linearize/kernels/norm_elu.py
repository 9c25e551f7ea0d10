"""NormAttention with phi = elu(x): the second half of TransNormer T1's layers.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, eq. 13-14,
sections 4.2 and 5.

    o_i = g * RMSNorm(phi(q_i) . sum_j phi(k_j) v_j^T),   phi(x) = elu(x)      [B, H, T, D] -> [B, H, T, D]

There is no denominator: weights are signed and do not sum to one (`linearize.kernels._transnormer`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from linearize.kernels._transnormer import NormMap, register_norm
from linearize.kernels.base import Features


class NormElu(NormMap):
    """Map [B, H, T, D] -> [B, H, T, D], signed."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        return Features(F.elu(x))


register_norm("norm_elu", NormElu, "elu(x)", positive=False)
