"""T2R: a learned linear map per head with a ReLU. With stage one it is the Hedgehog paper's "T2R-HH".

Paper: Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs", https://arxiv.org/abs/2103.13076,
section 2.2; compared in Zhang et al. 2024 (Hedgehog), https://arxiv.org/abs/2402.04347, section 4.2.

    phi(x) = relu(W x + b)        W: [F, d], b: [F] per head, F = d by default

[B, H, T, D] -> [B, H, T, F], non-negative; queries and keys are unscaled. W starts Gaussian with deviation d^-1/2.
Differs from the paper: by default queries and keys share one map (`tied`). A query whose features are all 0 gives no
key any weight: its output is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, MapSpec, draw_normal, project


@dataclass(frozen=True)
class T2rConfig:
    """Arguments of `t2r`."""

    features: int | None = option(None, "feature size F; none: the head size", low=1, high=65536)
    tied: bool = option(True, "whether queries and keys share one map")

    def count(self, head_dim: int) -> int:
        """Return F for a head size."""
        return self.features if self.features is not None else head_dim


class T2r(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, F], non-negative."""

    scale_inputs = False

    def __init__(self, config: T2rConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        features = config.count(head_dim)
        self.weight = self.add_parameter(features, head_dim)
        self.bias = self.add_parameter(features)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw W and set b to zero."""
        draw_normal(self.weight, generator, self.head_dim**-0.5)
        self.bias.zero_()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        return Features((project(x, self.weight) + self.bias.float()[:, None]).relu())

    def map_spec(self) -> MapSpec:
        """Describe the map for the native op."""
        return MapSpec("relu", self.weight, bias=self.bias)


register_kernel(
    KernelInfo(
        name="t2r",
        summary="learned linear map with ReLU",
        choose="the smallest learned state, if memory during decoding matters",
        formula="phi(x) = relu(W x + b)",
        source="Kasai et al. 2021 (T2R), section 2.2; Zhang et al. 2024 (Hedgehog), section 4.2",
        url="https://arxiv.org/abs/2103.13076",
        config=T2rConfig,
        build=T2r,
        feature_dim=lambda config, d: config.count(d),
        parameters=lambda config, d: config.count(d) * (d + 1),
        parameters_formula="F (d + 1)",
        learnable=True,
        positive=True,
    )
)
