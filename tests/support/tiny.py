"""Tiny models from configs, with kernels whose parameters are no longer those of the start. Shared by the tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.attention.interface import linear_attentions

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
SMALLER = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
"""Changes for `original`: half of TEXT and of IMAGE in all sizes."""
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 30,
    "patch_size": 10,
}
ENDS = {"bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 0}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
CLIP_TEXT = {**TEXT, "max_position_embeddings": 32, "bos_token_id": 97, "eos_token_id": 98}

CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", TEXT),
    "roberta": ("RobertaConfig", TEXT),
    "distilbert": (
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37, "vocab_size": 99, "max_position_embeddings": 64},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, **ENDS}),
    "vit": ("ViTConfig", IMAGE),
    "deit": ("DeiTConfig", IMAGE),
    "dinov2": ("Dinov2Config", {key: value for key, value in IMAGE.items() if key != "intermediate_size"}),
    "llama": ("LlamaConfig", {**TEXT, **ENDS, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {**TEXT, **ENDS, "num_key_value_heads": 2}),
    "mistral": ("MistralConfig", {**TEXT, **ENDS, "num_key_value_heads": 2, "sliding_window": None}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **TEXT,
            **ENDS,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "modernbert": (
        "ModernBertConfig",
        {
            **TEXT,
            "num_hidden_layers": 4,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "bart": ("BartConfig", BART),
    "clip": (
        "CLIPConfig",
        {"text_config": CLIP_TEXT, "vision_config": IMAGE, "projection_dim": 16},
    ),
}

_CONVERTED: dict[str, tuple[PreTrainedModel, Tensor]] = {}
"""Models, and the state of the random numbers after their conversion."""


def original(name: str, head: str = "AutoModel", **overrides: Any) -> PreTrainedModel:
    """Build a tiny softmax model with the weights of one fixed seed."""
    cls, values = CONFIGS[name]
    config = getattr(transformers, cls)(**values | overrides)
    torch.manual_seed(0)
    mapping = getattr(transformers, head)._model_mapping[type(config)]
    model_class = mapping[0] if isinstance(mapping, (tuple, list)) else mapping
    return model_class(config).eval()


def converted(name: str, head: str = "AutoModel", kernel: str = "hedgehog", **options: Any) -> PreTrainedModel:
    """Convert a tiny model and move its kernels away from their start, as training would.

    To convert takes ten times as long as to copy, so the same model is converted once.
    """
    key = repr((name, head, kernel, options))
    if key not in _CONVERTED:
        model = linearize.convert(original(name, head, **options.pop("config", {})), kernel, **options)
        _CONVERTED[key] = stir(model), torch.get_rng_state()
    model, state = _CONVERTED[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Add small fixed noise to every kernel parameter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in linear_attentions(model).values():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs_of(model: PreTrainedModel, batch: int = 3, tokens: int = 9) -> dict[str, Tensor]:
    """Make inputs: token numbers with some padding on the right, or images."""
    generator = torch.Generator().manual_seed(2)
    made: dict[str, Tensor] = {}
    name = model.main_input_name
    if name == "pixel_values" or hasattr(model.config, "vision_config"):
        vision = getattr(model.config, "vision_config", model.config)
        size = getattr(vision, "image_size", 32)
        made["pixel_values"] = torch.randn(batch, 3, size, size, generator=generator)
    if name == "input_ids":
        shape = (batch, 2, tokens) if "MultipleChoice" in type(model).__name__ else (batch, tokens)
        made["input_ids"] = torch.randint(3, 96, shape, generator=generator)
        made["input_ids"][..., -1] = getattr(model.config.get_text_config(), "eos_token_id", None) or 5
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if not hasattr(model.config, "vision_config") and not model.config.is_encoder_decoder:
            made["attention_mask"][0, ..., -3:] = 0
    return made


def outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor], **more: Any) -> list[Tensor]:
    """Run without gradients and return all tensors of the output."""
    with torch.no_grad():
        return [t for t in model(**inputs, **more).to_tuple() if torch.is_tensor(t)]
