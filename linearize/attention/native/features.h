/* A map alone, with its gradient, for callers that need features, such as stage one. The tokens are the call's k
   [B, K, T, D], the features its out [B, K, T, F] in fp32; some maps have log-scales [B, K, T] as well. */

#ifndef LINEARIZE_FEATURES_H
#define LINEARIZE_FEATURES_H

#include "gradient.h"

static void head_features(const call_t *c, long n, scratch_t *s) {
    long b = n / c->key_heads, h = n % c->key_heads;
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        float *to = (float *)c->out + n * c->out_stride[1] + t * c->out_stride[2];
        features(c, &c->keys, c->k, c->k_stride, b, h, h, t, count, s, s->phi_k);
        if (c->log_scale) memcpy(c->log_scale + n * c->tokens + t, s->scale, count * sizeof(float));
        unpack_transposed(s->phi_k, padded(count), to, FLOAT32, c->out_stride[2], count, c->features, 1.0f);
    }
}

/* Returns 0, or 1 if memory ran out. */
int linearize_features(const call_t *c) { return each_head(c, head_features); }

static void head_features_back(const call_t *c, const back_t *g, long n, work_t *w) {
    long b = n / c->key_heads, h = n % c->key_heads;
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        const float *grad = (const float *)g->grad + n * g->grad_stride[1] + t * g->grad_stride[2];
        float dscales[TILE] = {0};
        features(c, &c->keys, c->k, c->k_stride, b, h, h, t, count, &w->s, w->s.phi_k);
        if (g->dlog_scale) memcpy(dscales, g->dlog_scale + n * c->tokens + t, count * sizeof(float));
        pack_transposed(grad, FLOAT32, g->grad_stride[2], count, c->features, 1.0f, w->dphi, padded(count));
        key_back(c, g, b, h, t, count, w->dphi, g->dlog_scale ? dscales : 0, w);
    }
}

/* The gradients of the inputs and weights, from those of the features (g->grad) and log-scales (g->dlog_scale, or null).
   Returns 0, or 1 if memory ran out. */
int linearize_features_gradient(const call_t *c, const back_t *g) { return each_head_back(c, g, head_features_back); }

#endif
