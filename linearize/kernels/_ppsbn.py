"""Pre-post scaling batch normalisation (ppSBN), used around the Macformer kernels.

Paper: Guo et al. 2024, "Macformer: Transformer with Random Maclaurin Feature Attention",
https://arxiv.org/abs/2408.11656, algorithm 1.

    q, k <- (q - mu) / sqrt(sigma^2 + eps), then divided by their norms;      o <- sign(gamma o) |gamma o|^beta

Differs from the paper: mu and sigma are running statistics per head and channel, updated after every training batch and
frozen otherwise, so that a token has the same features alone as in a batch and no token sees a later one; gamma and
beta are one number per query head; eps is 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linearize.kernels.base import Inputs, Output

EPS = 1e-6
MOMENTUM = 0.01
"""Share of a new batch in the running statistics, once a hundred batches have been averaged."""


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
        queries = self._normal(q, self.query_mean, self.query_variance)
        keys = self._normal(k, self.key_mean, self.key_variance)
        if self.training and torch.is_grad_enabled():
            share = torch.clamp_min(1.0 / (self.batches + 1.0), MOMENTUM)
            self._learn(q.detach(), self.query_mean, self.query_variance, key_padding_mask, share)
            self._learn(k.detach(), self.key_mean, self.key_variance, key_padding_mask, share)
            self.batches.add_(1.0)
        return queries, keys

    @staticmethod
    def _normal(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # Copy, because the statistics change in place before the backward pass.
        centre, spread = mean.float().clone(), torch.rsqrt(variance.float() + EPS)
        y = (x - centre[:, None]) * spread[:, None]
        return y / y.norm(dim=-1, keepdim=True).clamp(min=EPS)

    @staticmethod
    def _learn(x: Tensor, mean: Tensor, variance: Tensor, mask: Tensor | None, share: Tensor) -> None:
        """Move the statistics towards those of the batch's real tokens."""
        real = torch.ones_like(x[:, :1, :, :1]) if mask is None else mask[:, None, -x.shape[2] :, None].float()
        count = real.sum().clamp(min=1.0)
        batch_mean = (x * real).sum(dim=(0, 2)) / count
        batch_variance = ((x - batch_mean[:, None]).square() * real).sum(dim=(0, 2)) / count
        mean.lerp_(batch_mean.to(mean.dtype), share.to(mean.dtype))
        variance.lerp_(batch_variance.to(mean.dtype), share.to(mean.dtype))


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
