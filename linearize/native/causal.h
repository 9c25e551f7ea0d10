/* Queries to the keys up to their own: tile after tile, with a state. */

#ifndef LINEARIZE_CAUSAL_H
#define LINEARIZE_CAUSAL_H

#include "call.h"

#define CLIMB 40.0f /* powers of two that a row's maximum may lie below its tile's */

/* What a tile's rows need of powers of two: see linearize/ops/causal.py. Multiplying by them does not round, so that
   no later token changes a bit of an earlier row. */
typedef struct {
    float own[TILE], top[TILE]; /* the keys' powers, and their running maximum */
    float before, end;          /* the state's before the tile, and after it */
    int steep;                  /* whether rows need powers of their own */
} powers_t;

/* Take a log-scale apart: exp(scale) = 2^n exp(rest), n a whole number. Returns the rest, between 0 and log 2. */
INLINE float take_apart(float scale, float *n) {
    *n = floorf(scale / 0.693147180559945309f);
    return scale > FLOOR / 2 ? (scale - *n * 0.693359375f) - *n * -2.12194440e-4f : 0.0f;
}

/* Take a tile's log-scales apart: the weights keep what is left, between 1 and 2. */
static void tile_powers(scratch_t *s, long count, float before, powers_t *p) {
    float running = before, rest[TILE] = {0};
    for (long j = 0; j < count; j++) {
        rest[j] = take_apart(s->scale[j], p->own + j);
        running = p->own[j] > running ? p->own[j] : running;
        p->top[j] = running;
    }
    for (long j = 0; j < padded(count); j += W) store(s->weight + j, load(s->weight + j) * vexp(load(rest + j)));
    p->before = before;
    p->end = running;
    p->steep = 0;
    for (long j = 0; j < count; j++) p->steep |= running - p->top[j] > CLIMB && p->top[j] > FLOOR / 2;
}

/* The smallest magnitude of a row's sum, in the row's unit. */
INLINE float row_least(const call_t *c, const powers_t *p, long j) {
    float smallest = c->keys.scaled && !p->steep ? c->eps * power(p->top[j] - p->end) : c->eps;
    return smallest > EPS ? smallest : EPS;
}

/* Bring the keys' weights to the tile's power. */
INLINE void lift(scratch_t *s, long count, const powers_t *p) {
    for (long j = 0; j < count; j++) s->weight[j] *= power(p->own[j] - p->end);
}

/* Bring rows that were read out of a state of power `before` to powers of their own. */
INLINE void reach(scratch_t *s, long count, const powers_t *p) {
    for (long i = 0; i < count; i++) {
        float factor = power(p->before - p->top[i]), *row = s->mixed + i * s->width;
        for (long j = 0; j < s->width; j += W) store(row + j, load(row + j) * factor);
        s->sums[i] *= factor;
    }
}

/* Make `rows` rows of a tile's scores from the i-th on, zero behind the diagonal, and add up their sums. */
INLINE void score_rows(const call_t *c, scratch_t *s, long i, long rows, long wide, const powers_t *p) {
    long seen = least(wide, padded(i + rows));
    product(0, rows, seen, c->features, s->phi_q + i, 1, wide, s->phi_k, wide, s->scores + i * wide, wide);
    for (long r = i; r < i + rows; r++) {
        float *row = s->scores + r * wide;
        vf sum = {0};
        if (p->steep)
            for (long j = 0; j <= r; j++) row[j] *= power(p->own[j] - p->top[r]);
        for (long j = r + 1; j < seen; j++) row[j] = 0.0f;
        for (long j = 0; j < seen; j += W) sum += load(row + j) * load(s->weight + j);
        s->sums[r] += total(sum);
    }
}

/* Add the part that stays inside a tile: scores up to the diagonal, times the values, and their sums. */
static void inside(const call_t *c, scratch_t *s, long count, const powers_t *p) {
    long wide = padded(count);
    for (long i = 0; i < count; i += MR) {
        long rows = least(MR, count - i);
        score_rows(c, s, i, rows, wide, p);
        product(1, rows, s->width, i + rows, s->scores + i * wide, wide, 1, s->values, s->width,
                s->mixed + i * s->width, s->width);
    }
}

/* The queries of one head of a tile, whose keys and values are at hand. */
static void causal_rows(const call_t *c, long b, long h, long first, long count, scratch_t *s, const powers_t *p) {
    open_rows(c, b, h, first, count);
    query_features(c, b, h, first, count, s);
    read_out(c, s, count);
    if (p->steep) reach(s, count, p);
    inside(c, s, count, p);
    for (long j = 0; j < count; j++)
        write_row(c, s->mixed + j * s->width, s->sums[j], row_least(c, p, j), b, h, first + j);
}

/* One key head and its group of query heads, tile after tile. */
static void causal_head(const call_t *c, long n, scratch_t *s) {
    long b = n / c->key_heads, h = n % c->key_heads, group = c->heads / c->key_heads;
    float top = c->keys.scaled ? FLOOR : 0.0f, rest = 0.0f;
    powers_t p = {.end = 0.0f};
    if (c->start) top = c->start_scale[n];
    if (c->keys.scaled) rest = take_apart(top, &p.end);
    fetch(c, c->start, n, expf(rest), s);
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        key_features(c, b, h, t, count, s);
        if (c->keys.scaled) {
            for (long j = 0; j < count; j++) top = s->scale[j] > top ? s->scale[j] : top;
            tile_powers(s, count, p.end, &p);
            if (!p.steep) {
                lift(s, count, &p);
                if (p.end > p.before) fade(c, s->width, s->kv, s->z, power(p.before - p.end));
            }
        }
        weighted_values(c, b, h, t, count, s);
        for (long g = h * group; g < (h + 1) * group; g++) causal_rows(c, b, g, t, count, s, &p);
        if (p.steep) {
            lift(s, count, &p);
            weighted_values(c, b, h, t, count, s);
            fade(c, s->width, s->kv, s->z, power(p.before - p.end));
        }
        take_up_keys(c, s, count);
    }
    if (c->keys.scaled) rest = take_apart(top, &p.end);
    keep(c, s, n, expf(-rest), c->kv);
    c->log_scale[n] = top;
}

/* Causal attention behind a state. Returns 0, or 1 where memory ran out. */
int linearize_causal(const call_t *c) {
    ease(c);
    return each_head(c, causal_head);
}

#endif
