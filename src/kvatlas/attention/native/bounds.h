// How well a page of keys could score at best, from the least and the largest value of each of its dimensions.
#pragma once
#include <algorithm>
#include <vector>

#include "dots.h"
#include "parallel.h"

constexpr int64_t PAGES = 256;        // pages per piece of work, at most
constexpr int64_t AHEAD = 4 * LANES;  // pages by which bounds are fetched before they are used, past the end or not

struct Bounds {
    const char* q;            // [B, H, G, dim], contiguous
    const char *low, *high;   // [B, H, n, dim], strides below in bytes
    int64_t low_step[3], high_step[3];
    const int64_t* pages;  // [B, H]
    int64_t batch, heads, group, dim, n;
    int64_t combine;  // 0 mean, 1 max, 2 sum
    float* rank;      // [B, H, n]: -inf past a row's pages
};

// sum_d max(q_d low_d, q_d high_d) = above . high + below . low with above = max(q, 0) and below = min(q, 0). Both are
// linear, so unless the best query head counts, the group is one vector.
template <class T> struct Queries {
    Row row;
    int64_t count;
    std::vector<float> above, below;

    Queries(const Bounds& c, int64_t r)
        : row(c.dim * sizeof(T)), count(c.combine == 1 ? c.group : 1), above(count * spread_size<T>(row)), below(above) {
        float share = c.combine == 0 ? 1.0f / c.group : 1.0f;
        const T* q = (const T*)c.q + r * c.group * c.dim;
        for (int64_t g = 0; g < c.group; g++)
            for (int64_t d = 0; d < c.dim; d++) {
                float x = to_float(q[g * c.dim + d]) * share;
                int64_t at = (count > 1 ? g : 0) * spread_size<T>(row) + spread_place<T>(d);
                above[at] += std::max(x, 0.0f);
                below[at] += std::min(x, 0.0f);
            }
    }
};

// Pages first .. end-1 of one row, LANES at a time; rows past the end repeat the last.
template <class T> static void bound_piece(const Bounds& c, int64_t r, int64_t first, int64_t end) {
    Queries<T> q(c, r);
    int64_t b = r / c.heads, h = r % c.heads;
    const char* low = c.low + b * c.low_step[0] + h * c.low_step[1];
    const char* high = c.high + b * c.high_step[0] + h * c.high_step[1];
    std::vector<Floats> over(q.count * (LANES / 4)), under(over);
    for (; first < end; first += LANES) {
        const char *lows[LANES], *highs[LANES];
        int count = int(std::min<int64_t>(LANES, end - first));
        for (int i = 0; i < LANES; i++) {
            int64_t page = first + std::min(i, count - 1);
            lows[i] = low + page * c.low_step[2], highs[i] = high + page * c.high_step[2];
        }
        dot_rows<T>(highs, q.row, q.above.data(), q.count, over.data(), AHEAD * c.high_step[2]);
        dot_rows<T>(lows, q.row, q.below.data(), q.count, under.data(), AHEAD * c.low_step[2]);
        Floats best = over[0] + under[0];
        for (int64_t j = 1; j < q.count; j++) best = maximum(best, over[j * (LANES / 4)] + under[j * (LANES / 4)]);
        for (int i = 0; i < count; i++) c.rank[r * c.n + first + i] = best[i];
    }
}

template <class T> static void bounds(const Bounds& c, int64_t threads) {
    int64_t parts = (c.n + PAGES - 1) / PAGES;
    for_each(threads, c.batch * c.heads * parts, [&](int64_t i) {
        int64_t r = i / parts, first = i % parts * PAGES, end = std::min(first + PAGES, c.n);
        int64_t filled = std::max(first, std::min(end, c.pages[r]));
        bound_piece<T>(c, r, first, filled);
        std::fill(c.rank + r * c.n + filled, c.rank + r * c.n + end, -INFINITY);
    });
}
