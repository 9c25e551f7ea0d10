"""Find out what attentions a model has by running it once on a few made-up tokens and writing down every call.

No table of architectures: whatever dispatches through transformers' attention interface is seen, with its true sizes,
direction, mask and scaling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from linearize.attention.interface import UNSUPPORTED_SCORE_MODS
from linearize.attention.redirect import REDIRECTED
from linearize.errors import UnsupportedModelError, first_line
from linearize.surgery import timm
from linearize.surgery.call import Call

_NAME = "linearize_probe"
_TOKENS, _DECODER_TOKENS = 7, 5
"""Different lengths, so that cross-attention shows itself by its shape."""


@dataclass
class _Recorder:
    calls: list[Call] = field(default_factory=list)
    masks: dict[int, tuple[str, Tensor, int | None]] = field(default_factory=dict)

    def mask_function(self, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
        """Build a real mask and remember of which kind it is."""
        kinds = {causal_mask_function: "causal", bidirectional_mask_function: "bidirectional"}
        window = kwargs.get("local_size")
        kind = kinds.get(kwargs.get("mask_function", causal_mask_function), "own" if window is None else "local")
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(batch_size, q_length, kv_length, **kwargs)
        assert mask is not None
        self.masks[id(mask)] = (kind, mask, window)
        return mask

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        # By this name: many hosts, most vision-language models among them, hand it over as a keyword.
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Write the call down and attend with softmax."""
        mask = attention_mask
        kind, _, window = ("none", None, None) if mask is None else self.masks.get(id(mask), ("bias", mask, None))
        altered = ", ".join(what for name, what in UNSUPPORTED_SCORE_MODS.items() if kwargs.get(name) is not None)
        causal = bool(kwargs.get("is_causal") or getattr(module, "is_causal", False))
        if kind == "local" and mask is not None:
            causal = not bool(mask.triu(1).any())
        q, k, v = (tuple(t.shape) for t in (query, key, value))
        declared = None if kwargs.get("is_causal") is None else bool(kwargs["is_causal"])
        call = Call(module, q, k, v, mask=kind, altered=altered, is_causal=causal, declared=declared, window=window)
        self.calls.append(call)
        # What alters the scores is left out here: only the shapes of what follows matter.
        kept = {name: value for name, value in kwargs.items() if name not in UNSUPPORTED_SCORE_MODS}
        if mask is not None and mask.shape[-1] != key.shape[2]:
            mask = None
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kept)


def probe(model: PreTrainedModel, inputs: Mapping[str, Tensor] | None = None) -> list[Call]:
    """Run the model once and return all attention calls in order.

    Args:
        model: any transformers model; it is not changed.
        inputs: keyword arguments for its forward; made up from the config where None.

    Raises:
        UnsupportedModelError: if the trial run fails.
    """
    made = inputs is None
    inputs = dict(inputs) if inputs is not None else example_inputs(model)
    training = model.training
    model.eval()
    try:
        return _run(model, inputs)
    except UnsupportedModelError:
        raise
    except Exception as error:
        # A head may want more (several choices, an end token in the decoder); the attentions are in the model below.
        below: Any = model.base_model
        if made and below is not model:
            with contextlib.suppress(Exception):
                return _run(below, example_inputs(below))
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items() if torch.is_tensor(value))
        raise UnsupportedModelError(
            f"a trial run of {type(model).__name__} on {shapes} failed ({type(error).__name__}: {first_line(error)}); "
            "pass example_inputs=... that its forward accepts"
        ) from error
    finally:
        model.train(training)


def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[Call]:
    if model.config.model_type in REDIRECTED:
        return timm.probe(model, inputs)
    recorder = _Recorder()
    with _recording(model, recorder), torch.no_grad():
        model(**inputs)
    return recorder.calls


@contextlib.contextmanager
def _recording(model: PreTrainedModel, recorder: _Recorder) -> Iterator[None]:
    """Route the attention of `model` to the recorder, on all its configs, and put everything back."""
    AttentionInterface.register(_NAME, recorder.attention)
    AttentionMaskInterface.register(_NAME, recorder.mask_function)
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: getattr(config, "_attn_implementation_internal", None) for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(_NAME, None)


def example_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make up the smallest inputs that let a model run: a few tokens, one image, or a little sound.

    Raises:
        UnsupportedModelError: if the model's inputs are of an unknown kind.
    """
    config = model.config
    device = next(model.parameters()).device
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    names = _forward_names(model)
    made: dict[str, Any] = {}
    if "input_ids" in names:
        made["input_ids"] = _tokens(config, _TOKENS, device)
    if "pixel_values" in names:
        made["pixel_values"] = torch.zeros(1, *_image_shape(config), device=device, dtype=dtype)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = _tokens(config, _DECODER_TOKENS, device)
    if not made and "input_values" in names:
        made["input_values"] = torch.zeros(1, 4000, device=device, dtype=dtype)
    if "input_features" in names and "input_ids" not in made:
        bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", 1500)
        made["input_features"] = torch.zeros(1, bins, frames, device=device, dtype=dtype)
    if not made:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {', '.join(sorted(names)) or 'nothing'}, expected input_ids, pixel_values, "
            "input_values or input_features; pass example_inputs=..."
        )
    if "use_cache" in names:
        made["use_cache"] = False
    return made


def _forward_names(model: PreTrainedModel) -> set[str]:
    """Return the names of forward's arguments; a wrapper that takes only **kwargs is asked for its main input."""
    import inspect

    names = set(inspect.signature(model.forward).parameters)
    if not names & {"input_ids", "pixel_values", "input_values", "input_features"}:
        names.add(model.main_input_name)
    return names


def _tokens(config: Any, count: int, device: torch.device) -> Tensor:
    text = config.get_text_config()
    special = {i for name in ("pad_token_id", "bos_token_id", "eos_token_id") for i in _ids(text, name)}
    vocabulary = getattr(text, "vocab_size", 0)
    ids = [i for i in range(min(vocabulary, 64)) if i not in special][:count]
    if not ids:
        raise UnsupportedModelError(f"config of type {config.model_type!r} has no vocab_size; pass example_inputs=...")
    ids = (ids * count)[:count]
    # CLIP-like text towers look for the end token.
    for end in _ids(text, "eos_token_id")[:1]:
        if end < vocabulary:
            ids[-1] = end
    return torch.tensor([ids], device=device)


def _ids(config: Any, name: str) -> list[int]:
    """Return the special tokens that a config has under a name: none, one, or several (Llama 3's ends of a text)."""
    found = getattr(config, name, None)
    return [i for i in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(i, int)]


def _image_shape(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None)
    channels = getattr(vision, "num_channels", 3)
    if size is None:
        args = getattr(vision, "pretrained_cfg", None) or {}
        channels, *size = args.get("input_size", (3, 224, 224))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return channels, height, width
