/* Gradients of attention from each query to the keys up to its own. Two passes over the tiles, as in
   linearize/ops/causal.py: forward with the state, for the queries; backward with the state's gradient, for keys and
   values. */

#ifndef LINEARIZE_CAUSAL_GRADIENT_H
#define LINEARIZE_CAUSAL_GRADIENT_H

#include "causal.h"
#include "gradient.h"


/* Results of the first pass that the second pass needs: factor and slope per token and head of a group, and the powers
   of the tiles. */
typedef struct {
    float *factor, *slope, *end;
} walked_t;

/* The keys and values of a tile, with weights relative to the power of the tile. Returns whether it is steep. */
static int tile_keys(const call_t *c, long b, long h, long first, long count, work_t *w, powers_t *p) {
    scratch_t *s = &w->s;
    key_features(c, b, h, first, count, s);
    if (keys_scaled(c)) {
        tile_powers(s, count, p->end, p);
        if (p->steep) return 1;
        rescale_keys(s, count, p);
    }
    weighted_values(c, b, h, first, count, s);
    return 0;
}

/* The rows of one head and tile in the first pass: dq, and the results for the second pass. */
static void first_rows(const call_t *c, const back_t *g, long b, long h, long first, long count, work_t *w,
                       const powers_t *p, float *factor, float *slope) {
    scratch_t *s = &w->s;
    long wide = padded(count);
    s->saved = w->saved;
    query_features(c, b, h, first, count, s);
    s->saved = 0;
    row_sums(c, s->phi_q, s->z, wide, wide, s->sums);
    for (long i = 0; i < count; i += MR) score_rows(c, s, 0, i, least(MR, count - i), wide, p);
    int held[TILE];
    for (long j = 0; j < count; j++) {
        float smallest = row_least(c, p, j);
        factor[j] = 1.0f / guarded(s->sums[j], smallest);
        held[j] = fabsf(s->sums[j]) <= smallest;
    }
    row_gradients(c, g, b, h, first, count, factor, w);
    for (long j = 0; j < count; j++) slope[j] = w->slope[j] = held[j] ? 0.0f : w->slope[j];
    through_state(c, s->kv, s->z, w->rows_transposed, w->slope, w->dphi, s->width, wide);
    /* Gradients of the scores, transposed: a row is a key, its columns are the queries from its own position on. */
    product(0, wide, wide, c->value_size, s->values, s->width, 1, w->rows_transposed, wide, w->dscores, wide);
    for (long j = 0; j < wide; j++)
        for (long i = 0; i < wide; i++)
            w->dscores[j * wide + i] = i < j ? 0.0f : w->dscores[j * wide + i] + s->weight[j] * w->slope[i];
    for (long i = 0; i < wide; i += PANEL)
        product(1, c->features, least(PANEL, wide - i), least(wide, i + PANEL), s->phi_k, wide, 1, w->dscores + i, wide,
                w->dphi + i, wide);
    query_back(c, g, b, h, first, count, w);
}

/* The contribution of one head to the gradients of a tile's keys and values, in the second pass. */
static void second_rows(const call_t *c, const back_t *g, long b, long h, long first, long count, work_t *w,
                        const float *factor, const float *slope) {
    scratch_t *s = &w->s;
    long wide = padded(count);
    query_features(c, b, h, first, count, s);
    row_gradients(c, g, b, h, first, count, factor, w);
    memcpy(w->slope, slope, count * sizeof(float));
    for (long i = 0; i < wide; i += MR) {
        long height = least(MR, wide - i), seen = least(wide, padded(i + height));
        product(0, height, seen, c->features, s->phi_q + i, 1, wide, s->phi_k, wide, s->scores + i * wide, wide);
        product(0, height, seen, c->value_size, w->rows + i * s->width, s->width, 1, w->values, wide,
                w->dscores + i * wide, wide);
        for (long r = i; r < i + height; r++) {
            for (long j = 0; j <= r; j++) w->dscores[r * wide + j] += w->slope[r] * s->weight[j];
            for (long j = r + 1; j < wide; j++) w->dscores[r * wide + j] = s->scores[r * wide + j] = 0.0f;
        }
    }
    for (long j = 0; j < wide; j += PANEL)
        product(1, c->features, least(PANEL, wide - j), wide - j, s->phi_q + j, wide, 1, w->dscores + j * wide + j,
                wide, w->dphi_k + j, wide);
    product(1, wide, s->width, wide, s->scores, 1, wide, w->rows, s->width, w->dvalues, s->width);
    for (long i = 0; i < wide; i++)
        for (long j = 0; j <= i; j++) s->sums[j] += s->scores[i * wide + j] * w->slope[i];
}

static int walk_forward(const call_t *c, const back_t *g, long b, long h, work_t *w, walked_t *k) {
    scratch_t *s = &w->s;
    long group = c->heads / c->key_heads;
    powers_t p = {.end = 0.0f};
    if (keys_scaled(c)) take_apart(FLOOR, &p.end);
    load_state(c, 0, 0, 1.0f, s);
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        k->end[t / TILE] = p.end;
        if (tile_keys(c, b, h, t, count, w, &p)) return STEEP;
        if (keys_scaled(c) && p.end > p.before) decay_state(c, s->width, s->kv, s->z, power(p.before - p.end));
        for (long q = 0; q < group; q++)
            first_rows(c, g, b, h * group + q, t, count, w, &p, k->factor + q * c->tokens + t,
                       k->slope + q * c->tokens + t);
        accumulate_keys(c, s, count);
    }
    return 0;
}

static void walk_backward(const call_t *c, const back_t *g, long b, long h, work_t *w, const walked_t *k) {
    scratch_t *s = &w->s;
    long group = c->heads / c->key_heads, tiles = (c->tokens + TILE - 1) / TILE;
    for (long tile = tiles - 1; tile >= 0; tile--) {
        long t = tile * TILE, count = least(TILE, c->tokens - t);
        powers_t p = {.end = k->end[tile]};
        tile_keys(c, b, h, t, count, w, &p);
        keys_through_state(c, w, w->dphi_k, count);
        for (long q = 0; q < group; q++) {
            second_rows(c, g, b, h * group + q, t, count, w, k->factor + q * c->tokens + t,
                        k->slope + q * c->tokens + t);
            into_state(c, w, s->phi_q, count);
        }
        if (keys_scaled(c) && p.end > p.before) decay_state(c, s->width, w->dkv, w->dz, power(p.before - p.end));
        value_gradients(c, g, b, h, t, count, w);
        if (c->keys.kind != GIVEN) {
            /* Queries have been mapped since, so map the keys again for the gradient of the map. */
            s->saved = w->saved;
            features(c, &c->keys, c->k, c->k_stride, b, h, h, t, count, s, s->phi_k);
            s->saved = 0;
        }
        key_back(c, g, b, h, t, count, w->dphi_k, w->dscale, w);
    }
}

/* Returns 0; 1 if memory ran out; 2 if log-scales climb too steeply for one power per tile. */
int linearize_causal_gradient(const call_t *c, const back_t *g) {
    int failed = DONE, steep = DONE;
    long group = c->heads / c->key_heads, tiles = (c->tokens + TILE - 1) / TILE;
#pragma omp parallel num_threads(c->threads)
    {
        work_t w;
        float *memory = malloc((2 * group * c->tokens + tiles) * sizeof(float));
        walked_t k = {memory, memory + group * c->tokens, memory + 2 * group * c->tokens};
        int prepared = prepare_work(c, g, &w), ready = memory && prepared;
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long n = 0; n < c->batch * c->key_heads; n++) {
                long b = n / c->key_heads, h = n % c->key_heads;
                clear_head(c, &w);
                if (walk_forward(c, g, b, h, &w, &k)) {
#pragma omp atomic write
                    steep = STEEP;
                    continue;
                }
                walk_backward(c, g, b, h, &w, &k);
                write_weights(c, g, n, &w);
            }
        }
        if (prepared) free_work(&w);
        free(memory);
    }
    return failed ? failed : steep;
}

#endif
