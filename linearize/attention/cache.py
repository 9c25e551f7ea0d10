"""Constant-size generation cache: a running state per converted layer, keys and values for the other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    StaticLayer,
)

from linearize.errors import ConfigError, LinearizeError

State = dict[str, Tensor]

RECORDED = 1024
"""Tokens that a cache can be cropped by where transformers asks for that, as assisted generation does."""


class Recorded(NamedTuple):
    """Tokens that a state has taken up last, and can be brought back over.

    Attributes:
        k: [B, K, N, D].
        v: [B, K, N, V].
        mask: [B, N] bool, where there is a token.
    """

    k: Tensor
    v: Tensor
    mask: Tensor

    def part(self, tokens: slice) -> Recorded:
        """Return some of them."""
        return Recorded(self.k[:, :, tokens], self.v[:, :, tokens], self.mask[:, tokens])

    def then(self, other: Recorded) -> Recorded:
        """Return these and those behind them."""
        k, v = torch.cat([self.k, other.k], dim=2), torch.cat([self.v, other.v], dim=2)
        return Recorded(k, v, torch.cat([self.mask, other.mask], dim=1))

    @property
    def length(self) -> int:
        """How many there are."""
        return self.mask.shape[1]


Fold = Callable[[State | None, Recorded], State]
"""Returns the state after some tokens behind another state, which it leaves as it is."""


def copied(state: State | None) -> State | None:
    """Return a state in memory of its own: decoding writes into that of the one it is given."""
    return None if state is None else {name: tensor.clone() for name, tensor in state.items()}


class LinearStateLayer(CacheLayerMixin):
    """Remembers what a mixer needs instead of keys and values. Its size does not grow with the context.

    A sum cannot forget its last terms. So a layer that is to be cropped keeps, beside the state, an older one and the
    keys and values of the tokens since: at most twice as many as it can be cropped by.

    Attributes:
        state: the mixer's state, None before the first token.
        tokens: how many tokens it has seen.
        keep: by how many tokens it can be cropped; 0: by none.
        record_past: whether it can be cropped by what came since the last crop, up to `RECORDED`; transformers' name.
        base: the state before `recorded`; None: there was no token before.
        recorded: the last tokens, or None.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, keep: int = 0) -> None:
        super().__init__()
        self.state: State | None = None
        self.tokens = 0
        self.keep, self.record_past = keep, False
        self.base: State | None = None
        self.recorded: Recorded | None = None
        self._awaiting = self._cropped = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the mixer makes the state."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # Some hosts count a layer's keys (Mllama), or take those of a row (Whisper): there are none.
        rows, heads = key_states.shape[:2]
        self.keys = key_states.new_empty(rows, heads, 0, key_states.shape[3])
        self.values = value_states.new_empty(rows, heads, 0, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values [B, K, T, D] through; the attention folds them into the state."""
        if self._awaiting:
            raise LinearizeError(
                "the generation cache was updated, but the attention never read it: this architecture hands its cache "
                "over in an unknown way; generate with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._awaiting = True
        self.tokens += key_states.shape[-2]
        return key_states, value_states

    def store(self, state: dict[str, Tensor] | None) -> None:
        """Keep the state after the tokens of the last `update`."""
        self.state, self._awaiting = state, False

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether it keeps what a crop needs."""
        return self.keep > 0 or self.record_past

    def activate_past_recording(self) -> None:
        """Keep what a crop needs from now on."""
        self.record_past = True

    @property
    def window(self) -> int:
        """By how many tokens it can be cropped."""
        return self.keep or RECORDED

    def before(self, fold: Fold) -> State | None:
        """Return the state before the next tokens; after a crop it is made anew from what was recorded."""
        if self._cropped:
            assert self.recorded is not None
            self.state, self._cropped = fold(self.base, self.recorded) if self.recorded.length else self.base, False
            if not self.keep or not self.recorded.length:
                # What was not taken back is settled.
                self.base = self.recorded = None
        return self.state

    def record(self, tokens: Recorded, before: State | None, fold: Fold | None) -> None:
        """Keep tokens that are about to be taken up by the state `before` them; without `fold` nothing older."""
        if self.recorded is None or fold is None:
            self.base, self.recorded = copied(before), tokens
            return
        self.recorded = self.recorded.then(tokens)
        surplus = self.recorded.length - self.window
        if surplus > self.window:
            self.base = fold(self.base, self.recorded.part(slice(0, surplus)))
            self.recorded = self.recorded.part(slice(surplus, None))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask covers, and from which token on: all tokens so far."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no limit (older name)."""
        return -1

    def nbytes(self) -> int:
        """Return the size in bytes of the state, and of what is kept for a crop."""
        kept = [*(self.state or {}).values(), *(self.base or {}).values(), *(self.recorded or ())]
        return sum(t.nbytes for t in kept)

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.tokens, self._awaiting = None, 0, False
        self.base, self.recorded, self._cropped = None, None, False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = {name: change(tensor) for name, tensor in self.state.items()}
        if self.base is not None:
            self.base = {name: change(tensor) for name, tensor in self.base.items()}
        if self.recorded is not None:
            self.recorded = Recorded(*map(change, self.recorded))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams [B]."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch entries."""
        self._map(lambda t: t[indices, ...])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back."""
        self._map(lambda t: t.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back.

        Args:
            tokens_to_remove: how many, as a number of 0 or less.

        Raises:
            ConfigError: if that is a positive number, or more than is kept.
        """
        if tokens_to_remove > 0:
            raise ConfigError(f"crop: got {tokens_to_remove}, expected 0 or less: minus the number of tokens to remove")
        if not self.is_initialized or (tokens_to_remove == 0 and self.recorded is None):
            return
        kept = 0 if self.recorded is None else self.recorded.length
        if -tokens_to_remove > kept:
            raise ConfigError(
                f"crop: got {-tokens_to_remove} tokens to remove, but the cache of linear attention can take back "
                f"{kept}, as a sum does not forget its terms; ask for more before: model.new_cache(crop=N)"
            )
        assert self.recorded is not None
        if tokens_to_remove:
            self.recorded = self.recorded.part(slice(0, kept + tokens_to_remove))
            self.tokens, self._cropped, self.state = self.tokens + tokens_to_remove, True, None
        elif not self.keep and not self._cropped:
            self.base = self.recorded = None


class LinearizeCache(DynamicCache):
    """A transformers cache with a `LinearStateLayer` for every converted layer."""

    def __init__(self, config: PreTrainedConfig, converted: set[int], crop: int = 0) -> None:
        """Build the cache.

        Args:
            config: config of the (text) model; says which of the other layers are sliding.
            converted: the `layer_idx` of the converted layers.
            crop: by how many tokens it can be cropped.
        """
        super().__init__(config=config)
        for index in converted:
            while len(self.layers) <= index:
                self.layers.append(type(self.layers[-1])() if self.layers else LinearStateLayer())
            # A hybrid's layer has convolutions' states beside its keys: it keeps both.
            layer = self.layers[index]
            if not (isinstance(layer, DynamicLayer) and hasattr(layer, "update_conv_state")):
                self.layers[index] = LinearStateLayer(crop)

    def nbytes(self) -> int:
        """Return the size in bytes of everything that is remembered."""
        return cache_nbytes(self)


def cache_nbytes(cache: Cache) -> int:
    """Return the size in bytes of the states, keys and values in a cache of either kind."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearStateLayer):
            total += layer.nbytes()
            continue
        kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
        total += sum(tensor.nbytes for tensor in kept if tensor is not None)
    return total


def state_layer(cache: Cache | None, index: int | None) -> LinearStateLayer | None:
    """Return the state layer of attention `index`, None if the cache is absent or keeps plain keys there.

    `index` is None for an attention whose keys are kept wherever its calls put them.

    Raises:
        ConfigError: if it keeps keys in a way that hands out more or fewer than those of the tokens so far, or was put
            together again from a cache of states without them.
    """
    if isinstance(cache, EncoderDecoderCache):
        _check_not_emptied(cache, index)
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", None) or []
    if index is None:
        bad = next((layer for layer in layers if isinstance(layer, StaticLayer)), None)
    elif index >= len(layers):
        return None
    # Not isinstance: a checkpoint's own code and an installed linearize may meet in one process.
    elif hasattr(layers[index], "store"):
        return layers[index]
    else:
        bad = layers[index] if layers[index].is_compileable or layers[index].is_sliding else None
    if bad is not None:
        raise ConfigError(
            f"got a generation cache with a {type(bad).__name__}, but linear attention needs a state or all keys; "
            "use model.new_cache(), or none: generate() makes its own"
        )
    return None


def _check_not_emptied(cache: EncoderDecoderCache, index: int | None) -> None:
    """Refuse a cache that Whisper's `generate` returned: it takes keys row by row, and a state has none to take."""
    layers, across = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
    if index is None or index >= min(len(layers), len(across)) or not getattr(across[index], "is_initialized", False):
        return
    keys = getattr(layers[index], "keys", None)
    if isinstance(layers[index], DynamicLayer) and keys is not None and keys.shape[2] == 0:
        raise ConfigError(
            "got a generation cache without any keys, which was put together from one of linear attention and lost its "
            "state; generation cannot be resumed from it: give the tokens again without past_key_values"
        )
