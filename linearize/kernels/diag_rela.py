"""ReLU attention inside non-overlapping blocks of w = 64 tokens: the first half of TransNormer T1's layers.

Papers: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, sections 4.3
and 5; Zhang, Titov and Sennrich 2021, "Sparse Attention with Linear Units" (ReLA), https://arxiv.org/abs/2104.07012.

    o_i = g * RMSNorm(sum_j relu(scaling q_i . k_j) v_j),   j in the block of i

There is no feature map; g: [V] is learned per query head. Weights do not sum to one. Blocks are
counted in tokens without padding (`linearize.ops.block`); the norm is in `linearize.kernels._transnormer`.
Differs from the paper: ReLA's gate, which reads the layer's input, is left out.
"""

from __future__ import annotations

from linearize.core.registry import KernelInfo, StageOne, register_kernel
from linearize.kernels._transnormer import PAPER, URL, BlockConfig, Normed
from linearize.kernels.base import BlockKernel


class DiagRela(Normed, BlockKernel):
    """ReLU of the scores inside blocks, followed by a norm."""

    softmax = False


register_kernel(
    KernelInfo(
        name="diag_rela",
        summary="ReLU attention with RMSNorm inside blocks of 64 tokens",
        choose="if near tokens are enough; part of the TransNormer presets",
        formula="o_i = g RMSNorm(sum_j relu(scaling q_i.k_j) v_j), j in the block of i",
        source=f"{PAPER}, sections 4.3 and 5; Zhang et al. 2021 (ReLA)",
        url=URL,
        config=BlockConfig,
        build=DiagRela,
        feature_dim=None,
        output_parameters=lambda config, v: v,
        parameters_formula="V",
        learnable=True,
        positive=True,
        normalized=False,
        stage_one=StageOne(learning_rate=3e-2, loss="output"),
    )
)
