/* Routed blocks in a decoding step, as in `linearize/ops/routed.py`: a query chooses blocks among all keys of the state,
   and their keys outside the window and the sinks get softmax's weights instead of the kernel's. */

#ifndef LINEARIZE_LOOK_UP_H
#define LINEARIZE_LOOK_UP_H

#include "choice.h"
#include "step.h"

#define LARGEST 30.0f /* most that is subtracted, times the sum of the row: see linearize/ops/routed.py */
#define AHEAD 8 /* keys are fetched this many keys before they are read: the processor cannot predict their places */

/* All keys of a state, of the M key heads whose queries look up. */
typedef struct {
    int64_t blocks, block, keys; /* looked up per query, keys per block, and places for keys */
    char *all_k, *all_v;         /* [B, M, keys, D] and [B, M, keys, V], in the types of k and v */
    char *channels;              /* [B, M, D, keys] */
    const uint8_t *looks;        /* [H], whether a query head looks up; null if all do */
} memory_t;

/* The memory of key head n, counted over all rows; its `blocks` are 0 if it has none. */
INLINE memory_t memory_of(const call_t *c, const memory_t *all, long n) {
    memory_t m = *all;
    if (!m.blocks) return m;
    long group = c->heads / c->key_heads, before = 0, heads = 0;
    for (long h = 0; h < c->key_heads; h++) {
        int any = !m.looks || memchr(m.looks + h * group, 1, group);
        if (h == n % c->key_heads) before = heads, m.blocks = any ? m.blocks : 0;
        heads += any;
    }
    long at_head = (n / c->key_heads * heads + before) * m.keys, size = c->keys.size * type_size(c->type);
    m.all_k += at_head * size, m.channels += at_head * size;
    m.all_v += at_head * c->value_size * type_size(c->value_type);
    return m;
}

/* A thread's arrays: features and the numbers of one query, the blocks that it has chosen, the keys that it looks up in
   order, their weights, and the sums of the linear part. */
typedef struct {
    float *phi, *query, *weights, *sums;
    int64_t *chosen;
    int32_t *found;
    choice_buffers_t choice;
} look_up_t;

/* How a query of the step chooses. */
INLINE choice_t choice_of(const call_t *c, const memory_t *m, long window, long sinks) {
    long blocks = m->block ? m->keys / m->block : 0;
    return (choice_t){
        .blocks = blocks, .slots = least(m->blocks, blocks), .block = m->block, .window = window, .sinks = sinks,
        .size = c->keys.size, .keys = m->keys, .causal = 1, .type = c->type,
    };
}

static look_up_t look_up_at(const call_t *c, const choice_t *choice, float *memory) {
    long keys = padded(choice->slots * choice->block) + UNIT;
    look_up_t f = {.phi = memory};
    f.query = f.phi + padded(c->features) + UNIT;
    f.sums = f.query + padded(c->keys.size) + UNIT;
    f.weights = f.sums + padded(c->value_size + 1) + UNIT;
    f.found = (int32_t *)(f.weights + keys);
    f.chosen = (int64_t *)(f.weights + 2 * keys);
    f.choice = choice_buffers_at(choice, f.weights + 2 * keys + 2 * padded(choice->slots));
    return f;
}

/* Their size, in numbers; an even one, for the 64-bit numbers. */
INLINE long look_up_size(const call_t *c, const choice_t *choice) {
    return choice->blocks ? look_up_at(c, choice, 0).choice.held - (float *)0 + padded(choice_buffers_size(choice)) : 0;
}

/* Write the head's new token to its place in its memory. */
static void remember(const call_t *c, const memory_t *m, long place, const void *k, const void *v) {
    long bytes = type_size(c->type), size = c->keys.size, v_bytes = c->value_size * type_size(c->value_type);
    memcpy(m->all_k + place * size * bytes, k, size * bytes);
    memcpy(m->all_v + place * v_bytes, v, v_bytes);
    for (long d = 0; d < size; d++)
        memcpy(m->channels + (d * m->keys + place) * bytes, (const char *)k + d * bytes, bytes);
}

/* Choose for the query at a place, its numbers being in `query`; returns how many keys it looks up. */
static long find_keys(const choice_t *choice, const void *channels, long place, const look_up_t *f) {
    long count = 0;
    choose_blocks(choice, f->query, channels, place, place + 1, &f->choice, f->chosen);
    for (long i = 0; i < choice->slots && f->chosen[i] >= 0; i++)
        for (long j = f->chosen[i] * choice->block; j < (f->chosen[i] + 1) * choice->block; j++)
            if (j >= choice->sinks && place - j >= choice->window) f->found[count++] = j;
    return count;
}

INLINE void fetch_bytes(const char *row, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* Scores of the keys found, for the query times the scaling; returns the maximum of them and `top`. */
static float scores_of_found(const call_t *c, const char *keys, long count, const float *query, const look_up_t *f,
                             float top) {
    long size = c->keys.size, bytes = size * type_size(c->type);
    for (long i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch_bytes(keys + f->found[i + AHEAD] * bytes, bytes);
        f->weights[i] = inner(query, keys, c->type, f->found[i] * size, size);
        top = highest(f->weights[i], top);
    }
    return top;
}

/* Add a value times a weight, followed by the weight. */
INLINE void add_value(const call_t *c, const char *values, long key, float weight, float *sums) {
    long size = c->value_size, d = 0;
    for (; d + W <= size; d += W)
        store(sums + d, load(sums + d) + numbers(values, c->value_type, key * size + d) * weight);
    for (; d < size; d++) sums[d] += number(values, c->value_type, key * size + d) * weight;
    sums[size] += weight;
}

/* Add the values of the keys found, times exp(score - top). */
static void add_found(const call_t *c, const char *values, long count, const look_up_t *f, float top, float *sums) {
    long bytes = c->value_size * type_size(c->value_type);
    for (long i = 0; i < count; i++) {
        if (i + AHEAD < count) fetch_bytes(values + f->found[i + AHEAD] * bytes, bytes);
        add_value(c, values, f->found[i], expf(f->weights[i] - top), sums);
    }
}

/* Map key `place` of the memory of head n. Returns the product of its features with those of the query in f->phi; its
   log-scale is written to `scale`. */
static float map_key(const call_t *c, const memory_t *m, long n, long place, const token_buffers_t *tokens,
                     const look_up_t *f, float *scale) {
    long size = c->keys.size, from = place * size;
    for (long d = 0; d < size; d++) tokens->x[d] = number(m->all_k, c->type, from + d) * c->keys.scale;
    map_tokens(c, &c->keys, n % c->key_heads, tokens, 1, scale);
    *scale += learned_scale(&c->keys, n % c->key_heads, at(m->all_k, c->type, from), c->type);
    return inner(f->phi, tokens->phi, FLOAT32, 0, c->features);
}

/* The linear part of all keys that left the window before `place`, but sinks and the keys found -> f->sums. Returns its
   level, without the query's. */
static float sum_up_others(const call_t *c, const memory_t *m, const choice_t *choice, long n, long place, long count,
                           const token_buffers_t *tokens, const look_up_t *f) {
    float top = FLOOR, scale;
    memset(f->sums, 0, (c->value_size + 1) * sizeof(float));
    for (long j = choice->sinks, i = 0; place - j >= choice->window; j++) {
        while (i < count && f->found[i] < j) i++;
        if (i < count && f->found[i] == j) continue;
        float product = map_key(c, m, n, j, tokens, f, &scale);
        if (scale > top) {
            float factor = expf(top - scale);
            for (long d = 0; d <= c->value_size; d++) f->sums[d] *= factor;
            top = scale;
        }
        add_value(c, m->all_v, j, product * expf(scale - top), f->sums);
    }
    return top;
}

/* Take the kernel's weights of the keys found out of a query's linear part `linear`, the sums of the head's state. The
   row's softmax weights sum up to exp(exact), relative to the query's log-scale. Returns the level of the part. */
static float take_out_found(const call_t *c, const memory_t *m, const choice_t *choice, long n, long place, long count,
                            float exact, const token_buffers_t *tokens, const look_up_t *f, float *linear) {
    float level = c->log_scale[n], scale;
    memset(f->sums, 0, (c->value_size + 1) * sizeof(float));
    for (long i = 0; i < count; i++) {
        float product = map_key(c, m, n, f->found[i], tokens, f, &scale);
        add_value(c, m->all_v, f->found[i], product * expf(scale - level), f->sums);
    }
    if (logf(f->sums[c->value_size]) + level > exact + logf(LARGEST)) {
        level = sum_up_others(c, m, choice, n, place, count, tokens, f);
        memcpy(linear, f->sums, (c->value_size + 1) * sizeof(float));
        return level;
    }
    for (long d = 0; d <= c->value_size; d++) linear[d] -= f->sums[d];
    return level;
}

#endif
