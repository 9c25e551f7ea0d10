"""The one place that decides how a call is carried out, and its explanation for `--explain-backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from linearize.attention.backends import Backend
from linearize.attention.backends.causal import CAUSAL_OPS, CausalOp
from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.native import Native
from linearize.attention.backends.streamed import Streamed
from linearize.attention.call import AttentionCall
from linearize.kernels.base import FeatureMap

if TYPE_CHECKING:
    from linearize.attention.feature_map import FeatureMapMixer
T = TypeVar("T", Backend, CausalOp)

BACKENDS: tuple[Backend, ...] = (Native(), OneStep(), Windowed(), Streamed(), Eager())
"""All backends; the first that takes a call carries it out. The last three together take every call."""


def choose(mixer: FeatureMapMixer, call: AttentionCall) -> Backend:
    """Return the backend that carries out a call."""
    return next(backend for backend in BACKENDS if not backend.why_not(mixer, call))


@dataclass(frozen=True)
class Explanation:
    """How one kind of call is carried out.

    Attributes:
        call: the kind, in words.
        backend: name of the backend and of its op.
        declined: name and reason of everything that was asked before.
    """

    call: str
    backend: str
    declined: tuple[tuple[str, str], ...] = ()


def explain(mixer: Any, tokens: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Explanation]:
    """Explain a forward pass of `tokens` tokens, the same with gradients and, for causal layers, a decoding step.

    Args:
        mixer: an initialised `linearize.attention.mixer.Mixer` on `device`.
        tokens: length of the input.
        device: where the inputs are.
        dtype: their type.
    """
    if not isinstance(getattr(mixer, "keys", None), FeatureMap):
        return [Explanation("all calls", "the kernel itself, which has no feature map to choose a backend for")]
    shape = mixer.shape
    sizes = (shape.heads, shape.head_dim), (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim)
    # One token in memory, however long the input is.
    token = [torch.zeros(1, heads, 1, size, device=device, dtype=dtype) for heads, size in sizes]
    q, k, v = (x.expand(-1, -1, tokens, -1) for x in token)
    result = []
    for words, gradient in ((f"{tokens:,} tokens", False), (f"{tokens:,} tokens, with gradients", True)):
        with torch.set_grad_enabled(gradient):
            result.append(_explain_call(mixer, words, AttentionCall(q, k, v, 1.0)))
    if shape.causal and mixer.info.streamable:
        with torch.no_grad():
            step = AttentionCall(token[0], token[1], token[2], 1.0, needs_state=True)
            result.append(_explain_call(mixer, "one token of decoding", replace(step, state=mixer(step)[1])))
    return result


def _explain_call(mixer: FeatureMapMixer, words: str, call: AttentionCall) -> Explanation:
    backend, declined = _first(BACKENDS, lambda backend: backend.why_not(mixer, call))
    if not backend.uses_op:
        return Explanation(words, backend.name, tuple(declined))
    # Without a causal op the attention is computed in PyTorch.
    ops = CAUSAL_OPS if mixer.shape.causal else CAUSAL_OPS[-1:]
    op, more = _first(ops, lambda op: op.why_not(call.k, call.v, normalize=mixer.divides))
    return Explanation(words, f"{backend.name}, {op.name}", (*declined, *more))


def _first(candidates: Sequence[T], ask: Callable[[T], str]) -> tuple[T, list[tuple[str, str]]]:
    """Return the first that gives no reason, and name and reason of those asked before it."""
    reasons = [(candidate, ask(candidate)) for candidate in candidates]
    first = next(number for number, (_, why) in enumerate(reasons) if not why)
    return candidates[first], [(candidate.name, why) for candidate, why in reasons[:first]]
