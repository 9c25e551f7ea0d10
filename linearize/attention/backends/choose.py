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
from linearize.attention.backends.streamed import Streamed, is_recomputed
from linearize.attention.backends.triton_calls import DEVICES, switches
from linearize.attention.call import AttentionCall, Kind, MixerState, running_count
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.hybrid import CACHED
from linearize.attention.native import enabled
from linearize.attention.parts import HEADS, not_supported
from linearize.core.errors import ConfigError
from linearize.core.registry import Hybrid
from linearize.kernels.base import FeatureMap
from linearize.ops.state import is_tracing


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

    def why_not(self, mixer: FeatureMapMixer, kind: Kind) -> str:
        """Return why it declines calls of this kind of a layer whose parts it supports; empty if it computes them."""

    def run(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Return the output [B, H, T, V] in the dtype of the values, and the state after (None without `needs_state`).

        Called only for kinds of calls that it did not decline.
        """


BACKENDS: tuple[Backend, ...] = (
    *(Native(), Fused(), FusedWindow(), FusedStep()),
    *(OneStep(), Windowed(), Streamed(), Eager()),
)
"""All backends; the first that accepts a call computes it. Every call is accepted by one of the last three."""


CPU = torch.device("cpu")
_NATIVE = Kind._fields.index("native")


def kind_of(mixer: FeatureMapMixer, call: AttentionCall) -> Kind:
    """Return the kind of a call."""
    return Kind(*_facts(mixer, call))


def _facts(mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Any, ...]:
    """Return the fields of the call's kind in order: at every decoding step, so as a tuple, which is made faster."""
    if is_tracing():
        # Reading anything else, such as the number of tokens, would make it a constant of the graph.
        return (True,)
    q, k, v, state = call.q, call.k, call.v, call.state
    tokens, step, writes, uneven = k.size(2), call.one_step, False, False
    device = CPU if k.is_cpu else k.device
    native = enabled() if device is CPU else None
    if step and state is not None:
        if native is None:
            writes = state["kv"].dtype == torch.float32 and all(map(Tensor.is_contiguous, state.values()))
        elif mixer.window is not None:
            writes = native.supports_window_step(q, k, v, state)
        else:
            writes = native.supports_step(q, k, v, state["kv"], state["log_scale"])
        length = mixer.hybrid.trained_length
        if native is not None and length is not None and q.size(0) > 1:
            least, most = call.places.aminmax()
            uneven = float(most) >= length and bool(least != most)
    return (
        False,
        device,
        (q.dtype, k.dtype, v.dtype),
        type(q) is type(k) is type(v) is Tensor,
        q.size(0) > 0,
        min(tokens, 2),
        is_recomputed(tokens),
        torch.is_grad_enabled(),
        step,
        state is not None,
        call.needs_state,
        native,
        native is not None and (writes or native.supports(q, k, v)),
        writes,
        uneven,
        mixer.is_offloaded(),
        switches(v.dtype) if device.type in DEVICES else (),
    )


def declined(backend: Backend, mixer: FeatureMapMixer, kind: Kind) -> str:
    """Return why a backend does not compute calls of a kind; empty if it does."""
    if mixer.asked <= backend.supports:
        return backend.why_not(mixer, kind)
    return not_supported(mixer.asked - backend.supports)


def choose(mixer: FeatureMapMixer, call: AttentionCall) -> Backend:
    """Return the backend that computes a call, and let it use the native op: once for each kind, then remembered.

    Raises:
        ConfigError: if no backend does, because of the layer's additions.
    """
    facts = _facts(mixer, call)
    known: Backend | None = None if facts[0] else mixer.memory.get(facts)
    if known is None:
        known = _first(mixer, Kind(*facts))
        if not facts[0]:
            mixer.memory[facts] = known
    call.native = None if facts[0] else facts[_NATIVE]
    return known


def _first(mixer: FeatureMapMixer, kind: Kind) -> Backend:
    for backend in BACKENDS:
        if not declined(backend, mixer, kind):
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
        asked = frozenset(hybrid.changed) - HEADS
        if not [backend for backend in BACKENDS if asked <= backend.supports]:
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
    backend, kind = choose(mixer, call), kind_of(mixer, call)
    before = [(one.name, declined(one, mixer, kind)) for one in BACKENDS[: BACKENDS.index(backend)]]
    if not backend.uses_op:
        return words, backend.name, tuple(before)
    # Bidirectional attention uses no causal op, so it is computed in PyTorch.
    why = why_not_native(call.k, normalize=mixer.divides) if mixer.shape.causal else ""
    op = NATIVE_OP if mixer.shape.causal and not why else PYTORCH_OP
    before += [(NATIVE_OP, why)] if why else []
    return words, f"{backend.name}, {op}", tuple(before)
