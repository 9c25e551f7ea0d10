"""Code shared by the TransNormer presets and their parts: the block length, NormAttention and its norm.

Paper: Qin et al. 2022, "The Devil in Linear Transformer", https://arxiv.org/abs/2210.10340, eq. 13-14, sections 4.2,
4.3 and 5, appendix D.

    o_i = g * RMSNorm(phi(q_i) . sum_j phi(k_j) v_j^T),   RMSNorm(x) = x / sqrt(mean(x^2) + 1e-6)

g: [V] is learned per query head and starts at 1. It is needed because the next projection expects vectors of the
magnitude that softmax produces, which RMSNorm alone does not give.
Differs from the paper: the norm is taken per head (the heads of a converted layer differ in magnitude), and g is per
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linearize.core.registry import KernelInfo, StageOne, option, register_kernel
from linearize.kernels.base import FixedMap, Kernel, NoArguments, Output

URL = "https://arxiv.org/abs/2210.10340"
PAPER = "Qin et al. 2022 (TransNormer)"
EPS = 1e-6


@dataclass(frozen=True)
class BlockConfig:
    """Arguments of `diag_softmax`, `diag_rela` and the two presets."""

    block: int = option(64, "tokens per block of DiagAttention, w", low=1, high=65536)


class RmsNorm(Output):
    """Divide the output of each head by its root mean square, and multiply it by a learned gain."""

    def __init__(self, heads: int, value_dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(heads, value_dim, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """Start with a gain of 1."""
        self.gain.fill_(1.0)

    def forward(self, mixed: Tensor) -> Tensor:
        """Normalise the sums [B, H, T, V]."""
        return mixed * torch.rsqrt(mixed.square().mean(dim=-1, keepdim=True) + EPS) * self.gain.float()[:, None]


class Normed(Kernel):
    """Mixin of the kernels with this norm; it comes first in the method resolution order."""

    @classmethod
    def output(cls, config: object, heads: int, value_dim: int) -> RmsNorm:
        """Return the norm."""
        return RmsNorm(heads, value_dim)


class NormMap(Normed, FixedMap):
    """Base of the NormAttention maps, which have no denominator. Inputs are unscaled."""

    scale_inputs = False
    normalize = False


def register_norm(name: str, build: type[NormMap], phi: str, *, positive: bool) -> None:
    """Register one of the two NormAttention kernels."""
    register_kernel(
        KernelInfo(
            name=name,
            summary=f"no denominator: RMSNorm of the sums, phi = {phi}",
            choose="from scratch, if denominators make training unstable; part of the TransNormer presets",
            formula=f"o = g RMSNorm(phi(Q) (phi(K)^T V)), phi(x) = {phi}",
            source=f"{PAPER}, eq. 13-14, sections 4.2 and 5",
            url=URL,
            config=NoArguments,
            build=build,
            feature_dim=lambda config, d: d,
            output_parameters=lambda config, v: v,
            parameters_formula="V",
            learnable=True,
            positive=positive,
            normalized=False,
            stage_one=StageOne(learning_rate=3e-2, loss="output"),
        )
    )


def register_preset(name: str, diag: str, norm: str, *, parameters_formula: str, positive: bool) -> None:
    """Register one of the two layer plans."""

    def preset(config: BlockConfig, layers: int) -> list[tuple[str, dict[str, object]]]:
        """Return `diag` for the first half of the layers (rounded down), and `norm` for the others."""
        first = layers // 2
        diagonal: dict[str, object] = {"block": config.block}
        return [(diag, diagonal)] * first + [(norm, {})] * (layers - first)

    register_kernel(
        KernelInfo(
            name=name,
            summary=f"layer plan: {diag} in the first half of the layers, {norm} in the second",
            choose="to reproduce TransNormer: near tokens in the early layers, all tokens in the later ones",
            formula=f"layers 0 to L/2 - 1: {diag}; layers L/2 to L - 1: {norm}",
            source=f"{PAPER}, sections 4.2, 4.3 and 5",
            url=URL,
            config=BlockConfig,
            build=None,
            preset=preset,
            feature_dim=None,
            parameters_formula=parameters_formula,
            learnable=True,
            positive=positive,
            normalized=False,
            stage_one=StageOne(loss="output"),
        )
    )
