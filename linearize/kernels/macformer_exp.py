"""Macformer with the kernel exp(z): random Maclaurin features and ppSBN.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, table 1, definition 3, algorithm 1.

    K(z) = exp(z) = sum_N z^N / N!

[B, H, T, D] -> [B, H, T, 128]; weights can be negative. The map is in `linearize.kernels._macformer`.
"""

from __future__ import annotations

import math

import torch

from linearize.kernels._macformer import Macformer, register_macformer


class MacformerExp(Macformer):
    """Features of exp(z)."""

    @staticmethod
    def series(n: int) -> float:
        """Return a_N = 1 / N!."""
        return 1.0 / math.factorial(n)


register_macformer("macformer_exp", MacformerExp, "exp(z)", "a_N = 1 / N!", torch.exp)
