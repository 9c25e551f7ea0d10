"""Macformer with the kernel sinh(z) + cosh(z): random Maclaurin features and ppSBN.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, table 1, definition 3, algorithm 1.

    K(z) = sinh(z) + cosh(z) = sum_N z^N / N!

[B, H, T, D] -> [B, H, T, 128]; weights can be negative. The map is in `linearize.kernels._macformer`.
The function is exp(z), so this is `macformer_exp` under its second name in the paper.
"""

from __future__ import annotations

import torch

from linearize.kernels._macformer import register_macformer
from linearize.kernels.macformer_exp import MacformerExp


class MacformerTrigh(MacformerExp):
    """Features of sinh(z) + cosh(z)."""


register_macformer(
    "macformer_trigh", MacformerTrigh, "sinh(z) + cosh(z)", "a_N = 1 / N!", lambda z: torch.sinh(z) + torch.cosh(z)
)
