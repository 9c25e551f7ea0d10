/* The blocks of keys that a query looks up: `choose_blocks` of linearize/ops/window_parts.py. */

#ifndef LINEARIZE_CHOICE_H
#define LINEARIZE_CHOICE_H

#include <float.h>

#include "call.h"

/* A choice of blocks for queries at `places` [B, R]. */
typedef struct {
    int64_t batch, heads, key_heads, rows, blocks, slots, block, window, sinks, size, keys; /* keys: blocks * block */
    const float *q;                /* [B, H, R, size] */
    const void *channels;          /* [B, K, size, keys], of this type */
    const int64_t *places, *count; /* count: [B], numbers of keys */
    int64_t *chosen;               /* [B, H, R, slots], in order; -1: none */
    int32_t causal, threads, type;
} choice_t;

#define CHANNELS 8 /* as in linearize/ops/window_parts.py */

/* Write the places of the largest channels of q [size] to `at`; return how many, at most CHANNELS. */
INLINE int largest_channels(const float *q, long size, long *at) {
    float sizes[CHANNELS];
    int found = 0;
    for (long d = 0; d < size; d++) {
        float x = fabsf(q[d]);
        if (found == CHANNELS && !(x > sizes[CHANNELS - 1])) continue;
        int i = found < CHANNELS ? found++ : CHANNELS - 1;
        for (; i > 0 && x > sizes[i - 1]; i--) sizes[i] = sizes[i - 1], at[i] = at[i - 1];
        sizes[i] = x, at[i] = d;
    }
    return found;
}

/* NaN counts as the lowest score. */
INLINE vf lowest_if_nan(vf x) { return either(x >= splat(-FLT_MAX), x, splat(-FLT_MAX)); }

/* Write the scores of keys `from` to `to`, whose channels [size, keys] are of a type that the compiler knows. */
INLINE void key_scores_of(const choice_t *g, const float *q, const void *channels, int type, long from, long to,
                          float *scores) {
    const void *rows[CHANNELS];
    float factors[CHANNELS];
    long at_channel[CHANNELS], j = from;
    int found = largest_channels(q, g->size, at_channel);
    for (int c = 0; c < CHANNELS; c++) {
        rows[c] = at(channels, type, (c < found ? at_channel[c] : 0) * g->keys);
        factors[c] = c < found ? q[at_channel[c]] : 0.0f;
    }
    if (found == CHANNELS) {
        for (; j + W <= to; j += W) {
            vf x = factors[0] * numbers(rows[0], type, j) + factors[1] * numbers(rows[1], type, j) +
                   factors[2] * numbers(rows[2], type, j) + factors[3] * numbers(rows[3], type, j);
            vf y = factors[4] * numbers(rows[4], type, j) + factors[5] * numbers(rows[5], type, j) +
                   factors[6] * numbers(rows[6], type, j) + factors[7] * numbers(rows[7], type, j);
            store(scores + j - from, lowest_if_nan(x + y));
        }
    }
    for (; j < to; j++) {
        float x = 0.0f;
        for (int c = 0; c < found; c++) x += factors[c] * number(rows[c], type, j);
        scores[j - from] = x >= -FLT_MAX ? x : -FLT_MAX;
    }
}

PART void key_scores(const choice_t *g, const float *q, const void *channels, long from, long to, float *scores) {
    if (g->type == FLOAT32) key_scores_of(g, q, channels, FLOAT32, from, to, scores);
    else key_scores_of(g, q, channels, BFLOAT16, from, to, scores);
}

/* Write the scores of blocks `from` to `to` of one query, by its `count` keys. */
static void scores_of_blocks(const choice_t *g, const float *q, const void *channels, long from, long to, long count,
                             float *keys, float *scores) {
    long size = g->block;
    if (size == 1) {
        key_scores(g, q, channels, from, to, scores);
        return;
    }
    long last = least(to * size, count);
    key_scores(g, q, channels, from * size, last, keys);
    for (long i = from; i < to; i++) {
        float top = -FLT_MAX;
        for (long j = i * size; j < least((i + 1) * size, last); j++) top = highest(top, keys[j - from * size]);
        scores[i - from] = top;
    }
}

/* Move the element of rank `rank` (0: the largest) of x [count] to that place, larger ones before it. */
static float ranked(float *x, long count, long rank) {
    long low = 0, high = count - 1;
    while (low < high) {
        float pivot = x[(low + high) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            float swapped = x[i];
            x[i++] = x[j], x[j--] = swapped;
        }
        if (rank <= j) high = j;
        else if (rank >= i) low = i;
        else break;
    }
    return x[rank];
}

/* How many of x [count], a whole number of vectors, are at least `least_score`. */
INLINE long at_least(const float *x, long count, float least_score) {
    vi sum = {0};
    long all = 0;
    for (long j = 0; j < count; j += W) sum -= load(x + j) >= splat(least_score);
    for (int j = 0; j < W; j++) all += sum[j];
    return all;
}

/* A number that `slots` of x [count] reach, if bisection finds one: equal elements have none. Else NaN. */
static float parting(float *x, long count, long slots, float low) {
    float high = low;
    long wide = (count + W - 1) / W * W;
    for (long i = 0; i < count; i++) high = highest(high, x[i]);
    for (long i = count; i < wide; i++) x[i] = -INFINITY;
    for (int step = 0; step < 32 && low > -FLT_MAX && high < FLT_MAX; step++) {
        float middle = 0.5f * low + 0.5f * high;
        long above = at_least(x, wide, middle);
        if (above == slots) return middle;
        if (above > slots) low = middle;
        else high = middle;
    }
    return NAN;
}

/* A lower bound of the element of rank `slots` - 1 of x [count]: one of the largest elements of groups, by bisection. */
static float lower_bound(const float *x, long count, long slots, float *groups) {
    long wide = padded(4 * slots);
    float low = INFINITY, high = -INFINITY;
    if (count <= slots) return -INFINITY;
    if (count < 2 * wide) wide = padded(count);
    for (long j = 0; j < wide; j++) groups[j] = j < count ? x[j] : -INFINITY;
    for (long i = wide; i + wide <= count; i += wide)
        for (long j = 0; j < wide; j += W) store(groups + j, larger(load(groups + j), load(x + i + j)));
    for (long j = 0; j < wide; j++) {
        low = groups[j] < low && groups[j] >= -FLT_MAX ? groups[j] : low;
        high = groups[j] > high ? groups[j] : high;
    }
    if (at_least(groups, wide, low) < slots) return -INFINITY;
    for (int step = 0; step < 10 && low > -FLT_MAX; step++) {
        float middle = 0.5f * low + 0.5f * high;
        if (at_least(groups, wide, middle) >= slots) low = middle;
        else high = middle;
    }
    return low;
}

/* Which lanes are at least `least_score`, one bit each. */
INLINE uint64_t lanes_at_least(vf x, float least_score) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least_score), _CMP_GE_OQ);
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(least_score), _CMP_GE_OQ));
#else
    uint64_t bits = 0;
    for (int j = 0; j < W; j++) bits |= (uint64_t)(x[j] >= least_score) << j;
    return bits;
#endif
}

/* Write the places of x [count] that are at least `least_score`, and above -infinity; return how many. */
static long places_above(const float *x, long count, float least_score, int32_t *places) {
    long found = 0, i = 0;
    if (least_score < -FLT_MAX) least_score = -FLT_MAX;
    for (; i + W <= count; i += W)
        for (uint64_t above = lanes_at_least(load(x + i), least_score); above; above &= above - 1)
            places[found++] = i + __builtin_ctzll(above);
    for (; i < count; i++)
        if (x[i] >= least_score) places[found++] = i;
    return found;
}

/* The candidates of a query at a place: blocks `from` to `to`, without those from `hole` to `end`, as in `choose_blocks`
   of linearize/ops/window_parts.py. */
typedef struct {
    long from, to, hole, end;
} candidates_t;

INLINE long bounded(long x, long low, long high) { return x < low ? low : x > high ? high : x; }

static candidates_t candidates_of(const choice_t *g, long place, long count) {
    long size = g->block, real = bounded((count + size - 1) / size, 0, g->blocks);
    candidates_t c = {bounded(g->sinks / size, 0, real), real, real, real};
    if (count <= g->sinks) c.from = real;
    if (g->causal) {
        long last = place - g->window;
        c.to = last < 0 ? 0 : bounded(last / size + 1, 0, real);
        c.hole = c.end = c.to;
    } else {
        /* Those that are in the window as a whole. */
        long half = g->window / 2, low = place - half, high = place + half;
        c.hole = low <= 0 ? 0 : (low + size - 1) / size;
        c.end = high + 1 >= count ? real : bounded((high + 1) / size, 0, real);
    }
    c.hole = bounded(c.hole, c.from, c.to);
    c.end = bounded(c.end, c.hole, c.to);
    return c;
}

/* The arrays of a thread. */
typedef struct {
    float *held, *groups, *best, *keys;
    int32_t *places;
} choice_buffers_t;

static choice_buffers_t choice_buffers_at(const choice_t *g, float *memory) {
    long wide = padded(g->blocks) + UNIT, lists = padded(g->slots * 4 + UNIT);
    choice_buffers_t f = {.held = memory, .places = (int32_t *)(memory + wide)};
    f.best = memory + 2 * wide;
    f.groups = f.best + wide;
    f.keys = f.groups + (lists > wide ? lists : wide);
    return f;
}

/* Their size, in numbers. */
INLINE long choice_buffers_size(const choice_t *g) {
    return choice_buffers_at(g, 0).keys - (float *)0 + padded(g->block == 1 ? 0 : g->keys) + UNIT;
}

/* Choose for the query q [size] at a place, given the channels [size, keys] of its keys, of which `count` exist. */
static void choose_blocks(const choice_t *g, const float *q, const void *channels, long place, long count,
                          const choice_buffers_t *f, int64_t *chosen) {
    candidates_t c = candidates_of(g, place, count);
    long all = c.to - c.from, filled = 0;
    scores_of_blocks(g, q, channels, c.from, c.to, count, f->keys, f->held);
    for (long i = c.hole; i < c.end; i++) f->held[i - c.from] = -INFINITY;
    float bound = lower_bound(f->held, all, g->slots, f->groups), parted = -INFINITY;
    long found = places_above(f->held, all, bound, f->places);
    if (found > g->slots) {
        for (long i = 0; i < found; i++) f->best[i] = f->held[f->places[i]];
        parted = parting(f->best, found, g->slots, bound);
    }
    if (parted == parted) {
        for (long i = 0; i < found; i++) {
            if (f->held[f->places[i]] >= parted) chosen[filled++] = c.from + f->places[i];
        }
    } else {
        /* Of equal scores the first. */
        float last = ranked(f->best, found, g->slots - 1);
        long spare = g->slots;
        for (long i = 0; i < found; i++) spare -= f->held[f->places[i]] > last;
        for (long i = 0; i < found; i++) {
            float score = f->held[f->places[i]];
            if (score > last || (score == last && spare-- > 0)) chosen[filled++] = c.from + f->places[i];
        }
    }
    while (filled < g->slots) chosen[filled++] = -1;
}

/* Choose for all queries, one by one. Returns DONE or NO_MEMORY. */
static int choose_one_by_one(const choice_t *g) {
    int failed = DONE;
#pragma omp parallel num_threads(g->threads)
    {
        float *buffers;
        const part_t parts[] = {{&buffers, choice_buffers_size(g)}};
        float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
        if (all_ready(memory != 0, &failed)) {
            choice_buffers_t f = choice_buffers_at(g, buffers);
#pragma omp for
            for (long n = 0; n < g->batch * g->heads * g->rows; n++) {
                long b = n / (g->heads * g->rows), row = n % g->rows;
                long key_head = n / g->rows % g->heads / (g->heads / g->key_heads);
                const void *channels = at(g->channels, g->type, (b * g->key_heads + key_head) * g->size * g->keys);
                choose_blocks(g, g->q + n * g->size, channels, g->places[b * g->rows + row], g->count[b], &f,
                              g->chosen + n * g->slots);
            }
        }
        free(memory);
    }
    return failed;
}

#endif
