"""Flexformer, stationary: random Fourier features whose frequencies are learned.

Paper: Zhang and Zhou 2026, "Flexformer: Flexible Linear Transformer with Learnable Attention Kernel",
https://arxiv.org/abs/2606.27748, section 3.2 with eq. 4 and 5.

    phi(x) = h(x) [cos w_i . x ; sin w_i . x]_{i <= n} / sqrt(n),   h(x) = exp(|x|^2 / exp(tau))

w: [n, d] and tau are learned per head; n = d by default, so F = 2 n. Weights can be negative.

`form="squared"` is not in the paper: phi2(x) = h(x) vec(u u^T), u the bracket above, so the kernel is the square of
a stationary one. It is stationary and positive definite as well (its frequencies are the sums and differences of the
w_i) and never negative. The symmetric products are kept once: F = n (2 n + 1), and n is the largest with F <= 2 d.

Differs from the paper: frequencies start at 0.2 of softmax's Gaussian density (`init_scale`). From the full density
about half of the weights on real attention are negative and training hardly moves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.kernels._spectral import SpectralConfig, SpectralMap
from linearize.kernels.base import Features, draw_normal, project
from linearize.native import NativeMap
from linearize.registry import KernelInfo, StageOne, option, register_kernel


@dataclass(frozen=True)
class FlexformerSConfig(SpectralConfig):
    """Arguments of `flexformer_s`."""

    form: str = option("paper", "the paper's map, or its square: never negative", choices=("paper", "squared"))

    def count(self, head_dim: int) -> int:
        """Return n for a head size."""
        if self.frequencies is not None or self.form == "paper":
            return super().count(head_dim)
        return max(1, int((math.sqrt(1 + 16 * head_dim) - 1) / 4))

    def features(self, head_dim: int) -> int:
        """Return F for a head size."""
        n = self.count(head_dim)
        return 2 * n if self.form == "paper" else n * (2 * n + 1)


class FlexformerS(SpectralMap):
    """Map [B, H, T, D] -> [B, H, T, F]."""

    alike = True

    def __init__(self, config: FlexformerSConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.weight = self.learned(self.n, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the frequencies from the scaled-down Gaussian density."""
        draw_normal(self.weight, generator, self.config.init_scale)
        self.reset_tau()

    def forward(self, x: Tensor, *, keys: bool, positions: Tensor | None = None) -> Features:
        """See the module's formula."""
        angle = project(x, self.weight)
        phi = torch.cat([angle.cos(), angle.sin()], dim=-1) * self.n**-0.5
        return Features(phi if self.config.form == "paper" else _products(phi), self.log_norm(x))

    def native(self) -> NativeMap | None:
        """See `FeatureMap.native`."""
        if self.config.form != "paper":
            return None
        return NativeMap("waves", self.weight, tau=self.tau, amplitude=self.n**-0.5, scaled=True)


def _products(u: Tensor) -> Tensor:
    """Return the products of all pairs of entries of u [..., m], each pair once: [..., m (m + 1) / 2].

    Pairs of different entries are weighted by sqrt(2), so that the dot product is the square of u's.
    """
    one, other = torch.triu_indices(u.shape[-1], u.shape[-1], device=u.device)
    weight = torch.where(one == other, 1.0, math.sqrt(2.0))
    return u[..., one] * u[..., other] * weight


register_kernel(
    KernelInfo(
        name="flexformer_s",
        summary="learned Fourier frequencies, stationary kernel",
        formula="phi(x) = exp(|x|^2 / exp(tau)) [cos w_i.x ; sin w_i.x]_i / sqrt(n), x scaled by scaling^1/2; "
        "squared: all products of pairs of these",
        source="Zhang and Zhou 2026 (Flexformer), eq. 4-5, section 3.2",
        url="https://arxiv.org/abs/2606.27748",
        config=FlexformerSConfig,
        build=FlexformerS,
        feature_dim=lambda config, d: config.features(d),
        parameters=lambda config, d: config.count(d) * d + 1,
        parameters_formula="n d + 1",
        learnable=True,
        positive=False,
        stage_one=StageOne(learning_rate=1e-2, negative_penalty=1.0),
    )
)
