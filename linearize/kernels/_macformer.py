"""What the Macformer kernels share: random Maclaurin features, and ppSBN around them.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, definition 3, table 1, algorithm 1.

For a kernel K(x . y) = sum_N a_N (x . y)^N:

    phi_i(x) = sqrt(a_N 2^(N+1) / D) prod_{j <= N} <w_j, x>,   P[N = eta] = 2^-(eta+1),   w_j in {-1, 1}^d

    q, k <- (q - mu) / sqrt(sigma^2 + eps), then divided by their norms;  o <- sign(gamma o) |gamma o|^beta

Differs from the paper:
- table 1 has two misprints; the coefficients here are those of the functions (see each kernel);
- P[N = eta] = p^-(eta+1) is a distribution for p = 2 only, so there is no p to choose;
- the number of features of each degree is its expectation (64, 32, 16, ... of 128) instead of a draw: the same mean, up
  to degree 7, with less variance;
- mu and sigma are running statistics, updated after every batch of training and frozen otherwise, so that one token
  has the same features as in a batch and no token sees a later one; gamma and beta are one number per query head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import HeadShape
from linearize.kernels.base import FeatureMap, Features, project
from linearize.registry import KernelInfo, StageOne, option, register_kernel

EPS = 1e-6
MOMENTUM = 0.01
"""Share of a new batch in the running statistics, once a hundred batches have been averaged."""


@dataclass(frozen=True)
class MacformerConfig:
    """Arguments of the `macformer` kernels."""

    features: int = option(128, "number D of features", low=2, high=65536)

    def degrees(self) -> list[int]:
        """Return how many features have degree 0, 1, 2 ...: half of them, half of the rest, and so on."""
        counts, rest = [], self.features
        while rest:
            counts.append(-(-rest // 2))
            rest -= counts[-1]
        return counts


class MaclaurinMap(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, F]; the Rademacher vectors are drawn once."""

    def __init__(self, config: MacformerConfig, heads: int, head_dim: int, series: Callable[[int], float]) -> None:
        super().__init__(config, heads, head_dim)
        self.counts = config.degrees()
        self.factors = [(series(n) / count) ** 0.5 for n, count in enumerate(self.counts)]
        # A feature of degree N takes part in N products, so stage j holds the features of degree j and more.
        self.stages = [sum(self.counts[j:]) for j in range(1, len(self.counts))]
        self.signs: Tensor
        self.frozen("signs", sum(self.stages), head_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the signs."""
        with torch.no_grad():
            self.signs.copy_(torch.randint(2, self.signs.shape, generator=generator) * 2.0 - 1.0)

    def forward(self, x: Tensor, *, keys: bool, positions: Tensor | None = None) -> Features:
        """See the module's formula."""
        product = x.new_ones(*x.shape[:-1], sum(self.counts))
        found = [product[..., : self.counts[0]] * self.factors[0]]
        rest = product[..., self.counts[0] :]
        for n, stage in enumerate(project(x, self.signs).split(self.stages, dim=-1), start=1):
            rest = rest * stage
            found.append(rest[..., : self.counts[n]] * self.factors[n])
            rest = rest[..., self.counts[n] :]
        return Features(torch.cat(found, dim=-1))


class Macformer(FeatureMapMixer):
    """Random Maclaurin features between the two halves of ppSBN."""

    @staticmethod
    def series(n: int) -> float:
        """Return the kernel's Maclaurin coefficient a_n."""
        raise NotImplementedError

    def __init__(self, info: KernelInfo, config: Any, shape: HeadShape, window: int | None = None) -> None:
        super().__init__(info, config, shape, window)
        self.gamma = nn.Parameter(torch.empty(shape.heads, dtype=torch.float32))
        self.beta = nn.Parameter(torch.empty(shape.heads, dtype=torch.float32))
        for name, heads in (("query", shape.heads), ("key", shape.key_heads)):
            for what in ("mean", "variance"):
                self.register_buffer(f"{name}_{what}", torch.empty(heads, shape.head_dim, dtype=torch.float32))
        self.register_buffer("batches", torch.empty(1, dtype=torch.float32))
        self.query_mean: Tensor
        self.query_variance: Tensor
        self.key_mean: Tensor
        self.key_variance: Tensor
        self.batches: Tensor

    def build_map(self, heads: int) -> FeatureMap:
        """Build the features of so many heads."""
        return MaclaurinMap(self.config, heads, self.shape.head_dim, self.series)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the features; start with an identity behind them and statistics of no batch."""
        super().reset_parameters(generator)
        with torch.no_grad():
            for tensor in (self.gamma, self.beta, self.query_variance, self.key_variance):
                tensor.fill_(1.0)
            for tensor in (self.query_mean, self.key_mean, self.batches):
                tensor.zero_()

    def prepare(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, and learn the statistics while training."""
        found = []
        for name, x in (("query", q), ("key", k)):
            mean, variance = getattr(self, f"{name}_mean").float(), getattr(self, f"{name}_variance").float()
            y = (x - mean[:, None]) * torch.rsqrt(variance + EPS)[:, None]
            found.append(y / y.norm(dim=-1, keepdim=True).clamp(min=EPS))
        if self.training and torch.is_grad_enabled():
            self._learn({"query": q.detach(), "key": k.detach()}, key_padding_mask)
        return found[0], found[1]

    @torch.no_grad()
    def _learn(self, inputs: dict[str, Tensor], mask: Tensor | None) -> None:
        """Move the statistics towards those of the batch's real tokens."""
        share = torch.clamp(1.0 / (self.batches + 1.0), min=MOMENTUM)
        for name, x in inputs.items():
            real = torch.ones_like(x[:, :1, :, :1]) if mask is None else mask[:, None, -x.shape[2] :, None].float()
            count = real.sum().clamp(min=1.0)
            mean = (x * real).sum(dim=(0, 2)) / count
            variance = ((x - mean[:, None]).square() * real).sum(dim=(0, 2)) / count
            getattr(self, f"{name}_mean").lerp_(mean, share)
            getattr(self, f"{name}_variance").lerp_(variance, share)
        self.batches.add_(1.0)

    def finish(self, mixed: Tensor) -> Tensor:
        """Rescale the outputs [B, H, T, V]; below `EPS` the power is continued by a straight line."""
        y = mixed * self.gamma.float()[:, None, None]
        return y * y.abs().clamp(min=EPS) ** (self.beta.float()[:, None, None] - 1.0)


def register_macformer(name: str, build: type[Macformer], function: str, coefficients: str) -> None:
    """Register one kernel of the family."""
    register_kernel(
        KernelInfo(
            name=name,
            summary=f"random Maclaurin features of {function}, with ppSBN",
            formula=f"phi_i(x) = sqrt(a_N / D_N) prod_(j<=N) w_j.x, {function}: {coefficients}; q, k standardised, "
            "divided by their norms and scaled by scaling^1/2; o <- sign(gamma o) |gamma o|^beta",
            source="Guo et al. 2024 (Macformer), definition 3, table 1 (corrected), algorithm 1",
            url="https://arxiv.org/abs/2408.11656",
            config=MacformerConfig,
            build=build,
            feature_dim=lambda config, d: config.features,
            parameters=lambda config, d: 0,
            output_parameters=lambda config, v: 2,
            parameters_formula="2 (gamma, beta)",
            learnable=True,
            positive=False,
            random=True,
            stage_one=StageOne(learning_rate=1e-2, loss="output"),
        )
    )
