"""What the TransNormer presets and their parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linearize.registry import KernelInfo, StageOne, option, register_kernel

URL = "https://arxiv.org/abs/2210.10340"
PAPER = "Qin et al. 2022 (TransNormer)"


@dataclass(frozen=True)
class TransnormerConfig:
    """Arguments of `transnormer_t1` and `transnormer_t2`."""

    block: int = option(64, "tokens per block of the first half's DiagAttention, w", low=1, high=65536)


def layer_plan(diag: str, norm: str) -> Callable[[Any, int], list[tuple[str, dict[str, Any]]]]:
    """Make the preset: DiagAttention in the first half of the layers (rounded down), NormAttention in the others."""

    def preset(config: TransnormerConfig, layers: int) -> list[tuple[str, dict[str, Any]]]:
        first = layers // 2
        return [(diag, {"block": config.block})] * first + [(norm, {})] * (layers - first)

    return preset


def register_preset(name: str, diag: str, norm: str, *, parameters_formula: str, positive: bool) -> None:
    """Register one of the two."""
    register_kernel(
        KernelInfo(
            name=name,
            summary=f"layer plan: {diag} in the first half of the layers, {norm} in the second",
            formula=f"layers 0 to L/2 - 1: {diag}; layers L/2 to L - 1: {norm}",
            source=f"{PAPER}, sections 4.2, 4.3 and 5",
            url=URL,
            config=TransnormerConfig,
            build=None,
            preset=layer_plan(diag, norm),
            feature_dim=None,
            parameters=lambda config, d: 0,
            parameters_formula=parameters_formula,
            learnable=True,
            positive=positive,
            normalized=False,
            stage_one=StageOne(loss="output"),
        )
    )
