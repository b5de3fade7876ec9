// Dot products of many rows in memory with a few vectors at hand: scores of a decode step, and skinny matrix products.
#pragma once
#include "vec.h"

#ifdef KVATLAS_AVX512
constexpr int MOST = 4;  // vectors at once: 4 rows x 4 vectors are 16 of 32 registers
#else
constexpr int MOST = 2;
#endif

// Lane i of each 128-bit part of the result is a partial sum of the i-th argument.
static inline Floats sum_quads(Floats a, Floats b, Floats c, Floats d) {
#ifdef KVATLAS_AVX512
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    return (Floats)_mm512_add_ps((__m512)low, (__m512)high);
#else
    Floats out;
    for (int i = 0; i < LANES; i += 4) {
        out[i] = (a[i] + a[i + 1]) + (a[i + 2] + a[i + 3]);
        out[i + 1] = (b[i] + b[i + 1]) + (b[i + 2] + b[i + 3]);
        out[i + 2] = (c[i] + c[i + 1]) + (c[i + 2] + c[i + 3]);
        out[i + 3] = (d[i] + d[i + 1]) + (d[i + 2] + d[i + 3]);
    }
    return out;
#endif
}

// LANES / 4 results of sum_quads to one vector: lane i is the whole sum of row i.
static inline Floats join_quads(const Floats* part) {
#ifdef KVATLAS_AVX512
    __m512 a = (__m512)part[0], b = (__m512)part[1], c = (__m512)part[2], d = (__m512)part[3];
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
#else
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = part[i / 4][i % 4] + part[i / 4][i % 4 + 4];
    return out;
#endif
}

// 4 rows with Q vectors (zero-padded to whole lines, `step` bytes apart): part[j * LANES / 4] = sum_quads of vector j.
template <class T, int Q>
static inline void dot_quad(const char* const* rows, Row row, const char* x, int64_t step, Floats* part) {
    Floats sum[Q][4] = {};
    for (int l = 0; l < row.lines; l++) {
        int words = row.words(l);
        Words r[4];
        for (int i = 0; i < 4; i++) r[i] = load_words(rows[i] + l * LINE, words);
        for (int j = 0; j < Q; j++) {
            Words y = load_words(x + j * step + l * LINE, LANES);
            for (int i = 0; i < 4; i++) sum[j][i] = dot_step<T>(sum[j][i], r[i], y);
        }
    }
    for (int j = 0; j < Q; j++) part[j * (LANES / 4)] = sum_quads(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
}

// 4 rows with `count` vectors. A vector's sums are the same whatever `count` is.
template <class T>
static inline void dot_quads(const char* const* rows, Row row, const char* x, int64_t step, int count, Floats* part) {
    for (int j = 0; j < count; j += MOST) {
        const char* from = x + j * step;
        Floats* to = part + j * (LANES / 4);
        switch (count - j < MOST ? count - j : MOST) {
            case 1: dot_quad<T, 1>(rows, row, from, step, to); break;
            case 2: dot_quad<T, 2>(rows, row, from, step, to); break;
#ifdef KVATLAS_AVX512
            case 3: dot_quad<T, 3>(rows, row, from, step, to); break;
            case 4: dot_quad<T, 4>(rows, row, from, step, to); break;
#endif
        }
    }
}

// LANES rows with `count` vectors: part[j * LANES / 4] becomes, for each vector j, its LANES dot products.
template <class T>
static inline void dot_rows(const char* const* rows, Row row, const char* x, int64_t step, int count, Floats* part) {
    for (int quad = 0; quad < LANES / 4; quad++) dot_quads<T>(rows + quad * 4, row, x, step, count, part + quad);
    for (int j = 0; j < count; j++) part[j * (LANES / 4)] = join_quads(part + j * (LANES / 4));
}
