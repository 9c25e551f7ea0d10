"""The additions of a hybrid to its kernel: learned log-scales of queries and keys, and query heads that keep softmax.

Log-scales set the size of the linear part relative to the softmax part. Hedgehog's features give phi(q) . phi(k) <= 2
whatever q and k are, while a near key has the weight exp(q . k / sqrt d). To share a denominator with softmax, the
linear part must match its absolute size: it is multiplied by exp(a(q) + c(k)).

    linear:   a(x) = w . x + b          network:  a(x) = w . x + b + sum_i o_i tanh(h_i . x + g_i), 16 units

All parameters start at zero, where they have no effect. LoLCATs (Zhang et al. 2024, https://arxiv.org/abs/2410.10254,
section 3.3) has one learned constant per head.

With more keys than in training, their sum outweighs the window. So the linear part fades in longer rows (`fade`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.masks import softmax_weights, visible_keys
from linearize.ops.state import is_tracing, real_tokens, split_absurd, without_padding

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
        bias: whether there is a constant b; it is only needed for the queries.
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
        """Start at zero; the hidden units are random, but their output weights are zero."""
        for parameter in self.parameters():
            parameter.zero_()
        if self.hidden is not None:
            drawn = torch.randn(self.hidden.shape, generator=generator)
            self.hidden.copy_(drawn * self.hidden.shape[-1] ** -0.5)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weight [H, D], bias [H], hidden [H, U, D], hidden_bias [H, U], out [H, U], in the order of the native op."""
        return self.weight, self.bias, self.hidden, self.hidden_bias, self.out

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-scales [B, H, T] of x [B, H, T, D] in fp32."""
        x = x.float()
        scale = per_head(x, self.weight.float())
        if self.bias is not None:
            scale = scale + self.bias.float()[:, None]
        if self.hidden is None or self.hidden_bias is None or self.out is None:
            return scale
        units = torch.tanh(x @ self.hidden.float().transpose(-1, -2) + self.hidden_bias.float()[:, None])
        return scale + per_head(units, self.out.float())


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products [B, H, T] of tokens [B, H, T, D] and one vector per head [H, D].

    With the vectors as rows, and without a copy of the tokens, BLAS needs a third to an eighth of the time that
    `x @ weight[..., None]` takes.
    """
    tokens = x.transpose(1, 2)
    # Hosts split heads without moving them.
    if not is_tracing() and tokens.is_contiguous():
        products = weight[:, None] @ tokens.flatten(0, 1).permute(1, 2, 0)
        return products.view(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)
    return (weight[:, None] @ x.mT)[:, :, 0]


FADING = 2.0
"""Beyond the trained length N the linear part of token n is multiplied by (N / n) to this power.

Chosen on one row of 8,192 tokens with SmolLM2, where a power of 1 was still harmful.
"""


def fade(positions: Tensor, trained_length: int) -> Tensor:
    """Return the logarithm [B, T] of the linear part's factor at positions [B, T], which count from 0."""
    return -FADING * torch.log((positions + 1.0) / trained_length).clamp(min=0.0)


CACHED = ("softmax_k", "softmax_v", "softmax_mask")
"""State tensors of these heads: [B, n, T, D] and [B, n, T, V] for their n key heads, and [B, T] bool. They grow."""


class SoftmaxHeads:
    """Query heads that keep softmax: their keys and values are cached, those of other heads are not.

    Args:
        heads: numbers of these heads.
        groups: query heads per key head.
        causal: whether a query sees only keys up to its own position.
    """

    def __init__(self, heads: tuple[int, ...], groups: int, causal: bool) -> None:
        self.heads, self.causal = list(heads), causal
        # The heads of a group share keys, which are stored once.
        self.key_heads = sorted({head // groups for head in heads})
        self.key_of = [self.key_heads.index(head // groups) for head in heads]

    def attend(self, call: AttentionCall) -> tuple[Tensor, MixerState]:
        """Return the heads' outputs [B, n, T, V], and the keys and values so far (empty unless `call.needs_state`)."""
        mask = call.key_padding_mask
        # SDPA multiplies all values by their weights, and 0 times NaN would be NaN.
        q, k = call.without_padding()
        k, v = k[:, self.key_heads], without_padding(call.v[:, self.key_heads], mask)
        if call.state is not None or call.needs_state:
            mask = real_tokens(k, mask)
            if call.state is not None:
                k, v = torch.cat([call.state["softmax_k"], k], dim=2), torch.cat([call.state["softmax_v"], v], dim=2)
                mask = torch.cat([call.state["softmax_mask"], mask], dim=1)
        q, keys, values = q[:, self.heads], k[:, self.key_of], v[:, self.key_of]
        # Under autocast, rotary positions leave queries and keys in fp32; softmax's own layer computes in v's type.
        q, keys = q.to(values.dtype), keys.to(values.dtype)
        later: Tensor | float = 0.0
        if self.causal and q.shape[2] > 1:
            (keys, by_key), (values, by_value) = split_absurd(keys), split_absurd(values)
            later = (by_value + by_key.sum(dim=-1, keepdim=True))[:, :, -q.shape[2] :]
        real = None if mask is None else mask[:, None, None].bool()
        visible, causal = visible_keys(q, keys, real, causal=self.causal)
        out = F.scaled_dot_product_attention(q, keys, values, visible, is_causal=causal, scale=call.scaling) + later
        if mask is None or not call.needs_state:
            return out, {}
        return out, {"softmax_k": k, "softmax_v": v, "softmax_mask": mask}

    def weights(self, q: Tensor, k: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """Return the heads' weights [B, n, T, S] in fp32; the queries are the last T of the S tokens."""
        q, k = q[:, self.heads].float(), k[:, self.key_heads][:, self.key_of].float()
        real = None if mask is None else mask[:, None, None].bool()
        visible, causal = visible_keys(q, k, real, causal=self.causal)
        return softmax_weights(q, k, visible, scaling=scaling, causal=causal)
