// How much attention each key received: mass[h, j] = sum over queries i of exp(scale * q_i . k_j - lse_i).
// A panel of 16 queries x 2 vectors of keys is multiplied into L1 and summed from there; scores are never stored.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vec.h"

constexpr int QUERIES = 16;               // queries in a panel
constexpr int PANEL = QUERIES * LANES;    // floats of one half of it
constexpr int PAIRS = 128 / (2 * LANES);  // panels side by side that share a packed block of 128 keys
constexpr int KEYS = PAIRS * 2 * LANES;

struct MassCall {
    const char *q, *k;
    const float* lse;
    float* mass;
    int64_t heads, kv_heads, queries, keys, dim;
    int64_t q_head, q_step, k_head, k_step;  // strides in bytes
    int64_t first_query, window;             // window < 0: none
    bool causal;
    float scale;  // includes log2(e)
};

// Keys as [LANES-wide tile][word of the row][key]: what both AMX and the plain product want. Missing keys are zero.
static void pack_keys(const char* k, int64_t step, int count, int words, uint32_t* to) {
    for (int tile = 0; tile < KEYS / LANES; tile++)
        for (int lane = 0; lane < LANES; lane++) {
            int key = tile * LANES + lane;
            uint32_t* at = to + tile * words * LANES + lane;
            for (int w = 0; w < words; w++) {
                uint32_t word = 0;
                if (key < count) memcpy(&word, k + key * step + w * 4, 4);
                at[w * LANES] = word;
            }
        }
}

// Panel product without AMX: R rows of queries at a time against two tiles, in registers.
template <class T, int R>
static void multiply_rows(const char* q, int64_t step, const uint32_t* k, int words, float* to) {
    Floats sum[R][2];
    unroll<R>([&](int r) INLINE { sum[r][0] = sum[r][1] = Floats{}; });
    const char* keys = (const char*)k;
    for (int w = 0; w < words; w++) {
        Words a = load_words(keys + w * LINE, LANES), b = load_words(keys + (words + w) * LINE, LANES);
        unroll<R>([&](int r) INLINE {
            uint32_t word;
            memcpy(&word, q + r * step + w * 4, 4);
            sum[r][0] = dot_step<T>(sum[r][0], splat_word(word), a);
            sum[r][1] = dot_step<T>(sum[r][1], splat_word(word), b);
        });
    }
    unroll<R>([&](int r) INLINE {
        store(to + r * LANES, sum[r][0]);
        store(to + PANEL + r * LANES, sum[r][1]);
    });
}

template <class T> struct PanelProduct {
    int words;
    explicit PanelProduct(int words) : words(words) {}
    void operator()(const char* q, int64_t step, const uint32_t* k, float* to) const {
        constexpr int R = LANES == 16 ? 8 : 4;
        for (int r = 0; r < QUERIES; r += R) multiply_rows<T, R>(q + r * step, step, k, words, to + r * LANES);
    }
};

#ifdef KVATLAS_AMX
#include "amx.h"
// The same in tile registers: 0, 1 results; 2 queries; 3, 4 keys; 5, 6, 7 the last, shorter step along the row.
struct AmxPanelProduct {
    int words, steps, tail;
    explicit AmxPanelProduct(int words) : words(words), steps(words / 16), tail(words % 16) {
        TileShapes shapes;
        for (int t = 0; t < 5; t++) shapes.set(t, 16, 64);
        shapes.set(5, 16, tail ? tail * 4 : 64);
        shapes.set(6, tail ? tail : 16, 64);
        shapes.set(7, tail ? tail : 16, 64);
        shapes.use();
    }
    ~AmxPanelProduct() { _tile_release(); }
    void operator()(const char* q, int64_t step, const uint32_t* k, float* to) const {
        _tile_zero(0);
        _tile_zero(1);
        for (int s = 0; s < steps; s++) {
            _tile_loadd(2, q + s * 64, step);
            _tile_loadd(3, k + s * 256, 64);
            _tile_loadd(4, k + words * 16 + s * 256, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        if (tail) {
            _tile_loadd(5, q + steps * 64, step);
            _tile_loadd(6, k + steps * 256, 64);
            _tile_loadd(7, k + words * 16 + steps * 256, 64);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, to, 64);
        _tile_stored(1, to + PANEL, 64);
    }
};
#endif

// Sum over a panel's 16 queries of 2^(scale * score + base), for LANES keys.
static inline Floats fold(const float* score, const float* base, float scale) {
    Floats sum{};
    for (int r = 0; r < QUERIES; r++) sum += exp2_of(load(score + r * LANES) * scale + splat(base[r]));
    return sum;
}

// The same where some queries do not see some keys: key j is seen from position j .. j + window - 1.
static inline Floats fold_seen(const float* score, const float* base, float scale, int64_t position, int64_t key,
                               const MassCall& c) {
    Ints lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    Floats sum{};
    for (int r = 0; r < QUERIES; r++) {
        Floats p = exp2_of(load(score + r * LANES) * scale + splat(base[r]));
        int ago = int(std::clamp<int64_t>(position + r - key, -1, 1 << 30));  // of lane 0; -1: no lane is seen
        int newest = c.causal ? ago : LANES, oldest = c.window < 0 ? -1 : int(std::max<int64_t>(ago - c.window, -1));
        sum += ((lane > newest) | (lane <= oldest)) ? Floats{} : p;
    }
    return sum;
}

// One block of keys against all the queries that see it, of every query head of the KV head.
template <class T, class Product>
static void mass_block(const MassCall& c, const Product& product, const float* base, int64_t kv_head, int64_t key) {
    int words = c.dim * sizeof(T) / 4, count = std::min<int64_t>(KEYS, c.keys - key);
    alignas(64) uint32_t packed[KEYS * words];
    alignas(64) char rows[QUERIES * words * 4];
    alignas(64) float score[2][2 * PANEL];
    pack_keys(c.k + kv_head * c.k_head + key * c.k_step, c.k_step, count, words, packed);

    int64_t before = c.keys - c.queries;  // position of query 0
    int64_t from = std::max<int64_t>(c.first_query, c.causal ? key - before : 0), to = c.queries;
    if (c.window >= 0) to = std::min(to, key + count - 1 + c.window - before);
    from = std::max<int64_t>(0, from) / QUERIES * QUERIES;

    int64_t padded = (c.queries + QUERIES - 1) / QUERIES * QUERIES, group = c.heads / c.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float sum[KEYS] = {};
        for (int64_t row = from; row < to; row += QUERIES) {
            const char* q = c.q + head * c.q_head + row * c.q_step;
            int64_t step = c.q_step, position = before + row;
            if (row + QUERIES > c.queries) {  // do not read past the last query
                memset(rows, 0, sizeof(rows));
                for (int64_t r = 0; row + r < c.queries; r++) memcpy(rows + r * words * 4, q + r * step, words * 4);
                q = rows, step = words * 4;
            }
            const float* row_base = base + head * padded + row;
            int pairs = PAIRS;
            if (c.causal) pairs = std::clamp<int64_t>((position + QUERIES - 1 - key) / (2 * LANES) + 1, 0, PAIRS);
            if (pairs) product(q, step, packed, score[0]);
            for (int p = 0; p < pairs; p++) {
                // The next product is under way, in the tile unit, while this one is summed.
                if (p + 1 < pairs) product(q, step, packed + (p + 1) * 2 * LANES * words, score[(p + 1) & 1]);
                for (int half = 0; half < 2; half++) {
                    int64_t first = key + (p * 2 + half) * LANES;
                    const float* s = score[p & 1] + half * PANEL;
                    float* at = sum + (p * 2 + half) * LANES;
                    bool all = (!c.causal || first + LANES - 1 <= position) &&
                               (c.window < 0 || position + QUERIES - 1 - first < c.window);
                    Floats more = all ? fold(s, row_base, c.scale)
                                      : fold_seen(s, row_base, c.scale, position, first, c);
                    store(at, load(at) + more);
                }
            }
        }
        std::copy_n(sum, count, c.mass + head * c.keys + key);
    }
}

template <class T, class Product> static void column_mass(const MassCall& c, int64_t threads) {
    // -lse in base 2; rows that do not count get -inf, hence weight 0.
    int64_t padded = (c.queries + QUERIES - 1) / QUERIES * QUERIES;
    std::vector<float> base(c.heads * padded, -INFINITY);
    for (int64_t h = 0; h < c.heads; h++)
        for (int64_t i = std::max<int64_t>(0, c.first_query); i < c.queries; i++) {
            float lse = c.lse[h * c.queries + i];
            if (lse != -INFINITY) base[h * padded + i] = -lse * 1.44269504f;
        }
    int64_t blocks = (c.keys + KEYS - 1) / KEYS;  // early keys are seen by most queries: the largest tasks go first
    std::atomic<int64_t> next{0};
    parallel(std::min(threads, blocks * c.kv_heads), [&] {
        Product product(c.dim * sizeof(T) / 4);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks * c.kv_heads;)
            mass_block<T>(c, product, base.data(), i % c.kv_heads, i / c.kv_heads * KEYS);
    });
}
