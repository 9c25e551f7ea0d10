"""NormAttention with phi = 1 + elu(x): TransNormer T2's layers of the second half.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, eq. 13-14,
sections 4.2 and 5.

    o_i = g * RMSNorm(phi(q_i) . sum_j phi(k_j) v_j^T),   phi(x) = 1 + elu(x)      [B, H, T, D] -> [B, H, T, D]

There is no denominator: weights are non-negative and do not sum to one. See `linearize.attention.norm`.
"""

from __future__ import annotations

from linearize.attention.norm import NormAttention
from linearize.kernels._transnormer import PAPER, URL
from linearize.kernels.base import NoArguments
from linearize.registry import KernelInfo, StageOne, register_kernel


class Norm1Elu(NormAttention):
    """NormAttention with phi = 1 + elu(x)."""

    shift = True


register_kernel(
    KernelInfo(
        name="norm_1elu",
        summary="no denominator: RMSNorm of the sums, phi = 1 + elu(x)",
        formula="o = g RMSNorm(phi(Q) (phi(K)^T V)), phi(x) = 1 + elu(x)",
        source=f"{PAPER}, eq. 13-14, sections 4.2 and 5",
        url=URL,
        config=NoArguments,
        build=Norm1Elu,
        feature_dim=lambda config, d: d,
        parameters=lambda config, d: 0,
        output_parameters=lambda config, v: v,
        parameters_formula="V",
        learnable=True,
        positive=True,
        normalized=False,
        stage_one=StageOne(learning_rate=1e-2, loss="output"),
    )
)
