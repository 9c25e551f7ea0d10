"""Softmax for near keys, a feature map for far keys: both share one denominator, and the cost is linear in T.

The unnormalised weight of key j for query i is

    exp(scaling q_i . k_j)                               if j is in the window of i,
    exp(a_i + c_j) phi(q_i) . phi(k_j)                   otherwise (a, c: log-scales of query and key),

and every row is divided by its sum. Causally the window of i is the last W tokens, i - W < j <= i. Bidirectionally it
is |i - j| <= W // 2, so W tokens for odd W and W + 1 for even W. The first S tokens, the sinks, get softmax weights
from every query (causally: from all later tokens), and so do exact keys (`linearize.ops.window_causal`) and routed
blocks (`linearize.ops.routed`). Tokens are counted without padding. All parts are computed with one shift m_i, the
largest of their magnitudes, which cancels.

Bidirectionally the keys before the window and those after it are two causal sums, one from each end. Nothing is ever
subtracted (except in `linearize.ops.routed`): a difference of large sums would be inexact.

Papers: the hybrid is from Zhang et al. 2024 (LoLCATs), https://arxiv.org/abs/2410.10254, section 3.3, which does not
divide the linear part by exp(m_i). Sinks are from Xiao et al. 2024, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.routed import Memory, routed_parts
from linearize.ops.state import FLOOR, State, divide, empty_state, put_back, real_first, real_tokens, without_padding
from linearize.ops.window_causal import causal_parts, contest, kernel_part, softmax_part
from linearize.ops.window_parts import (
    Choose,
    Keys,
    Mapped,
    Unmapped,
    Window,
    WindowState,
    are_chosen,
    by_channel,
    choose_blocks,
    collect,
    join,
    pick,
    places_of,
    strongest,
)


def window_attention(
    queries: Mapped,
    keys: Mapped | Unmapped,
    v: Tensor,
    window: Window,
    *,
    key_padding_mask: Tensor | None = None,
    initial_state: WindowState | State | None = None,
    choose: Choose = choose_blocks,
) -> tuple[Tensor, WindowState | None]:
    """Attend with softmax inside a window and with a feature map outside it, without a T x T matrix.

    Args:
        queries: mapped queries of H heads.
        keys: keys of K heads, K divides H; after a state they must be unmapped, as the state holds keys to map.
        v: values [B, K, T, V].
        window: the form of the attention: size, direction, sinks and exact keys.
        key_padding_mask: [B, T], true or 1 at tokens; None if there is no padding.
        initial_state: causally the state before these tokens; else a state of keys that are far from all of them.
        choose: how routed blocks are chosen.

    Returns:
        Output [B, H, T, V] in `v`'s dtype, and the state after the last token; None if not causal.
    """
    mask = real_tokens(v, key_padding_mask)
    padded = key_padding_mask is not None
    q, k, v = [without_padding(x, key_padding_mask) if padded else x for x in (queries.x, keys.x, v)]
    side, run = queries._replace(x=q), Keys(k, v, mask)
    order = real_first(mask) if padded and v.shape[2] > 1 else None
    if order is not None:
        side, keys, run = side.taken(order), keys.taken(order), run.taken(order)
    state = None
    if window.causal:
        assert not isinstance(initial_state, State)
        parts, state = causal_parts(side, keys, run, window, initial_state, choose)
    else:
        assert isinstance(keys, Mapped) and not isinstance(initial_state, WindowState)
        parts = bidirectional_parts(side, keys, run, window, initial_state, choose)
    out = divide(join(parts), window.eps)
    return (out if order is None else put_back(out, order)).to(v.dtype), state


def bidirectional_parts(
    queries: Mapped,
    given: Mapped,
    keys: Keys,
    window: Window,
    far: State | None = None,
    choose: Choose = choose_blocks,
) -> list[tuple[Tensor, Tensor]]:
    """Return the parts: softmax inside the window, of sinks and of exact keys, then the kernel before and after it."""
    tokens, columns = queries.x.shape[2], []
    phi, scale, mask = given.phi, given.scale(), keys.mask
    # A window wider than the text is cut to the text: no key is further away than T - 1 tokens.
    half = window.size // 2 if isinstance(tokens, torch.SymInt) else min(window.size // 2, tokens - 1)
    place = torch.arange(tokens, device=keys.mask.device)
    if window.sinks:
        k, v, there, _ = collect(keys, window.sinks, None)
        # A slice of `place` would do, but an exported graph would then refuse rows with fewer tokens than sinks.
        outside = (place[:, None] - torch.arange(window.sinks, device=place.device)).abs() > half
        columns.append((k, v, (outside & there[:, None])[:, None]))
        mask = mask & (place >= window.sinks)
    if window.exact_keys:
        chosen = strongest(scale.detach(), mask[:, None].expand_as(scale), window.exact_keys)
        # A row may have fewer tokens than exact keys; a traced graph does not know the length of its rows.
        slots = window.exact_keys if isinstance(tokens, torch.SymInt) else min(window.exact_keys, tokens)
        there = F.pad(chosen, (0, slots))
        index = places_of(there, slots)
        visible = ((place[:, None] - index[:, :, None]).abs() > half) & there.gather(2, index)[:, :, None]
        index = index.clamp(max=tokens - 1)
        columns.append((pick(keys.k, index), pick(keys.v, index), visible))
        phi, scale = phi.masked_fill(chosen[..., None], 0.0), scale.masked_fill(chosen, FLOOR)
    near = softmax_part(queries.x, keys, half, 2 * half + 1, window.scaling, columns)

    # Both ways at once: the keys after a query are those before it in the reversed order.
    def both(x: Tensor, tokens: int = 2) -> Tensor:
        return torch.cat([x, x.flip(tokens)])

    def gone(x: Tensor, tokens: int = 2) -> Tensor:
        """Shift keys, so that the place of each query holds the key that has just left its window."""
        ends = (0, 0) * (x.ndim - 1 - tokens) + (half + 1, 0)
        return F.pad(both(x, tokens), ends).narrow(tokens, 0, x.shape[tokens])

    phi, v, scale, mask = gone(phi), gone(keys.v), gone(scale), gone(mask, 1)
    past = empty_state(phi, v, scaled=True)
    if far is not None:
        # Keys that are far from every query, as those before the first token are.
        past = State(*(torch.cat([x, empty[len(x) :]]) for x, empty in zip(far, past, strict=True)))
    (mixed, level), _ = kernel_part(both(queries.phi), phi, v, scale, mask, past)
    # ONNX has no translation for `chunk` along an axis of unknown size.
    mixed, level = (x.unflatten(0, (2, -1)) for x in (mixed, both(queries.scale()) + level))
    linear = [(mixed[0], level[0]), (mixed[1].flip(2), level[1].flip(2))]
    if window.blocks:
        memory = Memory.of(keys.k, keys.v, keys.mask.sum(dim=1), window.block_size)
        linear = routed_parts(queries, given, memory, place.expand(len(keys.mask), -1), window, linear, choose)
    return [near, *linear]


AT_ONCE = 256
"""How many keys compete at once to become exact keys."""


class NearKeys:
    """Tells which keys get softmax weights (window, sinks, exact keys, routed blocks), for some rows of queries.

    Args:
        window: the form of the attention.
        priority: [b, K, T], the keys' log-scales; there is no padding.
        k: [b, K, T, D], the keys, by which blocks are chosen; needed only with routed blocks.
        choose: chooses the routed blocks.
        key_heads: [b * K], which of the layer's key heads the keys are of; by default 0 to K - 1 in every row.
    """

    def __init__(
        self,
        window: Window,
        priority: Tensor,
        k: Tensor | None = None,
        choose: Choose = choose_blocks,
        key_heads: Tensor | None = None,
    ) -> None:
        self.window, self.kept, self.channels, self.choose = window, None, None, choose
        slots, tokens = window.exact_keys, priority.shape[-1]
        if key_heads is None and window.routed_heads:
            key_heads = torch.arange(priority.shape[1], device=priority.device).repeat(priority.shape[0])
        self.key_heads = key_heads
        if window.blocks:
            assert k is not None
            k = k.flatten(0, 1)[:, None]
            self.count = torch.full((len(k),), tokens, device=k.device)
            self.channels = by_channel(k, window)
        if not slots:
            return
        there = torch.arange(tokens, device=priority.device) >= window.sinks
        if window.causal:
            exists = F.pad(there.expand(priority.shape[0], -1), (slots, 0))
            self.kept = contest(F.pad(priority, (slots, 0)), exists, slots, AT_ONCE).lost[..., slots:].flatten(0, 1)
        else:
            self.kept = strongest(priority, there.expand_as(priority), slots).flatten(0, 1)

    def rows(self, places: Tensor, seen: int, queries: Tensor | None = None) -> Tensor:
        """Return which of the first S keys get softmax weights from the queries at `places` [C].

        With routed blocks, for the `queries` [n, G, C, D], it is [n, G, C, S] bool; with exact keys [n, 1, C, S]; with
        neither [C, S].
        """
        keys = torch.arange(seen, device=places.device)
        distance = places[:, None] - keys
        window = self.window
        near = window.holds(distance) | (keys < window.sinks)
        if self.channels is not None:
            assert queries is not None
            # Each key head is a row here.
            every, rows = replace(window, routed_heads=()), places.expand(len(self.count), -1)
            chosen = self.choose(queries, self.channels, rows, self.count, every)
            if window.routed_heads:
                assert self.key_heads is not None
                groups = torch.arange(queries.shape[1], device=chosen.device)
                heads = self.key_heads[:, None] * queries.shape[1] + groups
                looks = torch.isin(heads, torch.tensor(window.routed_heads, device=heads.device))
                chosen = chosen.masked_fill(~looks[..., None, None], -1)
            chosen = are_chosen(chosen, self.channels.shape[3] // window.block_size)
            return near | chosen.repeat_interleave(window.block_size, dim=3)[..., :seen]
        if self.kept is None:
            return near
        kept = self.kept[:, None, None, :seen]
        if window.causal:
            # A key leaves the window of query i at step i - W.
            step = distance - window.size
            kept = (step >= 0) & (step + keys < kept)
        return near | kept
