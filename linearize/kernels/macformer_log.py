"""Macformer with the kernel 1 - log(1 - z): random Maclaurin features and ppSBN.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, table 1, definition 3, algorithm 1.

    K(z) = 1 - log(1 - z) = 1 + sum_{N >= 1} z^N / N,   |z| < 1

[B, H, T, D] -> [B, H, T, 128]; weights can be negative. The map is in `linearize.kernels._macformer`.
Differs from the paper: table 1 prints a_N = 1 / min(1, N), which divides by 0 at N = 0 and is 1 elsewhere.
"""

from __future__ import annotations

import torch

from linearize.kernels._macformer import Macformer, register_macformer


class MacformerLog(Macformer):
    """Features of 1 - log(1 - z)."""

    @staticmethod
    def series(n: int) -> float:
        """Return a_0 = 1, a_N = 1 / N."""
        return 1.0 / max(n, 1)


register_macformer(
    "macformer_log", MacformerLog, "1 - log(1 - z)", "a_0 = 1, a_N = 1 / N", lambda z: 1.0 - torch.log(1.0 - z)
)
