/* The gradient of window.h for given features, tile after tile; only the levels and sums of the rows are kept from the
   forward pass. All arrays are contiguous fp32, and their rows are whole vectors. The output of a row is

       out_i = sum_j w_ij v_j / sum_i,  w_ij = exp(q_i . k_j - top_i) or phi_q_i . phi_k_j,

   so with G_i, the gradient of out_i divided by sum_i, and slope_i = -G_i . out_i, the gradient of every weight is
   G_i . v_j + slope_i. */

#ifndef LINEARIZE_WINDOW_GRADIENT_H
#define LINEARIZE_WINDOW_GRADIENT_H

#include "window.h"

typedef struct {
    int64_t batch, heads, key_heads, tokens, size, features, value_size;
    int64_t window, sinks, exact_keys;
    const float *q, *k, *v, *phi_q, *phi_k; /* q times the scaling; phi_k zero for padding and sinks */
    const float *grad, *slope, *top;        /* [B, H, T, V] and [B, H, T] twice */
    float *dq, *dk, *dv, *dphi_q, *dphi_k;  /* zeros */
    const int64_t *real;                    /* [B], numbers of tokens; padding comes after them */
    const int32_t *until;                   /* [B, K, T] from the forward pass, or null */
    int32_t causal, threads;
} window_back_t;

/* The arrays of a thread. For near keys (sinks or window), with tokens in columns: k_t [D, near], phi_t [F, near], v_t
   [V, near]; scores, products and dweights [TILE, near]; a state [V, F], its transpose [F, V], and its sums [F]. For
   exact keys that are not near a tile: copies and gradients of k [slots, D], v [slots, V] and phi [slots, F], the query
   at which they stop being exact, and their tokens. For a head: all keys that are ever exact outside their window. */
typedef struct {
    float *memory, *k_t, *phi_t, *v_t, *scores, *products, *dweights, *state, *turned, *sums;
    float *slot_k, *slot_v, *slot_phi, *slot_dk, *slot_dv, *slot_dphi;
    int32_t *slot_until, *slot_token, *kept;
    long kept_count;
} window_work_t;

/* The arrays of one head, and its numbers of tokens. */
typedef struct {
    const float *q, *k, *v, *phi_q, *phi_k, *grad, *slope, *top;
    float *dq, *dk, *dv, *dphi_q, *dphi_k;
    const int32_t *until;
    long real, before, later;
} window_head_t;

static int prepare_window_work(const window_back_t *g, window_work_t *m) {
    long half = g->window / 2, reach = g->causal ? g->window - 1 : 2 * half;
    long slots = least(g->exact_keys, g->tokens), others = slots > g->sinks ? slots : g->sinks;
    long near = padded(TILE + reach > others ? TILE + reach : others);
    const part_t parts[] = {
        {&m->k_t, g->size * near}, {&m->phi_t, g->features * near}, {&m->v_t, g->value_size * near},
        {&m->scores, TILE * near}, {&m->products, TILE * near}, {&m->dweights, TILE * near},
        {&m->state, g->value_size * g->features}, {&m->turned, g->value_size * g->features}, {&m->sums, g->features},
        {&m->slot_k, slots * g->size}, {&m->slot_v, slots * g->value_size}, {&m->slot_phi, slots * g->features},
        {&m->slot_dk, slots * g->size}, {&m->slot_dv, slots * g->value_size}, {&m->slot_dphi, slots * g->features},
        {(float **)&m->slot_until, slots}, {(float **)&m->slot_token, slots},
        {(float **)&m->kept, slots ? g->tokens : 0},
    };
    m->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    return m->memory != 0;
}

INLINE void turn(const float *rows, long count, long size, float *to) {
    pack_transposed(rows, FLOAT32, size, count, size, 1.0f, to, padded(count));
}

/* state [V, F] += x' y and sums [F] += weights y, for `count` rows x [V] and y [F]; null weights are ones. */
static void add_rows(const window_back_t *g, const float *x, const float *y, const float *weights, long count,
                     window_work_t *m) {
    long v = g->value_size, f = g->features;
    product(1, v, f, count, x, 1, v, y, f, m->state, f);
    for (long t = 0; t < count; t++)
        for (long i = 0; i < f; i += W)
            store(m->sums + i, load(m->sums + i) + load(y + t * f + i) * (weights ? weights[t] : 1.0f));
}

static void clear_state(const window_back_t *g, window_work_t *m) {
    memset(m->state, 0, g->value_size * g->features * sizeof(float));
    memset(m->sums, 0, g->features * sizeof(float));
}

/* Add the keys `first` to `last` to a state. */
static void keys_in(const window_back_t *g, const window_head_t *n, long first, long last, window_work_t *m) {
    add_rows(g, n->v + first * g->value_size, n->phi_k + first * g->features, 0, last - first, m);
}

/* The gradients of queries through a state of keys. */
static void queries_back(const window_back_t *g, const window_head_t *n, long first, long count, window_work_t *m) {
    long v = g->value_size, f = g->features;
    product(1, count, f, v, n->grad + first * v, v, 1, m->state, f, n->dphi_q + first * f, f);
    for (long t = first; t < first + count; t++)
        for (long i = 0; i < f; i += W)
            store(n->dphi_q + t * f + i, load(n->dphi_q + t * f + i) + load(m->sums + i) * n->slope[t]);
}

/* The gradients of the keys `first` to `last` through a state of queries. */
static void keys_back(const window_back_t *g, const window_head_t *n, long first, long last, window_work_t *m) {
    long v = g->value_size, f = g->features, count = last - first;
    if (count <= 0) return;
    product(1, count, f, v, n->v + first * v, v, 1, m->state, f, n->dphi_k + first * f, f);
    for (long t = first; t < last; t++)
        for (long i = 0; i < f; i += W)
            store(n->dphi_k + t * f + i, load(n->dphi_k + t * f + i) + load(m->sums + i));
    for (long i = 0; i < v; i++)
        for (long j = 0; j < f; j++) m->turned[j * v + i] = m->state[i * f + j];
    product(1, count, v, f, n->phi_k + first * f, f, 1, m->turned, v, n->dv + first * v, v);
}

/* Turn the exact scores of row t into weights for the keys `first` to `last` of `wide`. */
static void exact_weights(const window_head_t *n, long t, long first, long last, long wide, float *scores) {
    for (long j = first / W * W; j < last; j += W) {
        vf x = load(scores + j) - n->top[t], high = splat(0.0f);
        store(scores + j, vexp(-larger(-x, high)));
    }
    memset(scores, 0, first * sizeof(float));
    memset(scores + last, 0, (wide - last) * sizeof(float));
}

/* Turn the gradients of a row's exact weights into those of its scores. */
INLINE void scores_back(const float *weights, long wide, float *dweights) {
    for (long j = 0; j < wide; j += W) store(dweights + j, load(dweights + j) * load(weights + j));
}

/* The contribution of exact weights to the gradients of `near` keys from `from` on and of the queries; adds dv too. */
static void exact_products(const window_back_t *g, const window_head_t *n, long t, long count, long from, long near,
                           long wide, window_work_t *m) {
    long d = g->size, v = g->value_size;
    product(1, count, d, near, m->dweights, wide, 1, n->k + from * d, d, n->dq + t * d, d);
    product(1, near, d, count, m->dweights, 1, wide, n->q + t * d, d, n->dk + from * d, d);
    product(1, near, v, count, m->scores, 1, wide, n->grad + t * v, v, n->dv + from * v, v);
}

/* The gradients of the weights between the rows of a tile and the keys from `from` on: G . v + slope. */
static void weight_gradients(const window_back_t *g, const window_head_t *n, long t, long count, long from, long near,
                             long wide, window_work_t *m) {
    long v = g->value_size;
    turn(n->v + from * v, near, v, m->v_t);
    product(0, count, wide, v, n->grad + t * v, v, 1, m->v_t, wide, m->dweights, wide);
    for (long r = 0; r < count; r++)
        for (long j = 0; j < wide; j += W)
            store(m->dweights + r * wide + j, load(m->dweights + r * wide + j) + n->slope[t + r]);
}

static void sinks_back(const window_back_t *g, const window_head_t *n, long t, long count, window_work_t *m) {
    long d = g->size, near = least(g->sinks, n->real), wide = padded(near);
    if (!near) return;
    turn(n->k, near, d, m->k_t);
    product(0, count, wide, d, n->q + t * d, d, 1, m->k_t, wide, m->scores, wide);
    weight_gradients(g, n, t, count, 0, near, wide, m);
    for (long r = 0; r < count; r++) {
        /* Sinks in the window are already counted. */
        long before = least(near, t + r - n->before), later = g->causal ? near : least(near, t + r + n->later + 1);
        if (before < 0) before = 0;
        exact_weights(n, t + r, 0, near, wide, m->scores + r * wide);
        if (later > before) memset(m->scores + r * wide + before, 0, (later - before) * sizeof(float));
        scores_back(m->scores + r * wide, wide, m->dweights + r * wide);
    }
    exact_products(g, n, t, count, 0, near, wide, m);
}

/* The near keys that token t sees; with `slots`, all of them count as outside its window. */
INLINE seen_t seen_by(const window_back_t *g, const window_head_t *n, long t, long from, long near, int slots) {
    long first = t - n->before - from, last = least(t + n->later + 1 - from, near);
    if (first < 0) first = 0;
    if (slots || last < first) last = first = slots ? near : least(first, near);
    return (seen_t){0, t, from, first, last, g->causal ? last : near};
}

/* Keep only the keys of a row that have kernel weights: outside the window (before it, if causal) and not exact. */
INLINE void leave_linear(const window_head_t *n, const seen_t *s, float *row, long wide) {
    memset(row + s->first, 0, (s->last - s->first) * sizeof(float));
    memset(row + s->near, 0, (wide - s->near) * sizeof(float));
    write_outside(n->until, s, 1, 0.0f, row);
}

/* The gradients of the keys `from` to `to`, near a tile or, with `slots`, in slots. */
static void near_back(const window_back_t *g, const window_head_t *n, long t, long count, long from, long to, int slots,
                      window_work_t *m) {
    long d = g->size, f = g->features, v = g->value_size, near = to - from, wide = padded(near);
    if (near <= 0) return;
    turn(n->k + from * d, near, d, m->k_t);
    turn(n->phi_k + from * f, near, f, m->phi_t);
    product(0, count, wide, d, n->q + t * d, d, 1, m->k_t, wide, m->scores, wide);
    product(0, count, wide, f, n->phi_q + t * f, f, 1, m->phi_t, wide, m->products, wide);
    weight_gradients(g, n, t, count, from, near, wide, m);
    for (long r = 0; r < count; r++) {
        seen_t s = seen_by(g, n, t + r, from, near, slots);
        leave_linear(n, &s, m->products + r * wide, wide);
    }
    product(1, near, v, count, m->products, 1, wide, n->grad + t * v, v, n->dv + from * v, v);
    /* The gradients of the kernel's weights replace the weights; then those of the scores follow. */
    memcpy(m->products, m->dweights, count * wide * sizeof(float));
    for (long r = 0; r < count; r++) {
        seen_t s = seen_by(g, n, t + r, from, near, slots);
        leave_linear(n, &s, m->products + r * wide, wide);
        exact_weights(n, t + r, n->until ? 0 : s.first, n->until ? s.near : s.last, wide, m->scores + r * wide);
        write_outside(n->until, &s, 0, 0.0f, m->scores + r * wide);
        scores_back(m->scores + r * wide, wide, m->dweights + r * wide);
    }
    product(1, count, f, near, m->products, wide, 1, n->phi_k + from * f, f, n->dphi_q + t * f, f);
    product(1, near, f, count, m->products, 1, wide, n->phi_q + t * f, f, n->dphi_k + from * f, f);
    exact_products(g, n, t, count, from, near, wide, m);
}

/* Add the rows [slots, size] to the rows of their tokens. */
static void scatter(const window_work_t *m, const float *from, long count, long size, float *to) {
    for (long i = 0; i < count; i++)
        for (long j = 0; j < size; j += W) {
            float *row = to + m->slot_token[i] * size + j;
            store(row, load(row) + load(from + i * size + j));
        }
}

/* The gradients of exact keys that are not near a tile, including those that one of its queries adds to the state. */
static void slots_back(const window_back_t *g, const window_head_t *n, long t, long count, long from, long to,
                       window_work_t *m) {
    long d = g->size, f = g->features, v = g->value_size, filled = 0;
    for (long i = 0; i < m->kept_count; i++) {
        long token = m->kept[i];
        if (!is_exact(n->until, t, token) || (g->causal ? token >= from : token >= from && token < to)) continue;
        m->slot_until[filled] = n->until[token];
        m->slot_token[filled] = token;
        memcpy(m->slot_k + filled * d, n->k + token * d, d * sizeof(float));
        memcpy(m->slot_v + filled * v, n->v + token * v, v * sizeof(float));
        memcpy(m->slot_phi + filled++ * f, n->phi_k + token * f, f * sizeof(float));
    }
    if (!filled) return;
    window_head_t o = *n;
    o.k = m->slot_k, o.v = m->slot_v, o.phi_k = m->slot_phi, o.until = m->slot_until;
    o.dk = m->slot_dk, o.dv = m->slot_dv, o.dphi_k = m->slot_dphi;
    memset(o.dk, 0, filled * d * sizeof(float));
    memset(o.dv, 0, filled * v * sizeof(float));
    memset(o.dphi_k, 0, filled * f * sizeof(float));
    near_back(g, &o, t, count, 0, filled, 1, m);
    scatter(m, o.dk, filled, d, n->dk);
    scatter(m, o.dv, filled, v, n->dv);
    scatter(m, o.dphi_k, filled, f, n->dphi_k);
}

/* Add the keys that are in the state for query t but were not for the tile before: those from `first` to `last`, and
   earlier keys that were still exact then. */
static void each_new(const window_back_t *g, const window_head_t *n, long t, long first, long last, window_work_t *m,
                     void (*one)(const window_back_t *, const window_head_t *, long, long, window_work_t *)) {
    for (long i = 0; i < m->kept_count && m->kept[i] < first; i++) {
        long key = m->kept[i];
        if (n->until[key] > t - TILE && n->until[key] <= t) one(g, n, key, key + 1, m);
    }
    for (long end; first < last; first = end + 1) {
        for (end = first; end < last && !is_exact(n->until, t, end);) end++;
        if (end > first) one(g, n, first, end, m);
    }
}

/* One query head, in up to four passes: the near keys, together with the query gradients of the keys before them; the key
   gradients of the keys before them; and, if not causal, both gradients of the keys after them. */
static void window_head_back(const window_back_t *g, const window_head_t *n, window_work_t *m) {
    long f = g->features, v = g->value_size, last_tile = (g->tokens - 1) / TILE * TILE, bound = 0;
    m->kept_count = 0;
    for (long j = 0; n->until && j < n->real; j++)
        if (n->until[j]) m->kept[m->kept_count++] = j;
    clear_state(g, m);
    for (long t = 0; t < g->tokens; t += TILE) {
        long count = least(TILE, g->tokens - t), last = least(t - n->before, n->real);
        long from = t - n->before > 0 ? t - n->before : 0, to = least(n->real, t + count + n->later);
        each_new(g, n, t, bound, last, m, keys_in);
        if (last > bound) bound = last;
        queries_back(g, n, t, count, m);
        near_back(g, n, t, count, from, to, 0, m);
        slots_back(g, n, t, count, from, to, m);
        sinks_back(g, n, t, count, m);
    }
    clear_state(g, m);
    for (long t = last_tile; t >= 0; t -= TILE) {
        long count = least(TILE, g->tokens - t), from = t - TILE - n->before > 0 ? t - TILE - n->before : 0;
        add_rows(g, n->grad + t * v, n->phi_q + t * f, n->slope + t, count, m);
        each_new(g, n, t, from, least(t - n->before, n->real), m, keys_back);
    }
    if (g->causal) return;
    clear_state(g, m);
    bound = n->real;
    for (long t = last_tile; t >= 0; t -= TILE) {
        long count = least(TILE, g->tokens - t), first = least(bound, t + count + n->later);
        add_rows(g, n->v + first * v, n->phi_k + first * f, 0, bound - first, m);
        bound = first;
        queries_back(g, n, t, count, m);
    }
    clear_state(g, m);
    for (long t = 0; t < g->tokens; t += TILE) {
        long count = least(TILE, g->tokens - t);
        add_rows(g, n->grad + t * v, n->phi_q + t * f, n->slope + t, count, m);
        keys_back(g, n, t + count + n->later, least(t + count + TILE + n->later, n->real), m);
    }
}

/* Returns DONE or NO_MEMORY. */
int linearize_window_gradient(const window_back_t *g) {
    int failed = DONE;
    long group = g->heads / g->key_heads;
#pragma omp parallel num_threads(g->threads)
    {
        window_work_t m;
        int ready = prepare_window_work(g, &m);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < g->batch * g->key_heads; i++)
                for (long h = i * group; h < (i + 1) * group; h++) {
                    long q = h * g->tokens, k = i * g->tokens;
                    window_head_t n = {
                        g->q + q * g->size, g->k + k * g->size, g->v + k * g->value_size, g->phi_q + q * g->features,
                        g->phi_k + k * g->features, g->grad + q * g->value_size, g->slope + q, g->top + q,
                        g->dq + q * g->size, g->dk + k * g->size, g->dv + k * g->value_size, g->dphi_q + q * g->features,
                        g->dphi_k + k * g->features, g->until ? g->until + k : 0, g->real[i / g->key_heads],
                        g->causal ? g->window - 1 : g->window / 2, g->causal ? 0 : g->window / 2,
                    };
                    window_head_back(g, &n, &m);
                }
        }
        if (ready) free(m.memory);
    }
    return failed;
}

#endif
