/* Attention from each query to the keys up to its own: tile after tile, with a state. */

#ifndef LINEARIZE_CAUSAL_H
#define LINEARIZE_CAUSAL_H

#include "call.h"

#define CLIMB 40.0f /* how many powers of two the maximum of a row may lie below that of its tile */

/* The powers of two of a tile's rows, as in linearize/ops/causal.py. Multiplying by them does not round, so no
   later token changes a single bit of an earlier row. */
typedef struct {
    float own[TILE], top[TILE]; /* the keys' powers, and their running maximum */
    float before, end;          /* the powers of the state before and after the tile */
    int steep;                  /* whether each row needs its own power */
} powers_t;

/* Split a log-scale: exp(scale) = 2^n exp(rest) with a whole number n. Returns the rest, between 0 and log 2. */
INLINE float take_apart(float scale, float *n) {
    *n = floorf(scale / 0.693147180559945309f);
    return scale <= FLOOR / 2 ? 0.0f : (scale - *n * 0.693359375f) - *n * -2.12194440e-4f;
}

/* Split the log-scales of a tile: the weights keep the remaining factor, between 1 and 2. */
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

/* The smallest magnitude allowed for the sum of a row, in the unit of that row. */
INLINE float row_least(const call_t *c, const powers_t *p, long j) {
    float smallest = keys_scaled(c) && !p->steep ? c->eps * power(p->top[j] - p->end) : c->eps;
    return smallest > EPS ? smallest : EPS;
}

/* Rescale the weights of the keys to the power of the tile. */
INLINE void rescale_keys(scratch_t *s, long count, const powers_t *p) {
    for (long j = 0; j < count; j++) s->weight[j] *= power(p->own[j] - p->end);
}

/* Rescale the rows `first` to `last`, which were read from a state with power `from`, to their own powers. */
INLINE void rescale_rows(scratch_t *s, long first, long last, float from, const powers_t *p) {
    for (long i = first; i < last; i++) multiply(s->mixed + i * s->width, s->width, power(from - p->top[i]));
}

/* Compute `rows` rows of the scores of a tile, from row i on, for keys from `first` (a multiple of W) on: zero after the
   diagonal. Also adds up the sums of the rows. */
INLINE void score_rows(const call_t *c, scratch_t *s, long first, long i, long rows, long wide, const powers_t *p) {
    long seen = least(wide, padded(i + rows));
    product(0, rows, seen - first, c->features, s->phi_q + i, 1, wide, s->phi_k + first, wide,
            s->scores + i * wide + first, wide);
    for (long r = i; r < i + rows; r++) {
        float *row = s->scores + r * wide;
        vf sum = {0};
        if (p->steep)
            for (long j = first; j <= r; j++) row[j] *= power(p->own[j] - p->top[r]);
        for (long j = first; j < seen; j += W) {
            vf upto = only(load(row + j), r + 1 - j);
            store(row + j, upto);
            sum += upto * load(s->weight + j);
        }
        s->sums[r] += total(sum);
    }
}

/* Scores of queries `first` to `last` with the keys from `first` on, and the sums of their rows; z has the power
   `from`. */
PART void tile_scores(const call_t *c, scratch_t *s, long first, long last, long wide, float from,
                       const powers_t *p) {
    row_sums(c, s->phi_q + first, s->z, last - first, wide, s->sums + first);
    if (p->steep)
        for (long i = first; i < last; i++) s->sums[i] *= power(from - p->top[i]);
    for (long i = first; i < last; i += MR) score_rows(c, s, first, i, least(MR, last - i), wide, p);
}

/* Scores and sums of a tile, UNIT rows at a time; between them, their keys are added to z. */
static void mha_scores(const call_t *c, scratch_t *s, long count, long wide, const powers_t *p) {
    float at = p->before;
    for (long i = 0; i < count; i += UNIT) {
        float weight[UNIT] = {0}, end;
        long last = least(count, i + UNIT);
        tile_scores(c, s, i, last, wide, at, p);
        memcpy(weight, s->weight + i, (last - i) * sizeof(float));
        if (p->steep) {
            end = p->top[last - 1];
            for (long j = i; j < last; j++) weight[j - i] *= power(p->own[j] - end);
            multiply(s->z, c->features, power(at - end));
            at = end;
        }
        accumulate_z(c, s->phi_k + i, wide, weight, last - i, s->z);
    }
}

/* Add the contribution of the keys from `first` on to MR rows from row i on. */
INLINE void intra_rows(scratch_t *s, long first, long i, long wide) {
    long width = s->width;
    product(1, MR, width, i + MR - first, s->scores + i * wide + first, wide, 1, s->values + first * width, width,
            s->mixed + i * width, width);
}

/* Read MR rows, `columns` vectors of each, from a state [F, width], and add the same tokens' keys to it. */
INLINE void walk_state(int columns, const call_t *c, const float *q, const float *k, long wide,
                       const float *values, float *kv, float *mixed, long width) {
    vf sum[MR][NV];
    float near[MR * NV * W]; /* the values, at constant offsets */
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < columns; j++) {
            sum[r][j] = (vf){0};
            store(near + (r * NV + j) * W, load(values + r * width + j * W));
        }
    for (long i = 0; i < c->features; i++, kv += width, q += wide, k += wide) {
        vf state[NV];
        for (int j = 0; j < columns; j++) state[j] = load(kv + j * W);
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < columns; j++) sum[r][j] += q[r] * state[j];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < columns; j++) state[j] += k[r] * load(near + (r * NV + j) * W);
        for (int j = 0; j < columns; j++) store(kv + j * W, state[j]);
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < columns; j++) store(mixed + r * width + j * W, sum[r][j]);
}

/* The same for whole rows: MR tokens of a tile from token i on. */
PART void walk_rows(const call_t *c, scratch_t *s, long i, long wide) {
    const float *q = s->phi_q + i, *k = s->phi_k + i;
    long width = s->width, columns;
    for (long j = 0; j < width; j += columns * W) {
        const float *values = s->values + i * width + j;
        float *kv = s->kv + j, *mixed = s->mixed + i * width + j;
        columns = width - j >= PANEL ? NV : 1;
        if (columns == NV) walk_state(NV, c, q, k, wide, values, kv, mixed, width);
        else walk_state(1, c, q, k, wide, values, kv, mixed, width);
    }
}

/* Read MR rows of a steep tile from the state and add their keys to it. The order is the same as above, so if a later
   token makes a tile steep, its first rows are still rounded like those of any other tile. Returns the power of the
   state after these rows. */
static float walk_steep(const call_t *c, scratch_t *s, long i, long last, long wide, float at, const powers_t *p) {
    long width = s->width, rows = least(MR, last - i);
    float end = p->top[i + rows - 1], *values = s->values + i * width;
    read_rows(c, s, i, MR, wide);
    rescale_rows(s, i, i + rows, at, p);
    intra_rows(s, i, i, wide);
    for (long r = 0; r < rows; r++) multiply(values + r * width, width, power(p->own[i + r] - end));
    multiply(s->kv, c->features * width, power(at - end));
    product(1, c->features, width, MR, s->phi_k + i, wide, 1, values, width, s->kv, width);
    return end;
}

/* Multi-head attention: no other query head needs the state before a tile. So keys are added to it while the queries are
   read, MR at a time, and few pairs of queries and keys remain. Blocks are always whole, even past the last token of the
   tile, so that the rounding of a row does not depend on how many tokens follow. */
static void mha_rows(const call_t *c, scratch_t *s, long count, long wide, const powers_t *p) {
    float at = p->before;
    mha_scores(c, s, count, wide, p);
    for (long i = 0; i < count; i += MR) {
        if (p->steep) {
            at = walk_steep(c, s, i, count, wide, at, p);
            continue;
        }
        walk_rows(c, s, i, wide);
        intra_rows(s, i, i, wide);
    }
}

/* Grouped queries: read the rows of a tile from the state before it, and add the contribution of the tile's own keys. */
static void gqa_rows(const call_t *c, scratch_t *s, long count, long wide, const powers_t *p) {
    tile_scores(c, s, 0, count, wide, p->before, p);
    read_rows(c, s, 0, count, wide);
    if (p->steep) rescale_rows(s, 0, count, p->before, p);
    for (long i = 0; i < count; i += MR) intra_rows(s, 0, i, wide);
}

/* The queries of one head of a tile, whose keys and values are ready. */
static void causal_rows(const call_t *c, long b, long h, long first, long count, int mha, scratch_t *s,
                        const powers_t *p) {
    long wide = padded(count);
    prefetch_out(c, b, h, first, count);
    query_features(c, b, h, first, count, s);
    if (mha) mha_rows(c, s, count, wide, p);
    else gqa_rows(c, s, count, wide, p);
    for (long j = 0; j < count; j++)
        write_row(c, s->mixed + j * s->width, s->sums[j], row_least(c, p, j), b, h, first + j);
}

/* One key head and its group of query heads, tile after tile. */
static void causal_head(const call_t *c, long n, scratch_t *s) {
    long b = n / c->key_heads, h = n % c->key_heads, group = c->heads / c->key_heads;
    float top = keys_scaled(c) ? FLOOR : 0.0f, rest = 0.0f;
    powers_t p = {.end = 0.0f};
    if (c->start) top = c->start_scale[n];
    if (keys_scaled(c)) rest = take_apart(top, &p.end);
    load_state(c, c->start, n, expf(rest), s);
    for (long t = 0; t < c->tokens; t += TILE) {
        long count = least(TILE, c->tokens - t);
        key_features(c, b, h, t, count, s);
        if (keys_scaled(c)) {
            for (long j = 0; j < count; j++) top = highest(s->scale[j], top);
            tile_powers(s, count, p.end, &p);
            if (!p.steep) {
                rescale_keys(s, count, &p);
                if (p.end > p.before) decay_state(c, s->width, s->kv, s->z, power(p.before - p.end));
            }
        }
        weighted_values(c, b, h, t, count, s);
        int mha = group == 1;
        for (long g = h * group; g < (h + 1) * group; g++) causal_rows(c, b, g, t, count, mha, s, &p);
        if (mha) continue;
        if (p.steep) {
            rescale_keys(s, count, &p);
            weighted_values(c, b, h, t, count, s);
            decay_state(c, s->width, s->kv, s->z, power(p.before - p.end));
        }
        accumulate_keys(c, s, count);
    }
    if (keys_scaled(c)) rest = take_apart(top, &p.end);
    store_state(c, s, n, expf(-rest), c->kv);
    c->log_scale[n] = top;
}

/* Causal attention after a state. Returns 0, or 1 if memory ran out. */
int linearize_causal(const call_t *c) {
    advise_huge_pages(c);
    return each_head(c, causal_head);
}

#endif
