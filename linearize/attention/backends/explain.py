"""Which backends carry out the calls of a mixer, and why those asked before them declined: for `--explain-backend`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from linearize.attention.backends.choose import BACKENDS
from linearize.attention.call import AttentionCall
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import Mixer


@dataclass(frozen=True)
class Explanation:
    """How one kind of call is carried out.

    Attributes:
        call: the kind, in words.
        backend: name of the backend.
        declined: name and reason of every backend that was asked before it.
    """

    call: str
    backend: str
    declined: tuple[tuple[str, str], ...] = ()


def explain(mixer: Mixer, tokens: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Explanation]:
    """Explain a forward pass of `tokens` tokens, the same with gradients and, for causal layers, a decoding step.

    Args:
        mixer: an initialised mixer on `device`.
        tokens: length of the input.
        device: where the inputs are.
        dtype: their type.
    """
    if not isinstance(mixer, FeatureMapMixer):
        return [Explanation("all calls", "the kernel itself, which has no feature map to choose a backend for")]
    shape = mixer.shape
    sizes = (shape.heads, shape.head_dim), (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim)
    # One token in memory, however long the input is.
    token = [torch.zeros(1, heads, 1, size, device=device, dtype=dtype) for heads, size in sizes]
    q, k, v = (x.expand(-1, -1, tokens, -1) for x in token)
    whole = AttentionCall(q, k, v, 1.0)
    result = []
    for words, gradient in ((f"{tokens:,} tokens", False), (f"{tokens:,} tokens, with gradients", True)):
        with torch.set_grad_enabled(gradient):
            result.append(_explain(mixer, words, whole))
    if shape.causal and mixer.info.streamable:
        with torch.no_grad():
            step = AttentionCall(token[0], token[1], token[2], 1.0, needs_state=True)
            result.append(_explain(mixer, "one token of decoding", replace(step, state=mixer(step)[1])))
    return result


def _explain(mixer: FeatureMapMixer, words: str, call: AttentionCall) -> Explanation:
    if mixer.info.positional:
        call = replace(call, positions=torch.zeros(1, call.k.shape[2], device=call.k.device))
    declined: list[tuple[str, str]] = []
    for backend in BACKENDS:
        why = backend.why_not(mixer, call)
        if not why:
            return Explanation(words, backend.name, tuple(declined))
        declined.append((backend.name, why))
    raise AssertionError("no backend takes the call")
