"""A generation cache of constant size: a running state per converted layer; other layers keep keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from linearize.core.errors import ConfigError, LinearizeError

State = dict[str, Tensor]

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument for a generation cache: since transformers 5.24, and before it."""

RECORDED = 1024
"""How many tokens can be cropped from a cache when transformers asks for that, as in assisted generation."""


class Recorded(NamedTuple):
    """The last tokens of a state, which can still be removed.

    Attributes:
        k: [B, K, N, D].
        v: [B, K, N, V].
        mask: [B, N] bool, true at tokens.
    """

    k: Tensor
    v: Tensor
    mask: Tensor

    def part(self, tokens: slice) -> Recorded:
        """Return some of the tokens."""
        return Recorded(self.k[:, :, tokens], self.v[:, :, tokens], self.mask[:, tokens])

    def then(self, other: Recorded) -> Recorded:
        """Return these tokens followed by others."""
        k, v = torch.cat([self.k, other.k], dim=2), torch.cat([self.v, other.v], dim=2)
        return Recorded(k, v, torch.cat([self.mask, other.mask], dim=1))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.mask.shape[1]


Fold = Callable[[State | None, Recorded], State]
"""Returns the state that follows a given state after some more tokens; the given state is not changed."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text part of a config; the config itself if it has no parts."""
    try:
        return config.get_text_config()
    except ValueError:
        # MusicGen has a text encoder and a decoder: take the decoder's.
        return config.get_text_config(decoder=True)


def given_cache(kwargs: Mapping[str, object]) -> Any:
    """Return the generation cache among the keyword arguments of a forward, or None."""
    for name in CACHE_NAMES:
        if kwargs.get(name) is not None:
            return kwargs[name]
    return None


def cache_name(forward: Callable[..., object]) -> str | None:
    """Return the name of a forward's argument for a generation cache; None if it has no such argument."""
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), None)


def cache_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """Return a generation cache as the keyword argument of a model's forward."""
    return {cache_name(model.forward) or CACHE_NAMES[-1]: cache}


def mapped(state: State | None, change: Callable[[Tensor], Tensor]) -> State | None:
    """Return a state with changed tensors, such as copies: decoding overwrites its input."""
    return None if state is None else {name: change(tensor) for name, tensor in state.items()}


def nbytes(state: State | None) -> int:
    """Return the size in bytes of a state."""
    return sum(tensor.nbytes for tensor in (state or {}).values())


class LinearStateLayer(CacheLayerMixin):
    """Holds a mixer's state instead of keys and values. Its size does not grow with the context.

    The last terms cannot be removed from a sum. So a layer that can be cropped also keeps an older state and the keys
    and values of the tokens since then: at most twice as many as can be cropped.

    Attributes:
        state: the mixer's state, None before the first token.
        tokens: number of tokens seen.
        keep: how many tokens can be cropped.
        record_past: whether all tokens since the last crop can be cropped, up to `RECORDED`; named by transformers.
        base: the state before `recorded`; None if there were no tokens before.
        recorded: the last tokens, or None.
        padding: [B, N] bool on the CPU, true at tokens, of the first N tokens; no later one is padding. None: none is.
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
        self.padding: Tensor | None = None
        self._awaiting = self._cropped = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: the mixer creates the state."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # Empty keys, because some hosts count a layer's keys (Mllama) or read those of a row (Whisper). Keys of size 0
        # mark a cache that was rebuilt from them.
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, 0) for x in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values [B, K, T, D] unchanged; the attention adds them to the state.

        Raises:
            LinearizeError: if the attention did not read the cache after the previous call.
        """
        if self._awaiting:
            raise LinearizeError(
                "the generation cache was updated, but the attention never read it: the last forward failed (begin "
                "again with a new cache), or this architecture passes its cache in a way that is not supported "
                "(generate with use_cache=False)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._awaiting = True
        self.tokens += key_states.shape[-2]
        return key_states, value_states

    def store(self, state: dict[str, Tensor] | None) -> None:
        """Keep the state after the tokens of the last `update`.

        Raises:
            LinearizeError: if there was no `update`: the attention read the keys of another layer.
        """
        if not self._awaiting:
            raise LinearizeError(
                "an attention read a generation cache that its layer did not update, so its keys come from elsewhere; "
                "this architecture passes its cache in a way that is not supported (generate with use_cache=False)"
            )
        self.state, self._awaiting = state, False

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether it can be cropped."""
        return self.keep > 0 or self.record_past

    def activate_past_recording(self) -> None:
        """Make the layer croppable from now on."""
        self.record_past = True

    def before(self, fold: Fold) -> State | None:
        """Return the state before the next tokens; after a crop, recompute it from the recorded tokens."""
        if self._cropped:
            assert self.recorded is not None
            self.state, self._cropped = fold(self.base, self.recorded) if self.recorded.length else self.base, False
            if not self.keep or not self.recorded.length:
                # Tokens that were not cropped stay.
                self.base = self.recorded = None
        return self.state

    def record(self, tokens: Recorded, before: State | None, fold: Fold) -> None:
        """Record tokens before they are added to the state `before`; of many tokens, only the last ones are kept."""
        if self.recorded is None:
            self.base, self.recorded = mapped(before, torch.clone), tokens
        else:
            self.recorded = self.recorded.then(tokens)
        most = self.keep or RECORDED
        surplus = self.recorded.length - most
        if surplus > most:
            self.base = fold(self.base, self.recorded.part(slice(0, surplus)))
            self.recorded = self.recorded.part(slice(surplus, None))

    def change_recorded(self, mask: Tensor) -> None:
        """Replace the mask [B, N] of the recorded tokens; `before` then computes the state again."""
        assert self.recorded is not None
        self.recorded, self._cropped, self.state = self.recorded._replace(mask=mask), True, None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers (all tokens so far) and the offset of the first."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.tokens

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length
    """The older name."""

    def nbytes(self) -> int:
        """Return the size in bytes of the state and of the tensors kept for a crop."""
        return nbytes(self.state) + nbytes(self.base) + sum(tensor.nbytes for tensor in self.recorded or ())

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.tokens, self._awaiting = None, 0, False
        self.base, self.recorded, self.padding, self._cropped = None, None, None, False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state, self.base = mapped(self.state, change), mapped(self.base, change)
        if self.recorded is not None:
            self.recorded = Recorded(*map(change, self.recorded))
        if self.padding is not None:
            self.padding = change(self.padding).cpu()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows by the beams [B]."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch entries, by number [N]."""
        self._map(lambda t: t[torch.as_tensor(indices, device=t.device), ...])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back."""
        self._map(lambda t: t.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: minus the number of tokens to remove.

        Raises:
            ConfigError: if it is positive, or asks for more tokens than were recorded.
        """
        if tokens_to_remove > 0:
            raise ConfigError(f"crop: got {tokens_to_remove}, expected 0 or less: minus the number of tokens to remove")
        if not self.is_initialized or (tokens_to_remove == 0 and self.recorded is None):
            return
        kept = 0 if self.recorded is None else self.recorded.length
        if -tokens_to_remove > kept:
            raise ConfigError(
                f"crop: got {-tokens_to_remove} tokens to remove, but the cache of linear attention can remove only "
                f"{kept}, as terms cannot be removed from a sum; ask for more in advance: model.new_cache(crop=N)"
            )
        assert self.recorded is not None
        if tokens_to_remove:
            self.recorded = self.recorded.part(slice(0, kept + tokens_to_remove))
            self.tokens, self._cropped, self.state = self.tokens + tokens_to_remove, True, None
            if self.padding is not None:
                self.padding = self.padding[:, : self.tokens]
        elif not self.keep and not self._cropped:
            self.base = self.recorded = None


class LinearizeCache(DynamicCache):
    """A transformers cache with a `LinearStateLayer` for every converted layer."""

    def __init__(self, config: PreTrainedConfig, converted: set[int], crop: int = 0) -> None:
        """Build the cache.

        Args:
            config: config of the (text) model; it says which of the other layers use a sliding window.
            converted: the `layer_idx` of the converted layers.
            crop: how many tokens can be cropped.
        """
        super().__init__(config=config)
        for index in converted:
            while len(self.layers) <= index:
                self.layers.append(type(self.layers[-1])() if self.layers else LinearStateLayer())
            # A layer of a hybrid architecture has convolution states as well as keys: keep both.
            layer = self.layers[index]
            if not (isinstance(layer, DynamicLayer) and hasattr(layer, "update_conv_state")):
                self.layers[index] = LinearStateLayer(crop)
        for index, layer in enumerate(self.layers if crop else ()):
            # Of the other layers, a crop needs keys that left their window, and states that convolutions passed.
            if type(layer) is DynamicSlidingWindowLayer:
                self.layers[index] = DynamicLayer()
            elif not isinstance(layer, LinearStateLayer) and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all layers (see `LinearStateLayer.crop`), or of none if that is refused."""
        # Only states refuse, and all alike, so they come first.
        layers: list[Any] = sorted(self.layers, key=lambda layer: not isinstance(layer, LinearStateLayer))
        for layer in layers:
            layer.crop(tokens_to_remove)

    def nbytes(self) -> int:
        """Return the size in bytes of the cache."""
        return cache_nbytes(self)


def cache_nbytes(cache: Cache) -> int:
    """Return the size in bytes of the states, keys and values in a cache."""

    def size(layer: object) -> int:
        if isinstance(layer, LinearStateLayer):
            return layer.nbytes()
        kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    return sum(map(size, cache.layers))


def state_layer(cache: Cache | None, index: int | None) -> LinearStateLayer | None:
    """Return the state layer of attention `index`; None if there is no cache or it keeps plain keys there.

    An attention without an `index` has no entry in the cache.

    Raises:
        ConfigError: if the cache returns more or fewer keys than those of the tokens so far, or was rebuilt from a
            cache with states and lost them.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", None) or []
    if index is None:
        bad = next((layer for layer in layers if isinstance(layer, StaticLayer)), None)
    elif index >= len(layers):
        return None
    # Not isinstance: a checkpoint's own code and an installed linearize may be loaded in one process.
    elif hasattr(layers[index], "store"):
        return layers[index]
    else:
        keys = getattr(layers[index], "keys", None)
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.shape[3] == 0:
            # From each layer's keys, as in Whisper's `generate`; a state has none.
            raise ConfigError(
                "got a generation cache without any keys, which was rebuilt from a cache of linear attention and lost "
                "its state; generation cannot be resumed from it: pass all tokens again, without past_key_values"
            )
        # While it is empty, as if the host made it for this call, a sliding layer returns all keys.
        slid = layers[index].is_sliding and layers[index].get_seq_length() > 0
        bad = layers[index] if layers[index].is_compileable or slid else None
    if bad is not None:
        raise ConfigError(
            f"got a generation cache with a {type(bad).__name__}, but linear attention needs a state or all keys; "
            "use model.new_cache(), or no cache: generate() makes its own"
        )
    return None
