"""Code shared by the Macformer kernels: random Maclaurin features with ppSBN around them.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, definition 3, table 1, algorithm 1.

For a kernel K(x . y) = sum_N a_N (x . y)^N:

    phi_i(x) = sqrt(a_N 2^(N+1) / D) prod_{j <= N} <w_j, x>,   P[N = eta] = 2^-(eta+1),   w_j in {-1, 1}^d

ppSBN (pre-post scaling batch normalisation):

    q, k <- (q - mu) / sqrt(sigma^2 + eps), then divided by their norms;      o <- sign(gamma o) |gamma o|^beta

Differs from the paper:
- table 1 has two misprints; the coefficients here are the correct ones for each function (see the kernel's file);
- P[N = eta] = p^-(eta+1) is a distribution only for p = 2, so p is not an argument;
- the number of features of each degree is its expected value (64, 32, 16, ... of 128) instead of a draw: the same mean,
  up to degree 7, with less variance;
- mu and sigma are running statistics per head and channel, updated after every training batch and frozen otherwise, so
  that a token has the same features alone as in a batch and no token sees a later one;
- gamma and beta are one number per query head; eps is 1e-6.

`ppsbn=False` is the ablation. `inv`, `log` and `sqrt` are then estimated outside of |z| < 1 too, where their series
diverge; projections are cut off where products of the highest degree would overflow (at 100 with 128 features).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linearize.core.registry import KernelInfo, StageOne, option, register_kernel
from linearize.kernels.base import FeatureMap, Features, Inputs, Output, project
from linearize.ops.state import is_tracing

EPS = 1e-6
MOMENTUM = 0.01
"""Share of a new batch in the running statistics, once a hundred batches have been averaged."""
LARGEST = 1e14
"""Bound of a product of projections, so that sums over products of queries and keys stay finite without ppSBN."""


@dataclass(frozen=True)
class MacformerConfig:
    """Arguments of the `macformer` kernels."""

    features: int = option(128, "number D of features", low=2, high=65536)
    ppsbn: bool = option(True, "whether queries, keys and output are normalised and rescaled (ppSBN)")

    def degrees(self) -> list[int]:
        """Return how many features have degree 0, 1, 2 ...: half of them, half of the rest, and so on."""
        counts, rest = [], self.features
        while rest:
            counts.append(-(-rest // 2))
            rest -= counts[-1]
        return counts


def _buffer(*shape: int) -> nn.Buffer:
    return nn.Buffer(torch.empty(shape, dtype=torch.float32))


class Standardise(Inputs):
    """The first half of ppSBN: standardise each channel, then scale every vector to length 1."""

    def __init__(self, heads: int, key_heads: int, head_dim: int) -> None:
        super().__init__()
        self.query_mean, self.query_variance = _buffer(heads, head_dim), _buffer(heads, head_dim)
        self.key_mean, self.key_variance = _buffer(key_heads, head_dim), _buffer(key_heads, head_dim)
        self.batches = _buffer(1)

    def reset_parameters(self) -> None:
        """Reset the statistics to those before any batch."""
        for name, buffer in self.named_buffers():
            buffer.fill_(float(name.endswith("variance")))

    def forward(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise with the statistics so far; in training mode, also update them from the batch."""
        queries, keys = self._normal(q, self.query_mean, self.query_variance), self.keys(k)
        if self.training and torch.is_grad_enabled():
            real = torch.ones_like(q[:, :1, :, :1]) if key_padding_mask is None else key_padding_mask[:, None, :, None]
            real = real.float()
            batch = [*_statistics(q.detach(), real), *_statistics(k.detach(), real)]
            passed = queries if queries.requires_grad else keys
            if passed.requires_grad and not is_tracing():
                # Only in the backward pass, so that gradient checkpointing computes the same numbers again, and once.
                passed.register_hook(lambda gradient: self._learn(batch, real.sum()))
            else:
                self._learn(batch, real.sum())
        return queries, keys

    def keys(self, k: Tensor) -> Tensor:
        """Normalise keys with the statistics so far."""
        return self._normal(k, self.key_mean, self.key_variance)

    @staticmethod
    def _normal(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # Copy, because the statistics change in place before the backward pass.
        centre, spread = mean.float().clone(), torch.rsqrt(variance.float() + EPS)
        y = (x - centre[:, None]) * spread[:, None]
        return y / y.norm(dim=-1, keepdim=True).clamp(min=EPS)

    @torch.no_grad()
    def learn(self, sums: Tensor) -> None:
        """Move the statistics towards those of all batches of a step."""
        if sums[0] > 0:
            sizes = [x.numel() for x in self._statistics()]
            query_mean, query_square, key_mean, key_square = (sums[1:] / sums[0]).split(sizes)
            variances = query_square - query_mean.square(), key_square - key_mean.square()
            self._move([query_mean, variances[0], key_mean, variances[1]])

    @torch.no_grad()
    def _learn(self, batch: list[Tensor], tokens: Tensor) -> None:
        """Move the statistics towards those of a batch, or note its sums."""
        if self.noted is None:
            self._move(batch)
            return
        query_mean, query_variance, key_mean, key_variance = (x.cpu().double().flatten() for x in batch)
        squares = query_variance + query_mean.square(), key_variance + key_mean.square()
        self.noted.append(tokens.cpu() * torch.cat([torch.ones(1), query_mean, squares[0], key_mean, squares[1]]))

    def _statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query_mean, self.query_variance, self.key_mean, self.key_variance

    def _move(self, batch: list[Tensor]) -> None:
        share = torch.clamp_min(1.0 / (self.batches + 1.0), MOMENTUM)
        for statistic, new in zip(self._statistics(), batch, strict=True):
            statistic.lerp_(new.view_as(statistic).to(statistic), share.to(statistic.dtype))
        self.batches.add_(1.0)


def _statistics(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance [H, D] of the tokens of x [B, H, T, D] where `real` [B, 1, T, 1] is 1."""
    count = real.sum().clamp(min=1.0)
    mean = (x * real).sum(dim=(0, 2)) / count
    return mean, ((x - mean[:, None]).square() * real).sum(dim=(0, 2)) / count


class Rescale(Output):
    """The second half of ppSBN: `sign(gamma o) |gamma o|^beta`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.beta = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """Start with the identity."""
        self.gamma.fill_(1.0)
        self.beta.fill_(1.0)

    def forward(self, mixed: Tensor) -> Tensor:
        """Rescale [B, H, T, V]; below `EPS` the power function continues as a straight line."""
        y = mixed * self.gamma.float()[:, None, None]
        return y * y.abs().clamp(min=EPS) ** (self.beta.float()[:, None, None] - 1.0)


class Macformer(FeatureMap):
    """Map [B, H, T, D] -> [B, H, T, F] between the two halves of ppSBN; the Rademacher vectors are drawn only once."""

    def __init__(self, config: MacformerConfig, heads: int, head_dim: int) -> None:
        super().__init__(config, heads, head_dim)
        self.counts = config.degrees()
        self.factors = [(self.series(n) / count) ** 0.5 for n, count in enumerate(self.counts)]
        # A feature of degree N is a product of N factors, so stage j holds the features of degree j or higher.
        self.stages = [sum(self.counts[j:]) for j in range(1, len(self.counts))]
        self.signs: Tensor
        self.add_buffer("signs", sum(self.stages), head_dim)

    @staticmethod
    def series(n: int) -> float:
        """Return the kernel's Maclaurin coefficient a_n."""
        raise NotImplementedError

    @classmethod
    def inputs(cls, config: MacformerConfig, heads: int, key_heads: int, head_dim: int) -> Standardise | None:
        """Return the first half of ppSBN, if the kernel has it."""
        return Standardise(heads, key_heads, head_dim) if config.ppsbn else None

    @classmethod
    def output(cls, config: MacformerConfig, heads: int, value_dim: int) -> Rescale | None:
        """Return the second half of ppSBN, if the kernel has it."""
        return Rescale(heads) if config.ppsbn else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the signs."""
        self.signs.copy_(torch.randint(2, self.signs.shape, generator=generator) * 2.0 - 1.0)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Features:
        """Map queries or keys by the formula of the module."""
        product = x.new_ones(*x.shape[:-1], sum(self.counts))
        features = [product[..., : self.counts[0]] * self.factors[0]]
        rest = product[..., self.counts[0] :]
        projections = project(x, self.signs)
        if not self.config.ppsbn:
            largest = LARGEST ** (1 / len(self.stages))
            projections = projections.clamp(-largest, largest)
        for n, stage in enumerate(projections.split(self.stages, dim=-1), start=1):
            rest = rest * stage
            features.append(rest[..., : self.counts[n]] * self.factors[n])
            rest = rest[..., self.counts[n] :]
        return Features(torch.cat(features, dim=-1))


def register_macformer(
    name: str, build: type[Macformer], function: str, coefficients: str, estimates: Callable[[Tensor], Tensor]
) -> None:
    """Register one kernel of the family."""
    register_kernel(
        KernelInfo(
            name=name,
            summary=f"random Maclaurin features of {function}, with ppSBN",
            choose=f"to reproduce the paper with {function}; when training from scratch or far from softmax",
            formula=f"phi_i(x) = sqrt(a_N / D_N) prod_(j<=N) w_j.x, {function}: {coefficients}; q, k standardised, "
            "divided by their norms and scaled by scaling^1/2; o <- sign(gamma o) |gamma o|^beta",
            source="Guo et al. 2024 (Macformer), definition 3, table 1 (corrected), algorithm 1",
            url="https://arxiv.org/abs/2408.11656",
            config=MacformerConfig,
            build=build,
            feature_dim=lambda config, d: config.features,
            output_parameters=lambda config, v: 2 * config.ppsbn,
            parameters_formula="2 (gamma, beta)",
            learnable=lambda config: config.ppsbn,
            positive=False,
            random=True,
            estimates=estimates,
            stage_one=StageOne(learning_rate=3e-2, loss="output"),
        )
    )
