/* The tensors of a call, the memory of a thread, and the tile operations that all ops share: features, weighted values,
   state. */

#ifndef LINEARIZE_CALL_H
#define LINEARIZE_CALL_H

#include "maps.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define LARGE_PAGE ((uintptr_t)1 << 21)
#define TILE 48      /* tokens per tile; with a power of two, rows would compete for the same few cache lines */
#define FLOOR -1e30f /* log-scale of "no key yet" */
#define EPS 1e-30f

/* Return values of a call. STEEP: log-scales climb too steeply for the causal gradient. */
#define EACH_RESULT(ONE) ONE(DONE, "done") ONE(NO_MEMORY, "no_memory") ONE(STEEP, "steep")
enum { EACH_RESULT(NUMBER) RESULTS };

typedef struct {
    int64_t batch, heads, key_heads, tokens, features, value_size;
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3]; /* steps to the next batch entry, head and token */
    const void *q, *k, *v;
    void *out;
    int32_t type, value_type; /* of q and k; of v and out */
    const uint8_t *mask;      /* [B, T] or null */
    const float *key_scale, *query_scale; /* added to the log-scales: [B, K, T] and, with a window, [B, H, T]; or null */
    map_t keys, queries;
    const float *start, *start_scale; /* the state before the tokens, or null */
    float *kv, *log_scale;            /* the state after the tokens; when decoding, before and after */
    float eps;
    int32_t threads;
    int32_t exact; /* whether projections of bf16 inputs use weights that are not rounded to bf16 */
} call_t;

typedef struct {
    float *memory, *x, *phi_k, *phi_q, *other, *scale, *weight, *values, *scores, *mixed, *sums, *kv, *z;
    float *rounded[2];    /* projection weights of one head for keys and for queries, in bf16 */
    long rounded_head[2]; /* number of that head */
    float *saved; /* [3 n, TILE] for gradients: see maps.h */
    long width;  /* length of a row of values, a whole number of vectors */
} scratch_t;

INLINE long padded(long n) { return (n + UNIT - 1) / UNIT * UNIT; }
INLINE long least(long a, long b) { return a < b ? a : b; }

/* One of a thread's arrays. */
typedef struct {
    float **at;
    long size;
} part_t;

/* Allocate a thread's arrays one after the other, zeroed and aligned; null if memory ran out. */
static float *arena_alloc(const part_t *parts, long count) {
    long all = 0;
    for (long i = 0; i < count; i++) all += padded(parts[i].size) + W;
    float *memory = aligned_alloc(64, (all * sizeof(float) + 63) / 64 * 64), *next = memory;
    if (!memory) return 0;
    memset(memory, 0, all * sizeof(float));
    for (long i = 0; i < count; i++) {
        *parts[i].at = next;
        next += padded(parts[i].size) + W;
    }
    return memory;
}

/* Whether a map's projection weights are rounded to bf16 and its bf16 inputs are used in pairs without conversion:
   products of bf16 numbers cost half, and the inputs are rounded in the same way anyway. */
INLINE int rounds(const call_t *c, const map_t *map) {
    return PAIRS && !c->exact && c->type == BFLOAT16 && map->kind != GIVEN && map->size % 2 == 0;
}

INLINE long rounded_size(const call_t *c, const map_t *map) {
    return rounds(c, map) ? map->rows * map->size + map->size / 2 : 0;
}

static int prepare(const call_t *c, scratch_t *s) {
    long size = c->keys.kind == GIVEN ? 0 : c->keys.size, f = c->features, width = padded(c->value_size);
    const part_t parts[] = {
        {&s->x, size * TILE},      {&s->phi_k, f * TILE}, {&s->phi_q, f * TILE},    {&s->other, f * TILE},
        {&s->scale, TILE},         {&s->weight, TILE},    {&s->values, TILE * width}, {&s->scores, TILE * TILE},
        {&s->mixed, TILE * width}, {&s->sums, TILE},      {&s->kv, f * width},      {&s->z, f},
        {&s->rounded[0], rounded_size(c, &c->keys)}, {&s->rounded[1], rounded_size(c, &c->queries)},
    };
    s->rounded_head[0] = s->rounded_head[1] = -1;
    s->width = width;
    s->saved = 0;
    s->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    return s->memory != 0;
}

/* Whether all threads got their memory; called by every thread of a parallel region. */
static int all_ready(int ready, int *failed) {
    if (!ready) {
#pragma omp atomic write
        *failed = NO_MEMORY;
    }
#pragma omp barrier
    return !*failed;
}

/* Call `one` for every batch entry and key head, in all threads. Returns DONE or NO_MEMORY. */
static int each_head(const call_t *c, void (*one)(const call_t *, long, scratch_t *)) {
    int failed = DONE;
#pragma omp parallel num_threads(c->threads)
    {
        scratch_t s;
        int ready = prepare(c, &s);
        if (all_ready(ready, &failed)) {
#pragma omp for schedule(dynamic)
            for (long n = 0; n < c->batch * c->key_heads; n++) one(c, n, &s);
        }
        if (ready) free(s.memory);
    }
    return failed;
}

/* Request huge pages for a large output, if the system provides them on request: otherwise tens of MiB of new memory
   are mapped in pages of 4 KiB, which takes a tenth of the op's time. */
static void advise_huge_pages(const call_t *c) {
#if defined(__linux__)
    uintptr_t start = (uintptr_t)c->out, size = c->batch * c->heads * c->tokens * c->value_size;
    uintptr_t end = start + size * (c->value_type == FLOAT32 ? sizeof(float) : sizeof(uint16_t));
    start = (start + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    end = end / LARGE_PAGE * LARGE_PAGE;
    if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE);
#endif
}

/* Whether keys have log-scales. */
INLINE int keys_scaled(const call_t *c) { return c->keys.scaled || c->key_scale || c->keys.learned; }

INLINE long type_size(int type) { return type == FLOAT32 ? sizeof(float) : sizeof(uint16_t); }

INLINE const void *at(const void *p, int type, long i) {
    return (const char *)p + i * type_size(type);
}

INLINE const void *token_at(const void *x, int type, const int64_t *stride, long b, long h, long t) {
    return at(x, type, b * stride[0] + h * stride[1] + t * stride[2]);
}

/* Read a row of `size` numbers, times a factor, padded with zeros to whole vectors. */
INLINE void read_row(const void *x, int type, long size, float factor, float *row) {
    long j = 0;
    for (; j + W <= size; j += W) store(row + j, numbers(x, type, j) * factor);
    for (; j < padded(size); j++) row[j] = j < size ? number(x, type, j) * factor : 0.0f;
}

/* Whether a token is padding; its numbers must not affect other tokens. */
INLINE int is_padding(const call_t *c, long b, long token) { return c->mask && !c->mask[b * c->tokens + token]; }

/* Set the padding columns of a tile [size, wide] to zero. */
INLINE void clear_padding(const call_t *c, long b, long first, long count, float *x, long size, long wide) {
    for (long j = 0; j < count; j++)
        if (is_padding(c, b, first + j))
            for (long d = 0; d < size; d++) x[d * wide + j] = 0.0f;
}

/* Compute a tile of features [F, wide] for one head's tokens from `first` on. Padding is mapped like zeros. If features
   are given instead, they are set to zero at padding, except for queries, whose tokens may differ from the mask's. */
static void features(const call_t *c, const map_t *map, const void *x, const int64_t *stride, long b, long h,
                     long index, long first, long count, scratch_t *s, float *phi) {
    long wide = padded(count), next = least(TILE, c->tokens - first - count);
    const void *from = token_at(x, c->type, stride, b, h, first);
    if (next > 0)
        prefetch_rows(at(from, c->type, count * stride[2]), c->type, stride[2], next,
              map->kind == GIVEN ? c->features : map->size);
    if (map->kind == GIVEN) {
        pack_transposed(from, c->type, stride[2], count, c->features, 1.0f, phi, wide);
        if (map == &c->keys) clear_padding(c, b, first, count, phi, c->features, wide);
        return;
    }
    const uint16_t *rounded = 0;
    if (rounds(c, map)) {
        int which = map == &c->queries;
        rounded = (const uint16_t *)s->rounded[which];
        if (s->rounded_head[which] != index) round_weights(map, index, (uint16_t *)s->rounded[which]);
        s->rounded_head[which] = index;
        pack_transposed(from, PAIRED, stride[2], count, map->size / 2, 1.0f, s->x, wide);
    } else pack_transposed(from, c->type, stride[2], count, map->size, map->scale, s->x, wide);
    clear_padding(c, b, first, count, s->x, rounded ? map->size / 2 : map->size, wide);
    map_tile(map, rounded, index, s->x, phi, s->other, s->scale, wide, s->saved);
}

INLINE void query_features(const call_t *c, long b, long h, long first, long count, scratch_t *s) {
    long index = c->queries.heads == c->heads ? h : h / (c->heads / c->key_heads);
    features(c, &c->queries, c->q, c->q_stride, b, h, index, first, count, s, s->phi_q);
}

/* The keys of a tile: features, log-scales (FLOOR at padding) and weights (0 at padding). */
INLINE void key_features(const call_t *c, long b, long h, long first, long count, scratch_t *s) {
    features(c, &c->keys, c->k, c->k_stride, b, h, h, first, count, s, s->phi_k);
    for (long j = 0; j < padded(count); j++) {
        int real = j < count && !is_padding(c, b, first + j);
        s->weight[j] = real;
        float scale = c->keys.scaled ? s->scale[j] : 0.0f;
        if (c->key_scale && real) scale += c->key_scale[(b * c->key_heads + h) * c->tokens + first + j];
        if (real && keys_scaled(c) && scale != scale) {
            /* A NaN log-scale: rows that see the key get NaN through its features; through its weight no row does. */
            for (long i = 0; i < c->features; i++) s->phi_k[i * padded(count) + j] = scale;
            real = 0;
            s->weight[j] = 0.0f;
        }
        s->scale[j] = !real && keys_scaled(c) ? FLOOR : scale;
    }
}

/* Values of a tile times the weights of their keys, in rows of whole vectors; zeros for padding. */
INLINE void weighted_values(const call_t *c, long b, long h, long first, long count, scratch_t *s) {
    long next = least(TILE, c->tokens - first - count);
    const void *from = token_at(c->v, c->value_type, c->v_stride, b, h, first);
    if (next > 0)
        prefetch_rows(at(from, c->value_type, count * c->v_stride[2]), c->value_type, c->v_stride[2], next,
                      c->value_size);
    for (long t = 0; t < padded(count); t++) {
        float *row = s->values + t * s->width;
        if (t >= count || is_padding(c, b, first + t)) memset(row, 0, s->width * sizeof(float));
        else read_row(at(from, c->value_type, t * c->v_stride[2]), c->value_type, c->value_size, s->weight[t], row);
    }
}

INLINE vf weighed(const float *row, const float *weight, long count) {
    vf sum = {0};
    for (long j = 0; j < count; j += W) sum += load(row + j) * load(weight + j);
    return sum;
}

/* A state's sums z [F] += features [F, wide] x weights. */
PART void accumulate_z(const call_t *c, const float *phi, long wide, const float *weight, long count, float *z) {
    long i = 0;
    for (; i + W <= c->features; i += W) {
        vf row[W];
        for (int r = 0; r < W; r++) row[r] = weighed(phi + (i + r) * wide, weight, count);
        store(z + i, load(z + i) + totals(row));
    }
    for (; i < c->features; i++) z[i] += total(weighed(phi + i * wide, weight, count));
}

/* A state: kv [F, width] += features [F, wide] x rows [count, width], and z [F] += features x the weights of the rows. */
PART void accumulate_kv(const call_t *c, const float *phi, const float *rows, const float *weight, long width,
                        long count, float *kv, float *z) {
    product(1, c->features, width, count, phi, padded(count), 1, rows, width, kv, width);
    accumulate_z(c, phi, padded(count), weight, count, z);
}

INLINE void accumulate_keys(const call_t *c, scratch_t *s, long count) {
    accumulate_kv(c, s->phi_k, s->values, s->weight, s->width, count, s->kv, s->z);
}

/* Multiply one of a thread's arrays by a factor. */
INLINE void multiply(float *row, long size, float factor) {
    for (long j = 0; j < size; j += W) store(row + j, load(row + j) * factor);
}

INLINE void decay_state(const call_t *c, long width, float *kv, float *z, float factor) {
    multiply(kv, c->features * width, factor);
    multiply(z, c->features, factor);
}

/* Multiply the weights of a tile's keys, 0 or 1 so far, by exp(log-scale - top). */
INLINE void scale_weights(scratch_t *s, long count, float top) {
    for (long j = 0; j < padded(count); j += W)
        store(s->weight + j, load(s->weight + j) * vexp(load(s->scale + j) - top));
}

/* Sums of rows: features [F, wide] x z. */
INLINE void row_sums(const call_t *c, const float *phi, const float *z, long count, long wide, float *sums) {
    for (long j = 0; j < count; j += W) {
        vf sum = {0};
        for (long i = 0; i < c->features; i++) sum += load(phi + i * wide + j) * z[i];
        store(sums + j, sum);
    }
}

/* Rows = query features x state: `count` rows of a tile from `first` on. */
PART void read_rows(const call_t *c, scratch_t *s, long first, long count, long wide) {
    product(0, count, s->width, c->features, s->phi_q + first, 1, wide, s->kv, s->width, s->mixed + first * s->width,
            s->width);
}

/* A tile's rows, and their sums. */
INLINE void read_out(const call_t *c, scratch_t *s, long count) {
    read_rows(c, s, 0, count, padded(count));
    row_sums(c, s->phi_q, s->z, count, padded(count), s->sums);
}

/* Prefetch the memory of a tile's output before it is written. */
INLINE void prefetch_out(const call_t *c, long b, long h, long first, long count) {
    long bytes = c->value_type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    char *to = (char *)c->out + (b * c->out_stride[0] + h * c->out_stride[1] + first * c->out_stride[2]) * bytes;
    for (long t = 0; t < count; t++)
        for (long i = 0; i < c->value_size * bytes; i += 64)
            __builtin_prefetch(to + t * c->out_stride[2] * bytes + i, 1);
}

/* The sum of a row, with a magnitude of at least `smallest`. */
INLINE float guarded(float sum, float smallest) {
    return copysignf(fabsf(sum) < smallest ? smallest : fabsf(sum), sum);
}

INLINE void write_row(const call_t *c, const float *row, float sum, float smallest, long b, long h, long token) {
    float factor = 1.0f / guarded(sum, smallest);
    /* The reciprocal of a tiny sum may be infinite although the quotient is not. */
    int divide = !(fabsf(factor) < 1e30f);
    long i = b * c->out_stride[0] + h * c->out_stride[1] + token * c->out_stride[2], j = 0;
    for (; j + W <= c->value_size; j += W) {
        vf x = load(row + j);
        write_numbers(c->out, c->value_type, i + j, divide ? x / guarded(sum, smallest) : x * factor);
    }
    for (; j < c->value_size; j++)
        write_number(c->out, c->value_type, i + j, divide ? row[j] / guarded(sum, smallest) : row[j] * factor);
}

/* Read the state of head `n` [F, V + 1] into rows of whole vectors; zeros without a state. */
static void load_state(const call_t *c, const float *kv, long n, float factor, scratch_t *s) {
    long size = c->value_size;
    memset(s->kv, 0, c->features * s->width * sizeof(float));
    memset(s->z, 0, c->features * sizeof(float));
    if (!kv) return;
    kv += n * c->features * (size + 1);
    for (long i = 0; i < c->features; i++, kv += size + 1) {
        for (long j = 0; j < size; j++) s->kv[i * s->width + j] = kv[j] * factor;
        s->z[i] = kv[size] * factor;
    }
}

static void store_state(const call_t *c, const scratch_t *s, long n, float factor, float *kv) {
    long size = c->value_size;
    kv += n * c->features * (size + 1);
    for (long i = 0; i < c->features; i++, kv += size + 1) {
        for (long j = 0; j < size; j++) kv[j] = s->kv[i * s->width + j] * factor;
        kv[size] = s->z[i] * factor;
    }
}

#endif
