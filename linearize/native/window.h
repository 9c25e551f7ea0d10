/* Softmax near, a feature map far: tile after tile, all weights of a tile in cache. See `linearize.ops.window`.

   Real tokens lie in front, padding behind them. A tile's queries have exact weights for the keys of their windows and
   for the sinks; keys near the tile but outside a query's window get the kernel's weights one by one; those before and
   behind them come as states. Four parts, each under a scale of its own, are joined row by row. */

#ifndef LINEARIZE_WINDOW_H
#define LINEARIZE_WINDOW_H

#include "window_step.h"

/* A thread's arrays beside the usual ones, which are as long as a tile's near keys here. */
typedef struct {
    scratch_t s;
    float *memory, *q, *k, *scores, *products;             /* [D, TILE], [D, near], and [TILE, near] */
    float *exact, *linear, *exact_sums, *linear_sums;      /* [TILE, width], [TILE] */
    float *exact_levels, *linear_levels, *query_scale;     /* [TILE] */
    float *sink_k, *sink_v, *sink_scores;                  /* [D, sinks], [sinks, width], [TILE, sinks] */
    float *ahead, *ahead_sums, *ahead_levels;              /* [T, width], [T]; not causally */
    float *row;                                            /* [width] */
} near_t;

/* How far the near keys of a tile reach before and behind it. */
INLINE long reach_before(const window_t *w) { return w->causal ? w->size - 1 : w->size / 2; }
INLINE long reach_behind(const window_t *w) { return w->causal ? 0 : w->size / 2; }

static int prepare_window(const call_t *c, const window_t *w, near_t *m) {
    long size = c->keys.size, f = c->features, width = padded(c->value_size), rows = w->causal ? 0 : c->tokens;
    scratch_t *s = &m->s;
    long near = padded(TILE + reach_before(w) + reach_behind(w)), sinks = padded(w->sinks);
    const part_t parts[] = {
        {&s->x, size * near}, {&s->phi_k, f * near}, {&s->phi_q, f * TILE}, {&s->other, f * near},
        {&s->scale, near}, {&s->weight, near}, {&s->values, near * width}, {&s->mixed, TILE * width}, {&s->sums, TILE},
        {&s->kv, f * width}, {&s->z, f},
        {&m->q, size * TILE}, {&m->k, size * near}, {&m->scores, TILE * near}, {&m->products, TILE * near},
        {&m->exact, TILE * width}, {&m->linear, TILE * width}, {&m->exact_sums, TILE}, {&m->linear_sums, TILE},
        {&m->exact_levels, TILE}, {&m->linear_levels, TILE}, {&m->query_scale, TILE},
        {&m->sink_k, size * sinks}, {&m->sink_v, sinks * width}, {&m->sink_scores, TILE * sinks},
        {&m->ahead, rows * width}, {&m->ahead_sums, rows}, {&m->ahead_levels, rows}, {&m->row, width},
    };
    s->rounded_head[0] = s->rounded_head[1] = -1;
    s->width = width;
    s->saved = 0;
    m->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    return m->memory != 0;
}

/* Features and values of keys; those that are padding or sinks get no weight among the linear ones, and no scale. */
static void near_keys(const call_t *c, const window_t *w, long b, long h, long first, long count, scratch_t *s) {
    key_features(c, b, h, first, count, s);
    for (long j = 0; j < padded(count); j++) {
        if (first + j < w->sinks) s->weight[j] = 0.0f;
        if (s->weight[j] == 0.0f) s->scale[j] = FLOOR;
    }
}

/* Add keys from `first` to `last` to the state, whose log-scale is `top`. */
static void add_keys(const call_t *c, const window_t *w, long b, long h, long first, long last, scratch_t *s,
                     float *top) {
    for (long t = first; t < last; t += TILE) {
        long count = least(TILE, last - t);
        float before = *top;
        near_keys(c, w, b, h, t, count, s);
        for (long j = 0; j < count; j++) *top = highest(s->scale[j], *top);
        if (*top != before) decay_state(c, s->width, s->kv, s->z, expf(before - *top));
        scale_weights(s, count, *top);
        weighted_values(c, b, h, t, count, s);
        accumulate_keys(c, s, count);
    }
}

/* Tokens side by side [size, wide], times a factor; zeros for padding. */
static void pack_tokens(const call_t *c, const void *x, const int64_t *stride, long b, long h, long first, long count,
                        float factor, float *to) {
    long size = c->keys.size, wide = padded(count);
    pack_transposed(token_at(x, c->type, stride, b, h, first), c->type, stride[2], count, size, factor, to, wide);
    clear_padding(c, b, first, count, to, size, wide);
}

static void load_sinks(const call_t *c, const window_t *w, long b, long h, near_t *m) {
    long width = m->s.width, count = least(w->sinks, c->tokens);
    if (!count) return;
    pack_tokens(c, c->k, c->k_stride, b, h, 0, count, 1.0f, m->sink_k);
    memset(m->sink_v, 0, padded(w->sinks) * width * sizeof(float));
    for (long j = 0; j < count; j++)
        if (!is_padding(c, b, j))
            read_row(token_at(c->v, c->value_type, c->v_stride, b, h, j), c->value_type, c->value_size, 1.0f,
                     m->sink_v + j * width);
}

/* Turn a row's scores into weights exp(score - top), those from `first` to `last`, and zeros around them. */
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

/* The exact weights of row r, the token `t`: of the keys first to last of the near ones, and of `sinks` sinks. */
static void exact_row(const window_t *w, near_t *m, long r, long t, long first, long last, long wide, long sinks) {
    long wide_sinks = padded(sinks), before = least(sinks, t - reach_before(w)), behind = sinks;
    float *row = m->scores + r * wide, *more = m->sink_scores + r * wide_sinks;
    /* Sinks in the window are there already: left are those before it and, not causally, those behind it. */
    if (before < 0) before = 0;
    if (!w->causal) behind = least(sinks, t + reach_behind(w) + 1);
    float top = largest(more, behind, sinks, largest(more, 0, before, largest(row, first, last, FLOOR)));
    weigh_row(row, wide, first, last, top);
    m->exact_sums[r] = sum_of(row, wide);
    m->exact_levels[r] = top;
    if (!sinks) return;
    weigh_row(more, wide_sinks, 0, sinks, top);
    memset(more + before, 0, (behind - before) * sizeof(float));
    m->exact_sums[r] += sum_of(more, wide_sinks);
}

/* The kernel's weights of row r: of the near keys before `first` and from `last` on, up to `seen`. */
static void linear_row(near_t *m, long r, long first, long last, long seen, long wide) {
    float *row = m->products + r * wide;
    const scratch_t *s = &m->s;
    float top = largest(s->scale, last, seen, largest(s->scale, 0, first, FLOOR));
    /* Behind what is seen there may be larger scales: they are cleared before anything is made of them. */
    memset(row + first, 0, (last - first) * sizeof(float));
    memset(row + seen, 0, (wide - seen) * sizeof(float));
    for (long j = 0; j < padded(seen); j += W) {
        vf scale = load(s->scale + j) - top, high = splat(0.0f);
        scale = -larger(-scale, high);
        store(row + j, load(row + j) * load(s->weight + j) * vexp(scale));
    }
    m->linear_sums[r] = sum_of(row, wide);
    m->linear_levels[r] = top;
}

/* Add a part, e^level times `row` and its sum, to `to`, whose own level is `top`; nothing where it counts as absent. */
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
        odd += x * 0.0f; /* what is not a number, the maximum drops */
    }
    float size = fabsf(sum);
    for (int i = 0; i < W; i++) size = highest(top[i], size);
    return size + total(odd);
}

/* Join the parts of a row and write it. */
static void join_row(const call_t *c, const window_t *w, near_t *m, long b, long h, long r, long t, float behind) {
    long width = m->s.width;
    float scale = m->query_scale[r], top = FLOOR, sum = 0.0f;
    int ahead = !w->causal;
    const float *rows[4] = {m->exact + r * width, m->linear + r * width, m->s.mixed + r * width, m->ahead + t * width};
    float sums[4] = {m->exact_sums[r], m->linear_sums[r], m->s.sums[r], ahead ? m->ahead_sums[t] : 0.0f};
    float levels[4] = {m->exact_levels[r], m->linear_levels[r] + scale, behind + scale,
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

/* What lies behind the near keys of every tile, from the last tile to the first. */
static void read_ahead(const call_t *c, const window_t *w, long b, long h, long key_head, long real, near_t *m) {
    scratch_t *s = &m->s;
    float top = FLOOR;
    long bound = real;
    load_state(c, 0, 0, 1.0f, s);
    for (long t = (c->tokens - 1) / TILE * TILE; t >= 0; t -= TILE) {
        long count = least(TILE, c->tokens - t), first = least(bound, t + count + reach_behind(w));
        add_keys(c, w, b, key_head, first, bound, s, &top);
        bound = first;
        query_features(c, b, h, t, count, s);
        read_out(c, s, count);
        memcpy(m->ahead + t * s->width, s->mixed, count * s->width * sizeof(float));
        memcpy(m->ahead_sums + t, s->sums, count * sizeof(float));
        for (long r = 0; r < count; r++) m->ahead_levels[t + r] = top;
    }
}

/* One tile of queries from `t` on, behind the state. */
static void window_tile(const call_t *c, const window_t *w, long b, long h, long key_head, long real, long t,
                        float behind, near_t *m) {
    scratch_t *s = &m->s;
    long count = least(TILE, c->tokens - t), wide_q = padded(count), size = c->keys.size, width = s->width;
    long from = t - reach_before(w) > 0 ? t - reach_before(w) : 0, to = least(c->tokens, t + count + reach_behind(w));
    long near = to - from, wide = padded(near), sinks = least(w->sinks, real);
    prefetch_out(c, b, h, t, count);
    query_features(c, b, h, t, count, s);
    for (long r = 0; r < count; r++) {
        m->query_scale[r] = c->queries.scaled ? s->scale[r] : 0.0f;
        if (c->query_scale) m->query_scale[r] += c->query_scale[(b * c->heads + h) * c->tokens + t + r];
    }
    read_out(c, s, count);
    pack_tokens(c, c->q, c->q_stride, b, h, t, count, w->scaling, m->q);
    pack_tokens(c, c->k, c->k_stride, b, key_head, from, near, 1.0f, m->k);
    key_features(c, b, key_head, from, near, s);
    weighted_values(c, b, key_head, from, near, s);
    for (long j = 0; j < wide; j++) {
        if (from + j < w->sinks) s->weight[j] = 0.0f;
        if (s->weight[j] == 0.0f) s->scale[j] = FLOOR;
    }
    product(0, count, wide, size, m->q, 1, wide_q, m->k, wide, m->scores, wide);
    product(0, count, wide, c->features, s->phi_q, 1, wide_q, s->phi_k, wide, m->products, wide);
    if (sinks) product(0, count, padded(sinks), size, m->q, 1, wide_q, m->sink_k,
                       padded(least(w->sinks, c->tokens)), m->sink_scores, padded(sinks));
    for (long r = 0; r < count; r++) {
        long first = t + r - reach_before(w) - from, last = least(least(t + r + reach_behind(w) + 1, real), to) - from;
        if (first < 0) first = 0;
        if (last < first) last = first = least(first, near);
        exact_row(w, m, r, t + r, first, last, wide, sinks);
        linear_row(m, r, first, last, w->causal ? last : near, wide);
    }
    product(0, count, width, wide, m->scores, wide, 1, s->values, width, m->exact, width);
    if (sinks) product(1, count, width, padded(sinks), m->sink_scores, padded(sinks), 1, m->sink_v, width, m->exact, width);
    product(0, count, width, wide, m->products, wide, 1, s->values, width, m->linear, width);
    for (long r = 0; r < count; r++) join_row(c, w, m, b, h, r, t + r, behind);
}

/* One head of queries; the first of a group leaves the state after, causally. */
static void window_head(const call_t *c, const window_t *w, long i, near_t *m) {
    long b = i / c->heads, h = i % c->heads, group = c->heads / c->key_heads, key_head = h / group;
    long real = 0, bound = 0;
    float top = FLOOR;
    while (real < c->tokens && !is_padding(c, b, real)) real++;
    load_sinks(c, w, b, key_head, m);
    if (!w->causal) read_ahead(c, w, b, h, key_head, real, m);
    load_state(c, 0, 0, 1.0f, &m->s);
    for (long t = 0; t < c->tokens; t += TILE) {
        /* Causally no farther than what will have left the window at the end: behind it comes padding. */
        long last = least(t - reach_before(w), w->causal ? real - w->size : real);
        add_keys(c, w, b, key_head, bound, last, &m->s, &top);
        if (last > bound) bound = last;
        window_tile(c, w, b, h, key_head, real, t, top, m);
    }
    if (!w->causal || h % group) return;
    add_keys(c, w, b, key_head, bound, real - w->size, &m->s, &top);
    store_state(c, &m->s, b * c->key_heads + key_head, 1.0f, c->kv);
    c->log_scale[b * c->key_heads + key_head] = top;
}

/* Softmax inside a window and for the sinks, the kernel outside. Returns DONE, or NO_MEMORY. */
int linearize_window(const call_t *c, const window_t *w) {
    int failed = DONE;
    advise_huge_pages(c);
#pragma omp parallel num_threads(c->threads)
    {
        near_t m;
        int ready = prepare_window(c, w, &m);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < c->batch * c->heads; i++) window_head(c, w, i, &m);
        }
        if (ready) free(m.memory);
    }
    return failed;
}

#endif
