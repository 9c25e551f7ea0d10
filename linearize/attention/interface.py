"""The attention function and the mask function that transformers calls for every converted model."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from linearize.attention.layer import LinearAttention, Observer
from linearize.attention.mask_functions import MaskFunction, without_window
from linearize.attention.masks import (
    is_local,
    keep_on_cpu,
    kept_on_cpu,
    key_padding,
    past_keys,
    softmax_weights,
    visible_keys,
)
from linearize.attention.mixer import EAGER, IMPLEMENTATION, LOCAL_AS_FULL
from linearize.attention.packing import SEGMENTS, attend_apart, blocks, whole_documents
from linearize.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from linearize.core.registry import ReadOnlyValues, Values
from linearize.ops.state import is_tracing

UNSUPPORTED_SCORE_MODS = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias on the scores",
}
"""Keyword arguments of hosts that change the scores in a way that no kernel can reproduce."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the kernel in `module`, or with softmax if it has no kernel.

    Args:
        module: the host's attention module.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, V].
        attention_mask: key padding mask [B, 1, 1, S] (see `mask_function`) or [B, S], or None; the documents of
            packed rows [B, 1, T] (`linearize.attention.packing`); [B, 1, T, S] for layers that keep softmax.
        scaling: scaling factor of the scores; D^-1/2 by default.
        dropout: used only in softmax layers: linear attention has no weights to drop.
        **kwargs: other keyword arguments of the host.

    Returns:
        Output [B, T, H, V] and, only with `output_attentions=True`, the weights [B, H, T, S]: those are quadratic.

    Raises:
        UnsupportedModelError: if a kernel cannot follow this kind of mask or change of the scores.
        ConfigError: if the caller asks for attention weights of tokens that exist only as a sum in the state.
        CheckpointError: if the sizes or the direction differ from the plan.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention_mask = _blocks(module, attention_mask)
    layer = getattr(module, "linear_attention", None)
    if (across := getattr(layer, "across", None)) is not None:
        rows = (attention_mask is not None and attention_mask.ndim == 3) or SEGMENTS.get() is not None
        asked = {
            "packed rows": rows,
            "attention weights": _weights_wanted(kwargs),
            "stage one": getattr(layer, "observer", None),
        }
        for what in (what for what, given in asked.items() if given):
            across.refuse(what)
    if attention_mask is not None and attention_mask.ndim == 3 and attention_mask.shape[1] == 1:
        attend = functools.partial(attention_forward, module, scaling=scaling, dropout=dropout, **kwargs)
        # Inside, each document is an ordinary row.
        packed = SEGMENTS.set(None)
        try:
            return attend_apart(attend, query, key, value, attention_mask)
        finally:
            SEGMENTS.reset(packed)
    _check_call(module, query, key, value, attention_mask, kwargs)
    if layer is None:
        return softmax_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    mask = _key_padding_mask(module, layer, attention_mask)
    mask = mask if mask is None else mask.expand(query.shape[0], -1)
    if layer.observer is not None:
        instead = layer.observer(layer, query, key, value, mask, scaling)
        if instead is not None:
            return instead.transpose(1, 2).contiguous(), None
        return softmax_forward(module, query, key, value, mask, scaling=scaling, causal=layer.shape.causal)
    weights = None
    if _weights_wanted(kwargs):
        if (before := layer.tokens_before(key.shape[2])) > 0:
            raise ConfigError(
                f"{type(module).__name__}: got output_attentions=True with a generation cache that holds a sum over "
                f"{before} tokens instead of their keys, so there are no weights for them; pass "
                "past_key_values=DynamicCache(config=model.config), as generate(output_attentions=True) does, "
                "or use_cache=False"
            )
        before, whole = key.shape[2] - query.shape[2], query
        options: Values = {"scaling": scaling, "key_padding_mask": mask}
        if before:
            # A host with a cache of plain keys passes the queries of its last tokens only.
            whole = F.pad(query, (0, 0, before, 0))
            options["rows"] = torch.arange(before, key.shape[2], device=query.device)
        # Like the layer's own sums. In lower precision, routed blocks would even be others.
        with torch.autocast(query.device.type, enabled=False):
            weights = layer.mixer.weights(whole, key, **options).to(query.dtype)
    out = layer(query, key, value, mask, scaling, kept_on_cpu(attention_mask))
    return out.transpose(1, 2).contiguous(), weights


def _blocks(module: nn.Module, mask: Tensor | None) -> Tensor | None:
    """Return a host's mask that separates images in a row as documents [B, 1, T], and a padding mask as [B, S]."""
    layer = getattr(module, "linear_attention", None)
    if mask is None or mask.ndim != 4 or layer is None or layer.shape.causal or is_tracing():
        return mask
    padding = key_padding(mask, causal=False)
    if padding is not None:
        # Return the padding mask found here, because reading the mask again would visit every pair of tokens.
        return padding if SEGMENTS.get() is None else mask
    found = blocks(mask)
    return mask if found is None else found


def _check_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: ReadOnlyValues
) -> None:
    """Reject what a kernel cannot follow, and sizes (q [B, H, T, D], k [B, K, S, D], v [B, K, S, V]) unlike the plan's.

    A layer that keeps softmax can follow everything but documents that the host did not pass on.
    """
    segments = None if is_tracing() else SEGMENTS.get()
    per_pair = mask is not None and mask.ndim == 4 and mask.shape[2] > 1
    if segments is not None and not per_pair and segments.shape == (query.shape[0], query.shape[2]):
        # They would silently become one document.
        raise UnsupportedModelError(
            f"{type(module).__name__}: got several documents packed into one row (position_ids that start again, or "
            "cu_seq_lens), but this architecture does not pass its mask on; expected one document per row: pad them "
            "(DataCollatorWithPadding)"
        )
    layer: LinearAttention | None = getattr(module, "linear_attention", None)
    if layer is None:
        return
    for name, change in UNSUPPORTED_SCORE_MODS.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__}: a kernel cannot apply {change} ({name})")
    shape = layer.shape
    got = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    if got != (shape.heads, shape.key_heads, shape.head_dim, shape.value_dim):
        raise CheckpointError(
            f"{type(module).__name__}: got heads, key heads, head size and value size {got}, expected those of the "
            f"plan, {shape}; config.json was edited: convert the model again"
        )
    causal = kwargs.get("is_causal")
    if layer.declares_direction and causal is not None and bool(causal) != shape.causal:
        raise CheckpointError(
            f"{type(module).__name__}: got a call with is_causal {causal}, expected {shape.causal} as the plan says; "
            "config.json was edited: convert the model again"
        )
    # The mask of a window that this layer no longer has hides padding and tokens before the window alike. A layer with
    # a state needs it only for the new tokens.
    windowed = layer.local_as_full and mask is not None and mask.ndim == 4 and mask.shape[2] < key.shape[2]
    if windowed and _implementation(module) != LOCAL_AS_FULL:
        raise ConfigError(
            f"{type(module).__name__}: got a generation cache of all keys, but this layer was converted as full "
            "attention and gets the mask of layers that kept their window; use model.new_cache() or use_cache=False"
        )


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _key_padding_mask(module: nn.Module, layer: LinearAttention, mask: Tensor | None) -> Tensor | None:
    """Return the key padding mask; raise an error if the mask says more, except for a window that is ignored."""
    if mask is None or mask.ndim == 2:
        return mask
    if mask.shape[1:3] == (1, 1) and (mask.dtype == torch.bool or is_tracing()):
        return mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    if layer.local_as_full and mask.dtype == torch.bool and (is_tracing() or SEGMENTS.get() is None):
        # Other layers need the mask with the window. In it, padding does not see itself.
        real = mask[:, 0, :, -mask.shape[2] :].diagonal(dim1=1, dim2=2)
        # If no layer kept its window, `mask_without_window` has left it out of a traced mask.
        if _implementation(module) != LOCAL_AS_FULL if is_tracing() else is_local(mask[:, 0], real, layer.shape.causal):
            return real
    if not is_tracing() and SEGMENTS.get() is None:
        padding = key_padding(mask, layer.shape.causal)
        if padding is not None:
            return padding
    raise UnsupportedModelError(
        f"{type(module).__name__}: got an attention mask of shape {tuple(mask.shape)}, expected a key padding mask "
        "[batch, tokens] or an equivalent mask; linear attention cannot follow a mask per pair of tokens"
    )


def softmax_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Attend with softmax through transformers' own SDPA function; accepts a 2-D key padding mask or a 4-D mask.

    Other keyword arguments of the host (`dropout`, ...) go to that function.

    Returns:
        Output [B, T, H, V] and, only if the host asks for them, the weights [B, H, T, S].
    """
    wanted = _weights_wanted(kwargs)
    kwargs.pop("output_attentions", None)
    stated = kwargs.pop("is_causal", None)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None].bool()
    if mask is not None and mask.shape[2] == 1:
        # As in `LinearAttention.forward`: an observed layer may have a state, and then gets only the new keys.
        mask = mask[..., : key.shape[2]] if causal is None else mask[..., -key.shape[2] :]
    causal = bool(stated or getattr(module, "is_causal", False)) if causal is None else causal
    # A mask with a row per query already contains the causal structure.
    causal = causal and (mask is None or mask.shape[2] == 1)
    if mask is not None and mask.dtype != torch.bool:
        if causal:
            mask = mask.masked_fill(~past_keys(query, key), torch.finfo(mask.dtype).min)
        causal = False
    elif mask is None or mask.shape[2] == 1:
        mask, causal = visible_keys(query, key, mask, causal=causal)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        # SDPA does not support these changes of the scores, but a modeling file's own function does.
        files = (sys.modules.get(base.__module__) for base in type(module).__mro__)
        eager: Any = next(filter(callable, (getattr(file, "eager_attention_forward", None) for file in files)), None)
        if eager is not None:
            if causal:
                mask = past_keys(query, key)[None, None]
            out, weights = eager(module, query, key, value, _to_add(mask, query.dtype), scaling=scaling, **kwargs)
            return out, weights
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out, _ = sdpa(module, query, key, value, mask, scaling=scaling, is_causal=causal, **kwargs)
    return out, softmax_weights(query, key, mask, scaling=scaling, causal=causal) if wanted else None


def _to_add(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a mask (true where a key is seen) into numbers to add to the scores: 0, or else the lowest number."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


def _weights_wanted(kwargs: Mapping[str, object]) -> bool:
    """Tell whether the model's caller wants attention weights, even if the host does not pass that on."""
    collected = _active_collector.get() or ()
    return bool(kwargs.get("output_attentions")) or "attentions" in " ".join(collected)


def mask_without_window(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """Return the mask of `mask_function` for a model whose local layers were all converted as full attention."""
    if local_size is not None:
        packed = not is_tracing() and SEGMENTS.get() is not None
        kwargs["mask_function"] = without_window(kwargs.get("mask_function", causal_mask_function), packed=packed)
    return mask_function(*args, **kwargs)


def mask_to_add(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """Return the mask of `mask_function` as eager softmax expects it: 0 where a key is seen, else the lowest number."""
    return _to_add(mask_function(*args, dtype=dtype, **kwargs), dtype)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the padding mask as [B, 1, 1, S], true at tokens, so that no T x T mask is ever built.

    It is None if nothing is masked, as for SDPA, so that hosts which read it themselves (NLLB-MoE's router, LASR's
    convolutions) compute the same as with softmax. For packed rows it is the number of every token's document
    [B, 1, T] (`linearize.attention.packing`). Other masks (sliding windows, chunks) are built as SDPA needs them: they
    are for layers that keep softmax, and a converted layer rejects them.
    """
    causal = mask_function is causal_mask_function
    plain = causal or mask_function is bidirectional_mask_function
    segments = None if (tracing := is_tracing()) else SEGMENTS.get()
    if segments is not None and segments.shape != (batch_size, q_length):
        # The segments belong to another part of the model, such as its images.
        segments = None
    if segments is not None and (plain or (not kwargs.get("use_vmap") and whole_documents(mask_function, segments))):
        return segments[:, None]
    # Hosts that combine masks (T5Gemma 2) or choose keys by them (indexers) need a mask per pair of tokens.
    if plain and kwargs.get("allow_is_causal_skip" if causal else "allow_is_bidirectional_skip", True):
        if attention_mask is None or attention_mask.ndim != 2:
            return attention_mask
        # A mask may also cover tokens that are read later; without a cache, `kv_length` counts these too.
        before, covered = kwargs.get("q_offset"), kwargs.get("kv_offset", 0) + kv_length
        attention_mask = attention_mask[:, : before + q_length if causal and isinstance(before, int) else covered]
        if tracing:
            return attention_mask[:, None, None].bool()
        # One wait for the device, for all layers.
        copy = attention_mask.cpu()
        return None if bool(copy.all()) else keep_on_cpu(attention_mask[:, None, None].bool(), copy)
    local = kwargs.get("local_size") is not None
    if local and tracing and without_window(mask_function, packed=True) is mask_function:
        # A traced layer that ignores its window takes all that the mask hides for the window.
        raise UnsupportedModelError(
            "got a sliding window with other changes of the mask (such as images read in both directions), expected a "
            "sliding window alone in a compiled model; do not compile"
        )
    # The skips would return None, which here means "no padding", not "local".
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "attention_mask": attention_mask}
    mask = sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, **kwargs)
    if segments is None or mask is None:
        return mask
    return mask & (segments[:, None, :, None] == segments[:, None, None, :])


def register_interface() -> None:
    """Register the implementations with transformers; repeated calls have no effect."""
    for name, masks in ((IMPLEMENTATION, mask_function), (LOCAL_AS_FULL, mask_without_window), (EAGER, mask_to_add)):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, masks)


@contextlib.contextmanager
def observed(model: nn.Module, observer: Observer | None) -> Iterator[None]:
    """Temporarily set the observer of every converted layer of `model`; with None the layers use their kernels."""
    with contextlib.ExitStack() as undo:
        for layer in linear_attentions(model).values():
            undo.callback(setattr, layer, "observer", layer.observer)
            layer.observer = observer
        yield


def linear_attentions(model: nn.Module) -> dict[str, LinearAttention]:
    """Return the converted layers of a model by the name of their host module, in the order of the layers."""
    return {
        name.removesuffix(".linear_attention"): module
        for name, module in model.named_modules()
        if name.endswith(".linear_attention") or name == "linear_attention"
    }
