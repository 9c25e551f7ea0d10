"""The one place that decides how a call is carried out, how tokens are mapped, and which causal op is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from linearize.attention.backends.contract import PYTORCH, Backend, CausalOp
from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.fla import FlaOp
from linearize.attention.backends.native import Native, NativeOp, unreadable
from linearize.attention.backends.streamed import Streamed
from linearize.attention.call import AttentionCall
from linearize.attention.native.gradient import map_with_gradient
from linearize.kernels.base import FeatureMap, Features
from linearize.ops import LinearOptions

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer

CAUSAL_OPS: tuple[CausalOp, ...] = (FlaOp(), NativeOp(), PYTORCH)
"""Causal ops on given features; the first that takes a call is used."""

BACKENDS: tuple[Backend, ...] = (
    Native("native step", step=True, window=False),
    Native("native window step", step=True, window=True),
    Native("native window", step=False, window=True),
    Native("native", step=False, window=False),
    OneStep(),
    *(form(op) for op in CAUSAL_OPS for form in (Windowed, Streamed, Eager)),
)
"""All backends; the first that takes a call carries it out. The last three together take every call."""


def choose(mixer: FeatureMapMixer, call: AttentionCall) -> Backend:
    """Return the backend that carries out a call."""
    for backend in BACKENDS:
        if not backend.why_not(mixer, call):
            return backend
    raise AssertionError("no backend takes the call")


def map_tokens(
    map: FeatureMap, x: Tensor, scale: float, positions: Tensor | None, *, queries: bool = False
) -> Features:
    """Map queries or keys x [B, H, T, D], multiplied by `scale`, to features in fp32."""
    if not unreadable(x, x, x) and (spec := map.map_spec()) is not None:
        return Features(*map_with_gradient(spec, x, scale))
    x = x.float() if scale == 1.0 else x.float() * scale
    return map.forward_queries(x, positions) if queries else map.forward_keys(x, positions)


def attend_causally(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
    """Attend causally on given features as `linearize.ops.causal_attention` does, with the fastest op available."""
    normalize = options.get("normalize", True)
    op = next(op for op in CAUSAL_OPS if not op.why_not(phi_k, v, normalize=normalize))
    return op.output(phi_q, phi_k, v, **options)
