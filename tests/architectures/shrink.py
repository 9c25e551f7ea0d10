"""Tiny models of any architecture, from transformers' own config classes, by one rule for all.

Numbers are cut down by what their names say of them: depths, widths, heads, vocabularies, images. All widths become the
same, so that parts which were of one width stay so. What no rule for all can build is left out of the sweep, and
counted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from architectures.overrides import ABSENT, DEFAULT
from transformers import PreTrainedConfig, PreTrainedModel

WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY, POSITIONS = 32, 4, 8, 48, 128, 64
LARGEST = 40_000_000
"""Parameters of the largest model that is tried."""

_DEPTH = re.compile(
    r"(^|_)(num_hidden_layers|n_layers?|num_layers|(en|de)coder_(num_hidden_)?layers|num_(en|de)coder_layers|depth|num_blocks|"
    r"num_hidden_blocks|hidden_layers|num_mtp_layers|num_nextn_predict_layers|n_blocks|block_count)$"
)
_HEADS = re.compile(r"(^|_)(num_attention_heads|n_heads?|num_heads|attention_heads|attn_heads|num_query_heads)$")
_KEY_HEADS = re.compile(r"(^|_)(num_key_value_heads|num_kv_heads|kv_n_heads|num_key_heads)$")
_HEAD_DIM = re.compile(r"(^|_)(head_dim|d_kv|head_size|attention_head_size|attention_head_dim|kv_channels)$")
_INNER = re.compile(
    r"(^|_)(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|dim_feedforward|encoder_ffn_dim|decoder_ffn_dim|ffn_hidden_size)$"
)
_WIDTH = re.compile(
    r"(^|_)(hidden_size|hidden_sizes|d_model|n_embd|dim|embed_dim|hidden_dim|width|embedding_size|projection_dim|channels|"
    r"out_hidden_size|output_dim|projector_hidden_size|kv_lora_rank|q_lora_rank|pooler_output_size|embed_dims|embedding_dim|"
    r"hidden_channels|conv_dim|proj_dim|latent_dim|latents|bottleneck_dim|hidden_dims|classifier_proj_size)$"
)
_EXPERTS = re.compile(r"(^|_)(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_POSITIONS = re.compile(
    r"(^|_)(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_2d_position_embeddings|context_length|max_seq_len)$"
)
_TOKEN = re.compile(
    r"(_token_ids?|_token_index|_token|image_token_index|_token_index|eos_ids|token_id_list)$|^(pad|bos|eos)_token_id$"
)
_KEPT = {"num_channels", "in_channels", "in_chans", "input_channels", "audio_channels", "out_channels", "num_mel_bins"}


_LEFT_OUT = (
    *("model_type", "transformers_version", "architectures", "per_layer_config"),
    *("out_features", "out_indices", "stage_names", "_out_features", "_out_indices"),
)
_FILLED = {
    "head_dim": HEAD_DIM,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "full_attention"],
}
"""What some classes leave open in their defaults, and then cannot be built."""


def tiny_config(
    cls: type[PreTrainedConfig], filled: bool = False, overrides: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """Build a config of a class with its numbers cut down.

    Args:
        cls: the class.
        filled: what its defaults leave open is filled in.
        overrides: values by dotted names, in place of what the rule makes of them; see `overrides.py`.
    """
    default = cls().to_dict()
    small = _small(default, {})
    if filled:
        small |= {key: x for key, x in _FILLED.items() if key in small and small[key] is None}
    for name, value in (overrides or {}).items():
        _put(small, default, name, value)
    return cls(**small)


def _put(small: dict[str, Any], default: dict[str, Any], name: str, value: Any) -> None:
    """Set a value by its dotted name; parts that a config does not have are left alone."""
    *path, last = name.split(".")
    for part in path:
        small, default = small.get(part) or {}, default.get(part) or {}
    if value is ABSENT:
        small.pop(last, None)
    else:
        small[last] = default.get(last) if value is DEFAULT else value


def tiny_model(model: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with the weights of one fixed seed.

    Raises:
        ValueError: if it is not tiny.
    """
    with torch.device("meta"):
        size = sum(x.numel() for x in model(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return open_gates(model(config).eval())


def open_gates(model: Any) -> Any:
    """Return a model whose weights that start at zero are noise: they would let no gradient through."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not name.endswith("bias") and not parameter.any():
                parameter.normal_(std=0.02 if parameter.ndim > 1 else 0.2)
    return model


def _small(values: dict[str, Any], tokens: dict[int, int], nested: bool = False) -> dict[str, Any]:
    depth = _depth(values)
    found = {}
    # Backbones of stages, whose number stays, give what the model around them is built for.
    staged = nested and isinstance(values.get("depths"), list)
    for key, value in values.items():
        if key in _LEFT_OUT and not (key == "model_type" and nested) and not (key == "out_features" and staged):
            continue
        if key == "layer_types" and isinstance(value, list):
            found[key] = value[:depth]
        elif isinstance(value, dict):
            found[key] = _rope(value, values) if "rope" in key else _small(value, tokens, nested=True)
        else:
            found[key] = _number(key, value, values, depth, tokens)
    if staged and "num_layers" in values:
        found["num_layers"] = values["num_layers"]
    per_layer = [
        key
        for key, x in values.items()
        if isinstance(x, list) and len(x) == _layers(values) and key != "layer_types" and not staged
    ]
    return found | {key: found[key][:depth] for key in per_layer if isinstance(found.get(key), list)}


def _layers(values: dict[str, Any]) -> int | None:
    return next((x for key, x in values.items() if _DEPTH.search(key) and isinstance(x, int)), None)


def _depth(values: dict[str, Any]) -> int:
    """Two layers, or as many as it takes to have one of every kind."""
    kinds = values.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return 2
    return max(2, *(kinds.index(kind) + 1 for kind in set(kinds))) if max(map(kinds.index, set(kinds))) < 8 else 2


def _rope(rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Cut the sections of rotary positions to the heads' new size."""
    found = {key: _rope(x, values) if isinstance(x, dict) else x for key, x in rope.items()}
    section = rope.get("mrope_section")
    if isinstance(section, list) and section:
        found["mrope_section"] = (
            [2, 1, 1][: len(section)] if len(section) == 3 else [HEAD_DIM // 2 // len(section)] * len(section)
        )
    return found


def _number(key: str, value: Any, values: dict[str, Any], depth: int, tokens: dict[int, int]) -> Any:
    """Cut down one number, or each of a list."""
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        return _numbers(key, list(value), tokens)
    if key == "initializer_range":
        # Some have one so small that nothing has a gradient.
        return 0.02
    if type(value) is not int:
        return value
    if _TOKEN.search(key) and not key.endswith("_per_token"):
        return _token(value, tokens)
    if _DEPTH.search(key):
        return min(value, depth)
    return _size(key, value, values)


def _numbers(key: str, value: list[int], tokens: dict[int, int]) -> list[int]:
    if _TOKEN.search(key):
        return [_token(x, tokens) for x in value]
    if key in ("depths", "layers", "num_blocks", "layer_depths"):
        return [1] * len(value)
    if _HEADS.search(key):
        return [2] * len(value)
    if _WIDTH.search(key) and value[0] > WIDTH:
        return [max(WIDTH, WIDTH * round(x / value[0])) for x in value]
    if key in ("image_size", "input_size", "img_size") and max(value) > 64:
        return [64] * len(value)
    return value


_FIXED = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_d_state"), 8),
    **{
        "qk_head_dim": 2 * HEAD_DIM,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "context_size": 16,
        "mamba_n_groups": 1,
    },
}
"""Sizes that go together: twice the width is heads times their size."""


def _size(key: str, value: int, values: dict[str, Any]) -> int:
    if "vocab_size" in key and "type" not in key:
        return min(value, VOCABULARY)
    if key in _FIXED:
        return _FIXED[key]
    if _KEY_HEADS.search(key):
        heads = next((x for name, x in values.items() if _HEADS.search(name) and isinstance(x, int)), value)
        return HEADS if value == heads else 1 if value == 1 else 2
    rules = (
        (_HEADS, HEADS),
        (_HEAD_DIM, HEAD_DIM),
        (_INNER, INNER),
        (_EXPERTS, 4),
        (_POSITIONS, POSITIONS),
    )
    for pattern, most in rules:
        if pattern.search(key):
            return min(value, most)
    if key in ("image_size", "img_size", "eval_size"):
        patch = values.get("patch_size")
        return min(value, max(64, 2 * patch) if isinstance(patch, int) else 64)
    if key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"):
        return min(value, 2)
    if key in ("n_group", "topk_group", "num_expert_group", "num_expert_groups"):
        return 1
    if key in ("num_conv_pos_embeddings",):
        return min(value, 16)
    if key in ("num_conv_pos_embedding_groups",):
        return min(value, 4)
    if _WIDTH.search(key) and key not in _KEPT and value > WIDTH:
        return WIDTH
    return value


def _token(value: int, tokens: dict[int, int]) -> int:
    """Give tokens beyond the vocabulary numbers at its end, each one of its own."""
    if value < VOCABULARY - 48:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


def main_classes(module: Any) -> list[type[PreTrainedModel]]:
    """List the model classes of a modeling file, those that people load first: with heads for text, then bodies."""
    found = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__ and not _is_base(cls)
    ]
    order = (
        "ForConditionalGeneration",
        "ForMaskedLM",
        "ForCausalLM",
        "LMHeadModel",
        "Model",
        "ForImageClassification",
        "ForCTC",
        "",
    )
    return sorted(
        found, key=lambda cls: (next(i for i, end in enumerate(order) if cls.__name__.endswith(end)), len(cls.__name__))
    )


def _is_base(cls: type[PreTrainedModel]) -> bool:
    return cls.__name__.endswith("PreTrainedModel") or cls.config_class is None or "forward" not in vars(cls)
