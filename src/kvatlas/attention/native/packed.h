// Attention over keys and values kept as codes of 4 or 8 bits (see Packed in tiles.py), and the making of such codes.
// A block of rows is decoded into a scratch of floats that stays in the nearest cache; nothing else is ever decoded.
#pragma once
#include "decode.h"

// LANES bytes, each to a whole number.
static inline Ints load_bytes(const char* from) {
#ifdef KVATLAS_AVX512
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#endif
}

static inline Floats floats_of(Ints x) {
#ifdef KVATLAS_AVX512
    return (Floats)_mm512_cvtepi32_ps((__m512i)x);
#else
    return (Floats)_mm256_cvtepi32_ps((__m256i)x);
#endif
}

static inline void store_low_bytes(uint8_t* to, Words x) {
#ifdef KVATLAS_AVX512
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < LANES; i++) to[i] = uint8_t(x[i]);
#endif
}

constexpr int MAX_DIM = 256;

// How a row of codes is laid out. 4 bits: byte i holds element i and, in its upper half, element i + (dim + 1) / 2.
struct Packing {
    int dim, bits, group, groups, half;

    Packing(int64_t dim, int64_t bits, int64_t group)
        : dim(dim), bits(bits), group(std::min(dim, group)), groups((dim + this->group - 1) / this->group),
          half(bits == 4 ? (dim + 1) / 2 : dim) {}
};

// Up to LANES bytes of codes that follow one another, all of one group or, with 4 bits, of one for each half.
struct Chunk {
    int first, count, lower, upper;
};

// The chunks of a row. Where a stretch is longer than a vector its last chunk reaches back over the one before.
static std::vector<Chunk> chunks_of(const Packing& p) {
    std::vector<Chunk> chunks;
    auto group_of = [&](int element) { return element / p.group; };
    int upper = p.bits == 4 ? p.half : 0;
    for (int first = 0, end; first < p.half; first = end) {
        int lower_group = group_of(first), upper_group = group_of(first + upper);
        for (end = first + 1; end < p.half; end++)
            if (group_of(end) != lower_group || group_of(end + upper) != upper_group) break;
        for (int at = first; at < end; at += LANES) {
            int from = end - first < LANES ? first : std::min(at, end - LANES);
            chunks.push_back({from, std::min(LANES, end - from), lower_group, upper_group});
        }
    }
    return chunks;
}

// Where the codes and scales of one side of one (sequence, KV head) are. Distances are in bytes.
struct Side {
    const char *codes, *scales;
    int64_t code_step, scale_step;

    void prefetch(int64_t slot) const {
        fetch_line(codes + slot * code_step);
        fetch_line(scales + slot * scale_step);
    }
};

struct PackedSource {
    Side k, v;
    const int64_t* index;  // or null: slots in order

    int64_t slot(int64_t i) const { return index ? index[i] : i; }
};

static inline Floats broadcast(const float* from) {
#ifdef KVATLAS_AVX512
    return (Floats)_mm512_set1_ps(*from);
#else
    return (Floats)_mm256_broadcast_ss(from);
#endif
}

static inline void convert_pair(const char* halves, float* to) {
    int pair;
    memcpy(&pair, halves, 4);
    _mm_storel_pi((__m64*)to, _mm_cvtph_ps(_mm_cvtsi32_si128(pair)));
}

// Rows of codes that become rows of floats, `to_step` floats apart; `scales` [count, pairs] holds factors and zeros.
struct Unpacked {
    const char* rows[BLOCK];
    const float* scales;
    int count, pairs;
    float* to;
    int64_t to_step;
};

// One chunk of every row; `half` as in Packing.
template <int Bits> static void unpack_chunk(const Unpacked& u, Chunk chunk, int half) {
    int count = u.count, pairs = u.pairs;
    const float *lower = u.scales + chunk.lower * 2, *upper = u.scales + chunk.upper * 2;
    float* to = u.to + chunk.first;
    int64_t step = u.to_step;
    for (int i = 0; i < count; i++, lower += pairs, upper += pairs, to += step) {
        const char* from = u.rows[i] + chunk.first;
        if (__builtin_expect(chunk.count == LANES, 1)) {
            Ints bytes = load_bytes(from);
            store(to, floats_of(Bits == 4 ? bytes & 15 : bytes) * broadcast(lower) + broadcast(lower + 1));
            if (Bits == 4) store(to + half, floats_of(bytes >> 4) * broadcast(upper) + broadcast(upper + 1));
            continue;
        }
        for (int j = 0; j < chunk.count; j++) {
            int byte = uint8_t(from[j]);
            to[j] = (Bits == 4 ? byte & 15 : byte) * lower[0] + lower[1];
            if (Bits == 4) to[half + j] = (byte >> 4) * upper[0] + upper[1];
        }
    }
}

template <class O> struct PackedDecode : Decode<float, O> {
    using Base = Decode<float, O>;
    Packing packing;
    std::vector<Chunk> chunks;
    int64_t row_floats;

    PackedDecode(const Base& base, const Packing& packing)
        : Base(base), packing(packing), chunks(chunks_of(packing)), row_floats(base.row.padded() / 4) {}

    // Rows at these slots become floats, row_floats apart.
    void unpack(const Side& side, const int64_t* slots, int count, float* to) const {
        int groups = packing.groups;
        float scales[BLOCK * groups * 2];
        Unpacked u;
        u.scales = scales, u.count = count, u.pairs = groups * 2, u.to = to, u.to_step = row_floats;
        Side from = side;
        for (int i = 0; i < count; i++) u.rows[i] = from.codes + slots[i] * from.code_step;
        for (int i = 0; i < count; i++)
            for (int g = 0; g < groups; g++)
                convert_pair(from.scales + slots[i] * from.scale_step + g * 4, scales + (i * groups + g) * 2);
        for (const Chunk& chunk : chunks)
            packing.bits == 4 ? unpack_chunk<4>(u, chunk, packing.half) : unpack_chunk<8>(u, chunk, 0);
    }

    // As Decode::piece. One scratch serves first the keys and then the values of a block.
    void piece(const PackedSource& source, const float* q, int64_t first, int64_t end, Partial to, float* probs) const {
        int group = this->group;
        float score[group * BLOCK];
        alignas(64) float scratch[BLOCK * row_floats];
        int64_t slots[BLOCK];
        this->clear(to);
        Block block, none;
        for (int i = 0; i < BLOCK; i++) block.k[i] = block.v[i] = (const char*)(scratch + i * row_floats);
        for (; first < end; first += BLOCK) {
            int count = block.count = int(std::min<int64_t>(BLOCK, end - first));
            for (int i = 0; i < count; i++) slots[i] = source.slot(first + i);
            for (int i = count; i % LANES; i++) block.k[i] = block.k[count - 1];
            for (int i = 0; i < count; i++) source.v.prefetch(slots[i]);
            unpack(source.k, slots, count, scratch);
            this->score_block(block, none, q, score);
            if (probs) this->keep_scores(block, score, first, probs);
            for (int j = 0; j < group; j++) this->soften(j, score + j * BLOCK, to);
            for (int64_t i = first + BLOCK; i < std::min(end, first + 2 * BLOCK); i++) source.k.prefetch(source.slot(i));
            unpack(source.v, slots, count, scratch);
            this->weigh_all(block, score, to.values);
        }
    }
};

// ------------------------------------------------------------------------------------------------- making codes

struct Quantise {
    const char* x;  // [rows, dim], contiguous
    uint8_t* codes;
    uint16_t* scales;  // [rows, groups, 2]
    int64_t rows;
    Packing packing;
};

// The least and the largest of x; NaN where one of them is NaN or infinite, so that a broken key stays one.
static inline void range_of(const float* x, int count, float& low, float& high) {
    Floats lows = splat(x[0]), highs = lows, broken{};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats here = load(x + i);
        lows = here < lows ? here : lows;
        highs = maximum(here, highs);
        broken += here * 0.0f;
    }
    low = -largest(-lows), high = largest(highs);
    float zero = total(broken);
    for (; i < count; i++) low = std::min(low, x[i]), high = std::max(high, x[i]), zero += x[i] * 0.0f;
    low += zero;
}

// One group from x to codes. Zero is rounded down, so that the least element is not cut off; what zero's rounding adds
// to the range goes into the scale. Writes up to LANES - 1 codes past the end.
static void quantise_group(const float* x, int count, int bits, uint8_t* codes, uint16_t* scale) {
    const float most = 65504, least = 5.9604645e-8f, magic = 12582912.0f;  // of float16; 1.5 * 2^23
    float levels = bits == 4 ? 15 : 255, low, high;
    range_of(x, count, low, high);
    auto within = [](float y, float a, float b) { return y < a ? a : y > b ? b : y; };
    scale[1] = _cvtss_sh(within(low - std::fabs(low) * 0x1p-11f, -most, most), 0);
    float zero = _cvtsh_ss(scale[1]);
    scale[0] = _cvtss_sh(within((high - zero) / levels, least, most), 0);
    float factor = _cvtsh_ss(scale[0]);
    for (int i = 0; i < count; i += LANES) {
        Floats y = (load(x + i) - zero) / factor;
        y = y < Floats{} ? Floats{} : y;
        y = y > splat(levels) ? splat(levels) : y;
        store_low_bytes(codes + i, (Words)(y + magic));
    }
}

template <class T> static void quantise(const Quantise& c, int64_t threads) {
    const Packing& p = c.packing;
    constexpr int64_t ROWS = 256;
    for_each(threads, (c.rows + ROWS - 1) / ROWS, [&](int64_t part) {
        alignas(64) float x[MAX_DIM + LANES] = {};
        uint8_t codes[MAX_DIM + LANES];
        for (int64_t r = part * ROWS; r < std::min(c.rows, (part + 1) * ROWS); r++) {
            for (int d = 0; d < p.dim; d++) x[d] = to_float(((const T*)c.x)[r * p.dim + d]);
            for (int g = 0; g < p.groups; g++) {
                int first = g * p.group, count = std::min(p.group, p.dim - first);
                quantise_group(x + first, count, p.bits, codes + first, c.scales + (r * p.groups + g) * 2);
            }
            codes[p.dim] = 0;
            uint8_t* to = c.codes + r * p.half;
            if (p.bits == 8)
                memcpy(to, codes, p.dim);
            else
                for (int i = 0; i < p.half; i++) to[i] = codes[i] | codes[p.half + i] << 4;
        }
    });
}
