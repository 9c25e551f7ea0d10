"""The module that is put into a host's attention, and through which the host's attention call goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.attention.cache import LinearStateLayer, Recorded, copied
from linearize.attention.call import AttentionCall, MixerState
from linearize.attention.factory import build_mixer
from linearize.attention.mixer import Mixer
from linearize.attention.shape import HeadShape
from linearize.ops.tracing import is_tracing
from linearize.registry import Hybrid

Observer = Callable[["LinearAttention", Tensor, Tensor, Tensor, Tensor | None, float], Tensor | None]
"""Called with (layer, q [B, H, T, D], k [B, K, T, D], v [B, K, T, V], key padding mask [B, T] or None, scaling).

What it returns, [B, H, T, V], goes on as the layer's output; None: softmax's output does."""


def _thread() -> int:
    # While tracing there is one thread, and its number must not become part of the graph.
    return 0 if is_tracing() else threading.get_ident()


class LinearAttention(nn.Module):
    """Holds the mixer of one layer.

    Attributes:
        mixer: what computes the outputs.
        shape: sizes and direction of the attention.
        observer: while set, the layer computes softmax attention, as the original did, and shows q, k and v to the
            observer: stage one and the reports listen to the frozen model in this way. Never saved.
        declares_direction: whether the host says at every call whether it is causal.
        local_as_full: whether its masks may be those of a window, which is left out.
        cache_index: number of its state in a generation cache; None: it has none there.
    """

    def __init__(
        self,
        kernel: str,
        arguments: Mapping[str, object],
        shape: HeadShape,
        hybrid: Hybrid | None = None,
    ) -> None:
        super().__init__()
        self.kernel, self.shape = kernel, shape
        self.mixer: Mixer = build_mixer(kernel, arguments, shape, hybrid)
        self.observer: Observer | None = None
        self._handed: dict[int, LinearStateLayer] = {}
        self.declares_direction = False
        self.local_as_full = False
        self.cache_index: int | None = None

    @property
    def hybrid(self) -> Hybrid:
        """What it has in addition to the kernel."""
        return self.mixer.hybrid

    def reset_parameters(self, seed: int) -> None:
        """Initialise the kernel from a seed, always with the same numbers."""
        self.mixer.reset_parameters(torch.Generator().manual_seed(seed))

    def hand_over(self, state: LinearStateLayer | None) -> None:
        """Take the state of the running generation for this thread's next call; the host's pre-hook gives it.

        By thread, because several may run one model at a time, each with a cache of its own.
        """
        if state is not None:
            self._handed[_thread()] = state
        elif self._handed:
            self._handed.pop(_thread(), None)

    def tokens_before(self, new: int) -> int:
        """Count the tokens that the state handed over for the coming call has seen before its `new` ones."""
        cache = self._handed.get(_thread()) if self._handed else None
        return 0 if cache is None else cache.tokens - new

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, scaling: float) -> Tensor:
        """Mix q [B, H, T, D], k [B, K, S, D], v [B, K, S, V] -> [B, H, T, V] in v's dtype.

        S > T where a cache of plain keys stands before the queries: they are then the last T tokens.
        """
        cache = self._handed.pop(_thread(), None) if self._handed else None
        if key_padding_mask is not None:
            # A cache of states hands over the new keys only, but the mask covers all tokens so far.
            key_padding_mask = key_padding_mask[:, -k.shape[2] :].bool()
            # Looking costs little on the CPU; elsewhere it would wait for the device.
            seen = key_padding_mask.device.type == "cpu" and not is_tracing()
            if seen and bool(key_padding_mask.all()):
                key_padding_mask = None
        # Sums and features are fp32 by design; autocast would lower them silently.
        if torch.is_autocast_enabled(q.device.type):
            with torch.autocast(device_type=q.device.type, enabled=False):
                return self._mix(q, k, v, key_padding_mask, scaling, cache)
        return self._mix(q, k, v, key_padding_mask, scaling, cache)

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        scaling: float,
        cache: LinearStateLayer | None,
    ) -> Tensor:
        """Mix the tokens; with a cache they follow what it has seen, and the state after them is stored."""
        if cache is not None and cache.is_croppable:
            return self._mix_recorded(AttentionCall(q, k, v, scaling, key_padding_mask), cache)
        if cache is not None:
            out, after = self.mixer(AttentionCall(q, k, v, scaling, key_padding_mask, None, cache.state, True))
            cache.store(after)
            return out
        missing = k.shape[2] - q.shape[2]
        padded = F.pad(q, (0, 0, missing, 0)) if missing else q
        out, _ = self.mixer(AttentionCall(padded, k, v, scaling, key_padding_mask))
        return out[:, :, missing:]

    def _mix_recorded(self, call: AttentionCall, cache: LinearStateLayer) -> Tensor:
        """Mix the tokens of a call behind a cache that can be cropped."""

        def fold(state: MixerState | None, tokens: Recorded) -> MixerState:
            q = tokens.k.new_zeros(tokens.k.shape[0], self.shape.heads, tokens.length, self.shape.head_dim)
            folded = AttentionCall(q, tokens.k, tokens.v, call.scaling, tokens.mask, None, copied(state), True)
            after: MixerState = self.mixer(folded)[1]
            return after

        state, count = cache.before(fold), call.k.shape[2]
        # Of a long prompt only the end is kept.
        cut = max(0, count - cache.window) if count > 2 * cache.window else 0
        outputs = []
        for part in (slice(0, cut), slice(cut, count)) if cut else (slice(0, count),):
            piece = replace(call.part(part), state=state, needs_state=True)
            if part.stop == count:
                mask = piece.key_padding_mask
                mask = piece.k.new_ones(piece.k.shape[0], piece.k.shape[2]).bool() if mask is None else mask
                cache.record(Recorded(piece.k, piece.v, mask), state, None if cut else fold)
            out, state = self.mixer(piece)
            outputs.append(out)
        cache.store(state)
        return torch.cat(outputs, dim=2)

    def extra_repr(self) -> str:
        """Show the kernel and sizes in `print(model)`."""
        more = "".join(f", {name}={value}" for name, value in self.hybrid.changed.items())
        return f"kernel={self.kernel!r}, {self.shape}{more}"
