// What a reader that chooses tokens does at every step: speculated scores on a few columns, and the best of a row.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vec.h"

struct Speculation {
    const char* q;     // [B, H, G, d], contiguous
    const char* keys;  // [B, H, n, d], strides below in bytes
    int64_t stride[3];
    const int64_t* lengths;  // [B, H]
    const int64_t* hole;     // [B, H] or null: a slot that does not count
    int64_t batch, heads, group, dim, n;
    float scale, alpha;
    int64_t combine;  // 0 mean, 1 max, 2 sum
    float* rank;      // [B, H, n]: combined weights, -1 where there is nothing
    int64_t* near;    // [B, H]: slots that any query head scores within alpha of its own best
};

// One KV head: scores of its G query heads, their softmax, and both results.
template <class T> static void speculate_head(const Speculation& c, int64_t row) {
    int64_t b = row / c.heads, h = row % c.heads, length = c.lengths[row];
    int64_t skip = c.hole ? c.hole[row] : -1;
    std::vector<float> scores(c.group * length), q(c.group * c.dim), top(c.group, -INFINITY), sum(c.group, 0.0f);
    for (int64_t i = 0; i < c.group * c.dim; i++) q[i] = to_float(((const T*)c.q)[row * c.group * c.dim + i]) * c.scale;
    std::vector<float> turned(c.dim * LANES);  // LANES keys, [dim][LANES]: sums then need no reduction across lanes
    for (int64_t first = 0; first < length; first += LANES) {
        int count = std::min<int64_t>(LANES, length - first);
        for (int j = 0; j < count; j++) {
            const T* from = (const T*)(c.keys + b * c.stride[0] + h * c.stride[1] + (first + j) * c.stride[2]);
            for (int64_t i = 0; i < c.dim; i++) turned[i * LANES + j] = to_float(from[i]);
        }
        for (int64_t g = 0; g < c.group; g++) {
            Floats dot{};
            for (int64_t i = 0; i < c.dim; i++) dot += load(&turned[i * LANES]) * q[g * c.dim + i];
            for (int j = 0; j < count; j++) {
                float score = first + j == skip ? -INFINITY : dot[j];
                scores[g * length + first + j] = score;
                top[g] = std::max(top[g], score);
            }
        }
    }
    float* rank = c.rank + row * c.n;
    std::fill(rank, rank + c.n, -1.0f);
    std::fill(rank, rank + length, 0.0f);
    std::vector<char> near(length, 0);
    for (int64_t g = 0; g < c.group; g++) {
        float* mine = &scores[g * length];
        float least = top[g] - c.alpha;
        for (int64_t s = 0; s < length; s++) near[s] |= mine[s] > least;
        int64_t s = 0;
        Floats part{};
        for (; s + LANES <= length; s += LANES) {
            Floats e = exp2_of((load(mine + s) - top[g]) * 1.44269504f);
            store(mine + s, e);
            part += e;
        }
        for (; s < length; s++) sum[g] += mine[s] = std::exp(mine[s] - top[g]);
        sum[g] += total(part);
        float share = c.combine == 0 ? 1.0f / (sum[g] * c.group) : 1.0f / sum[g];
        for (s = 0; s < length; s++)
            rank[s] = c.combine == 1 ? std::max(rank[s], mine[s] * share) : rank[s] + mine[s] * share;
    }
    if (skip >= 0 && skip < length) rank[skip] = -1.0f;
    c.near[row] = std::count(near.begin(), near.end(), 1);
}

template <class T> static void speculate(const Speculation& c, int64_t threads) {
    for_each(threads, c.batch * c.heads, [&](int64_t row) { speculate_head<T>(c, row); });
}

// Floats and whole numbers in the same order, so that a search by halves passes every float once.
static inline float float_at(int32_t place) {
    uint32_t bits = place >= 0 ? place : place ^ 0x7fffffff;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline int32_t place_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

static inline int64_t count_from(const float* x, int64_t n, float least) {
    Ints below{};  // true is -1
    int64_t i = 0, count = 0;
    for (; i + LANES <= n; i += LANES) below += load(x + i) >= least;
    for (; i < n; i++) count += x[i] >= least;
    for (int j = 0; j < LANES; j++) count -= below[j];
    return count;
}

static inline float largest_of(const float* x, int64_t n) {
    Floats top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) top = maximum(load(x + i), top);
    float best = largest(top);
    for (; i < n; i++) best = std::max(best, x[i]);
    return best;
}

struct Threshold {
    float least;
    int64_t reached;  // how many of x are no less
};

// A float that exactly `best` of x reach or, where ties forbid that, the largest one that more reach.
static Threshold threshold(const float* x, int64_t n, int64_t best) {
    int64_t low = place_of(-INFINITY), high = int64_t(place_of(largest_of(x, n))) + 1, reached = n;
    while (reached != best && high - low > 1) {  // enough reach low, too few reach high
        int64_t middle = low + (high - low) / 2, count = count_from(x, n, float_at(middle));
        if (count >= best)
            low = middle, reached = count;
        else
            high = middle;
    }
    return {float_at(low), reached};
}

// The places of the `best` largest of x in ascending order; of a tie the first. Without branches: they would be guessed
// wrong. Returns how many it found.
static int64_t places(const float* x, int64_t n, int64_t best, int64_t* to) {
    auto [least, reached] = threshold(x, n, best);
    int64_t at = 0;
    if (reached == best) {
        for (int64_t i = 0; i < n && at < best; i++) to[at] = i, at += x[i] >= least;
        return at;
    }
    int64_t ties = best - std::count_if(x, x + n, [bar = least](float y) { return y > bar; });
    for (int64_t i = 0; i < n && at < best; i++) {
        to[at] = i;
        at += (x[i] > least) | ((x[i] == least) & (ties > 0));
        ties -= x[i] == least;
    }
    return at;
}

// index [rows, width]: the count[r] best of rank [rows, n] in ascending order, which lets a fetch run through memory.
// The rest is 0.
static void choose(const float* rank, const int64_t* count, int64_t* index, int64_t rows, int64_t n, int64_t width,
                   int64_t threads) {
    for_each(threads, rows, [&](int64_t r) {
        int64_t *to = index + r * width, best = std::min({count[r], n, width});
        int64_t found = best > 0 ? places(rank + r * n, n, best, to) : 0;
        std::fill(to + found, to + width, 0);
    });
}

// to[b, h, i] = from[b, h, index[b, h, i]] (i itself without an index), rows of `bytes`; strides in bytes (b, h, slot).
static void copy_rows(char* to, const char* from, const int64_t* index, int64_t batch, int64_t heads, int64_t n,
                      int64_t bytes, const int64_t* stride, int64_t threads) {
    for_each(threads, batch * heads, [&](int64_t row) {
        char* mine = to + row / heads * stride[0] + row % heads * stride[1];
        const char* theirs = from + row / heads * stride[3] + row % heads * stride[4];
        if (!index && stride[2] == bytes && stride[5] == bytes) {
            memcpy(mine, theirs, n * bytes);
            return;
        }
        for (int64_t i = 0; i < n; i++)
            memcpy(mine + i * stride[2], theirs + (index ? index[row * n + i] : i) * stride[5], bytes);
    });
}
