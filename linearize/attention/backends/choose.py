"""The one place that chooses how a call is carried out, how tokens are mapped, and which causal op takes features."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from linearize.attention.backends.contract import Backend, CausalOp, MappingMixer
from linearize.attention.backends.eager import PYTORCH, Eager
from linearize.attention.backends.fla import FlaOp
from linearize.attention.backends.native import (
    Native,
    NativeOp,
    NativeStep,
    NativeWindow,
    NativeWindowStep,
    native_features,
)
from linearize.attention.backends.one_step import OneStep
from linearize.attention.backends.streamed import Streamed
from linearize.attention.backends.window import Windowed
from linearize.attention.call import AttentionCall
from linearize.kernels.base import FeatureMap, Features
from linearize.ops import LinearOptions

CAUSAL_OPS: tuple[CausalOp, ...] = (FlaOp(), NativeOp(), PYTORCH)
"""Causal ops on given features; the first that supports a call is taken."""

BACKENDS: tuple[Backend, ...] = (
    NativeStep(),
    NativeWindowStep(),
    NativeWindow(),
    Native(),
    OneStep(),
    *(form(op) for op in CAUSAL_OPS for form in (Windowed, Streamed, Eager)),
)
"""All backends; the first that supports a call is taken, and the last supports every call."""


def choose(mixer: MappingMixer, call: AttentionCall) -> Backend:
    """Return the backend that carries out a call."""
    for backend in BACKENDS:
        if backend.supports(mixer, call):
            return backend
    raise AssertionError("no backend supports the call")


def map_queries(map: FeatureMap, x: Tensor, scale: float, positions: Tensor | None) -> Features:
    """Map queries x [B, H, T, D], multiplied by `scale`, to features in fp32."""
    return native_features(map, x, scale) or map.forward_queries(_scaled(x, scale), positions)


def map_keys(map: FeatureMap, x: Tensor, scale: float, positions: Tensor | None) -> Features:
    """Map keys x [B, K, T, D], multiplied by `scale`, to features in fp32."""
    return native_features(map, x, scale) or map.forward_keys(_scaled(x, scale), positions)


def _scaled(x: Tensor, scale: float) -> Tensor:
    x = x.float()
    return x if scale == 1.0 else x * scale


def attend_causally(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
    """Attend causally on given features as `linearize.ops.causal_attention` does, by the fastest op that is there."""
    normalize = options.get("normalize", True)
    op = next(op for op in CAUSAL_OPS if op.supports(phi_k, v, normalize=normalize))
    return op.output(phi_q, phi_k, v, **options)
