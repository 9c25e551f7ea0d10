"""Made-up inputs for a trial run of a model (a few tokens, one image, a little sound), and the calls in that run.

Architectures take inputs in different shapes and combinations. So there are several candidates, most complete first,
and the first that the model accepts is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from linearize.attention.cache import text_config
from linearize.core.errors import ConfigError, UnsupportedModelError, first_line
from linearize.modeling.weights import device_of

TOKENS, DECODER_TOKENS = 7, 5
"""Different lengths, so that cross-attention is recognised by its shape."""
MAIN = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features", "past_values")
_SAMPLES, _FRAMES = 4000, 64
_SIZED = ("encoder", "backbone_config", "prompt_encoder_config")

_PER_TOKEN = re.compile(r"(_ids|_masks?|_types?|_seq|_segments?|_groups?)$")
_HANDLED = re.compile(r"^((en|de)coder_)?(attention_mask|position_ids|input_ids)$")
"""Inputs of every model, and those whose masks are followed when they are given."""

CAUSALLY, BOTH_WAYS = "causally", "in both directions"

Inputs = dict[str, Tensor | bool]
"""Keyword arguments of a forward: tensors, and whether to use a cache."""


@dataclass
class Call:
    """One call of the attention function.

    Attributes:
        module: the host's attention module.
        query: shape of q, [B, H, T, D].
        key: shape of k, [B, K, S, D].
        value: shape of v, [B, K, S, V].
        mask: "causal", "bidirectional", "none", "local" (windows, chunks), "own" (another mask made by
            transformers) or "bias" (something added to the scores).
        altered: description of anything else that changes the scores.
        is_causal: the host's direction, from the call or else from its module's flag.
        declared: the direction that the call states; None if it states no direction.
        window: largest length at which a local mask hides no more than a full one; None without a local mask.
        refused: why this attention cannot be converted, if the trial run shows that; empty if no reason is known.
        keys: where its keys lie in memory, so that layers that share keys are known; 0 if unknown.
        here: how the queries read the keys in this run, if the mask is the model's own; empty if in another way.
        varies: why it cannot be converted, if its mask is another one without padding, or with an optional argument.
        optional: name of an optional argument that changes the mask; empty if no argument does.
    """

    module: nn.Module
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: str
    altered: str
    is_causal: bool
    declared: bool | None = None
    window: int | None = None
    refused: str = ""
    keys: int = 0
    here: str = ""
    varies: str = ""
    optional: str = ""

    @property
    def causal(self) -> bool:
        """Whether no query sees later keys."""
        return self.mask != "bidirectional" and (self.mask == "causal" or self.is_causal)

    @property
    def reads(self) -> str:
        """How the queries read the keys, in words."""
        if self.mask in ("own", "bias"):
            return "by its own mask"
        return CAUSALLY if self.causal else BOTH_WAYS


def candidates(model: PreTrainedModel) -> Iterator[Inputs]:
    """Make up keyword arguments for a model's forward, most complete first.

    Raises:
        UnsupportedModelError: if the model's inputs are of an unknown kind.
    """
    names = set(inspect.signature(model.forward).parameters)
    known = bool(names & set(MAIN))
    if not known:
        # A wrapper may take only **kwargs.
        names.add(model.main_input_name)
    text, images, sounds = _texts(model, names), list(_images(model, names)), list(_sounds(model, names))
    others = list(_series(model, names))
    width = _setting(model.config, "hidden_size", "d_model")
    if "inputs_embeds" in names and not names & set(MAIN) and isinstance(width, int):
        # A part that takes nothing else, such as an encoder without embeddings.
        others.append({"inputs_embeds": _floats(model, 1, TOKENS, width)})
    if not known:
        others += _states(model)
    if not text and not images and not sounds and not others:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {', '.join(sorted(names)) or 'nothing'}, expected input_ids, pixel_values, "
            "input_values, input_features or past_values; pass example_inputs=... (--example-inputs FILE)"
        )
    both = [text | other for other in (*images, *sounds)] if text else []
    # A text encoder-decoder has one kind of input; the decoder tokens of other models go with any input.
    decoder = {key: x for key, x in text.items() if key == "decoder_input_ids"}
    alone = [other | decoder for other in (*images, *sounds)]
    wanted = [*both[:1], *([text] if "input_ids" in text else []), *both[1:], *alone, *others]
    wanted += [inputs | added for inputs in wanted if (added := _companions(model, names, inputs))]
    codebooks = getattr(_setting(model.config, "decoder") or model.config, "num_codebooks", None)
    name = next((key for key in ("decoder_input_ids", "input_ids") if wanted and key in wanted[0]), "")
    if name and isinstance(codebooks, int) and isinstance(ids := wanted[0][name], Tensor):
        # Tokens with one row per codebook, [batch * codebooks, tokens] (MusicGen).
        wanted.append(wanted[0] | {name: ids.repeat(codebooks, 1)})
    more: Inputs = {"use_cache": False} if "use_cache" in names else {}
    for inputs in wanted:
        yield inputs | more
    with contextlib.suppress(Exception):
        dummy = {key: x for key, x in model.dummy_inputs.items() if torch.is_tensor(x) and key in names}
        vocabulary = getattr(text_config(model.config), "vocab_size", None) or 1
        if dummy:
            inputs = {key: x if x.is_floating_point() else x % vocabulary for key, x in dummy.items()}
            yield {**inputs, **more}


def optional_inputs(part: PreTrainedModel, made: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Make up values of optional arguments with one number per token, which may change masks.

    Returns:
        By the argument's name, zeros [B, T], as texts alone have, and runs of different numbers.
    """
    tokens = made.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return {}
    zeros = torch.zeros_like(tokens)
    # The highest number is 1, because many models know no more types of tokens.
    mixed = (torch.arange(tokens.shape[1], device=tokens.device) // 2 % 2).expand_as(tokens).contiguous()
    return {
        name: (zeros, mixed)
        for name, argument in inspect.signature(part.forward).parameters.items()
        if argument.default is None and name not in made and _PER_TOKEN.search(name) and not _HANDLED.search(name)
    }


def read_inputs(path: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return keyword arguments for a model's forward from a file of tensors.

    Args:
        path: a .safetensors or .npz file with tensors named after the arguments.
        model: the model; the tensors get its device and floating point type.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        if path.endswith(".npz"):
            with np.load(path, allow_pickle=False) as file:
                tensors = {key: torch.from_numpy(file[key]) for key in file.files}
        else:
            tensors = load_file(path)
    except (OSError, ValueError, TypeError, KeyError, EOFError, SafetensorError, BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"example inputs: {path!r} cannot be read ({first_line(error)}); expected a .safetensors or .npz file with "
            "tensors named after the forward's arguments, such as input_ids and pixel_values"
        ) from None
    return {
        key: x.to(device_of(model), model.dtype if x.is_floating_point() else x.dtype) for key, x in tensors.items()
    }


def _setting(config: object, *names: str) -> Any:
    """Return the first of the named config values that is neither None nor zero; else None."""
    for name in names:
        if value := getattr(config, name, None):
            return value
    return None


def _companions(model: PreTrainedModel, names: set[str], made: Inputs) -> Inputs:
    """Make up additional inputs that some models need, judging by the names of forward's arguments."""
    extra: Inputs = {}
    tensors = {key: x for key, x in made.items() if isinstance(x, Tensor)}
    ids, sound, device = tensors.get("input_ids"), tensors.get("input_features"), device_of(model)
    if ids is not None and "lang_ids" in names:
        extra["lang_ids"] = torch.zeros(len(ids), dtype=torch.long, device=device)
    images = next((x for x in tensors.values() if x.ndim == 5), None)
    if ids is not None and images is not None and "image_attention_mask" in names:
        extra["image_attention_mask"] = torch.ones(*ids.shape, images.shape[1], dtype=torch.long, device=device)
    codebooks = getattr(model.config, "num_codebooks", None)
    if ids is not None and isinstance(codebooks, int):
        # Each position has one text token and one token per codebook.
        extra["input_ids"] = ids[..., None].expand(*ids.shape, codebooks + 1).contiguous()
    if sound is not None and "input_features_mask" in names:
        frames = sound.shape[1] if sound.shape[1] == _FRAMES else sound.shape[2]
        extra["input_features_mask"] = torch.ones(1, frames, dtype=torch.long, device=device)
    return extra


def _states(model: PreTrainedModel) -> Iterator[Inputs]:
    """Make up the first argument of a part that reads the states of another part, whatever its name."""
    taken = inspect.signature(model.forward).parameters
    name = next((key for key, x in taken.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD), None)
    if name is None or name in MAIN:
        return
    width, across = _setting(model.config, "hidden_size", "d_model"), _setting(model.config, "encoder_hidden_size")
    if isinstance(width, int):
        states: Inputs = {name: _floats(model, 1, TOKENS, width)}
        if "encoder_hidden_states" in taken and isinstance(across, int):
            states["encoder_hidden_states"] = _floats(model, 1, DECODER_TOKENS, across)
        yield states


def _series(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Make up the past values of a time series, and the time features that some forecasters take."""
    if "past_values" not in names:
        return
    config, device = model.config, device_of(model)
    zeros = functools.partial(torch.zeros, 1, dtype=torch.long, device=device)
    horizon = _setting(config, "prediction_length") or 1
    length = _setting(config, "context_length") or horizon
    if lags := _setting(config, "lags_sequence"):
        past, more = length + max(lags), _setting(config, "num_time_features") or 0
        columns = (config.input_size,) if getattr(config, "input_size", 1) > 1 else ()
        tensors = {
            "past_values": _floats(model, 1, past, *columns),
            "past_time_features": _floats(model, 1, past, more),
            "past_observed_mask": torch.ones(1, past, *columns, device=device),
            "future_values": _floats(model, 1, horizon, *columns),
            "future_time_features": _floats(model, 1, horizon, more),
            "static_categorical_features": zeros(_setting(config, "num_static_categorical_features") or 0),
            "static_real_features": _floats(model, 1, _setting(config, "num_static_real_features") or 0),
        }
        yield {key: x for key, x in tensors.items() if key in names and (x.numel() or not key.startswith("static"))}
        return
    if channels := _setting(config, "num_input_channels"):
        yield {"past_values": _floats(model, 1, length, channels)}
        return
    # Shorter series would be padded, and forecasters return numbers for padding too.
    tensors = {"past_values": _floats(model, 1, length), "past_values_padding": zeros(length), "freq": zeros(1)[0]}
    yield {key: x for key, x in tensors.items() if key in names}


def _texts(model: PreTrainedModel, names: set[str]) -> Inputs:
    """Make up ids [1, T] of ordinary tokens, with an end token as the last; none if the config has no vocabulary."""
    config, lengths = model.config, {"input_ids": TOKENS}
    if getattr(config, "is_encoder_decoder", False):
        lengths["decoder_input_ids"] = DECODER_TOKENS
    if not names & lengths.keys():
        return {}
    text = text_config(config)
    named = {name for one in (config, text) for name in vars(one) if name.endswith(("_token_id", "_token_index"))}
    special = {i for name in named for one in (config, text) for i in _ids(one, name)}
    vocabulary = getattr(text, "vocab_size", 0) or 0
    ordinary = [i for i in range(min(vocabulary, 64)) if i not in special]
    made: Inputs = {}
    for name, count in lengths.items():
        if name in names and ordinary:
            ids = (ordinary[:count] * count)[:count]
            # CLIP-like text towers look for the end token.
            for end in _ids(text, "eos_token_id")[:1]:
                ids[-1] = end if end < vocabulary else ids[-1]
            made[name] = torch.tensor([ids], device=device_of(model))
    return made


def _images(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Make up an image, a video, and the patches of an image for towers that take them as one row (Qwen-VL ...)."""
    config = model.config
    vision = _setting(config, "vision_config") or config
    if name := next((x for x in ("pixel_values", "pixel_values_videos") if x in names), None):
        # Some configs give the size for their backbone, or for the part that reads its feature map (SAM 2).
        places = (vision, *(getattr(one, key, None) for key in _SIZED for one in (vision, config)))
        size = next(filter(None, (_setting(place, "image_size") for place in places)), None)
        channels = _setting(vision, "num_channels", "in_channels") or 3
        if size is None:
            args = _setting(vision, "pretrained_cfg") or {}
            channels, *size = args.get("input_size", (channels, 224, 224))
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        yield {name: _floats(model, 1, channels, height, width)}
        frames = _setting(vision, "num_frames", "frames_per_clip") or 2
        yield {name: _floats(model, 1, frames, channels, height, width)}
    if "flattened_patches" in names:
        # The row and column of each patch come first (Pix2Struct).
        width = getattr(vision, "patch_embed_hidden_size", 768)
        yield {"flattened_patches": _floats(model, 1, TOKENS, 2 + width).abs()}
    size, pooled = _setting(vision, "patch_size"), _setting(vision, "pooling_kernel_size") or 1
    if "pixel_position_ids" in names and isinstance(size, int) and isinstance(pooled, int):
        # Patches with the column and row of each (Gemma 4).
        side = torch.arange(2 * pooled, device=device_of(model))
        channels = _setting(vision, "num_channels") or 3
        yield {
            "pixel_values": _floats(model, 1, len(side) ** 2, channels * size**2).sigmoid(),
            "pixel_position_ids": torch.cartesian_prod(side, side).flip(-1)[None],
        }
    count, device, patch = 2 * 2, device_of(model), size if isinstance(size, int) else 1
    row = functools.partial(_floats, model, 1)
    if {"spatial_shapes", "pixel_attention_mask"} <= names:
        # Images of any shape, as rows of patches (SigLIP 2).
        yield {
            "pixel_values": row(count, (_setting(vision, "num_channels") or 3) * patch**2),
            "pixel_attention_mask": torch.ones(1, count, dtype=torch.long, device=device),
            "spatial_shapes": torch.tensor([[2, 2]], device=device),
        }
    if {"aspect_ratio_ids", "aspect_ratio_mask"} <= names and isinstance(edge := _setting(vision, "image_size"), int):
        # Tiles of one image (Mllama).
        tiles = _setting(vision, "max_num_tiles") or 1
        yield {
            "pixel_values": row(1, tiles, _setting(vision, "num_channels") or 3, edge, edge),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long, device=device),
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long, device=device),
        }
    patched = next((x for x in ("hidden_states", "pixel_values") if x in names), None)
    reads_text = "input_ids" in inspect.signature(model.forward).parameters
    grid_name = next((x for x in ("grid_thw", "image_grid_thw") if x in names and not reads_text), None)
    size, channels = getattr(config, "patch_size", None), _setting(config, "in_channels", "in_chans") or 3
    if patched is not None and grid_name is not None and isinstance(size, int):
        merge, depth = _setting(config, "spatial_merge_size") or 2, _setting(config, "temporal_patch_size") or 1
        grid = torch.tensor([[1, 2 * merge, 2 * merge]], device=device_of(model))
        patches = 4 * merge * merge
        yield {patched: _floats(model, patches, channels * depth * size**2), grid_name: grid}
        yield {patched: _floats(model, 1, patches, channels, size, size), grid_name: grid}
        yield {patched: _floats(model, patches, channels, size, size), grid_name: grid}
        first = next((layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)), None)
        if first is not None and first.in_features % size**2 == 0:
            yield {patched: _floats(model, patches, first.in_features), grid_name: grid}


def _sounds(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    step, semantic = (getattr(model.config, key, None) for key in ("hop_length", "semantic_model_config"))
    if {"input_values", "input_features"} <= names and isinstance(step, int) and semantic is not None:
        # A codec that reads the waveform and its features, with the same number of frames.
        features = _floats(model, 1, _FRAMES // 4, _setting(semantic, "feature_projection_input_dim", "hidden_size"))
        yield {"input_values": _floats(model, 1, 1, step * _FRAMES // 4), "input_features": features}
    if "input_values" in names:
        yield {"input_values": _floats(model, 1, _SAMPLES)}
        yield {"input_values": _floats(model, 1, 1, _SAMPLES)}
        bins, longest = _setting(model.config, "num_mel_bins"), _setting(model.config, "max_length")
        if bins and longest:
            yield {"input_values": _floats(model, 1, longest, bins)}
    if "input_features" in names:
        config = _setting(model.config, "audio_config", "encoder_config") or model.config
        sizes = (getattr(config, key, None) for key in ("num_mel_bins", "feature_projection_input_dim", "input_dim"))
        bins = next((x for x in sizes if isinstance(x, int)), 80)
        stacked = _setting(config, "num_stacked_frames") or 1
        positions = getattr(config, "max_source_positions", None)
        if isinstance(per_token := getattr(model.config, "audio_length_per_tok", None), int):
            # Sound that is added to the text token by token.
            yield {"input_features": _floats(model, 1, bins, TOKENS * per_token)}
        yield {"input_features": _floats(model, 1, bins, 2 * positions if positions else _FRAMES)}
        yield {"input_features": _floats(model, 1, _FRAMES, bins * stacked)}
        # Some models join several frames before their first layer, whose width tells how many.
        first = next((layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)), None)
        if first is not None and first.in_features not in (bins, bins * stacked) and first.in_features % bins == 0:
            yield {"input_features": _floats(model, 1, _FRAMES, first.in_features)}


def _floats(model: PreTrainedModel, *shape: int) -> Tensor:
    """Draw random numbers: zeros would hide differences."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn if parameter is None else drawn.to(device_of(model), parameter.dtype)


def _ids(config: PreTrainedConfig, name: str) -> list[int]:
    """Return the special tokens that a config has under a name; some have several (Llama 3's ends of text)."""
    found = getattr(config, name, None)
    return [i for i in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(i, int)]


def set_length(tokenizer: PreTrainedTokenizerBase, tokens: int) -> None:
    """Set a tokenizer's longest input, also in tokenizer.json, which readers without Python follow."""
    tokenizer.model_max_length, stored = tokens, getattr(tokenizer, "backend_tokenizer", None)
    if "max_length" in tokenizer.init_kwargs:
        tokenizer.init_kwargs["max_length"] = tokens
    if stored is not None and stored.truncation is not None:
        stored.enable_truncation(**{**stored.truncation, "max_length": tokens})
    if stored is not None and stored.padding is not None:
        # To the longest row: every short text would otherwise get `tokens` tokens.
        stored.enable_padding(**{**stored.padding, "length": None})
