"""Macformer with the kernel 2 - sqrt(1 - z): random Maclaurin features and ppSBN.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, table 1, definition 3, algorithm 1.

    K(z) = 2 - sqrt(1 - z) = 1 + sum_{N >= 1} (2N - 3)!! / (2^N N!) z^N,   |z| < 1

[B, H, T, D] -> [B, H, T, 128]; weights can be negative. The map is in `linearize.kernels._macformer`.
Differs from the paper: table 1 prints max(1, 2N - 3) instead of the DOUBLE factorial (2N - 3)!!.
"""

from __future__ import annotations

import math

import torch

from linearize.kernels._macformer import Macformer, register_macformer


class MacformerSqrt(Macformer):
    """Features of 2 - sqrt(1 - z)."""

    @staticmethod
    def series(n: int) -> float:
        """Return a_0 = 1, a_N = (2N - 3)!! / (2^N N!)."""
        return math.prod(range(1, 2 * n - 2, 2)) / (2.0**n * math.factorial(n))


register_macformer(
    "macformer_sqrt",
    MacformerSqrt,
    "2 - sqrt(1 - z)",
    "a_0 = 1, a_N = (2N - 3)!! / (2^N N!)",
    lambda z: 2.0 - torch.sqrt(1.0 - z),
)
