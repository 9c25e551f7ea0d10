"""Macformer with the kernel 1 / (1 - z): random Maclaurin features and ppSBN.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, table 1, definition 3, algorithm 1.

    K(z) = 1 / (1 - z) = sum_N z^N,   |z| < 1

[B, H, T, D] -> [B, H, T, 128]; weights can be negative. The map is in `linearize.kernels._macformer`.
"""

from __future__ import annotations

from linearize.kernels._macformer import Macformer, register_macformer


class MacformerInv(Macformer):
    """Features of 1 / (1 - z)."""

    @staticmethod
    def series(n: int) -> float:
        """Return a_N = 1."""
        return 1.0


register_macformer("macformer_inv", MacformerInv, "1 / (1 - z)", "a_N = 1", lambda z: 1.0 / (1.0 - z))
