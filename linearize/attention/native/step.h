/* A decoding step: attention for one more token. */

#ifndef LINEARIZE_STEP_H
#define LINEARIZE_STEP_H

#include "one_token.h"

/* Decay a state [F, V + 1], add phi v' to it, and read it with one query: `vectors` whole vectors and a remainder. */
INLINE void step_rows(long vectors, const call_t *c, float *kv, const float *phi_k, const float *phi_q, float decay,
                      const float *value, float *mixed) {
    long wide = c->value_size + 1, whole = vectors * W;
    vf sum[8];
    for (long j = 0; j < vectors; j++) sum[j] = (vf){0};
    for (long j = whole; j < wide; j++) mixed[j] = 0.0f;
    for (long i = 0; i < c->features; i++, kv += wide) {
        float in = phi_k[i], out = phi_q[i];
        for (long j = 0; j < vectors; j++) {
            vf row = load(kv + j * W) * decay + in * load(value + j * W);
            store(kv + j * W, row);
            sum[j] += out * row;
        }
        for (long j = whole; j < wide; j++) {
            kv[j] = kv[j] * decay + in * value[j];
            mixed[j] += out * kv[j];
        }
    }
    for (long j = 0; j < vectors; j++) store(mixed + j * W, sum[j]);
}

/* Read a token's numbers times `scale`; zeros for padding. */
INLINE void token(const call_t *c, const void *x, int type, const int64_t *stride, long b, long h, long size,
                  float scale, float *to) {
    if (is_padding(c, b, 0)) memset(to, 0, size * sizeof(float));
    else for (long d = 0; d < size; d++) to[d] = number(x, type, b * stride[0] + h * stride[1] + d) * scale;
}

static void step_head(const call_t *c, long n, const token_buffers_t *f, float *value, float *mixed) {
    long b = n / c->key_heads, h = n % c->key_heads, group = c->heads / c->key_heads, size = c->keys.size;
    long v = c->value_size, whole = v / W;
    float scales[2], decay = 1.0f, *kv = c->kv + n * c->features * (v + 1);
    float weight = !is_padding(c, b, 0);
    /* If queries and keys share weights, the first query is mapped together with the key. */
    int together = c->queries.first == c->keys.first;
    token_buffers_t key = *f, query = *f;
    query.x += f->x_stride;
    query.phi += f->stride;
    token(c, c->k, c->type, c->k_stride, b, h, size, c->keys.scale, key.x);
    if (together) token(c, c->q, c->type, c->q_stride, b, h * group, size, c->queries.scale, query.x);
    map_tokens(c, &c->keys, h, &key, together ? 2 : 1, scales);
    if (keys_scaled(c)) {
        const void *k = token_at(c->k, c->type, c->k_stride, b, h, 0);
        float own = weight > 0.0f ? scales[0] + learned_scale(&c->keys, h, k, c->type) : FLOOR;
        float before = c->log_scale[n];
        float shift = highest(own, before);
        decay = shift > before ? expf(before - shift) : 1.0f;
        weight *= expf(own - shift);
        c->log_scale[n] = shift;
    }
    token(c, c->v, c->value_type, c->v_stride, b, h, v, weight, value);
    value[v] = weight;
    for (long g = 0; g < group; g++) {
        if (g || !together) {
            token(c, c->q, c->type, c->q_stride, b, h * group + g, size, c->queries.scale, query.x);
            map_tokens(c, &c->queries, c->queries.heads == c->heads ? h * group + g : h, &query, 1, scales);
        }
        if (whole == 4) step_rows(4, c, kv, key.phi, query.phi, decay, value, mixed);
        else if (whole == 2) step_rows(2, c, kv, key.phi, query.phi, decay, value, mixed);
        else if (whole == 8) step_rows(8, c, kv, key.phi, query.phi, decay, value, mixed);
        else step_rows(0, c, kv, key.phi, query.phi, decay, value, mixed);
        write_row(c, mixed, mixed[v], c->eps, b, h * group + g, 0);
        /* The state now contains the key. */
        decay = 1.0f;
        memset(value, 0, (v + 1) * sizeof(float));
    }
}

/* Process one more token and update the state in place. Returns 0; or 1, before any change, if memory ran out. */
int linearize_step(const call_t *c) {
    long heads = c->batch * c->key_heads, wide = padded(c->value_size + 1) + W;
    long each = padded(token_buffers_size(c, 2) + 2 * wide);
    float *memory = malloc(c->threads * each * sizeof(float));
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(c->threads) schedule(static)
    for (long i = 0; i < c->threads; i++) {
        token_buffers_t f = token_buffers_at(c, memory + i * each, 2);
        float *value = memory + i * each + token_buffers_size(c, 2);
        for (long n = i * heads / c->threads; n < (i + 1) * heads / c->threads; n++)
            step_head(c, n, &f, value, value + wide);
    }
    free(memory);
    return 0;
}

#endif
