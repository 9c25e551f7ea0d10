"""Query heads that stay softmax in a converted layer: their keys and values are cached, those of the others are not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState

CACHED = ("softmax_k", "softmax_v", "softmax_mask")
"""What a state holds for these heads: [B, n, T, D], [B, n, T, V] of their n key heads, and [B, T] bool. It grows."""


class SoftmaxHeads:
    """Some query heads of a layer.

    Args:
        heads: their numbers.
        groups: query heads for each key head.
        causal: the direction.
    """

    def __init__(self, heads: tuple[int, ...], groups: int, causal: bool) -> None:
        self.heads, self.causal = list(heads), causal
        # The heads of a group share keys: those are kept once.
        self.key_heads = sorted({head // groups for head in heads})
        self.key_of = [self.key_heads.index(head // groups) for head in heads]

    def attend(self, call: AttentionCall) -> tuple[Tensor, MixerState]:
        """Return the heads' outputs [B, n, T, V], and the keys and values so far; empty unless `call.needs_state`."""
        k, v, mask = call.k[:, self.key_heads], call.v[:, self.key_heads], call.key_padding_mask
        before = 0
        if call.state is not None or call.needs_state:
            mask = (
                torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if mask is None else mask.bool()
            )
        if call.state is not None:
            before = call.state["softmax_mask"].shape[1]
            k, v = torch.cat([call.state["softmax_k"], k], dim=2), torch.cat([call.state["softmax_v"], v], dim=2)
            assert mask is not None
            mask = torch.cat([call.state["softmax_mask"], mask], dim=1)
        visible = self._visible(call.q.shape[2], before, mask)
        causal = self.causal and visible is None and call.q.shape[2] > 1
        q, keys, values = call.q[:, self.heads], k[:, self.key_of], v[:, self.key_of]
        out = F.scaled_dot_product_attention(q, keys, values, visible, is_causal=causal, scale=call.scaling)
        if mask is None or not call.needs_state:
            return out, {}
        return out, {"softmax_k": k, "softmax_v": v, "softmax_mask": mask}

    def weights(self, q: Tensor, k: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """Write out the heads' weights [B, n, T, S] in fp32; the queries are the last T of the S tokens."""
        scores = q[:, self.heads].float() * scaling @ k[:, self.key_heads][:, self.key_of].float().transpose(-1, -2)
        visible = self._visible(q.shape[2], k.shape[2] - q.shape[2], mask)
        if visible is None and self.causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(dim=-1)

    def _visible(self, tokens: int, before: int, mask: Tensor | None) -> Tensor | None:
        """Return which keys [B, 1, T, S] a query sees; None if the direction alone decides."""
        if mask is None and (not before or tokens == 1):
            return None
        device = None if mask is None else mask.device
        past = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device)
        past = past.tril(before) if self.causal else past
        if mask is None:
            return past[None, None]
        # A row without any key would be NaN: padding sees itself.
        own = torch.eye(tokens, dtype=torch.bool, device=device)
        return past & mask[:, None, None].bool() | F.pad(own, (before, 0))
