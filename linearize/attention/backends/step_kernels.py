"""The Triton kernels of one decoding step, which update the state in place.

Only `fused_step.py` imports this file, when it runs for the first time. One program computes all query heads of a key
head; `G_` is their number, padded. Products are exact: one token has nothing to gain from tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linearize.attention.backends.fused_kernels import _load_state, _softmax, _store_half, _tanh
from linearize.attention.backends.window_kernels import FLOOR, _joined, _picked


@triton.jit
def _put_vectors(base, stride, at, tile, real, size, COLUMNS: tl.constexpr):
    """Store each row of `tile` [ROWS, COLUMNS] as the vector with the number `at` [ROWS], if the row is `real`."""
    column = tl.arange(0, COLUMNS)
    index = base + at.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(index, tile.to(base.dtype.element_ty), mask=real[:, None] & (column < size)[None, :])


@triton.jit
def _projected(x, weight, head, rows, N, D, G_: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr):
    """Multiply x [G_, D_] with each head's matrix [N, D] -> [G_, N_]."""
    n, d = tl.arange(0, N_), tl.arange(0, D_)
    at = (head.to(tl.int64)[:, None, None] * N + n[None, :, None]) * D + d[None, None, :]
    there = rows[:, None, None] & (n < N)[None, :, None] & (d < D)[None, None, :]
    return tl.sum(tl.load(weight + at, mask=there, other=0.0).to(tl.float32) * x[:, None, :], axis=2)


@triton.jit
def _mapped(
    x, first, second, bias, magnitude, head, rows, N, D,
    KIND: tl.constexpr, G_: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """Map x [G_, D_], one token for each head -> the two halves of the features [G_, N_]."""
    n, d = tl.arange(0, N_), tl.arange(0, D_)
    columns = n < N
    y = _projected(x, first, head, rows, N, D, G_, N_, D_)
    if bias is not None:
        there = rows[:, None] & columns[None, :]
        y += tl.load(bias + head[:, None] * N + n[None, :], mask=there, other=0.0).to(tl.float32)
    if KIND == "relu":
        y = tl.maximum(y, 0.0)
        return y, y
    elif KIND == "softmax_both":
        return _softmax(y, columns), _softmax(-y, columns)
    else:
        envelope = _softmax(_projected(x, second, head, rows, N, D, G_, N_, D_), columns)
        if magnitude is not None:
            there = rows[:, None] & (d < D)[None, :]
            m = tl.load(magnitude + head[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
            envelope *= tl.exp(4.0 * _tanh(tl.sum(x * m, axis=1) * 0.25))[:, None]
        wave = tl.sin(2.0 * y) * 0.5 * envelope
        return 0.5 * envelope - wave, 0.5 * envelope + wave


@triton.jit
def _learned(
    x, weight, bias, hidden, hidden_bias, out, head, rows, D,
    UNITS: tl.constexpr, G_: tl.constexpr, D_: tl.constexpr,
):  # fmt: skip
    """Return the learned log-scales [G_] of x [G_, D_]; zeros without `weight`. See `linearize.attention.hybrid`."""
    if weight is None:
        return tl.zeros([G_], tl.float32)
    else:
        scale = tl.sum(_picked(weight, D, head, rows, D, G_, D_) * x, axis=1)
        if bias is not None:
            scale += tl.load(bias + head, mask=rows, other=0.0).to(tl.float32)
        if hidden is not None:
            units = tl.arange(0, UNITS)
            at, there = head[:, None] * UNITS + units[None, :], rows[:, None] & (units >= 0)[None, :]
            y = _projected(x, hidden, head, rows, UNITS, D, G_, UNITS, D_)
            y = _tanh(y + tl.load(hidden_bias + at, mask=there, other=0.0).to(tl.float32))
            scale += tl.sum(y * tl.load(out + at, mask=there, other=0.0).to(tl.float32), axis=1)
        return scale


@triton.jit
def _softmax_sum(q, k, v, near, scaling, top, total, mixed):
    """Add keys k [TILE, D_] with softmax weights to the sums of the queries q [G_, D_]."""
    scores = tl.sum(q[:, None, :] * k[None, :, :], axis=2) * scaling
    scores = tl.where(near[None, :], scores, FLOOR)
    new = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.where(near[None, :], tl.exp(scores - new[:, None]), 0.0)
    fade = tl.exp(top - new)
    mixed = mixed * fade[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], axis=1)
    return new, total * fade + tl.sum(weights, axis=1), mixed


@triton.jit
def _put_key(k_out, v_out, at, k, v, change, D, V, D_: tl.constexpr, V_: tl.constexpr):
    """Store keys with their values at `at`, where they change."""
    _put_vectors(k_out, D, at, k, change, D, D_)
    _put_vectors(v_out, V, at, v, change, V, V_)


@triton.jit
def _exact_keys(
    kept_k, kept_v, kept_scale, taken, kept, k, v, c, leaves, queries, scaling, top, total, mixed,
    slots, D, V, SLOTS_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Let the key [1, D_] that leaves the window compete with the exact keys; add the exact keys to the queries' sums.

    Returns:
        The sums; the key that goes into the linear state instead, its value and its log-scale; and whether there is
        such a key.
    """
    e, one = tl.arange(0, SLOTS_), tl.arange(0, 1)
    number = tl.sum(taken.to(tl.int32), axis=0)
    strength = tl.load(kept_scale + kept + e, mask=taken, other=float("inf"))
    weakest = tl.min(strength, axis=0)
    full = number == slots
    enters = leaves & ((number < slots) | (tl.max(c, axis=0) > weakest))
    # Among equal keys the newest loses, which is the last: the exact keys are kept in their order.
    loser = tl.where(full, tl.max(tl.where(taken & (strength == weakest), e, -1), axis=0), number)
    last = tl.minimum(number, slots - 1)
    source = kept + tl.where(enters & (e >= loser), e + 1, e)
    moved, fresh = enters & (e >= loser) & (e < last), enters & (e == last)
    there = (e < slots) & (source < kept + slots)
    keys = tl.where(fresh[:, None], k, _picked(kept_k, D, source, there, D, SLOTS_, D_))
    values = tl.where(fresh[:, None], v, _picked(kept_v, V, source, there, V, SLOTS_, V_))
    scales = tl.where(fresh, c, tl.load(kept_scale + source, mask=there, other=0.0))
    replaced = enters & full
    gone, dropped = kept + tl.minimum(loser, slots - 1) + one, (one == 0) & replaced
    old_k, old_v = _picked(kept_k, D, gone, dropped, D, 1, D_), _picked(kept_v, V, gone, dropped, V, 1, V_)
    old_c = tl.load(kept_scale + gone)
    # Wait until all threads have read what is overwritten next.
    tl.debug_barrier()
    _put_key(kept_k, kept_v, kept + e, keys, values, moved | fresh, D, V, D_, V_)
    tl.store(kept_scale + kept + e, scales, mask=moved | fresh)
    top, total, mixed = _softmax_sum(queries, keys, values, taken | fresh, scaling, top, total, mixed)
    k, v, c = tl.where(replaced, old_k, k), tl.where(replaced, old_v, v), tl.where(replaced, old_c, c)
    return top, total, mixed, k, v, c, leaves & ((enters == 0) | replaced)


@triton.jit
def _window(
    ring_k, ring_v, ring_mask, ring, k, v, live, queries, scaling, top, total, mixed,
    width, D, V, TILE: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Shift the window's keys by one place, put the new one at the end, and add them to the queries' sums."""
    for begin in range(0, width, TILE):
        w = begin + tl.arange(0, TILE)
        inside, newest, at = w + 1 < width, w == width - 1, ring + w
        keys = tl.where(newest[:, None], k, _picked(ring_k, D, at + 1, inside, D, TILE, D_))
        values = tl.where(newest[:, None], v, _picked(ring_v, V, at + 1, inside, V, TILE, V_))
        there = tl.load(ring_mask + w + 1, mask=inside, other=0) != 0
        # Wait until all threads have read what is overwritten next.
        tl.debug_barrier()
        _put_key(ring_k, ring_v, at, keys, values, (w < width) & live, D, V, D_, V_)
        top, total, mixed = _softmax_sum(queries, keys, values, there | newest, scaling, top, total, mixed)
    return top, total, mixed


@triton.jit
def _sinks(
    sink_k, sink_v, first, count, k, v, live, queries, scaling, top, total, mixed, width, sinks, D, V,
    SINKS_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Store the new key if it is a sink, and add the sinks outside the window to the queries' sums."""
    s = tl.arange(0, SINKS_)
    fresh, there = (s == count) & (s < sinks) & live, s < sinks
    keys = tl.where(fresh[:, None], k, _picked(sink_k, D, first + s, there, D, SINKS_, D_))
    values = tl.where(fresh[:, None], v, _picked(sink_v, V, first + s, there, V, SINKS_, V_))
    _put_vectors(sink_k, D, first + s, keys, fresh, D, D_)
    _put_vectors(sink_v, V, first + s, values, fresh, V, V_)
    return _softmax_sum(queries, keys, values, there & (count - s >= width), scaling, top, total, mixed)


@triton.jit
def _state(
    kv, levels, row, p, m, v, c, leaves, live, N, V, HALVES: tl.constexpr, N_: tl.constexpr, V_: tl.constexpr
):  # fmt: skip
    """Add a lost key [1, N_] to the linear state, and return its halves and its log-scale [1]."""
    kv += row.to(tl.int64) * HALVES * N * (V + 1)
    upper, lower, upper_b, lower_b = _load_state(kv, N, V, HALVES, N_, V_)
    place = levels + row + tl.arange(0, 1)
    before = tl.load(place)
    level = tl.where(leaves, tl.maximum(before, c), before)
    fade, weight = tl.exp(before - level), tl.where(leaves, tl.exp(tl.where(leaves, c - level, 0.0)), 0.0)
    rows, p, m = v * weight[:, None], tl.sum(p, axis=0), tl.sum(m, axis=0)
    upper, upper_b = upper * fade[:, None] + p[:, None] * rows, upper_b * fade + p * weight
    lower, lower_b = lower * fade[:, None] + m[:, None] * rows, lower_b * fade + m * weight
    tl.debug_barrier()
    if live:
        _store_half(kv, upper, upper_b, N, V, N_, V_)
        if HALVES == 2:
            _store_half(kv + N * (V + 1), lower, lower_b, N, V, N_, V_)
        tl.store(place, level)
    return upper, lower, upper_b, lower_b, level


@triton.jit(do_not_specialize=["slots"])
def step(
    q, k, v, mask, positions, out,
    q_first, q_second, q_bias, q_magnitude, first, second, bias, magnitude,
    a_weight, a_bias, a_hidden, a_hidden_bias, a_out, c_weight, c_hidden, c_hidden_bias, c_out,
    kv, levels, ring_k, ring_v, ring_mask, sink_k, sink_v, counts, kept_k, kept_v, kept_scale, kept_mask,
    qs_b, qs_h, ks_b, ks_h, vs_b, vs_h, scaling, scale, eps, trained, fading,
    heads, groups, q_map_group, N, D, V, width, sinks, slots,
    UNITS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, TILE: tl.constexpr, SINKS_: tl.constexpr,
    SLOTS_: tl.constexpr, G_: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Attend from one token, and add it to the state: grid (B * K).

    The state's tensors are those of `linearize.ops.window_parts.WindowState`; all but the first two are None without a
    window, and the last four without exact keys. `ring_mask`, `counts` and `kept_mask`, which heads share, are only
    read; `advance` updates them. Beyond `trained` tokens the queries' log-scales fade, if there are `positions`.
    """
    row = tl.program_id(0)
    batch, key_head = row // (heads // groups), row % (heads // groups)
    one, g, base = tl.arange(0, 1), tl.arange(0, G_), row.to(tl.int64)
    always, rows, live = one == 0, g < groups, one == 0
    if mask is not None:
        live = tl.load(mask + batch + one) != 0
    key = _picked(k + batch.to(tl.int64) * ks_b + key_head.to(tl.int64) * ks_h, 0, one, live, D, 1, D_)
    value = _picked(v + batch.to(tl.int64) * vs_b + key_head.to(tl.int64) * vs_h, 0, one, live, V, 1, V_)
    live = tl.max(live.to(tl.int32), axis=0) > 0
    head = key_head * groups + g
    queries = _picked(q + batch.to(tl.int64) * qs_b, qs_h, head, rows & live, D, G_, D_)
    top, total, mixed = tl.full([G_], FLOOR, tl.float32), tl.zeros([G_], tl.float32), tl.zeros([G_, V_], tl.float32)
    lost_k, lost_v, leaves = key, value, live
    if ring_k is not None:
        ring_mask += batch * width
        # The key that leaves the window.
        leaves = live & (tl.max(tl.load(ring_mask + one).to(tl.int32), axis=0) > 0)
        if sink_k is not None:
            count = tl.max(tl.load(counts + batch + one), axis=0)
            leaves = leaves & (count - width >= sinks)
        oldest, there = base * width + one, always & leaves
        lost_k, lost_v = _picked(ring_k, D, oldest, there, D, 1, D_), _picked(ring_v, V, oldest, there, V, 1, V_)
    lost_c = _learned(lost_k, c_weight, None, c_hidden, c_hidden_bias, c_out, key_head + one, always, D, UNITS, 1, D_)
    if ring_k is not None:
        if kept_k is not None:
            e = tl.arange(0, SLOTS_)
            taken = (e < slots) & (tl.load(kept_mask + batch * slots + e, mask=e < slots, other=0) != 0)
            top, total, mixed, lost_k, lost_v, lost_c, leaves = _exact_keys(
                kept_k, kept_v, kept_scale, taken, base * slots, lost_k, lost_v, lost_c, leaves, queries, scaling,
                top, total, mixed, slots, D, V, SLOTS_, D_, V_,
            )  # fmt: skip
        # Wait until all threads have read the oldest key.
        tl.debug_barrier()
        top, total, mixed = _window(
            ring_k, ring_v, ring_mask, base * width, key, value, live, queries, scaling, top, total, mixed,
            width, D, V, TILE, D_, V_,
        )  # fmt: skip
        if sink_k is not None:
            top, total, mixed = _sinks(
                sink_k, sink_v, base * sinks, count, key, value, live, queries, scaling, top, total, mixed,
                width, sinks, D, V, SINKS_, D_, V_,
            )  # fmt: skip
    lost_p, lost_m = _mapped(
        lost_k * scale, first, second, bias, magnitude, key_head + one, always, N, D, KIND, 1, N_, D_
    )
    upper, lower, upper_b, lower_b, level = _state(
        kv, levels, row, lost_p, lost_m, lost_v, lost_c, leaves, live, N, V, HALVES, N_, V_
    )
    p, m = _mapped(
        queries * scale, q_first, q_second, q_bias, q_magnitude, head // q_map_group, rows, N, D, KIND, G_, N_, D_
    )
    far, far_total = tl.sum(p[:, :, None] * upper[None, :, :], axis=1), tl.sum(p * upper_b[None, :], axis=1)
    if HALVES == 2:
        far += tl.sum(m[:, :, None] * lower[None, :, :], axis=1)
        far_total += tl.sum(m * lower_b[None, :], axis=1)
    level += _learned(queries, a_weight, a_bias, a_hidden, a_hidden_bias, a_out, head, rows, D, UNITS, G_, D_)
    if positions is not None:
        level -= fading * tl.maximum(tl.log((tl.load(positions + batch + one) + 1.0) / trained), 0.0)
    result = tl.where(live, _joined(top, total, mixed, level, far_total, far, eps), 0.0)
    _put_vectors(out + batch.to(tl.int64) * heads * V, V, head, result, rows, V, V_)


@triton.jit(do_not_specialize=["slots"])
def advance(
    ring_mask, mask, counts, kept_mask, width, sinks, slots, WIDTH_: tl.constexpr, SLOTS_: tl.constexpr
):  # fmt: skip
    """Count the token of `step` in the tensors that heads share: grid (B)."""
    batch = tl.program_id(0)
    one, w = tl.arange(0, 1), tl.arange(0, WIDTH_)
    live = True
    if mask is not None:
        live = tl.max((tl.load(mask + batch + one) != 0).to(tl.int32), axis=0) > 0
    ring = ring_mask + batch * width
    leaves = tl.max(tl.load(ring + one).to(tl.int32), axis=0) > 0
    later = tl.load(ring + w + 1, mask=w + 1 < width, other=1)
    tl.debug_barrier()
    tl.store(ring + w, later, mask=(w < width) & live)
    if counts is not None:
        count = tl.load(counts + batch + one)
        leaves = leaves & (tl.max(count, axis=0) - width >= sinks)
        tl.store(counts + batch + one, count + 1, mask=(one == 0) & live)
    if kept_mask is not None:
        e = tl.arange(0, SLOTS_)
        taken = tl.load(kept_mask + batch * slots + e, mask=e < slots, other=1)
        number = tl.sum(((taken != 0) & (e < slots)).to(tl.int32), axis=0)
        tl.store(kept_mask + batch * slots + e, e >= 0, mask=(e < slots) & (e == number) & leaves & live)
