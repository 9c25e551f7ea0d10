"""Flexformer, stationary: random Fourier features whose frequencies are learned.

Paper: Zhang and Zhou 2026, "Flexformer: Flexible Linear Transformer with Learnable Attention Kernel",
https://arxiv.org/abs/2606.27748, section 3.2 with eq. 4 and 5.

    phi(x) = h(x) [cos w_i . x ; sin w_i . x]_{i <= n} / sqrt(n),   h(x) = exp(|x|^2 / exp(tau))

w: [n, d] and tau are learned per head; n = d by default, so F = 2 n. Weights can be negative.
Differs from the paper: frequencies start at 0.2 of softmax's Gaussian density (`init_scale`). From the full density
about half of the weights on real attention are negative and training hardly moves them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels._spectral import SpectralConfig, SpectralMap
from linearize.kernels.base import Features, draw_normal, project
from linearize.registry import KernelInfo, StageOne, register_kernel


class FlexformerS(SpectralMap):
    """Map [B, H, T, D] -> [B, H, T, 2 n]."""

    def __init__(self, config: SpectralConfig, heads: int, head_dim: int) -> None:
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
        return Features(phi, self.log_norm(x))


register_kernel(
    KernelInfo(
        name="flexformer_s",
        summary="learned Fourier frequencies, stationary kernel",
        formula="phi(x) = exp(|x|^2 / exp(tau)) [cos w_i.x ; sin w_i.x]_i / sqrt(n), x scaled by scaling^1/2",
        source="Zhang and Zhou 2026 (Flexformer), eq. 4-5, section 3.2",
        url="https://arxiv.org/abs/2606.27748",
        config=SpectralConfig,
        build=FlexformerS,
        feature_dim=lambda config, d: 2 * config.count(d),
        parameters=lambda config, d: config.count(d) * d + 1,
        parameters_formula="n d + 1",
        learnable=True,
        positive=False,
        stage_one=StageOne(learning_rate=1e-2, negative_penalty=1.0),
    )
)
