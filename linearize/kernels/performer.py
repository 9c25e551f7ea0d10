"""Performer (FAVOR+): positive random features of the softmax kernel, with orthogonal directions.

Paper: Choromanski et al. 2021, "Rethinking Attention with Performers", https://arxiv.org/abs/2009.14794, lemma 1 and
section 2.4 (orthogonal random features).

    phi(x) = [exp(w_i . x - |x|^2 / 2)]_{i <= m} / sqrt(m),   E[phi(x) . phi(y)] = exp(x . y),   w_i ~ N(0, I)

[B, H, T, D] -> [B, H, T, m], positive; x is scaled by scaling^1/2, so x . y is the softmax score. The directions are
orthogonal in blocks of d and have the lengths of Gaussian vectors. They are drawn once, at conversion.
The largest exponent of a token is split off as its log-scale.
Differs from the paper: no small constant is added to the features. (LUNA's eq. 8 quotes this map with w of variance
1 / sqrt(d); the variance that estimates the kernel is sqrt(d) in LUNA's scaling, which is 1 in the scaling used here.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, orthonormal, project


@dataclass(frozen=True)
class PerformerConfig:
    """Arguments of `performer`."""

    features: int | None = option(None, "number m of features; none: d ln d, rounded down", low=1, high=65536)
    orthogonal: bool = option(True, "whether directions are orthogonal in blocks of d")

    def count(self, head_dim: int) -> int:
        """Return m for a head size."""
        return self.features if self.features is not None else max(1, int(head_dim * math.log(head_dim)))


class Performer(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, m], positive."""

    def __init__(self, config: PerformerConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.m = config.count(head_dim)
        self.weight: Tensor
        self.add_buffer("weight", self.m, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the directions."""
        heads, rows, size = self.weight.shape
        if not self.config.orthogonal:
            self.weight.copy_(torch.randn(heads, rows, size, generator=generator))
            return
        # Each row is Gaussian, and orthogonal to the other rows in its block.
        directions = orthonormal(heads, rows, size, generator)
        lengths = torch.randn(heads, rows, size, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        self.weight.copy_(directions * lengths)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        exponent = project(x, self.weight) - 0.5 * x.square().sum(dim=-1, keepdim=True)
        largest = exponent.amax(dim=-1, keepdim=True)
        return Features(torch.exp(exponent - largest) * self.m**-0.5, largest[..., 0])


register_kernel(
    KernelInfo(
        name="performer",
        summary="FAVOR+: positive orthogonal random features of the softmax kernel",
        choose="random, unbiased features without training; far from softmax if there are few",
        formula="phi(x) = [exp(w_i.x - |x|^2 / 2)]_i / sqrt(m), w_i ~ N(0, I) orthogonal, x scaled by scaling^1/2",
        source="Choromanski et al. 2021 (Performer), lemma 1, section 2.4",
        url="https://arxiv.org/abs/2009.14794",
        config=PerformerConfig,
        build=Performer,
        feature_dim=lambda config, d: config.count(d),
        positive=True,
        random=True,
        estimates=torch.exp,
    )
)
