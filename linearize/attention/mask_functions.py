"""What transformers' mask functions say, read from the functions they are composed of instead of T x T pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils as masks
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

MaskFunction = Callable[..., Any]
"""Row, head, query and key -> whether the query sees the key."""

_NONE = torch.zeros(1, dtype=torch.long)
_AND = masks.and_masks(causal_mask_function).__code__
# New in transformers 5.24; before it, positions are not remapped.
_remap: Callable[..., MaskFunction] | None = getattr(masks, "remap_positions_for_packed_sequence", None)
_REMAP = None if _remap is None else _remap(causal_mask_function, _NONE).__code__
_PACKED = masks.packed_sequence_mask_function(_NONE).__code__
_LOCAL = {
    masks.sliding_window_overlay(1).__code__,
    masks.sliding_window_bidirectional_overlay(1).__code__,
    masks.chunked_overlay(1, _NONE).__code__,
}


def without_window(function: MaskFunction, *, packed: bool) -> MaskFunction:
    """Return what a mask function is without its sliding window or chunks.

    Args:
        function: a mask function of transformers, or a host's own.
        packed: whether its documents, if it has some, are known from elsewhere and can be left out.

    Returns:
        `causal_mask_function` or `bidirectional_mask_function`; `function` itself if it says anything else, such as
        images that are read in both directions.
    """
    parts = set(_parts(function))
    plain = {causal_mask_function.__code__, bidirectional_mask_function.__code__}
    if parts - plain - _LOCAL - ({_REMAP, _PACKED} if packed else set()) or not parts & plain:
        return function
    return causal_mask_function if causal_mask_function.__code__ in parts else bidirectional_mask_function


def _parts(function: MaskFunction) -> Iterator[CodeType | None]:
    """Return the code of the functions whose intersection a mask function is; a union is one function."""
    code = getattr(function, "__code__", None)
    held = {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if code is _AND:
        for part in held["mask_functions"].cell_contents:
            yield from _parts(part)
        return
    yield code
    if code is not None and code is _REMAP:
        yield from _parts(held["mask_function"].cell_contents)
