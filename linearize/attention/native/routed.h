/* Routed blocks, as in `linearize/ops/routed.py`: the chosen keys get softmax's weights instead of the kernel's, for rows
   whose window and kernel are already summed up. All arrays are contiguous fp32, and their rows are whole vectors.

   The queries of a large tile are sorted by the blocks that they have chosen, so that each block's keys, features and
   values are read once per tile and stay in the cache for all queries that look them up. */

#ifndef LINEARIZE_ROUTED_H
#define LINEARIZE_ROUTED_H

#include "window.h"

#define QUERIES 512 /* queries of a tile: their rows of q, features and outputs fit into a core's cache */
#define HALF (W / 2) /* keys at once: a vector has their scores and their kernel weights */

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
    float *weights; /* [slots, padded], of single keys */
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

/* HALF keys that a query may look up: their places, and the lanes of those that it does. */
typedef struct {
    long at[HALF];
    vi seen;
} keys_t;

/* The keys from `first` on, of which `count` belong to a block that query t has chosen. */
INLINE keys_t keys_of_block(const routed_t *g, const routed_head_t *n, long t, long first, long count) {
    keys_t keys;
    int32_t seen[W];
    int all = count >= HALF && looks_up_all(g, n, t, first, first + HALF - 1);
    for (int i = 0; i < HALF; i++) {
        keys.at[i] = first + i;
        seen[i] = seen[HALF + i] = all || (i < count && looks_up(g, n, t, first + i)) ? -1 : 0;
    }
    keys.seen = *(const vi *)seen;
    return keys;
}

/* The keys in the slots from `slot` on, for blocks of one key; a slot without a key has the place of the first one. */
INLINE keys_t single_keys(const routed_t *g, const routed_head_t *n, long t, long slot) {
    const int64_t *chosen = n->chosen + t * g->slots;
    keys_t keys;
    int32_t seen[W];
    for (int i = 0; i < HALF; i++) {
        long key = slot + i < g->slots ? chosen[slot + i] : -1;
        keys.at[i] = key < 0 ? 0 : key;
        seen[i] = seen[HALF + i] = key >= 0 && looks_up(g, n, t, key) ? -1 : 0;
    }
    keys.seen = *(const vi *)seen;
    return keys;
}

/* The products of query t with the keys in the lower lanes, those of their features in the upper. */
INLINE vf key_products(const routed_t *g, const routed_head_t *n, long t, const keys_t *keys) {
    const float *q = n->q + t * g->size, *phi_q = n->phi_q + t * g->features;
    vf row[W];
    for (int i = 0; i < W; i++) row[i] = splat(0.0f);
    for (long d = 0; d < g->size; d += W) {
        vf x = load(q + d);
        for (int i = 0; i < HALF; i++) row[i] += x * load(n->k + keys->at[i] * g->size + d);
    }
    for (long d = 0; d < g->features; d += W) {
        vf x = load(phi_q + d);
        for (int i = 0; i < HALF; i++) row[HALF + i] += x * load(n->phi_k + keys->at[i] * g->features + d);
    }
    return totals(row);
}

/* The exponents of softmax's weights of the keys and, in the upper lanes, of the factors of their kernel weights. */
INLINE vf key_exponents(const routed_head_t *n, long t, const keys_t *keys, vf products) {
    float scales[W] = {0};
    for (int i = 0; i < HALF; i++) scales[HALF + i] = n->key_scale[keys->at[i]];
    vf x = either((vi){LANES(IS_LOWER)}, products, load(scales) + n->query_scale[t]);
    return either(keys->seen, x, splat(FLOOR));
}

/* The weights e^(exponent - top), zero for keys that are not seen: softmax's and, in the upper lanes, the kernel's. */
INLINE vf key_weights(vf exponents, float top, vf products, vi seen) {
    /* Products at larger exponents are too small to matter. */
    vf x = vexp(-larger(splat(-80.0f), top - exponents));
    return (vf)(seen & (vi)either((vi){LANES(IS_LOWER)}, x, x * products));
}

/* Add keys to the row of query t, which is row r of the tile. */
INLINE void look_up(const routed_t *g, const routed_head_t *n, long t, long r, const keys_t *keys) {
    float *out = n->out + t * g->value_size, weights[W];
    vf products = key_products(g, n, t, keys), exponents = key_exponents(n, t, keys, products);
    float before = n->tops[t], top = highest(lower_largest(exponents), before);
    if (top != before) {
        float factor = expf(before - top);
        multiply(out, g->value_size, factor);
        n->sums[t] *= factor;
        n->less[r] *= factor;
        n->tops[t] = top;
    }
    vf both = key_weights(exponents, top, products, keys->seen), changed = both - SHUFFLE(both, both, ACROSS_HALF);
    vf sums = half_totals(either((vi){LANES(IS_LOWER)}, changed, both));
    n->sums[t] += sums[0];
    n->less[r] += sums[HALF];
    store(weights, changed);
    for (long d = 0; d < g->value_size; d += W) {
        vf x = load(out + d);
        for (int j = 0; j < HALF; j++) x += weights[j] * load(n->v + keys->at[j] * g->value_size + d);
        store(out + d, x);
    }
}

INLINE void fetch(const float *row, long size) {
    for (long d = 0; d < size; d += 16) __builtin_prefetch(row + d);
}

/* What to do with keys that query t, row r of the tile, looks up. */
typedef void (*visit_t)(const routed_t *g, const routed_head_t *n, long t, long r, const keys_t *keys);

/* Visit all keys that the queries of a tile look up. Rows at chosen places are too irregular for the processor to
   predict, so they are fetched ahead: those of the next query of a block, or of the next single keys. */
INLINE void visit_tile(const routed_t *g, const routed_head_t *n, long t, long count, visit_t visit) {
    if (g->block == 1) {
        for (long r = 0; r < count; r++) {
            keys_t keys = single_keys(g, n, t + r, 0);
            for (long slot = HALF; slot < g->slots + HALF; slot += HALF) {
                keys_t next = single_keys(g, n, t + r, slot);
                for (int i = 0; i < HALF; i++) {
                    fetch(n->k + next.at[i] * g->size, g->size);
                    fetch(n->phi_k + next.at[i] * g->features, g->features);
                    fetch(n->v + next.at[i] * g->value_size, g->value_size);
                }
                visit(g, n, t + r, r, &keys);
                keys = next;
            }
        }
        return;
    }
    sort_by_block(g, n, t, count);
    for (long c = 0; c < g->blocks; c++)
        for (long i = n->first[c]; i < n->first[c + 1]; i++) {
            long r = n->queries[i], next = t + n->queries[i + 1];
            fetch(n->q + next * g->size, g->size);
            fetch(n->phi_q + next * g->features, g->features);
            fetch(n->out + next * g->value_size, g->value_size);
            for (long j = 0; j < g->block; j += HALF) {
                keys_t keys = keys_of_block(g, n, t + r, c * g->block + j, g->block - j);
                visit(g, n, t + r, r, &keys);
            }
        }
}

/* Single keys without a kernel: all keys of a query at once, and their rows are fetched before they are needed. */

/* Write the keys that query t looks up, followed by zeros; return how many. */
static long listed_keys(const routed_t *g, const routed_head_t *n, long t, int32_t *keys) {
    const int64_t *chosen = n->chosen + t * g->slots;
    long count = 0;
    for (long i = 0; t < g->tokens && i < g->slots; i++) {
        keys[count] = chosen[i];
        count += chosen[i] >= 0 && looks_up(g, n, t, chosen[i]);
    }
    for (long i = count; i < padded(g->slots); i++) keys[i] = 0;
    return count;
}

/* Write the scores of keys of query t, FLOOR to the end of a vector; return the largest. */
static float listed_scores(const routed_t *g, const routed_head_t *n, long t, const int32_t *keys, long count,
                           float *scores) {
    const float *q = n->q + t * g->size;
    vf top = splat(FLOOR);
    for (long i = 0; i < count; i += W) {
        vf row[W];
        for (int j = 0; j < W; j++) {
            fetch(n->v + keys[i + j] * g->value_size, g->value_size);
            row[j] = splat(0.0f);
        }
        for (long d = 0; d < g->size; d += W)
            for (int j = 0; j < W; j++) row[j] += load(q + d) * load(n->k + keys[i + j] * g->size + d);
        vf x = totals(row);
        if (count - i < W) x = either((vi){LANES(LANE)} < (int32_t)(count - i), x, splat(FLOOR));
        top = larger(x, top);
        store(scores + i, x);
    }
    float all = FLOOR;
    for (int j = 0; j < W; j++) all = top[j] > all ? top[j] : all;
    return all;
}

/* Add the values of keys, times their weights, to some vectors of a row from number d on. */
INLINE void add_listed(int vectors, const routed_t *g, const routed_head_t *n, long d, const int32_t *keys, long count,
                       const int32_t *next, float *out) {
    vf sum[8];
    for (int j = 0; j < vectors; j++) sum[j] = load(out + d + j * W);
    for (long i = 0; i < count; i++) {
        const float *row = n->v + keys[i] * g->value_size + d;
        if (next) fetch(n->k + next[i] * g->size, g->size);
        for (int j = 0; j < vectors; j++) sum[j] += n->weights[i] * load(row + j * W);
    }
    for (int j = 0; j < vectors; j++) store(out + d + j * W, sum[j]);
}

/* Add the keys to the row of query t. */
static void look_up_listed(const routed_t *g, const routed_head_t *n, long t, const int32_t *keys, long count,
                           const int32_t *next) {
    float *out = n->out + t * g->value_size, before = n->tops[t];
    float top = highest(listed_scores(g, n, t, keys, count, n->weights), before), factor = expf(before - top);
    vf sum = {0};
    for (long i = 0; i < count; i += W) {
        vf x = only(vexp(-larger(splat(-80.0f), top - load(n->weights + i))), count - i);
        store(n->weights + i, x);
        sum += x;
    }
    if (top != before) multiply(out, g->value_size, factor);
    n->sums[t] = (top != before ? n->sums[t] * factor : n->sums[t]) + total(sum);
    n->tops[t] = top;
    for (long d = 0; d < g->value_size;) {
        int vectors = d + 8 * W <= g->value_size ? 8 : d + 4 * W <= g->value_size ? 4 : 1;
        if (vectors == 8) add_listed(8, g, n, d, keys, count, next, out);
        else if (vectors == 4) add_listed(4, g, n, d, keys, count, next, out);
        else add_listed(1, g, n, d, keys, count, next, out);
        next = 0;
        d += vectors * W;
    }
}

/* Look up the keys of a tile of queries. */
static void look_up_tile(const routed_t *g, const routed_head_t *n, long t, long count) {
    int32_t *keys = n->queries, *next = keys + padded(g->slots) + W;
    long found = listed_keys(g, n, t, keys);
    for (long r = 0; r < count; r++) {
        long more = listed_keys(g, n, t + r + 1, next);
        if (found) look_up_listed(g, n, t + r, keys, found, next);
        int32_t *other = keys;
        keys = next, next = other, found = more;
    }
}

static long routed_head(const routed_t *g, const routed_head_t *n) {
    long inexact = 0;
    for (long t = 0; t < g->tokens; t += QUERIES) {
        long count = least(QUERIES, g->tokens - t);
        for (long r = 0; r < count; r++) multiply(n->out + (t + r) * g->value_size, g->value_size, n->sums[t + r]);
        memset(n->less, 0, count * sizeof(float));
        if (g->block == 1 && !g->features) look_up_tile(g, n, t, count);
        else visit_tile(g, n, t, count, look_up);
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
        g->out + q * g->value_size, g->sums + q, g->tops + q, g->real[h / g->heads], 0, 0, 0, 0,
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
        float *queries, *first, *less, *weights;
        const part_t parts[] = {
            {&queries, QUERIES * g->slots}, {&first, g->blocks + 1}, {&less, QUERIES}, {&weights, g->slots},
        };
        float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
        if (all_ready(memory != 0, &failed)) {
#pragma omp for schedule(dynamic)
            for (long h = 0; h < g->batch * g->heads; h++) {
                routed_head_t n = routed_arrays(g, h);
                n.queries = (int32_t *)queries, n.first = (int32_t *)first, n.less = less, n.weights = weights;
                inexact += routed_head(g, &n);
            }
        }
        free(memory);
    }
    *g->inexact = inexact;
    return failed;
}

/* Add up the rows of x at the keys, times their factors. */
INLINE void add_scaled(const float *factors, const float *x, const keys_t *keys, long size, float *to) {
    for (long d = 0; d < size; d += W) {
        vf sum = load(to + d);
        for (int j = 0; j < HALF; j++) sum += factors[j] * load(x + keys->at[j] * size + d);
        store(to + d, sum);
    }
}

/* Add x [size] times its factor to the row of each key. */
INLINE void add_to_each(const float *factors, const float *x, const keys_t *keys, long size, float *to) {
    for (int j = 0; j < HALF; j++) {
        float *row = to + keys->at[j] * size;
        for (long d = 0; d < size; d += W) store(row + d, load(row + d) + factors[j] * load(x + d));
    }
}

/* Add the gradients of query t and of keys that it looks up: softmax's weights are added, the kernel's subtracted. */
INLINE void look_up_back(const routed_t *g, const routed_head_t *n, long t, long r, const keys_t *keys) {
    (void)r;
    long size = g->size, f = g->features, width = g->value_size;
    const float *q = n->q + t * size, *phi_q = n->phi_q + t * f, *grad = n->grad + t * width;
    float of_values[W], of_scores[W], of_products[W];
    vf products = key_products(g, n, t, keys), row[W];
    vf weights = vexp(-larger(splat(-80.0f), n->tops[t] - either(keys->seen, products, splat(FLOOR))));
    for (int j = 0; j < W; j++) row[j] = splat(0.0f);
    for (long d = 0; d < width; d += W) {
        vf x = load(grad + d);
        for (int j = 0; j < HALF; j++) row[j] += x * load(n->v + keys->at[j] * width + d);
    }
    vf slopes = totals(row) + n->slope[t];
    store(of_values, (vf)(keys->seen & (vi)(weights - SHUFFLE(products, products, ACROSS_HALF))));
    store(of_scores, (vf)(keys->seen & (vi)(weights * slopes)));
    store(of_products, (vf)(keys->seen & (vi)-slopes));
    add_scaled(of_scores, n->k, keys, size, n->dq + t * size);
    add_scaled(of_products, n->phi_k, keys, f, n->dphi_q + t * f);
    add_to_each(of_scores, q, keys, size, n->dk);
    add_to_each(of_products, phi_q, keys, f, n->dphi_k);
    add_to_each(of_values, grad, keys, width, n->dv);
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
                    for (long t = 0; t < g->tokens; t += QUERIES)
                        visit_tile(g, &n, t, least(QUERIES, g->tokens - t), look_up_back);
                }
        }
        free(memory);
    }
    return failed;
}

#endif
