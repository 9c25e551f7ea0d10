/* The gradient of window.h on features that are given, tile after tile; nothing but rows' levels and sums is kept from
   the forward. All arrays are fp32 in one piece, their rows whole vectors. A row's output is

       out_i = sum_j w_ij v_j / sum_i,  w_ij = exp(q_i . k_j - top_i) or phi_q_i . phi_k_j,

   so that from G_i, the gradient to out_i over sum_i, and slope_i = -G_i . out_i every weight gets G_i . v_j + slope_i. */

#ifndef LINEARIZE_WINDOW_GRADIENT_H
#define LINEARIZE_WINDOW_GRADIENT_H

#include "window.h"

typedef struct {
    int64_t batch, heads, key_heads, tokens, size, features, value_size;
    int64_t window, sinks;
    const float *q, *k, *v, *phi_q, *phi_k; /* q times the scaling; phi_k zero for padding and sinks */
    const float *grad, *slope, *top;        /* [B, H, T, V] and [B, H, T] twice */
    float *dq, *dk, *dv, *dphi_q, *dphi_k;  /* zeros */
    const int64_t *real;                    /* [B], how many tokens are there; the others lie behind them */
    int32_t causal, threads;
} window_back_t;

/* A thread's arrays. Of the near keys, sinks or window, tokens side by side: k_t [D, near], phi_t [F, near], v_t [V,
   near]; scores, products and dweights [TILE, near]; a state [V, F], its other way round [F, V], and its sums [F]. */
typedef struct {
    float *memory, *k_t, *phi_t, *v_t, *scores, *products, *dweights, *state, *turned, *sums;
} window_work_t;

/* One head's arrays, and which tokens are there. */
typedef struct {
    const float *q, *k, *v, *phi_q, *phi_k, *grad, *slope, *top;
    float *dq, *dk, *dv, *dphi_q, *dphi_k;
    long real, before, behind;
} window_head_t;

static int prepare_window_work(const window_back_t *g, window_work_t *m) {
    long half = g->window / 2, reach = g->causal ? g->window - 1 : 2 * half;
    long near = padded(TILE + reach > g->sinks ? TILE + reach : g->sinks);
    const part_t parts[] = {
        {&m->k_t, g->size * near}, {&m->phi_t, g->features * near}, {&m->v_t, g->value_size * near},
        {&m->scores, TILE * near}, {&m->products, TILE * near}, {&m->dweights, TILE * near},
        {&m->state, g->value_size * g->features}, {&m->turned, g->value_size * g->features}, {&m->sums, g->features},
    };
    m->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    return m->memory != 0;
}

INLINE void turn(const float *rows, long count, long size, float *to) {
    pack_transposed(rows, FLOAT32, size, count, size, 1.0f, to, padded(count));
}

/* state [V, F] += x' y and sums [F] += weights y, of `count` rows x [V] and y [F]; without weights, of ones. */
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

/* What queries get through a state of keys. */
static void queries_back(const window_back_t *g, const window_head_t *n, long first, long count, window_work_t *m) {
    long v = g->value_size, f = g->features;
    product(1, count, f, v, n->grad + first * v, v, 1, m->state, f, n->dphi_q + first * f, f);
    for (long t = first; t < first + count; t++)
        for (long i = 0; i < f; i += W)
            store(n->dphi_q + t * f + i, load(n->dphi_q + t * f + i) + load(m->sums + i) * n->slope[t]);
}

/* What keys from `first` to `last` get through a state of queries. */
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

/* Turn exact scores of row t into its weights for the keys first to last of `wide`, but those from `skip` to `until`,
   and `dweights` into the gradients to the scores. */
static void exact_back(const window_head_t *n, long t, long first, long last, long skip, long until, long wide,
                       float *scores, float *dweights) {
    for (long j = first / W * W; j < last; j += W) {
        vf x = load(scores + j) - n->top[t], high = splat(0.0f);
        store(scores + j, vexp(-larger(-x, high)));
    }
    memset(scores, 0, first * sizeof(float));
    memset(scores + last, 0, (wide - last) * sizeof(float));
    if (until > skip) memset(scores + skip, 0, (until - skip) * sizeof(float));
    for (long j = 0; j < wide; j += W) store(dweights + j, load(dweights + j) * load(scores + j));
}

/* The exact weights' part in the gradients of keys from `from` on, `near` of them, and of the queries; adds dv too. */
static void exact_products(const window_back_t *g, const window_head_t *n, long t, long count, long from, long near,
                           long wide, window_work_t *m) {
    long d = g->size, v = g->value_size;
    product(1, count, d, near, m->dweights, wide, 1, n->k + from * d, d, n->dq + t * d, d);
    product(1, near, d, count, m->dweights, 1, wide, n->q + t * d, d, n->dk + from * d, d);
    product(1, near, v, count, m->scores, 1, wide, n->grad + t * v, v, n->dv + from * v, v);
}

/* The gradients to the weights of a tile's rows and the keys from `from` on: G . v + slope. */
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
        /* Those in the window are there already. */
        long before = least(near, t + r - n->before), behind = g->causal ? near : least(near, t + r + n->behind + 1);
        if (before < 0) before = 0;
        exact_back(n, t + r, 0, near, before, behind, wide, m->scores + r * wide, m->dweights + r * wide);
    }
    exact_products(g, n, t, count, 0, near, wide, m);
}

/* Which of the near keys are in the window of token t: from `first` up to `last`, counted from the near keys' first. */
INLINE void window_of(const window_head_t *n, long t, long from, long near, long *first, long *last) {
    *first = t - n->before - from;
    *last = least(t + n->behind + 1 - from, near);
    if (*first < 0) *first = 0;
    if (*last < *first) *last = *first = least(*first, near);
}

/* Leave of a row what belongs to the kernel: what is outside the window, causally before it. */
INLINE void leave_linear(const window_back_t *g, float *row, long first, long last, long near, long wide) {
    long seen = g->causal ? last : near;
    memset(row + first, 0, (last - first) * sizeof(float));
    memset(row + seen, 0, (wide - seen) * sizeof(float));
}

static void near_back(const window_back_t *g, const window_head_t *n, long t, long count, window_work_t *m) {
    long d = g->size, f = g->features, v = g->value_size, first, last;
    long from = t - n->before > 0 ? t - n->before : 0, to = least(n->real, t + count + n->behind);
    long near = to - from, wide = padded(near);
    if (near <= 0) return;
    turn(n->k + from * d, near, d, m->k_t);
    turn(n->phi_k + from * f, near, f, m->phi_t);
    product(0, count, wide, d, n->q + t * d, d, 1, m->k_t, wide, m->scores, wide);
    product(0, count, wide, f, n->phi_q + t * f, f, 1, m->phi_t, wide, m->products, wide);
    weight_gradients(g, n, t, count, from, near, wide, m);
    for (long r = 0; r < count; r++) {
        window_of(n, t + r, from, near, &first, &last);
        leave_linear(g, m->products + r * wide, first, last, near, wide);
    }
    product(1, near, v, count, m->products, 1, wide, n->grad + t * v, v, n->dv + from * v, v);
    /* The gradients to the kernel's weights, in place of the weights; then those to the scores. */
    memcpy(m->products, m->dweights, count * wide * sizeof(float));
    for (long r = 0; r < count; r++) {
        window_of(n, t + r, from, near, &first, &last);
        leave_linear(g, m->products + r * wide, first, last, near, wide);
        exact_back(n, t + r, first, last, 0, 0, wide, m->scores + r * wide, m->dweights + r * wide);
    }
    product(1, count, f, near, m->products, wide, 1, n->phi_k + from * f, f, n->dphi_q + t * f, f);
    product(1, near, f, count, m->products, 1, wide, n->phi_q + t * f, f, n->dphi_k + from * f, f);
    exact_products(g, n, t, count, from, near, wide, m);
}

/* One head of queries. Four walks: the near keys and, of those before them, the queries' part; the keys' part; and, not
   causally, both of the keys behind them. */
static void window_head_back(const window_back_t *g, const window_head_t *n, window_work_t *m) {
    long f = g->features, v = g->value_size, last_tile = (g->tokens - 1) / TILE * TILE, bound = 0;
    clear_state(g, m);
    for (long t = 0; t < g->tokens; t += TILE) {
        long count = least(TILE, g->tokens - t), last = least(t - n->before, n->real);
        if (last > bound) {
            add_rows(g, n->v + bound * v, n->phi_k + bound * f, 0, last - bound, m);
            bound = last;
        }
        queries_back(g, n, t, count, m);
        near_back(g, n, t, count, m);
        sinks_back(g, n, t, count, m);
    }
    clear_state(g, m);
    for (long t = last_tile; t >= 0; t -= TILE) {
        long count = least(TILE, g->tokens - t), from = t - TILE - n->before > 0 ? t - TILE - n->before : 0;
        add_rows(g, n->grad + t * v, n->phi_q + t * f, n->slope + t, count, m);
        keys_back(g, n, from, least(t - n->before, n->real), m);
    }
    if (g->causal) return;
    clear_state(g, m);
    bound = n->real;
    for (long t = last_tile; t >= 0; t -= TILE) {
        long count = least(TILE, g->tokens - t), first = least(bound, t + count + n->behind);
        add_rows(g, n->v + first * v, n->phi_k + first * f, 0, bound - first, m);
        bound = first;
        queries_back(g, n, t, count, m);
    }
    clear_state(g, m);
    for (long t = 0; t < g->tokens; t += TILE) {
        long count = least(TILE, g->tokens - t);
        add_rows(g, n->grad + t * v, n->phi_q + t * f, n->slope + t, count, m);
        keys_back(g, n, t + count + n->behind, least(t + count + TILE + n->behind, n->real), m);
    }
}

/* Returns DONE, or NO_MEMORY. */
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
                        g->dphi_k + k * g->features, g->real[i / g->key_heads],
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
