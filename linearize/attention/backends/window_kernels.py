"""The Triton kernels of attention with a softmax window: near keys, far keys and exact keys in one pass.

Only `fused_window.py` imports this file, when it runs for the first time. Words and sizes are those of
`fused_kernels.py`.

Queries are cut into segments of CHUNK tokens. Every segment has a *region* of keys, which its queries read one by one:
causally the W tokens before the segment and the segment itself, otherwise whole chunks that hold all windows of the
segment. In the region, keys inside the window and exact keys get softmax weights and all others the kernel's weights.
The keys outside the region are in the segment's state, except the exact keys among them: those are read as *columns*.

Exact keys have a step at which they are lost to the state (`lost`), and sinks are exact keys that are never lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linearize.attention.backends.fused_kernels import (
    _add,
    _held,
    _load_state,
    _map,
    _product,
    _put,
    _read,
    _scores,
    _store_half,
    _tokens,
    _weights,
)

FLOOR = tl.constexpr(-1e30)
"""As in `linearize.ops.state`."""

TINY = tl.constexpr(1e-30)
"""As in `linearize.ops.window_parts`."""

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest number in fp32."""


@triton.jit
def _picked(base, stride, at, real, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the tokens `at` [ROWS] in fp32 -> [ROWS, COLUMNS], with zeros for those that are not real."""
    column = tl.arange(0, COLUMNS)
    index = base + at.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(index, mask=real[:, None] & (column < size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _vector(weight, head, D, D_: tl.constexpr):
    """Load a head's row of a weight [H, D] -> [D_]; zeros without it."""
    column = tl.arange(0, D_)
    if weight is None:
        return tl.zeros([D_], tl.float32)
    else:
        return tl.load(weight + head * D + column, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def _log_scales(c, at, real, tile, weight, ROWS: tl.constexpr):
    """Return the keys' log-scales [ROWS]: those in `c`, or the products of their tokens [ROWS, D_] and `weight`."""
    if c is None:
        return tl.where(real, tl.sum(tile * weight[None, :], axis=1), FLOOR)
    else:
        return tl.load(c + at, mask=real, other=FLOOR)


@triton.jit(do_not_specialize=["count", "slots", "offset", "sinks"])
def chunk_sums(
    k, v, c, c_weight, mask, order, first, second, bias, magnitude, states, levels,
    ks_b, ks_h, ks_t, vs_b, vs_h, vs_t, scale, count, slots, heads, offset, sinks, N, D, V,
    SCALED: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Sum up the keys of a chunk of steps, for all key heads: grid (B * K, chunks).

    Step t adds the key `order[t]` [B, K, T], or none if it is negative; without an order the key `offset` tokens
    before, unless it is a sink. The sums are stored in `states` [B * K, chunks, F, V + 1], relative to the largest
    log-scale of the chunk, which is stored in `levels` [B * K, chunks]. With SCALED, the keys have log-scales: `c`
    [B, K, T], or without it their products with `c_weight` [K, D].
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = row // heads, row % heads
    columns = tl.arange(0, N_) < N
    w, w2, w_bias, m = _weights(first, second, bias, magnitude, head, N, D, KIND, N_, D_)
    k += batch.to(tl.int64) * ks_b + head.to(tl.int64) * ks_h
    v += batch.to(tl.int64) * vs_b + head.to(tl.int64) * vs_h
    tokens, c_w = row.to(tl.int64) * count, _vector(c_weight, head, D, D_)
    upper, lower = tl.zeros([N_, V_], tl.float32), tl.zeros([N_, V_], tl.float32)
    upper_b, lower_b = tl.zeros([N_], tl.float32), tl.zeros([N_], tl.float32)
    level = tl.full([1], FLOOR, tl.float32)
    for start in range(chunk * CHUNK, chunk * CHUNK + CHUNK, TILE):
        step = start + tl.arange(0, TILE)
        real, _ = _tokens(mask, batch, start, count, TILE)
        if order is None:
            at = step - offset
            real = real & (at >= sinks)
        else:
            at = tl.load(order + tokens + step, mask=real, other=-1)
            real = real & (at >= 0)
        at = tl.maximum(at, 0)
        number = real.to(tl.float32)
        tile = _picked(k, ks_t, at, real, D, TILE, D_)
        if SCALED:
            log_scale = _log_scales(c, tokens + at, real, tile, c_w, TILE)
            top = tl.maximum(level, tl.max(log_scale, axis=0))
            fade = tl.exp(level - top)
            number = tl.where(real, tl.exp(log_scale - top), 0.0)
            upper, lower = upper * fade[:, None], lower * fade[:, None]
            upper_b, lower_b = upper_b * fade, lower_b * fade
            level = top
        rows = _picked(v, vs_t, at, real, V, TILE, V_) * number[:, None]
        p, n = _map(tile * scale, w, w2, w_bias, m, columns, KIND, PRECISION)
        upper, lower, upper_b, lower_b = _add(upper, lower, upper_b, lower_b, p, n, rows, number, HALVES, PRECISION)
    states += (row.to(tl.int64) * slots + chunk) * HALVES * N * (V + 1)
    _store_half(states, upper, upper_b, N, V, N_, V_)
    if HALVES == 2:
        _store_half(states + N * (V + 1), lower, lower_b, N, V, N_, V_)
    if SCALED:
        tl.store(levels + row * slots + chunk + tl.arange(0, 1), level)


@triton.jit(do_not_specialize=["segments", "apart", "size"])
def outside(
    sums, levels, states, state_levels, before, segments, apart, size,
    CAUSAL: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the chunks outside the region of each segment: grid (B * K, blocks of a state's `size` numbers).

    From `sums` [B * K, segments, size] and `levels` [B * K, segments], write `states` and `state_levels`: causally
    [B * K, segments + 1, ...] the sums of all chunks before each segment, and of all chunks; otherwise the sums of all
    chunks more than `apart` chunks away. `before` [B * K, segments] is memory for levels; all programs of a row write
    the same there.
    """
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    slots = segments + 1 if CAUSAL else segments
    sums += row.to(tl.int64) * segments * size
    states += row.to(tl.int64) * slots * size
    total, level = tl.zeros([BLOCK], tl.float32), tl.full([], FLOOR, tl.float32)
    if SCALED:
        levels += row * segments
        state_levels += row * slots
        before += row * segments
    for s in range(0, slots):
        new = s - apart - 1
        total, level = _added(sums, levels, new, new >= 0, total, level, size, column, there, SCALED)
        if SCALED:
            tl.store((state_levels if CAUSAL else before) + s, level)
        tl.store(states + s * size + column, total, mask=there)
    if not CAUSAL:
        # From the other end; every thread reads only what it has stored itself.
        tl.debug_barrier()
        total, level = tl.zeros([BLOCK], tl.float32), tl.full([], FLOOR, tl.float32)
        for i in range(0, segments):
            s = segments - 1 - i
            new = s + apart + 1
            total, level = _added(sums, levels, new, new < segments, total, level, size, column, there, SCALED)
            at = states + s * size + column
            first, own, other = tl.load(at, mask=there, other=0.0), 1.0, 1.0
            if SCALED:
                first_level = tl.load(before + s)
                target = tl.maximum(level, first_level)
                own, other = tl.exp(level - target), tl.exp(first_level - target)
                tl.store(state_levels + s, target)
            tl.store(at, total * own + first * other, mask=there)


@triton.jit
def _added(sums, levels, chunk, exists, total, level, size, column, there, SCALED: tl.constexpr):
    """Add a chunk's numbers, if it exists, to a total and its level."""
    more = tl.load(sums + chunk * size + column, mask=there & exists, other=0.0)
    if SCALED:
        own = tl.load(levels + chunk, mask=exists, other=FLOOR)
        new = tl.maximum(level, own)
        return total * tl.exp(level - new) + more * tl.exp(own - new), new
    else:
        return total + more, level


@triton.jit(do_not_specialize=["count", "segments", "width", "sinks", "keep"])
def contest(
    priority, mask, lost, order, places, count, segments, heads, width, sinks, keep,
    CHUNK: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, SINKS_: tl.constexpr,
):  # fmt: skip
    """Let the keys that leave the window compete for `keep` places, as `linearize.ops.window_causal.contest` does.

    Grid (B * K). At step t the key t - `width` competes, unless it is a sink or token t is padding. From `priority`
    [B, K, T], write `lost` [B, K, T]: the step at which a key is lost (`count` if never), `order` [B, K, T]: the key
    lost at each step, or -1, and `places` [B, K, segments + 1, sinks + keep]: the sinks, and the keys that are kept
    before the first step of each segment and at the end, or -1. `lost` and `order` are filled with `count` and -1
    before.
    """
    row = tl.program_id(0)
    tokens = row.to(tl.int64) * count
    places += row.to(tl.int64) * (segments + 1) * (sinks + keep)
    slot, sink, at = tl.arange(0, PLACES), tl.arange(0, SINKS_), tl.arange(0, TILE)
    values = tl.full([PLACES], float("inf"), tl.float32)
    # Empty places are weaker than every key; those beyond `keep` are stronger, so no key can have them.
    values = tl.where(slot < keep, float("-inf"), values)
    keys = tl.full([PLACES], -1, tl.int32)
    for start in range(0, segments * CHUNK, TILE):
        if start % CHUNK == 0:
            there = places + start // CHUNK * (sinks + keep)
            tl.store(there + sink, sink, mask=sink < sinks)
            tl.store(there + sinks + slot, keys, mask=slot < keep)
        step = start + at
        key = step - width
        real, _ = _tokens(mask, row // heads, start, count, TILE)
        competes = real & (key >= sinks)
        value = tl.load(priority + tokens + key, mask=competes, other=0.0)
        # As in `linearize.ops.window_parts.ranks`, but finite: NaN is the weakest.
        value = tl.where(value == value, tl.minimum(tl.maximum(value, -LARGEST), LARGEST), -LARGEST)
        value = tl.where(competes, value, float("-inf"))
        least = tl.min(values, axis=0)
        done = tl.full([], 0, tl.int32)
        first = tl.min(tl.where(competes & (value > least), at, TILE), axis=0)
        while first < TILE:
            # Until then, every candidate is weaker than all that are kept, and is lost at once.
            gone = competes & (at >= done) & (at < first)
            tl.store(lost + tokens + key, step, mask=gone)
            tl.store(order + tokens + step, key, mask=gone)
            # Among equal keys the newest loses.
            loser = tl.max(tl.where(values == least, keys, -1), axis=0)
            chosen = tl.min(tl.where((values == least) & (keys == loser), slot, PLACES), axis=0)
            tl.store(lost + tokens + tl.maximum(loser, 0), start + first, mask=loser >= 0)
            tl.store(order + tokens + start + first, loser)
            entering = tl.max(tl.where(at == first, value, float("-inf")), axis=0)
            values = tl.where(slot == chosen, entering, values)
            keys = tl.where(slot == chosen, start + first - width, keys)
            least = tl.min(values, axis=0)
            done = first + 1
            first = tl.min(tl.where(competes & (value > least) & (at >= done), at, TILE), axis=0)
        gone = competes & (at >= done)
        tl.store(lost + tokens + key, step, mask=gone)
        tl.store(order + tokens + step, key, mask=gone)
    there = places + segments * (sinks + keep)
    tl.store(there + sink, sink, mask=sink < sinks)
    tl.store(there + sinks + slot, keys, mask=slot < keep)


@triton.jit
def _near(q, k, v, near, scaling, top, total, mixed, PRECISION: tl.constexpr):
    """Add keys with softmax weights: new maxima of the scores [BLOCK], and sums of weights and values below them."""
    scores = tl.where(near, _product(q, tl.trans(k), PRECISION) * scaling, FLOOR)
    new = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.where(near, tl.exp(scores - new[:, None]), 0.0)
    fade = tl.exp(top - new)
    return new, total * fade + tl.sum(weights, axis=1), mixed * fade[:, None] + _product(weights, v, PRECISION)


@triton.jit
def _far(
    p, n, k, v, c, at, there, c_w, away, scale, w, w2, w_bias, m, columns, level, total, mixed,
    SCALED: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add keys [TILE, D_] with the kernel's weights: new levels [BLOCK], and the sums below them."""
    k_p, k_n = _map(k * scale, w, w2, w_bias, m, columns, KIND, PRECISION)
    weights = tl.where(away, _scores(p, n, k_p, k_n, HALVES, PRECISION), 0.0)
    if SCALED:
        scales = tl.where(away, _log_scales(c, at, there, k, c_w, TILE)[None, :], FLOOR)
        new = tl.maximum(level, tl.max(scales, axis=1))
        weights *= tl.exp(scales - new[:, None])
        fade = tl.exp(level - new)
        level, total, mixed = new, total * fade, mixed * fade[:, None]
    return level, total + tl.sum(weights, axis=1), mixed + _product(weights, v, PRECISION)


@triton.jit
def _joined(top, total, mixed, level, far_total, far, eps):
    """Return near and far sums divided by those of their weights, with one shift: the magnitude of the larger part."""
    near_there, far_there = total > TINY, far_total > TINY
    size = tl.where(near_there, top + tl.log(tl.maximum(total, TINY)), FLOOR)
    far_size = tl.where(far_there, level + tl.log(tl.maximum(far_total, TINY)), FLOOR)
    shift = tl.maximum(size, far_size)
    factor = tl.where(near_there, tl.exp(tl.where(near_there, top - shift, FLOOR)), 0.0)
    far_factor = tl.where(far_there, tl.exp(tl.where(far_there, level - shift, FLOOR)), 0.0)
    divisor = 1.0 / _held(total * factor + far_total * far_factor, eps)
    return (mixed * factor[:, None] + far * far_factor[:, None]) * divisor[:, None]


@triton.jit
def _distances(i, j, width, CAUSAL: tl.constexpr):
    """Tell which keys j are inside the window of the queries i, and which exist for them: [BLOCK, TILE] each."""
    distance = i[:, None] - j[None, :]
    if CAUSAL:
        return (distance >= 0) & (distance < width), distance >= 0
    else:
        return tl.abs(distance) <= width, distance == distance


@triton.jit
def _region(
    q, p, n, i, k, v, c, c_w, lost, mask, w, w2, w_bias, m, columns, top, total, mixed, level, far_total, far,
    tokens, batch, least, end, ks_t, vs_t, scaling, scale, count, width, sinks, D, V,
    CAUSAL: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Add the keys from `least` to `end`: softmax weights inside the window and for exact keys, else the kernel's."""
    for begin in range(least, end, TILE):
        j = begin + tl.arange(0, TILE)
        there, _ = _tokens(mask, batch, begin, count, TILE)
        there = there & (j < end)
        inside, exists = _distances(i, j, width, CAUSAL)
        exists = exists & there[None, :]
        if lost is None:
            inside = inside | (j < sinks)[None, :]
        else:
            until = tl.load(lost + tokens + j, mask=there, other=0)
            inside = inside | (i[:, None] < until[None, :])
        near, away = exists & inside, exists & (inside == 0)
        keys = _picked(k, ks_t, j, there, D, TILE, D_)
        rows = _picked(v, vs_t, j, there, V, TILE, V_)
        if tl.max(tl.max(near.to(tl.int32), axis=1), axis=0) > 0:
            top, total, mixed = _near(q, keys, rows, near, scaling, top, total, mixed, PRECISION)
        if tl.max(tl.max(away.to(tl.int32), axis=1), axis=0) > 0:
            level, far_total, far = _far(
                p, n, keys, rows, c, tokens + j, there, c_w, away, scale, w, w2, w_bias, m, columns,
                level, far_total, far, SCALED, KIND, HALVES, PRECISION, TILE,
            )  # fmt: skip
    return top, total, mixed, level, far_total, far


@triton.jit
def _columns(
    q, p, n, i, k, v, c, c_w, lost, places, mask, w, w2, w_bias, m, columns, top, total, mixed, level, far_total, far,
    tokens, batch, least, end, ks_t, vs_t, scaling, scale, count, keep, D, V,
    CAUSAL: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Add the exact keys and sinks outside the region."""
    for begin in range(0, keep, TILE):
        j = begin + tl.arange(0, TILE)
        there = j < keep
        if places is not None:
            j = tl.load(places + j, mask=there, other=-1)
        # Those in the region have been read.
        there = there & (j >= 0) & (j < count) & ((j < least) | (j >= end))
        if CAUSAL:
            there = there & (j < least)
        j = tl.maximum(j, 0)
        if mask is not None:
            there = there & (tl.load(mask + batch * count + j, mask=there, other=0) != 0)
        keys = _picked(k, ks_t, j, there, D, TILE, D_)
        rows = _picked(v, vs_t, j, there, V, TILE, V_)
        if CAUSAL and lost is not None:
            # An exact key may be lost in the course of the segment.
            until = tl.load(lost + tokens + j, mask=there, other=0)
            away = there[None, :] & (i[:, None] >= until[None, :])
            near = there[None, :] & (i[:, None] < until[None, :])
            level, far_total, far = _far(
                p, n, keys, rows, c, tokens + j, there, c_w, away, scale, w, w2, w_bias, m, columns,
                level, far_total, far, SCALED, KIND, HALVES, PRECISION, TILE,
            )  # fmt: skip
        else:
            near = there[None, :] & (i[:, None] >= 0)
        top, total, mixed = _near(q, keys, rows, near, scaling, top, total, mixed, PRECISION)
    return top, total, mixed, level, far_total, far


@triton.jit(do_not_specialize=["count", "width", "sinks", "sets", "keep", "slots"])
def window_attend(
    q, k, v, a, a_weight, a_bias, c, c_weight, lost, places, mask,
    q_first, q_second, q_bias, q_magnitude, first, second, bias, magnitude, states, levels, out,
    qs_b, qs_h, qs_t, ks_b, ks_h, ks_t, vs_b, vs_h, vs_t, os_b, os_h, os_t,
    scaling, scale, eps, trained, fading, count, width, sinks, sets, keep, slots, heads, groups, q_map_group, N, D, V,
    CAUSAL: tl.constexpr, SCALED: tl.constexpr, FADES: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Attend from a block of the queries of a head: grid (B * H, blocks).

    Args that are not those of `fused_kernels.attend`:
        a, c: log-scales of queries [B, H, T] and keys [B, K, T], or None.
        a_weight, a_bias, c_weight: [H, D], [H] and [K, D] of log-scales that are linear, or None.
        lost: [B, K, T], see `contest`; None without exact keys.
        places: [B, K, sets, keep] the exact keys and sinks at the start of each segment, or once; None: the sinks only.
        states, levels: [B * K, slots, F, V + 1] and [B * K, slots], what lies outside the region of each segment.
        scaling: of the softmax scores; `scale` is the map's.
        trained, fading: with FADES, log-scales of queries beyond `trained` tokens fade with this power.
        width: tokens of the window; if not causal, those on one side.
    """
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    batch, head = row // heads, row % heads
    key_head, segment = head // groups, start // CHUNK
    key_row = batch * (heads // groups) + key_head
    columns = tl.arange(0, N_) < N
    w, w2, w_bias, m = _weights(q_first, q_second, q_bias, q_magnitude, head // q_map_group, N, D, KIND, N_, D_)
    q += batch.to(tl.int64) * qs_b + head.to(tl.int64) * qs_h
    k += batch.to(tl.int64) * ks_b + key_head.to(tl.int64) * ks_h
    v += batch.to(tl.int64) * vs_b + key_head.to(tl.int64) * vs_h
    out += batch.to(tl.int64) * os_b + head.to(tl.int64) * os_h
    tokens = key_row.to(tl.int64) * count
    i = start + tl.arange(0, BLOCK)
    real, seen = _tokens(mask, batch, start, count, BLOCK)
    tile = _picked(q, qs_t, i, real, D, BLOCK, D_)
    p, n = _map(tile * scale, w, w2, w_bias, m, columns, KIND, PRECISION)
    place = key_row.to(tl.int64) * slots + segment
    upper, lower, upper_b, lower_b = _load_state(states + place * HALVES * N * (V + 1), N, V, HALVES, N_, V_)
    far, far_total = _read(p, n, upper, lower, upper_b, lower_b, HALVES, PRECISION)
    level = tl.zeros([BLOCK], tl.float32)
    if SCALED:
        level += tl.load(levels + place)
    own, c_w = tl.zeros([BLOCK], tl.float32), _vector(c_weight, key_head, D, D_)
    if a is not None:
        own = tl.load(a + row.to(tl.int64) * count + i, mask=seen, other=0.0)
    if a_weight is not None:
        own = tl.sum(tile * _vector(a_weight, head, D, D_)[None, :], axis=1) + tl.load(a_bias + head).to(tl.float32)
    if FADES:
        own -= fading * tl.maximum(tl.log((i + 1.0) / trained), 0.0)
    w, w2, w_bias, m = _weights(first, second, bias, magnitude, key_head, N, D, KIND, N_, D_)
    top, total = tl.full([BLOCK], FLOOR, tl.float32), tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, V_], tl.float32)
    if CAUSAL:
        least, end = tl.maximum(segment * CHUNK - width, 0), tl.minimum(start + BLOCK, count)
    else:
        least = tl.maximum(segment * CHUNK - width, 0) // CHUNK * CHUNK
        end = tl.minimum(((segment + 1) * CHUNK + width + CHUNK - 1) // CHUNK * CHUNK, count)
    top, total, mixed, level, far_total, far = _region(
        tile, p, n, i, k, v, c, c_w, lost, mask, w, w2, w_bias, m, columns, top, total, mixed, level, far_total, far,
        tokens, batch, least, end, ks_t, vs_t, scaling, scale, count, width, sinks, D, V,
        CAUSAL, SCALED, KIND, HALVES, PRECISION, TILE, D_, V_,
    )  # fmt: skip
    if places is not None:
        places += (key_row.to(tl.int64) * sets + tl.minimum(segment, sets - 1)) * keep
    top, total, mixed, level, far_total, far = _columns(
        tile, p, n, i, k, v, c, c_w, lost, places, mask, w, w2, w_bias, m, columns,
        top, total, mixed, level, far_total, far,
        tokens, batch, least, end, ks_t, vs_t, scaling, scale, count, keep, D, V,
        CAUSAL, SCALED, KIND, HALVES, PRECISION, TILE, D_, V_,
    )  # fmt: skip
    result = _joined(top, total, mixed, level + own, far_total, far, eps)
    _put(out + start.to(tl.int64) * os_t, os_t, result, seen, tl.arange(0, V_) < V, BLOCK, V_)
