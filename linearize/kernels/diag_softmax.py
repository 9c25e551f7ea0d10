"""Softmax attention inside non-overlapping blocks of w = 64 tokens: the first half of TransNormer T2's layers.

Paper: Qin et al. 2022, "The Devil in Linear Transformer" (TransNormer), https://arxiv.org/abs/2210.10340, sections 4.3
and 5.

    o_i = sum_j softmax_j(scaling q_i . k_j) v_j,   j in the block of i

There is no feature map and nothing to learn. Blocks are counted in tokens without padding (`linearize.ops.block`).
"""

from __future__ import annotations

from linearize.core.registry import KernelInfo, register_kernel
from linearize.kernels._transnormer import PAPER, URL, BlockConfig
from linearize.kernels.base import BlockKernel


class DiagSoftmax(BlockKernel):
    """Softmax of the scores inside blocks."""


register_kernel(
    KernelInfo(
        name="diag_softmax",
        summary="softmax inside blocks of 64 tokens",
        choose="if near tokens are enough: softmax inside blocks, nothing beyond them",
        formula="o_i = sum_j softmax_j(scaling q_i.k_j) v_j, j in the block of i",
        source=f"{PAPER}, sections 4.3 and 5",
        url=URL,
        config=BlockConfig,
        build=DiagSoftmax,
        feature_dim=None,
        positive=True,
    )
)
