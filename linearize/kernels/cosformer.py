"""cosFormer: ReLU features whose weights fall off like a cosine with the distance between tokens.

Paper: Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", https://arxiv.org/abs/2202.08791, section 3.2.

    phi(x_i) = [relu(x_i) cos(pi i / 2 M) ; relu(x_i) sin(pi i / 2 M)]
    phi(q_i) . phi(k_j) = relu(q_i) . relu(k_j) cos(pi (i - j) / 2 M)

[B, H, T, D] -> [B, H, T, 2 D]; i counts the tokens of a text from 0 without padding. Weights are non-negative.
Differs from the paper: M is not the length of the current batch but a number fixed at conversion (`max_positions`, the
longest input), so that a token has the same features alone as in a batch. Tokens at position M and later share the last
angle, which keeps their weights non-negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.errors import ConfigError
from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels.base import Features, FixedMap


@dataclass(frozen=True)
class CosformerConfig:
    """Arguments of `cosformer`."""

    max_positions: int | None = option(
        None, "longest input M in tokens; none: the model's own limit, filled in at conversion", low=1
    )


class Cosformer(FixedMap):
    """Map [B, H, T, D] -> [B, H, T, 2 D], non-negative.

    Raises:
        ConfigError: on construction, if `max_positions` is None.
    """

    scale_inputs = False

    def __init__(self, config: CosformerConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        if config.max_positions is None:
            raise ConfigError(
                "kernel cosformer needs the length of the longest input, and the model does not state one; "
                "give max_positions=NUMBER among the kernel's arguments"
            )
        self.limit = config.max_positions

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        if positions is None:
            positions = torch.arange(x.shape[2], device=x.device)[None]
        angle = (positions.float().clamp(max=self.limit) * (math.pi / (2 * self.limit)))[:, None, :, None]
        y = x.relu()
        return Features(torch.cat([y * angle.cos(), y * angle.sin()], dim=-1))


register_kernel(
    KernelInfo(
        name="cosformer",
        summary="ReLU features reweighted by the cosine of the distance",
        choose="if near tokens matter more than far ones and stage one should train nothing",
        formula="phi(x_i) = [relu(x_i) cos(pi i / 2M) ; relu(x_i) sin(pi i / 2M)], i <= M",
        source="Qin et al. 2022 (cosFormer), section 3.2",
        url="https://arxiv.org/abs/2202.08791",
        config=CosformerConfig,
        build=Cosformer,
        feature_dim=lambda config, d: 2 * d,
        positive=True,
        positional=True,
        maximum_positions=True,
    )
)
