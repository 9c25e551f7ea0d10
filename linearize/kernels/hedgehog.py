"""Hedgehog: a learned linear map per head with a spiky activation, both signs side by side.

Paper: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
https://arxiv.org/abs/2402.04347, section 4.2: eq. 3 and 5 (exp), eq. 4 and appendix A.1 (softmax, the stable form).

    phi(x) = [act(W x + b) ; act(-W x - b)]        W: [d, d], b: [d] per head, W = I and b = 0 at the start

`activation="softmax"` (default): each half is a softmax over its d entries. `activation="exp"`: plain exponentials; a
key's largest exponent is split off as its log-scale, so that nothing overflows. Queries and keys come unscaled (no
1/sqrt(d)), as in the paper.
Differs from the paper: by default queries and keys share one map (`tied`); the authors' code has two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.kernels.base import FeatureMap, Features, MapSpec, project
from linearize.registry import KernelInfo, StageOne, option, register_kernel


@dataclass(frozen=True)
class HedgehogConfig:
    """Arguments of `hedgehog`."""

    activation: str = option("softmax", "softmax over the features (eq. 4) or exp (eq. 3)", choices=("softmax", "exp"))
    bias: bool = option(True, "whether W x has a bias b")
    tied: bool = option(True, "whether queries and keys share one map")


class Hedgehog(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, 2 D], non-negative."""

    scale_inputs = False

    def __init__(self, config: HedgehogConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.weight = self.add_parameter(head_dim, head_dim)
        self.bias = self.add_parameter(head_dim) if config.bias else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start at the identity: the untrained map is the activation of [x ; -x]."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.head_dim).expand_as(self.weight))
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """See the module's formula."""
        y = project(x, self.weight)
        if self.bias is not None:
            y = y + self.bias.float()[:, None]
        if self.config.activation == "softmax":
            return Features(torch.cat([y.softmax(dim=-1), (-y).softmax(dim=-1)], dim=-1))
        both = torch.cat([y, -y], dim=-1)
        largest = both.amax(dim=-1, keepdim=True)
        return Features(torch.exp(both - largest), largest[..., 0])

    def map_spec(self) -> MapSpec:
        """See `FeatureMap.map_spec`."""
        stable = self.config.activation == "softmax"
        return MapSpec("softmax_both" if stable else "exp_both", self.weight, bias=self.bias, scaled=not stable)


register_kernel(
    KernelInfo(
        name="hedgehog",
        summary="learned linear map, softmax or exp of both signs",
        choose="the default: nearly as close as any, the fastest of the close ones",
        formula="phi(x) = [act(W x + b) ; act(-W x - b)], act = softmax over the features | exp",
        source="Zhang et al. 2024 (Hedgehog), eq. 3-5, appendix A.1",
        url="https://arxiv.org/abs/2402.04347",
        config=HedgehogConfig,
        build=Hedgehog,
        feature_dim=lambda config, d: 2 * d,
        parameters=lambda config, d: d * d + d * config.bias,
        parameters_formula="d^2 + d",
        learnable=True,
        positive=True,
        stage_one=StageOne(learning_rate=1e-2),
    )
)
