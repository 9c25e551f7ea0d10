"""Support for attention that calls `F.scaled_dot_product_attention` itself and cannot be registered elsewhere (timm).

The host keeps everything before and after that call: projections, norms, rotary positions, gates. Torch's override
mechanism redirects only that call to the kernel, and only inside the host's forward.

Hosts that compute softmax explicitly have a form here that calls SDPA instead: same weights, same output. Attention
with a bias on the scores (LeViT, MViTv2 ...), with talking heads (CaiT) or between channels (XCiT, EdgeNeXt) has no
such form and is rejected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linearize.attention.interface import attention_forward
from linearize.core.registry import Values

REDIRECTED = ("timm_wrapper",)
"""The `model_type` of transformers models with such attention."""


class Redirect(TorchFunctionMode):
    """While active, redirects scaled dot-product attention to the kernel of one host."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Values | None = None
    ) -> object:
        """Attend with the host's kernel; call every other function unchanged."""
        kwargs = kwargs or {}
        return self.attend(*args, **kwargs) if func is F.scaled_dot_product_attention else func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Attend with the host's kernel, as `scaled_dot_product_attention` does: q [B, H, T, D] -> [B, H, T, V].

        `attention_forward` rejects a mask per pair of tokens.
        """
        out, _ = attention_forward(self.host, query, key, value, attn_mask, scaling=scale, dropout=dropout_p)
        return out.transpose(1, 2)


if TYPE_CHECKING:
    _Host = nn.Module
else:
    _Host = object


class RedirectedHost(_Host):
    """Mixin for the class of a host; it comes first in the method resolution order."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the host's own forward with its attention redirected."""
        called = form(type(self))
        with Redirect(self):
            return super().forward(*args, **kwargs) if called is None else called(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle an object of the host's class, to be redirected again after loading: our class cannot be imported."""
        base = type(self).__mro__[2]
        return _empty, (base,), self.__dict__


def _empty(base: type) -> object:
    redirected: Any = _redirected(base)
    return redirected.__new__(redirected)


@functools.cache
def _redirected(base: type) -> type:
    """Return the redirected version of a host's class."""
    name = f"Linearized{base.__name__}"
    return type(name, (RedirectedHost, base), {"__module__": __name__, "__doc__": base.__doc__})


def redirect(host: nn.Module) -> None:
    """Make `host` use its `linear_attention`."""
    if isinstance(host, RedirectedHost):
        return
    host.__class__ = _redirected(type(host))  # type: ignore[arg-type]
    # timm's switch between the fused function and the explicit formula.
    if hasattr(host, "fused_attn"):
        vars(host)["fused_attn"] = True


Form = Callable[..., Tensor]


def _attend(host: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from q [B, H, T, D] to k [B, H, T, D] and v [B, H, T, V], and project the result: [B, T, C]."""
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=host.attn_drop.p if host.training else 0.0)
    return host.proj_drop(host.proj(out.transpose(1, 2).flatten(2)))


def _tnt(host: Any, x: Tensor) -> Tensor:
    """TNT's attention, inside patches and between them: x [B, T, C] -> [B, T, C]."""
    batch, length, _ = x.shape
    q, k = host.qk(x).reshape(batch, length, 2, host.num_heads, host.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return _attend(host, q, k, host.v(x).reshape(batch, length, host.num_heads, -1).transpose(1, 2))


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
    q, k, v = host.qkv(x).reshape(*x.shape[:2], 3, host.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return _attend(host, q, k, v)


_FORMS: dict[tuple[str, str], Form] = {
    ("timm.models.tnt", "Attention"): _tnt,
    ("timm.models.shvit", "SHSA"): _shvit,
    ("timm.models.convit", "MHSA"): _convit,
}


def form(kind: type[nn.Module]) -> Form | None:
    """Return the form of an attention class that calls SDPA; None if its own forward does so, or there is no form."""
    return next((_FORMS[key] for base in kind.__mro__ if (key := (base.__module__, base.__name__)) in _FORMS), None)
