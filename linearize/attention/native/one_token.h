/* The map of single tokens, a query and a key: weights and features are read once, along their rows. */

#ifndef LINEARIZE_ONE_TOKEN_H
#define LINEARIZE_ONE_TOKEN_H

#include "call.h"

/* Buffers for the tokens of a decoding step: inputs are `x_stride` numbers apart, features and projections `stride`. */
typedef struct {
    float *x, *phi, *other;
    long x_stride, stride;
} token_buffers_t;

INLINE token_buffers_t token_buffers_at(const call_t *c, float *memory, long tokens) {
    token_buffers_t f = {.x = memory, .x_stride = padded(c->keys.size), .stride = padded(c->features) + 2 * UNIT};
    f.phi = f.x + tokens * f.x_stride;
    f.other = f.phi + tokens * f.stride;
    return f;
}

/* Size of all buffers for `tokens` tokens, in numbers. */
INLINE long token_buffers_size(const call_t *c, long tokens) {
    token_buffers_t f = token_buffers_at(c, 0, 0);
    return tokens * (f.x_stride + 2 * f.stride);
}

/* One row of weights times a token: the whole vectors; the remaining products go to `rest`. */
INLINE vf dot(const float *weight, const float *x, long size, int rounded, float *rest) {
    vf sum = {0};
    long d = 0;
    for (; d + W <= size; d += W) sum += (rounded ? nearest(load(weight + d)) : load(weight + d)) * load(x + d);
    for (; d < size; d++) *rest += (rounded ? nearest(splat(weight[d]))[0] : weight[d]) * x[d];
    return sum;
}

/* Project each token -> [n], padded to whole vectors with arbitrary numbers. */
INLINE void project_tokens(const map_t *map, const float *weight, int rounded, const float *x, long x_stride,
                           long tokens, float *to, long to_stride) {
    long n = map->rows, size = map->size;
    for (long i = 0; i < n; i += W, weight += W * size)
        for (long t = 0; t < tokens; t++) {
            vf row[W];
            float rest[W] = {0};
            for (int r = 0; r < W; r++)
                row[r] = i + r < n ? dot(weight + r * size, x + t * x_stride, size, rounded, rest + r) : (vf){0};
            store(to + t * to_stride + i, totals(row) + load(rest));
        }
}

/* weight . x for the part of x that starts at number `from`. */
INLINE float inner(const float *weight, const void *x, int type, long from, long size) {
    vf sum = {0};
    long d = 0;
    for (; d + W <= size; d += W) sum += numbers(x, type, from + d) * load(weight + d);
    float all = total(sum);
    for (; d < size; d++) all += number(x, type, from + d) * weight[d];
    return all;
}

/* The learned log-scale of a token. */
static float learned_scale(const map_t *map, long head, const void *x, int type) {
    if (!map->learned) return 0.0f;
    float sum = inner(map->learned + head * map->size, x, type, 0, map->size);
    if (map->learned_bias) sum += map->learned_bias[head];
    for (long i = head * map->units; i < (head + 1) * map->units; i++)
        sum += map->unit_out[i] * tanhf(inner(map->unit + i * map->size, x, type, 0, map->size) + map->unit_bias[i]);
    return sum;
}

/* Replace y [n], padded, by its softmax, or by that of -y if sign is -1. */
INLINE void softmax_row(float *y, long n, float sign) {
    float top = -INFINITY;
    vf sum = {0};
    for (long i = 0; i < n; i++) top = sign * y[i] > top ? sign * y[i] : top;
    for (long i = 0; i < n; i += W) {
        vf e = vexp(sign * load(y + i) - top);
        sum += only(e, n - i);
        store(y + i, e);
    }
    float factor = 1.0f / total(sum);
    for (long i = 0; i < n; i += W) store(y + i, load(y + i) * factor);
}

/* phi [n] -> [2 n], with the second half after the padded first half, as in `both_signs`. Returns the log-scale. */
INLINE float both_signs_row(const map_t *map, float *phi, long n, long wide) {
    float top = 0.0f;
    if (map->kind == SOFTMAX_BOTH) {
        memcpy(phi + wide, phi, wide * sizeof(float));
        softmax_row(phi, n, 1.0f);
        softmax_row(phi + wide, n, -1.0f);
        return top;
    }
    for (long i = 0; i < n; i++) top = highest(fabsf(phi[i]), top);
    for (long i = 0; i < n; i += W) {
        vf y = load(phi + i);
        store(phi + i, vexp(y - top));
        store(phi + wide + i, vexp(-y - top));
    }
    return top;
}

/* All functions of one token's projections u [n], padded -> phi [n, channels]. */
INLINE void bank_row(const map_t *map, long head, const float *u, float *phi) {
    for (long l = 0; l < map->channels; l++)
        for (long p = 0; p < map->rows; p += W) {
            vf y;
            scalar_function(1, map->bank + (head * map->channels + l) * bank_width(map), map->hidden, u + p, &y);
            for (long i = p; i < p + W && i < map->rows; i++) phi[i * map->channels + l] = y[i - p] * map->amplitude;
        }
}

/* Finish one token's map from its projections, as `activate` does, with their padding. Returns the map's log-scale. */
INLINE float activate_row(const map_t *map, long head, float *phi, float *other) {
    long n = map->rows, wide = padded(n);
    float *first = map->kind == BANK ? other : phi, top = 0.0f;
    if (map->bias)
        for (long i = 0; i < n; i++) first[i] += map->bias[head * n + i];
    switch (map->kind) {
    case BANK:
        bank_row(map, head, other, phi);
        return top;
    case RELU:
        for (long i = 0; i < n; i += W) store(phi + i, rectified(map, load(phi + i)));
        return top;
    case SOFTMAX_BOTH:
    case EXP_BOTH:
        top = both_signs_row(map, phi, n, wide);
        break;
    case POSITIVE_WAVES:
        softmax_row(other, n, 1.0f);
        if (map->magnitude) multiply(other, wide, magnitude_of(splat(other[wide]), 0)[0]);
        positive_waves(phi, other, 0, wide / W, W, 0);
        break;
    case DAMPED_WAVES:
        softmax_row(other, n, 1.0f);
        /* fall through */
    default:
        waves(map->kind, map->kind == DAMPED_WAVES ? 1.0f : map->amplitude, phi, other, wide / W, W, 0);
    }
    if (wide > n) memmove(phi + n, phi + wide, n * sizeof(float));
    return top;
}

/* Map tokens x -> phi [F] each, and their log-scales. */
PART void map_tokens(const call_t *c, const map_t *map, long head, const token_buffers_t *f, long tokens,
                     float *log_scale) {
    long all = map->rows * map->size;
    int rounded = rounds(c, map);
    head = map->heads == 1 ? 0 : head;
    float *to = map->kind == BANK ? f->other : f->phi;
    project_tokens(map, map->first + head * all, rounded, f->x, f->x_stride, tokens, to, f->stride);
    if (map->second)
        project_tokens(map, map->second + head * all, rounded, f->x, f->x_stride, tokens, f->other, f->stride);
    for (long t = 0; map->magnitude && t < tokens; t++) {
        float rest = 0, *to = f->other + t * f->stride + padded(map->rows);
        const float *x = f->x + t * f->x_stride;
        *to = total(dot(projection(map, MAGNITUDE, head), x, map->size, rounded, &rest)) + rest;
    }
    for (long t = 0; t < tokens; t++) {
        log_scale[t] = activate_row(map, head, f->phi + t * f->stride, f->other + t * f->stride);
        if (!map->tau) continue;
        const float *x = f->x + t * f->x_stride;
        float sum = 0;
        for (long d = 0; d < map->size; d++) sum += x[d] * x[d];
        log_scale[t] = sum * expf(-map->tau[head]);
    }
}

#endif
