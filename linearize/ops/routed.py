"""Routed blocks: softmax for the blocks of keys that each query looks up, under the denominator of the window.

The tokens of a row, counted without padding, form blocks of B keys. Query i chooses the K blocks with the key of
largest product with q_i, in the 8 largest channels of q_i alone (`linearize.ops.window_parts.block_scores`). Their
keys outside the window and the sinks get the weight exp(scaling q_i . k_j) instead of the kernel's. The choice has no
gradient; the chosen keys have.

A query reads only those channels and the keys that it has chosen. The kernel's weights of these are subtracted from its
sum over all keys:

    sum over chosen j of  (exp(scaling q_i . k_j) - exp(a_i + c_j) phi(q_i) . phi(k_j)) [v_j, 1]

A difference of large sums is inexact, so this is done only where the subtracted weights are not much larger than
softmax's weights of the same keys, as they are after training. Otherwise the query sums up the kernel's weights of all
keys in the other blocks (`unchosen_sum`).

The choice by the largest channels is from Ribar et al. 2024 (SparQ), https://arxiv.org/abs/2312.04985.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops.state import FLOOR, Context, group_queries, weigh, with_ones
from linearize.ops.window_parts import Choose, Mapped, Part, Unmapped, Window, WindowState, are_chosen, choose_blocks

NUMBERS = 1 << 20
"""Most numbers of keys, features and values that are gathered at once; also most weights in `unchosen_sum`."""
LARGEST = 30.0
"""The kernel's weights of the chosen keys are subtracted up to this many times softmax's: the rounding of fp32 is then
no more than 1e-5 of the row's sum."""
SPARE = 8
"""A full memory grows by one part in this many, so that few tokens copy it."""


class Memory(NamedTuple):
    """All keys that can be looked up.

    Attributes:
        k: [B, K, N, D] in order; zeros from place `tokens` on. N is a multiple of the block size.
        v: [B, K, N, V], their values.
        channels: [B, K, D, N], the keys by channel, by which blocks are chosen.
        tokens: [B], number of keys.
    """

    k: Tensor
    v: Tensor
    channels: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, count: Tensor, size: int) -> Memory:
        """Return the memory of keys [B, K, T, D] and values [B, K, T, V]."""
        ends = (0, 0, 0, -k.shape[2] % size)
        k, v = F.pad(k, ends), F.pad(v, ends)
        return cls(k, v, k.mT.contiguous(), count)

    @classmethod
    def after(cls, old: WindowState, k: Tensor, v: Tensor, count: Tensor, size: int) -> Memory:
        """Add keys [B, K, T, D] and values [B, K, T, V], of which `count` [B] are tokens, to the memory of a state.

        One token, without a gradient, is written into the state's tensors.
        """
        state, new = old.present(), k.shape[2]
        roomy = with_room(state, new, size)
        held = [roomy[name] for name in ("all_k", "all_v", "channels")]
        writable = torch.is_inference_mode_enabled() or not held[0].is_inference()
        if roomy is state and (new > 1 or not writable or torch.is_grad_enabled()):
            held = [x.clone() for x in held]
        index = (state["tokens"][:, None] + torch.arange(new, device=k.device))[:, None, :, None]
        for past, x in zip(held, (k, v), strict=False):
            past.scatter_(2, index.expand_as(x), x.to(past.dtype))
        held[2].scatter_(3, index.expand_as(k).mT, k.mT.to(held[2].dtype))
        return cls(held[0], held[1], held[2], state["tokens"] + count)

    def of_heads(self, heads: list[int]) -> Memory:
        """Return the memory of some key heads."""
        if len(heads) == self.k.shape[1]:
            return self
        return Memory(self.k[:, heads], self.v[:, heads], self.channels[:, heads], self.tokens)

    def among(self, key_heads: int, heads: list[int]) -> Memory:
        """Return a memory of all key heads, with zeros for those that are not among `heads`, of which this one is."""

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros(len(x), key_heads, *x.shape[2:]).index_copy(1, _index(heads, x), x)

        return Memory(spread(self.k), spread(self.v), spread(self.channels), self.tokens)

    def present(self) -> dict[str, Tensor]:
        """Return it as fields of `WindowState`, in one piece each: a step of the native op writes into them."""
        fields = {"all_k": self.k, "all_v": self.v, "channels": self.channels, "tokens": self.tokens}
        return {name: x.contiguous() for name, x in fields.items()}


def remembered(
    old: WindowState | None, k: Tensor, v: Tensor, count: Tensor, window: Window, heads: int
) -> tuple[Memory, Memory]:
    """Return the memory of all key heads after keys k [B, K, T, D] and values v, and the one that a state keeps.

    That one has only the key heads that are looked up by one of `heads` query heads. After a state, the first has zeros
    for the others. `count` [B] of the keys are tokens.
    """
    size, own = window.block_size, window.remembered(heads, k.shape[1])
    if old is None:
        every = Memory.of(k, v, count, size)
        return every, every.of_heads(own)
    if window.routed_heads:
        held = Memory.after(old, k[:, own], v[:, own], count, size)
        return held.among(k.shape[1], own), held
    held = Memory.after(old, k, v, count, size)
    return held, held


def _index(heads: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(heads, device=like.device)


def with_room(state: dict[str, Tensor], new: int, size: int) -> dict[str, Tensor]:
    """Return a state (`WindowState.present`) whose memory has room for `new` more tokens; the same one if it has.

    `size` is the number of keys per block.
    """
    capacity, needed = state["all_k"].shape[2], int(state["tokens"].max()) + new
    if needed <= capacity:
        return state
    more = max(needed - capacity, capacity // SPARE)
    more += -(capacity + more) % size
    longer = {name: F.pad(state[name], (0, 0, 0, more)) for name in ("all_k", "all_v")}
    return state | longer | {"channels": F.pad(state["channels"], (0, more))}


def routed_parts(
    queries: Mapped,
    given: Mapped | Unmapped,
    memory: Memory,
    places: Tensor,
    window: Window,
    linear: list[Part],
    choose: Choose = choose_blocks,
) -> list[Part]:
    """Return the parts of all keys outside the window and the sinks: the chosen ones with softmax, the rest linear.

    Args:
        queries: mapped queries of H heads.
        given: the first keys of the memory and their features; or, after a state, how to map keys.
        memory: all keys.
        places: [B, T], the queries' places, counted without padding.
        window: the form of the attention.
        linear: the kernel's parts of all these keys.
        choose: how blocks are chosen.
    """
    chosen = choose(queries.x, memory.channels, places, memory.tokens, window)
    reads = chosen[0].numel() * window.block_size
    if isinstance(given, Mapped) or reads > memory.k.shape[1] * memory.k.shape[2]:
        given = _all_mapped(given, memory.k)
    softmax, less = looked_up(queries, given, memory, places, chosen, window)
    size = less[0].detach().abs().amax(dim=-1).log() + less[1]
    inexact = size > softmax[0].detach()[..., -1].log() + softmax[1] + math.log(LARGEST)
    rows = inexact.flatten(0, 1).any(dim=0).nonzero()[:, 0]
    if len(rows):
        given, before = _all_mapped(given, memory.k), linear
        rest = unchosen_sum(queries, given, memory, places, chosen, window, rows)
        linear = [_replaced(linear[0], rows, rest), *(_without(part, rows) for part in linear[1:])]
        less = _without(less, rows)
        if own := window.routed_heads:
            # The memory has no keys of the other heads, which take nothing out either.
            index = _index(own, rows)
            linear = [
                (x.index_copy(1, index, new[:, own]), y.index_copy(1, index, level[:, own]))
                for (x, y), (new, level) in zip(before, linear, strict=True)
            ]
    return [*linear, softmax, (-less[0], less[1])]


def _all_mapped(given: Mapped | Unmapped, k: Tensor) -> Mapped:
    """Return all keys k [B, K, N, D] of a memory with their features, zeros for keys that are not given."""
    if isinstance(given, Mapped):
        more = k.shape[2] - given.phi.shape[2]
        return Mapped(k, F.pad(given.phi, (0, 0, 0, more)), F.pad(given.scale(), (0, more)))
    every = torch.arange(k.shape[2], device=k.device).expand(len(k), -1)
    return Mapped(k, *given.map(k, None if given.places is None else every.to(given.places.dtype)))


def _replaced(part: Part, rows: Tensor, by: Part) -> Part:
    return part[0].index_copy(2, rows, by[0]), part[1].index_copy(2, rows, by[1])


def _without(part: Part, rows: Tensor) -> Part:
    return part[0].index_fill(2, rows, 0.0), part[1]


def looked_up(
    queries: Mapped, given: Mapped | Unmapped, memory: Memory, places: Tensor, chosen: Tensor, window: Window
) -> tuple[Part, Part]:
    """Return the parts of the chosen keys, outside the window and the sinks, by softmax and by the kernel.

    Arguments as in `routed_parts`, and `chosen` [B, H, T, n], the result of `choose_blocks`.
    """
    (batch, heads, tokens, slots), size = chosen.shape, window.block_size
    key_heads, blocks = memory.k.shape[1], memory.k.shape[2] // window.block_size
    # One row per query of each head; blocks are counted over all batch entries and key heads.
    first = blocks * torch.arange(batch * key_heads, device=chosen.device).view(batch, key_heads, 1, 1)
    table = (chosen.clamp(min=0) + first.repeat_interleave(heads // key_heads, dim=1)).flatten(0, 2)
    chosen = chosen.flatten(0, 2)
    of_row = places[:, None].expand(-1, heads, -1).flatten()
    count = memory.tokens[:, None, None].expand(-1, heads, tokens).flatten()

    def hidden(rows: slice) -> Tensor:
        key = (size * chosen[rows, :, None] + torch.arange(size, device=chosen.device)).flatten(1)
        near = window.holds(of_row[rows, None] - key) | (key < window.sinks)
        return near | (key >= count[rows, None]) | (chosen[rows] < 0).repeat_interleave(size, dim=1)

    q, phi_q = ((x.float() * factor).flatten(0, 2) for x, factor in ((queries.x, window.scaling), (queries.phi, 1.0)))
    k, v = (x.reshape(batch * key_heads * blocks, -1) for x in (memory.k, memory.v))
    if isinstance(given, Mapped):
        phi, scale = (x.reshape(len(k), -1) for x in (given.phi, given.scale()))
        step = max(1, NUMBERS // max(1, slots * (k.shape[1] + v.shape[1] + phi.shape[1])))
        sums = _look_up(step, table, hidden, q, phi_q, (k, v, phi, scale))
    else:
        own_k, own_v = (x.index_select(0, table.flatten()).unflatten(1, (size, -1)) for x in (k, v))
        # All that the queries of a key head have chosen, one after the other.
        keys = own_k.flatten(0, 1).unflatten(0, (batch, key_heads, -1))
        index = size * chosen.clamp(min=0)[..., None] + torch.arange(size, device=chosen.device)
        index = index.reshape(batch, key_heads, -1)
        mapped = Mapped(keys, *given.map(keys, None if given.places is None else index.to(given.places.dtype)))
        shape = (len(chosen), slots * size, -1)
        features = mapped.phi.reshape(shape), mapped.scale().reshape(shape[:2])
        sums = _sums(hidden(slice(None)), q, phi_q, own_k.reshape(shape), own_v.reshape(shape), *features)
    softmax, top, less, level = (x.unflatten(0, (batch, heads, tokens)) for x in sums)
    return (softmax, top), (less, queries.scale() + level)


def _sums(
    hidden: Tensor, q: Tensor, phi_q: Tensor, k: Tensor, v: Tensor, phi: Tensor, scale: Tensor
) -> tuple[Tensor, ...]:
    """Return softmax's and the kernel's sum of gathered keys, [R, V + 1], each with its log-scale [R].

    Shapes: hidden [R, S]; queries [R, D] times the scaling, with features [R, F]; keys [R, S, D], v [R, S, V],
    phi [R, S, F], scale [R, S].
    """
    v, seen = v.float(), ~hidden.all(dim=1, keepdim=True)

    def mixed(weights: Tensor) -> Tensor:
        # A row that sees none of its keys must not see NaN in them either.
        sums = torch.cat([torch.bmm(weights[:, None], v)[:, 0], weights.sum(dim=1, keepdim=True)], dim=1)
        return torch.where(seen, sums, 0.0)

    scores = torch.bmm(k.float(), q[:, :, None])[:, :, 0].masked_fill(hidden, FLOOR)
    # Above FLOOR, so that the weights of a row without any key are zero.
    top = scores.detach().amax(dim=1).clamp(min=FLOOR / 2)
    softmax = mixed(torch.exp(scores - top[:, None]))
    scale = scale.masked_fill(hidden, FLOOR)
    level = scale.detach().amax(dim=1).clamp(min=FLOOR / 2)
    products = torch.bmm(phi.float(), phi_q[:, :, None])[:, :, 0].masked_fill(hidden, 0.0)
    return softmax, top, mixed(products * torch.exp(scale - level[:, None])), level


Hidden = Callable[[slice], Tensor]
"""Returns which of the gathered keys some rows do not look up, [R, S] bool."""


def _look_up(
    step: int, table: Tensor, hidden: Hidden, q: Tensor, phi_q: Tensor, tables: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return `_sums` of queries q [R, D], phi_q [R, F], `step` of them at a time.

    Their keys are in the rows `table` [R, n] of the tables, one row per block: keys, values and features
    [N, size * X], and log-scales [N, size].
    """
    if torch.is_grad_enabled() and len(q) > step and any(x.requires_grad for x in (q, phi_q, *tables)):
        sums: tuple[Tensor, ...] = _LookUp.apply(step, table, hidden, q, phi_q, *tables)
        return sums
    found = [_sums(*_gathered(table, hidden, q, phi_q, tables, rows)) for rows in _steps(len(q), step)]
    return found[0] if len(found) == 1 else tuple(torch.cat(x) for x in zip(*found, strict=True))


def _steps(count: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, count, step))


def _gathered(
    table: Tensor, hidden: Hidden, q: Tensor, phi_q: Tensor, tables: Sequence[Tensor], rows: slice
) -> tuple[Tensor, ...]:
    """Return the arguments of `_sums` for some rows."""
    index, unseen = table[rows], hidden(rows)
    keys = (x.index_select(0, index.flatten()).reshape(*unseen.shape, -1) for x in tables[:3])
    scale = tables[3].index_select(0, index.flatten()).reshape(unseen.shape)
    return unseen, q[rows], phi_q[rows], *keys, scale


class _LookUp(torch.autograd.Function):
    """`_look_up` whose backward pass gathers the keys again: kept, they would be far more than all weights."""

    @staticmethod
    def forward(ctx: Context, step: int, table: Tensor, hidden: Hidden, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what `_look_up` returns."""
        ctx.step, ctx.hidden = step, hidden
        ctx.save_for_backward(table, *inputs)
        q, phi_q, *tables = inputs
        sums = _look_up(step, table, hidden, q, phi_q, tables)
        ctx.mark_non_differentiable(sums[1], sums[3])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries and tables."""
        table, q, phi_q, *tables = ctx.saved_tensors
        of_queries = torch.zeros_like(q), torch.zeros_like(phi_q)
        of_tables = [torch.zeros_like(x, dtype=torch.float32) for x in tables]
        for rows in _steps(len(q), ctx.step):
            hidden, *inputs = _gathered(table, ctx.hidden, q, phi_q, tables, rows)
            leaves = [x.detach().float().requires_grad_() for x in inputs]
            with torch.enable_grad(), torch.autocast(device_type=q.device.type, enabled=False):
                softmax, _, less, _ = _sums(hidden, *leaves)
                found = torch.autograd.grad((softmax, less), leaves, (grads[0][rows], grads[2][rows]))
            for all_rows, grad in zip(of_queries, found[:2], strict=True):
                all_rows[rows] = grad
            index = table[rows].flatten()
            for of_table, grad in zip(of_tables, found[2:], strict=True):
                of_table.index_add_(0, index, grad.reshape(len(index), -1))
        of_inputs = zip((*of_queries, *of_tables), (q, phi_q, *tables), strict=True)
        return None, None, None, *(grad.to(x.dtype) for grad, x in of_inputs)


def unchosen_sum(
    queries: Mapped, keys: Mapped, memory: Memory, places: Tensor, chosen: Tensor, window: Window, rows: Tensor
) -> Part:
    """Return the kernel's part of all keys outside the window and the sinks that are not chosen, for some rows [R].

    Arguments as in `looked_up`; it multiplies the features of all keys.
    """
    tokens, found, values = places.shape[1], [], with_ones(memory.v, True)
    step = max(1, NUMBERS // max(1, queries.x.shape[0] * queries.x.shape[1] * memory.k.shape[2]))
    for part in rows.split(step):
        # Causally, no query of the part sees a later key.
        seen = memory.k.shape[2] - tokens + int(part[-1]) + 1 if window.causal else memory.k.shape[2]
        key = torch.arange(seen, device=places.device)
        far = ~window.holds(places[:, part, None] - key) & (key >= window.sinks)
        far = (far & (key < memory.tokens[:, None])[:, None])[:, None]
        own = are_chosen(chosen[:, :, part], memory.k.shape[2] // window.block_size)
        own = own.repeat_interleave(window.block_size, dim=3)[..., :seen]
        some = Mapped(queries.x, queries.phi[:, :, part], queries.scale()[:, :, part])
        phi, scale = keys.phi[:, :, :seen], keys.scale()[:, :, :seen]
        found.append(kernel_sum(some, phi, scale, values[:, :, :seen], far & ~own))
    return torch.cat([mixed for mixed, _ in found], dim=2), torch.cat([level for _, level in found], dim=2)


def kernel_sum(queries: Mapped, phi: Tensor, scale: Tensor, values: Tensor, visible: Tensor) -> Part:
    """Return the part of the visible keys [B, H, R, S], of features [B, K, S, F], with the kernel's weights."""
    hidden, heads = ~group_queries(visible, phi.shape[1]).flatten(2, 3), visible.shape[1]
    scales = scale[:, :, None].expand_as(hidden).masked_fill(hidden, FLOOR)
    top = scales.detach().amax(dim=-1).clamp(min=FLOOR / 2)
    products = group_queries(queries.phi.float(), phi.shape[1]).flatten(2, 3) @ phi.float().mT
    weights = products.masked_fill(hidden, 0.0) * torch.exp(scales - top[..., None])
    mixed, groups = weigh(weights[:, :, None], values, hidden)[:, :, 0], (heads // phi.shape[1], -1)
    return mixed.unflatten(2, groups).flatten(1, 2), queries.scale() + top.unflatten(2, groups).flatten(1, 2)
