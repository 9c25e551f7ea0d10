"""Exponential of each entry, nothing to learn: the Hedgehog paper's control for spikiness without monotonicity.

Paper: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
https://arxiv.org/abs/2402.04347, section 3 and table of compared maps (t = 1 and t = 2).

    phi_t(x) = exp(t x)      [B, H, T, D] -> [B, H, T, D], positive

The largest exponent of a token is split off as its log-scale, so that nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import Features, FixedMap


@dataclass(frozen=True)
class ExpConfig:
    """Arguments of `exp`."""

    temperature: float = option(1.0, "factor t of the entries; the paper uses 1 and 2", low=0.0, high=100.0)


class Exp(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, D], positive."""

    scale_inputs = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        y = x * self.config.temperature
        largest = y.amax(dim=-1, keepdim=True)
        return Features(torch.exp(y - largest), largest[..., 0])


register_kernel(
    KernelInfo(
        name="exp",
        summary="exponential of each entry, with a temperature",
        choose="like elu but sharper: recall tasks trained from scratch",
        formula="phi(x) = exp(t x)",
        source="Zhang et al. 2024 (Hedgehog), section 3",
        url="https://arxiv.org/abs/2402.04347",
        config=ExpConfig,
        build=Exp,
        feature_dim=lambda config, d: d,
        positive=True,
    )
)
