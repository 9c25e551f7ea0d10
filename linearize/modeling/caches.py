"""Generation caches of constant size for converted models: gives them to forwards, and their states to layers."""

from __future__ import annotations

import sys
import warnings
from typing import cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from linearize.attention.cache import CACHE_NAMES, LinearizeCache, cache_argument, cache_name, given_cache, state_layer
from linearize.attention.interface import linear_attentions
from linearize.attention.layer import LinearAttention
from linearize.core.errors import ConfigError, UnsupportedModelError
from linearize.core.registry import Values
from linearize.modeling.compat import check_implementation
from linearize.ops.state import is_tracing

Arguments = tuple[tuple[object, ...], Values]


def make_cache(model: PreTrainedModel, crop: int = 0) -> LinearizeCache:
    """Return an empty generation cache for a model; up to `crop` tokens can be cropped from it."""
    return LinearizeCache(_text_config(model), _cache_indices(model), crop)


def use_cache_for_generation(
    model: PreTrainedModel, generation_config: GenerationConfig, given: object, kwargs: Values
) -> None:
    """Replace the cache that `generate` made, which keeps all keys, by one of constant size.

    Args:
        model: the model.
        generation_config: options of the generation.
        given: the caller's own cache, which is not replaced.
        kwargs: keyword arguments of the model's forward, changed in place.
    """
    default = given_cache(kwargs)
    if default is None or default is given:
        return
    if generation_config.output_attentions:
        # Attention weights need all keys, which a sum over the past does not have: leave the default cache in place.
        keep_all_keys(model, getattr(default, "self_attention_cache", default))
        return
    if not isinstance(default, EncoderDecoderCache) and _is_own_cache(type(default)):
        return
    cache = make_cache(model)
    if generation_config.is_assistant:
        cache.activate_past_recording()
    if isinstance(default, EncoderDecoderCache):
        default.self_attention_cache = cache
        return
    # Whisper's decoder by itself would replace an empty cache without a part for cross-attention.
    whole = cache if kwargs.get("encoder_outputs") is None else EncoderDecoderCache(cache, DynamicCache())
    kwargs[next(name for name in CACHE_NAMES if kwargs.get(name) is default)] = whole


def keep_all_keys(model: PreTrainedModel, cache: Cache) -> bool:
    """Make an empty cache keep all keys of layers that had a window; return whether there are such layers."""
    sliding = cache.is_sliding
    windows = [index for index in _cache_indices(model) if index < len(sliding) and sliding[index]]
    for index in windows:
        cache.layers[index] = DynamicLayer()
    return bool(windows)


def check_generation(generation_config: GenerationConfig, saved: GenerationConfig | None) -> None:
    """Check that the generation options do not ask for a cache that a running sum cannot replace.

    If only the model's own config asks for it, as the original's may, it is ignored with a warning.

    Args:
        generation_config: options of the generation, changed in place.
        saved: the model's own config.

    Raises:
        ConfigError: if the caller asks for such a cache.
    """
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic") and saved is not None and kind == saved.cache_implementation:
        warnings.warn(
            f"generation_config.json has cache_implementation={kind!r}, which is ignored: linear attention has its "
            "own cache, whose size does not grow with the context",
            stacklevel=2,
        )
        generation_config.cache_implementation = None
    elif kind not in (None, "dynamic"):
        raise ConfigError(
            f"got cache_implementation={kind!r}, but a model with linear attention has its own cache, whose size "
            "does not grow with the context; leave the argument out"
        )


def add_default_caches(root: PreTrainedModel) -> None:
    """Make forwards that would create a cache of all keys create one of constant size: the body's and its towers'."""
    parts = [part for part in root.modules() if isinstance(part, PreTrainedModel) and part is not root]
    # Parts other than the text model, such as a tower for streamed audio, may create their own cache.
    towers = [part for part in parts if part.config is not _text_config(root) and part.config is not root.config]
    for part in (root, *(part for part in towers if cache_name(part.forward) and _cache_indices(part))):
        files = [sys.modules[base.__module__] for base in type(part).__mro__ if base.__module__ in sys.modules]
        if not any(_is_own_cache(kind) for file in files for kind in vars(file).values() if isinstance(kind, type)):
            part.register_forward_pre_hook(_default_cache, with_kwargs=True)


def hand_over_cache(host: nn.Module, args: tuple[object, ...], kwargs: Values) -> None:
    """Before a host's forward, give its kernel the state for this call: the attention function never sees the cache.

    Raises:
        ConfigError: if the model's config was set to softmax.
        UnsupportedModelError: if the call, or the config, asks for the other direction.
    """
    check_implementation(host)
    _check_direction(host, kwargs)
    cache = given_cache(kwargs)
    if cache is None:
        # Some hosts use another name (GPT-NeoX, StarCoder, CTRL: layer_past).
        cache = next((one for one in (*kwargs.values(), *args) if isinstance(one, Cache)), None)
    attention = cast(LinearAttention, host.linear_attention)
    attention.hand_over(state_layer(cache, attention.cache_index))


def _check_direction(host: nn.Module, kwargs: Values) -> None:
    """Refuse `is_causal` (an argument of a forward, or of a config) if it is not the direction of a host's kernel.

    transformers then makes masks of the other direction, which linear attention only reads as padding.
    """
    attention = cast(LinearAttention, host.linear_attention)
    asked, causal = kwargs.get("is_causal"), attention.shape.causal
    asked = getattr(getattr(host, "config", None), "is_causal", None) if asked is None else asked
    # The attention function checks hosts that pass their direction with every call.
    if asked is not None and bool(asked) != causal and not attention.declares_direction:
        raise UnsupportedModelError(
            f"{type(host).__name__}: got is_causal={bool(asked)}, expected {causal}: a kernel has the direction with "
            "which it was converted; leave is_causal unchanged, or convert the original with the other value in its "
            "config"
        )


def mask_while_tracing(root: object, args: tuple[Tensor, ...], kwargs: Values) -> Arguments | None:
    """While tracing, pass a mask without padding, so that transformers does not prepare for packed sequences.

    transformers looks for packed sequences in position_ids; while tracing it cannot read them and assumes packing.
    """
    if not is_tracing() or len(args) > 1:
        return None
    given = ("attention_mask", *CACHE_NAMES, "position_ids", "inputs_embeds", "decoder_input_ids")
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None or any(kwargs.get(name) is not None for name in given):
        return None
    return args, kwargs | {"attention_mask": torch.ones_like(tokens)}


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _cache_indices(model: nn.Module) -> set[int]:
    layers = (layer for layer in linear_attentions(model).values() if layer.shape.causal)
    return {layer.cache_index for layer in layers if layer.cache_index is not None}


def _is_own_cache(kind: type) -> bool:
    """Tell whether a host's own cache class holds more than keys (MiniMax); its layers then keep all keys."""
    return issubclass(kind, DynamicCache) and kind.__module__.startswith("transformers.models.")


def _default_cache(root: PreTrainedModel, args: tuple[object, ...], kwargs: Values) -> Arguments | None:
    """Return a forward's arguments with a cache of constant size, if it would create its own cache of all keys.

    If attention weights are requested, they need all keys in later steps: return None if the host's own cache has them.
    """
    use_cache, weights = kwargs.get("use_cache"), kwargs.get("output_attentions")
    if use_cache is None:
        use_cache = getattr(root.config, "use_cache", getattr(_text_config(root), "use_cache", False))
    if weights is None:
        weights = root.config.output_attentions
    if not use_cache or root.training or given_cache(kwargs) is not None:
        return None
    cache: Cache = DynamicCache(config=_text_config(root)) if weights else make_cache(root)
    if weights and not keep_all_keys(root, cache):
        return None
    if kwargs.get("encoder_hidden_states") is not None:
        # A decoder with cross-attention (in an EncoderDecoderModel) also caches the keys of the encoder.
        cache = EncoderDecoderCache(cache, DynamicCache())
    return args, {key: value for key, value in kwargs.items() if key not in CACHE_NAMES} | cache_argument(root, cache)
