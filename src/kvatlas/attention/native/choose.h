// What a reader that chooses tokens does at every step: speculated scores on a few columns, and the best of a row.
#pragma once
#include <algorithm>
#include <functional>
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

// index [rows, width]: the count[r] best of rank [rows, n] in ascending order, which lets a fetch run through memory;
// ties go to the lower slot. The rest is 0.
static void choose(const float* rank, const int64_t* count, int64_t* index, int64_t rows, int64_t n, int64_t width,
                   int64_t threads) {
    for_each(threads, rows, [&](int64_t r) {
        const float* mine = rank + r * n;
        int64_t best = std::min(count[r], n), at = 0;
        if (best > 0) {
            std::vector<float> sorted(mine, mine + n);
            std::nth_element(sorted.begin(), sorted.begin() + (best - 1), sorted.end(), std::greater<float>());
            float least = sorted[best - 1];
            int64_t ties = best - std::count_if(mine, mine + n, [&](float x) { return x > least; });
            for (int64_t i = 0; i < n && at < best; i++)
                if (mine[i] > least || (mine[i] == least && ties-- > 0)) index[r * width + at++] = i;
        }
        for (; at < width; at++) index[r * width + at] = 0;
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
