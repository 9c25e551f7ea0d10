"""What the two Flexformer kernels share: the norm factor h(x) with its learned width, and the size of the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.kernels.base import FeatureMap
from linearize.registry import option


@dataclass(frozen=True)
class SpectralConfig:
    """Arguments of `flexformer_s` and `flexformer_n`."""

    frequencies: int | None = option(None, "number n of frequencies per head; none: the head size", low=1, high=4096)
    init_scale: float = option(
        0.2, "deviation of the starting frequencies; 1 is softmax's own spectral density", low=0.0, high=10.0
    )
    tied: bool = option(True, "whether queries and keys share one map")

    def count(self, head_dim: int) -> int:
        """Return n for a head size."""
        return self.frequencies if self.frequencies is not None else head_dim


class SpectralMap(FeatureMap):
    """Base of the Fourier maps with `h(x) = exp(|x|^2 / exp(tau))`; inputs are scaled so that scores are x . y."""

    def __init__(self, config: SpectralConfig, heads: int, head_dim: int, *, norm: bool = True) -> None:
        super().__init__(config, heads, head_dim)
        self.n = config.count(head_dim)
        self.tau = self.learned() if norm else None

    def reset_tau(self) -> None:
        """Start at softmax's own width: exp(x . y) = exp(|x|^2 / 2) exp(-|x - y|^2 / 2) exp(|y|^2 / 2)."""
        if self.tau is None:
            return
        with torch.no_grad():
            self.tau.fill_(math.log(2.0))

    def log_norm(self, x: Tensor) -> Tensor:
        """Return log h(x) [B, H, T]."""
        assert self.tau is not None
        return x.square().sum(dim=-1) * torch.exp(-self.tau.float())[:, None]


def waves(angle: Tensor, envelope: Tensor) -> Tensor:
    """Return [cos angle * envelope ; sin angle * envelope]: [..., n] each -> [..., 2 n]."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([angle.cos() * envelope, angle.sin() * envelope], dim=-1)
    # The same, without the copy that puts the halves together.
    n = angle.shape[-1]
    phi = angle.new_empty(*angle.shape[:-1], 2 * n)
    torch.mul(angle.cos(), envelope, out=phi[..., :n])
    torch.mul(angle.sin(), envelope, out=phi[..., n:])
    return phi
