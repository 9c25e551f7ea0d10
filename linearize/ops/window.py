"""Softmax for near keys, a feature map for far keys: both share one denominator, and the cost is linear in T.

The unnormalised weight of key j for query i is

    exp(scaling q_i . k_j)                               if j is in the window of i,
    exp(a_i + c_j) phi(q_i) . phi(k_j)                   otherwise (a, c: log-scales of query and key),

and every row is divided by its sum. Causally the window of i is the last W tokens, i - W < j <= i. Bidirectionally it
is |i - j| <= W // 2, so W tokens for odd W and W + 1 for even W. The first S tokens, the sinks, get softmax weights
from every query (causally: from all later tokens), and so do exact keys (`linearize.ops.window_causal`). Tokens are
counted without padding. All parts are computed with one shift m_i, the largest of their magnitudes, which cancels.

Bidirectionally, queries are cut into blocks of 2 R tokens, R at least half of the window. The keys from R before a
block to R after it get individual weights, from softmax or the kernel. The keys farther away enter as sums
phi(k) [v, 1]^T of whole blocks, shifted by R, added up from both ends. Nothing is ever subtracted: a difference of
large sums would be inexact.

Papers: the hybrid of Zhang et al. 2024 (LoLCATs), https://arxiv.org/abs/2410.10254, section 3.3; there the linear part
is not divided by exp(m_i). Sinks: Xiao et al. 2024, https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.causal import causal_attention
from linearize.ops.state import FLOOR, LinearOp, divide, is_tracing, put_back, real_first, with_ones, without_padding
from linearize.ops.window_causal import causal_parts, contest
from linearize.ops.window_parts import (
    Keys,
    Mapped,
    Part,
    Queries,
    Sinks,
    Window,
    WindowState,
    collect,
    exact,
    join,
    pick,
    places_of,
    strongest,
    weigh,
)

LONG = 1024
"""From this many tokens on, key heads are computed one at a time."""


def window_attention(
    queries: Mapped,
    keys: Mapped,
    v: Tensor,
    window: Window,
    *,
    key_padding_mask: Tensor | None = None,
    initial_state: WindowState | None = None,
    op: LinearOp = causal_attention,
) -> tuple[Tensor, WindowState | None]:
    """Attend with softmax inside a window and with a feature map outside it, without a T x T matrix.

    Args:
        queries: mapped queries of H heads.
        keys: mapped keys of K heads, K divides H.
        v: values [B, K, T, V].
        window: its size and direction.
        key_padding_mask: [B, T], true or 1 at tokens; None if there is no padding.
        initial_state: the state before these tokens (causal only).
        op: sums up the keys outside a causal window.

    Returns:
        Output [B, H, T, V] in `v`'s dtype, and the state after the last token; None if not causal.
    """
    mask = torch.ones(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
    mask = mask if key_padding_mask is None else key_padding_mask.bool()
    q, k, v, phi_k = (without_padding(x, key_padding_mask) for x in (queries.x, keys.x, v, keys.phi.float()))
    side = Queries(q, queries.phi, queries.scale())
    run = Keys(k, v, phi_k, keys.scale(), mask)
    order = real_first(mask) if key_padding_mask is not None and v.shape[2] > 1 else None
    if order is not None:
        side, run = side.taken(order), run.taken(order)
    state = None
    if window.causal:
        parts, state = causal_parts(side, run, window, initial_state, op)
        out = divide(join(parts), window.eps)
    else:
        outputs = [divide(join(bidirectional_parts(*turn, window)), window.eps) for turn in _turns(side, run)]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return (out if order is None else put_back(out, order)).to(v.dtype), state


def _turns(queries: Queries, keys: Keys) -> list[tuple[Queries, Keys]]:
    """Split long inputs on the CPU into single key heads, so that one head's intermediate results fit into caches.

    With a gradient they are all kept anyway, so nothing is split.
    """
    tokens, key_heads = queries.q.shape[2], keys.k.shape[1]
    if torch.is_grad_enabled() or keys.k.device.type != "cpu" or is_tracing() or tokens < LONG:
        return [(queries, keys)]
    groups = zip(*(x.chunk(key_heads, dim=1) for x in queries), strict=True)
    return [(Queries(*group), keys.head(number)) for number, group in enumerate(groups)]


LEAST = 32
"""Smallest R: smaller blocks would be slower."""


@dataclass(frozen=True)
class _Cut:
    """How tokens are cut into blocks.

    Attributes:
        tokens: number of tokens T.
        block: tokens per block.
        reach: number R of near keys before and after a block; 0 if one block holds all tokens.
        count: number of blocks N.
    """

    tokens: int
    block: int
    reach: int
    count: int

    @classmethod
    def of(cls, tokens: int, half: int) -> _Cut:
        reach = max(half, LEAST)
        block = 2 * reach
        if isinstance(tokens, torch.SymInt):
            # At least two blocks in a traced graph: with only one, the length would become a constant.
            return cls(tokens, block, reach, (tokens + block - 1) // block + 1)
        if tokens <= block:
            return cls(tokens, tokens, 0, 1)
        return cls(tokens, block, reach, -(-tokens // block))

    def queries(self, x: Tensor, key_heads: int) -> Tensor:
        """Cut x [B, H, T, D] -> [B K N, G block, D], G = H / K: the queries of a group become rows of one product."""
        x = F.pad(x, (0, 0, 0, self.count * self.block - self.tokens))
        x = x.unflatten(1, (key_heads, -1)).unflatten(3, (self.count, self.block))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def back(self, x: Tensor, batch: int, key_heads: int) -> Tensor:
        """Undo `queries`: [B K N, G block, ...] -> [B, H, T, ...]."""
        x = x.view(batch, key_heads, self.count, -1, self.block, *x.shape[2:]).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :, : self.tokens]

    def keys(self, x: Tensor) -> Tensor:
        """Cut x [B, K, T, D], padded by R, into blocks [B, K, N + 1, block, D]; a single block if R is 0."""
        rest = self.count * self.block - self.tokens
        blocks = self.count + int(self.reach > 0)
        return F.pad(x, (0, 0, self.reach, rest + self.reach)).unflatten(2, (blocks, self.block))

    def near(self, blocks: Tensor) -> Tensor:
        """Join the two blocks of keys that contain a block of queries: [..., N, 2 block, D]."""
        return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], dim=3) if self.reach else blocks

    def inside(self, half: int, device: torch.device) -> Tensor:
        """Tell which near keys are in a query's window: [block, 2 block], or [T, T] if R is 0."""
        query = torch.arange(self.block, device=device)[:, None] + self.reach
        key = torch.arange(2 * self.block if self.reach else self.tokens, device=device)
        return (key - query).abs() <= half


def bidirectional_parts(queries: Queries, keys: Keys, window: Window) -> list[Part]:
    """Return the parts: softmax inside the window, the kernel outside it, then the sinks and the exact keys."""
    tokens, half = queries.q.shape[2], window.size // 2
    batch, key_heads = keys.k.shape[:2]
    cut, far_keys, parts = _Cut.of(tokens, half), keys.mask[:, None], []
    place = torch.arange(tokens, device=keys.mask.device)
    if window.sinks:
        first = collect(keys, window.sinks, None)
        outside = (place[:, None] - place[: window.sinks]).abs() > half
        outside = F.pad(outside, (0, window.sinks - outside.shape[1]))
        parts.append(exact(queries.q, first, (outside & first.mask[:, None])[:, None], window.scaling))
        far_keys = far_keys & (place >= window.sinks)
    if window.exact_keys:
        chosen = strongest(keys.scale.detach(), far_keys.expand_as(keys.scale), window.exact_keys)
        index = places_of(chosen, window.exact_keys)
        kept = Sinks(pick(keys.k, index), pick(keys.v, index), keys.mask, place)
        outside = (place[:, None] - index[:, :, None]).abs() > half
        parts.append(exact(queries.q, kept, outside & chosen.gather(2, index)[:, :, None], window.scaling))
        far_keys = far_keys & ~chosen
    # One shift for all keys: keys with a far smaller scale are negligible next to the largest one.
    scale = keys.scale.masked_fill(~far_keys, FLOOR)
    top = scale.detach().amax(dim=-1)
    phi = (keys.phi.float() * torch.exp(scale - top[..., None])[..., None]).masked_fill(~far_keys[..., None], 0.0)
    phi_blocks, value_blocks = cut.keys(phi), cut.keys(with_ones(keys.v, True))
    near_values, inside = cut.near(value_blocks).flatten(0, 2), cut.inside(half, phi.device)

    q = cut.queries(queries.q.float() * window.scaling, key_heads)
    scores = torch.bmm(q, cut.near(cut.keys(keys.k.float())).flatten(0, 2).transpose(1, 2))
    # [B, K, N, G, block, near keys].
    form = (batch, key_heads, cut.count, -1, *inside.shape)
    real = cut.near(cut.keys(keys.mask[:, None, :, None])).flatten(3)
    weights, level = weigh(scores.view(form), inside & real[:, :, :, None, None])
    near = torch.bmm(weights.view(scores.shape), near_values)

    phi_q = cut.queries(queries.phi.float(), key_heads)
    products = torch.bmm(phi_q, cut.near(phi_blocks).flatten(0, 2).transpose(1, 2))
    far = torch.bmm(products.view(form).masked_fill(inside, 0.0).view(scores.shape), near_values)
    if cut.reach:
        far = far + torch.bmm(phi_q, _far_sums(phi_blocks, value_blocks).flatten(0, 2))
    groups = queries.phi.shape[1] // key_heads
    far_level = queries.scale + top[..., None].repeat_interleave(groups, dim=1)
    near, level, far = (cut.back(x, batch, key_heads) for x in (near, level.flatten(3).flatten(0, 2), far))
    return [(near, level), (far, far_level), *parts]


def _far_sums(phi: Tensor, values: Tensor) -> Tensor:
    """Sum up the keys before and after the near keys of every block of queries.

    Args:
        phi: [B, K, N + 1, block, F].
        values: [B, K, N + 1, block, V + 1].

    Returns:
        [B, K, N, F, V + 1]: for block n the sum over all blocks except n and n + 1.
    """
    sums = phi.transpose(-1, -2) @ values
    before = F.pad(sums[:, :, :-2].cumsum(dim=2), (0, 0, 0, 0, 1, 0))
    after = F.pad(sums[:, :, 2:].flip(2).cumsum(dim=2).flip(2), (0, 0, 0, 0, 0, 1))
    return before + after


AT_ONCE = 256
"""How many keys compete at once for the exact places."""


class NearKeys:
    """Tells which keys get softmax weights (window, sinks, exact keys), for some rows of queries, without padding.

    Args:
        window: the form of the attention.
        priority: [b, K, T], the keys' log-scales.
    """

    def __init__(self, window: Window, priority: Tensor) -> None:
        self.window, self.kept = window, None
        slots, tokens = window.exact_keys, priority.shape[-1]
        if not slots:
            return
        there = torch.arange(tokens, device=priority.device) >= window.sinks
        if window.causal:
            exists = F.pad(there.expand(priority.shape[0], -1), (slots, 0))
            self.kept = contest(F.pad(priority, (slots, 0)), exists, slots, AT_ONCE).lost[..., slots:].flatten(0, 1)
        else:
            self.kept = strongest(priority, there.expand_as(priority), slots).flatten(0, 1)

    def rows(self, places: Tensor, seen: int) -> Tensor:
        """Return [n, 1, C, S] bool, or [C, S] without exact keys, for the queries at `places` and the first S keys."""
        keys = torch.arange(seen, device=places.device)
        distance = places[:, None] - keys
        window = self.window
        near = window.holds(distance) | (keys < window.sinks)
        if self.kept is None:
            return near
        kept = self.kept[:, None, None, :seen]
        if window.causal:
            # A key leaves the window of query i at step i - W.
            step = distance - window.size
            kept = (step >= 0) & (step + keys < kept)
        return near | kept
