"""Hedgehog: a learned linear map per head with a spiky activation of both signs.

Paper: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
https://arxiv.org/abs/2402.04347, section 4.2: eq. 3 and 5 (exp), eq. 4 and appendix A.1 (softmax, the stable form).

    phi(x) = [act(W x + b) ; act(-W x - b)]        W: [F / 2, d], b: [F / 2] per head, F = 2 d by default

W starts as the identity; its rows beyond d start as random unit vectors, orthogonal in blocks of d. All are multiplied
by `start`; b starts at 0. A `start` above 1 makes the untrained weights peaked, which training from scratch needs to
compare tokens.

`activation="softmax"` (default): each half is a softmax over its d entries. `activation="exp"`: plain exponentials; a
key's largest exponent is split off as its log-scale, so that nothing overflows. Queries and keys are unscaled (no
1/sqrt(d)), as in the paper.
Differs from the paper: by default queries and keys share one map (`tied`); the authors' code has two. A choice of F
(`features`) other than 2 d is ours: small heads need more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, MapSpec, orthonormal, project


@dataclass(frozen=True)
class HedgehogConfig:
    """Arguments of `hedgehog`."""

    activation: str = option("softmax", "softmax over the features (eq. 4) or exp (eq. 3)", choices=("softmax", "exp"))
    bias: bool = option(True, "whether W x has a bias b")
    tied: bool = option(True, "whether queries and keys share one map")
    features: int | None = option(
        None, "total feature size F of both signs; none: twice the head size", low=2, high=65536, multiple_of=2
    )
    start: float = option(
        1.0, "factor of the identity that W starts from; 2 for exp trained from scratch", low=1e-3, high=100.0
    )

    def rows(self, head_dim: int) -> int:
        """Return the number of rows of W: half of F."""
        return head_dim if self.features is None else self.features // 2


class Hedgehog(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, F], non-negative."""

    scale_inputs = False

    def __init__(self, config: HedgehogConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        rows = config.rows(head_dim)
        self.weight = self.add_parameter(rows, head_dim)
        self.bias = self.add_parameter(rows) if config.bias else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start at the identity: the untrained map is the activation of [x ; -x] and of random rotations of it."""
        heads, rows, size = self.weight.shape
        self.weight[:, :size].copy_(torch.eye(rows, size)[:size])
        if rows > size:
            self.weight[:, size:].copy_(orthonormal(heads, rows - size, size, generator))
        self.weight.mul_(self.config.start)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        y = project(x, self.weight)
        if self.bias is not None:
            y = y + self.bias.float()[:, None]
        if self.config.activation == "softmax":
            return Features(torch.cat([y.softmax(dim=-1), (-y).softmax(dim=-1)], dim=-1))
        both = torch.cat([y, -y], dim=-1)
        largest = both.amax(dim=-1, keepdim=True)
        return Features(torch.exp(both - largest), largest[..., 0])

    def map_spec(self) -> MapSpec:
        """Describe the map for the native op."""
        stable = self.config.activation == "softmax"
        return MapSpec("softmax_both" if stable else "exp_both", self.weight, bias=self.bias, scaled=not stable)


register_kernel(
    KernelInfo(
        name="hedgehog",
        summary="learned linear map, softmax or exp of both signs",
        choose="the default: nearly as close to softmax as any, and the fastest of the close ones",
        formula="phi(x) = [act(W x + b) ; act(-W x - b)], act = softmax over the features | exp",
        source="Zhang et al. 2024 (Hedgehog), eq. 3-5, appendix A.1",
        url="https://arxiv.org/abs/2402.04347",
        config=HedgehogConfig,
        build=Hedgehog,
        feature_dim=lambda config, d: 2 * config.rows(d),
        parameters=lambda config, d: config.rows(d) * (d + config.bias),
        parameters_formula="F (d + 1) / 2",
        learnable=True,
        positive=True,
    )
)
