"""Flexformer, nonstationary: pairs of learned frequencies.

Paper: Zhang and Zhou 2026, "Flexformer: Flexible Linear Transformer with Learnable Attention Kernel",
https://arxiv.org/abs/2606.27748, section 3.2 with eq. 6.

    phi(x) = h(x) [cos a_i . x cos b_i . x ; sin a_i . x cos b_i . x]_{i <= n} / sqrt(n),   h(x) = exp(|x|^2 / exp(tau))

a, b: [n, d] and tau are learned per head; n = d by default, so F = 2 n. Weights can be negative.

`form="damped"` is not in the paper: the frequencies are complex, so that a wave comes with an exponential, and the
exponentials are normalised as hedgehog's are:

    phi(x) = [s_i cos a_i . x ; s_i sin a_i . x]_{i <= n},   s = softmax_i(b_i . x)

b starts at hedgehog's identity (and minus it from the (d + 1)-th on), a close to zero, where nothing is negative.

Differs from the paper: `a` starts at 0.2 of softmax's Gaussian density (`init_scale`) and `b` at a tenth of that, so
that the map starts close to `flexformer_s`; the factor sigma / 2 of eq. 6 cancels in the normalised weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.kernels._spectral import SpectralConfig, SpectralMap, waves
from linearize.kernels.base import Features, draw_normal, project
from linearize.native import NativeMap
from linearize.registry import KernelInfo, StageOne, option, register_kernel


@dataclass(frozen=True)
class FlexformerNConfig(SpectralConfig):
    """Arguments of `flexformer_n`."""

    form: str = option("paper", "the paper's pairs, or complex (damped) frequencies", choices=("paper", "damped"))


class FlexformerN(SpectralMap):
    """Map [B, H, T, D] -> [B, H, T, 2 n]."""

    alike = True

    def __init__(self, config: FlexformerNConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim, norm=config.form == "paper")
        self.a = self.learned(self.n, head_dim)
        self.b = self.learned(self.n, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw `a` from the scaled-down Gaussian density, and start `b` close to zero or at the identity."""
        draw_normal(self.a, generator, self.config.init_scale)
        draw_normal(self.b, generator, 0.1 * self.config.init_scale)
        self.reset_tau()
        if self.config.form == "damped":
            # Inputs are scaled by d^-1/4 as a rule; hedgehog's are not.
            eye = torch.eye(self.head_dim) * self.head_dim**0.25
            rows = torch.cat([eye, -eye])[: self.n]
            with torch.no_grad():
                self.a.mul_(0.25)
                self.b[:, : len(rows)] = rows.to(self.b)

    def forward(self, x: Tensor, *, keys: bool, positions: Tensor | None = None) -> Features:
        """See the module's formula."""
        angle, envelope = project(x, self.a), project(x, self.b)
        if self.config.form == "damped":
            return Features(waves(angle, envelope.softmax(dim=-1)))
        return Features(waves(angle, envelope.cos() * self.n**-0.5), self.log_norm(x))

    def native(self) -> NativeMap:
        """See `FeatureMap.native`."""
        if self.config.form == "damped":
            return NativeMap("damped_waves", self.a, self.b)
        return NativeMap("wave_pairs", self.a, self.b, tau=self.tau, amplitude=self.n**-0.5, scaled=True)


register_kernel(
    KernelInfo(
        name="flexformer_n",
        summary="learned pairs of Fourier frequencies, nonstationary kernel",
        formula="phi(x) = exp(|x|^2 / exp(tau)) [cos a_i.x cos b_i.x ; sin a_i.x cos b_i.x]_i / sqrt(n), "
        "x scaled by scaling^1/2; damped: softmax_i(b_i.x) [cos a_i.x ; sin a_i.x]_i",
        source="Zhang and Zhou 2026 (Flexformer), eq. 6, section 3.2",
        url="https://arxiv.org/abs/2606.27748",
        config=FlexformerNConfig,
        build=FlexformerN,
        feature_dim=lambda config, d: 2 * config.count(d),
        parameters=lambda config, d: 2 * config.count(d) * d + (config.form == "paper"),
        parameters_formula="2 n d + 1",
        learnable=True,
        positive=False,
        stage_one=StageOne(learning_rate=1e-2, negative_penalty=1.0),
    )
)
