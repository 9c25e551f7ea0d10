"""Forms of timm's attentions with written-out softmax that call SDPA instead: same weights, same output.

Only plain softmax attention has such a form. A bias on the scores (LeViT, MViTv2 ...), talking heads (CaiT) and
attention between channels (XCiT, EdgeNeXt) are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Form = Callable[..., Tensor]


def _tnt(host: Any, x: Tensor) -> Tensor:
    """TNT's attention, inside patches and between them: x [B, T, C] -> [B, T, C]."""
    batch, length, _ = x.shape
    q, k = host.qk(x).reshape(batch, length, 2, host.num_heads, host.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    v = host.v(x).reshape(batch, length, host.num_heads, -1).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=host.attn_drop.p if host.training else 0.0)
    return host.proj_drop(host.proj(out.transpose(1, 2).reshape(batch, length, -1)))


def _shvit(host: Any, x: Tensor) -> Tensor:
    """SHViT's single head over a part of the channels: x [B, C, height, width] -> the same."""
    batch, _, height, width = x.shape
    attended, left = torch.split(x, [host.pdim, host.dim - host.pdim], dim=1)
    qkv = host.qkv(host.pre_norm(attended)).flatten(2).transpose(1, 2)[:, None]
    q, k, v = torch.split(qkv, [host.qk_dim, host.qk_dim, host.pdim], dim=3)
    out = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(batch, host.pdim, height, width)
    return host.proj(torch.cat([out, left], dim=1))


def _convit(host: Any, x: Tensor) -> Tensor:
    """ConViT's attention without gated positions, in its last layers: x [B, T, C] -> [B, T, C]."""
    batch, length, channels = x.shape
    q, k, v = host.qkv(x).reshape(batch, length, 3, host.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=host.attn_drop.p if host.training else 0.0)
    return host.proj_drop(host.proj(out.transpose(1, 2).reshape(batch, length, channels)))


_FORMS: dict[tuple[str, str], Form] = {
    ("timm.models.tnt", "Attention"): _tnt,
    ("timm.models.shvit", "SHSA"): _shvit,
    ("timm.models.convit", "MHSA"): _convit,
}


def form(kind: type[nn.Module]) -> Form | None:
    """Return the form of a class of attentions that calls SDPA; None if its own forward does, or it has no form."""
    return next((_FORMS[key] for base in kind.__mro__ if (key := (base.__module__, base.__name__)) in _FORMS), None)
