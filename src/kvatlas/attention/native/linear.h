// y = x @ w.T for a few rows of x: w is streamed from memory once, x stays in the caches.
#pragma once
#include <algorithm>
#include <vector>

#include "dots.h"
#include "parallel.h"

struct LinearCall {
    const char *x, *w;
    int64_t m, n, k;
};

// LANES rows of w from `row`, against all of x: y[:, row .. row + LANES - 1].
template <class T>
static void linear_rows(const LinearCall& c, Row row, const char* x, int64_t first, T* y) {
    const char* rows[LANES];
    int count = std::min<int64_t>(LANES, c.n - first);
    for (int i = 0; i < LANES; i++) rows[i] = c.w + (first + std::min(i, count - 1)) * c.k * sizeof(T);
    Floats part[c.m * (LANES / 4)];
    dot_rows<T>(rows, row, x, row.padded(), c.m, part);
    for (int64_t j = 0; j < c.m; j++)
        for (int i = 0; i < count; i++) from_float(y[j * c.n + first + i], part[j * (LANES / 4)][i]);
}

template <class T> static void linear(const LinearCall& c, T* y, int64_t threads) {
    Row row(c.k * sizeof(T));
    std::vector<char> padded(c.m * row.padded());
    for (int64_t j = 0; j < c.m; j++)
        memcpy(&padded[j * row.padded()], c.x + j * c.k * sizeof(T), c.k * sizeof(T));
    int64_t groups = (c.n + LANES - 1) / LANES, chunk = std::max<int64_t>(1, 65536 / (LANES * row.padded()));
    for_each(threads, (groups + chunk - 1) / chunk, [&](int64_t i) {
        for (int64_t g = i * chunk; g < std::min(groups, (i + 1) * chunk); g++)
            linear_rows<T>(c, row, padded.data(), g * LANES, y);
    });
}
