"""Flexformer, nonstationary: pairs of learned frequencies.

Paper: Zhang and Zhou 2026, "Flexformer: Flexible Linear Transformer with Learnable Attention Kernel",
https://arxiv.org/abs/2606.27748, section 3.2 with eq. 6. `form="paper"`:

    phi(x) = h(x) [cos a_i . x cos b_i . x ; sin a_i . x cos b_i . x]_{i <= n} / sqrt(n),   h(x) = exp(|x|^2 / exp(tau))

a, b: [n, d] and tau are learned per head; n = d by default, so F = 2 n. Weights can be negative.

`form="positive"`, the default, is ours. Its squares are never negative, so the weights are not either; the envelope is
that of hedgehog:

    phi(x) = r(x) [s_i cos^2(a_i . x + pi/4) ; s_i sin^2(a_i . x + pi/4)]_{i <= n}
    s = softmax_i(b_i . x),   r(x) = exp(4 tanh(m . x / 4))

The squares are (1 - sin 2 a_i . x) / 2 and (1 + sin 2 a_i . x) / 2: one sine, whose frequency 2 a_i is learned, is
split into two features that add up to s_i. Inputs are unscaled, as in hedgehog. At the start `a` is close to zero
(`init_scale` 0.05) and `b` is an orthonormal basis, then from row d + 1 on its negative, then another basis. (Starting
from hedgehog's identity, with one sign or both, stage one ended with a 1 to 3 % higher loss.)

r is the magnitude; m: [d] is learned per head. Under softmax some keys get more attention from every query than others,
which features that add up to 1 cannot express. r stays between e^-4 and e^4, so features need no log-scale. Queries
have it as well: there it cancels in the normalised output, and the kernel stays symmetric. m starts at 0, so r starts
at 1; `magnitude=false` omits it. (With it, the loss of stage one ended 10 % lower; MiniLM, layers 1 and 4, F = 64,
80 steps.)

`form="damped"` is not in the paper either: the frequencies are complex, so that each wave has an exponential factor;
the exponentials are normalised as above. Weights can be negative.

    phi(x) = [s_i cos a_i . x ; s_i sin a_i . x]_{i <= n},   s = softmax_i(b_i . x)

`b` starts at hedgehog's identity (its negative from row d + 1 on) and `a` close to zero, so that no weight is negative
at the start.

`form="paper"` differs from the paper: `a` starts at 0.2 of softmax's Gaussian density (`init_scale`) and `b` at a tenth
of that, so that the map starts close to `flexformer_s`; the factor sigma / 2 of eq. 6 cancels in the normalised
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.core.registry import KernelInfo, option, register_kernel
from linearize.kernels._spectral import LEGACY_DEFAULTS, SpectralConfig, SpectralMap, halves, signed_directions, waves
from linearize.kernels.base import Features, MapSpec, draw_normal, project


@dataclass(frozen=True)
class FlexformerNConfig(SpectralConfig):
    """Arguments of `flexformer_n`."""

    form: str = option(
        "positive", "never negative, the paper's pairs, or damped frequencies", choices=("positive", "paper", "damped")
    )

    def parameters(self, head_dim: int) -> int:
        """Return the learnable numbers of a head."""
        rows = 2 * self.count(head_dim) + self.has_magnitude
        return rows * head_dim + (self.form == "paper")


class FlexformerN(SpectralMap):
    """Map [B, H, T, D] -> [B, H, T, 2 n]."""

    def __init__(self, config: FlexformerNConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim, norm=config.form == "paper")
        self.scale_inputs = not config.positive
        self.floor = 0.0 if config.positive else config.floor
        self.a = self.add_parameter(self.n, head_dim)
        self.b = self.add_parameter(self.n, head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw `a` from a narrow Gaussian density, and start `b` close to zero or at the identity."""
        positive = self.config.positive
        scale = self.config.deviation(0.05 if positive else 0.2)
        draw_normal(self.a, generator, scale)
        draw_normal(self.b, generator, 0.1 * scale)
        self.reset_factors()
        if positive:
            self.b.copy_(signed_directions(self.heads, self.n, self.head_dim, generator))
        elif self.config.form == "damped":
            # The inputs of this form are usually scaled by d^-1/4; those of hedgehog are not.
            eye = torch.eye(self.head_dim) * self.head_dim**0.25
            rows = torch.cat([eye, -eye])[: self.n]
            self.a.mul_(0.25)
            self.b[:, : len(rows)] = rows.to(self.b)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        angle, envelope = project(x, self.a), project(x, self.b)
        if self.config.form == "paper":
            return Features(waves(angle, envelope.cos() * self.n**-0.5), self.log_norm(x))
        envelope = self.times_magnitude(envelope.softmax(dim=-1), x)
        return Features(halves(angle, envelope) if self.config.positive else waves(angle, envelope))

    def map_spec(self) -> MapSpec:
        """Describe the map for the native op."""
        if self.config.positive:
            return MapSpec("positive_waves", self.a, self.b, magnitude=self.m)
        if self.config.form == "damped":
            return MapSpec("damped_waves", self.a, self.b)
        return MapSpec("wave_pairs", self.a, self.b, tau=self.tau, amplitude=self.n**-0.5, scaled=True)


register_kernel(
    KernelInfo(
        name="flexformer_n",
        summary="learned pairs of Fourier frequencies, nonstationary kernel",
        choose="the closest to softmax in our tests; for pairs of texts, raise frequencies=N for more capacity",
        formula="phi(x) = exp(4 tanh(m.x / 4)) softmax_i(b_i.x) [cos^2(a_i.x + pi/4) ; sin^2(a_i.x + pi/4)]_i; damped: "
        "softmax_i(b_i.x) [cos a_i.x ; sin a_i.x]_i; paper: exp(|x|^2 / exp(tau)) [cos a_i.x cos b_i.x ; "
        "sin a_i.x cos b_i.x]_i / sqrt(n); x scaled by scaling^1/2 in the last two",
        source="Zhang and Zhou 2026 (Flexformer), eq. 6, section 3.2; the positive form is ours",
        url="https://arxiv.org/abs/2606.27748",
        config=FlexformerNConfig,
        build=FlexformerN,
        feature_dim=lambda config, d: 2 * config.count(d),
        parameters=lambda config, d: config.parameters(d),
        parameters_formula="2 n d + d (2 n d if damped or without magnitude, 2 n d + 1 for paper)",
        learnable=True,
        positive=lambda config: config.positive,
        stage_one=SpectralConfig.stage_one,
        legacy_defaults=LEGACY_DEFAULTS,
    )
)
