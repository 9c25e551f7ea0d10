"""Inputs for a trial run, made up from a model's config: a few tokens, one image, a little sound.

Architectures want them in different shapes and together with different others. So there are several candidates, the
fullest first, and whoever runs the model takes the first that it accepts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.errors import ConfigError, UnsupportedModelError, first_line

TOKENS, DECODER_TOKENS = 7, 5
"""Different lengths, so that cross-attention shows itself by its shape."""
_MAIN = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features", "past_values")
_SAMPLES, _FRAMES = 4000, 64
_SIZED = ("backbone_config", "prompt_encoder_config")

Inputs = dict[str, Tensor | bool]
"""Arguments of a forward by name: tensors, and whether it shall use a cache."""


def candidates(model: PreTrainedModel) -> Iterator[Inputs]:
    """Make up keyword arguments for a model's forward, the fullest first.

    Raises:
        UnsupportedModelError: if the model's inputs are of an unknown kind.
    """
    names = _forward_names(model)
    text, images, sounds = _texts(model, names), list(_images(model, names)), list(_sounds(model, names))
    images += _patches(model, names)
    others = [*_series(model, names), *_states(model, names)]
    if not text and not images and not sounds and not others:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {', '.join(sorted(names)) or 'nothing'}, expected input_ids, pixel_values, "
            "input_values, input_features or past_values; pass example_inputs=... (--example-inputs FILE)"
        )
    both = [text | other for other in (*images, *sounds)] if text else []
    # The text of an encoder-decoder is one input; of others its decoder's tokens go with any other.
    decoder = {key: x for key, x in text.items() if key == "decoder_input_ids"}
    alone = [other | decoder for other in (*images, *sounds)]
    wanted = [*both[:1], *([text] if "input_ids" in text else []), *both[1:], *alone, *others]
    wanted += [made | added for made in wanted if (added := _companions(model, names, made))]
    wanted += [made | added for made in wanted[:1] if (added := _rows_of_codebooks(model, made))]
    more: Inputs = {"use_cache": False} if "use_cache" in names else {}
    for made in wanted:
        yield made | more
    with contextlib.suppress(Exception):
        dummy = {key: x for key, x in model.dummy_inputs.items() if torch.is_tensor(x) and key in names}
        vocabulary = getattr(text_config(model.config), "vocab_size", None) or 1
        if dummy:
            made = {key: x if x.is_floating_point() else x % vocabulary for key, x in dummy.items()}
            yield {**made, **more}


def read_inputs(path: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Read keyword arguments for a model's forward from a file of tensors.

    Args:
        path: a .safetensors or .npz file, whose names are those of the arguments.
        model: where to, and in which floating point type.

    Raises:
        ConfigError: if it cannot be read, or holds a name that the model does not take.
    """
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as file:
                found = {key: torch.from_numpy(file[key]) for key in file.files}
        else:
            found = load_file(path)
    except (OSError, ValueError, TypeError, KeyError, EOFError, SafetensorError, BadZipFile) as error:
        raise ConfigError(
            f"example inputs: {path!r} cannot be read ({first_line(error)}); expected a .safetensors or .npz file with "
            "tensors by the names of the forward's arguments, such as input_ids and pixel_values"
        ) from None
    parameters = inspect.signature(model.forward).parameters
    unknown = sorted(found.keys() - parameters.keys())
    if not found or (unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values())):
        got = repr(unknown[0]) if unknown else "nothing"
        raise ConfigError(
            f"example inputs: got {got} in {path!r}, expected arguments of {type(model).__name__}'s forward: "
            f"{', '.join(list(parameters)[:12])}"
        )
    device = next(model.parameters()).device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {key: x.to(device, dtype if x.is_floating_point() else x.dtype) for key, x in found.items()}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that tells of the text that is read or written; the config itself where it is one."""
    try:
        return config.get_text_config()
    except ValueError:
        # Two of them, as of MusicGen: the one that writes.
        return config.get_text_config(decoder=True)


def _forward_names(model: PreTrainedModel) -> set[str]:
    """Return the names of forward's arguments; a wrapper that takes only **kwargs is asked for its main input."""
    names = set(inspect.signature(model.forward).parameters)
    if not names & set(_MAIN):
        names.add(model.main_input_name)
    return names


def _companions(model: PreTrainedModel, names: set[str], made: Inputs) -> Inputs:
    """Make up what some models want beside their main inputs, by the names of forward's arguments."""
    found: Inputs = {}
    tensors = {key: x for key, x in made.items() if isinstance(x, Tensor)}
    ids, sound, device = tensors.get("input_ids"), tensors.get("input_features"), next(model.parameters()).device
    if ids is not None and "lang_ids" in names:
        found["lang_ids"] = torch.zeros(len(ids), dtype=torch.long, device=device)
    images = next((x for x in tensors.values() if x.ndim == 5), None)
    if ids is not None and images is not None and "image_attention_mask" in names:
        found["image_attention_mask"] = torch.ones(*ids.shape, images.shape[1], dtype=torch.long, device=device)
    codebooks = getattr(model.config, "num_codebooks", None)
    if ids is not None and isinstance(codebooks, int):
        # A token of text and one of every codebook at each place.
        found["input_ids"] = ids[..., None].expand(*ids.shape, codebooks + 1).contiguous()
    if sound is not None and "input_features_mask" in names:
        frames = sound.shape[1] if sound.shape[1] == _FRAMES else sound.shape[2]
        found["input_features_mask"] = torch.ones(1, frames, dtype=torch.long, device=device)
    return found


def _rows_of_codebooks(model: PreTrainedModel, made: Inputs) -> Inputs:
    """Make up tokens that are a row for every codebook, [batch * codebooks, tokens], as MusicGen takes them."""
    config = getattr(model.config, "decoder", None) or model.config
    codebooks = getattr(config, "num_codebooks", None)
    name = next((key for key in ("decoder_input_ids", "input_ids") if key in made), "")
    ids = made.get(name)
    return {name: ids.repeat(codebooks, 1)} if isinstance(ids, Tensor) and isinstance(codebooks, int) else {}


def _series(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Make up the past of a time series, and what forecasters with time features want of its future."""
    if "past_values" not in names:
        return
    config, device = model.config, next(model.parameters()).device
    horizon = getattr(config, "prediction_length", None) or 1
    length = getattr(config, "context_length", None) or horizon
    lags = getattr(config, "lags_sequence", None)
    if lags:
        past, more = length + max(lags), getattr(config, "num_time_features", None) or 0
        columns = (config.input_size,) if getattr(config, "input_size", 1) > 1 else ()
        made = {
            "past_values": _floats(model, 1, past, *columns),
            "past_time_features": _floats(model, 1, past, more),
            "past_observed_mask": torch.ones(1, past, *columns, device=device),
            "future_values": _floats(model, 1, horizon, *columns),
            "future_time_features": _floats(model, 1, horizon, more),
            "static_categorical_features": torch.zeros(
                1, getattr(config, "num_static_categorical_features", 0), dtype=torch.long, device=device
            ),
            "static_real_features": _floats(model, 1, getattr(config, "num_static_real_features", 0)),
        }
        yield {key: x for key, x in made.items() if key in names and (x.numel() or not key.startswith("static"))}
        return
    channels = getattr(config, "num_input_channels", None)
    if channels:
        yield {"past_values": _floats(model, 1, length, channels)}
        return
    # Less would be filled up with padding, for which forecasters give numbers too.
    flags = {
        "past_values_padding": torch.zeros(1, length, dtype=torch.long, device=device),
        "freq": torch.zeros(1, dtype=torch.long, device=device),
    }
    made = {"past_values": _floats(model, 1, length)} | flags
    yield {key: x for key, x in made.items() if key in names}


def _states(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Make up the embedded inputs of a part that takes nothing else, such as an encoder behind a model's embeddings."""
    width = next((x for x in (getattr(model.config, key, None) for key in ("hidden_size", "d_model")) if x), None)
    if "inputs_embeds" in names and not names & set(_MAIN) and isinstance(width, int):
        yield {"inputs_embeds": _floats(model, 1, TOKENS, width)}


def _texts(model: PreTrainedModel, names: set[str]) -> Inputs:
    config, device = model.config, next(model.parameters()).device
    made: dict[str, Tensor | None] = {}
    if "input_ids" in names:
        made["input_ids"] = _tokens(config, TOKENS, device)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = _tokens(config, DECODER_TOKENS, device)
    return {key: ids for key, ids in made.items() if ids is not None}


def _images(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    name = next((x for x in ("pixel_values", "pixel_values_videos") if x in names), None)
    if name is None:
        return
    shape, config = _image_shape(model.config), getattr(model.config, "vision_config", None) or model.config
    yield {name: _floats(model, 1, *shape)}
    frames = next((x for x in (getattr(config, key, None) for key in ("num_frames", "frames_per_clip")) if x), 2)
    yield {name: _floats(model, 1, frames, *shape)}


def _patches(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Make up the patches of one image, as towers take them that have images of all sizes in one row (Qwen-VL ...)."""
    name = next((x for x in ("hidden_states", "pixel_values") if x in names and "grid_thw" in names), None)
    config = model.config
    sizes = [getattr(config, key, None) for key in ("patch_size", "temporal_patch_size")]
    channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", None) or 3
    if name is not None and isinstance(sizes[0], int):
        merge = getattr(config, "spatial_merge_size", None) or 2
        grid = torch.tensor([[1, 2 * merge, 2 * merge]], device=next(model.parameters()).device)
        patches = 4 * merge * merge
        yield {name: _floats(model, patches, channels * (sizes[1] or 1) * sizes[0] ** 2), "grid_thw": grid}
        yield {name: _floats(model, 1, patches, channels, sizes[0], sizes[0]), "grid_thw": grid}


def _sounds(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    if "input_values" in names:
        yield {"input_values": _floats(model, 1, _SAMPLES)}
        yield {"input_values": _floats(model, 1, 1, _SAMPLES)}
        bins, longest = (getattr(model.config, key, None) for key in ("num_mel_bins", "max_length"))
        if bins and longest:
            yield {"input_values": _floats(model, 1, longest, bins)}
    if "input_features" in names:
        config = getattr(model.config, "audio_config", None) or getattr(model.config, "encoder_config", None)
        config = config or model.config
        sizes = (getattr(config, key, None) for key in ("num_mel_bins", "feature_projection_input_dim", "input_dim"))
        bins = next((x for x in sizes if isinstance(x, int)), 80)
        stacked = getattr(config, "num_stacked_frames", None) or 1
        positions = getattr(config, "max_source_positions", None)
        if isinstance(per_token := getattr(model.config, "audio_length_per_tok", None), int):
            # Sound that is added to the text, token by token.
            yield {"input_features": _floats(model, 1, bins, TOKENS * per_token)}
        yield {"input_features": _floats(model, 1, bins, 2 * positions if positions else _FRAMES)}
        yield {"input_features": _floats(model, 1, _FRAMES, bins * stacked)}
        # Frames put together before the first layer: it says how many.
        first = next((layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)), None)
        if first is not None and first.in_features not in (bins, bins * stacked) and first.in_features % bins == 0:
            yield {"input_features": _floats(model, 1, _FRAMES, first.in_features)}


def _floats(model: PreTrainedModel, *shape: int) -> Tensor:
    """Draw numbers: on zeros much is equal that is not."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn if parameter is None else drawn.to(parameter.device, parameter.dtype)


def _tokens(config: PreTrainedConfig, count: int, device: torch.device) -> Tensor | None:
    """Make up tokens [1, count] that mean nothing special; None where the config knows no vocabulary."""
    text = text_config(config)
    named = {name for one in (config, text) for name in vars(one) if name.endswith(("_token_id", "_token_index"))}
    special = {i for name in named for one in (config, text) for i in _ids(one, name)}
    vocabulary = getattr(text, "vocab_size", 0) or 0
    ids = [i for i in range(min(vocabulary, 64)) if i not in special][:count]
    if not ids:
        return None
    ids = (ids * count)[:count]
    # CLIP-like text towers look for the end token.
    for end in _ids(text, "eos_token_id")[:1]:
        if end < vocabulary:
            ids[-1] = end
    return torch.tensor([ids], device=device)


def _ids(config: PreTrainedConfig, name: str) -> list[int]:
    """Return the special tokens that a config has under a name: none, one, or several (Llama 3's ends of a text)."""
    found = getattr(config, name, None)
    return [i for i in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(i, int)]


def _image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", None) or config
    # Some say it of their backbone, or of what reads the backbone's map (SAM 2).
    places = (vision, *(getattr(one, key, None) for key in _SIZED for one in (vision, config)))
    size = next((x for x in (getattr(one, "image_size", None) for one in places) if x), None)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    if size is None:
        args = getattr(vision, "pretrained_cfg", None) or {}
        channels, *size = args.get("input_size", (channels, 224, 224))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return channels, height, width
