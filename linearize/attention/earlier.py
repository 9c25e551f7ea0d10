"""Masks over tokens that a state has already seen: followed where it still holds each token, and refused elsewhere.

A sum cannot forget a token, or take in one that was padding. So each state remembers what was padding, and a later mask
must say the same. Another one is followed if the state can be computed again from the tokens that it holds: all of them
in the window, the sinks and the exact keys, in a block, in heads that keep softmax, with routed blocks, or recorded
for a crop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.attention.cache import Fold, LinearStateLayer, Recorded, State
from linearize.core.errors import ConfigError
from linearize.ops.state import real_first


def mask_earlier(cache: LinearStateLayer, mask: Tensor | None, new: int, key_heads: int, fold: Fold) -> None:
    """Make the state before the new tokens follow a mask, and remember which new tokens are padding.

    Args:
        cache: the state, before the new tokens; `cache.tokens` counts them.
        mask: [B, S] bool on the CPU, true at tokens; None if nothing is masked. If it has fewer columns than there are
            tokens, it only covers the last ones.
        new: number of new tokens.
        key_heads: number of key heads K.
        fold: computes states.

    Raises:
        ConfigError: if a sum would have to forget a token or to take in one that was padding.
    """
    before = cache.tokens - new
    whole = mask is None or mask.shape[1] >= cache.tokens
    own = None if mask is None else mask[:, : cache.tokens][:, -new:]
    if whole and not _unchanged(None if mask is None else mask[:, :before], cache.padding):
        known = cache.padding if mask is None else mask
        assert known is not None
        old = _padding(cache, len(known), before)
        _follow(cache, old, torch.ones_like(old) if mask is None else mask[:, :before], key_heads, fold)
    if own is not None and not bool(own.all()):
        cache.padding = torch.cat([_padding(cache, len(own), before), own], dim=1)


def _unchanged(mask: Tensor | None, padding: Tensor | None) -> bool:
    if padding is None or mask is None:
        return padding is None and (mask is None or bool(mask.all()))
    known = padding.shape[1]
    return torch.equal(mask[:, :known], padding) and bool(mask[:, known:].all())


def _padding(cache: LinearStateLayer, batch: int, before: int) -> Tensor:
    """Return the mask [B, before] that the state was made with."""
    mask = torch.ones(batch, before, dtype=torch.bool)
    if cache.padding is not None:
        mask[:, : cache.padding.shape[1]] = cache.padding
    return mask


def _follow(cache: LinearStateLayer, old: Tensor, mask: Tensor, key_heads: int, fold: Fold) -> None:
    """Compute the state again with another mask [B, T] than the `old` one."""
    recorded = cache.recorded
    count = 0 if recorded is None else recorded.length
    held = None
    if not bool((mask & ~old).any()):
        if recorded is not None and torch.equal(mask[:, : mask.shape[1] - count], old[:, : mask.shape[1] - count]):
            cache.change_recorded(mask[:, mask.shape[1] - count :].to(recorded.k.device))
            cache.padding = mask.clone()
            return
        held = held_tokens(cache.state, key_heads, old) if recorded is None and cache.state is not None else None
    if held is None:
        raise ConfigError(
            "attention_mask: got another mask for tokens that the generation cache has already seen, expected that of "
            "the earlier calls and new columns: linear attention adds tokens up and cannot take one out or in; begin "
            "again with a new cache and all tokens"
        )
    there = held.mask.cpu()
    if held.length == mask.shape[1] and torch.equal(there, old):
        there = mask
    else:
        # The state holds the tokens in their order, without padding.
        place = (there.cumsum(dim=1) - 1).clamp(min=0)
        there = there & mask.gather(1, real_first(old)).gather(1, place)
    cache.state, cache.padding = fold(None, held._replace(mask=there.to(held.k.device))), mask.clone()


def held_tokens(state: State, key_heads: int, mask: Tensor) -> Recorded | None:
    """Return keys and values of all the tokens of a mask [B, T] in their order; None unless the state holds each."""
    if "softmax_k" in state and state["softmax_k"].shape[1] == key_heads:
        parts = [(state["softmax_k"], state["softmax_v"], state["softmax_mask"])]
    elif "all_k" in state and state["all_k"].shape[1] == key_heads:
        # The memory has room for more tokens.
        k, v = (state[name][:, :, : int(state["tokens"].max())] for name in ("all_k", "all_v"))
        parts = [(k, v, torch.arange(k.shape[2], device=k.device) < state["tokens"][:, None])]
    elif "block_k" in state:
        k = state["block_k"]
        parts = [(k, state["block_v"], torch.arange(k.shape[2], device=k.device) < state["filled"][:, None])]
    else:
        parts = [
            (state[f"{name}_k"], state[f"{name}_v"], state[f"{name}_mask"])
            for name in ("kept", "ring")
            if f"{name}_k" in state
        ]
        if "sink_k" in state:
            k, left = state["sink_k"], state["tokens"] - state["ring_k"].shape[2]
            # Sinks that are still in the window are in the ring.
            parts.insert(0, (k, state["sink_v"], torch.arange(k.shape[2], device=k.device) < left[:, None]))
    if not parts:
        return None
    keys, values, there = zip(*parts, strict=True)
    found = Recorded(torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(there, dim=1))
    return found if torch.equal(found.mask.sum(dim=1).cpu(), mask.sum(dim=1)) else None
