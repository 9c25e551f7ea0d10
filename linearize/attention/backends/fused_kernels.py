"""The Triton kernels of the backend `fused`: feature map and attention in one pass over the tokens.

Only `fused.py` imports this file, when it runs for the first time: linearize itself must not import Triton.

A *side* is the queries or the keys of a head: tokens x [T, D], which the map turns into features, with rows y [T, V]
and one number b per token. For keys, y and b are the values and 1, both times the key's factor `a` if there is one. For
queries (only in the backward pass), they are the gradient of the numerator and of the denominator: the output's
gradient times `a`, the inverse of the denominator, and b. The sums of a side are `sum_t phi(x_t) [y_t, b_t]`.

Features are kept as two tiles of n columns, because the maps have pairs of features (softmax of y and of -y); the
second is unused for `relu`. Columns are padded to powers of two, and the padding is zero. Padded tokens are read as
zeros, whatever is there: keys then have no rows (y and b are 0), and queries stay finite.

Every program walks through one segment of the tokens of one head, in blocks of BLOCK tokens. Sizes: D and V are the
head and value size, N the rows of the map; D_, V_ and N_ are padded. A state [F, V + 1] has the sums of b last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Multiply two fp32 tiles, adding up in fp32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _softmax(y, columns):
    """Softmax over the columns that exist; zero elsewhere."""
    y = tl.where(columns[None, :], y, float("-inf"))
    y = tl.exp(y - tl.max(y, axis=1)[:, None])
    return y / tl.sum(y, axis=1)[:, None]


@triton.jit
def _tile(base, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load [ROWS, COLUMNS] in fp32, with zeros except at the given rows and columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = base + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0).to(tl.float32)


@triton.jit
def _put(base, stride, tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store [ROWS, COLUMNS] at the given rows and columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = base + row[:, None] * stride + column[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit
def _weights(first, second, bias, magnitude, head, N, D, KIND: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr):
    """Load a head's map: first [N, D], second [N, D], bias [N] and magnitude [D]; unused ones are copies or zeros.

    `bias` is None for a map without it, and `magnitude` too.
    """
    rows, columns = tl.arange(0, N_) < N, tl.arange(0, D_) < D
    matrix = head.to(tl.int64) * N * D
    w = _tile(first + matrix, D, rows, columns, N_, D_)
    other = w
    if KIND == "positive_waves":
        other = _tile(second + matrix, D, rows, columns, N_, D_)
    if bias is None:
        b = tl.zeros([N_], tl.float32)
    else:
        b = tl.load(bias + head * N + tl.arange(0, N_), mask=rows, other=0.0).to(tl.float32)
    if magnitude is None:
        m = tl.zeros([D_], tl.float32)
    else:
        m = tl.load(magnitude + head * D + tl.arange(0, D_), mask=columns, other=0.0).to(tl.float32)
    return w, other, b, m


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _map(x, w, second, b, m, columns, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Map x [BLOCK, D_] -> the two halves of the features [BLOCK, N_]."""
    y = _product(x, tl.trans(w), PRECISION)
    if KIND == "relu":
        y = tl.maximum(y + b[None, :], 0.0)
        return y, y
    elif KIND == "softmax_both":
        y = y + b[None, :]
        return _softmax(y, columns), _softmax(-y, columns)
    else:
        envelope = _softmax(_product(x, tl.trans(second), PRECISION), columns)
        factor = tl.exp(4.0 * _tanh(tl.sum(x * m[None, :], axis=1) * 0.25))
        half = 0.5 * envelope * factor[:, None]
        wave = tl.sin(2.0 * y) * half
        return half - wave, half + wave


@triton.jit
def _side(x, y, a, b, real, seen, start, x_stride, y_stride, scale, D, V, KEYS: tl.constexpr, SCALED: tl.constexpr,
          BLOCK: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr):  # fmt: skip
    """Load a block of a side: x [BLOCK, D_], y [BLOCK, V_] without and with its factor a [BLOCK], a and b [BLOCK].

    Args:
        x, y: the head's first token.
        a, b: the head's factors; not read if not SCALED.
        real: which tokens are neither padding nor beyond the end.
        seen: which tokens are not beyond the end.
        start: the block's first token.
        KEYS: whether padding has no rows.
    """
    rows = real if KEYS else seen
    tile = _tile(x + start * x_stride, x_stride, real, tl.arange(0, D_) < D, BLOCK, D_) * scale
    plain = _tile(y + start * y_stride, y_stride, rows, tl.arange(0, V_) < V, BLOCK, V_)
    if SCALED:
        at = start + tl.arange(0, BLOCK)
        factor = tl.load(a + at, mask=rows, other=0.0)
        number = tl.load(b + at, mask=rows, other=0.0)
        return tile, plain, plain * factor[:, None], factor, number
    else:
        ones = rows.to(tl.float32)
        return tile, plain, plain, ones, ones


@triton.jit
def _tokens(mask, batch, start, count, BLOCK: tl.constexpr):
    """Tell which tokens of a block are real and which are not beyond the end; `mask` [B, T] is None without padding."""
    at = start + tl.arange(0, BLOCK)
    seen = at < count
    if mask is None:
        return seen, seen
    else:
        return seen & (tl.load(mask + batch * count + at, mask=seen, other=0) != 0), seen


@triton.jit
def _load_half(state, N, V, N_: tl.constexpr, V_: tl.constexpr):
    """Load half a state [N, V + 1] -> its sums of y [N_, V_] and of b [N_]."""
    rows = tl.arange(0, N_) < N
    tile = _tile(state, V + 1, rows, tl.arange(0, V_) < V, N_, V_)
    return tile, tl.load(state + tl.arange(0, N_) * (V + 1) + V, mask=rows, other=0.0)


@triton.jit
def _load_state(state, N, V, HALVES: tl.constexpr, N_: tl.constexpr, V_: tl.constexpr):
    """Load a state [F, V + 1] -> the halves [N_, V_] of its sums of y, and [N_] of its sums of b."""
    upper, upper_b = _load_half(state, N, V, N_, V_)
    if HALVES == 2:
        lower, lower_b = _load_half(state + N * (V + 1), N, V, N_, V_)
        return upper, lower, upper_b, lower_b
    else:
        return upper, upper, upper_b, upper_b


@triton.jit
def _store_half(state, tile, number, N, V, N_: tl.constexpr, V_: tl.constexpr):
    """Store half a state [N, V + 1]."""
    rows = tl.arange(0, N_) < N
    _put(state, V + 1, tile, rows, tl.arange(0, V_) < V, N_, V_)
    tl.store(state + tl.arange(0, N_) * (V + 1) + V, number, mask=rows)


@triton.jit
def _add(upper, lower, upper_b, lower_b, p, n, rows, number, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """Add a block with features p and n [BLOCK, N_], rows [BLOCK, V_] and numbers [BLOCK] to a state."""
    upper += _product(tl.trans(p), rows, PRECISION)
    upper_b += tl.sum(p * number[:, None], axis=0)
    if HALVES == 2:
        lower += _product(tl.trans(n), rows, PRECISION)
        lower_b += tl.sum(n * number[:, None], axis=0)
    return upper, lower, upper_b, lower_b


@triton.jit
def _read(p, n, upper, lower, upper_b, lower_b, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """Read a state with features p and n [BLOCK, N_] -> the sums of y [BLOCK, V_] and of b [BLOCK]."""
    mixed = _product(p, upper, PRECISION)
    total = tl.sum(p * upper_b[None, :], axis=1)
    if HALVES == 2:
        mixed += _product(n, lower, PRECISION)
        total += tl.sum(n * lower_b[None, :], axis=1)
    return mixed, total


@triton.jit
def _scores(p, n, other_p, other_n, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply the features of two blocks -> [BLOCK, BLOCK]."""
    scores = _product(p, tl.trans(other_p), PRECISION)
    if HALVES == 2:
        scores += _product(n, tl.trans(other_n), PRECISION)
    return scores


@triton.jit
def _held(total, eps):
    """Keep the magnitude of a denominator at eps or more, as `linearize.ops.state.held` does."""
    return tl.where(tl.abs(total) < eps, tl.where(total < 0.0, -eps, eps), total)


@triton.jit(do_not_specialize=["count", "blocks", "slots"])
def sums(
    x, y, a, b, mask, first, second, bias, magnitude, states,
    xs_b, xs_h, xs_t, ys_b, ys_h, ys_t, scale, count, blocks, slots, heads, map_group, N, D, V,
    KEYS: tl.constexpr, SCALED: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Sum up a segment of a side, for all its heads: grid (B * heads, segments).

    The sums of segment s are stored in `states` [B * heads, slots, F, V + 1], at s; if they will be added up into
    states before each segment, at s + 1 (SLOTS = 1), or at segments - s if from the last to the first (SLOTS = -1).
    """
    row, segment = tl.program_id(0), tl.program_id(1)
    batch, head = row // heads, row % heads
    columns = tl.arange(0, N_) < N
    w, w2, w_bias, m = _weights(first, second, bias, magnitude, head // map_group, N, D, KIND, N_, D_)
    x += batch.to(tl.int64) * xs_b + head.to(tl.int64) * xs_h
    y += batch.to(tl.int64) * ys_b + head.to(tl.int64) * ys_h
    if SCALED:
        a += row.to(tl.int64) * count
        b += row.to(tl.int64) * count
    upper, lower = tl.zeros([N_, V_], tl.float32), tl.zeros([N_, V_], tl.float32)
    upper_b, lower_b = tl.zeros([N_], tl.float32), tl.zeros([N_], tl.float32)
    for i in range(0, blocks):
        start = (segment * blocks + i).to(tl.int64) * BLOCK
        real, seen = _tokens(mask, batch, start, count, BLOCK)
        tile, _, rows, _, number = _side(
            x, y, a, b, real, seen, start, xs_t, ys_t, scale, D, V, KEYS, SCALED, BLOCK, D_, V_
        )
        p, n = _map(tile, w, w2, w_bias, m, columns, KIND, PRECISION)
        upper, lower, upper_b, lower_b = _add(upper, lower, upper_b, lower_b, p, n, rows, number, HALVES, PRECISION)
    slot = segment
    if SLOTS == 1:
        slot = segment + 1
    elif SLOTS == -1:
        slot = tl.num_programs(1) - segment
    states += (row.to(tl.int64) * slots + slot) * HALVES * N * (V + 1)
    _store_half(states, upper, upper_b, N, V, N_, V_)
    if HALVES == 2:
        _store_half(states + N * (V + 1), lower, lower_b, N, V, N_, V_)


@triton.jit(do_not_specialize=["count", "blocks", "slots"])
def attend(
    q, k, v, a, mask, q_first, q_second, q_bias, q_magnitude, first, second, bias, magnitude, states, out, inverse,
    qs_b, qs_h, qs_t, ks_b, ks_h, ks_t, vs_b, vs_h, vs_t, os_b, os_h, os_t,
    scale, eps, count, blocks, slots, heads, groups, q_map_group, N, D, V,
    CAUSAL: tl.constexpr, SCALED: tl.constexpr, SAVE: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Attend from a segment of the queries of a head: grid (B * H, segments).

    Bidirectional: `states` [B * K, 1, F, V + 1] are the sums of all keys; the keys themselves are not read. CAUSAL:
    `states` [B * K, slots, F, V + 1] are the sums before each segment. With SAVE, the inverses of the guarded
    denominators are stored in `inverse` [B, H, T].
    """
    row, segment = tl.program_id(0), tl.program_id(1)
    batch, head = row // heads, row % heads
    key_head = head // groups
    key_row = batch * (heads // groups) + key_head
    columns = tl.arange(0, N_) < N
    w, w2, w_bias, m = _weights(q_first, q_second, q_bias, q_magnitude, head // q_map_group, N, D, KIND, N_, D_)
    q += batch.to(tl.int64) * qs_b + head.to(tl.int64) * qs_h
    out += batch.to(tl.int64) * os_b + head.to(tl.int64) * os_h
    states += key_row.to(tl.int64) * slots * HALVES * N * (V + 1)
    if CAUSAL:
        states += segment.to(tl.int64) * HALVES * N * (V + 1)
        k_w, k_w2, k_bias, k_m = _weights(first, second, bias, magnitude, key_head, N, D, KIND, N_, D_)
        k += batch.to(tl.int64) * ks_b + key_head.to(tl.int64) * ks_h
        v += batch.to(tl.int64) * vs_b + key_head.to(tl.int64) * vs_h
        if SCALED:
            a += key_row.to(tl.int64) * count
    upper, lower, upper_b, lower_b = _load_state(states, N, V, HALVES, N_, V_)
    for i in range(0, blocks):
        start = (segment * blocks + i).to(tl.int64) * BLOCK
        real, seen = _tokens(mask, batch, start, count, BLOCK)
        tile = _tile(q + start * qs_t, qs_t, real, tl.arange(0, D_) < D, BLOCK, D_) * scale
        p, n = _map(tile, w, w2, w_bias, m, columns, KIND, PRECISION)
        mixed, total = _read(p, n, upper, lower, upper_b, lower_b, HALVES, PRECISION)
        if CAUSAL:
            k_tile, _, rows, _, number = _side(
                k, v, a, a, real, seen, start, ks_t, vs_t, scale, D, V, True, SCALED, BLOCK, D_, V_
            )
            k_p, k_n = _map(k_tile, k_w, k_w2, k_bias, k_m, columns, KIND, PRECISION)
            scores = _scores(p, n, k_p, k_n, HALVES, PRECISION)
            at = tl.arange(0, BLOCK)
            scores = tl.where(at[:, None] >= at[None, :], scores, 0.0)
            mixed += _product(scores, rows, PRECISION)
            total += tl.sum(scores * number[None, :], axis=1)
            upper, lower, upper_b, lower_b = _add(
                upper, lower, upper_b, lower_b, k_p, k_n, rows, number, HALVES, PRECISION
            )
        factor = 1.0 / _held(total, eps)
        _put(out + start * os_t, os_t, mixed * factor[:, None], seen, tl.arange(0, V_) < V, BLOCK, V_)
        if SAVE:
            tl.store(inverse + row.to(tl.int64) * count + start + tl.arange(0, BLOCK), factor, mask=seen)


@triton.jit
def _map_gradient(x, p, n, dp, dn, w, second, m, columns, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradients of a map's projections, given those of the halves p and n of its features.

    They are those of the first one, before the bias, and of the second one [BLOCK, N_], and of m . x [BLOCK].
    """
    if KIND == "relu":
        first = tl.where(p > 0.0, dp, 0.0)
        return first, first, tl.sum(first, axis=1)
    elif KIND == "softmax_both":
        first = p * (dp - tl.sum(p * dp, axis=1)[:, None]) - n * (dn - tl.sum(n * dn, axis=1)[:, None])
        return first, first, tl.sum(first, axis=1)
    else:
        # p and n are (1 -+ sin 2 y) / 2 times an envelope: r = exp(4 tanh(m . x / 4)) times a softmax.
        y = 2.0 * _product(x, tl.trans(w), PRECISION)
        envelope = p + n
        first = (dn - dp) * envelope * tl.cos(y)
        slope = envelope * 0.5 * (dp + dn + (dn - dp) * tl.sin(y))
        total = tl.sum(slope, axis=1)
        tanh = _tanh(tl.sum(x * m[None, :], axis=1) * 0.25)
        # The softmax is the envelope over its sum, r.
        whole = tl.sum(envelope, axis=1)
        return first, slope - envelope * (total / whole)[:, None], total * (1.0 - tanh * tanh)


@triton.jit
def _add_near(dp, dn, mixed, total, p, n, rows, number, o_p, o_n, o_rows, o_number,
              KEYS: tl.constexpr, REVERSED: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Add the share of the other side's tokens o in the same block, as far as they are visible.

    It is added to the gradients dp and dn of the features p and n [BLOCK, N_] and, for keys, to those of the rows,
    mixed [BLOCK, V_] and total [BLOCK].
    """
    at = tl.arange(0, BLOCK)
    visible = at[:, None] <= at[None, :] if REVERSED else at[:, None] >= at[None, :]
    scores = _product(rows, tl.trans(o_rows), PRECISION) + number[:, None] * o_number[None, :]
    scores = tl.where(visible, scores, 0.0)
    dp += _product(scores, o_p, PRECISION)
    if HALVES == 2:
        dn += _product(scores, o_n, PRECISION)
    if KEYS:
        scores = _scores(p, n, o_p, o_n, HALVES, PRECISION)
        scores = tl.where(visible, scores, 0.0)
        mixed += _product(scores, o_rows, PRECISION)
        total += tl.sum(scores * o_number[None, :], axis=1)
    return dp, dn, mixed, total


@triton.jit
def _put_weights(dw, place, first, bias, second, magnitude, columns, d_columns, N, D, KIND: tl.constexpr,
                 N_: tl.constexpr, D_: tl.constexpr):  # fmt: skip
    """Store the gradients of a map's weights in the given place of dw [places, rows, D + 1]."""
    extra = 0
    if KIND == "positive_waves":
        extra = N + 1
    dw += place * (N + extra) * (D + 1)
    _store_half(dw, first, bias, N, D, N_, D_)
    if KIND == "positive_waves":
        dw += N * (D + 1)
        _put(dw, D + 1, second, columns, d_columns, N_, D_)
        tl.store(dw + N * (D + 1) + tl.arange(0, D_), magnitude, mask=d_columns)


@triton.jit(do_not_specialize=["count", "blocks", "slots"])
def gradients(  # noqa: C901, PLR0915
    x, y, a, b, x2, y2, a2, b2, mask, first, second, bias, magnitude, first2, second2, bias2, magnitude2,
    states, dx, dw, dy, da,
    xs_b, xs_h, xs_t, ys_b, ys_h, ys_t, xs2_b, xs2_h, xs2_t, ys2_b, ys2_h, ys2_t, ds_b, ds_h, ds_t, es_b, es_h, es_t,
    scale, count, blocks, slots, heads, group, group2, map_group, map_group2, state_group, N, D, V,
    CAUSAL: tl.constexpr, REVERSED: tl.constexpr, KEYS: tl.constexpr, KEYS2: tl.constexpr, SCALED: tl.constexpr,
    SCALED2: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    N_: tl.constexpr, D_: tl.constexpr, V_: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a segment of a side: grid (B * heads, segments).

    The gradient of a feature vector is `sum_j phi2_j ([y, b] . [y2_j, b2_j])` over the tokens j of the other side (all
    names with a 2), and the gradient of the rows [y, b] is `sum_j [y2_j, b2_j] (phi . phi2_j)`. Bidirectional: the sums
    over all j are in `states` [rows, 1, F, V + 1], and the other side is not read. CAUSAL: a slot has the sums of all
    segments before, or, if REVERSED, after this one.

    Group sizes: of heads that share x, x2, the maps of both and a state. Stored: dx [B, heads, T, D]; for keys dy
    [B, heads, T, V] and da [B, heads, T], the gradients of values and factors, da None if there are no factors; dw
    [B * heads, segments, rows, D + 1], the gradients of the first projection with that of the bias, of the second, and
    of the magnitude; dw is None if they are not needed.
    """
    row, segment = tl.program_id(0), tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    columns, d_columns, v_columns = tl.arange(0, N_) < N, tl.arange(0, D_) < D, tl.arange(0, V_) < V
    w, w2, w_bias, m = _weights(first, second, bias, magnitude, head // map_group, N, D, KIND, N_, D_)
    x += batch * xs_b + (head // group).to(tl.int64) * xs_h
    y += batch * ys_b + (head // group).to(tl.int64) * ys_h
    dx += batch * ds_b + head.to(tl.int64) * ds_h
    if SCALED:
        a += (batch * (heads // group) + head // group) * count
        b += (batch * (heads // group) + head // group) * count
    states += (batch * (heads // state_group) + head // state_group) * slots * HALVES * N * (V + 1)
    if CAUSAL:
        slot = segment
        if REVERSED:
            slot = tl.num_programs(1) - 1 - segment
        states += slot.to(tl.int64) * HALVES * N * (V + 1)
        o_w, o_w2, o_bias, o_m = _weights(first2, second2, bias2, magnitude2, head // map_group2, N, D, KIND, N_, D_)
        x2 += batch * xs2_b + (head // group2).to(tl.int64) * xs2_h
        y2 += batch * ys2_b + (head // group2).to(tl.int64) * ys2_h
        if SCALED2:
            a2 += (batch * (heads // group2) + head // group2) * count
            b2 += (batch * (heads // group2) + head // group2) * count
    upper, lower, upper_b, lower_b = _load_state(states, N, V, HALVES, N_, V_)
    if dw is not None:
        dw_first, d_bias = tl.zeros([N_, D_], tl.float32), tl.zeros([N_], tl.float32)
        dw_second, d_magnitude = tl.zeros([N_, D_], tl.float32), tl.zeros([D_], tl.float32)
    for i in range(0, blocks):
        block = i
        if REVERSED:
            block = blocks - 1 - i
        start = (segment * blocks + block).to(tl.int64) * BLOCK
        real, seen = _tokens(mask, batch, start, count, BLOCK)
        tile, plain, rows, factor, number = _side(
            x, y, a, b, real, seen, start, xs_t, ys_t, scale, D, V, KEYS, SCALED, BLOCK, D_, V_
        )
        p, n = _map(tile, w, w2, w_bias, m, columns, KIND, PRECISION)
        dp = _product(rows, tl.trans(upper), PRECISION) + number[:, None] * upper_b[None, :]
        dn = dp
        if HALVES == 2:
            dn = _product(rows, tl.trans(lower), PRECISION) + number[:, None] * lower_b[None, :]
        mixed, total = plain, number
        if KEYS:
            mixed, total = _read(p, n, upper, lower, upper_b, lower_b, HALVES, PRECISION)
        if CAUSAL:
            o_tile, _, o_rows, _, o_number = _side(
                x2, y2, a2, b2, real, seen, start, xs2_t, ys2_t, scale, D, V, KEYS2, SCALED2, BLOCK, D_, V_
            )
            o_p, o_n = _map(o_tile, o_w, o_w2, o_bias, o_m, columns, KIND, PRECISION)
            dp, dn, mixed, total = _add_near(
                dp, dn, mixed, total, p, n, rows, number, o_p, o_n, o_rows, o_number,
                KEYS, REVERSED, HALVES, PRECISION, BLOCK,
            )  # fmt: skip
            upper, lower, upper_b, lower_b = _add(
                upper, lower, upper_b, lower_b, o_p, o_n, o_rows, o_number, HALVES, PRECISION
            )
        if KEYS:
            _put(dy + batch * es_b + head.to(tl.int64) * es_h + start * es_t, es_t,
                 tl.where(real[:, None], mixed * factor[:, None], 0.0), seen, v_columns, BLOCK, V_)  # fmt: skip
            if da is not None:
                total += tl.sum(plain * mixed, axis=1)
                at = da + row.to(tl.int64) * count + start + tl.arange(0, BLOCK)
                tl.store(at, tl.where(real, total, 0.0), mask=seen)
        d_first, d_second, d_u = _map_gradient(tile, p, n, dp, dn, w, w2, m, columns, KIND, PRECISION)
        d_tile = _product(d_first, w, PRECISION)
        if KIND == "positive_waves":
            d_tile += _product(d_second, w2, PRECISION) + d_u[:, None] * m[None, :]
        _put(dx + start * ds_t, ds_t, tl.where(real[:, None], d_tile * scale, 0.0), seen, d_columns, BLOCK, D_)
        if dw is not None:
            dw_first += _product(tl.trans(d_first), tile, PRECISION)
            d_bias += tl.sum(d_first, axis=0)
            if KIND == "positive_waves":
                dw_second += _product(tl.trans(d_second), tile, PRECISION)
                d_magnitude += tl.sum(d_u[:, None] * tile, axis=0)
    if dw is not None:
        place = row.to(tl.int64) * tl.num_programs(1) + segment
        _put_weights(dw, place, dw_first, d_bias, dw_second, d_magnitude, columns, d_columns, N, D, KIND, N_, D_)


@triton.jit(do_not_specialize=["count"])
def slopes(out, gradient, inverse, b, os_b, os_h, os_t, gs_b, gs_h, gs_t, heads, count, eps, V,
           BLOCK: tl.constexpr, V_: tl.constexpr):  # fmt: skip
    """Store the gradients b [B, H, T] of the denominators: grid (B * H, blocks).

    A denominator that was held at eps is a constant.
    """
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * BLOCK
    batch, head = row // heads, row % heads
    seen, columns = start + tl.arange(0, BLOCK) < count, tl.arange(0, V_) < V
    o = _tile(out + batch * os_b + head * os_h + start * os_t, os_t, seen, columns, BLOCK, V_)
    g = _tile(gradient + batch * gs_b + head * gs_h + start * gs_t, gs_t, seen, columns, BLOCK, V_)
    at = row * count + start + tl.arange(0, BLOCK)
    factor = tl.load(inverse + at, mask=seen, other=0.0)
    slope = tl.where(tl.abs(factor) * eps < 0.99999, -factor * tl.sum(o * g, axis=1), 0.0)
    tl.store(b + at, slope, mask=seen)
