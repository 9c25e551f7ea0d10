"""Routed blocks: softmax for the blocks of keys that each query looks up, under the denominator of the window.

The tokens of a row, counted without padding, form blocks of B keys. Query i chooses the K blocks whose mean key has the
largest product with q_i (`linearize.ops.window_parts.chosen_blocks`). Their keys outside the window and the sinks get
the weight exp(scaling q_i . k_j) instead of the kernel's. The choice has no gradient; the chosen keys have.

Several queries compute both sums over all keys, each with the other's keys hidden. A query that follows a state reads
only the mean keys and the chosen blocks, and subtracts the kernel's weights of these from its sum:

    sum over chosen j of  (exp(scaling q_i . k_j) - exp(a_i + c_j) phi(q_i) . phi(k_j)) [v_j, 1]

A difference of large sums is inexact, so this is done only where the subtracted weights are not much larger than
softmax's weights of the same keys, as they are after training.

Mean keys that choose blocks are from Lu et al. 2025 (MoBA), https://arxiv.org/abs/2502.13189, section 2.2.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import FLOOR, group_queries, weigh, with_ones
from linearize.ops.window_parts import Mapped, Part, Unmapped, Window, block_means, chosen_blocks, pick, places_of

NUMBERS = 1 << 22
"""Most weights that are computed at once, if there are several queries."""
LARGEST = 100.0
"""The kernel's weights of the chosen keys are subtracted up to this many times softmax's: the rounding of fp32 is then
no more than 1e-5 of the row's sum."""


def appended(old: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Return old [B, K, N, D] with new [B, K, T, D] at the places from `before` [B] on: [B, K, N + T, D]."""
    index = before[:, None] + torch.arange(new.shape[2], device=new.device)
    longer = F.pad(old, (0, 0, 0, new.shape[2]))
    return longer.scatter(2, index[:, None, :, None].expand_as(new), new.to(old.dtype))


def routed_parts(
    queries: Mapped,
    given: Mapped | Unmapped,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    count: Tensor,
    window: Window,
    linear: Part | None = None,
) -> list[Part]:
    """Return the parts of all keys outside the window and the sinks: the chosen ones with softmax, the rest linear.

    Args:
        queries: mapped queries of H heads.
        given: the keys k and their features; or, after a state, how to map them.
        k: [B, K, S, D] all keys so far, in order; zeros from place `count` on.
        v: [B, K, S, V], their values.
        places: [B, T], the queries' places, counted without padding.
        count: [B], number of keys.
        window: the form of the attention.
        linear: the kernel's part of all these keys, if it is known: with it, one query reads only the chosen blocks.
    """
    means = block_means(k, count, window.block_size)
    if linear is not None and isinstance(given, Unmapped) and queries.x.shape[2] == 1:
        chosen, less = _looked_up(queries, given, k, v, places, count, means, window)
        size = less[0].abs().amax(dim=-1).log() + less[1]
        if bool((size <= chosen[0][..., -1].log() + chosen[1] + math.log(LARGEST)).all()):
            return [linear, chosen, (-less[0], less[1])]
    if isinstance(given, Unmapped):
        every = torch.arange(k.shape[2], device=k.device).expand(len(k), -1)
        given = Mapped(k, *given.map(k, None if given.places is None else every.to(given.places.dtype)))
    tokens, found, phi, scale, values = places.shape[1], [], given.phi, given.scale(), with_ones(v, True)
    step = max(1, NUMBERS // max(1, len(k) * queries.x.shape[1] * k.shape[2]))
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        # Causally, no query of the part sees a later key.
        seen = slice(min(k.shape[2], k.shape[2] - tokens + start + step) if window.causal else None)
        some = Mapped(queries.x[:, :, part], queries.phi[:, :, part], queries.scale()[:, :, part])
        own = chosen_blocks(some.x, means, places[:, part], count, window)
        own = own.repeat_interleave(window.block_size, dim=3)[..., : k.shape[2]][..., seen]
        far = _far(places[:, part], count, k.shape[2], window)[:, None, :, seen]
        softmax = softmax_sum(some, k[:, :, seen], values[:, :, seen], far & own, window.scaling)
        rest = kernel_sum(some, phi[:, :, seen], scale[:, :, seen], values[:, :, seen], far & ~own)
        found.append((rest, softmax))
    return [
        (torch.cat([mixed for mixed, _ in parts], dim=2), torch.cat([level for _, level in parts], dim=2))
        for parts in zip(*found, strict=True)
    ]


def _far(places: Tensor, count: Tensor, keys: int, window: Window) -> Tensor:
    """Return which of the keys [B, R, S] are outside the window and the sinks of queries at places [B, R]."""
    key = torch.arange(keys, device=places.device)
    far = ~window.holds(places[:, :, None] - key) & (key >= window.sinks)
    return far & (key < count[:, None])[:, None]


def _looked_up(
    queries: Mapped,
    given: Unmapped,
    k: Tensor,
    v: Tensor,
    places: Tensor,
    count: Tensor,
    means: Tensor,
    window: Window,
) -> tuple[Part, Part]:
    """Return softmax's and the kernel's part of the keys that one query has chosen."""
    heads, key_heads, size = queries.x.shape[1], k.shape[1], window.block_size
    chosen = chosen_blocks(queries.x, means, places, count, window)[:, :, 0]
    blocks = places_of(chosen, min(window.blocks, chosen.shape[2]))
    index = (size * blocks[..., None] + torch.arange(size, device=k.device)).flatten(2)
    visible = chosen.gather(2, blocks).repeat_interleave(size, dim=2) & (index < k.shape[2])
    index = index.clamp(max=k.shape[2] - 1)
    visible = visible & _far(places, count, k.shape[2], window).expand(-1, heads, -1).gather(2, index)
    # All that the query heads of a group have chosen, one after the other.
    index = index.unflatten(1, (key_heads, -1)).flatten(2)
    k, v = pick(k, index), pick(v, index)
    keys = Mapped(k, *given.map(k, None if given.places is None else index.to(given.places.dtype)))
    k, v, phi, scale = (
        x.unflatten(2, (heads // key_heads, -1)).flatten(1, 2) for x in (k, v, keys.phi, keys.scale()[..., None])
    )
    values = with_ones(v, True)
    softmax = softmax_sum(queries, k, values, visible[:, :, None], window.scaling)
    return softmax, kernel_sum(queries, phi, scale[..., 0], values, visible[:, :, None])


def softmax_sum(queries: Mapped, k: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Part:
    """Return the part of the visible keys [B, H, R, S] of k [B, K or H, S, D] with softmax's weights."""
    hidden = ~_grouped(visible, k.shape[1])
    scores = (_grouped(queries.x.float() * scaling, k.shape[1]) @ k.float().mT).masked_fill(hidden, FLOOR)
    # Above FLOOR, so that the weights of a query without any key are zero.
    top = scores.detach().amax(dim=-1).clamp(min=FLOOR / 2)
    return _summed(torch.exp(scores - top[..., None]), values, hidden, top, visible.shape[1])


def kernel_sum(queries: Mapped, phi: Tensor, scale: Tensor, values: Tensor, visible: Tensor) -> Part:
    """Return the part of the visible keys [B, H, R, S], of features [B, K or H, S, F], with the kernel's weights."""
    hidden = ~_grouped(visible, phi.shape[1])
    scales = scale[:, :, None].expand_as(hidden).masked_fill(hidden, FLOOR)
    top = scales.detach().amax(dim=-1).clamp(min=FLOOR / 2)
    products = (_grouped(queries.phi.float(), phi.shape[1]) @ phi.float().mT).masked_fill(hidden, 0.0)
    mixed, level = _summed(products * torch.exp(scales - top[..., None]), values, hidden, top, visible.shape[1])
    return mixed, queries.scale() + level


def _grouped(x: Tensor, heads: int) -> Tensor:
    """View x [B, H, R, X] as [B, K, H / K R, X]."""
    return group_queries(x, heads).flatten(2, 3)


def _summed(weights: Tensor, values: Tensor, hidden: Tensor, level: Tensor, heads: int) -> Part:
    """Return weighted values [B, H, R, V + 1] and their log-scale [B, H, R], given `_grouped` weights."""
    mixed, groups = weigh(weights[:, :, None], values, hidden)[:, :, 0], (heads // weights.shape[1], -1)
    return mixed.unflatten(2, groups).flatten(1, 2), level.unflatten(2, groups).flatten(1, 2)
