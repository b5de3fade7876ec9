// y = x @ w.T for a few rows of x: w is streamed from memory once, x stays in the caches.
#pragma once
#include <algorithm>
#include <vector>

#include "dots.h"
#include "parallel.h"
#ifdef KVATLAS_AMX
#include "amx.h"
#endif

struct LinearCall {
    const char *x, *w;
    int64_t m, n, k;
};

// LANES rows of w from `first`, against all of x: y[:, first .. first + LANES - 1].
template <class T>
static void linear_rows(const LinearCall& c, Row row, const Own<T>* x, int64_t first, T* y) {
    const char* rows[LANES];
    int count = std::min<int64_t>(LANES, c.n - first);
    for (int i = 0; i < LANES; i++) rows[i] = c.w + (first + std::min(i, count - 1)) * c.k * sizeof(T);
    Floats part[c.m * (LANES / 4)];
    dot_rows<T>(rows, row, x, c.m, part, 8 * c.k * sizeof(T));  // two quads ahead
    for (int64_t j = 0; j < c.m; j++)
        for (int i = 0; i < count; i++) from_float(y[j * c.n + first + i], part[j * (LANES / 4)][i]);
}

// Pieces of about 64 KiB of w, so that threads finish together: each(count, piece) calls piece(i) for all of them.
template <class Each, class Task>
static void for_row_groups(const LinearCall& c, int64_t row_bytes, Each each, Task task) {
    int64_t groups = (c.n + LANES - 1) / LANES, chunk = std::max<int64_t>(1, 65536 / (LANES * row_bytes));
    each((groups + chunk - 1) / chunk,
         [&](int64_t i) { task(i * chunk * LANES, std::min(c.n, (i + 1) * chunk * LANES)); });
}

static inline auto on_threads(int64_t threads) {
    return [=](int64_t count, auto piece) { for_each(threads, count, piece); };
}

// A few rows as a product's vectors, laid out row by row.
template <class T> struct Laid {
    int64_t k, size;
    std::vector<Own<T>> x;

    Laid(int64_t rows, int64_t k) : k(k), size(spread_size<T, Own<T>>(Row(k * sizeof(T)))), x(rows * size) {}
    void put(int64_t row, const T* from) { spread<T>(from, k, &x[row * size]); }
};

// y[j, :] = w x[j], in pieces that `each` hands out.
template <class T, class Each>
static void multiply(Each each, const Laid<T>& x, const T* w, int64_t rows, int64_t n, T* y) {
    LinearCall c{nullptr, (const char*)w, rows, n, x.k};
    Row row(x.k * sizeof(T));
    for_row_groups(c, x.k * sizeof(T), each, [&](int64_t first, int64_t end) {
        for (; first < end; first += LANES) linear_rows<T>(c, row, x.x.data(), first, y);
    });
}

template <class T> static void linear(const LinearCall& c, T* y, int64_t threads) {
    Laid<T> x(c.m, c.k);
    for (int64_t j = 0; j < c.m; j++) x.put(j, (const T*)c.x + j * c.k);
    multiply(on_threads(threads), x, (const T*)c.w, c.m, c.n, y);
}

#ifdef KVATLAS_AMX
constexpr int TILE_AHEAD = 4096;  // bytes by which w is fetched before it is used

// 16 rows of w (tile 1) against the packed x (tile 2), summed in tile 0: sum[row of w][row of x].
static void linear_tile(const LinearCall& c, const uint32_t* x, int64_t first, float* sum) {
    int64_t stride = c.k * 2;
    const char *w = c.w + first * stride, *ahead = w + TILE_AHEAD, *end = c.w + c.n * stride - 1024;
    _tile_zero(0);
    for (int64_t s = 0; s < c.k / 32; s++, ahead += 1024) {
        for (int line = 0; line < 16 && ahead <= end; line++) __builtin_prefetch(ahead + line * 64);
        _tile_loadd(1, w + s * 64, stride);
        _tile_loadd(2, x + s * 256, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sum, 64);
}

// For whole tiles only: m up to 16, n a multiple of 16, k of 32.
static bool fits_tiles(const LinearCall& c) { return c.n % 16 == 0 && c.k % 32 == 0 && tiles_allowed(); }

static void linear_tiles(const LinearCall& c, bf16* y, int64_t threads) {
    std::vector<uint32_t> x(c.k / 2 * 16);  // [word of the row][row of x]
    for (int64_t j = 0; j < c.m; j++)
        for (int64_t s = 0; s < c.k / 2; s++) memcpy(&x[s * 16 + j], c.x + (j * c.k / 2 + s) * 4, 4);
    TileShapes shapes;
    for (int t = 0; t < 3; t++) shapes.set(t, 16, 64);
    for_row_groups(c, c.k * 2, on_threads(threads), [&](int64_t first, int64_t end) {
        alignas(64) float sum[16][16];
        shapes.use();
        for (; first < end; first += 16) {
            linear_tile(c, x.data(), first, sum[0]);
            for (int64_t j = 0; j < c.m; j++)
                for (int i = 0; i < 16; i++) from_float(y[j * c.n + first + i], sum[i][j]);
        }
        _tile_release();
    });
}
#endif
