// Dot products of many rows in memory with a few vectors at hand: scores of a decode step, and skinny matrix products.
#pragma once
#include <type_traits>

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

// Vectors are laid out once, in one of two forms. Spread, as what a line of a row becomes in registers: floats, for bf16
// the even elements of the line and then the odd ones. Or paired (`Own<bf16>`): bf16 as they are, padded to whole lines,
// for vdpbf16ps. AMD takes 32 products a cycle that way; Intel two cycles, so there two plain multiply-adds are as fast.
template <class T> constexpr int HALVES = sizeof(T) == 2 ? 2 : 1;

template <class T> struct OwnForm {
    using type = float;
};
#ifdef KVATLAS_PAIRS
template <> struct OwnForm<bf16> {
    using type = bf16;
};
#endif
template <class T> using Own = typename OwnForm<T>::type;  // how vectors that are of type T are best laid out for rows of T

template <class T, class X = float> static inline int64_t spread_size(Row row) {  // in elements X
    return int64_t(row.lines) * HALVES<T> * LANES;
}

template <class T, class X = float> static inline int64_t spread_place(int64_t d) {  // where element d goes
    if (HALVES<T> == 1 || HALVES<X> == 2) return d;
    return (d / (2 * LANES) * 2 + d % 2) * LANES + d % (2 * LANES) / 2;
}

template <class T, class X, class From> static inline void spread(const From* from, int64_t dim, X* to) {
    if constexpr (std::is_same_v<X, From>)
        if (spread_place<T, X>(dim - 1) == dim - 1) return (void)memcpy(to, from, dim * sizeof(X));
    for (int64_t d = 0; d < dim; d++) from_float(to[spread_place<T, X>(d)], to_float(from[d]));
}

template <class T> static inline void spread_line(const char* from, int words, Floats* to) {
    Words raw = load_words(from, words);
    if (HALVES<T> == 2)
        to[0] = evens(raw), to[1] = odds(raw);
    else
        to[0] = (Floats)raw;
}

// 4 rows with Q spread vectors: part[j * LANES / 4] = sum_quads of vector j.
template <class T, int Q>
static inline void dot_quad(const char* const* rows, Row row, const float* x, Floats* part, int64_t ahead) {
    int64_t size = spread_size<T>(row);
    Floats sum[Q][4];
    unroll<Q * 4>([&](int u) INLINE { sum[u / 4][u % 4] = Floats{}; });
    for (int l = 0; l < row.lines; l++) {
        Floats r[4][2];
        unroll<4>([&](int i) INLINE { spread_line<T>(rows[i] + l * LINE, row.words(l), r[i]); });
        if (ahead) unroll<4>([&](int i) INLINE { fetch_line(rows[i] + l * LINE + ahead); });
        unroll<HALVES<T> * Q>([&](int u) INLINE {
            int h = u / Q, j = u % Q;
            Floats y = load(x + j * size + (l * HALVES<T> + h) * LANES);
            unroll<4>([&](int i) INLINE { sum[j][i] += r[i][h] * y; });
        });
    }
    unroll<Q>([&](int j) INLINE { part[j * (LANES / 4)] = sum_quads(sum[j][0], sum[j][1], sum[j][2], sum[j][3]); });
}

#ifdef KVATLAS_PAIRS
// The same with Q paired vectors.
template <class T, int Q>
static inline void dot_quad(const char* const* rows, Row row, const bf16* x, Floats* part, int64_t ahead) {
    int64_t size = spread_size<T, bf16>(row);
    Floats sum[Q][4];
    unroll<Q * 4>([&](int u) INLINE { sum[u / 4][u % 4] = Floats{}; });
    for (int l = 0; l < row.lines; l++) {
        Words r[4];
        unroll<4>([&](int i) INLINE { r[i] = load_words(rows[i] + l * LINE, row.words(l)); });
        if (ahead) unroll<4>([&](int i) INLINE { fetch_line(rows[i] + l * LINE + ahead); });
        unroll<Q>([&](int j) INLINE {
            Words y = load_words((const char*)(x + j * size) + l * LINE, LANES);
            unroll<4>([&](int i) INLINE { sum[j][i] = dot_step<bf16>(sum[j][i], r[i], y); });
        });
    }
    unroll<Q>([&](int j) INLINE { part[j * (LANES / 4)] = sum_quads(sum[j][0], sum[j][1], sum[j][2], sum[j][3]); });
}
#endif

// 4 rows with `count` vectors. A vector's sums are the same whatever `count` is.
template <class T, class X>
static inline void dot_quads(const char* const* rows, Row row, const X* x, int count, Floats* part, int64_t ahead = 0) {
    for (int j = 0; j < count; j += MOST) {
        const X* from = x + j * spread_size<T, X>(row);
        Floats* to = part + j * (LANES / 4);
        int64_t fetch = j ? 0 : ahead;
        switch (count - j < MOST ? count - j : MOST) {
            case 1: dot_quad<T, 1>(rows, row, from, to, fetch); break;
            case 2: dot_quad<T, 2>(rows, row, from, to, fetch); break;
#ifdef KVATLAS_AVX512
            case 3: dot_quad<T, 3>(rows, row, from, to, fetch); break;
            case 4: dot_quad<T, 4>(rows, row, from, to, fetch); break;
#endif
        }
    }
}

// LANES rows with `count` vectors: part[j * LANES / 4] becomes, for each vector j, its LANES dot products.
template <class T, class X>
static inline void dot_rows(const char* const* rows, Row row, const X* x, int count, Floats* part, int64_t ahead = 0) {
    for (int quad = 0; quad < LANES / 4; quad++) dot_quads<T>(rows + quad * 4, row, x, count, part + quad, ahead);
    for (int j = 0; j < count; j++) part[j * (LANES / 4)] = join_quads(part + j * (LANES / 4));
}
