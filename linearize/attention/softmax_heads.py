"""Query heads that stay softmax in a converted layer: their keys and values are cached, those of the others are not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.masks import softmax_weights, visible_keys

CACHED = ("softmax_k", "softmax_v", "softmax_mask")
"""These heads' tensors in a state: [B, n, T, D] and [B, n, T, V] of their n key heads, and [B, T] bool. They grow."""


class SoftmaxHeads:
    """Some query heads of a layer.

    Args:
        heads: their numbers.
        groups: query heads for each key head.
        causal: the direction.
    """

    def __init__(self, heads: tuple[int, ...], groups: int, causal: bool) -> None:
        self.heads, self.causal = list(heads), causal
        # The heads of a group share keys, which are kept once.
        self.key_heads = sorted({head // groups for head in heads})
        self.key_of = [self.key_heads.index(head // groups) for head in heads]

    def attend(self, call: AttentionCall) -> tuple[Tensor, MixerState]:
        """Return the heads' outputs [B, n, T, V], and the keys and values so far; empty unless `call.needs_state`."""
        k, v, mask = call.k[:, self.key_heads], call.v[:, self.key_heads], call.key_padding_mask
        if call.state is not None or call.needs_state:
            everywhere = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
            mask = everywhere if mask is None else mask.bool()
        if call.state is not None:
            k, v = torch.cat([call.state["softmax_k"], k], dim=2), torch.cat([call.state["softmax_v"], v], dim=2)
            assert mask is not None
            mask = torch.cat([call.state["softmax_mask"], mask], dim=1)
        q, keys, values = call.q[:, self.heads], k[:, self.key_of], v[:, self.key_of]
        visible = visible_keys(q, keys, None if mask is None else mask[:, None, None].bool(), causal=self.causal)
        causal = self.causal and visible is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, keys, values, visible, is_causal=causal, scale=call.scaling)
        if mask is None or not call.needs_state:
            return out, {}
        return out, {"softmax_k": k, "softmax_v": v, "softmax_mask": mask}

    def weights(self, q: Tensor, k: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """Write out the heads' weights [B, n, T, S] in fp32; the queries are the last T of the S tokens."""
        q, k = q[:, self.heads].float(), k[:, self.key_heads][:, self.key_of].float()
        visible = visible_keys(q, k, None if mask is None else mask[:, None, None].bool(), causal=self.causal)
        causal = self.causal and visible is None and q.shape[2] > 1
        return softmax_weights(q, k, visible, scaling=scaling, causal=causal)
