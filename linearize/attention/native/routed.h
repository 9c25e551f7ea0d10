/* Routed blocks, as in `linearize/ops/routed.py`: the chosen keys get softmax's weights instead of the kernel's, for rows
   whose window and kernel are already summed up. All arrays are contiguous fp32, and their rows are whole vectors.

   The queries of a large tile are sorted by the blocks that they have chosen, so that each block's keys, features and
   values are read once per tile and stay in the cache for all queries that look them up. */

#ifndef LINEARIZE_ROUTED_H
#define LINEARIZE_ROUTED_H

#include <float.h>

#include "window.h"

#define QUERIES 512 /* queries of a tile: their rows of q, features and outputs fit into a core's cache */
#define HALF (W / 2) /* keys at once: a vector has their scores and their kernel weights */
#define LARGEST 30.0f /* most that is subtracted, times the sum of the row: see linearize/ops/routed.py */

typedef struct {
    int64_t batch, heads, key_heads, tokens, keys, size, features, value_size; /* keys: rows of k, v, phi_k, key_scale */
    int64_t block, blocks, slots, window, sinks;
    const float *q, *k, *v, *phi_q, *phi_k; /* q times the scaling */
    const float *query_scale, *key_scale;   /* [B, H, T] and [B, K, keys] */
    const int64_t *chosen;                  /* [B, H, T, slots], -1: none */
    const int64_t *real;                    /* [B], numbers of tokens; padding comes after them */
    float *out, *sums, *tops;               /* [B, H, T, V] and [B, H, T]: the rows, their sums and their levels */
    int64_t *inexact;                       /* [1], number of rows whose subtracted weights are too large */
    /* For the gradient, as in window_gradient.h: the features' products are weights, and all d... are added to. */
    const float *grad, *slope;
    float *dq, *dk, *dv, *dphi_q, *dphi_k;
    float eps;
    int32_t causal, threads;
} routed_t;

/* One query head, and a thread's arrays: queries of a tile, sorted by block, and the first of each block. */
typedef struct {
    const float *q, *k, *v, *phi_q, *phi_k, *query_scale, *key_scale;
    const int64_t *chosen;
    float *out, *sums, *tops;
    long real;
    int32_t *queries, *first;
    float *less; /* [QUERIES], sums of the subtracted weights, which are not negative */
    const float *grad, *slope;
    float *dq, *dk, *dv, *dphi_q, *dphi_k;
} routed_head_t;

static void sort_by_block(const routed_t *g, const routed_head_t *n, long t, long count) {
    const int64_t *chosen = n->chosen + t * g->slots;
    memset(n->first, 0, (g->blocks + 1) * sizeof *n->first);
    for (long i = 0; i < count * g->slots; i++)
        if (chosen[i] >= 0) n->first[chosen[i] + 1]++;
    for (long c = 0; c < g->blocks; c++) n->first[c + 1] += n->first[c];
    for (long i = 0; i < count * g->slots; i++)
        if (chosen[i] >= 0) n->queries[n->first[chosen[i]]++] = i / g->slots;
    /* Each is now the first of the next block. */
    memmove(n->first + 1, n->first, g->blocks * sizeof *n->first);
    n->first[0] = 0;
}

/* Whether query t looks up a key of a block that it has chosen. */
INLINE int looks_up(const routed_t *g, const routed_head_t *n, long t, long key) {
    int near = g->causal ? t - key < g->window : labs(t - key) <= g->window / 2;
    return !near && key >= g->sinks && key < n->real;
}

/* Whether query t looks up all keys from `first` to `last`, without asking for each. */
INLINE int looks_up_all(const routed_t *g, const routed_head_t *n, long t, long first, long last) {
    if (first < g->sinks || last >= n->real) return 0;
    return g->causal ? t - last >= g->window : t - last > g->window / 2 || first - t > g->window / 2;
}

/* Lane masks of the scores of HALF keys, and of their kernel weights. */
#define IS_LOWER(j) ((j) < HALF ? -1 : 0)
#if W == 16
#define ACROSS_HALF ACROSS8
#elif W == 8
#define ACROSS_HALF ACROSS4
#else
#define ACROSS_HALF ACROSS2
#endif
#define ACROSS1(j) ((j) ^ 1)

/* Lanes of a where the mask is set, else of b. */
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* Each lane's half of the lanes, added up. */
INLINE vf half_totals(vf x) {
#if W > 8
    x += SHUFFLE(x, x, ACROSS4);
#endif
#if W > 4
    x += SHUFFLE(x, x, ACROSS2);
#endif
    return x + SHUFFLE(x, x, ACROSS1);
}

/* The largest of the lower lanes; NaN does not count. */
INLINE float lower_largest(vf x) {
    x = either((vi){LANES(IS_LOWER)}, x, splat(FLOOR));
#if W > 8
    x = larger(x, SHUFFLE(x, x, ACROSS4));
#endif
#if W > 4
    x = larger(x, SHUFFLE(x, x, ACROSS2));
#endif
    x = larger(x, SHUFFLE(x, x, ACROSS1));
    return x[0] > FLOOR ? x[0] : FLOOR;
}

/* The products of query t with HALF keys from `first` on in the lower lanes, those of their features in the upper. */
INLINE vf key_products(const routed_t *g, const routed_head_t *n, long t, long first) {
    const float *q = n->q + t * g->size, *k = n->k + first * g->size;
    const float *phi_q = n->phi_q + t * g->features, *phi_k = n->phi_k + first * g->features;
    vf row[W];
    for (int i = 0; i < W; i++) row[i] = splat(0.0f);
    for (long d = 0; d < g->size; d += W) {
        vf x = load(q + d);
        for (int i = 0; i < HALF; i++) row[i] += x * load(k + i * g->size + d);
    }
    for (long d = 0; d < g->features; d += W) {
        vf x = load(phi_q + d);
        for (int i = 0; i < HALF; i++) row[HALF + i] += x * load(phi_k + i * g->features + d);
    }
    return totals(row);
}

/* The lanes of the keys from `first` on that query t looks up; `count` of them belong to the block. */
INLINE vi lookup_mask(const routed_t *g, const routed_head_t *n, long t, long first, long count) {
    int32_t seen[W];
    if (count >= HALF && looks_up_all(g, n, t, first, first + HALF - 1)) return (vi){0} - 1;
    for (int i = 0; i < HALF; i++) seen[i] = seen[HALF + i] = i < count && looks_up(g, n, t, first + i) ? -1 : 0;
    return *(const vi *)seen;
}

/* The exponents of softmax's weights of HALF keys and, in the upper lanes, of the factors of their kernel weights. */
INLINE vf key_exponents(const routed_head_t *n, long t, long first, vf products, vi seen) {
    float scales[W] = {0};
    memcpy(scales + HALF, n->key_scale + first, HALF * sizeof(float));
    vf x = either((vi){LANES(IS_LOWER)}, products, load(scales) + n->query_scale[t]);
    return either(seen, x, splat(FLOOR));
}

/* The weights e^(exponent - top), zero for keys that are not seen: softmax's and, in the upper lanes, the kernel's. */
INLINE vf key_weights(vf exponents, float top, vf products, vi seen) {
    /* Products at larger exponents are too small to matter. */
    vf x = vexp(-larger(splat(-80.0f), top - exponents));
    return (vf)(seen & (vi)either((vi){LANES(IS_LOWER)}, x, x * products));
}

/* Add a block's chosen keys to the row of query t, which is row r of the tile. */
INLINE void look_up(const routed_t *g, const routed_head_t *n, long t, long r, long block) {
    float *out = n->out + t * g->value_size, weights[W];
    for (long i = 0; i < g->block; i += HALF) {
        long first = block * g->block + i;
        const float *v = n->v + first * g->value_size;
        vf products = key_products(g, n, t, first);
        vi seen = lookup_mask(g, n, t, first, g->block - i);
        vf exponents = key_exponents(n, t, first, products, seen);
        float before = n->tops[t], top = highest(lower_largest(exponents), before);
        if (top != before) {
            float factor = expf(before - top);
            multiply(out, g->value_size, factor);
            n->sums[t] *= factor;
            n->less[r] *= factor;
            n->tops[t] = top;
        }
        vf both = key_weights(exponents, top, products, seen), changed = both - SHUFFLE(both, both, ACROSS_HALF);
        vf sums = half_totals(either((vi){LANES(IS_LOWER)}, changed, both));
        n->sums[t] += sums[0];
        n->less[r] += sums[HALF];
        store(weights, changed);
        for (long d = 0; d < g->value_size; d += W) {
            vf x = load(out + d);
            for (int j = 0; j < HALF; j++) x += weights[j] * load(v + j * g->value_size + d);
            store(out + d, x);
        }
    }
}

static long routed_head(const routed_t *g, const routed_head_t *n) {
    long inexact = 0;
    for (long t = 0; t < g->tokens; t += QUERIES) {
        long count = least(QUERIES, g->tokens - t);
        sort_by_block(g, n, t, count);
        for (long r = 0; r < count; r++) multiply(n->out + (t + r) * g->value_size, g->value_size, n->sums[t + r]);
        memset(n->less, 0, count * sizeof(float));
        for (long c = 0; c < g->blocks; c++)
            for (long i = n->first[c]; i < n->first[c + 1]; i++)
                look_up(g, n, t + n->queries[i], n->queries[i], c);
        for (long r = 0; r < count; r++) {
            float sum = n->sums[t + r];
            inexact += n->less[r] > LARGEST * sum;
            for (long d = 0; d < g->value_size; d += W) {
                float *row = n->out + (t + r) * g->value_size + d;
                store(row, load(row) / guarded(sum, g->eps));
            }
        }
    }
    return inexact;
}

/* The arrays of head h of all query heads. */
INLINE routed_head_t routed_arrays(const routed_t *g, long h) {
    long key = h / (g->heads / g->key_heads), q = h * g->tokens, k = key * g->keys;
    return (routed_head_t){
        g->q + q * g->size, g->k + k * g->size, g->v + k * g->value_size, g->phi_q + q * g->features,
        g->phi_k + k * g->features, g->query_scale + q, g->key_scale + k, g->chosen + q * g->slots,
        g->out + q * g->value_size, g->sums + q, g->tops + q, g->real[h / g->heads], 0, 0, 0,
        g->grad + q * g->value_size, g->slope + q, g->dq + q * g->size, g->dk + k * g->size, g->dv + k * g->value_size,
        g->dphi_q + q * g->features, g->dphi_k + k * g->features,
    };
}

/* Returns DONE or NO_MEMORY. */
int linearize_routed(const routed_t *g) {
    int failed = DONE;
    int64_t inexact = 0;
#pragma omp parallel num_threads(g->threads) reduction(+ : inexact)
    {
        float *queries, *first, *less;
        const part_t parts[] = {
            {&queries, QUERIES * g->slots}, {&first, g->blocks + 1}, {&less, QUERIES},
        };
        float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
        if (all_ready(memory != 0, &failed)) {
#pragma omp for schedule(dynamic)
            for (long h = 0; h < g->batch * g->heads; h++) {
                routed_head_t n = routed_arrays(g, h);
                n.queries = (int32_t *)queries, n.first = (int32_t *)first, n.less = less;
                inexact += routed_head(g, &n);
            }
        }
        free(memory);
    }
    *g->inexact = inexact;
    return failed;
}

/* Add up HALF rows of x [HALF, size] times their factors. */
INLINE void add_scaled(const float *factors, const float *x, long size, float *to) {
    for (long d = 0; d < size; d += W) {
        vf sum = load(to + d);
        for (int j = 0; j < HALF; j++) sum += factors[j] * load(x + j * size + d);
        store(to + d, sum);
    }
}

/* Add x [size] times its factor to each of HALF rows. */
INLINE void add_to_each(const float *factors, const float *x, long size, float *to) {
    for (int j = 0; j < HALF; j++)
        for (long d = 0; d < size; d += W) store(to + j * size + d, load(to + j * size + d) + factors[j] * load(x + d));
}

/* Add the gradients of query t and of a block's chosen keys: softmax's weights are added, the kernel's subtracted. */
INLINE void look_up_back(const routed_t *g, const routed_head_t *n, long t, long block) {
    long size = g->size, f = g->features, width = g->value_size;
    const float *q = n->q + t * size, *phi_q = n->phi_q + t * f, *grad = n->grad + t * width;
    float of_values[W], of_scores[W], of_products[W];
    for (long i = 0; i < g->block; i += HALF) {
        long first = block * g->block + i;
        const float *v = n->v + first * width;
        vf products = key_products(g, n, t, first), row[W];
        vi seen = lookup_mask(g, n, t, first, g->block - i);
        vf weights = vexp(-larger(splat(-80.0f), n->tops[t] - either(seen, products, splat(FLOOR))));
        for (int j = 0; j < W; j++) row[j] = splat(0.0f);
        for (long d = 0; d < width; d += W) {
            vf x = load(grad + d);
            for (int j = 0; j < HALF; j++) row[j] += x * load(v + j * width + d);
        }
        vf slopes = totals(row) + n->slope[t];
        store(of_values, (vf)(seen & (vi)(weights - SHUFFLE(products, products, ACROSS_HALF))));
        store(of_scores, (vf)(seen & (vi)(weights * slopes)));
        store(of_products, (vf)(seen & (vi)-slopes));
        add_scaled(of_scores, n->k + first * size, size, n->dq + t * size);
        add_scaled(of_products, n->phi_k + first * f, f, n->dphi_q + t * f);
        add_to_each(of_scores, q, size, n->dk + first * size);
        add_to_each(of_products, phi_q, f, n->dphi_k + first * f);
        add_to_each(of_values, grad, width, n->dv + first * width);
    }
}

/* Returns DONE or NO_MEMORY. */
int linearize_routed_gradient(const routed_t *g) {
    int failed = DONE;
    long group = g->heads / g->key_heads;
#pragma omp parallel num_threads(g->threads)
    {
        float *queries, *first;
        const part_t parts[] = {{&queries, QUERIES * g->slots}, {&first, g->blocks + 1}};
        float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
        if (all_ready(memory != 0, &failed)) {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < g->batch * g->key_heads; i++)
                for (long h = i * group; h < (i + 1) * group; h++) {
                    routed_head_t n = routed_arrays(g, h);
                    n.queries = (int32_t *)queries, n.first = (int32_t *)first;
                    for (long t = 0; t < g->tokens; t += QUERIES) {
                        sort_by_block(g, &n, t, least(QUERIES, g->tokens - t));
                        for (long c = 0; c < g->blocks; c++)
                            for (long j = n.first[c]; j < n.first[c + 1]; j++) look_up_back(g, &n, t + n.queries[j], c);
                    }
                }
        }
        free(memory);
    }
    return failed;
}

/* A choice of blocks by their scores [B, H, R, blocks], for queries at `places` [B, R]. */
typedef struct {
    int64_t batch, heads, rows, blocks, slots, block, window, sinks;
    const float *scores;
    const int64_t *places, *count; /* count: [B], numbers of keys */
    int64_t *chosen;               /* [B, H, R, slots], in order; -1: none */
    int32_t causal, threads;
} choice_t;

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

/* A lower bound of the element of rank `slots` - 1 of x [count]: one of the largest elements of groups, by bisection. */
static float lower_bound(const float *x, long count, long slots, float *groups) {
    long wide = padded(4 * slots);
    float low = INFINITY, high = -INFINITY;
    if (count < 2 * wide) return -INFINITY;
    memcpy(groups, x, wide * sizeof *x);
    for (long i = wide; i + wide <= count; i += wide)
        for (long j = 0; j < wide; j += W) store(groups + j, larger(load(groups + j), load(x + i + j)));
    for (long j = 0; j < wide; j++) {
        low = groups[j] < low ? groups[j] : low;
        high = groups[j] > high ? groups[j] : high;
    }
    for (int step = 0; step < 10 && low > -FLT_MAX; step++) {
        float middle = 0.5f * low + 0.5f * high;
        if (at_least(groups, wide, middle) >= slots) low = middle;
        else high = middle;
    }
    return low;
}

/* Write the places of x [count] that are at least `least`, and above -infinity; return how many. */
static long places_above(const float *x, long count, float least_score, int32_t *places) {
    long found = 0, i = 0;
#if defined(__AVX512F__)
    __m512 low = _mm512_set1_ps(least_score), none = _mm512_set1_ps(-INFINITY);
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + W <= count; i += W) {
        __m512 score = _mm512_loadu_ps(x + i);
        __mmask16 above = _mm512_cmp_ps_mask(score, low, _CMP_GE_OQ) & _mm512_cmp_ps_mask(score, none, _CMP_GT_OQ);
        if (!above) continue;
        _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(above, _mm512_add_epi32(lane, _mm512_set1_epi32(i))));
        found += __builtin_popcount(above);
    }
#endif
    for (; i < count; i++) {
        places[found] = i;
        found += x[i] >= least_score && x[i] > -INFINITY;
    }
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

/* Returns DONE or NO_MEMORY. */
int linearize_choose(const choice_t *g) {
    int failed = DONE;
    long wide = padded(g->blocks), lists = g->slots * 4 + UNIT > wide ? g->slots * 4 + UNIT : wide;
#pragma omp parallel num_threads(g->threads)
    {
        float *held, *groups, *index, *best;
        const part_t parts[] = {{&held, wide + W}, {&groups, lists}, {&index, wide + W}, {&best, wide + W}};
        float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
        if (all_ready(memory != 0, &failed)) {
#pragma omp for
            for (long n = 0; n < g->batch * g->heads * g->rows; n++) {
                long b = n / (g->heads * g->rows), row = n % g->rows, filled = 0, spare;
                const float *x = g->scores + n * g->blocks;
                int32_t *places = (int32_t *)index;
                int64_t *chosen = g->chosen + n * g->slots;
                candidates_t c = candidates_of(g, g->places[b * g->rows + row], g->count[b]);
                long count = c.to - c.from;
                /* NaN counts as the lowest score. */
                for (long i = 0; i < count; i++) held[i] = x[c.from + i] >= -FLT_MAX ? x[c.from + i] : -FLT_MAX;
                for (long i = c.hole; i < c.end; i++) held[i - c.from] = -INFINITY;
                long found = places_above(held, count, lower_bound(held, count, g->slots, groups), places);
                float least_score = -INFINITY;
                spare = found;
                if (found > g->slots) {
                    for (long i = 0; i < found; i++) best[i] = held[places[i]];
                    least_score = ranked(best, found, g->slots - 1);
                    spare = g->slots;
                    for (long i = 0; i < found; i++) spare -= held[places[i]] > least_score;
                }
                for (long i = 0; i < found; i++) {
                    float score = held[places[i]];
                    if (score > least_score || (score == least_score && spare-- > 0)) chosen[filled++] = c.from + places[i];
                }
                while (filled < g->slots) chosen[filled++] = -1;
            }
        }
        free(memory);
    }
    return failed;
}

#endif
