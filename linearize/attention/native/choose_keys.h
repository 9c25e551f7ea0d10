/* The single keys that many queries look up, as in choice.h.

   Scores are first computed in whole numbers of 16 bits, which are within MARGIN of the true ones, so that only the keys
   near the limit need true scores. Strips of keys, with all channels, pass by a tile of queries, and stay in the
   first-level cache meanwhile. Most scores are below what a query's chosen keys have at least, and are dropped. */

#ifndef LINEARIZE_CHOOSE_KEYS_H
#define LINEARIZE_CHOOSE_KEYS_H

#include "choice.h"

#define TOGETHER 64      /* queries of a tile */
#define STRIP 64         /* keys of a strip: one bit each */
#define SPARSE 8         /* one key in so many is looked at first */
#define ROOM 4           /* scores that are held per slot */
#define MOST_SCORE 32000 /* largest score; with MARGIN, it fits into 16 bits */
#define MARGIN 9         /* rounding of the 8 factors and products, each by half, and of the keys */
#define LANES16 (2 * W)  /* numbers of a vector */

typedef int16_t vs __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef int16_t vs_half __attribute__((vector_size(2 * W), aligned(2), may_alias));

/* The rounded product of two numbers, divided by 2^15. */
INLINE vs scaled_product(vs a, vs b) {
#if defined(__AVX512BW__)
    return (vs)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (vs)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#else
    vs x;
    for (int j = 0; j < LANES16; j++) x[j] = ((int32_t)a[j] * b[j] + (1 << 14)) >> 15;
    return x;
#endif
}

/* Which lanes are above a number, one bit each. */
INLINE uint64_t lanes_above(vs x, int16_t below) {
    vs above = x > below;
#if defined(__AVX512BW__)
    return _mm512_movepi16_mask((__m512i)above);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128((__m256i)above), _mm256_extracti128_si256((__m256i)above, 1));
    return _mm_movemask_epi8(bytes);
#else
    uint64_t bits = 0;
    for (int j = 0; j < LANES16; j++) bits |= (uint64_t)(above[j] & 1) << j;
    return bits;
#endif
}

INLINE vs load16(const int16_t *p) { return *(const vs *)p; }
INLINE void store16(int16_t *p, vs x) { *(vs *)p = x; }

/* A query of a tile. */
typedef struct {
    candidates_t among;
    int32_t pairs[CHANNELS], rows[CHANNELS]; /* factors, each twice, and where its channels begin in a strip */
    float factors[CHANNELS];
    int16_t below, failed;                   /* candidates have larger scores; whether there are too many of them */
    int32_t found, sampled;
    int16_t *scores; /* [room], whole vectors, of the keys found so far that may be chosen, in order */
    int32_t *places; /* [room] */
    int16_t *maxima; /* [STRIP], largest scores of groups of the keys that are looked at first */
} chooser_t;

/* A thread's arrays. A strip is [size, STRIP], keys by channel. */
typedef struct {
    chooser_t *choosers;
    int16_t *strips, *samples; /* of all keys of a head, and of every SPARSE-th vector of them */
    float *scales;             /* [size], largest number of each channel */
    float *exact, *best;       /* [room], true scores */
    int32_t *near;             /* [room], keys that need them */
    long room;
    choice_buffers_t others;
} tile_t;

INLINE long strip_size(const choice_t *g) { return g->size * STRIP; }
INLINE long strip_count(const choice_t *g) { return (g->keys + STRIP - 1) / STRIP; }

/* The largest magnitude of a channel; NaN if a number is not finite or if it cannot be a divisor. */
static float channel_scale(const choice_t *g, const void *channels, long d) {
    float top = 0.0f, odd = 0.0f;
    for (long j = 0; j < g->keys; j++) {
        float x = number(channels, g->type, d * g->keys + j);
        top = fabsf(x) > top ? fabsf(x) : top;
        odd += x * 0.0f;
    }
    return odd == 0.0f && (top == 0.0f || (top > 1e-30f && top < 1e30f)) ? top : NAN;
}

/* Read the keys of a head into strips; 0 if 16 bits do not suffice. Sample i has the vectors at the places
   i * STRIP * SPARSE + (0, 1 ...) * W * SPARSE. */
PART int read_strips(const choice_t *g, const void *channels, const tile_t *f) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    for (long d = 0; d < g->size; d++) {
        float scale = f->scales[d] = channel_scale(g, channels, d), factor = scale > 0.0f ? 32767.0f / scale : 0.0f;
        if (!(scale == scale)) return 0;
        for (long j = 0; j < g->keys; j += W) {
            int16_t *to = f->strips + j / STRIP * strip_size(g) + d * STRIP + j % STRIP;
            float row[W] = {0};
            for (long i = j; i < least(j + W, g->keys); i++) row[i - j] = number(channels, g->type, d * g->keys + i);
            vf x = load(row) * factor + magic;
            *(vs_half *)to = __builtin_convertvector(__builtin_convertvector(x - magic, vi), vs_half);
            if (j % (W * SPARSE) == 0)
                memcpy(f->samples + j / (STRIP * SPARSE) * strip_size(g) + d * STRIP + j % (STRIP * SPARSE) / SPARSE, to,
                       W * sizeof *to);
        }
    }
    return 1;
}

/* Write a query's scores of a strip; return which keys may be chosen, one bit each. */
INLINE uint64_t strip_scores(const chooser_t *n, const int16_t *strip, int16_t *scores) {
    uint64_t above = 0;
    const int16_t *rows[CHANNELS];
    vs factors[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) {
        rows[c] = strip + n->rows[c];
        factors[c] = (vs)(n->pairs[c] - (vi){0});
    }
    for (long i = 0; i < STRIP; i += LANES16) {
        vs x = scaled_product(load16(rows[0] + i), factors[0]), y = scaled_product(load16(rows[1] + i), factors[1]);
        for (int c = 2; c < CHANNELS; c += 2) {
            x += scaled_product(load16(rows[c] + i), factors[c]);
            y += scaled_product(load16(rows[c + 1] + i), factors[c + 1]);
        }
        store16(scores + i, x + y);
        above |= lanes_above(x + y, n->below) << i;
    }
    return above;
}

/* The element of rank `rank` (1: the largest) of x [count], by bisection; x is lengthened to whole vectors. */
static int score_of_rank(int16_t *x, long count, long rank) {
    int low = INT16_MIN, high = INT16_MAX;
    for (; count % LANES16; count++) x[count] = INT16_MIN;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        long all = 0;
        vs sum = {0};
        for (long j = 0; j < count; j += LANES16) sum -= load16(x + j) > (int16_t)(middle - 1);
        for (int j = 0; j < LANES16; j++) all += sum[j];
        if (all >= rank) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* The bits of the places from `low` to `high` in a strip whose first key is `first`. */
INLINE uint64_t bits_between(long first, long low, long high) {
    low = bounded(low - first, 0, STRIP), high = bounded(high - first, 0, STRIP);
    return low < high ? ~(uint64_t)0 >> (STRIP - high + low) << low : 0;
}

/* Whether all keys from `first` to `last` are candidates. */
INLINE int all_candidates(const candidates_t *c, long first, long last) {
    return (first >= c->from && last <= c->hole) || (first >= c->end && last <= c->to);
}

/* Drop the keys found that cannot be chosen. */
PART void drop_lowest(const choice_t *g, const tile_t *f, chooser_t *n) {
    long count = 0;
    int last = score_of_rank(n->scores, n->found, g->slots) - 2 * MARGIN;
    for (long i = 0; i < n->found; i++) {
        int keep = n->scores[i] >= last;
        n->scores[count] = n->scores[i], n->places[count] = n->places[i];
        count += keep;
    }
    n->found = count;
    n->below = last - 1;
    n->failed = count + STRIP > f->room;
}

/* Take the candidates of a strip that may be chosen, given their bits. */
INLINE void take_found(const choice_t *g, const tile_t *f, chooser_t *n, long first, uint64_t above,
                       const int16_t *scores) {
    for (; above; above &= above - 1) {
        int j = __builtin_ctzll(above);
        n->scores[n->found] = scores[j];
        n->places[n->found++] = first + j;
    }
    if (n->found + STRIP > f->room) drop_lowest(g, f, n);
}

/* Find the keys that may be chosen by the queries of a tile. */
PART void find_keys_together(const choice_t *g, long count, const tile_t *f) {
    int16_t scores[STRIP];
    long from = g->keys, to = 0;
    for (long r = 0; r < count; r++) {
        from = least(from, f->choosers[r].among.from);
        if (f->choosers[r].among.to > to) to = f->choosers[r].among.to;
    }
    for (long first = from / STRIP * STRIP; first < to; first += STRIP) {
        const int16_t *strip = f->strips + first / STRIP * strip_size(g);
        for (long r = 0; r < count; r++) {
            chooser_t *n = f->choosers + r;
            const candidates_t *c = &n->among;
            if (first + STRIP <= c->from || first >= c->to || n->failed) continue;
            uint64_t above = strip_scores(n, strip, scores);
            if (!all_candidates(c, first, first + STRIP))
                above &= bits_between(first, c->from, c->hole) | bits_between(first, c->end, c->to);
            if (above) take_found(g, f, n, first, above, scores);
        }
    }
}

/* Expect from the largest of each group of a sample which scores are too low to be chosen. */
static void expect_score(const choice_t *g, chooser_t *n) {
    const candidates_t *c = &n->among;
    float share = (float)n->sampled / (c->to - c->end + c->hole - c->from);
    float wanted = g->slots * share + 2.5f * sqrtf(g->slots * share) + 1.0f;
    long rank = STRIP * (1.0f - expf(-wanted / STRIP)) + 1.0f; /* several of them may be in one group */
    if (n->sampled && rank <= STRIP - 4) n->below = score_of_rank(n->maxima, STRIP, rank) - 1;
}

/* Look at a sample of the keys, so that most scores can be dropped from the start. */
PART void look_at_sample(const choice_t *g, long count, const tile_t *f) {
    int16_t scores[STRIP];
    long span = STRIP * SPARSE;
    for (long first = 0; first + span <= g->keys; first += span)
        for (long r = 0; r < count; r++) {
            chooser_t *n = f->choosers + r;
            if (!all_candidates(&n->among, first, first + span)) continue;
            strip_scores(n, f->samples + first / span * strip_size(g), scores);
            for (long i = 0; i < STRIP; i += LANES16) {
                vs x = load16(scores + i), y = load16(n->maxima + i), more = x > y;
                store16(n->maxima + i, (x & more) | (y & ~more));
            }
            n->sampled += STRIP;
        }
    for (long r = 0; r < count; r++) expect_score(g, f->choosers + r);
}

/* Prepare a query at a place. */
static void prepare_chooser(const choice_t *g, const tile_t *f, const float *q, long place, long keys, chooser_t *n) {
    long at_channel[CHANNELS], found = largest_channels(q, g->size, at_channel);
    float all = 0.0f;
    for (long c = 0; c < CHANNELS; c++) {
        long d = c < found ? at_channel[c] : 0;
        n->factors[c] = c < found ? q[d] : 0.0f;
        n->rows[c] = STRIP * d;
        all += fabsf(n->factors[c] * f->scales[d]);
    }
    n->failed = !(all > 1e-30f && all < 1e30f);
    for (long c = 0; c < CHANNELS && !n->failed; c++) {
        float factor = n->factors[c] * f->scales[n->rows[c] / STRIP] * (MOST_SCORE / all);
        n->pairs[c] = (uint16_t)(int16_t)lrintf(factor) * 0x10001u;
    }
    n->among = candidates_of(g, place, keys);
    n->found = n->sampled = 0;
    n->below = INT16_MIN;
    for (long i = 0; i < STRIP; i++) n->maxima[i] = INT16_MIN;
}

/* Look again at all keys for queries that expected too large scores: a key whose number of 16 bits is just below what they
   expected may have the higher true score. */
static void look_again(const choice_t *g, long count, const tile_t *f) {
    long again = 0;
    for (long r = 0; r < count; r++) {
        chooser_t *n = f->choosers + r;
        int wrong = !n->failed && n->below > INT16_MIN &&
                    (n->found < g->slots || score_of_rank(n->scores, n->found, g->slots) - 2 * MARGIN <= n->below);
        again += wrong;
        if (wrong) n->found = 0, n->below = INT16_MIN;
        else n->among.to = n->among.from = 0; /* done */
    }
    if (again) find_keys_together(g, count, f);
}

/* The true score of a key, added up as in choice.h. */
INLINE float true_score(const choice_t *g, const chooser_t *n, const void *channels, long key) {
    const float *factors = n->factors;
    float x[CHANNELS];
    for (long c = 0; c < CHANNELS; c++) x[c] = number(channels, g->type, n->rows[c] / STRIP * g->keys + key);
    return (factors[0] * x[0] + factors[1] * x[1] + factors[2] * x[2] + factors[3] * x[3]) +
           (factors[4] * x[4] + factors[5] * x[5] + factors[6] * x[6] + factors[7] * x[7]);
}

/* Of the keys at n->places[near[0]] ..., keep the `slots` of highest true score, of equal ones the first. */
static void keep_nearest(const choice_t *g, const tile_t *f, chooser_t *n, const void *channels, long count, long slots) {
    for (long i = 0; i < count; i++)
        f->exact[i] = f->best[i] = true_score(g, n, channels, n->places[f->near[i]]);
    float last = ranked(f->best, count, slots - 1);
    for (long i = 0; i < count; i++) slots -= f->exact[i] > last;
    for (long i = 0; i < count; i++) {
        int keep = f->exact[i] > last || (f->exact[i] == last && slots-- > 0);
        n->scores[f->near[i]] = keep ? INT16_MAX : INT16_MIN;
    }
}

/* Keep the best of the keys found, in order; of equal ones the first. */
PART void keep_best_keys(const choice_t *g, const tile_t *f, chooser_t *n, const void *channels) {
    if (n->found <= g->slots) return;
    int limit = score_of_rank(n->scores, n->found, g->slots), high = limit + 2 * MARGIN;
    long near = 0, sure = 0, kept = 0;
    for (long i = 0; i < n->found; i++) {
        f->near[near] = i;
        near += abs(n->scores[i] - limit) <= 2 * MARGIN;
        sure += n->scores[i] > high;
    }
    keep_nearest(g, f, n, channels, near, g->slots - sure);
    for (long i = 0; i < n->found; i++) {
        n->places[kept] = n->places[i];
        kept += n->scores[i] > high;
    }
    n->found = kept;
}

/* Choose keys for `count` queries q [count, size] of a head at their places. */
static void choose_together(const choice_t *g, const tile_t *f, const float *q, const void *channels,
                            const int64_t *places, long count, long keys, int64_t *chosen) {
    for (long r = 0; r < count; r++) prepare_chooser(g, f, q + r * g->size, places[r], keys, f->choosers + r);
    look_at_sample(g, count, f);
    find_keys_together(g, count, f);
    look_again(g, count, f);
    for (long r = 0; r < count; r++) {
        int64_t *to = chosen + r * g->slots;
        if (f->choosers[r].failed) choose_blocks(g, q + r * g->size, channels, places[r], keys, &f->others, to);
        else {
            chooser_t *n = f->choosers + r;
            keep_best_keys(g, f, n, channels);
            for (long i = 0; i < g->slots; i++) to[i] = i < n->found ? n->places[i] : -1;
        }
    }
}

/* Choose for all queries of head h. */
static void choose_keys(const choice_t *g, long h, const tile_t *f) {
    long b = h / g->heads, key_head = h / (g->heads / g->key_heads);
    const void *channels = at(g->channels, g->type, key_head * g->size * g->keys);
    int fit = read_strips(g, channels, f);
    for (long row = 0; row < g->rows; row += TOGETHER) {
        long n = h * g->rows + row, count = least(TOGETHER, g->rows - row);
        const int64_t *places = g->places + b * g->rows + row;
        if (fit) choose_together(g, f, g->q + n * g->size, channels, places, count, g->count[b], g->chosen + n * g->slots);
        else
            for (long r = 0; r < count; r++)
                choose_blocks(g, g->q + (n + r) * g->size, channels, places[r], g->count[b], &f->others,
                              g->chosen + (n + r) * g->slots);
    }
}

/* Allocate a thread's arrays; null if memory ran out. */
static float *tile_alloc(const choice_t *g, tile_t *f) {
    float *choosers, *strips, *samples, *scores, *places, *maxima, *near, *others;
    f->room = (ROOM * g->slots + LANES16 - 1) / LANES16 * LANES16 + STRIP;
    const part_t parts[] = {
        {&choosers, TOGETHER * sizeof(chooser_t) / sizeof(float)}, {&strips, strip_count(g) * strip_size(g) / 2},
        {&samples, (strip_count(g) / SPARSE + 1) * strip_size(g) / 2}, {&maxima, TOGETHER * STRIP / 2},
        {&scores, TOGETHER * f->room / 2}, {&places, TOGETHER * f->room}, {&f->scales, g->size}, {&f->exact, f->room},
        {&f->best, f->room}, {&near, f->room}, {&others, choice_buffers_size(g)},
    };
    float *memory = arena_alloc(parts, sizeof parts / sizeof *parts);
    if (!memory) return 0;
    f->choosers = (chooser_t *)choosers;
    f->strips = (int16_t *)strips, f->samples = (int16_t *)samples;
    f->near = (int32_t *)near;
    f->others = choice_buffers_at(g, others);
    for (long r = 0; r < TOGETHER; r++) {
        f->choosers[r].scores = (int16_t *)scores + r * f->room;
        f->choosers[r].places = (int32_t *)places + r * f->room;
        f->choosers[r].maxima = (int16_t *)maxima + r * STRIP;
    }
    return memory;
}

/* Returns DONE or NO_MEMORY. */
int linearize_choose(const choice_t *g) {
    /* Strips hold all channels of a head, so a few queries read less of their own. */
    if (g->block > 1 || g->rows * CHANNELS < g->size) return choose_one_by_one(g);
    int failed = DONE;
#pragma omp parallel num_threads(g->threads)
    {
        tile_t f;
        float *memory = tile_alloc(g, &f);
        if (all_ready(memory != 0, &failed)) {
#pragma omp for schedule(dynamic)
            for (long h = 0; h < g->batch * g->heads; h++) choose_keys(g, h, &f);
        }
        free(memory);
    }
    return failed;
}

#endif
