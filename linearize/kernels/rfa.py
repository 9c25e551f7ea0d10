"""Random feature attention: random Fourier features of the softmax kernel, drawn once.

Paper: Peng et al. 2021, "Random Feature Attention", https://arxiv.org/abs/2103.02143, sections 2.2 and 3.1; the
features are those of Rahimi and Recht 2007.

    phi(x) = exp(|x|^2 / 2) [cos w_i . x ; sin w_i . x]_{i <= n} / sqrt(n),   w_i ~ N(0, I)
    E[phi(x) . phi(y)] = exp(x . y)

[B, H, T, D] -> [B, H, T, 2 n]; x is scaled by scaling^1/2, so x . y is the softmax score; |x|^2 / 2 is kept as the
token's log-scale. Weights can be negative.
Differs from the paper: queries and keys are not normalised to unit length, because a pretrained model's scores depend
on their lengths (hence exp(|x|^2 / 2)), and there is no gate. `floor` keeps denominators away from zero
(`linearize.ops.floored`); with 0 they are as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, draw_normal, floor_option, project


@dataclass(frozen=True)
class RfaConfig:
    """Arguments of `rfa`."""

    frequencies: int | None = option(None, "number n of frequencies; none: the head size", low=1, high=65536)
    floor: float = floor_option(0.2)

    def count(self, head_dim: int) -> int:
        """Return n for a head size."""
        return self.frequencies if self.frequencies is not None else head_dim


class Rfa(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, 2 n]."""

    def __init__(self, config: RfaConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.n = config.count(head_dim)
        self.floor = config.floor
        self.weight: Tensor
        self.add_buffer("weight", self.n, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the frequencies."""
        draw_normal(self.weight, generator)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        angle = project(x, self.weight)
        phi = torch.cat([angle.cos(), angle.sin()], dim=-1) * self.n**-0.5
        return Features(phi, 0.5 * x.square().sum(dim=-1))


register_kernel(
    KernelInfo(
        name="rfa",
        summary="random Fourier features of the softmax kernel",
        choose="random Fourier features without training; weights can be negative",
        formula="phi(x) = exp(|x|^2 / 2) [cos w_i.x ; sin w_i.x]_i / sqrt(n), w_i ~ N(0, I), x scaled by scaling^1/2",
        source="Peng et al. 2021 (RFA), sections 2.2 and 3.1",
        url="https://arxiv.org/abs/2103.02143",
        config=RfaConfig,
        build=Rfa,
        feature_dim=lambda config, d: 2 * config.count(d),
        positive=False,
        random=True,
        estimates=torch.exp,
        legacy_defaults={"floor": 0.0},
    )
)
