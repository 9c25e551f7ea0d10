"""Masks per pair of tokens that say no more than where the padding is, and that nobody looks ahead.

Some hosts make such masks themselves, and some users hand them over: [B, 1, T, S] or [B, 1, 1, S], true or 0 where a
query sees a key, false or a number far below 0 where not.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HIDDEN = -1e4
"""From here downwards a score counts as hidden: fp16 masks of hosts begin there."""


def key_padding(mask: Tensor, causal: bool) -> Tensor | None:
    """Return what a mask says as a key padding mask, if it can be said so.

    Rows of queries that are padding themselves may say anything: no real token reads their outputs. Nothing is
    remembered between calls, as a mask may be changed in place: reading it costs less than a twentieth of a layer.

    Args:
        mask: [B, 1, T, S] or [B, 1, 1, S]; bool, or numbers that are added to the scores.
        causal: whether the attention looks at no later key in any case.

    Returns:
        [B, S], true where there is a token; None if the mask says more.
    """
    if mask.ndim != 4 or mask.shape[1] != 1:
        return None
    visible = mask[:, 0]
    if mask.dtype != torch.bool:
        plain = (visible == 0) | (visible <= _HIDDEN)
        if not bool(plain.all()):
            return None
        visible = visible == 0
    count, keys = visible.shape[1:]
    if count == 1:
        return visible[:, 0]
    if count > keys:
        # Cross-attention: queries are not among the keys.
        return None
    real = visible.any(dim=1)
    past = torch.ones(count, keys, dtype=torch.bool, device=mask.device)
    past = past.tril(keys - count) if causal else past
    # A padded query's row is nobody's business.
    asked = real[:, keys - count :, None]
    same = (visible == (past & real[:, None])) | ~asked
    return real if bool(same.all()) else None
