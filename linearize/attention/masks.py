"""Attention masks: reads the masks of hosts as key padding, and builds the masks of softmax from key padding.

Some hosts build masks per pair of tokens themselves, and some users pass them: [B, 1, T, S] or [B, 1, 1, S], true or 0
where a query sees a key, false or a very negative number elsewhere. If such a mask only marks padding and hides later
keys, linear attention can follow it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from linearize.ops.state import is_tracing

_ON_CPU = WeakIdKeyDictionary()

_HIDDEN = -1e4
"""Mask values up to this one hide a key; it is high enough for fp16 masks."""


def key_padding(mask: Tensor, causal: bool) -> Tensor | None:
    """Return the key padding mask that is equivalent to a mask per pair of tokens, if there is one.

    Rows of padding may contain anything, because no token reads their outputs. Nothing is cached between calls, because
    a mask may be changed in place; reading it takes less than a twentieth of a layer's time.

    Args:
        mask: [B, 1, T, S] or [B, 1, 1, S]; bool, or numbers that are added to the scores.
        causal: whether the attention never sees later keys.

    Returns:
        [B, S], true at tokens; None if the mask says more.
    """
    if mask.ndim != 4 or mask.shape[1] != 1:
        return None
    visible = mask[:, 0]
    if mask.dtype != torch.bool:
        if not bool(((visible == 0) | (visible <= _HIDDEN)).all()):
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
    # Ignore rows of padding.
    asked = real[:, keys - count :, None]
    same = (visible == (past & real[:, None])) | ~asked
    return real if bool(same.all()) else None


def keep_on_cpu(mask: Tensor, copy: Tensor) -> Tensor:
    """Return a mask, and remember its copy on the CPU for as long as it exists."""
    _ON_CPU[mask] = copy
    return mask


def kept_on_cpu(mask: Tensor | None) -> Tensor | None:
    """Return the copy of a mask that `keep_on_cpu` remembers, or None."""
    return None if mask is None or mask.is_cpu or is_tracing() else _ON_CPU.get(mask)


def is_local(visible: Tensor, real: Tensor, causal: bool) -> bool:
    """Tell whether a mask hides nothing but padding and keys far from the query, as sliding windows and chunks do.

    Args:
        visible: [B, T, S] bool, true where a query sees a key; the queries are the last T of the keys.
        real: [B, T] bool, true at tokens.
        causal: whether later keys must be hidden.
    """
    count, keys = visible.shape[1:]
    before = visible[:, :, : keys - count].any(dim=1)
    real = torch.cat([before, real], dim=1)
    asked = real[:, keys - count :, None]
    later = ~torch.ones(count, keys, dtype=torch.bool, device=visible.device).tril(keys - count)
    if causal and bool((visible & later & asked).any()):
        return False
    # Every token that a query sees lies in one run of tokens around it.
    hidden = (~visible & real[:, None]).int()
    past = hidden.masked_fill(later, 0).flip(-1).cumsum(-1).flip(-1)
    ahead = hidden.masked_fill(~later, 0).cumsum(-1)
    apart = visible & asked & torch.where(later, ahead > 0, past > 0)
    return not bool(apart.any())


def past_keys(q: Tensor, k: Tensor) -> Tensor:
    """Return [T, S] bool, true at keys up to each query's position; q [B, H, T, D] are the last T of k's S tokens."""
    tokens, keys = q.shape[2], k.shape[2]
    return torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)


def visible_keys(q: Tensor, k: Tensor, real: Tensor | None, *, causal: bool) -> tuple[Tensor | None, bool]:
    """Return the mask of visible keys and the flag `is_causal` for SDPA, which takes only one of the two.

    Args:
        q: [B, H, T, D], the last T of the S tokens.
        k: [B, K, S, D].
        real: [B, 1, 1, S] bool, true at tokens, or None.
        causal: whether a query sees only keys up to its own position.

    Returns:
        [B or 1, 1, T or 1, S] bool, or None. Every query sees at least one key: softmax over no keys is NaN.
    """
    tokens, keys = q.shape[2], k.shape[2]
    # A single query is the last token and sees every key.
    if not causal or tokens == 1:
        # In a row that is all padding, every key is visible.
        return None if real is None else real | ~real.any(dim=-1, keepdim=True), False
    if real is None and tokens == keys:
        return None, True
    past = past_keys(q, k)
    if real is None:
        return past[None, None], False
    # A left-padded query sees itself.
    return past & real | past & ~past.tril(keys - tokens - 1), False


def softmax_weights(query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, causal: bool) -> Tensor:
    """Return the softmax weights [B, H, T, S], which SDPA does not return; q [B, H, T, D], k [B, K, S, D]."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2) * scaling
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.float().softmax(dim=-1).to(query.dtype)
