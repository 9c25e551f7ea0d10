"""Attention that calls `F.scaled_dot_product_attention` itself, with no interface to register with (timm).

The host keeps everything before and after that call: projections, norms, rotary positions, gates. Torch's override
mechanism sends only that call to the kernel, and only inside the host's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linearize.attention.interface import attention_forward
from linearize.attention.written_out import form

REDIRECTED = ("timm_wrapper",)
"""`model_type` of the transformers models with such attentions."""


class Redirect(TorchFunctionMode):
    """While entered, sends scaled dot-product attention to the attention of one host."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call every other function unchanged."""
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

        `attention_forward` refuses a mask per pair of tokens.
        """
        out, _ = attention_forward(self.host, query, key, value, attn_mask, scaling=scale, dropout=dropout_p)
        return out.transpose(1, 2)


if TYPE_CHECKING:
    _Host = nn.Module
else:
    _Host = object


class RedirectedHost(_Host):
    """Mixin for the class of a host; it comes first in the order of inheritance."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the host's own forward with its attention redirected."""
        called = form(type(self))
        with Redirect(self):
            return super().forward(*args, **kwargs) if called is None else called(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle an object of the host's class and redirect it again: our class has no importable name."""
        base = type(self).__mro__[2]
        return _empty, (base,), self.__dict__


def _empty(base: type) -> object:
    redirected: Any = _redirected(base)
    return redirected.__new__(redirected)


_CLASSES: dict[type, type] = {}


def _redirected(base: type) -> type:
    """Make (once) the redirected class of a host's class."""
    if base not in _CLASSES:
        name = f"Linearized{base.__name__}"
        _CLASSES[base] = type(name, (RedirectedHost, base), {"__module__": __name__, "__doc__": base.__doc__})
    return _CLASSES[base]


def redirect(host: nn.Module) -> None:
    """Make `host` use its `linear_attention`."""
    if isinstance(host, RedirectedHost):
        return
    host.__class__ = _redirected(type(host))
    # timm's switch between the fused function and the formula written out.
    if hasattr(host, "fused_attn"):
        host.fused_attn = True  # type: ignore[assignment]
