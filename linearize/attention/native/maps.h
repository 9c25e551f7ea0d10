/* Feature maps: tokens in columns [size, wide] -> features [F, wide], and the log-scales of keys [wide]. */

#ifndef LINEARIZE_MAPS_H
#define LINEARIZE_MAPS_H

#include "tile.h"

#define EACH_MAP(ONE)                                                                                         \
    ONE(GIVEN, "given") ONE(RELU, "relu") ONE(SOFTMAX_BOTH, "softmax_both") ONE(EXP_BOTH, "exp_both")         \
    ONE(WAVES, "waves") ONE(WAVE_PAIRS, "wave_pairs") ONE(DAMPED_WAVES, "damped_waves") ONE(BANK, "bank")     \
    ONE(POSITIVE_WAVES, "positive_waves")
enum { EACH_MAP(NUMBER) MAPS };

typedef struct {
    int32_t kind, heads;     /* heads with separate weights */
    int64_t rows, size;      /* weights are [heads, rows, size] */
    int64_t channels, hidden; /* of a bank of scalar functions */
    const float *first, *second, *bias; /* bias [heads, rows] or null */
    const float *tau;        /* [heads]: the log-scale is exp(-tau) |x|^2; or null */
    const float *bank;       /* [heads, channels, 3 hidden + 1]: slopes, offsets, weights, a bias; or null */
    const float *magnitude;  /* [heads, size]: features are multiplied by exp(4 tanh(magnitude . x / 4)); or null */
    float scale, amplitude;  /* factor of the inputs; amplitude of a wave */
    int32_t scaled;          /* whether it has log-scales */
    /* Learned log-scales of single tokens, which are added (see linearize/attention/hybrid.py): [heads, size], [heads],
       [heads, units, size], and two of [heads, units]. All may be null; `learned_bias` may be null by itself. */
    int32_t units;
    const float *learned, *learned_bias, *unit, *unit_bias, *unit_out;
} map_t;

/* Replace one column of vectors of the scores y [n, wide] by their softmax over n, or by that of -y if sign is -1. */
INLINE void softmax_column(float *y, long n, long wide, float sign) {
    vf top = splat(-INFINITY), sum = {0};
    for (long i = 0; i < n; i++) top = larger(top, sign * load(y + i * wide));
    for (long i = 0; i < n; i++) {
        vf e = vexp(sign * load(y + i * wide) - top);
        sum += e;
        store(y + i * wide, e);
    }
    sum = 1.0f / sum;
    for (long i = 0; i < n; i++) store(y + i * wide, load(y + i * wide) * sum);
}

INLINE void both_signs(const map_t *map, float *phi, float *log_scale, long n, long wide) {
    memcpy(phi + n * wide, phi, n * wide * sizeof(float));
    for (long j = 0; j < wide; j += W) {
        if (map->kind == SOFTMAX_BOTH) {
            softmax_column(phi + j, n, wide, 1.0f);
            softmax_column(phi + n * wide + j, n, wide, -1.0f);
            continue;
        }
        vf top = {0}, odd = {0};
        for (long i = 0; i < n; i++) {
            vf y = load(phi + i * wide + j);
            top = larger(top, larger(y, -y));
            odd += y * 0.0f; /* keep NaN, which the maximum ignores */
        }
        top += odd;
        for (long i = 0; i < n; i++) {
            vf y = load(phi + i * wide + j);
            store(phi + i * wide + j, vexp(y - top));
            store(phi + (n + i) * wide + j, vexp(-y - top));
        }
        store(log_scale + j, top);
    }
}

/* Whether any of these angles is beyond a limit; the limit of vsincos is FAR. */
INLINE int far_away(const float *angle, long count, float limit) {
    vf top = {0};
    for (long i = 0; i < count; i += W) top = farther(load(angle + i), top);
    vi some = top > limit;
    int any = 0;
    for (int i = 0; i < W; i++) any |= some[i];
    return any;
}

INLINE void any_sincos(vf x, vf *sine, vf *cosine, int far) {
    if (!far) {
        vsincos(x, sine, cosine);
        return;
    }
    for (int i = 0; i < W; i++) {
        (*sine)[i] = sinf(x[i]);
        (*cosine)[i] = cosf(x[i]);
    }
}

/* `saved` [3 n, wide], if not null, receives cos a, sin a and the derivative of the envelope, for the gradient. */
INLINE void wave_column(int32_t kind, float amplitude, float *phi, const float *other, long n, long wide, int far,
                        float *saved) {
    for (long i = 0; i < n; i++) {
        vf sine, cosine, envelope = splat(amplitude);
        if (kind == WAVE_PAIRS) {
            if (far || saved) any_sincos(load(other + i * wide), &sine, &cosine, far);
            else cosine = vcos(load(other + i * wide));
            envelope = cosine * amplitude;
            if (saved) store(saved + (2 * n + i) * wide, sine * -amplitude);
        } else if (kind == DAMPED_WAVES) {
            envelope = load(other + i * wide);
        }
        any_sincos(load(phi + i * wide), &sine, &cosine, far);
        store(phi + i * wide, cosine * envelope);
        store(phi + (n + i) * wide, sine * envelope);
        if (saved) {
            store(saved + i * wide, cosine);
            store(saved + (n + i) * wide, sine);
        }
    }
}

PART void waves(int32_t kind, float amplitude, float *phi, const float *other, long n, long wide, float *saved) {
    int far = far_away(phi, n * wide, FAR) || (kind == WAVE_PAIRS && far_away(other, n * wide, FAR));
    for (long j = 0; j < wide; j += W) {
        if (saved) wave_column(kind, amplitude, phi + j, other + j, n, wide, far, saved + j);
        else if (far) wave_column(kind, amplitude, phi + j, other + j, n, wide, 1, 0);
        else wave_column(kind, amplitude, phi + j, other + j, n, wide, 0, 0);
    }
}

/* exp(4 tanh(y / 4)); `slope`, if not null, receives the derivative of its logarithm. NaN stays NaN. */
INLINE vf magnitude_of(vf y, float *slope) {
    vf e = vexp(-larger(splat(-80.0f), y * -0.5f)), part = 1.0f / (1.0f + e);
    if (slope) store(slope, 4.0f * (e * part) * part);
    return vexp(4.0f - 8.0f * part);
}

/* From the angles a in phi, the envelopes s in other, and r / 2: r s cos^2(a + pi/4) and r s sin^2(a + pi/4), computed as
   r s (1 -+ sin 2 a) / 2, which rounding cannot make negative. `saved` [n, wide], if not null, receives r s cos 2 a, for
   the gradient. */
INLINE void positive_column(float *phi, const float *other, vf half_factor, long n, long wide, int far, float *saved) {
    for (long i = 0; i < n; i++) {
        vf sine, cosine, half = load(other + i * wide) * half_factor;
        any_sincos(load(phi + i * wide) * 2.0f, &sine, &cosine, far);
        /* The order of the arguments keeps NaN. */
        store(phi + i * wide, larger((vf){0}, half - half * sine));
        store(phi + (n + i) * wide, larger((vf){0}, half + half * sine));
        if (saved) store(saved + i * wide, (half + half) * cosine);
    }
}

/* `factor` [wide], or null. */
PART void positive_waves(float *phi, const float *other, const float *factor, long n, long wide, float *saved) {
    int far = far_away(phi, n * wide, FAR / 2);
    for (long j = 0; j < wide; j += W) {
        vf half = splat(0.5f);
        if (factor) half *= load(factor + j);
        if (saved) positive_column(phi + j, other + j, half, n, wide, far, saved + j);
        else if (far) positive_column(phi + j, other + j, half, n, wide, 1, 0);
        else positive_column(phi + j, other + j, half, n, wide, 0, 0);
    }
}

#define GROUP 8 /* vectors per evaluation of a scalar function */

INLINE long bank_width(const map_t *map) { return 3 * map->hidden + 1; }

/* One function of a bank, relu(c + sum_j v_j relu(s_j u + t_j)), for `count` vectors u. */
INLINE void scalar_function(int count, const float *b, long hidden, const float *u, vf *y) {
    const float *s = b, *t = b + hidden, *v = b + 2 * hidden;
    for (int i = 0; i < count; i++) y[i] = splat(b[3 * hidden]);
    for (long j = 0; j < hidden; j++)
        for (int i = 0; i < count; i++) y[i] += v[j] * larger((vf){0}, s[j] * load(u + i * W) + t[j]);
    for (int i = 0; i < count; i++) y[i] = larger((vf){0}, y[i]);
}

/* All functions of all projections u [rows, wide] -> phi [rows, channels, wide]. */
INLINE void bank_tile(const map_t *map, long head, const float *u, float *phi, long wide) {
    for (long l = 0; l < map->channels; l++) {
        const float *b = map->bank + (head * map->channels + l) * bank_width(map);
        for (long p = 0, count; p < map->rows * wide; p += count * W) {
            vf y[GROUP];
            count = map->rows * wide - p >= GROUP * W ? GROUP : 1;
            if (count == GROUP) scalar_function(GROUP, b, map->hidden, u + p, y);
            else scalar_function(1, b, map->hidden, u + p, y);
            for (long i = 0; i < count; i++) {
                long at = p + i * W;
                store(phi + (at / wide * map->channels + l) * wide + at % wide, y[i] * map->amplitude);
            }
        }
    }
}

/* relu(x). With an amplitude of 0 there are no features: not even NaN for NaN, which would stay in a state forever. */
INLINE vf rectified(const map_t *map, vf x) { return map->amplitude == 0.0f ? (vf){0} : larger((vf){0}, x); }

INLINE void add_bias(const map_t *map, long head, float *projected, long wide) {
    if (!map->bias) return;
    for (long i = 0; i < map->rows; i++)
        for (long j = 0; j < wide; j += W)
            store(projected + i * wide + j, load(projected + i * wide + j) + map->bias[head * map->rows + i]);
}

/* The magnitudes of projections y [wide], in place; for the gradient, `slope` [wide] or null. */
INLINE void magnitudes(float *y, long wide, float *slope) {
    for (long j = 0; j < wide; j += W) store(y + j, magnitude_of(load(y + j), slope ? slope + j : 0));
}

/* Finish the map from its projections: the first is in phi [rows, wide], the second in other [rows, wide], followed by
   that of the magnitude [wide]. The slopes of the magnitude are saved after those of the waves. */
INLINE void activate(const map_t *map, long head, float *phi, float *other, float *log_scale, long wide, float *saved) {
    long n = map->rows;
    add_bias(map, head, phi, wide);
    switch (map->kind) {
    case RELU:
        for (long i = 0; i < n * wide; i += W) store(phi + i, rectified(map, load(phi + i)));
        break;
    case SOFTMAX_BOTH:
    case EXP_BOTH:
        both_signs(map, phi, log_scale, n, wide);
        break;
    case DAMPED_WAVES:
        for (long j = 0; j < wide; j += W) softmax_column(other + j, n, wide, 1.0f);
        waves(DAMPED_WAVES, 1.0f, phi, other, n, wide, saved);
        break;
    case POSITIVE_WAVES:
        for (long j = 0; j < wide; j += W) softmax_column(other + j, n, wide, 1.0f);
        if (map->magnitude) magnitudes(other + n * wide, wide, saved ? saved + n * wide : 0);
        positive_waves(phi, other, map->magnitude ? other + n * wide : 0, n, wide, saved);
        break;
    case WAVE_PAIRS:
        waves(WAVE_PAIRS, map->amplitude, phi, other, n, wide, saved);
        break;
    default:
        waves(WAVES, map->amplitude, phi, other, n, wide, saved);
    }
}

/* The weights that project inputs. A map with a magnitude also has second weights. */
enum { FIRST = 0, SECOND = 1, MAGNITUDE = 2 };

INLINE int projections(const map_t *map) { return map->magnitude ? 3 : map->second ? 2 : 1; }

INLINE long projection_rows(const map_t *map, int which) { return which == MAGNITUDE ? 1 : map->rows; }

/* One head's weights [rows, size]. */
INLINE const float *projection(const map_t *map, int which, long head) {
    const float *weights = which == MAGNITUDE ? map->magnitude : which == SECOND ? map->second : map->first;
    return weights + head * projection_rows(map, which) * map->size;
}

/* Round the projection weights of one head to bf16 for `project`; there are as many numbers as weights. */
PART void round_weights(const map_t *map, long head, uint16_t *to) {
    head = map->heads == 1 ? 0 : head;
    for (int which = 0; which < projections(map); which++) {
        const float *weights = projection(map, which, head);
        long all = projection_rows(map, which) * map->size, i = 0;
        for (; i + W <= all; i += W) write_numbers(to, BFLOAT16, i, load(weights + i));
        float rest[W] = {0};
        uint16_t rest_rounded[W];
        memcpy(rest, weights + i, (all - i) * sizeof(float));
        write_numbers(rest_rounded, BFLOAT16, 0, load(rest));
        memcpy(to + i, rest_rounded, (all - i) * sizeof(uint16_t));
        to += all;
    }
}

/* Project tokens x [size, wide] with one head's weights; or project pairs of unscaled bf16 numbers [size / 2, wide] with
   the result of `round_weights`. */
PART void project(const map_t *map, int which, const uint16_t *rounded, long head, const float *x, float *to,
                  long wide) {
    long n = projection_rows(map, which), size = map->size;
    if (rounded) {
        const float *weights = (const float *)(rounded + which * map->rows * size);
        blocks(1, 0, map->scale, n, wide, size / 2, weights, size / 2, 1, x, wide, to, wide);
        return;
    }
    product(0, n, wide, size, projection(map, which, head), size, 1, x, wide, to, wide);
}

/* The keys' log-scales, exp(-tau) |x|^2. */
INLINE void squares(const map_t *map, int pairs, long head, const float *x, float *log_scale, long wide) {
    float factor = expf(-map->tau[head]) * (pairs ? map->scale * map->scale : 1.0f);
    for (long j = 0; j < wide; j += W) {
        vf sum = {0};
        for (long d = 0; d < (pairs ? map->size / 2 : map->size); d++) {
            vf row = load(x + d * wide + j);
            sum = add_products(pairs, sum, row, row);
        }
        store(log_scale + j, sum * factor);
    }
}

/* Map tokens x [size, wide]; see `project` for `rounded`. */
INLINE void map_tile(const map_t *map, const uint16_t *rounded, long head, const float *x, float *phi, float *other,
                     float *log_scale, long wide, float *saved) {
    head = map->heads == 1 ? 0 : head;
    project(map, FIRST, rounded, head, x, map->kind == BANK ? other : phi, wide);
    if (map->kind == BANK) {
        add_bias(map, head, other, wide);
        bank_tile(map, head, other, phi, wide);
        return;
    }
    if (map->second) project(map, SECOND, rounded, head, x, other, wide);
    if (map->magnitude) project(map, MAGNITUDE, rounded, head, x, other + map->rows * wide, wide);
    if (map->tau) squares(map, rounded != 0, head, x, log_scale, wide);
    activate(map, head, phi, other, log_scale, wide, saved);
}

#endif
