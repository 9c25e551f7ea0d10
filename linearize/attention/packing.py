"""Several documents in one row (padding-free training): attention treats every document as a separate row.

Each forward reads the starts of documents once, from `cu_seq_lens_q`, `seq_idx`, or `position_ids` that restart. The
attentions get the number of every token's document, [B, 1, T], as their mask, so that gradient checkpointing can call
layers again with it. They arrange the documents as padded rows of similar lengths, attend, and put the outputs back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from linearize.attention.cache import given_cache, text_config
from linearize.core.errors import UnsupportedModelError
from linearize.core.registry import ReadOnlyValues, Values
from linearize.ops.state import is_tracing

SEGMENTS: ContextVar[Tensor | None] = ContextVar("linearize_segments", default=None)
"""The document of every token [B, T], from 1 (0: padding), while the forward of a model runs on packed rows."""

_SHORT = 64
"""Documents of up to this many tokens share one layout; longer documents are grouped by powers of two."""


Bucket = tuple[Tensor, Tensor | None, list[tuple[int, int, int]]]
"""Documents of similar lengths: indices [N, L] of their tokens among the B T tokens of the batch; their mask [N, L],
true at tokens, or None if there is no padding; and the row, first token and length of each document."""


def find_segments(causal: bool, tokens: Tensor, kwargs: ReadOnlyValues, *, cached: bool = False) -> Tensor | None:
    """Number the documents of packed rows.

    As in transformers for softmax, positions matter only for causal models without an attention mask; a document begins
    wherever they do not increase by one. Where the forward makes a cache, they are mere positions in transformers; here
    they still count if each document begins at 0, as the rows of collators do, and then no cache is made.

    Args:
        causal: whether the model is causal.
        tokens: its tokens [B, T], or their embeddings [B, T, X].
        kwargs: keyword arguments of the model's forward.
        cached: whether the forward makes a generation cache.

    Returns:
        [B, T] document numbers from 1; None if no row is packed.

    Raises:
        UnsupportedModelError: if the documents do not add up to the tokens.
    """
    batch, count = tokens.shape[:2]
    lengths, index, positions = map(kwargs.get, ("cu_seq_lens_q", "seq_idx", "position_ids"))
    if lengths is not None:
        if not len(lengths) or int(lengths[0]) or int(lengths[-1]) != batch * count or bool((lengths.diff() < 0).any()):
            raise UnsupportedModelError(
                f"cu_seq_lens_q: got {lengths.tolist()[:8]}, expected numbers that increase from 0 to {batch * count}, "
                "the tokens of the batch"
            )
        begins = torch.zeros(batch * count + 1, dtype=torch.bool, device=tokens.device)
        begins[lengths.to(tokens.device).long()] = True
        begins = begins[:-1].view(batch, count)
    elif index is not None:
        if index.ndim != 2 or index.shape[1] != count:
            raise UnsupportedModelError(
                f"seq_idx: got shape {list(index.shape)}, expected the document of each token, [batch, {count}]"
            )
        index = index.to(tokens.device)
        begins = (index.diff(prepend=index[:, :1]) != 0).expand(batch, count)
    else:
        if not causal or positions is None or kwargs.get("attention_mask") is not None:
            return None
        # In Qwen-VL these are the positions in the text, then those of time, height and width.
        positions = positions[0] if positions.ndim == 3 and positions.shape[0] == 4 else positions
        if positions.ndim != 2 or positions.shape[1] != count:
            return None
        begins = positions.diff(prepend=positions[:, :1] - 1) != 1
        if cached and bool((begins & (positions != 0)).any()):
            return None
        begins = begins.expand(batch, count)
    begins = begins.clone()
    begins[:, 0] = True
    if bool((begins.sum() == batch).item()):
        return None
    segments = begins.cumsum(dim=1)
    mask = kwargs.get("attention_mask")
    return segments if mask is None or mask.shape != segments.shape else segments.masked_fill(mask == 0, 0)


def positions_of(segments: Tensor) -> Tensor:
    """Count the tokens [B, T] of every document from 0."""
    counted = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    first = segments.diff(prepend=segments.new_full((len(segments), 1), -1)) != 0
    return counted - counted.masked_fill(~first, 0).cummax(dim=1).values


def find_documents(root: Any, args: Any, kwargs: Values, *, causal: bool) -> tuple[Any, Values] | None:
    """Find packed rows before a converted model's forward, and set `SEGMENTS` for masks and attentions.

    Args:
        root: the model.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward.
        causal: whether it is causal.

    Returns:
        The changed arguments; None if nothing changes.

    Raises:
        UnsupportedModelError: for packed rows with a generation cache that the caller gives or asks for, in an
            encoder-decoder, or in a compiled model.
    """
    if is_tracing():
        if _given(kwargs, "cu_seq_lens_q") or _given(kwargs, "seq_idx"):
            raise UnsupportedModelError(
                "got several documents packed into one row in a compiled or traced model, expected one document per "
                "row; pad them (DataCollatorWithPadding), or do not compile"
            )
        # It is unknown, before the compiled code runs, whether positions start again.
        return None
    SEGMENTS.set(None)
    if len(args) > 1:
        names = list(inspect.signature(root.forward).parameters)
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        args = ()
    # GPT-2 passes input_ids by position, also if they are None.
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = ([one for one in given if one is not None] or [None])[0]
    if tokens is None or tokens.ndim < 2 or tokens.shape[1] < 2:
        return None
    cache = given_cache(kwargs)
    if cache is not None and not any(_given(kwargs, name) for name in ("cu_seq_lens_q", "seq_idx")):
        # With a cache, positions may repeat; a document begins where they decrease.
        positions = kwargs.get("position_ids")
        if positions is None or positions.ndim != 2 or not bool((positions.diff() < 0).any()):
            return None
    taken = inspect.signature(root.forward).parameters
    segments = find_segments(causal, tokens, kwargs, cached="use_cache" in taken and _caches(root, kwargs))
    if segments is None:
        return None
    asked = cache is not None or (kwargs.get("use_cache") and _caches(root, kwargs))
    if asked or root.config.is_encoder_decoder:
        reason = "a generation cache" if asked else "an encoder-decoder"
        instead = ", or pass use_cache=False" if asked and cache is None else ""
        raise UnsupportedModelError(
            f"got several documents packed into one row (position_ids that start again, or cu_seq_lens) with {reason}, "
            f"expected one document per row; pad them (DataCollatorWithPadding){instead}"
        )
    SEGMENTS.set(segments)
    changed: Values = {"use_cache": False} if "use_cache" in taken else {}
    if causal and "position_ids" in taken and not _given(kwargs, "position_ids"):
        changed["position_ids"] = positions_of(segments)
    return args, kwargs | changed


def forget_documents(root: object, args: object, output: object) -> None:
    """Clear `SEGMENTS` after a converted model's forward, even if it failed."""
    if not is_tracing():
        SEGMENTS.set(None)


def _caches(root: PreTrainedModel, kwargs: Mapping[str, object]) -> bool:
    """Tell whether a forward makes a generation cache by itself."""
    asked = kwargs.get("use_cache")
    asked = getattr(text_config(root.config), "use_cache", False) if asked is None else asked
    return bool(asked) and not (root.training and root.is_gradient_checkpointing)


def _given(kwargs: Mapping[str, object], name: str) -> bool:
    return kwargs.get(name) is not None


def whole_documents(mask_function: Callable[..., Tensor], segments: Tensor) -> bool:
    """Tell whether a transformers mask function means exactly: causal inside each document of `segments` [B, T].

    Windows, chunks and parts that see ahead differ. Only the ends of each document are tested, not T x T pairs.
    """
    batch, count = segments.shape
    rows = torch.arange(batch, device=segments.device)[:, None].expand(batch, count)
    here = torch.arange(count, device=segments.device).expand(batch, count)
    head, first = torch.zeros_like(here), here - positions_of(segments)
    before, after = (here - 1).clamp(min=0), (here + 1).clamp(max=count - 1)
    same = segments == segments.gather(1, before)
    sees_first, sees_last = mask_function(rows, head, here, first), mask_function(rows, head, here, before)
    sees_next = mask_function(rows, head, here, after) & (after != here)
    sees_other = mask_function(rows, head, here, (first - 1).clamp(min=0)) & (first > 0)
    return bool(sees_first.all() & (sees_last == same).all() & ~sees_next.any() & ~sees_other.any())


_BUCKETS = WeakIdKeyDictionary()


def buckets(segments: Tensor) -> list[Bucket]:
    """Lay out the documents of packed rows [B, 1, T], once for all layers."""
    layout: list[Bucket] = _BUCKETS.get(segments, [])
    if layout:
        return layout
    by_size: dict[int, list[tuple[int, int, int]]] = {}
    for row, numbers in enumerate(segments[:, 0]):
        values, lengths = torch.unique_consecutive(numbers, return_counts=True)
        start = 0
        for value, length in zip(values.tolist(), lengths.tolist(), strict=True):
            if value:
                size = max(_SHORT, 1 << (length - 1).bit_length())
                by_size.setdefault(size, []).append((row, start, length))
            start += length
    for documents in by_size.values():
        row, start, length = torch.tensor(documents).T
        counted = torch.arange(int(length.max()))
        mask = counted < length[:, None]
        tokens = torch.where(mask, row[:, None] * segments.shape[2] + start[:, None] + counted, 0)
        whole = bool(mask.all())
        layout.append((tokens.to(segments.device), None if whole else mask.to(segments.device), documents))
    _BUCKETS[segments] = layout
    return layout


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""q [N, H, L, D], k [N, K, L, D], v [N, K, L, V], mask [N, L] or None -> [N, L, H, V], weights [N, H, L, L] or None."""


def blocks(mask: Tensor) -> Tensor | None:
    """Read a mask that hides all tokens outside a token's document, as Pixtral uses for the images in a row.

    Args:
        mask: [B, 1, T, T], bool (true: seen) or numbers added to the scores (0: seen).

    Returns:
        The document of every token [B, 1, T], from 1; None for another kind of mask.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    first = seen.int().argmax(dim=-1)
    documents = (first != first.roll(1, -1)).int()
    documents[:, 0] = 1
    documents = documents.cumsum(dim=-1)
    return documents[:, None] if torch.equal(seen, documents[:, :, None] == documents[:, None, :]) else None


def attend_apart(attend: Attend, q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> tuple[Tensor, Tensor | None]:
    """Attend in every document of packed rows as if it were a separate row.

    Args:
        attend: the attention of ordinary rows.
        q: [B, H, T, D].
        k: [B, K, T, D].
        v: [B, K, T, V].
        segments: [B, 1, T] documents, as in `SEGMENTS`.

    Returns:
        [B, T, H, V], and weights [B, H, T, T] if `attend` returns them.
    """
    batch, heads, count, _ = q.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out: Tensor | None = None
    weights: Tensor | None = None
    for tokens, mask, documents in buckets(segments):
        queries, keys, values = (x[tokens].transpose(1, 2) for x in flat)
        outputs, seen = attend(queries, keys, values, mask)
        if out is None:
            out = outputs.new_zeros(batch * count, *outputs.shape[2:])
        real = (tokens, outputs) if mask is None else (tokens[mask], outputs[mask])
        out = out.index_put((real[0],), real[1])
        if seen is not None:
            weights = seen.new_zeros(batch, heads, count, count) if weights is None else weights
            for number, (row, start, length) in enumerate(documents):
                part = slice(start, start + length)
                weights[row, :, part, part] = seen[number, :, :length, :length]
    if out is None:
        # Padding alone.
        out = v.new_zeros(batch * count, heads, v.shape[3])
    return out.view(batch, count, *out.shape[1:]), weights
