"""The module that conversion puts into a host's attention; the host's attention call passes through it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.cache import LinearStateLayer, Recorded, mapped
from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.earlier import mask_earlier
from linearize.attention.factory import build_mixer
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.mixer import Mixer
from linearize.attention.parts import HEADS, NEAR, ROUTED, SCALED, check_parts
from linearize.attention.shape import HeadShape
from linearize.core.registry import PLAIN, Hybrid
from linearize.ops.state import is_tracing, real_tokens

Mask = Tensor | None
"""A key padding mask [B, T], true at tokens; None if there is no padding."""

Observer = Callable[["LinearAttention", Tensor, Tensor, Tensor, Mask, float], Tensor | None]
"""Called with (layer, q [B, H, T, D], k [B, K, T, D], v [B, K, T, V], key padding mask [B, T] or None, scaling).

It returns the layer's output [B, H, T, V], or None to use the output of softmax."""


Result = TypeVar("Result")


class Across(Protocol):
    """Mixes this process's part of a row with those of others (`linearize.modeling.context_parallel`)."""

    def attend(self, mixer: FeatureMapMixer, call: AttentionCall) -> tuple[Tensor, MixerState | None]:
        """Mix as a mixer does, over all parts."""

    def refuse(self, what: str) -> NoReturn:
        """Refuse a call that is not built."""


def _thread(tracing: bool) -> int:
    # A traced graph must not contain the thread's number; tracing uses one thread.
    return 0 if tracing else threading.get_ident()


@torch.compiler.disable
def _untraced(function: Callable[..., Result], *args: object) -> Result:
    return function(*args)


class LinearAttention(nn.Module):
    """Holds the mixer of one layer.

    Attributes:
        mixer: computes the outputs.
        shape: sizes and direction of the attention.
        observer: while set, the layer computes softmax attention, as the original did, and passes q, k and v to the
            observer. This is how stage one and the reports read the frozen model. Never saved.
        declares_direction: whether the host passes its direction with every call.
        local_as_full: whether the host may pass sliding-window masks, whose window is then ignored.
        cache_index: index of its state in a generation cache; None if it has none.
        across: while set, mixes this process's part of a row with those of others
            (`linearize.modeling.context_parallel`). Never saved.
    """

    def __init__(self, kernel: str, arguments: Mapping[str, object], shape: HeadShape, hybrid: Hybrid = PLAIN) -> None:
        super().__init__()
        self.kernel, self.shape = kernel, shape
        self.mixer: Mixer = build_mixer(kernel, arguments, shape, hybrid)
        self.observer: Observer | None = None
        self._handed: dict[int, LinearStateLayer] = {}
        self.declares_direction = False
        self.local_as_full = False
        self.cache_index: int | None = None
        self.across: Across | None = None

    @property
    def map_mixer(self) -> FeatureMapMixer:
        """The mixer of a kernel with a feature map."""
        assert isinstance(self.mixer, FeatureMapMixer)
        return self.mixer

    @property
    def hybrid(self) -> Hybrid:
        """The layer's additions to the kernel."""
        return self.mixer.hybrid

    def reset_parameters(self, seed: int) -> None:
        """Initialise the kernel from a seed; the same seed always gives the same numbers."""
        self.mixer.reset_parameters(torch.Generator().manual_seed(seed))

    def hand_over(self, state: LinearStateLayer | None) -> None:
        """Set the generation state for this thread's next call; the host's pre-hook calls this.

        The state is per thread, because several threads may run one model at a time, each with its own cache.
        """
        if torch.compiler.is_dynamo_compiling() and self._breaks_graph():
            return _untraced(self.hand_over, state)
        if state is not None:
            self._handed[_thread(is_tracing())] = state
        elif self._handed:
            self._handed.pop(_thread(is_tracing()), None)

    def _breaks_graph(self) -> bool:
        """Tell whether torch.compile must leave this layer out: it cannot trace the choice of exact keys or blocks.

        Half a layer would be worse: a state handed over while tracing is not found by a forward that is not traced.
        """
        return bool(self.hybrid.routed_blocks) or (self.shape.causal and self.hybrid.exact_keys > 0)

    def tokens_before(self, new: int) -> int:
        """Return how many tokens before its `new` ones the state for the next call has seen."""
        cache = self._handed.get(_thread(is_tracing())) if self._handed else None
        return 0 if cache is None else cache.tokens - new

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Mask, scaling: float, known: Mask = None
    ) -> Tensor:
        """Mix q [B, H, T, D], k [B, K, S, D], v [B, K, S, V] -> [B, H, T, V] in v's dtype.

        S > T if there is a cache of plain keys; the queries are then the last T tokens. A state that was handed over
        holds the tokens before these, and the state after them is stored in it. `known` is the mask on the CPU, if the
        caller has it: it spares a wait for the device.

        Raises:
            ConfigError: if the mask differs from earlier ones at a token that the state cannot forget or take in.
        """
        if torch.compiler.is_dynamo_compiling() and self._breaks_graph():
            return _untraced(self.forward, q, k, v, key_padding_mask, scaling, known)
        if torch.is_autocast_enabled(q.device.type):
            # Sums and features are fp32 by design; autocast would lower their precision silently.
            with torch.autocast(device_type=q.device.type, enabled=False):
                return self.forward(q, k, v, key_padding_mask, scaling, known)
        tracing = is_tracing()
        cache = self._handed.pop(_thread(tracing), None) if self._handed else None
        if not tracing and q.numel() == 0:
            # No tokens, or no rows (a batch without images): there is nothing to mix or to remember.
            if cache is not None:
                cache.store(cache.state)
            return v.new_zeros(*q.shape[:3], v.shape[3])
        if cache is not None and not tracing and (key_padding_mask is not None or cache.padding is not None):
            known = key_padding_mask if known is None else known.expand(k.shape[0], -1)
            known = None if known is None else known.cpu().bool()
            mask_earlier(cache, known, k.shape[2], self.shape.key_heads, functools.partial(self._fold, scaling))
        if key_padding_mask is not None:
            # A cache of states passes only the new keys, but the mask covers all tokens so far. It may be too long and
            # also cover tokens that are read later.
            if cache is None:
                key_padding_mask = key_padding_mask[:, : k.shape[2]].bool()
            else:
                # An exported graph is given a state whose tokens were not counted.
                longer = not tracing and (cache.state is None or cache.tokens > k.shape[2])
                covered = key_padding_mask[:, : cache.tokens] if longer else key_padding_mask
                key_padding_mask = covered[:, -k.shape[2] :].bool()
            # Reading the mask costs little on the CPU; on other devices it would force a synchronisation.
            readable = key_padding_mask.device.type == "cpu" and not tracing
            if readable and bool(key_padding_mask.all()):
                key_padding_mask = None
        mix = self.mixer if self.across is None else functools.partial(self.across.attend, self.map_mixer)
        if cache is None:
            missing = k.shape[2] - q.shape[2]
            padded = F.pad(q, (0, 0, missing, 0)) if missing else q
            return mix(AttentionCall(padded, k, v, scaling, key_padding_mask))[0][:, :, missing:]
        state = cache.state
        if cache.keep or cache.record_past:
            fold = functools.partial(self._fold, scaling)
            state = cache.before(fold)
            cache.record(Recorded(k, v, real_tokens(k, key_padding_mask)), state, fold)
        out, after = mix(AttentionCall(q, k, v, scaling, key_padding_mask, None, state, True))
        cache.store(after)
        return out

    def _fold(self, scaling: float, state: MixerState | None, tokens: Recorded) -> MixerState:
        check_parts(self.hybrid, NEAR | ROUTED | SCALED | HEADS, "a state that is computed again")
        q = tokens.k.new_zeros(tokens.k.shape[0], self.shape.heads, tokens.length, self.shape.head_dim)
        state = mapped(state, torch.clone)
        after: MixerState = self.mixer(AttentionCall(q, tokens.k, tokens.v, scaling, tokens.mask, None, state, True))[1]
        return after

    def extra_repr(self) -> str:
        """Show the kernel and sizes in `print(model)`."""
        more = "".join(f", {name}={value}" for name, value in self.hybrid.changed.items())
        return f"kernel={self.kernel!r}, {self.shape}{more}"
