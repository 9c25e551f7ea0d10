"""Causal ops on given features, in PyTorch and in C, and the choice between them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from linearize.attention.native import absence, engine, unreadable
from linearize.attention.native.gradient import attend_with_gradient
from linearize.attention.native.options import AttendOptions
from linearize.ops import LinearOptions, State, causal_attention
from linearize.ops.state import EPS


class CausalOp:
    """A causal op on given features; this class is `linearize.ops.causal_attention`, which accepts every call.

    Attributes:
        name: its name in `--explain-backend` and tests.
        attend: a function with the contract of `linearize.ops.causal_attention`.
    """

    name = "pytorch"
    attend = staticmethod(causal_attention)

    def why_not(self, x: Tensor, v: Tensor, *, normalize: bool) -> str:
        """Return why it declines keys or features x [B, K, T, D] and values v [B, K, T, V]; empty if it does not."""
        return ""

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """Attend -> [B, H, T, V], without returning the state."""
        return self.attend(phi_q, phi_k, v, **options)[0]


class NativeOp(CausalOp):
    """The op in C, which always divides rows by their sums."""

    name = "native causal op"

    def why_not(self, x: Tensor, v: Tensor, *, normalize: bool) -> str:
        if not normalize:
            return "it cannot return sums without a denominator"
        if not x.is_cpu:
            return "it runs only on the CPU"
        return absence() if engine() is None else ""

    @staticmethod
    def attend(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> tuple[Tensor, State]:
        if _has_gradient(phi_q, phi_k, v, options.get("log_scale")) or unreadable(phi_q, phi_k, v):
            return causal_attention(phi_q, phi_k, v, **options)
        out, kv, top = engine().attend([], phi_q, phi_k, v, _attend_options(options), options.get("initial_state"))
        return out, State(kv, top)

    def output(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        plain = options.get("initial_state") is not None or unreadable(phi_q, phi_k, v)
        if plain or not _has_gradient(phi_q, phi_k, v, options.get("log_scale")):
            return self.attend(phi_q, phi_k, v, **options)[0]

        def fallback(phi_q: Tensor, phi_k: Tensor, v: Tensor, log_scale: Tensor | None) -> Tensor:
            changed: LinearOptions = {**options, "log_scale": log_scale}
            return causal_attention(phi_q, phi_k, v, **changed)[0]

        return attend_with_gradient([], phi_q, phi_k, v, fallback, _attend_options(options))


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attend_options(options: LinearOptions) -> AttendOptions:
    mask, eps = options.get("key_padding_mask"), options.get("eps", EPS)
    return AttendOptions(True, 1.0, eps, mask=mask, log_scale=options.get("log_scale"))


CAUSAL_OPS: tuple[CausalOp, ...] = (NativeOp(), CausalOp())
"""The first op that accepts a call is used; the last one accepts every call."""


def causal_op(x: Tensor, v: Tensor, *, normalize: bool) -> CausalOp:
    """Return the op that attends causally with such keys or features x [B, K, T, D] and values v [B, K, T, V]."""
    return next(op for op in CAUSAL_OPS if not op.why_not(x, v, normalize=normalize))


def attend_causally(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
    """Attend causally on given features -> [B, H, T, V], with the fastest op available.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, T, F].
        v: values [B, K, T, V].
        **options: those of `linearize.ops.causal_attention`.
    """
    op = causal_op(phi_k, v, normalize=options.get("normalize", True))
    return op.output(phi_q, phi_k, v, **options)
