/* Vectors of floats, their elementary functions, and products of small matrices in a core's cache.

   Written with the vector extensions of GCC and Clang: one source for every processor that they support. */

#ifndef LINEARIZE_TILE_H
#define LINEARIZE_TILE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16
#define MR 8
#elif defined(__AVX__)
#define W 8
#define MR 4
#else
#define W 4
#define MR 8
#endif
#if defined(__AVX512BF16__)
#define PAIRS 1 /* products of two bf16 numbers at once, in fp32 */
#else
#define PAIRS 0
#endif
/* W: floats per vector. MR: rows of a product held in registers, NV vectors each. */
#define NV 2
#define UNIT (W > MR ? W : MR) /* sizes are rounded up to multiples of this: whole vectors and whole blocks of rows */
#define PANEL (NV * W) /* columns of a product that are computed together */

typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* Functions that must not be inlined: in one large function, compilers run out of registers. */
#define PART static __attribute__((noinline))

/* Select lanes of two vectors by a list of constants f(0), f(1) ... */
#if W == 16
#define LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif W == 8
#define LANES(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define LANES(f) f(0), f(1), f(2), f(3)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, f) __builtin_shufflevector(a, b, LANES(f))
#else
#define SHUFFLE(a, b, f) __builtin_shuffle(a, b, (vi){LANES(f)})
#endif
#define ACROSS8(j) ((j) ^ 8)
#define ACROSS4(j) ((j) ^ 4)
#define ACROSS2(j) ((j) ^ 2)

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }

/* The larger of the two; b if one is NaN. A single instruction, which the compiler may not find by itself. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi where = a > b;
    return (vf)((where & (vi)a) | (~where & (vi)b));
#endif
}

/* The larger of |a| and b, where b is not negative; b if a is NaN. */
INLINE vf farther(vf a, vf b) {
#if defined(__AVX512DQ__)
    return (vf)_mm512_range_ps((__m512)a, (__m512)b, 11);
#else
    return larger(larger(a, -a), b);
#endif
}

/* Lanes of a where the mask is set, else of b. */
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* The larger of the two; NaN if either is NaN. */
INLINE float highest(float a, float b) { return a > b || a != a ? a : b; }

#define LANE(j) (j)

/* The first `count` lanes; zero in the others. */
INLINE vf only(vf x, long count) {
    vi lane = {LANES(LANE)};
    return (vf)((vi)x & (lane < (int32_t)count));
}

INLINE float total(vf x) {
#if W > 8
    x += SHUFFLE(x, x, ACROSS8);
#endif
#if W > 4
    x += SHUFFLE(x, x, ACROSS4);
#endif
    x += SHUFFLE(x, x, ACROSS2);
    return x[0] + x[1];
}

/* e^x with an error of 1e-7 for x <= 88.7; below -87.3 it returns the value at -87.3, 1e-38. */
INLINE vf vexp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = larger(splat(-87.3f), x);
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

#define FAR 30000.0f /* beyond this limit, the slower functions of the C library are used */

/* Sine of half the angle, for |x| <= FAR, and the angle reduced to [-pi, pi], where the coefficients fit to 1e-8. */
INLINE vf half_sine(vf x, vf *angle) {
    const float magic = 12582912.0f;
    vf n = (x * 0.159154943091895336f + magic) - magic;
    vf r = x - n * 6.2831854820251465f;
    r = r - n * -1.7484556e-7f;
    vf square = r * r;
    vf s = splat(5.0882837541e-9f);
    s = s * square - 1.5475832651e-6f;
    s = s * square + 2.6040784233e-4f;
    s = s * square - 2.0833322486e-2f;
    s = s * square + 4.9999999787e-1f;
    *angle = r;
    return s * r;
}

INLINE vf vcos(vf x) {
    vf angle, s = half_sine(x, &angle);
    return 1.0f - (s + s) * s;
}

/* Sine and cosine from the sine of half the angle, so that no quadrant has to be determined. */
INLINE void vsincos(vf x, vf *sine, vf *cosine) {
    vf angle, s = half_sine(x, &angle), twice = s + s, square = angle * angle;
    vf c = splat(-2.5440666397e-10f);
    c = c * square + 9.6719327183e-8f;
    c = c * square - 2.1700564300e-5f;
    c = c * square + 2.6041647651e-3f;
    c = c * square - 1.2499999840e-1f;
    c = c * square + 1.0f;
    *sine = twice * c;
    *cosine = 1.0f - twice * s;
}

/* 2^d for a whole number d; 0 below fp32's smallest normal number. NaN stays NaN. */
INLINE float power(float d) {
    if (!(d >= -126.0f)) return d != d ? d : 0.0f;
    union { int32_t bits; float value; } u = {((int32_t)(d > 127.0f ? 127.0f : d) + 127) << 23};
    return u.value;
}

/* sum + left * right. With `pairs`, each 32-bit lane holds two bf16 numbers, and both products are added. */
INLINE vf add_products(int pairs, vf sum, vf left, vf right) {
#if PAIRS
    if (pairs) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    return sum + left * right;
}

INLINE vf repeated(int pairs, float bits) {
#if PAIRS
    if (pairs) return (vf)_mm512_set1_ps(bits);
#endif
    return splat(bits);
}

/* A block of rows x (columns * W) of C (+)= A B factor, with A[r, k] at a[r * ar + k * ak] and B[k, j] at
   b[k * ldb + j]; with `pairs`, both hold `depth` pairs along k. */
INLINE void block(int pairs, int rows, int columns, int add, float factor, const float *a, long ar, long ak,
                  const float *b, long ldb, float *c, long ldc, long depth) {
    vf sum[MR][NV];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) sum[r][j] = add ? load(c + r * ldc + j * W) : (vf){0};
    for (long k = 0; k < depth; k++) {
        vf right[NV];
        for (int j = 0; j < columns; j++) right[j] = load(b + k * ldb + j * W);
        for (int r = 0; r < rows; r++) {
            vf left = repeated(pairs, a[r * ar + k * ak]);
            for (int j = 0; j < columns; j++) sum[r][j] = add_products(pairs, sum[r][j], left, right[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) store(c + r * ldc + j * W, sum[r][j] * factor);
}

INLINE void blocks(int pairs, int add, float factor, long m, long n, long depth, const float *a, long ar, long ak,
                   const float *b, long ldb, float *c, long ldc) {
    for (long j = 0; j < n;) {
        int columns = n - j >= NV * W ? NV : 1;
        for (long i = 0, rows; i < m; i += rows) {
            const float *from = a + i * ar;
            float *to = c + i * ldc + j;
            rows = m - i >= MR ? MR : 1;
            if (rows == MR && columns == NV) block(pairs, MR, NV, add, factor, from, ar, ak, b + j, ldb, to, ldc, depth);
            else if (rows == MR) block(pairs, MR, 1, add, factor, from, ar, ak, b + j, ldb, to, ldc, depth);
            else if (columns == NV) block(pairs, 1, NV, add, factor, from, ar, ak, b + j, ldb, to, ldc, depth);
            else block(pairs, 1, 1, add, factor, from, ar, ak, b + j, ldb, to, ldc, depth);
        }
        j += columns * W;
    }
}

/* C [m, n] (+)= A [m, depth] B [depth, n]; n is a multiple of W. */
INLINE void product(int add, long m, long n, long depth, const float *a, long ar, long ak, const float *b, long ldb,
                    float *c, long ldc) {
    blocks(0, add, 1.0f, m, n, depth, a, ar, ak, b, ldb, c, ldc);
}

/* For a list of constants with the caller's names: their numbers, and their names in order. */
#define NUMBER(constant, name) constant,
#define NAME(constant, name) name " "

/* The types of the caller's tensors; PAIRED: bf16 numbers that are read two at a time, unconverted. */
#define EACH_TYPE(ONE) ONE(FLOAT32, "float32") ONE(BFLOAT16, "bfloat16")
enum { EACH_TYPE(NUMBER) PAIRED };

INLINE float number(const void *p, int type, long i) {
    if (type == FLOAT32) return ((const float *)p)[i];
    union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)p)[i] << 16};
    return u.value;
}

INLINE vf numbers(const void *p, int type, long i) {
    if (type == FLOAT32) return load((const float *)p + i);
    return (vf)(__builtin_convertvector(*(const vh *)((const uint16_t *)p + i), vu) << 16);
}

INLINE void write_number(void *p, int type, long i, float x) {
    if (type == FLOAT32) {
        ((float *)p)[i] = x;
        return;
    }
    union { float value; uint32_t bits; } u = {x};
    uint32_t even = u.bits + 0x7fff + ((u.bits >> 16) & 1);
    ((uint16_t *)p)[i] = x != x ? 0x7fc0 : (uint16_t)(even >> 16);
}

/* Round to the nearest bf16 numbers. */
INLINE vf nearest(vf x) {
    vu bits = (vu)x, even = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    vi nan = x != x;
    return (vf)((even & ~(vu)nan) | ((vu)nan & 0x7fc00000));
}

INLINE void write_numbers(void *p, int type, long i, vf x) {
    if (type == FLOAT32) {
        store((float *)p + i, x);
        return;
    }
    *(vh *)((uint16_t *)p + i) = __builtin_convertvector((vu)nearest(x) >> 16, vh);
}

/* Transpose W rows of W floats in registers: swap ever larger off-diagonal squares. */
#define UPPER(j, s) ((j) & (s) ? (j) - (s) + W : (j))
#define LOWER(j, s) ((j) & (s) ? (j) + W : (j) + (s))
#define STAGE(s, up, low)                        \
    for (int i = 0; i < W; i++)                  \
        if (!(i & s)) {                          \
            vf one = row[i], two = row[i + s];   \
            row[i] = SHUFFLE(one, two, up);      \
            row[i + s] = SHUFFLE(one, two, low); \
        }
#define U1(j) UPPER(j, 1)
#define L1(j) LOWER(j, 1)
#define U2(j) UPPER(j, 2)
#define L2(j) LOWER(j, 2)
#define U4(j) UPPER(j, 4)
#define L4(j) LOWER(j, 4)
#define U8(j) UPPER(j, 8)
#define L8(j) LOWER(j, 8)

INLINE void transpose(vf row[W]) {
    STAGE(1, U1, L1)
    STAGE(2, U2, L2)
#if W > 4
    STAGE(4, U4, L4)
#endif
#if W > 8
    STAGE(8, U8, L8)
#endif
}

/* The lane sums of W vectors, one per lane: like `transpose` followed by additions, but without repeated work. */
#define FOLD(s, up, low) \
    for (int i = 0; i < W; i += 2 * s) row[i] = SHUFFLE(row[i], row[i + s], up) + SHUFFLE(row[i], row[i + s], low);

INLINE vf totals(vf row[W]) {
    FOLD(1, U1, L1)
    FOLD(2, U2, L2)
#if W > 4
    FOLD(4, U4, L4)
#endif
#if W > 8
    FOLD(8, U8, L8)
#endif
    return row[0];
}

/* Prefetch the next rows, which are too far apart for the processor to predict. */
INLINE void prefetch_rows(const void *x, int type, long stride, long tokens, long size) {
    long bytes = type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < size * bytes; i += 64) __builtin_prefetch((const char *)x + t * stride * bytes + i, 0, 2);
}

/* W numbers from place d on of a row that begins at number i, times a factor; PAIRED numbers are not converted. */
INLINE vf row_numbers(const void *x, int type, long i, long d, float scale) {
    if (type != PAIRED) return numbers(x, type, i + d) * scale;
    vf bits;
    memcpy(&bits, (const uint16_t *)x + i + 2 * d, sizeof bits);
    return bits;
}

INLINE float row_number(const void *x, int type, long i, long d, float scale) {
    if (type != PAIRED) return number(x, type, i + d) * scale;
    float bits;
    memcpy(&bits, (const uint16_t *)x + i + 2 * d, sizeof bits);
    return bits;
}

/* Read `tokens` rows of `size` numbers, `stride` numbers apart, and write them as [size, wide] with tokens in columns.
   PAIRED rows have `size` pairs. */
INLINE void pack_transposed(const void *x, int type, long stride, long tokens, long size, float scale, float *to,
                            long wide) {
    for (long t = 0; t < wide; t += W)
        for (long d = 0; d < size; d += W) {
            if (t + W <= tokens && d + W <= size) {
                vf row[W];
                for (int i = 0; i < W; i++) row[i] = row_numbers(x, type, (t + i) * stride, d, scale);
                transpose(row);
                for (int i = 0; i < W; i++) store(to + (d + i) * wide + t, row[i]);
                continue;
            }
            for (long i = d; i < d + W && i < size; i++)
                for (long j = t; j < t + W; j++)
                    to[i * wide + j] = j < tokens ? row_number(x, type, j * stride, i, scale) : 0.0f;
        }
}

/* The inverse: from [size, wide] with tokens in columns to rows of tokens. */
INLINE void unpack_transposed(const float *from, long wide, void *x, int type, long stride, long tokens, long size,
                        float scale) {
    for (long t = 0; t < tokens; t += W)
        for (long d = 0; d < size; d += W) {
            if (t + W <= tokens && d + W <= size) {
                vf row[W];
                for (int i = 0; i < W; i++) row[i] = load(from + (d + i) * wide + t) * scale;
                transpose(row);
                for (int i = 0; i < W; i++) write_numbers(x, type, (t + i) * stride + d, row[i]);
                continue;
            }
            for (long j = t; j < t + W && j < tokens; j++)
                for (long i = d; i < d + W && i < size; i++)
                    write_number(x, type, j * stride + i, from[i * wide + j] * scale);
        }
}

#endif
