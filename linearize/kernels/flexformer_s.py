"""Flexformer, stationary: random Fourier features whose frequencies are learned.

Paper: Zhang and Zhou 2026, "Flexformer: Flexible Linear Transformer with Learnable Attention Kernel",
https://arxiv.org/abs/2606.27748, section 3.2 with eq. 4 and 5. `form="paper"`:

    phi(x) = h(x) [cos w_i . x ; sin w_i . x]_{i <= n} / sqrt(n),   h(x) = exp(|x|^2 / exp(tau))

w: [n, d] and tau are learned per head; n = d by default, so F = 2 n. Weights can be negative.

`form="positive"`, the default, is ours: the positive form of `flexformer_n` with one matrix instead of two. Each row is
both an envelope and, after scaling, the frequency of the previous wave. Weights are never negative.

    phi(x) = r(x) [s_i cos^2(u_i + pi/4) ; s_i sin^2(u_i + pi/4)]_{i <= n}
    s = softmax_i(w_i . x),   u_i = c_i w_{i+1} . x,   r(x) = exp(4 tanh(m . x / 4))

w: [n, d], c: [n] and m: [d] are learned (w_{n+1} is w_1); inputs are unscaled. w starts like b in `flexformer_n`, c at
0.05 (`init_scale`), m at 0; the magnitude r is that of `flexformer_n`, omitted by `magnitude=false`. (With it, the loss
of a short stage one ended 7 % lower; MiniLM, layer 1, F = 64, 60 steps.) This kernel is not stationary; neither is
softmax. Stationary alternatives under h(x) were worse: after a short stage one, waves in three phases
1 + cos(w_i . x + 2 pi k / 3) ended at 1.5 nats and squares of waves at 0.8, compared with 0.14 for this form (MiniLM,
layers 1 and 4, F = 64, 100 steps).

`form="squared"` is not in the paper either: phi2(x) = h(x) vec(u u^T), where u is the paper's bracket, so the kernel is
the square of a stationary one. It is itself stationary and positive definite (its frequencies are the sums and
differences of the w_i) and never negative. Each symmetric product is kept once: F = n (2 n + 1), and n is the largest
with F <= 2 d.

`form="paper"` differs from the paper: frequencies start at 0.2 of softmax's Gaussian density (`init_scale`). With the
full density, about half of the weights on real attention are negative and training hardly changes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels._spectral import LEGACY_DEFAULTS, SpectralConfig, SpectralMap, halves, signed_directions
from linearize.kernels.base import Features, MapSpec, draw_normal, project


@dataclass(frozen=True)
class FlexformerSConfig(SpectralConfig):
    """Arguments of `flexformer_s`."""

    form: str = option(
        "positive",
        "never negative, the paper's map, or its square (also never negative)",
        choices=("positive", "paper", "squared"),
    )

    def count(self, head_dim: int) -> int:
        """Return n for a head size."""
        if self.frequencies is not None or self.form != "squared":
            return super().count(head_dim)
        return max(1, int((math.sqrt(1 + 16 * head_dim) - 1) / 4))

    def features(self, head_dim: int) -> int:
        """Return F for a head size."""
        n = self.count(head_dim)
        return n * (2 * n + 1) if self.form == "squared" else 2 * n

    def parameters(self, head_dim: int) -> int:
        """Return the learnable numbers of a head."""
        n = self.count(head_dim)
        return n * head_dim + (n if self.form == "positive" else 1) + self.has_magnitude * head_dim


class FlexformerS(SpectralMap):
    """Map [B, H, T, D] -> [B, H, T, F]."""

    def __init__(self, config: FlexformerSConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim, norm=config.form != "positive")
        self.scale_inputs = config.form != "positive"
        self.floor = config.floor if config.form == "paper" else 0.0
        self.weight = self.add_parameter(self.n, head_dim)
        self.stretch = self.add_parameter(self.n) if config.form == "positive" else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the frequencies from the scaled-down Gaussian density, or orthonormal directions."""
        self.reset_factors()
        if self.stretch is None:
            draw_normal(self.weight, generator, self.config.deviation(0.2))
            return
        self.weight.copy_(signed_directions(self.heads, self.n, self.head_dim, generator))
        self.stretch.fill_(self.config.deviation(0.05))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        y = project(x, self.weight)
        if self.stretch is not None:
            envelope = self.times_magnitude(y.softmax(dim=-1), x)
            return Features(halves(y.roll(-1, dims=-1) * self.stretch.float()[:, None], envelope))
        phi = torch.cat([y.cos(), y.sin()], dim=-1) * self.n**-0.5
        if self.config.form == "squared":
            # The products of all pairs of features, each pair once. Pairs of different features are weighted by
            # sqrt(2), so that the dot product is the square of phi's.
            one, other = torch.triu_indices(phi.shape[-1], phi.shape[-1], device=phi.device)
            phi = phi[..., one] * phi[..., other] * torch.where(one == other, 1.0, math.sqrt(2.0))
        return Features(phi, self.log_norm(x))

    def map_spec(self) -> MapSpec | None:
        """Describe the map for the native op; None if it lacks this form."""
        if self.config.form != "paper":
            return None
        return MapSpec("waves", self.weight, tau=self.tau, amplitude=self.n**-0.5, scaled=True)


register_kernel(
    KernelInfo(
        name="flexformer_s",
        summary="learned Fourier frequencies, one matrix",
        choose="for stationary attention, which depends on q - k; flexformer_n comes closer to softmax",
        formula="phi(x) = exp(4 tanh(m.x / 4)) softmax_i(w_i.x) [cos^2(c_i w_{i+1}.x + pi/4) ; "
        "sin^2(c_i w_{i+1}.x + pi/4)]_i; paper: exp(|x|^2 / exp(tau)) [cos w_i.x ; sin w_i.x]_i / sqrt(n), x scaled by "
        "scaling^1/2; squared: all products of pairs of these",
        source="Zhang and Zhou 2026 (Flexformer), eq. 4-5, section 3.2; the positive form is ours",
        url="https://arxiv.org/abs/2606.27748",
        config=FlexformerSConfig,
        build=FlexformerS,
        feature_dim=lambda config, d: config.features(d),
        parameters=lambda config, d: config.parameters(d),
        parameters_formula="n d + n + d (n d + n without magnitude, n d + 1 in the other forms)",
        learnable=True,
        positive=lambda config: config.positive,
        stage_one=SpectralConfig.stage_one,
        legacy_defaults=LEGACY_DEFAULTS,
    )
)
