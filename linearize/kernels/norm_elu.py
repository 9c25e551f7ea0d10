"""NormAttention with phi = elu(x): TransNormer T1's layers of the second half.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, eq. 13-14,
sections 4.2 and 5.

    o_i = g * RMSNorm(phi(q_i) . sum_j phi(k_j) v_j^T),   phi(x) = elu(x)      [B, H, T, D] -> [B, H, T, D]

There is no denominator: weights are signed and do not sum to one. See `linearize.attention.norm`.
"""

from __future__ import annotations

from linearize.attention.norm import NormAttention
from linearize.kernels._transnormer import PAPER, URL
from linearize.kernels.base import NoArguments
from linearize.registry import KernelInfo, StageOne, register_kernel


class NormElu(NormAttention):
    """NormAttention with phi = elu(x)."""

    shift = False


register_kernel(
    KernelInfo(
        name="norm_elu",
        summary="no denominator: RMSNorm of the sums, phi = elu(x)",
        formula="o = g RMSNorm(phi(Q) (phi(K)^T V)), phi(x) = elu(x)",
        source=f"{PAPER}, eq. 13-14, sections 4.2 and 5",
        url=URL,
        config=NoArguments,
        build=NormElu,
        feature_dim=lambda config, d: d,
        parameters=lambda config, d: 0,
        output_parameters=lambda config, v: v,
        parameters_formula="V",
        learnable=True,
        positive=False,
        normalized=False,
        stage_one=StageOne(learning_rate=1e-2, loss="output"),
    )
)
