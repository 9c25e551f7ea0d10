/* Attention from every query to every key: gather the keys into a state, then read it. */

#ifndef LINEARIZE_BIDIRECTIONAL_H
#define LINEARIZE_BIDIRECTIONAL_H

#include "call.h"

/* Gather a head's keys from token `first` to `last`; returns their largest log-scale. */
static float gather(const call_t *c, long b, long h, long first, long last, scratch_t *s) {
    float top = keys_scaled(c) ? FLOOR : 0.0f;
    load_state(c, 0, 0, 1.0f, s);
    for (long t = first; t < last; t += TILE) {
        long count = least(TILE, last - t);
        key_features(c, b, h, t, count, s);
        if (keys_scaled(c)) {
            float before = top;
            for (long j = 0; j < count; j++) top = highest(s->scale[j], top);
            if (top > before) decay_state(c, s->width, s->kv, s->z, expf(before - top));
            scale_weights(s, count, top);
        }
        weighted_values(c, b, h, t, count, s);
        accumulate_keys(c, s, count);
    }
    return top;
}

/* Join the states of `pieces` parts of a head's tokens. */
static void join(const call_t *c, long n, long pieces, long heads, const float *kv, const float *top) {
    long size = c->features * (c->value_size + 1);
    float largest = top[n];
    for (long p = 1; p < pieces; p++) largest = highest(top[p * heads + n], largest);
    c->log_scale[n] = largest;
    for (long p = 0; p < pieces; p++) {
        float factor = expf(top[p * heads + n] - largest);
        const float *from = kv + (p * heads + n) * size;
        for (long i = 0; i < size; i++) c->kv[n * size + i] = (p ? c->kv[n * size + i] : 0.0f) + from[i] * factor;
    }
}

static long split_partition(const call_t *c, long heads) {
    long tiles = (c->tokens + TILE - 1) / TILE, wanted = heads % c->threads ? (4 * c->threads + heads - 1) / heads : 1;
    return least(tiles, wanted);
}

INLINE long partition_start(const call_t *c, long piece, long pieces) {
    long tiles = (c->tokens + TILE - 1) / TILE;
    return least(c->tokens, piece * tiles / pieces * TILE);
}

/* Gather all keys into a state, then read it with every query. Returns 0, or 1 if memory ran out. */
int linearize_bidirectional(const call_t *c) {
    long keys = c->batch * c->key_heads, rows = c->batch * c->heads;
    int failed = DONE;
    long pieces = split_partition(c, keys), reads = split_partition(c, rows);
    long size = c->features * (c->value_size + 1);
    float *parts = malloc((pieces > 1 ? pieces * keys * size : 1) * sizeof(float));
    float *tops = malloc(pieces * keys * sizeof(float));
    if (!parts || !tops) failed = NO_MEMORY;
    advise_huge_pages(c);
#pragma omp parallel num_threads(c->threads)
    {
        scratch_t s;
        int ready = prepare(c, &s);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < pieces * keys; i++) {
                long piece = i / keys, n = i % keys;
                tops[i] = gather(c, n / c->key_heads, n % c->key_heads, partition_start(c, piece, pieces),
                                 partition_start(c, piece + 1, pieces), &s);
                store_state(c, &s, i, 1.0f, pieces > 1 ? parts : c->kv);
            }
#pragma omp for
            for (long n = 0; n < keys; n++) {
                if (pieces > 1) join(c, n, pieces, keys, parts, tops);
                else c->log_scale[n] = tops[n];
            }
#pragma omp for schedule(dynamic)
            for (long i = 0; i < reads * rows; i++) {
                long piece = i / rows, b = i % rows / c->heads, h = i % rows % c->heads;
                load_state(c, c->kv, b * c->key_heads + h / (c->heads / c->key_heads), 1.0f, &s);
                for (long t = partition_start(c, piece, reads); t < partition_start(c, piece + 1, reads); t += TILE) {
                    long count = least(TILE, partition_start(c, piece + 1, reads) - t);
                    prefetch_out(c, b, h, t, count);
                    query_features(c, b, h, t, count, &s);
                    read_out(c, &s, count);
                    for (long j = 0; j < count; j++)
                        write_row(c, s.mixed + j * s.width, s.sums[j], c->eps, b, h, t + j);
                }
            }
        }
        if (ready) free(s.memory);
    }
    free(parts);
    free(tops);
    return failed;
}

#endif
