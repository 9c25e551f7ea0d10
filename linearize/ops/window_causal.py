"""Causal attention with a softmax window: a causal op sums up the keys beyond the window, token by token.

Exact keys are the S keys of each head, outside the window, that keep softmax weights: those with the largest
log-scales. Bidirectionally they are chosen from the whole row. Causally a key that leaves the window competes with the
S keys kept so far. The loser is added to the linear state, so memory is constant and the choice depends only on the
past. If log-scales are equal, the older key is kept.

`linearize.ops.window` has the formula of the weights. Related: Grigsby et al. 2025 (LoLA),
https://arxiv.org/abs/2505.23666, keeps the keys that the state recalls badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.ops.causal import causal_sums
from linearize.ops.routed import remembered, routed_parts
from linearize.ops.state import FLOOR, Options, State, empty_state, group_queries, weigh, with_ones, without_padding
from linearize.ops.window_parts import (
    Choose,
    Columns,
    Keys,
    Mapped,
    Part,
    Unmapped,
    Window,
    WindowState,
    choose_blocks,
    collect,
    pick,
    places_of,
    ranks,
)


class Contest(NamedTuple):
    """The result of the contest between keys that leave the window. Candidates: the S kept before, then the T leaving.

    Attributes:
        loser: [B, K, T] the candidate that loses its place, or gets no place, at each step.
        has_loser: [B, T] whether a candidate loses; the same for all heads.
        lost: [B, K, S + T] the step at which a candidate loses; T if it never does, 0 if it does not exist.
        kept: [B, K, N, S] the candidates kept after steps 0, `every`, 2 `every` ... and after the last one, in order.
        is_kept: [B, N, S] whether that place is taken; the same for all heads.
    """

    loser: Tensor
    has_loser: Tensor
    lost: Tensor
    kept: Tensor
    is_kept: Tensor


@torch.compiler.disable
def contest(priority: Tensor, there: Tensor, slots: int, every: int) -> Contest:
    """Let candidates compete for `slots` places.

    A candidate loses when the candidates so far include S stronger ones. So those that leave in `every` steps are
    compared at once, with each other and with those kept before. A traced graph computes all these blocks at once.

    Args:
        priority: [B, K, S + T].
        there: [B, S + T] bool, which candidates exist.
        slots: S.
        every: steps between the reported places.
    """
    count, values = priority.shape[-1], ranks(priority)
    if isinstance(count, torch.SymInt):
        return contest_at_once(values, there, slots, every)
    steps = count - slots
    order = torch.arange(count, device=priority.device).expand(values.shape)
    lost = torch.where(there[:, None].expand(values.shape), steps, 0)
    kept, places, taken = order[..., :slots], [], []
    for start in range(slots + 1 - every, count, every):
        index = torch.cat([kept, order[..., max(slots, start) : start + every]], dim=-1)
        earlier = lost.gather(-1, index)
        loses, when, kept, is_kept = _compete(index, values.gather(-1, index), earlier == steps, slots)
        lost = lost.scatter(-1, index, torch.where(loses, when, earlier))
        taken.append(is_kept)
        places.append(kept.masked_fill(~is_kept[:, None], 0))
    return _result(lost, there, slots, torch.stack(places, dim=2), torch.stack(taken, dim=1))


def _compete(index: Tensor, value: Tensor, competes: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let the candidates of a block compete: `index` [B, K, ..., N] in order, with their values, which of them compete.

    Returns:
        Which candidates lose and the step at which they do [B, K, ..., N], the candidates kept [B, K, ..., S] in order,
        and which of these places are taken [B, ..., S].
    """
    own, place = value[..., None], torch.arange(index.shape[-1], device=index.device)
    stronger = (value[..., None, :] > own) | ((value[..., None, :] == own) & (place < place[:, None]))
    full = (stronger & competes[..., None, :]).cumsum(dim=-1, dtype=torch.int32) >= slots
    loses = competes & full[..., -1]
    # A candidate is lost when the S-th stronger one arrives, but not before it arrives itself.
    when = index.gather(-1, torch.maximum(full.int().argmax(dim=-1), place)) - slots
    stays = competes & ~loses
    # In order, so that the newest of equal keys still loses after a state is passed on.
    kept = index.gather(-1, places_of(stays, slots))
    return loses, when, kept, torch.arange(slots, device=index.device) < stays[:, 0].sum(dim=-1, keepdim=True)


def _result(lost: Tensor, there: Tensor, slots: int, kept: Tensor, is_kept: Tensor) -> Contest:
    """Return the contest's result, given the step at which each candidate loses [B, K, S + T]."""
    steps = lost.shape[-1] - slots
    order = torch.arange(lost.shape[-1], device=lost.device).expand(lost.shape)
    # Candidates that are absent or never lost go to an extra step, which is dropped.
    # ONNX has no product with an unknown size, only with a tensor.
    target = lost + (~there[:, None]) * (order[..., -1:] + 1 - slots)
    loser = order.new_zeros(*order.shape[:2], steps + 1).scatter(-1, target, order)[..., :steps]
    has_loser = there.new_zeros(there.shape[0], steps + 1).scatter(-1, target[:, 0], True)[:, :steps]
    return Contest(loser, has_loser, lost, kept, is_kept)


MERGED = 32
"""How many blocks' strongest candidates are merged at once."""
BLOCKS = MERGED**3
"""Most blocks of a traced graph: a million tokens in the smallest blocks."""


def contest_at_once(values: Tensor, there: Tensor, slots: int, every: int) -> Contest:
    """Do the same as `contest` in a number of operations that does not depend on the length, given the `ranks`.

    The candidates kept before a block are the strongest of all before it, whatever the order: first those of each
    block, then of 32 blocks, and so on. It may report the final places once more.
    """
    count, device = values.shape[-1], values.device
    steps, none = count - slots, count
    blocks = (steps + every - 1) // every + 1
    # One more candidate, which does not exist, fills all lists. Those that exist come before others.
    exists = F.pad(there, (0, 1))[:, None].expand(*values.shape[:2], -1)
    values = values.clamp(min=torch.finfo(torch.float32).min)
    values = F.pad(values, (0, 1)).masked_fill(~exists, -torch.inf)
    # ONNX has no stable sort, but its own puts the first of equal keys first.
    stable = {} if torch.compiler.is_exporting() else {"stable": True}

    def at(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(-1, index.flatten(2)).unflatten(-1, index.shape[2:])

    def best(index: Tensor) -> Tensor:
        """Return the strongest candidates [B, K, n, S] of lists [B, K, n, N]; the older of equal ones is first."""
        order = at(values, index).sort(dim=-1, descending=True, **stable).indices
        return index.gather(-1, order[..., :slots])

    block = torch.arange(blocks, device=device)[:, None]
    leaving = slots + 1 - every + block * every + torch.arange(every, device=device)
    leaving = leaving.masked_fill((leaving < slots) | (leaving >= count), -1)
    before = [torch.arange(slots, device=device)[None], leaving[:-1]]
    width = max(slots, every)
    lists = torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in before])
    leaving, lists = (torch.where(x < 0, none, x).expand(*values.shape[:2], -1, -1) for x in (leaving, lists))
    kept = best(lists)
    span, most = 1, BLOCKS if isinstance(blocks, torch.SymInt) else blocks
    while span < most:
        source = block - span * torch.arange(MERGED - 1, -1, -1, device=device)
        near = kept.index_select(2, source.clamp(min=0).flatten()).unflatten(2, (-1, MERGED))
        kept = best(torch.where((source < 0)[..., None], none, near).flatten(3))
        span *= MERGED
    index = torch.cat([kept.sort(dim=-1).values, leaving], dim=-1)
    loses, when, kept, is_kept = _compete(index, at(values, index), at(exists, index), slots)
    target = torch.where(loses, index, none).flatten(2)
    last = torch.arange(count + 1, device=device)[-1] - slots
    lost = (exists * last).scatter(-1, target, when.flatten(2))[..., :-1]
    return _result(lost, there, slots, kept.masked_fill(~is_kept[:, None], 0), is_kept)


def causal_parts(
    queries: Mapped,
    given: Mapped | Unmapped,
    keys: Keys,
    window: Window,
    old: WindowState | None,
    choose: Choose = choose_blocks,
) -> tuple[list[Part], WindowState]:
    """Return the parts beyond the window and inside it, with sinks and exact keys, and the state after these tokens.

    The candidates for the linear part are the exact keys so far and, for each token, the key that leaves the window.
    After the state `old`, all of them are mapped at once; before it, those that are tokens are given with features.
    """
    tokens, slots = queries.x.shape[2], window.exact_keys
    none = keys.part(slice(0, 0))
    ring, kept = none.padded(window.size), none.padded(slots)
    if old is not None:
        ring = Keys(old.ring_k, old.ring_v, old.ring_mask)
        held = [x for x in (old.kept_k, old.kept_v, old.kept_mask) if x is not None]
        kept = Keys(*held) if held else none
    whole = ring.then(keys)
    # No key leaves for padding at the end.
    leaving = whole.part(slice(0, tokens))
    leaving = leaving._replace(mask=leaving.mask & keys.mask)
    count, columns, more = keys.mask.sum(dim=1), [], {}
    if window.sinks:
        k, v, there, before = collect(keys, window.sinks, old)
        more = {"sink_k": k, "sink_v": v, "tokens": before + count}
        place = before[:, None] + torch.arange(tokens, device=keys.mask.device)
        leaving = leaving._replace(mask=leaving.mask & (place - window.size >= window.sinks))
        left = place[:, :, None] - torch.arange(window.sinks, device=place.device) >= window.size
        columns.append((k, v, (left & there[:, None])[:, None]))
    candidates = kept.then(leaving)
    (phi, scale), places = _map(given, candidates.k, window, old)
    past = empty_state(phi, keys.v, scaled=True) if old is None else State(old.kv, old.log_scale)
    chosen, lost = None, candidates
    if slots:
        result = contest(scale, candidates.mask, slots, _block(tokens, window.size))
        chosen, stays = (candidates, result), result.kept[:, :, -1]
        more |= _keeping(candidates.picked(stays, result.is_kept[:, -1]), pick(scale, stays))
        if places is not None:
            more["kept_place"] = pick(places, stays)
        lost = candidates.picked(result.loser, result.has_loser)
        phi, scale = pick(phi, result.loser), pick(scale, result.loser)
    (mixed, level), after = kernel_part(queries.phi, phi, lost.v, scale, lost.mask, past)
    near = softmax_part(queries.x, whole.part(slice(1, None)), 0, window.size, window.scaling, columns, chosen)
    parts = [(mixed, queries.scale() + level), near]
    if window.blocks:
        every, memory = remembered(old, keys.k, keys.v, count, window, queries.x.shape[1])
        place = (memory.tokens - count)[:, None] + torch.arange(tokens, device=count.device)
        parts = [near, *routed_parts(queries, given, every, place, window, parts[:1], choose)]
        more |= memory.present()
    end = count[:, None] + torch.arange(window.size, device=keys.mask.device)
    return parts, WindowState(*after, *whole.taken(end), **more)


def _map(
    given: Mapped | Unmapped, k: Tensor, window: Window, old: WindowState | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Return the features and log-scales of the candidates k [B, K, S + T, D], and their places [B, (K,) S + T]."""
    slots, places = window.exact_keys, given.places
    tokens = k.shape[2] - slots
    if places is not None:
        places = (places[:, :1] - window.size + torch.arange(tokens, device=k.device)).clamp(min=0)
        if slots:
            own = places[:, None].expand(-1, k.shape[1], -1)
            empty = own.new_zeros(*own.shape[:2], slots)
            places = torch.cat([empty if old is None or old.kept_place is None else old.kept_place, own], dim=2)
    if isinstance(given, Mapped):
        # The first candidates are empty places, and the last tokens are no candidates.
        ends = (slots + window.size, 0)
        phi, scale = F.pad(given.phi, (0, 0, *ends)), F.pad(given.scale(), ends)
        return (phi[:, :, : slots + tokens], scale[:, :, : slots + tokens]), places
    far = Mapped(k, *given.map(k, places))
    scale = far.scale()
    if old is not None and old.kept_scale is not None:
        # As they won before: computed again, they could be rounded otherwise.
        scale = torch.cat([old.kept_scale, scale[:, :, slots:]], dim=2)
    return (far.phi, scale), places


def state_after(
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    window: Window,
    past: State,
    kept: Tensor | None = None,
    priority: Tensor | None = None,
) -> WindowState:
    """Return the state after the tokens k [B, K, T, D], v [B, K, T, V] of a whole sequence.

    Args:
        k: keys; the padding of `mask` comes last.
        v: values.
        mask: [B, T] bool.
        window: the form of the attention.
        past: the linear state of the tokens that have left the window.
        kept: [B, K, T] bool, the exact keys after these tokens, the same number for each head; None without exact keys.
        priority: [B, K, T], the log-scales of the keys; needed with exact keys.
    """
    keys = Keys(without_padding(k, mask), without_padding(v, mask), mask)
    count = mask.sum(dim=1)
    place = count[:, None] - window.size + torch.arange(window.size, device=k.device)
    more: dict[str, Tensor] = {}
    if window.sinks:
        sink_k, sink_v, _, _ = collect(keys, window.sinks, None)
        more = {"sink_k": sink_k, "sink_v": sink_v, "tokens": count}
    if kept is not None and priority is not None:
        index = F.pad(places_of(kept, window.exact_keys), (0, max(0, window.exact_keys - kept.shape[-1])))
        there = torch.arange(window.exact_keys, device=k.device) < kept[:, 0].sum(dim=-1, keepdim=True)
        more |= _keeping(_cleared(keys.picked(index, there)), pick(priority, index).masked_fill(~there[:, None], 0.0))
    ring = keys.taken(place.clamp(min=0))._replace(mask=place >= 0)
    return WindowState(*past, *_cleared(ring), **more)


def _cleared(keys: Keys) -> Keys:
    k, v = (without_padding(x, keys.mask) for x in keys[:2])
    return keys._replace(k=k, v=v)


def _keeping(kept: Keys, scale: Tensor) -> dict[str, Tensor]:
    return {"kept_k": kept.k, "kept_v": kept.v, "kept_mask": kept.mask, "kept_scale": scale}


def kernel_part(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, scale: Tensor, mask: Tensor, past: State
) -> tuple[Part, State]:
    """Return the part of the keys up to each query's place, without the queries' log-scales, and the state after them.

    Shapes: `phi_q` [B, H, T, F], `phi_k` [B, K, T, F], `v` [B, K, T, V], `scale` [B, K, T], `mask` [B, T].
    """
    given = Options(mask, scale)
    mixed, level, after = causal_sums(phi_q, given.keys(phi_k), given.values(v), given.scale(phi_k), past)
    return (mixed, level.repeat_interleave(phi_q.shape[1] // level.shape[1], dim=1)), after


def _block(tokens: int, span: int) -> int:
    """Return the number of queries in a block."""
    most = max(span, 32)
    # While compiling, a length that may change is no SymInt; a smaller block would give every short length a graph.
    fixed = isinstance(tokens, torch.SymInt) or (torch.compiler.is_compiling() and tokens > 1)
    return most if fixed else min(tokens, most)


def softmax_part(
    q: Tensor,
    keys: Keys,
    before: int,
    span: int,
    scaling: float,
    columns: Sequence[Columns] = (),
    chosen: tuple[Keys, Contest] | None = None,
) -> Part:
    """Return the softmax part over `span` keys per query, in blocks, over the columns and the exact keys of a contest.

    Query t of [B, H, T, D] sees the keys t - before to t - before + span - 1, as far as they exist. An exact key that
    left the window before a block becomes an extra column of it; one that leaves during the block already has a column.
    """
    tokens, key_heads = q.shape[2], keys.k.shape[1]
    block = _block(tokens, span)
    # At least two blocks in a traced graph: with only one, the length would become a constant.
    count = (tokens + block - 1) // block + int(isinstance(tokens, torch.SymInt))
    seen, rest = block + span - 1, count * block - tokens
    ends = before, count * block + span - 1 - before - keys.k.shape[2]
    k, v = F.pad(keys.k, (0, 0, *ends)), F.pad(keys.v, (0, 0, *ends))
    queries = F.pad(q.float(), (0, 0, 0, rest)) * scaling
    queries = group_queries(queries, key_heads).unflatten(3, (count, block)).transpose(2, 3)
    shape = queries.shape[:5]
    near = [overlapping(k.float(), 2, count, seen, block)]
    values = [overlapping(with_ones(v, True), 2, count, seen, block)]
    distance = torch.arange(seen, device=q.device) - torch.arange(block, device=q.device)[:, None]
    band = (distance >= 0) & (distance < span)
    visible = [band & overlapping(F.pad(keys.mask, ends), 1, count, seen, block)[:, None, :, None, None]]
    if chosen is not None:
        candidates, result = chosen
        slots = result.kept.shape[-1]
        step = torch.arange(count * block, device=q.device).view(count, 1, block, 1)
        # Key w of the ring followed by the tokens leaves at step w, and `keys` starts with key 1.
        lost = F.pad(result.lost[:, :, slots + 1 :], (0, span + rest))
        lost = overlapping(lost, 2, count, seen, block)[:, :, :, None, None]
        visible[0] = visible[0] | ((distance < 0) & (step < lost))
        places = result.kept[:, :, :count].flatten(2)
        older = candidates.picked(places, result.is_kept[:, :count].flatten(1))
        near.append(older.k.float().unflatten(2, (count, slots)))
        values.append(with_ones(older.v, True).unflatten(2, (count, slots)))
        lost = result.lost.gather(2, places).unflatten(2, (count, slots))[:, :, :, None, None]
        visible.append((step < lost) & result.is_kept[:, None, :count, None, None])
    for column_k, column_v, sees in columns:
        near.append(column_k.float()[:, :, None].expand(-1, -1, count, -1, -1))
        values.append(with_ones(column_v, True)[:, :, None].expand(-1, -1, count, -1, -1))
        # As numbers: the C++ that torch.compile writes for padded comparisons does not compile.
        seen_by = F.pad(sees.byte(), (0, 0, 0, rest)).bool()
        visible.append(seen_by.unflatten(2, (count, block))[:, :, :, None])
    # One matrix product per key head and block, with all queries of the group.
    keys_at_once = torch.cat(near, dim=3).flatten(0, 2)
    scores = torch.bmm(queries.flatten(3, 4).flatten(0, 2), keys_at_once.transpose(1, 2)).view(*shape, -1)
    heads = max(x.shape[1] for x in visible)
    hidden = ~torch.cat([x.expand(-1, heads, -1, -1, block, -1) for x in visible], dim=-1)
    scores = scores.masked_fill(hidden, FLOOR)
    # Above FLOOR, so that the weights of a query without any key are zero.
    top = scores.detach().amax(dim=-1).clamp(min=FLOOR / 2)
    weights = torch.exp(scores - top[..., None])
    mixed = weigh(weights, torch.cat(values, dim=3), hidden[:, :, :, 0])
    # [B, K, blocks, G, block] -> [B, H, T].
    mixed, top = (x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens] for x in (mixed, top))
    return mixed, top


def overlapping(x: Tensor, dim: int, count: int, size: int, step: int) -> Tensor:
    """Cut a dimension into windows of `size`, one every `step` elements: [..., N, ...] -> [..., count, size, ...].

    There are exactly `count` windows; N is (count - 1) step + size.
    """
    if not isinstance(x.shape[dim], torch.SymInt):
        return x.unfold(dim, size, step).movedim(-1, dim + 1)
    # `unfold` needs a known length.
    place = step * torch.arange(count, device=x.device)[:, None] + torch.arange(size, device=x.device)
    return x.index_select(dim, place.flatten()).unflatten(dim, (count, size))
