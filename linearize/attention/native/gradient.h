/* The gradient of a feature map, and the code shared by the gradients of both directions. Everything is recomputed from
   q, k, v and the output, tile by tile: no features are kept between the passes. */

#ifndef LINEARIZE_GRADIENT_H
#define LINEARIZE_GRADIENT_H

#include "call.h"

typedef struct {
    const void *out, *grad;  /* the output and its gradient [B, H, T, V], with separate strides */
    int64_t grad_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
    void *dq, *dk, *dv;
    float *dlog_scale;                   /* gradient of the given log-scales [B, K, T], or null */
    /* Gradients of the weights, per batch entry and key head; null for absent weights. */
    float *first, *second, *bias, *tau, *bank, *magnitude;
    const float *kv, *log_scale;         /* the state of all keys (bidirectional) */
    /* Gradients of the weights of a separate query map, per batch entry and query head. */
    float *q_first, *q_second, *q_bias, *q_tau, *q_bank, *q_magnitude;
} back_t;

/* The memory of a thread. Tiles: rows and slope are the gradients of the sums and of their denominators, rows_transposed
   the transpose of rows; values are the weighted values, transposed; dphi; dscores, dvalues and dscale are the gradients
   of scores, weighted values and log-scales; raw are the map's own log-scales; plain is x, and dx its gradient.
   Accumulated over tiles: dkv and dz for the state; sums for the weights, see sums_at. */
typedef struct {
    scratch_t s;
    float *memory, *rows, *rows_transposed, *values, *dphi, *dphi_k, *dkv, *dz, *saved, *dx, *plain, *sums;
    float *dscores, *slope, *dvalues, *dscale, *raw;
    long width, maps; /* length of a row of weights; number of heads whose weights have sums */
} work_t;

/* The number of partial sums for the gradient of a bank, W lanes each: see bank_back. */
INLINE long bank_sums(const map_t *m) { return m->kind == BANK ? m->channels * (2 * m->hidden + 1) * W : 0; }

/* The gradient sums of one head's weights: one number for tau, and the sums of bank_back for the bank. */
typedef struct {
    float *first, *second, *bias, *tau, *bank, *magnitude;
} sums_t;

/* The size of one head's sums. */
INLINE long sums_size(const map_t *m) {
    if (m->kind == GIVEN) return 0;
    return (2 * m->rows + 1) * padded(m->size) + padded(m->rows) + UNIT + padded(bank_sums(m));
}

/* The sums of the keys' map if `which` is 0; those of a separate query map if it is 1 + the head's place in its group. */
INLINE sums_t sums_at(const map_t *m, const work_t *w, long which) {
    float *first = w->sums + which * sums_size(m), *second = first + m->rows * w->width;
    float *bias = second + m->rows * w->width, *tau = bias + padded(m->rows), *bank = tau + UNIT;
    return (sums_t){first, second, bias, tau, bank, bank + padded(bank_sums(m))};
}

static int prepare_work(const call_t *c, const back_t *g, work_t *w) {
    const map_t *m = &c->keys;
    long n = m->kind == GIVEN ? 0 : m->rows, size = m->kind == GIVEN ? 0 : m->size, f = c->features;
    if (!prepare(c, &w->s)) return 0;
    long v = w->s.width;
    w->width = padded(size);
    w->maps = g->q_first ? 1 + c->heads / c->key_heads : 1;
    const part_t parts[] = {
        {&w->rows, TILE * v},   {&w->rows_transposed, v * TILE},       {&w->values, v * TILE},    {&w->dphi, f * TILE},
        {&w->dphi_k, f * TILE}, {&w->dkv, f * v},             {&w->dz, f},               {&w->saved, 3 * n * TILE},
        {&w->dx, size * TILE},  {&w->plain, TILE * w->width}, {&w->dscores, TILE * TILE},  {&w->slope, TILE},
        {&w->dvalues, TILE * v},  {&w->dscale, TILE},            {&w->raw, TILE},           {&w->sums, w->maps * sums_size(m)},
    };
    w->memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    if (!w->memory) free(w->s.memory);
    return w->memory != 0;
}

static void free_work(work_t *w) {
    free(w->memory);
    free(w->s.memory);
}

/* Turn the gradient of the features, dphi [F, wide], into that of the projections, in place: the first projection in rows
   0 to n, then the second; the gradient of the magnitude replaces its slopes in `saved`. One column of vectors. */
INLINE void map_back_column(const map_t *m, const float *phi, const float *other, float *saved, float *dphi,
                            long wide) {
    long n = m->rows;
    vf one = {0}, two = {0};
    for (long i = 0; i < n; i++) {
        if (m->kind == SOFTMAX_BOTH) {
            one += load(phi + i * wide) * load(dphi + i * wide);
            two += load(phi + (n + i) * wide) * load(dphi + (n + i) * wide);
        } else if (m->kind == DAMPED_WAVES) {
            one += load(phi + i * wide) * load(dphi + i * wide);
            one += load(phi + (n + i) * wide) * load(dphi + (n + i) * wide);
        } else if (m->kind == POSITIVE_WAVES) {
            float *d = dphi + i * wide, *e = dphi + (n + i) * wide;
            vf dp = load(d), dr = load(e), both = load(phi + i * wide) * dp + load(phi + (n + i) * wide) * dr;
            /* Use the same number here and in the sum, so that a softmax over a single score has gradient zero. */
            one += both;
            store(e, both);
            store(d, load(saved + i * wide) * (dr - dp));
        }
    }
    if (m->magnitude) store(saved + n * wide, load(saved + n * wide) * one);
    for (long i = 0; i < n; i++) {
        float *d = dphi + i * wide, *e = dphi + (n + i) * wide;
        if (m->kind == POSITIVE_WAVES) {
            store(e, load(e) - load(other + i * wide) * one);
            continue;
        }
        vf p = load(phi + i * wide);
        if (m->kind == RELU) {
            store(d, (vf)((vi)load(d) & ~(p <= 0.0f))); /* NaN lets the gradient through */
            continue;
        }
        vf r = load(phi + (n + i) * wide), dp = load(d), dr = load(e);
        if (m->kind == SOFTMAX_BOTH) store(d, p * (dp - one) - r * (dr - two));
        else if (m->kind == EXP_BOTH) store(d, p * dp - r * dr); /* the log-scale that was split off cancels */
        else store(d, p * dr - r * dp);
        if (m->kind == WAVE_PAIRS || m->kind == DAMPED_WAVES) {
            vf envelope = load(saved + i * wide) * dp + load(saved + (n + i) * wide) * dr;
            if (m->kind == WAVE_PAIRS) store(e, load(saved + (2 * n + i) * wide) * envelope);
            else store(e, load(other + i * wide) * (envelope - one));
        }
    }
}

/* The gradient of one function for `count` vectors: g are the gradients of its values before the last ReLU. Adds to du;
   and adds to `sums` [2 hidden + 1, W], for every hidden unit, g and g u where the unit is on, and finally g. */
INLINE void scalar_back(int count, const float *b, long hidden, const float *u, const vf *g, float *du, float *sums) {
    const float *s = b, *t = b + hidden, *v = b + 2 * hidden;
    vf all = load(sums + 2 * hidden * W), down[GROUP];
    for (int i = 0; i < count; i++) {
        all += g[i];
        down[i] = load(du + i * W);
    }
    store(sums + 2 * hidden * W, all);
    for (long j = 0; j < hidden; j++, sums += 2 * W) {
        vf plain = load(sums), times = load(sums + W);
        for (int i = 0; i < count; i++) {
            vf at = load(u + i * W), on = (vf)((vi)g[i] & ~(s[j] * at + t[j] <= 0.0f));
            plain += on;
            times += on * at;
            down[i] += (v[j] * s[j]) * on;
        }
        store(sums, plain);
        store(sums + W, times);
    }
    for (int i = 0; i < count; i++) store(du + i * W, down[i]);
}

/* From dphi [rows, channels, wide] to the gradient du [rows, wide] of the projections u. */
static void bank_back(const map_t *m, long head, const float *phi, const float *dphi, const float *u, float *du,
                      float *sums, long wide) {
    memset(du, 0, m->rows * wide * sizeof(float));
    for (long l = 0; l < m->channels; l++, sums += (2 * m->hidden + 1) * W) {
        const float *b = m->bank + (head * m->channels + l) * bank_width(m);
        for (long p = 0, count; p < m->rows * wide; p += count * W) {
            vf g[GROUP];
            count = m->rows * wide - p >= GROUP * W ? GROUP : 1;
            for (long i = 0; i < count; i++) {
                long at = p + i * W, from = (at / wide * m->channels + l) * wide + at % wide;
                g[i] = (vf)((vi)(load(dphi + from) * m->amplitude) & ~(load(phi + from) <= 0.0f));
            }
            if (count == GROUP) scalar_back(GROUP, b, m->hidden, u + p, g, du + p, sums);
            else scalar_back(1, b, m->hidden, u + p, g, du + p, sums);
        }
    }
}

/* The gradients of the parameters of a bank, from the sums of bank_back. */
static void write_bank(const map_t *m, long head, const float *sums, float *to) {
    long n = m->hidden;
    for (long l = 0; l < m->channels; l++, to += bank_width(m), sums += W) {
        const float *b = m->bank + (head * m->channels + l) * bank_width(m);
        for (long j = 0; j < n; j++, sums += 2 * W) {
            float plain = total(load(sums)), times = total(load(sums + W));
            to[j] = b[2 * n + j] * times;
            to[n + j] = b[2 * n + j] * plain;
            to[2 * n + j] = b[j] * times + b[n + j] * plain;
        }
        to[3 * n] = total(load(sums));
    }
}

/* From dphi of a tile of queries or keys (tokens of batch entry b from `first` on), compute the gradients of its inputs
   (written to `to`) and of a head's weights (added to `sums`). Padding was mapped like zeros, so its inputs have no
   gradient. */
static void map_back(const call_t *c, const map_t *m, long b, long head, sums_t sums, work_t *w, const float *phi,
                     float *dphi, const float *dscale, long first, long count, const void *x, long stride, void *to,
                     long to_stride) {
    scratch_t *s = &w->s;
    long wide = padded(count), n = m->rows, size = m->size;
    if (m->kind == GIVEN) {
        unpack_transposed(dphi, wide, to, c->type, to_stride, count, c->features, 1.0f);
        return;
    }
    head = m->heads == 1 ? 0 : head;
    if (m->kind == BANK) {
        bank_back(m, head, phi, dphi, s->other, w->saved, sums.bank, wide);
        dphi = w->saved;
    } else {
        for (long j = 0; j < wide; j += W) map_back_column(m, phi + j, s->other + j, w->saved + j, dphi + j, wide);
    }
    for (long t = 0; t < count; t++)
        if (is_padding(c, b, first + t)) memset(w->plain + t * w->width, 0, w->width * sizeof(float));
        else read_row(at(x, c->type, t * stride), c->type, size, m->scale, w->plain + t * w->width);
    float *weights[] = {sums.first, sums.second, sums.magnitude};
    for (int which = 0; which < projections(m); which++) {
        const float *d = which == MAGNITUDE ? w->saved + n * wide : dphi + which * n * wide;
        long rows = projection_rows(m, which);
        product(which, size, wide, rows, projection(m, which, head), 1, size, d, wide, w->dx, wide);
        product(1, rows, w->width, count, d, wide, 1, w->plain, w->width, weights[which], w->width);
    }
    if (m->bias)
        for (long i = 0; i < n; i++) {
            vf sum = {0};
            for (long j = 0; j < wide; j += W) sum += load(dphi + i * wide + j);
            sums.bias[i] += total(sum);
        }
    if (m->tau && dscale) {
        squares(m, 0, head, s->x, w->raw, wide);
        float rate = expf(-m->tau[head]);
        for (long j = 0; j < count; j++) *sums.tau -= dscale[j] == 0.0f ? 0.0f : w->raw[j] * dscale[j];
        for (long d = 0; d < size; d++)
            for (long j = 0; j < wide; j += W)
                store(w->dx + d * wide + j,
                      load(w->dx + d * wide + j) + load(s->x + d * wide + j) * load(dscale + j) * (2.0f * rate));
    }
    clear_padding(c, b, first, count, w->dx, size, wide);
    unpack_transposed(w->dx, wide, to, c->type, to_stride, count, size, m->scale);
}

/* The same for a tile of queries, from `first` on. */
static void query_back(const call_t *c, const back_t *g, long b, long h, long first, long count, work_t *w) {
    long group = c->heads / c->key_heads, own = w->maps > 1;
    const map_t *m = own ? &c->queries : &c->keys;
    map_back(c, m, b, own ? h : h / group, sums_at(m, w, own ? 1 + h % group : 0), w, w->s.phi_q, w->dphi, 0, first,
             count, token_at(c->q, c->type, c->q_stride, b, h, first), c->q_stride[2],
             (void *)token_at(g->dq, c->type, g->dq_stride, b, h, first), g->dq_stride[2]);
}

/* The same for keys: from dphi and the gradients of their log-scales, or null. */
static void key_back(const call_t *c, const back_t *g, long b, long h, long first, long count, float *dphi,
                     const float *dscale, work_t *w) {
    map_back(c, &c->keys, b, h, sums_at(&c->keys, w, 0), w, w->s.phi_k, dphi, dscale, first, count,
             token_at(c->k, c->type, c->k_stride, b, h, first), c->k_stride[2],
             (void *)token_at(g->dk, c->type, g->dk_stride, b, h, first), g->dk_stride[2]);
}

/* The gradients of the sums, rows [count, V], and of their denominators, `slope`: dO / den and -(dO . O) / den. */
INLINE void row_gradients(const call_t *c, const back_t *g, long b, long h, long first, long count, const float *factor,
                          work_t *w) {
    memset(w->slope, 0, TILE * sizeof(float));
    for (long t = 0; t < padded(count); t++) {
        float *row = w->rows + t * w->s.width, sum = 0;
        if (t >= count) {
            memset(row, 0, w->s.width * sizeof(float));
            continue;
        }
        long i = b * g->grad_stride[0] + h * g->grad_stride[1] + (first + t) * g->grad_stride[2], j = 0;
        long o = b * c->out_stride[0] + h * c->out_stride[1] + (first + t) * c->out_stride[2];
        vf sums = {0};
        for (; j + W <= c->value_size; j += W) {
            vf d = numbers(g->grad, c->value_type, i + j) * factor[t];
            sums += d * numbers(g->out, c->value_type, o + j);
            store(row + j, d);
        }
        for (; j < w->s.width; j++) {
            row[j] = j < c->value_size ? number(g->grad, c->value_type, i + j) * factor[t] : 0.0f;
            sum += j < c->value_size ? row[j] * number(g->out, c->value_type, o + j) : 0.0f;
        }
        w->slope[t] = -(sum + total(sums));
    }
    pack_transposed(w->rows, FLOAT32, w->s.width, padded(count), c->value_size, 1.0f, w->rows_transposed,
                    padded(count));
}

/* dphi [F, wide] = state x the gradients of the rows, including the contribution of the denominators. */
INLINE void through_state(const call_t *c, const float *kv, const float *z, const float *rows_transposed,
                          const float *slope, float *dphi, long width, long wide) {
    product(0, c->features, wide, c->value_size, kv, width, 1, rows_transposed, wide, dphi, wide);
    for (long i = 0; i < c->features; i++)
        for (long j = 0; j < wide; j += W)
            store(dphi + i * wide + j, load(dphi + i * wide + j) + z[i] * load(slope + j));
}

/* The gradients of a tile's keys and values through the state: dphi, and the contribution of the weighted values in
   `dvalues` and `sums`. */
static void keys_through_state(const call_t *c, work_t *w, float *dphi, long count) {
    scratch_t *s = &w->s;
    long wide = padded(count);
    pack_transposed(s->values, FLOAT32, s->width, wide, c->value_size, 1.0f, w->values, wide);
    through_state(c, w->dkv, w->dz, w->values, s->weight, dphi, s->width, wide);
    product(0, wide, s->width, c->features, s->phi_k, 1, wide, w->dkv, s->width, w->dvalues, s->width);
    row_sums(c, s->phi_k, w->dz, wide, wide, s->sums);
}

/* The gradient of the state += features x the gradients of the rows. */
INLINE void into_state(const call_t *c, work_t *w, const float *phi, long count) {
    accumulate_kv(c, phi, w->rows, w->slope, w->s.width, count, w->dkv, w->dz);
}

/* Write dv = weight x dvalues, and store the gradient of the keys' log-scales in `dscale`; `sums` holds the contribution
   of the denominators. */
INLINE void value_gradients(const call_t *c, const back_t *g, long b, long h, long first, long count, work_t *w) {
    scratch_t *s = &w->s;
    memset(w->dscale, 0, TILE * sizeof(float));
    for (long t = 0; t < count; t++) {
        float *row = w->dvalues + t * s->width, *value = s->values + t * s->width;
        vf sum = {0};
        long i = b * g->dv_stride[0] + h * g->dv_stride[1] + (first + t) * g->dv_stride[2], j = 0;
        if (is_padding(c, b, first + t)) {
            memset(row, 0, s->width * sizeof(float));
            s->sums[t] = 0.0f;
        }
        for (; j < s->width; j += W) sum += load(row + j) * load(value + j);
        for (j = 0; j + W <= c->value_size; j += W)
            write_numbers(g->dv, c->value_type, i + j, load(row + j) * s->weight[t]);
        for (; j < c->value_size; j++) write_number(g->dv, c->value_type, i + j, row[j] * s->weight[t]);
        w->dscale[t] = total(sum) + s->sums[t] * s->weight[t];
        if (g->dlog_scale) g->dlog_scale[(b * c->key_heads + h) * c->tokens + first + t] = w->dscale[t];
    }
}

/* Set the sums over a head's tokens to zero. */
static void clear_head(const call_t *c, work_t *w) {
    memset(w->dkv, 0, c->features * w->s.width * sizeof(float));
    memset(w->dz, 0, c->features * sizeof(float));
    memset(w->sums, 0, w->maps * sums_size(&c->keys) * sizeof(float));
}

/* Copy the sums of a head to place `index` of `to`. */
static void write_sums(const map_t *m, long head, sums_t sums, long width, long index, const sums_t *to) {
    long n = m->rows, size = m->size;
    for (long i = 0; i < n; i++)
        for (long d = 0; d < size; d++) {
            to->first[(index * n + i) * size + d] = sums.first[i * width + d];
            if (to->second) to->second[(index * n + i) * size + d] = sums.second[i * width + d];
        }
    if (to->magnitude) memcpy(to->magnitude + index * size, sums.magnitude, size * sizeof(float));
    if (to->bias) memcpy(to->bias + index * n, sums.bias, n * sizeof(float));
    if (to->tau) to->tau[index] = *sums.tau;
    if (to->bank)
        write_bank(m, m->heads == 1 ? 0 : head, sums.bank, to->bank + index * m->channels * bank_width(m));
}

/* Copy the gradients of the weights for batch entry and key head `n`, and for the queries of its group. */
static void write_weights(const call_t *c, const back_t *g, long n, const work_t *w) {
    const sums_t keys = {g->first, g->second, g->bias, g->tau, g->bank, g->magnitude};
    const sums_t queries = {g->q_first, g->q_second, g->q_bias, g->q_tau, g->q_bank, g->q_magnitude};
    long group = w->maps - 1, first = n % c->key_heads * group;
    if (c->keys.kind == GIVEN) return;
    write_sums(&c->keys, n % c->key_heads, sums_at(&c->keys, w, 0), w->width, n, &keys);
    for (long i = 0; i < group; i++)
        write_sums(&c->queries, first + i, sums_at(&c->queries, w, 1 + i), w->width, n * group + i, &queries);
}

/* Call `one` for every batch entry and key head, in all threads; the sums are cleared before and copied after each call.
   Returns 0, or 1 if memory ran out. */
static int each_head_back(const call_t *c, const back_t *g, void (*one)(const call_t *, const back_t *, long, work_t *)) {
    int failed = DONE;
#pragma omp parallel num_threads(c->threads)
    {
        work_t w;
        int ready = prepare_work(c, g, &w);
        if (all_ready(ready, &failed)) {
            w.s.saved = w.saved;
#pragma omp for schedule(dynamic)
            for (long n = 0; n < c->batch * c->key_heads; n++) {
                clear_head(c, &w);
                one(c, g, n, &w);
                write_weights(c, g, n, &w);
            }
        }
        if (ready) free_work(&w);
    }
    return failed;
}

#endif
