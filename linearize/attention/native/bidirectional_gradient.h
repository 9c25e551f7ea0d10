/* Gradients of attention from every query to every key: the queries give the state's gradient, then the keys use it. */

#ifndef LINEARIZE_BIDIRECTIONAL_GRADIENT_H
#define LINEARIZE_BIDIRECTIONAL_GRADIENT_H

#include "gradient.h"

static void query_gradients(const call_t *c, const back_t *g, long b, long h, work_t *w) {
    scratch_t *s = &w->s;
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t), wide = padded(count);
        float factor[TILE];
        query_features(c, b, h, t, count, s);
        row_sums(c, s->phi_q, s->z, wide, wide, s->sums);
        for (long j = 0; j < count; j++) factor[j] = 1.0f / guarded(s->sums[j], c->eps);
        row_gradients(c, g, b, h, t, count, factor, w);
        /* A sum that was clamped to its least magnitude is a constant. */
        for (long j = 0; j < count; j++)
            if (fabsf(s->sums[j]) <= c->eps) w->slope[j] = 0.0f;
        through_state(c, s->kv, s->z, w->rows_transposed, w->slope, w->dphi, s->width, wide);
        into_state(c, w, s->phi_q, count);
        query_back(c, g, b, h, t, count, w);
    }
}

static void key_gradients(const call_t *c, const back_t *g, long b, long h, float top, work_t *w) {
    scratch_t *s = &w->s;
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        key_features(c, b, h, t, count, s);
            if (keys_scaled(c)) scale_weights(s, count, top);
        weighted_values(c, b, h, t, count, s);
        keys_through_state(c, w, w->dphi, count);
        value_gradients(c, g, b, h, t, count, w);
        key_back(c, g, b, h, t, count, w->dphi, w->dscale, w);
    }
}

static void head_gradients(const call_t *c, const back_t *g, long n, work_t *w) {
    long b = n / c->key_heads, h = n % c->key_heads, group = c->heads / c->key_heads;
    load_state(c, g->kv, n, 1.0f, &w->s);
    for (long q = h * group; q < (h + 1) * group; q++) query_gradients(c, g, b, q, w);
    key_gradients(c, g, b, h, g->log_scale[n], w);
}

/* Returns 0, or 1 if memory ran out. */
int linearize_bidirectional_gradient(const call_t *c, const back_t *g) { return each_head_back(c, g, head_gradients); }

#endif
