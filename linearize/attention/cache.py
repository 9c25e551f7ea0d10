"""Constant-size generation cache: a running state per converted layer, keys and values for the other layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

from linearize.errors import ConfigError, LinearizeError


class LinearStateLayer(CacheLayerMixin):
    """Remembers what a mixer needs instead of keys and values. Its size does not grow with the context.

    Attributes:
        state: the mixer's state, None before the first token.
        tokens: how many tokens it has seen.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] | None = None
        self.tokens = 0
        self._awaiting = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the mixer makes the state."""
        self.dtype, self.device = key_states.dtype, key_states.device
        # Some hosts count a layer's keys (Mllama): there are none.
        self.keys = self.values = key_states.new_empty(0)
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
        """Return the state's size in bytes."""
        return sum(t.nbytes for t in (self.state or {}).values())

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.tokens, self._awaiting = None, 0, False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = {name: change(tensor) for name, tensor in self.state.items()}

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

    def crop(self, *args: object, **kwargs: object) -> None:
        """Refuse: a sum cannot forget its last terms."""
        raise ConfigError(
            "this model's generation cache is a running sum and cannot be cropped: assisted (speculative) and "
            "prompt-lookup decoding do not work with linear attention; generate without an assistant"
        )


class LinearizeCache(DynamicCache):
    """A transformers cache with a `LinearStateLayer` for every converted layer."""

    def __init__(self, config: PreTrainedConfig, converted: set[int]) -> None:
        """Build the cache.

        Args:
            config: config of the (text) model; says which of the other layers are sliding.
            converted: the `layer_idx` of the converted layers.
        """
        super().__init__(config=config)
        for index in converted:
            while len(self.layers) <= index:
                self.layers.append(type(self.layers[-1])() if self.layers else LinearStateLayer())
            # A hybrid's layer has convolutions' states beside its keys: it keeps both.
            layer = self.layers[index]
            if not (isinstance(layer, DynamicLayer) and hasattr(layer, "update_conv_state")):
                self.layers[index] = LinearStateLayer()

    def nbytes(self) -> int:
        """Return the size in bytes of everything that is remembered."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, LinearStateLayer):
                total += layer.nbytes()
                continue
            kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
            total += sum(tensor.nbytes for tensor in kept if tensor is not None)
        return total


def state_layer(cache: Cache | None, index: int | None) -> LinearStateLayer | None:
    """Return the state layer of attention `index`, None if the cache is absent or keeps plain keys there.

    Raises:
        ConfigError: if it keeps keys in a way that hands out more or fewer than those of the tokens so far.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    layers = getattr(cache, "layers", None)
    if layers is None or index is None or index >= len(layers):
        return None
    layer = layers[index]
    # Not isinstance: a checkpoint's own code and an installed linearize may meet in one process.
    if hasattr(layer, "store"):
        return layer
    if layer.is_compileable or layer.is_sliding:
        raise ConfigError(
            f"got a generation cache with a {type(layer).__name__}, but linear attention needs a state or all keys; "
            "use model.new_cache(), or none: generate() makes its own"
        )
    return None
