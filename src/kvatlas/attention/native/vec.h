// One vector of floats and what the kernels do with it. With AVX-512 a vector has 16 lanes, otherwise 8; everything
// else in this folder is written once, in terms of LANES.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(KVATLAS_GENERIC)
#define KVATLAS_AVX512 1
#endif
#if defined(KVATLAS_AVX512) && defined(__AVX512BF16__)
#define KVATLAS_BF16 1
#endif
#if defined(KVATLAS_AVX512) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define KVATLAS_AMX 1
#endif
#if defined(KVATLAS_BF16) && !defined(KVATLAS_AMX)
#define KVATLAS_PAIRS 1  // vdpbf16ps beats two multiply-adds: AMD
#endif

#ifdef KVATLAS_AVX512
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = LANES * 4;  // bytes

typedef float Floats __attribute__((vector_size(LINE)));
typedef int32_t Ints __attribute__((vector_size(LINE)));
typedef uint32_t Words __attribute__((vector_size(LINE)));  // a line of memory: LANES floats or 2 * LANES bf16

// body(0) .. body(N-1), written out: GCC keeps an array in registers only where every index is a constant early on.
#define INLINE __attribute__((always_inline))
template <int N, class Body> INLINE static inline void unroll(Body body) {
    if constexpr (N > 0) {
        unroll<N - 1>(body);
        body(N - 1);
    }
}

struct bf16 {
    uint16_t bits;
};

static inline Floats splat(float x) { return x - Floats{}; }
static inline Words splat_word(uint32_t x) { return x - Words{}; }

static inline Floats load(const float* from) {
    Floats x;
    memcpy(&x, from, LINE);
    return x;
}
static inline void store(float* to, Floats x) { memcpy(to, &x, LINE); }

// To the second cache: the first has room for few lines under way, so fetches to there wait for each other.
static inline void fetch_line(const char* from) { __builtin_prefetch(from, 0, 2); }

// A row is whole lines and maybe a part of one, which must not be read past its end.
struct Row {
    int lines;
    int tail;  // words in the last line, 1..LANES
    explicit Row(int64_t bytes) : lines((bytes + LINE - 1) / LINE), tail((bytes - int64_t(lines - 1) * LINE) / 4) {}
    int words(int line) const { return line + 1 < lines ? LANES : tail; }
    int64_t padded() const { return int64_t(lines) * LINE; }
};

static inline Words load_words(const char* from, int words) {
#ifdef KVATLAS_AVX512
    return (Words)_mm512_maskz_loadu_epi32(__mmask16((1u << words) - 1), from);
#else
    Words x{};
    if (__builtin_expect(words == LANES, 1))
        memcpy(&x, from, LINE);
    else
        memcpy(&x, from, words * 4);
    return x;
#endif
}

// bf16 is the upper half of a float; a line of bf16 gives the even and the odd elements.
static inline Floats evens(Words pair) { return (Floats)(pair << 16); }
static inline Floats odds(Words pair) { return (Floats)(pair & 0xffff0000u); }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void from_float(float& to, float x) { to = x; }
static inline void from_float(bf16& to, float x) {  // to the nearest, ties to even, NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// sum + a . b, lane by lane; a word holds one float or two bf16.
template <class T> static inline Floats dot_step(Floats sum, Words a, Words b);
template <> inline Floats dot_step<float>(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }
template <> inline Floats dot_step<bf16>(Floats sum, Words a, Words b) {
#ifdef KVATLAS_BF16
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + evens(a) * evens(b) + odds(a) * odds(b);
#endif
}

static inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

static inline float largest(Floats x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static inline float total(Floats x) {
#ifdef KVATLAS_AVX512
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

// 2 to the power x: exact at 0, relative error below 2e-7, zero below 2^-126, NaN stays NaN. Needs x < 128.
static inline Floats exp2_of(Floats x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    Floats low = splat(-126.0f);
    Floats in = x < low ? low : x;
    Floats shifted = in + shift;
    Floats r = in - (shifted - shift);
    Floats p = splat(1.5353340e-4f);
    p = p * r + 1.3398901e-3f;
    p = p * r + 9.6184379e-3f;
    p = p * r + 5.5503324e-2f;
    p = p * r + 2.4022648e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    Floats y = (Floats)((Words)p + ((Words)shifted << 23));
    return x < low ? Floats{} : y;
}
