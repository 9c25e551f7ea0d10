"""The mixer that chooses the backend for each call, in this one place; also explains the choice (`--explain-backend`).

To add a backend, write a file with a class that implements `Backend` and add an instance to `BACKENDS`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from linearize.attention.backends.causal import NATIVE_OP, PYTORCH_OP, why_not_native
from linearize.attention.backends.eager import Eager, OneStep, Windowed
from linearize.attention.backends.fused import Fused
from linearize.attention.backends.fused_step import FusedStep
from linearize.attention.backends.fused_window import FusedWindow
from linearize.attention.backends.native import Native
from linearize.attention.backends.streamed import Streamed
from linearize.attention.call import AttentionCall, MixerState, running_count
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.hybrid import CACHED
from linearize.attention.parts import HEADS, not_supported
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid
from linearize.kernels.base import FeatureMap


class Backend(Protocol):
    """One way to compute the call of a feature-map kernel.

    Attributes:
        name: its name in `--explain-backend` and tests.
        uses_op: whether its causal calls go through an op of `backends.causal`.
        supports: names of the parts (`linearize.attention.parts`) that it computes; it gets no layer with another one.
    """

    name: str
    uses_op: bool
    supports: frozenset[str]

    def why_not(self, mixer: FeatureMapMixer, call: AttentionCall) -> str:
        """Return why it declines a call of a layer whose parts it supports; empty if it can compute it.

        This is called at every decoding step, so do the cheap checks first and return constant texts.
        """

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] in the dtype of the values, and the state after (None without `needs_state`).

        Called only after `declined` returned an empty text.
        """


BACKENDS: tuple[Backend, ...] = (
    *(Native(), Fused(), FusedWindow(), FusedStep()),
    *(OneStep(), Windowed(), Streamed(), Eager()),
)
"""All backends; the first that accepts a call computes it. Every call is accepted by one of the last three."""


def declined(backend: Backend, mixer: FeatureMapMixer, call: AttentionCall) -> str:
    """Return why a backend does not compute a call; empty if it does."""
    if mixer.asked <= backend.supports:
        return backend.why_not(mixer, call)
    return not_supported(mixer.asked - backend.supports)


def choose(mixer: FeatureMapMixer, call: AttentionCall) -> Backend:
    """Return the backend that computes a call.

    Raises:
        ConfigError: if no backend does, because of the layer's additions.
    """
    for backend in BACKENDS:
        if not declined(backend, mixer, call):
            return backend
    raise _no_backend(mixer.hybrid)


def _no_backend(hybrid: Hybrid) -> ConfigError:
    parts = ", ".join(f"{name}={value}" for name, value in hybrid.changed.items())
    return ConfigError(f"got a layer with {parts}, expected those that one backend computes together; leave some out")


OWN = (*CACHED, "seen")
"""The tensors of a state that belong to the mixer; all others belong to the backend."""


class LinearMixer(FeatureMapMixer):
    """A feature-map mixer whose calls are computed by the first backend that accepts them."""

    def change(self, hybrid: Hybrid) -> None:
        """Replace the additions as `FeatureMapMixer.change` does.

        Raises:
            ConfigError: if no backend computes them together.
        """
        if not any(frozenset(hybrid.changed) - HEADS <= backend.supports for backend in BACKENDS):
            raise _no_backend(hybrid)
        super().change(hybrid)

    def forward(self, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix -> [B, H, T, V], as `Mixer.forward` does."""
        if self.softmax_heads is None and not self.counts:
            return choose(self, call).run(self, call)
        exact: Tensor | None = None
        more: MixerState = {}
        if self.softmax_heads is not None:
            exact, more = self.softmax_heads.attend(call)
        state, positions = call.state, None
        if self.counts:
            counted = running_count(call.k, call.key_padding_mask, None if state is None else state["seen"])
            positions, more = (counted - 1).clamp(min=0), more | {"seen": counted[:, -1]}
        if state is not None:
            state = {name: x for name, x in state.items() if name not in OWN}
        call = replace(call, positions=positions, state=state)
        out, after = choose(self, call).run(self, call)
        if exact is not None and self.softmax_heads is not None:
            out = out.index_copy(1, torch.tensor(self.softmax_heads.heads, device=out.device), exact.to(out.dtype))
        return out, None if after is None else after | more


Explanation = tuple[str, str, tuple[tuple[str, str], ...]]
"""How one kind of call is computed: the call in words, the names of the backend and its op, and the name and reason of
each backend or op that declined the call."""


def explain(mixer: Any, tokens: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Explanation]:
    """Explain a forward pass of `tokens` tokens, with and without gradients, and a decoding step of causal layers.

    Args:
        mixer: an initialised `linearize.attention.mixer.Mixer` on `device`.
        tokens: length of the input.
        device: device of the inputs.
        dtype: their dtype.
    """
    if not isinstance(getattr(mixer, "keys", None), FeatureMap):
        return [("all calls", "the kernel itself: it has no feature map, so there is no choice", ())]
    shape = mixer.shape
    sizes = (shape.heads, shape.head_dim), (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim)
    # Expand one token instead of allocating the whole input.
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
    backend = choose(mixer, call)
    before = [(one.name, declined(one, mixer, call)) for one in BACKENDS[: BACKENDS.index(backend)]]
    if not backend.uses_op:
        return words, backend.name, tuple(before)
    # Bidirectional attention uses no causal op, so it is computed in PyTorch.
    why = why_not_native(call.k, normalize=mixer.divides) if mixer.shape.causal else ""
    op = NATIVE_OP if mixer.shape.causal and not why else PYTORCH_OP
    before += [(NATIVE_OP, why)] if why else []
    return words, f"{backend.name}, {op}", tuple(before)
