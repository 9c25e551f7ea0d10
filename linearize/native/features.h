/* A map by itself, tokens to features and back: for who wants the features, as stage one does. Tokens are the call's k
   [B, K, T, D], features its out [B, K, T, F] in fp32, beside the log-scales [B, K, T] where the map has any. */

#ifndef LINEARIZE_FEATURES_H
#define LINEARIZE_FEATURES_H

#include "gradient.h"

/* Map a tile; returns where its log-scales go, or null. */
INLINE float *map_here(const call_t *c, long n, long first, long count, scratch_t *s) {
    long b = n / c->key_heads, h = n % c->key_heads;
    features(c, &c->keys, c->k, c->k_step, b, h, h, first, count, s, s->phi_k);
    return c->log_scale ? c->log_scale + n * c->tokens + first : 0;
}

/* Returns 0, or 1 where memory ran out. */
int linearize_features(const call_t *c) {
    int failed = 0;
#pragma omp parallel num_threads(c->threads)
    {
        scratch_t s;
        int ready = prepare(c, &s);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long n = 0; n < c->batch * c->key_heads; n++)
                for (long t = 0; t < c->tokens; t += TILE) {
                    long count = least(TILE, c->tokens - t);
                    float *scales = map_here(c, n, t, count, &s);
                    if (scales) memcpy(scales, s.scale, count * sizeof(float));
                    turned_back(s.phi_k, padded(count),
                                (float *)c->out + n * c->out_step[1] + t * c->out_step[2], FLOAT32, c->out_step[2],
                                count, c->features, 1.0f);
                }
        }
        if (ready) free(s.memory);
    }
    return failed;
}

/* From the gradients to the features (g->grad) and to the log-scales (g->given, or null). Returns as above. */
int linearize_features_gradient(const call_t *c, const back_t *g) {
    int failed = 0;
#pragma omp parallel num_threads(c->threads)
    {
        work_t w;
        int ready = prepare_work(c, &w);
        if (all_ready(ready, &failed)) {
            w.s.keep = w.keep;
#pragma omp for schedule(dynamic)
            for (long n = 0; n < c->batch * c->key_heads; n++) {
                long b = n / c->key_heads, h = n % c->key_heads;
                clear_head(c, &w);
                for (long t = 0; t < c->tokens; t += TILE) {
                    long count = least(TILE, c->tokens - t);
                    float lifts[TILE] = {0};
                    map_here(c, n, t, count, &w.s);
                    memcpy(w.raw, w.s.scale, padded(count) * sizeof(float));
                    if (g->given) memcpy(lifts, g->given + n * c->tokens + t, count * sizeof(float));
                    turned((const float *)g->grad + n * g->grad_step[1] + t * g->grad_step[2], FLOAT32,
                           g->grad_step[2], count, c->features, 1.0f, w.dphi, padded(count));
                    map_back(c, h, &w, w.s.phi_k, w.dphi, g->given ? lifts : 0, count,
                             token_at(c->k, c->type, c->k_step, b, h, t), c->k_step[2],
                             (void *)token_at(g->dk, c->type, g->dk_step, b, h, t), g->dk_step[2]);
                }
                write_weights(c, g, n, &w);
            }
        }
        if (ready) free_work(&w);
    }
    return failed;
}

#endif
