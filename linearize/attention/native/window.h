/* Softmax for near keys, a feature map for far keys, as in `linearize.ops.window`: tile after tile, with all weights of a
   tile in cache.

   Padding comes after all tokens. The queries of a tile have exact weights for the keys in their windows, for the sinks,
   and for exact keys. Other keys near the tile but outside a query's window get individual kernel weights. Keys before
   and after those enter as states. Four parts, each with its own scale, are joined row by row. */

#ifndef LINEARIZE_WINDOW_H
#define LINEARIZE_WINDOW_H

#include "window_step.h"

/* The additional arrays of a thread; here the usual arrays have the length of a tile's near keys. */
typedef struct {
    scratch_t s;
    float *memory, *q, *k, *scores, *products;             /* [D, TILE], [D, near], and [TILE, near] */
    float *exact, *linear, *exact_sums, *linear_sums;      /* [TILE, width], [TILE] */
    float *exact_levels, *linear_levels, *query_scale;     /* [TILE] */
    float *other_k, *other_v, *other_scores;               /* sinks, then slots: [D, others], [others, width], [TILE, others] */
    float *slot_phi, *slot_scale, *slot_products;          /* causally: [F, slots], [slots], [TILE, slots] */
    /* A slot holds an exact key that is not near: the query at which it stops being exact (0: empty), and its token. */
    int32_t *slot_until, *slot_token;
    long sinks, slots, others, losing;                     /* counts; losing: slots, or 0 if no tile changes them */
    const int32_t *until;                                  /* of the head's keys, from `contest`; or null */
    float *ahead, *ahead_sums, *ahead_levels;              /* [T, width], [T]; not causally */
    float *row;                                            /* [width] */
} near_t;

/* Whether features can differ from zero: those of the kernel "none" cannot. */
INLINE int has_kernel(const call_t *c) { return c->keys.kind != RELU || c->keys.amplitude != 0.0f; }

/* How far the near keys of a tile reach before and after it. */
INLINE long reach_before(const window_t *w) { return w->causal ? w->size - 1 : w->size / 2; }
INLINE long reach_later(const window_t *w) { return w->causal ? 0 : w->size / 2; }

static int prepare_window(const call_t *c, const window_t *w, near_t *m) {
    long size = c->keys.size, f = c->features, width = padded(c->value_size), rows = w->causal ? 0 : c->tokens;
    scratch_t *s = &m->s;
    long near = padded(TILE + reach_before(w) + reach_later(w)), slots = least(w->exact_keys, c->tokens);
    m->sinks = least(w->sinks, c->tokens);
    m->slots = slots;
    m->others = padded(m->sinks + slots);
    slots = padded(slots);
    const part_t parts[] = {
        {&s->x, size * near}, {&s->phi_k, f * near}, {&s->phi_q, f * TILE}, {&s->other, f * near},
        {&s->scale, near}, {&s->weight, near}, {&s->values, near * width}, {&s->mixed, TILE * width}, {&s->sums, TILE},
        {&s->kv, f * width}, {&s->z, f},
        {&m->q, size * TILE}, {&m->k, size * near}, {&m->scores, TILE * near}, {&m->products, TILE * near},
        {&m->exact, TILE * width}, {&m->linear, TILE * width}, {&m->exact_sums, TILE}, {&m->linear_sums, TILE},
        {&m->exact_levels, TILE}, {&m->linear_levels, TILE}, {&m->query_scale, TILE},
        {&m->other_k, size * m->others}, {&m->other_v, m->others * width}, {&m->other_scores, TILE * m->others},
        {&m->slot_phi, f * slots}, {&m->slot_scale, slots}, {&m->slot_products, TILE * slots},
        {(float **)&m->slot_until, slots}, {(float **)&m->slot_token, slots},
        {&m->ahead, rows * width}, {&m->ahead_sums, rows}, {&m->ahead_levels, rows}, {&m->row, width},
    };
    s->rounded_head[0] = s->rounded_head[1] = -1;
    s->width = width;
    s->saved = 0;
    m->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    return m->memory != 0;
}

/* The number of tokens without padding. */
INLINE long real_tokens(const call_t *c, long b) {
    long real = 0;
    while (real < c->tokens && !is_padding(c, b, real)) real++;
    return real;
}

/* Let the keys of a head compete for its places, as in linearize/ops/window_causal.py: `until` of a key is the first
   query outside its window for which it is not exact. Causally, key j competes at query j + size; otherwise all keys
   compete at once, and `until` is NEVER or 0. */
static void contest(const call_t *c, const window_t *w, long n, int32_t *kept) {
    const float *priority = w->priority + n * c->tokens;
    int32_t *until = w->until + n * c->tokens;
    long held = 0, last = real_tokens(c, n / c->key_heads) - (w->causal ? w->size : 0), weakest = 0;
    memset(until, 0, c->tokens * sizeof *until);
    for (long j = w->sinks; j < last; j++) {
        if (held == w->exact_keys) {
            if (!(rank_of(priority[j]) > rank_of(priority[kept[weakest]]))) continue;
            until[kept[weakest]] = w->causal ? j + w->size : 0;
            held--;
            memmove(kept + weakest, kept + weakest + 1, (held - weakest) * sizeof *kept);
        }
        until[j] = NEVER;
        kept[held++] = j;
        if (held < w->exact_keys) continue;
        weakest = 0;
        for (long i = 1; i < held; i++)
            if (rank_of(priority[kept[i]]) <= rank_of(priority[kept[weakest]])) weakest = i;
    }
}

/* Whether a key outside the window of query t is exact. */
INLINE int is_exact(const int32_t *until, long t, long key) { return until && t < until[key]; }

/* Put an exact key into a free slot; if causal, with column j of the features, so that it can be added to the state
   later. */
static void fill_slot(const call_t *c, const window_t *w, long b, long h, long token, long j, long wide, near_t *m) {
    const void *k = token_at(c->k, c->type, c->k_stride, b, h, token);
    long slot = 0;
    while (m->slot_until[slot]) slot++;
    m->slot_until[slot] = m->until[token];
    m->slot_token[slot] = token;
    for (long d = 0; d < c->keys.size; d++) m->other_k[d * m->others + m->sinks + slot] = number(k, c->type, d);
    read_row(token_at(c->v, c->value_type, c->v_stride, b, h, token), c->value_type, c->value_size, 1.0f,
             m->other_v + (m->sinks + slot) * m->s.width);
    if (!w->causal) return;
    m->slot_scale[slot] = m->s.scale[j];
    for (long i = 0; i < c->features; i++) m->slot_phi[i * padded(m->slots) + slot] = m->s.phi_k[i * wide + j];
}

/* Raise the state's log-scale `top` to `scale` if that is larger. */
static void raise_state(const call_t *c, float scale, scratch_t *s, float *top) {
    float before = *top;
    *top = highest(scale, before);
    if (*top != before) decay_state(c, s->width, s->kv, s->z, expf(before - *top));
}

/* Move keys that are no longer exact for query t from their slots into the state. */
static void empty_slots(const call_t *c, long t, near_t *m, float *top) {
    scratch_t *s = &m->s;
    for (long slot = 0; slot < m->slots; slot++) {
        if (!m->slot_until[slot] || t < m->slot_until[slot]) continue;
        const float *value = m->other_v + (m->sinks + slot) * s->width;
        raise_state(c, m->slot_scale[slot], s, top);
        float weight = expf(m->slot_scale[slot] - *top);
        for (long i = 0; i < c->features; i++) {
            float phi = m->slot_phi[i * padded(m->slots) + slot] * weight, *row = s->kv + i * s->width;
            for (long j = 0; j < s->width; j += W) store(row + j, load(row + j) + phi * load(value + j));
            s->z[i] += phi;
        }
        m->slot_until[slot] = 0;
    }
}

/* Features and log-scales of keys outside the window of query t; padding, sinks and exact keys get no linear weight and
   no scale. */
static void far_keys(const call_t *c, const window_t *w, long b, long h, long t, long first, long count, near_t *m) {
    scratch_t *s = &m->s;
    key_features(c, b, h, first, count, s);
    for (long j = 0; j < padded(count); j++) {
        int exact = j < count && is_exact(m->until, t, first + j);
        if (exact && w->causal) fill_slot(c, w, b, h, first + j, j, padded(count), m);
        if (exact || first + j < w->sinks) s->weight[j] = 0.0f;
        if (s->weight[j] == 0.0f) s->scale[j] = FLOOR;
    }
}

/* Add the keys `first` to `last` to the state for query t; `top` is the log-scale of the state. */
static void add_keys(const call_t *c, const window_t *w, long b, long h, long t, long first, long last, near_t *m,
                     float *top) {
    scratch_t *s = &m->s;
    for (; first < last; first += TILE) {
        long count = least(TILE, last - first);
        float largest = FLOOR;
        far_keys(c, w, b, h, t, first, count, m);
        for (long j = 0; j < count; j++) largest = highest(s->scale[j], largest);
        raise_state(c, largest, s, top);
        if (!has_kernel(c)) continue;
        scale_weights(s, count, *top);
        weighted_values(c, b, h, first, count, s);
        accumulate_keys(c, s, count);
    }
}

/* Pack tokens as columns [size, wide], times a factor; zeros for padding. */
static void pack_tokens(const call_t *c, const void *x, const int64_t *stride, long b, long h, long first, long count,
                        float factor, float *to, long wide) {
    long size = c->keys.size;
    pack_transposed(token_at(x, c->type, stride, b, h, first), c->type, stride[2], count, size, factor, to, wide);
    clear_padding(c, b, first, count, to, size, wide);
}

/* Load the sinks and, if all are known from the start, the exact keys. */
static void load_others(const call_t *c, const window_t *w, long b, long h, near_t *m) {
    long width = m->s.width;
    m->until = w->exact_keys ? w->until + (b * c->key_heads + h) * c->tokens : 0;
    memset(m->slot_until, 0, m->slots * sizeof *m->slot_until);
    memset(m->other_v, 0, m->others * width * sizeof(float));
    if (m->sinks) pack_tokens(c, c->k, c->k_stride, b, h, 0, m->sinks, 1.0f, m->other_k, m->others);
    for (long j = 0; j < m->sinks; j++)
        if (!is_padding(c, b, j))
            read_row(token_at(c->v, c->value_type, c->v_stride, b, h, j), c->value_type, c->value_size, 1.0f,
                     m->other_v + j * width);
    for (long j = 0; j < m->slots; j++) m->slot_token[j] = -1;
    for (long j = 0; m->until && !w->causal && j < c->tokens; j++)
        if (m->until[j]) fill_slot(c, w, b, h, j, 0, 0, m);
}

/* Turn the scores `first` to `last` of a row into weights exp(score - top); all other columns become zero. */
INLINE void weigh_row(float *row, long wide, long first, long last, float top) {
    for (long j = first / W * W; j < last; j += W) store(row + j, vexp(load(row + j) - top));
    memset(row, 0, first * sizeof(float));
    memset(row + last, 0, (wide - last) * sizeof(float));
}

INLINE float largest(const float *row, long first, long last, float top) {
    for (long j = first; j < last; j++) top = highest(row[j], top);
    return top;
}

INLINE float sum_of(const float *row, long wide) {
    vf sum = {0};
    for (long j = 0; j < wide; j += W) sum += load(row + j);
    return total(sum);
}

/* The near keys that row r, which is query `t`, sees: `first` to `last` are in its window, the rest of `near` outside. */
typedef struct {
    long r, t, from, first, last, near;
} seen_t;

/* Key j, or the first key after the window. */
INLINE long outside(const seen_t *n, long j) { return j == n->first ? n->last : j; }

/* Write `value` to the near keys outside the window that are exact, or to those that are not exact. */
INLINE void write_outside(const int32_t *until, const seen_t *n, int exact, float value, float *row) {
    for (long j = outside(n, 0); until && j < n->near; j = outside(n, j + 1))
        if (is_exact(until, n->t, n->from + j) == exact) row[j] = value;
}

/* Write `value` to the slots that are not exact for query t. */
INLINE void write_slots(const near_t *m, long t, float value, float *row) {
    for (long j = 0; j < m->slots; j++)
        if (t >= m->slot_until[j]) row[m->sinks + j] = value;
}

/* The exact weights of a row: of its window, of the near exact keys, of `sinks` sinks and of the slots. */
static void exact_row(const window_t *w, near_t *m, const seen_t *n, long wide, long sinks) {
    long before = least(sinks, n->t - reach_before(w)), later = sinks, filled = m->sinks + m->slots;
    long first = m->until ? 0 : n->first, last = m->until ? n->near : n->last;
    float *row = m->scores + n->r * wide, *more = m->other_scores + n->r * m->others;
    /* Sinks in the window are already counted: the others are before it or, if not causal, after it. */
    if (before < 0) before = 0;
    if (!w->causal) later = least(sinks, n->t + reach_later(w) + 1);
    write_outside(m->until, n, 0, FLOOR, row);
    write_slots(m, n->t, FLOOR, more);
    float top = largest(more, later, sinks, largest(more, 0, before, largest(row, first, last, FLOOR)));
    top = largest(more, m->sinks, filled, top);
    weigh_row(row, wide, first, last, top);
    write_outside(m->until, n, 0, 0.0f, row);
    m->exact_sums[n->r] = sum_of(row, wide);
    m->exact_levels[n->r] = top;
    if (!filled) return;
    weigh_row(more, m->others, 0, filled, top);
    memset(more + before, 0, (later - before) * sizeof(float));
    memset(more + sinks, 0, (m->sinks - sinks) * sizeof(float));
    write_slots(m, n->t, 0.0f, more);
    m->exact_sums[n->r] += sum_of(more, m->others);
}

/* The kernel's weights of a row: of the near keys outside its window that are not exact, and of slots that no longer
   are. */
static void linear_row(near_t *m, const seen_t *n, long wide) {
    const scratch_t *s = &m->s;
    long first = n->first, last = n->last, seen = n->near;
    float *row = m->products + n->r * wide, *slots = m->slot_products + n->r * padded(m->slots), top = FLOOR;
    for (long j = outside(n, 0); j < seen; j = outside(n, j + 1))
        if (!is_exact(m->until, n->t, n->from + j)) top = highest(s->scale[j], top);
    for (long j = 0; j < m->losing; j++)
        if (m->slot_until[j] && n->t >= m->slot_until[j]) top = highest(m->slot_scale[j], top);
    /* Later keys may have larger scales, so set them to zero before they are used. */
    memset(row + first, 0, (last - first) * sizeof(float));
    memset(row + seen, 0, (wide - seen) * sizeof(float));
    write_outside(m->until, n, 1, 0.0f, row);
    for (long j = 0; j < padded(seen); j += W) {
        vf scale = load(s->scale + j) - top, high = splat(0.0f);
        scale = -larger(-scale, high);
        store(row + j, load(row + j) * load(s->weight + j) * vexp(scale));
    }
    m->linear_sums[n->r] = sum_of(row, wide);
    m->linear_levels[n->r] = top;
    for (long j = 0; j < m->losing; j++) {
        int lost = m->slot_until[j] && n->t >= m->slot_until[j];
        slots[j] = lost ? slots[j] * expf(m->slot_scale[j] - top) : 0.0f;
        m->linear_sums[n->r] += slots[j];
    }
}

/* Add a part, e^level times `row` and its sum, to `to`, whose level is `top`; skip it if it counts as absent. */
INLINE void add_part(const float *row, float sum, float level, float size, float top, long width, float *to,
                     float *to_sum) {
    if (size <= TINY) return;
    float factor = expf(level - top);
    for (long j = 0; j < width; j += W) store(to + j, load(to + j) + load(row + j) * factor);
    *to_sum += sum * factor;
}

INLINE float part_size(const float *row, float sum, long width) {
    vf top = {0}, odd = {0};
    for (long j = 0; j < width; j += W) {
        vf x = load(row + j);
        top = farther(x, top);
        odd += x * 0.0f; /* keep NaN, which the maximum ignores */
    }
    float size = fabsf(sum);
    for (int i = 0; i < W; i++) size = highest(top[i], size);
    return size + total(odd);
}

/* Join the parts of a row and write it. */
static void join_row(const call_t *c, const window_t *w, near_t *m, long b, long h, long r, long t, float later) {
    long width = m->s.width;
    float scale = m->query_scale[r], top = FLOOR, sum = 0.0f;
    int ahead = !w->causal;
    const float *rows[4] = {m->exact + r * width, m->linear + r * width, m->s.mixed + r * width, m->ahead + t * width};
    float sums[4] = {m->exact_sums[r], m->linear_sums[r], m->s.sums[r], ahead ? m->ahead_sums[t] : 0.0f};
    float levels[4] = {m->exact_levels[r], m->linear_levels[r] + scale, later + scale,
                       ahead ? m->ahead_levels[t] + scale : FLOOR};
    float sizes[4], *to = m->row;
    long parts = ahead ? 4 : 3;
    for (long i = 0; i < parts; i++) {
        sizes[i] = part_size(rows[i], sums[i], width);
        if (!(sizes[i] <= TINY)) top = highest(levels[i] + logf(sizes[i]), top);
    }
    memset(to, 0, width * sizeof(float));
    for (long i = 0; i < parts; i++) add_part(rows[i], sums[i], levels[i], sizes[i], top, width, to, &sum);
    write_row(c, to, sum, c->eps, b, h, t);
    if (!w->tops) return;
    w->tops[(b * c->heads + h) * c->tokens + t] = top;
    w->row_sums[(b * c->heads + h) * c->tokens + t] = sum;
}

/* For every tile, from the last to the first: the state of the keys after its near keys. */
static void read_ahead(const call_t *c, const window_t *w, long b, long h, long key_head, long real, near_t *m) {
    scratch_t *s = &m->s;
    float top = FLOOR;
    long bound = real;
    load_state(c, 0, 0, 1.0f, s);
    for (long t = (c->tokens - 1) / TILE * TILE; t >= 0; t -= TILE) {
        long count = least(TILE, c->tokens - t), first = least(bound, t + count + reach_later(w));
        add_keys(c, w, b, key_head, t, first, bound, m, &top);
        bound = first;
        query_features(c, b, h, t, count, s);
        read_out(c, s, count);
        memcpy(m->ahead + t * s->width, s->mixed, count * s->width * sizeof(float));
        memcpy(m->ahead_sums + t, s->sums, count * sizeof(float));
        for (long r = 0; r < count; r++) m->ahead_levels[t + r] = top;
    }
}

/* One tile of queries from `t` on, given the state. */
static void window_tile(const call_t *c, const window_t *w, long b, long h, long key_head, long real, long t,
                        float later, near_t *m) {
    scratch_t *s = &m->s;
    long count = least(TILE, c->tokens - t), wide_q = padded(count), size = c->keys.size, width = s->width;
    long from = t - reach_before(w) > 0 ? t - reach_before(w) : 0, to = least(c->tokens, t + count + reach_later(w));
    long near = to - from, wide = padded(near), sinks = least(w->sinks, real), slots = padded(m->slots);
    m->losing = 0;
    for (long j = 0; j < m->slots; j++) {
        /* If not causal, near keys are not read from their slots either. */
        if (!w->causal) m->slot_until[j] = m->slot_token[j] < 0 || (from <= m->slot_token[j] && m->slot_token[j] < to) ? 0 : NEVER;
        if (has_kernel(c) && m->slot_until[j] && m->slot_until[j] < t + count) m->losing = m->slots;
    }
    prefetch_out(c, b, h, t, count);
    query_features(c, b, h, t, count, s);
    for (long r = 0; r < count; r++) {
        m->query_scale[r] = c->queries.scaled ? s->scale[r] : 0.0f;
        if (c->query_scale) m->query_scale[r] += c->query_scale[(b * c->heads + h) * c->tokens + t + r];
    }
    read_out(c, s, count);
    pack_tokens(c, c->q, c->q_stride, b, h, t, count, w->scaling, m->q, wide_q);
    pack_tokens(c, c->k, c->k_stride, b, key_head, from, near, 1.0f, m->k, wide);
    key_features(c, b, key_head, from, near, s);
    /* Inside the window a key with a NaN log-scale counts like any other. */
    for (long j = 0; j < near; j++) s->weight[j] = !is_padding(c, b, from + j);
    weighted_values(c, b, key_head, from, near, s);
    for (long j = 0; j < wide; j++) {
        if (from + j < w->sinks) s->weight[j] = 0.0f;
        if (s->weight[j] == 0.0f) s->scale[j] = FLOOR;
    }
    product(0, count, wide, size, m->q, 1, wide_q, m->k, wide, m->scores, wide);
    if (has_kernel(c)) product(0, count, wide, c->features, s->phi_q, 1, wide_q, s->phi_k, wide, m->products, wide);
    product(0, count, m->others, size, m->q, 1, wide_q, m->other_k, m->others, m->other_scores, m->others);
    if (m->losing)
        product(0, count, slots, c->features, s->phi_q, 1, wide_q, m->slot_phi, slots, m->slot_products, slots);
    for (long r = 0; r < count; r++) {
        long first = t + r - reach_before(w) - from, last = least(least(t + r + reach_later(w) + 1, real), to) - from;
        if (first < 0) first = 0;
        if (last < first) last = first = least(first, near);
        const seen_t n = {r, t + r, from, first, last, w->causal ? last : near};
        exact_row(w, m, &n, wide, sinks);
        if (has_kernel(c)) linear_row(m, &n, wide);
    }
    product(0, count, width, wide, m->scores, wide, 1, s->values, width, m->exact, width);
    product(1, count, width, m->others, m->other_scores, m->others, 1, m->other_v, width, m->exact, width);
    if (has_kernel(c)) product(0, count, width, wide, m->products, wide, 1, s->values, width, m->linear, width);
    if (m->losing)
        product(1, count, width, m->slots, m->slot_products, slots, 1, m->other_v + m->sinks * width, width, m->linear,
                width);
    for (long r = 0; r < count; r++) join_row(c, w, m, b, h, r, t + r, later);
}

/* One query head; if causal, the first head of a group also stores the final state. */
static void window_head(const call_t *c, const window_t *w, long i, near_t *m) {
    long b = i / c->heads, h = i % c->heads, group = c->heads / c->key_heads, key_head = h / group;
    long real = real_tokens(c, b), bound = 0;
    float top = FLOOR;
    load_others(c, w, b, key_head, m);
    if (!w->causal) read_ahead(c, w, b, h, key_head, real, m);
    load_state(c, 0, 0, 1.0f, &m->s);
    for (long t = 0; t < c->tokens; t += TILE) {
        /* If causal, stop at the keys that have left the window at the end, because padding follows. */
        long last = least(t - reach_before(w), w->causal ? real - w->size : real);
        empty_slots(c, t, m, &top);
        add_keys(c, w, b, key_head, t, bound, last, m, &top);
        if (last > bound) bound = last;
        window_tile(c, w, b, h, key_head, real, t, top, m);
    }
    if (!w->causal || h % group) return;
    empty_slots(c, real - 1, m, &top);
    add_keys(c, w, b, key_head, real - 1, bound, real - w->size, m, &top);
    store_state(c, &m->s, b * c->key_heads + key_head, 1.0f, c->kv);
    c->log_scale[b * c->key_heads + key_head] = top;
}

/* Softmax inside a window, for the sinks and for the exact keys; the kernel elsewhere. Returns DONE or NO_MEMORY. */
int linearize_window(const call_t *c, const window_t *w) {
    int failed = DONE;
    advise_huge_pages(c);
#pragma omp parallel num_threads(c->threads)
    {
        near_t m;
        int ready = prepare_window(c, w, &m);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long n = 0; n < (w->exact_keys ? c->batch * c->key_heads : 0); n++) contest(c, w, n, m.slot_token);
#pragma omp for schedule(dynamic)
            for (long i = 0; i < c->batch * c->heads; i++) window_head(c, w, i, &m);
        }
        if (ready) free(m.memory);
    }
    return failed;
}

#endif
