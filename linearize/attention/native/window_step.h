/* A decoding step with a softmax window: the oldest token moves to the linear state, the new one enters the window. */

#ifndef LINEARIZE_WINDOW_STEP_H
#define LINEARIZE_WINDOW_STEP_H

#include "look_up.h"

#define NEVER INT32_MAX
#define TINY 1e-30f /* a part of smaller magnitude counts as absent, as in `linearize.ops.window_parts` */

/* The state in addition to the linear state, all contiguous: the last `size` tokens, newest last; the first `sinks`
   tokens; and up to `exact_keys` others, oldest first. */
typedef struct {
    int64_t size, sinks, exact_keys;
    char *ring_k, *ring_v;        /* [B, K, size, D] and [B, K, size, V], in the types of k and v */
    uint8_t *ring_mask;           /* [B, size] */
    char *sink_k, *sink_v;        /* [B, K, sinks, D] and [B, K, sinks, V], or null */
    int64_t *tokens;              /* [B], number of tokens so far, or null */
    char *kept_k, *kept_v;        /* [B, K, exact_keys, D] and [B, K, exact_keys, V]; null without exact keys */
    float *kept_scale;            /* [B, K, exact_keys] */
    uint8_t *kept_mask;           /* [B, exact_keys], existing keys first */
    float scaling;                /* factor of the softmax scores */
    int32_t causal;
    float *tops, *row_sums;       /* [B, H, T]: the level and the sum of every row's weights; or null */
    const float *priority;        /* [B, K, T]: the largest become exact keys; or null */
    int32_t *until;               /* [B, K, T], from `contest`; or null */
    memory_t memory;              /* its `blocks` are 0 without routed blocks; it has room for the new token */
} window_t;

/* The arrays of a thread for one head: weights of exact tokens, sums of their values, the leaving key, sums of the linear
   state. */
typedef struct {
    float *query, *weights, *exact, *leaving, *value, *linear;
    look_up_t look_up;
} window_buffers_t;

static window_buffers_t window_buffers_at(const call_t *c, const window_t *w, const choice_t *choice, float *memory) {
    long wide = padded(c->value_size + 1) + W;
    window_buffers_t f = {.query = memory};
    f.weights = f.query + padded(c->keys.size) + W;
    f.exact = f.weights + padded(w->size + w->sinks + w->exact_keys) + W;
    f.leaving = f.exact + wide;
    f.value = f.leaving + padded(c->features) + W;
    f.linear = f.value + wide;
    if (choice->blocks) f.look_up = look_up_at(c, choice, f.linear + wide);
    return f;
}

INLINE long window_buffers_size(const call_t *c, const window_t *w, const choice_t *choice) {
    long linear = window_buffers_at(c, w, &(choice_t){0}, 0).linear - (float *)0;
    return linear + padded(c->value_size + 1) + W + look_up_size(c, choice);
}

/* Scores of `count` contiguous rows of keys; rows that are not visible get FLOOR. Returns the maximum of the scores and
   `top`. */
static float scores_of(const call_t *c, const char *keys, const uint8_t *visible, long count, const float *query,
                       float *to, float top) {
    long size = c->keys.size;
    for (long j = 0; j < count; j++) {
        to[j] = FLOOR;
        if (!visible[j]) continue;
        to[j] = inner(query, keys, c->type, j * size, size);
        top = highest(to[j], top);
    }
    return top;
}

/* Add contiguous rows of values, weighted by exp(score - top), followed by the sum of the weights. */
static void add_values(const call_t *c, const char *values, const uint8_t *visible, long count, const float *scores,
                       float top, float *sums) {
    for (long j = 0; j < count; j++)
        if (visible[j]) add_value(c, values, j, expf(scores[j] - top), sums);
}

/* The largest magnitude of `count` numbers; NaN if any is NaN. */
INLINE float magnitude_within(const float *x, long count) {
    float top = 0.0f;
    for (long j = 0; j < count; j++) top = highest(fabsf(x[j]), top);
    return top;
}

/* Add two parts, each e^level times its sums [V + 1], relative to the magnitude of the larger part, like
   `linearize.ops.window_parts.join`. */
INLINE void join_parts(float *near, float near_level, const float *far, float far_level, long count) {
    float sizes[2] = {magnitude_within(near, count), magnitude_within(far, count)};
    int absent[2] = {sizes[0] <= TINY, sizes[1] <= TINY};
    float levels[2] = {absent[0] ? FLOOR : near_level + logf(sizes[0]), absent[1] ? FLOOR : far_level + logf(sizes[1])};
    float top = highest(levels[0], levels[1]);
    float factors[2] = {absent[0] ? 0.0f : expf(near_level - top), absent[1] ? 0.0f : expf(far_level - top)};
    for (long j = 0; j < count; j++) near[j] = near[j] * factors[0] + (absent[1] ? 0.0f : far[j] * factors[1]);
}

/* Shift the rows of a ring, `bytes` each, forward by one, and append a new row. */
INLINE void push(char *ring, long count, long bytes, const void *row) {
    memmove(ring, ring + bytes, (count - 1) * bytes);
    memcpy(ring + (count - 1) * bytes, row, bytes);
}

/* The number of rows at the start of the ring that hold no token, before a new one enters: those need not be shifted, or
   a window wider than the context would cost as much as a full one. */
INLINE long empty_rows(const window_t *w, long b) {
    const uint8_t *mask = w->ring_mask + b * w->size, *first = memchr(mask, 1, w->size);
    return first ? first - mask : w->size;
}

/* The priority by which keys compete; NaN loses. */
INLINE float rank_of(float priority) { return priority != priority ? -INFINITY : priority; }

/* The number of exact keys of a batch entry. */
INLINE long kept_count(const window_t *w, long b) {
    long held = 0;
    while (held < w->exact_keys && w->kept_mask[b * w->exact_keys + held]) held++;
    return held;
}

/* Whether the oldest token of the ring leaves it for the state or the exact keys. */
INLINE int leaves(const window_t *w, long b) {
    return w->ring_mask[b * w->size] && (!w->sinks || w->tokens[b] - w->size >= w->sinks);
}

/* The place of the exact key that loses against a key with this log-scale (of equal keys the newest), or -1. */
static long weakest_of(const window_t *w, long n, float scale) {
    const float *kept = w->kept_scale + n * w->exact_keys;
    long weakest = 0;
    for (long i = 1; i < w->exact_keys; i++)
        if (rank_of(kept[i]) <= rank_of(kept[weakest])) weakest = i;
    return rank_of(scale) > rank_of(kept[weakest]) ? weakest : -1;
}

/* Put the oldest token of the ring, with its log-scale, after the exact keys up to `last`, without the one at `place`. */
static void keep(const call_t *c, const window_t *w, long n, long place, long last, float scale) {
    long to = n * w->exact_keys + place, from = n * w->size, count = last - place + 1;
    long k = c->keys.size * type_size(c->type), v = c->value_size * type_size(c->value_type);
    push(w->kept_k + to * k, count, k, w->ring_k + from * k);
    push(w->kept_v + to * v, count, v, w->ring_v + from * v);
    push((char *)(w->kept_scale + to), count, sizeof(float), &scale);
}

/* Map a key of the state -> tokens->phi. Returns the log-scale of the map. */
static float map_held(const call_t *c, long n, const char *k, const token_buffers_t *tokens) {
    float scale;
    for (long d = 0; d < c->keys.size; d++) tokens->x[d] = number(k, c->type, d) * c->keys.scale;
    map_tokens(c, &c->keys, n % c->key_heads, tokens, 1, &scale);
    return scale;
}

/* Move the oldest token of the ring to the exact keys or the state. The key and value for the state are stored in
   `leaving` and `value`, times their weight in the state; returns the decay of the state. */
static float take_leaving(const call_t *c, const window_t *w, long n, const token_buffers_t *tokens,
                          const window_buffers_t *f) {
    long b = n / c->key_heads, v = c->value_size, held = kept_count(w, b), place = -1, full = held == w->exact_keys;
    long k_bytes = c->keys.size * type_size(c->type), v_bytes = v * type_size(c->value_type);
    const char *k = w->ring_k + n * w->size * k_bytes, *value = w->ring_v + n * w->size * v_bytes;
    int real = leaves(w, b), folds = real && full, from_ring = 1;
    float own = FLOOR, scale = 0.0f, before = c->log_scale[n];
    if (real) {
        /* With exact keys its log-scale comes first, and few maps have one of their own. */
        if (!w->exact_keys || c->keys.scaled) scale = map_held(c, n, k, tokens);
        own = scale = scale + learned_scale(&c->keys, n % c->key_heads, k, c->type);
    }
    if (real && w->exact_keys) {
        place = full ? weakest_of(w, n, scale) : held;
        from_ring = place < 0;
        if (!from_ring) {
            k = w->kept_k + (n * w->exact_keys + place) * k_bytes;
            value = w->kept_v + (n * w->exact_keys + place) * v_bytes;
            own = w->kept_scale[n * w->exact_keys + place];
        }
        if (folds && !(from_ring && c->keys.scaled)) map_held(c, n, k, tokens);
    }
    if (!folds) own = FLOOR;
    float shift = highest(own, before), weight = folds ? expf(own - shift) : 0.0f;
    c->log_scale[n] = shift;
    memset(f->value, 0, (v + 1) * sizeof(float));
    memset(f->leaving, 0, c->features * sizeof(float));
    if (folds) {
        memcpy(f->leaving, tokens->phi, c->features * sizeof(float));
        for (long d = 0; d < v; d++) f->value[d] = number(value, c->value_type, d) * weight;
        f->value[v] = weight;
    }
    if (place >= 0) keep(c, w, n, place, full ? held - 1 : held, scale);
    return folds && shift > before ? expf(before - shift) : 1.0f;
}

/* Add the head's new token, also to the sinks if it is one of the first. */
static void take_up(const call_t *c, const window_t *w, const memory_t *memory, long n, long place) {
    long b = n / c->key_heads, h = n % c->key_heads;
    long k_bytes = c->keys.size * type_size(c->type), v_bytes = c->value_size * type_size(c->value_type);
    const void *k = token_at(c->k, c->type, c->k_stride, b, h, 0), *v = token_at(c->v, c->value_type, c->v_stride, b, h, 0);
    long empty = empty_rows(w, b), skip = empty ? empty - 1 : 0, first = n * w->size + skip, count = w->size - skip;
    push(w->ring_k + first * k_bytes, count, k_bytes, k);
    push(w->ring_v + first * v_bytes, count, v_bytes, v);
    if (memory->blocks) remember(c, memory, place, k, v);
    if (place >= w->sinks) return;
    memcpy(w->sink_k + (n * w->sinks + place) * k_bytes, k, k_bytes);
    memcpy(w->sink_v + (n * w->sinks + place) * v_bytes, v, v_bytes);
}

/* The tokens that a query at `place` sees with softmax weights: those in the ring (the new one last), then the sinks
   from before the ring, and the exact keys. */
static void look(const window_t *w, long b, long place, uint8_t *visible) {
    memcpy(visible, w->ring_mask + b * w->size + 1, w->size - 1);
    visible[w->size - 1] = 1;
    for (long s = 0; s < w->sinks; s++) visible[w->size + s] = place - s >= w->size;
    long kept = kept_count(w, b) + leaves(w, b);
    for (long s = 0; s < w->exact_keys; s++) visible[w->size + w->sinks + s] = s < kept;
}

static void window_step_head(const call_t *c, const window_t *w, const choice_t *choice, long n,
                             const token_buffers_t *tokens, const window_buffers_t *f, uint8_t *visible) {
    long b = n / c->key_heads, h = n % c->key_heads, group = c->heads / c->key_heads, v = c->value_size;
    long place = w->tokens ? w->tokens[b] : 0, whole = v / W, kept_at = w->size + w->sinks;
    float *kv = c->kv + n * c->features * (v + 1), scale, decay;
    if (is_padding(c, b, 0)) {
        memset(f->exact, 0, (v + 1) * sizeof(float));
        for (long g = 0; g < group; g++) write_row(c, f->exact, 1.0f, c->eps, b, h * group + g, 0);
        return;
    }
    decay = take_leaving(c, w, n, tokens, f);
    const memory_t m = memory_of(c, &w->memory, n);
    take_up(c, w, &m, n, place);
    look(w, b, place, visible);
    const char *k = w->ring_k + n * w->size * c->keys.size * type_size(c->type);
    const char *values = w->ring_v + n * w->size * v * type_size(c->value_type);
    const char *sink_k = w->sinks ? w->sink_k + n * w->sinks * c->keys.size * type_size(c->type) : 0;
    const char *sink_v = w->sinks ? w->sink_v + n * w->sinks * v * type_size(c->value_type) : 0;
    const char *kept_k = w->exact_keys ? w->kept_k + n * w->exact_keys * c->keys.size * type_size(c->type) : 0;
    const char *kept_v = w->exact_keys ? w->kept_v + n * w->exact_keys * v * type_size(c->value_type) : 0;
    const look_up_t *look_up = &f->look_up;
    for (long g = 0; g < group; g++) {
        long head = h * group + g;
        token(c, c->q, c->type, c->q_stride, b, head, c->keys.size, c->queries.scale, tokens->x);
        map_tokens(c, &c->queries, c->queries.heads == c->heads ? head : h, tokens, 1, &scale);
        scale += learned_scale(&c->queries, head, token_at(c->q, c->type, c->q_stride, b, head, 0), c->type);
        if (whole == 4) step_rows(4, c, kv, f->leaving, tokens->phi, decay, f->value, f->linear);
        else if (whole == 2) step_rows(2, c, kv, f->leaving, tokens->phi, decay, f->value, f->linear);
        else step_rows(0, c, kv, f->leaving, tokens->phi, decay, f->value, f->linear);
        /* The state now contains the leaving key. */
        decay = 1.0f;
        memset(f->value, 0, (v + 1) * sizeof(float));
        long found = 0;
        if (m.blocks && (!m.looks || m.looks[head])) {
            memcpy(look_up->phi, tokens->phi, c->features * sizeof(float));
            token(c, c->q, c->type, c->q_stride, b, head, c->keys.size, 1.0f, look_up->query);
            found = find_keys(choice, m.channels, place, look_up);
        }
        token(c, c->q, c->type, c->q_stride, b, head, c->keys.size, w->scaling, f->query);
        float top = scores_of(c, k, visible, w->size, f->query, f->weights, FLOOR), level = c->log_scale[n];
        top = scores_of(c, sink_k, visible + w->size, w->sinks, f->query, f->weights + w->size, top);
        top = scores_of(c, kept_k, visible + kept_at, w->exact_keys, f->query, f->weights + kept_at, top);
        if (found) top = scores_of_found(c, m.all_k, found, f->query, look_up, top);
        memset(f->exact, 0, (v + 1) * sizeof(float));
        add_values(c, values, visible, w->size, f->weights, top, f->exact);
        add_values(c, sink_v, visible + w->size, w->sinks, f->weights + w->size, top, f->exact);
        add_values(c, kept_v, visible + kept_at, w->exact_keys, f->weights + kept_at, top, f->exact);
        if (found) {
            add_found(c, m.all_v, found, look_up, top, f->exact);
            float exact = top + logf(f->exact[v]) - scale;
            level = take_out_found(c, &m, choice, n, place, found, exact, tokens, look_up, f->linear);
        }
        join_parts(f->exact, top, f->linear, scale + level, v + 1);
        write_row(c, f->exact, f->exact[v], c->eps, b, head, 0);
    }
}

/* Update what all heads of a batch entry share: the mask of the ring, and the number of tokens so far. */
static void count_token(const call_t *c, const window_t *w, long b) {
    if (is_padding(c, b, 0)) return;
    uint8_t there = 1;
    if (w->exact_keys && leaves(w, b) && kept_count(w, b) < w->exact_keys)
        w->kept_mask[b * w->exact_keys + kept_count(w, b)] = 1;
    push((char *)w->ring_mask + b * w->size, w->size, 1, &there);
    if (w->tokens) w->tokens[b]++;
}

/* Process one more token and update the state in place; a padding token changes nothing and its output is zero. Returns
   DONE; or NO_MEMORY, before any change. */
int linearize_window_step(const call_t *c, const window_t *w) {
    long heads = c->batch * c->key_heads, visible = padded(w->size + w->sinks + w->exact_keys);
    choice_t choice = choice_of(c, &w->memory, w->size, w->sinks);
    long of_tokens = padded(token_buffers_size(c, 1)), each = of_tokens + padded(window_buffers_size(c, w, &choice)) + visible;
    float *memory = malloc(c->threads * each * sizeof(float));
    if (!memory) return NO_MEMORY;
#pragma omp parallel for num_threads(c->threads) schedule(static)
    for (long i = 0; i < c->threads; i++) {
        float *mine = memory + i * each;
        token_buffers_t tokens = token_buffers_at(c, mine, 1);
        window_buffers_t f = window_buffers_at(c, w, &choice, mine + of_tokens);
        uint8_t *seen = (uint8_t *)(mine + each - visible);
        for (long n = i * heads / c->threads; n < (i + 1) * heads / c->threads; n++)
            window_step_head(c, w, &choice, n, &tokens, &f, seen);
    }
    for (long b = 0; b < c->batch; b++) count_token(c, w, b);
    free(memory);
    return DONE;
}

#endif
