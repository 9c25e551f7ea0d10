"""Observe the frozen softmax inside a converted model: its layers compute softmax and show q, k and v."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.interface import observed
from linearize.attention.layer import LinearAttention, Observer
from linearize.attention.redirect import REDIRECTED
from linearize.fidelity.teacher.rows import pieces, put, take
from linearize.modeling.model import evaluating


def body_of(model: PreTrainedModel) -> Any:
    """Return the model without its head."""
    # The model inside timm's wrapper takes other arguments.
    kind = (getattr(model.config, "linearize", None) or {}).get("base_model_type", model.config.model_type)
    return model if kind in REDIRECTED else model.base_model


def run_body(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Any:
    """Run the model without its head on a batch, without a cache; columns that it does not take are ignored."""
    return run_module(body_of(model), model.config, batch)


def run_module(module: Any, config: Any, batch: Mapping[str, Tensor]) -> Any:
    """Run a model, or its body, on a batch, without a cache and labels; columns that it does not take are ignored."""
    inputs: dict[str, object] = {name: value for name, value in batch.items() if name != "labels"}
    names = inspect.signature(module.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
        inputs = {name: value for name, value in inputs.items() if name in names}
    if "use_cache" in names:
        inputs["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in inputs:
        inputs.setdefault("decoder_input_ids", inputs["input_ids"])
    return module(**inputs)


def last_states(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Run the body on a batch and return its last hidden states, [B, T, D] zero where padded; None if it gives none."""
    states = getattr(run_body(model, batch), "last_hidden_state", None)
    if not torch.is_tensor(states):
        return None
    mask = batch.get("attention_mask")
    return states if mask is None or states.ndim != 3 else states * mask[:, : states.shape[1], None].to(states)


def show(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], observer: Observer) -> int:
    """Run batches through a converted model's body in evaluation mode, and show its layers to an observer.

    Args:
        model: a converted model; it is not changed.
        batches: model inputs; they are moved to the model's device.
        observer: called for every layer of every batch.

    Returns:
        The number of batches.
    """
    device = next(model.parameters()).device
    count = 0
    with evaluating(model), observed(model, observer):
        for batch in batches:
            count += 1
            run_body(model, {name: value.to(device) for name, value in batch.items()})
    return count


def has_rows(layer: LinearAttention) -> bool:
    """Tell whether a layer's weights depend on features only, so that they can be computed in blocks of rows."""
    return isinstance(layer.mixer, FeatureMapMixer)


@torch.no_grad()
def softmax_output(
    layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return what `softmax_heads_output` does, without a gradient."""
    return softmax_heads_output(layer, q, k, v, mask, scaling)


def softmax_heads_output(
    layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return softmax's head outputs [B, H, T, V] in v's dtype, 0 where padded, through SDPA.

    Memory is linear in T whatever the mask: padding is removed before, because SDPA needs a T x T mask for causal rows
    with padding.
    """
    out = v.new_zeros(*q.shape[:3], v.shape[-1])
    for batch, tokens in pieces(mask):
        outputs = nnf.scaled_dot_product_attention(
            take(q, batch, tokens),
            take(k, batch, tokens),
            take(v, batch, tokens),
            is_causal=layer.shape.causal,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        if batch is None:
            return outputs
        put(out, batch, tokens, outputs)
    return out
