"""Causal attention on given features: in C if possible, otherwise in PyTorch (`linearize.ops.causal_attention`)."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from linearize.attention.native import absence, engine
from linearize.attention.native.gradient import attend_with_gradient
from linearize.attention.native.options import AttendOptions
from linearize.ops import LinearOp, LinearOptions, State, causal_attention
from linearize.ops.state import EPS, all_finite, split_absurd, without_padding

NATIVE_OP, PYTORCH_OP = "native causal op", "pytorch"
"""Names of the two ops in `--explain-backend` and tests."""


def why_not_native(x: Tensor, *, normalize: bool) -> str:
    """Return why the op in C declines keys or features x [B, K, T, D]; empty if it does not."""
    if not normalize:
        return "it cannot return sums without a denominator"
    if not x.is_cpu:
        return "it runs only on the CPU"
    return absence() if engine() is None else ""


def causal_op(native: Any, *, normalize: bool) -> LinearOp:
    """Return the op for a call with such a native op: `attend_with_state`, or the op in PyTorch itself."""
    return causal_attention if native is None or not normalize else attend_with_state


def attend_with_state(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]:
    """Attend causally; arguments and results as in `linearize.ops.causal_attention`."""
    native = _readable(phi_q, phi_k, v, options)
    if native is None or _has_gradient(phi_q, phi_k, v, options.get("log_scale")):
        return causal_attention(phi_q, phi_k, v, **options)
    rest = _attend_options(options), options.get("initial_state")
    out, kv, top = native.attend([], phi_q, phi_k, v, *rest)
    if (apart := absurd_apart(v, options.get("key_padding_mask"), phi_q.shape[1])) is not None:
        out = native.attend([], phi_q, phi_k, apart[0], *rest)[0] + apart[1]
    return out, State(kv, top)


def absurd_apart(v: Tensor, mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor] | None:
    """Return the results of `split_absurd` for values [B, K, T, V], the second for all heads; None if all are finite.

    The op in C multiplies the values of a tile by the zero weights of later tokens too.
    """
    if all_finite(v) or all_finite(v := without_padding(v, mask)):
        return None
    clean, later = split_absurd(v)
    return clean, later.repeat_interleave(heads // v.shape[1], dim=1)


def attend_causally(phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
    """Attend causally, without returning the state: then the op in C also computes gradients.

    Args:
        phi_q: query features [B, H, T, F].
        phi_k: key features [B, K, T, F].
        v: values [B, K, T, V].
        **options: those of `linearize.ops.causal_attention`.

    Returns:
        [B, H, T, V].
    """
    plain = options.get("initial_state") is not None or _readable(phi_q, phi_k, v, options) is None
    if plain or not _has_gradient(phi_q, phi_k, v, options.get("log_scale")):
        return attend_with_state(phi_q, phi_k, v, **options)[0]

    def fallback(phi_q: Tensor, phi_k: Tensor, v: Tensor, log_scale: Tensor | None) -> Tensor:
        changed: LinearOptions = {**options, "log_scale": log_scale}
        return causal_attention(phi_q, phi_k, v, **changed)[0]

    clean, later = absurd_apart(v, options.get("key_padding_mask"), phi_q.shape[1]) or (v, None)
    out = attend_with_gradient([], phi_q, phi_k, clean, fallback, _attend_options(options))
    return out if later is None else out + later


def _readable(phi_q: Tensor, phi_k: Tensor, v: Tensor, options: LinearOptions) -> Any:
    """Return the native op if it computes such a call; otherwise None."""
    native = engine() if options.get("normalize", True) else None
    return native if native is not None and native.supports(phi_q, phi_k, v) else None


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attend_options(options: LinearOptions) -> AttendOptions:
    mask, eps = options.get("key_padding_mask"), options.get("eps", EPS)
    return AttendOptions(True, 1.0, eps, mask=mask, log_scale=options.get("log_scale"))
