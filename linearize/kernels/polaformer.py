"""PolaFormer: positive and negative parts kept apart, sharpened by learned powers, and mixed by learned coefficients.

Paper: Meng et al. 2025, "PolaFormer: Polarity-aware Linear Attention for Vision Transformers",
https://arxiv.org/abs/2501.15061, section 4 (polarity-aware attention, learnable power function).

    x+ = relu(x)^p,  x- = relu(-x)^p,  p = 1 + alpha sigmoid(r)           r: [d] per head
    phi(k) = [k+ ; k-],  phi(q) = [a q+ + b q- ; a q- + b q+]             a, b: [d] per head, non-negative
    phi(q) . phi(k) = a (q+ k+ + q- k-) + b (q+ k- + q- k+)               same-sign and opposite-sign parts

[B, H, T, D] -> [B, H, T, 2 D], non-negative; a and b are the softplus of learned numbers and start at 1 and 0.1, p
starts at 1 + alpha / 2. Queries and keys are unscaled.
Differs from the paper: there, the same-sign part mixes one half of each value and the opposite-sign part the other
half, and the output is multiplied by a gate computed from the layer's input. An attention function does not see that
input, so here the mixing is learned inside the kernel, with one denominator. There is no convolution and no position
table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features


@dataclass(frozen=True)
class PolaformerConfig:
    """Arguments of `polaformer`."""

    alpha: float = option(3.0, "largest power minus one", low=0.0, high=8.0)


class Polaformer(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, 2 D], non-negative; queries and keys differ only in the mixing."""

    scale_inputs = False

    def __init__(self, config: PolaformerConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.power = self.add_parameter(head_dim)
        self.same = self.add_parameter(head_dim)
        self.opposite = self.add_parameter(head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with the middle power and mostly same-sign weights; nothing is random."""
        self.power.zero_()
        self.same.fill_(math.log(math.expm1(1.0)))
        self.opposite.fill_(math.log(math.expm1(0.1)))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map keys; see the module's formula."""
        return Features(torch.cat(self._polarised(x), dim=-1))

    def forward_queries(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Mix the two parts."""
        positive, negative = self._polarised(x)
        a, b = (F.softplus(raw.float())[:, None] for raw in (self.same, self.opposite))
        return Features(torch.cat([a * positive + b * negative, a * negative + b * positive], dim=-1))

    def _polarised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x+ and x-."""
        power = 1.0 + self.config.alpha * self.power.float().sigmoid()[:, None]
        return x.relu() ** power, (-x).relu() ** power


register_kernel(
    KernelInfo(
        name="polaformer",
        summary="polarity split with learned powers and learned mixing of same-sign and opposite-sign parts",
        choose="learned, with separate same-sign and opposite-sign parts; designed for images",
        formula="phi(k) = [k+ ; k-], phi(q) = [a q+ + b q- ; a q- + b q+], x+ = relu(x)^p, x- = relu(-x)^p, "
        "p = 1 + alpha sigmoid(r), a, b = softplus",
        source="Meng et al. 2025 (PolaFormer), section 4",
        url="https://arxiv.org/abs/2501.15061",
        config=PolaformerConfig,
        build=Polaformer,
        feature_dim=lambda config, d: 2 * d,
        parameters=lambda config, d: 3 * d,
        parameters_formula="3 d",
        learnable=True,
        positive=True,
    )
)
