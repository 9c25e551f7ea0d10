"""Building blocks of attention with a softmax window, in both directions: form, state, tokens, sums, the reference.

A *part* is a sum of weighted values [B, H, T, V + 1], whose last column is the sum of the weights, and its log-scale
[B, H, T]: it means `exp(log-scale) * sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.state import (
    EPS,
    FLOOR,
    divide,
    group_queries,
    inverse,
    keys_up_to,
    real_first,
    real_tokens,
    take,
    without_padding,
)

TINY = 1e-30
"""A part of smaller magnitude, relative to its own shift, counts as absent."""

Part = tuple[Tensor, Tensor]
"""The sum and the log-scale of a part."""


@dataclass(frozen=True)
class Window:
    """The form of the attention.

    Attributes:
        size: W tokens, as `linearize.ops.window` defines them.
        scaling: scaling factor of the softmax scores.
        causal: whether query i sees only keys up to its own position.
        eps: smallest magnitude of a row's sum, relative to its largest part.
        sinks: number of first tokens that get softmax weights.
        exact_keys: number S of keys per head outside the window that also do (`linearize.ops.window_causal`).
        blocks: number of blocks of keys that each query looks up (`linearize.ops.routed`).
        block_size: keys per block; causally at most as many as the window has.
        routed_heads: the query heads that look blocks up; () for all.
    """

    size: int
    scaling: float
    causal: bool
    eps: float = EPS
    sinks: int = 0
    exact_keys: int = 0
    blocks: int = 0
    block_size: int = 8
    routed_heads: tuple[int, ...] = ()

    def holds(self, distance: Tensor) -> Tensor:
        """Tell which keys are in the window of a query, given its place minus theirs [..., S]; later keys count too."""
        return distance < self.size if self.causal else distance.abs() <= self.size // 2

    def remembered(self, heads: int, key_heads: int) -> list[int]:
        """Return which of `key_heads` key heads are looked up, if there are `heads` query heads."""
        return sorted({head // (heads // key_heads) for head in self.routed_heads or range(heads)})


class Mapped(NamedTuple):
    """Queries or keys, and their features.

    Attributes:
        x: [B, H, T, D].
        phi: [B, H, T, F].
        log_scale: [B, H, T] or None (all 0).
        places: [B, T], the places of keys, counted without padding; None if features do not depend on them.
    """

    x: Tensor
    phi: Tensor
    log_scale: Tensor | None = None
    places: Tensor | None = None

    def taken(self, order: Tensor) -> Mapped:
        """Return the tokens `order` [B, N]."""
        places = None if self.places is None else self.places.gather(1, order)
        return Mapped(take(self.x, order), take(self.phi, order), take(self.scale(), order), places)

    def scale(self) -> Tensor:
        """Return the log-scale [B, H, T] in fp32."""
        if self.log_scale is None:
            return torch.zeros(self.phi.shape[:3], device=self.phi.device)
        return self.log_scale.float()


KeyMap = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Maps keys [B, K, N, D] -> features [B, K, N, F] and log-scales [B, K, N] or None (all 0).

The second argument is None or their places, [B, N] or, if each head has keys of its own, [B, K, N].
"""


class Unmapped(NamedTuple):
    """Keys [B, K, T, D] after a state, which are mapped when they leave the window; `places` as in `Mapped`."""

    x: Tensor
    map: KeyMap
    places: Tensor | None = None

    def taken(self, order: Tensor) -> Unmapped:
        """Return the tokens `order` [B, N]."""
        places = None if self.places is None else self.places.gather(1, order)
        return Unmapped(take(self.x, order), self.map, places)


class WindowState(NamedTuple):
    """The state for decoding: a linear state of the tokens beyond the window, the last W tokens, sinks and exact keys.

    It holds keys without features: a key is mapped when it leaves.

    Attributes:
        kv: as in `linearize.ops.state.State`.
        log_scale: as in `linearize.ops.state.State`.
        ring_k: [B, K, W, D], the newest token last.
        ring_v: [B, K, W, V].
        ring_mask: [B, W] bool, true at tokens.
        sink_k: [B, K, S, D]; None without sinks.
        sink_v: [B, K, S, V]; None without sinks.
        tokens: [B] number of tokens so far; None without sinks and routed blocks.
        kept_k: [B, K, S, D] the exact keys outside the window; this and all attributes below are None without them.
        kept_v: [B, K, S, V].
        kept_scale: [B, K, S] fp32, their log-scales.
        kept_mask: [B, S] bool, true at exact keys.
        kept_place: [B, K, S] fp32, their places; None too if features do not depend on them.
        all_k: [B, M, N, D] all keys in order, then zeros, of the M key heads that are looked up (all, unless only some
            heads look up); this and all below are None without routed blocks. N is a multiple of the block size.
        all_v: [B, M, N, V].
        channels: [B, M, D, N], all keys by channel.
    """

    kv: Tensor
    log_scale: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_mask: Tensor
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None
    tokens: Tensor | None = None
    kept_k: Tensor | None = None
    kept_v: Tensor | None = None
    kept_scale: Tensor | None = None
    kept_mask: Tensor | None = None
    kept_place: Tensor | None = None
    all_k: Tensor | None = None
    all_v: Tensor | None = None
    channels: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> WindowState:
        """Read what `present` returned; other tensors of a layer's state are ignored."""
        return cls(**{name: tensor for name, tensor in tensors.items() if name in cls._fields})

    def present(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Keys(NamedTuple):
    """Keys [B, K, T, D] with their values [B, K, T, V] and mask [B, T]."""

    k: Tensor
    v: Tensor
    mask: Tensor

    def part(self, tokens: slice) -> Keys:
        """Return some of the tokens."""
        return Keys(self.k[:, :, tokens], self.v[:, :, tokens], self.mask[:, tokens])

    def then(self, other: Keys) -> Keys:
        """Return these tokens followed by others."""
        k, v = torch.cat([self.k, other.k], dim=2), torch.cat([self.v, other.v], dim=2)
        return Keys(k, v, torch.cat([self.mask, other.mask], dim=1))

    def picked(self, tokens: Tensor, mask: Tensor) -> Keys:
        """Return tokens [B, K, N] that each head chose for itself; `mask` [B, N] is false where there is no token."""
        return Keys(pick(self.k, tokens), pick(self.v, tokens), mask)

    def taken(self, order: Tensor) -> Keys:
        """Return the tokens `order` [B, N]."""
        return Keys(take(self.k, order), take(self.v, order), self.mask.gather(1, order))

    def padded(self, before: int) -> Keys:
        """Return these tokens after `before` empty places."""
        ends = (before, 0)
        return Keys(F.pad(self.k, (0, 0, *ends)), F.pad(self.v, (0, 0, *ends)), F.pad(self.mask, ends))


def pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Pick tokens [B, K, N] of x [B, K, T, D] or [B, K, T], separately for each head."""
    return x.gather(2, tokens if x.ndim == 3 else tokens[..., None].expand(-1, -1, -1, x.shape[-1]))


def collect(keys: Keys, sinks: int, state: WindowState | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take the sinks from the state if it has them, otherwise from these keys, whose padding comes last.

    Returns:
        Keys and values of the first S tokens, which of them exist so far [B, S], and how many tokens are before these
        keys [B].
    """
    count = keys.mask.sum(dim=1)
    slot = torch.arange(sinks, device=keys.mask.device).expand(count.shape[0], -1)
    before = torch.zeros_like(count) if state is None or state.tokens is None else state.tokens
    # Sinks that do not exist yet are masked; any token will do in their place.
    order = (slot - before[:, None]).clamp(min=0, max=keys.k.shape[2] - 1)
    k, v = take(keys.k, order), take(keys.v, order)
    if state is not None and state.sink_k is not None and state.sink_v is not None:
        old = (slot < before[:, None])[:, None, :, None]
        k, v = torch.where(old, state.sink_k.to(k.dtype), k), torch.where(old, state.sink_v.to(v.dtype), v)
    return k, v, slot < (before + count)[:, None], before


Columns = tuple[Tensor, Tensor, Tensor]
"""Keys that many queries see, wherever they are: k [B, K, S, D], v [B, K, S, V], visible [B, 1 or K, T, S]."""


def join(parts: list[Part]) -> Tensor:
    """Add the parts with one shift, the true magnitude of the largest part: [B, H, T, V + 1]."""
    mixed, shift = map(torch.stack, zip(*parts, strict=True))
    size = mixed.detach().abs().amax(dim=-1)
    # An absent part is left out, and so is its gradient: its shift may be any number, so its gradient could overflow.
    absent = size <= TINY
    levels = torch.where(absent, FLOOR, shift.detach() + size.clamp(min=TINY).log())
    factors = torch.exp((shift - levels.amax(dim=0)).masked_fill(absent, FLOOR))
    return (mixed * factors[..., None]).sum(dim=0)


def strongest(priority: Tensor, candidates: Tensor, slots: int) -> Tensor:
    """Tell which keys are among the `slots` strongest candidates of their row: [..., T] bool from [..., T]."""
    # Candidates come before other keys, whatever their priority.
    least = torch.finfo(torch.float32).min
    priority = ranks(priority).clamp(min=least).masked_fill(~candidates, -torch.inf)
    # ONNX has no stable sort, but its own puts the first of equal keys first.
    stable = {} if torch.compiler.is_exporting() else {"stable": True}
    order = priority.sort(dim=-1, descending=True, **stable).indices
    return candidates & (inverse(order) < slots)


def places_of(chosen: Tensor, slots: int) -> Tensor:
    """Return the places [B, K, S] of the chosen keys [B, K, T] in order, then places of other keys if too few."""
    return real_first(chosen)[..., :slots]


def ranks(priority: Tensor) -> Tensor:
    """Return priorities [..., T] without a gradient, in fp32, with NaN last."""
    return priority.detach().float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


CHANNELS = 8
"""Channels of a query by which it chooses blocks (docs/benchmarks/routed.md)."""


def by_channel(k: Tensor, window: Window) -> Tensor:
    """Return keys [B, K, S, D] by channel, [B, K, D, N], with zeros up to whole blocks."""
    return F.pad(k, (0, 0, 0, -k.shape[2] % window.block_size)).mT.contiguous()


def block_scores(q: Tensor, channels: Tensor, count: Tensor, size: int) -> Tensor:
    """Return the scores [B, H, R, M] of blocks of `size` keys for queries [B, H, R, D].

    A block's score is its largest product of a key with the query, in the `CHANNELS` largest channels of the query
    alone. The keys are given by channel, [B, K, D, M * size]; those from place `count` [B] on do not count.
    """
    (heads, rows, width), key_heads = q.shape[1:], channels.shape[1]
    q = q.float()
    if width > CHANNELS:
        # Of equally large channels the first, in whole rows and in steps: half precision has many of them.
        index = q.abs().sort(dim=-1, descending=True, stable=True).indices[..., :CHANNELS]
        if rows * heads * CHANNELS < width * key_heads:
            # Few queries: read only their channels.
            own = channels[:, :, None].expand(-1, -1, heads // key_heads, -1, -1).flatten(1, 2)
            own = own.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, channels.shape[3]))
            own = own.unflatten(2, (rows, CHANNELS)).float()
            products = (q.gather(-1, index)[..., None, :] @ own)[..., 0, :]
            return _block_maxima(products, count, size)
        q = torch.zeros_like(q).scatter(-1, index, q.gather(-1, index))
    products = group_queries(q, key_heads).flatten(2, 3) @ channels.float()
    return _block_maxima(products.unflatten(2, (heads // key_heads, -1)).flatten(1, 2), count, size)


def _block_maxima(products: Tensor, count: Tensor, size: int) -> Tensor:
    if size == 1:
        return products
    gone = torch.arange(products.shape[-1], device=products.device) >= count[:, None]
    return ranks(products).masked_fill(gone[:, None, None], -torch.inf).unflatten(3, (-1, size)).amax(dim=-1)


def best_blocks(scores: Tensor, places: Tensor, count: Tensor, window: Window) -> Tensor:
    """Return the candidates of highest score, as `choose_blocks` does.

    Args:
        scores: [B, H, R, M], of the first M blocks.
        places: [B, R], places of the queries.
        count: [B], number of keys.
        window: the form of the attention.
    """
    first = window.block_size * torch.arange(scores.shape[-1], device=scores.device)
    last = torch.minimum(first + window.block_size, count[:, None]) - 1
    place, least = places[:, :, None], torch.finfo(torch.float32).min
    far = ~(window.holds(place - first) & window.holds(place - last[:, None]))
    far = far & ((last >= window.sinks) & (first < count[:, None]))[:, None]
    scores = scores.nan_to_num(least, math.inf, least).masked_fill(~far[:, None], -torch.inf)
    return _highest(scores, min(window.blocks, scores.shape[-1]))


CHOSEN_AT_ONCE = 1 << 20
"""Most scores of keys that are computed at once."""


@torch.no_grad()
def choose_blocks(q: Tensor, channels: Tensor, places: Tensor, count: Tensor, window: Window) -> Tensor:
    """Return the blocks that each query looks up: those of highest score.

    Only blocks with a key outside the window and after the sinks are candidates. Causally such a block is complete, as
    it has no more keys than the window. Of equal blocks, the first are chosen.

    Args:
        q: queries [B, H, R, D].
        channels: [B, K, D, N], keys by channel; N is a multiple of the block size.
        places: [B, R], places of the queries, counted without padding; causally, R - r places after query r must exist.
        count: [B], number of keys.
        window: the form of the attention.

    Returns:
        [B, H, R, n] int64, numbers of blocks in any order, -1 where there are too few candidates; n is at most K.
    """
    if window.routed_heads:
        return in_heads(choose_blocks, q, channels, places, count, window)
    (batch, heads, rows, _), size, found = q.shape, window.block_size, []
    blocks = channels.shape[3] // size
    step = max(1, CHOSEN_AT_ONCE // max(1, batch * heads * channels.shape[3]))
    for start in range(0, rows, step):
        part, seen = slice(start, min(start + step, rows)), blocks
        if window.causal:
            # No query of the part has a candidate after its window.
            seen = max(0, (size * blocks - rows + part.stop - 1 - window.size) // size + 1)
        scores = block_scores(q[:, :, part], channels[..., : seen * size], count, size)
        best = best_blocks(scores, places[:, part], count, window)
        found.append(F.pad(best, (0, min(window.blocks, blocks) - best.shape[-1]), value=-1))
    return torch.cat(found, dim=2)


Choose = Callable[[Tensor, Tensor, Tensor, Tensor, Window], Tensor]
"""Does what `choose_blocks` does."""


def in_heads(choose: Choose, q: Tensor, channels: Tensor, places: Tensor, count: Tensor, window: Window) -> Tensor:
    """Return what `choose` returns for the heads that look up, and -1 in the others."""
    own, group = list(window.routed_heads), q.shape[1] // channels.shape[1]
    keys = channels[:, [head // group for head in own]]
    found = choose(q[:, own], keys, places, count, replace(window, routed_heads=()))
    chosen = found.new_full((*q.shape[:3], found.shape[3]), -1)
    chosen[:, own] = found
    return chosen


def _highest(scores: Tensor, slots: int) -> Tensor:
    """Return the places [..., slots] of the highest scores [..., M], the first of equal ones; -1 where it is -inf."""
    more = min(slots + 1, scores.shape[-1])
    # First the highest of every eight: they hold all the highest scores, and `topk` is slow on long rows.
    if scores.shape[-1] > 16 * more:
        eights = F.pad(scores, (0, -scores.shape[-1] % 8), value=-torch.inf).unflatten(-1, (-1, 8))
        groups = eights.amax(dim=-1).topk(more, dim=-1, sorted=False).indices
        best = eights.gather(-2, groups[..., None].expand(*groups.shape, 8)).flatten(-2).topk(more, dim=-1)
        values = best.values
        index = 8 * groups.gather(-1, best.indices // 8) + best.indices % 8
    else:
        values, index = scores.topk(more, dim=-1)
    if more > slots:
        equal = (values[..., slots] == values[..., slots - 1]) & (values[..., slots] > -torch.inf)
        values, index = values[..., :slots], index[..., :slots]
        if bool(equal.any()):
            index[equal] = scores[equal].sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    return index.masked_fill(values == -torch.inf, -1)


def are_chosen(chosen: Tensor, blocks: int) -> Tensor:
    """Tell which of M blocks are among the chosen ones [..., n]: [..., M] bool."""
    marks = torch.zeros(*chosen.shape[:-1], blocks + 1, dtype=torch.bool, device=chosen.device)
    return marks.scatter(-1, chosen + 1, True)[..., 1:]


def window_weights(
    queries: Mapped,
    keys: Mapped,
    window: Window,
    *,
    key_padding_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return the T x T weights of `linearize.ops.window.window_attention`, for the same arguments: the reference.

    Args:
        queries: as there, or those of the tokens `rows` only.
        keys: as there.
        window: as there.
        key_padding_mask: as there.
        rows: the places [R] of the queries among the tokens; None for all.

    Returns:
        Weights [B, H, R, T] in fp32, rows summing to one.
    """
    q, phi_q, k, phi_k = queries.x, queries.phi, keys.x, keys.phi
    groups = q.shape[1] // k.shape[1]
    real = real_tokens(k, key_padding_mask)
    k, phi_k = (without_padding(x, key_padding_mask) for x in (k, phi_k))
    scale = keys.scale().masked_fill(~real[:, None], 0.0)
    place = real.long().cumsum(dim=-1)
    of_queries, mask = place, key_padding_mask
    if rows is not None:
        of_queries, mask = place[:, rows], None if mask is None else mask[:, rows]
    q = without_padding(q, mask)
    distance = of_queries[:, :, None] - place[:, None, :]
    near = window.holds(distance)
    sinks = (place <= window.sinks)[:, None]
    visible = real[:, None].expand_as(near)
    if window.causal:
        visible = visible & keys_up_to(k, rows)
    candidates = (visible & ~sinks & (~near if window.causal else torch.ones_like(near)))[:, None]
    near, visible = (near | sinks)[:, None], visible[:, None]
    if window.exact_keys:
        form = (-1, k.shape[1], q.shape[2], -1)
        kept = strongest(scale[:, :, None].expand(form), candidates.expand(form), window.exact_keys)
        near = near | kept.repeat_interleave(groups, dim=1)
    if window.blocks:
        own, channels = (place - 1).clamp(min=0) // window.block_size, by_channel(take(k, real_first(real)), window)
        chosen = choose_blocks(q, channels, (of_queries - 1).clamp(min=0), place[:, -1], window)
        chosen = are_chosen(chosen, channels.shape[3] // window.block_size)
        near = near | chosen.gather(3, own[:, None, None].expand(*chosen.shape[:3], -1))
    products = phi_q.float() @ phi_k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    scores = (q.float() * window.scaling) @ k.float().repeat_interleave(groups, 1).transpose(-1, -2)
    exponents = queries.scale()[..., None] + scale.repeat_interleave(groups, 1)[..., None, :]
    factors = torch.where(near, torch.ones_like(products), products).masked_fill(~visible, 0.0)
    exponents = torch.where(near, scores, exponents)
    size = factors.detach().abs()
    levels = torch.where(size <= TINY, FLOOR, exponents.detach() + size.clamp(min=TINY).log())
    shift = levels.amax(dim=-1, keepdim=True)
    weights = factors * torch.exp((exponents - shift).clamp(max=80.0))
    return divide(torch.cat([weights, weights.sum(dim=-1, keepdim=True)], dim=-1), window.eps)
