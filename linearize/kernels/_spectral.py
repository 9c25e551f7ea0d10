"""Code shared by the two Flexformer kernels: arguments, the norm factor h(x) with its learned width, and the waves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import StageOne, option
from linearize.kernels.base import FeatureMap, floor_option, orthonormal, project


@dataclass(frozen=True)
class SpectralConfig:
    """Arguments of `flexformer_s` and `flexformer_n`."""

    frequencies: int | None = option(None, "number n of frequencies per head; none: the head size", low=1, high=4096)
    init_scale: float | None = option(
        None, "deviation of the initial frequencies (softmax: 1); none: depends on the form", low=0.0, high=10.0
    )
    tied: bool = option(True, "whether queries and keys share one map")
    floor: float = floor_option(0.2)
    magnitude: bool = option(
        True, "whether the positive form learns the total attention of each key; no effect in the other forms"
    )
    form: str = "positive"

    def count(self, head_dim: int) -> int:
        """Return n for a head size."""
        return self.frequencies if self.frequencies is not None else head_dim

    def deviation(self, usual: float) -> float:
        """Return the deviation of the initial frequencies; `usual` by default."""
        return usual if self.init_scale is None else self.init_scale

    @property
    def positive(self) -> bool:
        """Whether weights can never be negative; in the squared form they cannot be either, up to rounding."""
        return self.form == "positive"

    @property
    def has_magnitude(self) -> bool:
        """Whether the map has a learned magnitude."""
        return self.positive and self.magnitude

    def stage_one(self) -> StageOne:
        """Return the usual defaults, with a penalty on negative weights if weights can be negative."""
        return StageOne(negative_penalty=0.0 if self.positive else 1.0)


LEGACY_DEFAULTS = {"form": "paper", "floor": 0.0}
"""Defaults for checkpoints that do not mention these arguments: older versions had only this form, without a floor."""


class SpectralMap(FeatureMap):
    """Base of the Fourier maps with `h(x) = exp(|x|^2 / exp(tau))`; inputs are scaled so that scores are x . y."""

    def __init__(self, config: SpectralConfig, heads: int, head_dim: int, *, norm: bool = True) -> None:
        super().__init__(config, heads, head_dim)
        self.n = config.count(head_dim)
        self.tau = self.add_parameter() if norm else None
        self.m = self.add_parameter(head_dim) if config.has_magnitude else None

    def reset_factors(self) -> None:
        """Start h at softmax's width, exp(x . y) = exp(|x|^2 / 2) exp(-|x - y|^2 / 2) exp(|y|^2 / 2), and r at 1."""
        if self.tau is not None:
            self.tau.fill_(math.log(2.0))
        if self.m is not None:
            self.m.zero_()

    def times_magnitude(self, envelope: Tensor, x: Tensor) -> Tensor:
        """Return the envelope [B, H, T, n] times r(x) = exp(4 tanh(m . x / 4)), between e^-4 and e^4."""
        if self.m is None:
            return envelope
        return envelope * (4.0 * (project(x, self.m[:, None]) / 4.0).tanh()).exp()

    def log_norm(self, x: Tensor) -> Tensor:
        """Return log h(x) [B, H, T]."""
        assert self.tau is not None
        return x.square().sum(dim=-1) * torch.exp(-self.tau.float())[:, None]


def signed_directions(heads: int, rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw unit vectors [heads, rows, size]: an orthonormal basis, its negative, then another basis.

    A softmax over projections on a basis and its negative sees both signs of every coordinate, as the two softmaxes of
    hedgehog do; with one sign only, stage one ended at the same loss.
    """
    blocks = -(-rows // (2 * size))
    basis = orthonormal(heads, blocks * size, size, generator).reshape(heads, blocks, 1, size, size)
    return torch.cat([basis, -basis], dim=2).reshape(heads, 2 * blocks * size, size)[:, :rows].float()


def halves(angle: Tensor, envelope: Tensor) -> Tensor:
    """Return [cos^2(angle + pi/4) ; sin^2(angle + pi/4)] * envelope, non-negative: [..., n] each -> [..., 2 n]."""
    half = 0.5 * envelope
    wave = (2.0 * angle).sin() * half
    return torch.cat([half - wave, half + wave], dim=-1)


def waves(angle: Tensor, envelope: Tensor) -> Tensor:
    """Return [cos angle * envelope ; sin angle * envelope]: [..., n] each -> [..., 2 n]."""
    return torch.cat([angle.cos() * envelope, angle.sin() * envelope], dim=-1)
