"""The frozen softmax inside a converted model: its layers compute softmax and pass q, k and v to an observer.

The weights of softmax and of the kernel are two T x T matrices, which are processed in blocks of rows and never exist
as a whole. Queries are grouped by the key/value head that they read: [B, K, G, R, D] with G = H / K.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from linearize.attention.cache import text_config
from linearize.attention.feature_map import FeatureMapMixer
from linearize.attention.interface import linear_attentions, observed
from linearize.attention.layer import LinearAttention, Mask
from linearize.attention.redirect import REDIRECTED
from linearize.conversion.inputs import MAIN
from linearize.core.errors import DataError, LinearizeError, first_line
from linearize.modeling.chain import Chain
from linearize.modeling.model import evaluating
from linearize.modeling.weights import device_of, is_streamed

Batch = Mapping[str, Tensor]
"""A model's inputs by name, such as `input_ids` [B, T]."""
CHAIN = "offloaded_chain"
"""Attribute of an offloaded model with its chain of blocks, once that was checked."""
BLOCK_NUMBERS = 1 << 19
"""Number of elements in one block of a matrix (2 MiB of fp32): small enough for the cache, large enough to be fast."""


def body_of(model: PreTrainedModel) -> Any:
    """Return the model without its head."""
    # The model inside timm's wrapper takes different arguments.
    kind = (getattr(model.config, "linearize", None) or {}).get("base_model_type", model.config.model_type)
    return model if kind in REDIRECTED else model.base_model


def run_body(model: PreTrainedModel, batch: Batch, *, head: bool = False) -> Any:
    """Run the model on a batch (such as `input_ids` [B, T]), as `run_module` does, without its head unless asked for.

    A sharded model is run as a whole: FSDP gathers weights for its calls only.
    """
    return run_module(model if head or isinstance(model, FSDPModule) else body_of(model), model.config, batch)


def run_module(module: nn.Module, config: PreTrainedConfig, batch: Batch) -> Any:
    """Run a model or its body on a batch (such as `input_ids` [B, T]), without cache, labels and unknown columns.

    Raises:
        DataError: if it fails, and the batch lacks one of its inputs (CLIP reads texts and images together), or if it
            refuses the images' size.
    """
    inputs: dict[str, object] = {name: value for name, value in batch.items() if name != "labels"}
    names = inspect.signature(module.forward).parameters
    passes_on = inspect.Parameter.VAR_KEYWORD in {one.kind for one in names.values()}
    # Models that pass keywords on to their attention take only those masks that they name (DETR's, but not YOLOS's).
    inputs = {name: value for name, value in inputs.items() if name in names or (passes_on and name != "pixel_mask")}
    # A body with several parts (LLaVA) passes it on to its text model.
    if "use_cache" in names or (passes_on and text_config(config) is not config):
        inputs["use_cache"] = False
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in inputs and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = inputs["input_ids"]
        if "decoder_attention_mask" in names and "attention_mask" in inputs:
            inputs.setdefault("decoder_attention_mask", inputs["attention_mask"])
    try:
        return module(**inputs)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        missing = [name for name in (*MAIN, "decoder_input_ids") if name in names and inputs.get(name) is None]
        if isinstance(error, LinearizeError):
            raise
        if not missing and "pixel_values" in batch and isinstance(error, ValueError | AssertionError):
            raise DataError(
                f"{type(module).__name__} does not run on pixel_values {list(batch['pixel_values'].shape)}: "
                f"{first_line(error)}; correct the size in the image processor's file, or convert with --image-size"
            ) from error
        if not missing:
            raise
        raise DataError(
            f"{type(module).__name__} does not run on {', '.join(batch)} without {', '.join(missing)}: "
            f"{first_line(error)}; pass batches with all inputs to linearize.distill or linearize.align, or skip the "
            "training (--distill-steps 0 --align-steps 0)"
        ) from error


def last_states(model: PreTrainedModel, batch: Batch) -> Tensor | None:
    """Run the body on a batch; return its last hidden states [B, T, D], zero at padding, or None if it returns none."""
    states = getattr(run_body(model, batch), "last_hidden_state", None)
    if not torch.is_tensor(states):
        return None
    mask = mask_of(batch, states)
    # Filled, not multiplied by zero: padding may hold NaN.
    return states if mask is None else states.masked_fill(~mask[..., None].bool(), 0.0)


def mask_of(batch: Batch, states: Tensor) -> Tensor | None:
    """Return the padding mask [B, T] of the last hidden states [B, T, D]: the decoder's, if the batch has its tokens.

    None without a mask, or if the states have other tokens (a sound's mask has samples, its states frames).
    """
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return mask if mask is not None and mask.shape == states.shape[:2] else None


def within_limit(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """Return a batch whose texts [B, T] are cut to the longest input of a model."""
    from linearize.conversion.positions import current_length

    limit = current_length(model) if "input_ids" in batch else None
    return {name: value if limit is None else value[:, :limit] for name, value in batch.items()}


@torch.no_grad()
def exact_states(model: PreTrainedModel, batch: Batch) -> Tensor | None:
    """Return `last_states` in evaluation mode, moved to the model's device, as fp64 [B, T, D] on the CPU."""
    device = device_of(model)
    with evaluating(model):
        states = last_states(model, {name: value.to(device) for name, value in batch.items()})
    # Apple's GPUs have no fp64.
    return None if states is None or states.ndim != 3 else states.cpu().double()


Visit = Callable[[str, LinearAttention, Tensor, Tensor, Tensor, Mask, float], Tensor | None]
"""Called with a layer's name, the layer, q, k, v, the key padding mask and the scaling; returns the layer's output, or
None to use the output of softmax."""


def show(model: PreTrainedModel, batches: Iterable[Batch], visit: Visit) -> None:
    """Run batches through a converted model's body, in evaluation mode and without autocast, and visit its layers.

    Args:
        model: a converted model; it is not changed.
        batches: model inputs (such as `input_ids` [B, T]); they are moved to the model's device.
        visit: called for every layer of every batch.

    Raises:
        DataError: if `batches` is empty.
    """
    device = device_of(model)
    names = {id(layer): name for name, layer in linear_attentions(model).items()}

    def observe(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor | None:
        with torch.autocast(device_type=q.device.type, enabled=False):
            return visit(names[id(layer)], layer, q, k, v, mask, scaling)

    moved = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    if not moved:
        raise DataError("fidelity: got no held-out batch to measure on; set some rows aside (--holdout)")
    chain = chain_of(model, moved[0])
    with evaluating(model), observed(model, observe):
        if chain is not None:
            chain.run_all(moved)
            return
        for batch in moved:
            run_body(model, batch)


def chain_of(model: PreTrainedModel, batch: Batch) -> Chain | None:
    """Return the chain of an offloaded model, checked once, on a batch on its device; None for another model.

    Raises:
        UnsupportedModelError: if its blocks are not a chain.
    """
    if is_streamed(model) and CHAIN not in vars(model):
        vars(model)[CHAIN] = Chain(model, run_body, batch)
    return vars(model).get(CHAIN)


def has_rows(layer: LinearAttention) -> bool:
    """Tell whether a layer's weights depend on features only, so that they can be computed in blocks of rows."""
    return isinstance(layer.mixer, FeatureMapMixer)


def softmax_heads_output(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor:
    """Return softmax's head outputs [B, H, T, V] in v's dtype, zero at padding, computed with SDPA.

    Memory is linear in T whatever the mask: padding is removed first, because SDPA needs a T x T mask for causal rows
    with padding.
    """
    out = v.new_zeros(*q.shape[:3], v.shape[-1])
    for batch, tokens in pieces(mask):
        queries, keys, values = [x if batch is None else take(x, batch, tokens) for x in (q, k, v)]
        outputs = nnf.scaled_dot_product_attention(
            queries, keys, values, is_causal=layer.shape.causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        if batch is None:
            return outputs
        put(out, batch, tokens, outputs)
    return out


softmax_output = torch.no_grad()(softmax_heads_output)
"""`softmax_heads_output` without a gradient."""


def frozen_output(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: float) -> Tensor | None:
    """Return softmax's output [B, H, T, V], for an observer; None leaves bidirectional layers to the host.

    For a causal layer with padding, the host would build a T x T mask.
    """
    return softmax_output(layer, q, k, v, mask, scaling) if layer.shape.causal else None


@dataclass(frozen=True)
class Rows:
    """One block of rows.

    Attributes:
        part: slice of the given queries.
        places: [C] their positions among the keys, ascending.
        seen: number of keys that at least one of them sees: the first `seen`.
        causal: whether a row sees only keys up to its own position.
    """

    part: slice
    places: Tensor
    seen: int
    causal: bool

    @property
    def visible(self) -> Tensor | None:
        """Which keys each row sees, [C, seen] bool; None if all rows see all of them."""
        return torch.arange(self.seen, device=self.places.device) <= self.places[:, None] if self.causal else None

    @property
    def edge(self) -> Tensor | None:
        """Which of the last E keys, those after the first row's place, each row cannot see: [C, E]; None if E is 0."""
        first = int(self.places[0]) + 1
        if not self.causal or first == self.seen:
            return None
        return torch.arange(first, self.seen, device=self.places.device) > self.places[:, None]


def row_blocks(places: Tensor, keys: int, size: int, *, causal: bool) -> Iterator[Rows]:
    """Cut queries into blocks of `size` rows.

    Args:
        places: [R] positions of the queries among the keys, ascending.
        keys: number of keys.
        size: rows per block.
        causal: whether a query sees only keys up to its own position; a block then contains no later keys.
    """
    for start in range(0, len(places), size):
        part = slice(start, min(start + size, len(places)))
        yield Rows(part, places[part], int(places[part][-1]) + 1 if causal else keys, causal)


def all_rows(q: Tensor, causal: bool, every: int = 1) -> Iterator[Rows]:
    """Cut the queries q [B, H, T, D] of T tokens, or of every n-th token, into blocks that fit into the cache."""
    batch, heads, tokens, _ = q.shape
    size = max(1, min(tokens, BLOCK_NUMBERS // max(1, batch * heads * tokens)))
    return row_blocks(torch.arange(every - 1, tokens, every, device=q.device), tokens, size, causal=causal)


def score_rows(q: Tensor, k: Tensor, rows: Rows, scaling: float) -> Tensor:
    """Return the softmax scores [B, K, G, C, seen] of a block, -inf if masked; q [B, K, G, R, D], k [B, K, T, D]."""
    scores = (q[:, :, :, rows.part].float() * scaling) @ k[:, :, None, : rows.seen].float().transpose(-1, -2)
    return scores if rows.visible is None else scores.masked_fill_(~rows.visible, -torch.inf)


def pieces(key_padding_mask: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Group a batch by padding, so that padded tokens can be left out.

    Args:
        key_padding_mask: [B, T], true at tokens, or None.

    Yields:
        Batch entries [b] with the same real tokens, and these tokens [S], ascending. Both are None for the whole batch.
    """
    if key_padding_mask is None or bool(key_padding_mask.all()):
        yield None, None
        return
    kinds, kind = torch.unique(key_padding_mask.bool(), dim=0, return_inverse=True)
    for number, real in enumerate(kinds):
        yield (kind == number).nonzero()[:, 0], real.nonzero()[:, 0]


def take(x: Tensor, batch: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Return a copy of some entries and tokens of x [B, H, T, ...]; if both are None, return x itself."""
    x = x if batch is None else x[batch]
    return x if tokens is None else x.index_select(2, tokens)


def put(x: Tensor, batch: Tensor, tokens: Tensor | None, part: Tensor) -> None:
    """Write the result of `take` back into x [B, H, T, ...]; the other tokens of these entries become 0."""
    if tokens is not None:
        part = torch.zeros_like(x[batch]).index_copy_(2, tokens, part)
    x[batch] = part
