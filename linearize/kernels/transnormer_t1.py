"""TransNormer T1, a layer plan: ReLU attention in blocks, then NormAttention with elu.

Paper: Qin et al. 2022, "The Devil in Linear Transformer", https://arxiv.org/abs/2210.10340, sections 4.2, 4.3 and 5.

    first half of the layers:  diag_rela, blocks of w = 64 tokens
    second half of the layers: norm_elu

If the number of layers is odd, the second half is larger.
"""

from __future__ import annotations

from linearize.kernels._transnormer import register_preset

register_preset("transnormer_t1", "diag_rela", "norm_elu", parameters_formula="V per head and layer", positive=False)
