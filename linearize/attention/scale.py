"""Learned log-scales of queries and keys: the size of a hybrid's linear part relative to its softmax part.

Hedgehog's features give phi(q) . phi(k) <= 2 whatever q and k are, while a near key weighs exp(q . k / sqrt d). Under
one denominator the linear part needs softmax's absolute size: it is multiplied by exp(a(q) + c(k)).

    linear:   a(x) = w . x + b          network:  a(x) = w . x + b + sum_i o_i tanh(h_i . x + g_i), 16 units

All start at zero, which changes nothing. LoLCATs (Zhang et al. 2024, https://arxiv.org/abs/2410.10254,
section 3.3) has one learned constant per head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNITS = 16
"""Hidden units of a network."""

Scales = tuple[Tensor | None, Tensor | None]
"""Learned log-scales of queries [B, H, T] and of keys [B, K, T], or None."""


class LogScale(nn.Module):
    """Map queries or keys [B, H, T, D] to log-scales [B, H, T], with separate parameters for each head.

    Args:
        kind: "linear" or "network".
        heads: H.
        head_dim: D.
        bias: whether there is a constant b; one for the queries is enough.
    """

    def __init__(self, kind: str, heads: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim))
        self.bias = nn.Parameter(torch.empty(heads)) if bias else None
        network = kind == "network"
        self.hidden = nn.Parameter(torch.empty(heads, UNITS, head_dim)) if network else None
        self.hidden_bias = nn.Parameter(torch.empty(heads, UNITS)) if network else None
        self.out = nn.Parameter(torch.empty(heads, UNITS)) if network else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start at zero; the hidden units are drawn, their outputs are zero."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            if self.hidden is not None:
                drawn = torch.randn(self.hidden.shape, generator=generator)
                self.hidden.copy_(drawn * self.hidden.shape[-1] ** -0.5)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The parameters in the order in which the native op reads them."""
        return self.weight, self.bias, self.hidden, self.hidden_bias, self.out

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-scales in fp32."""
        x = x.float()
        scale = (x @ self.weight.float()[..., None])[..., 0]
        if self.bias is not None:
            scale = scale + self.bias.float()[:, None]
        if self.hidden is None or self.hidden_bias is None or self.out is None:
            return scale
        units = torch.tanh(x @ self.hidden.float().transpose(-1, -2) + self.hidden_bias.float()[:, None])
        return scale + (units @ self.out.float()[..., None])[..., 0]
