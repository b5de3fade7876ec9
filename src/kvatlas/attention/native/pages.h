// A step of a reader of pages in one go: the newest key widens its page's bounds, every page is scored by them, and the
// slots of the best pages are named.
#pragma once
#include "bounds.h"
#include "choose.h"

struct PageChoice {
    Bounds bounds;                      // low and high are written; `rank` is room for scores
    const char* key;                    // [B, H, dim], contiguous, or null: no key is new
    const int64_t* newest;              // [B, H] the slot of that key, -1 for none; null without a key
    const int64_t *lengths, *count;     // [B, H] filled slots, and pages to read
    int64_t page, prefer;               // prefer: the newest key's page is read whatever its score
    int64_t *index, *number, width;     // [B, H, width] slots, ascending, and [B, H] how many of them
};

// A page that begins with this key gets its bounds from it; one of which a slot was overwritten is only widened.
template <class T> static void widen(const PageChoice& c, int64_t r) {
    int64_t b = r / c.bounds.heads, h = r % c.bounds.heads, slot = c.newest[r], at = slot / c.page;
    bool begins = slot % c.page == 0 && slot + 1 == c.lengths[r];
    const Bounds& to = c.bounds;
    T* low = (T*)(to.low + b * to.low_step[0] + h * to.low_step[1] + at * to.low_step[2]);
    T* high = (T*)(to.high + b * to.high_step[0] + h * to.high_step[1] + at * to.high_step[2]);
    const T* key = (const T*)c.key + r * to.dim;
    for (int64_t d = 0; d < to.dim; d++) {
        float x = to_float(key[d]);
        if (begins || x < to_float(low[d])) low[d] = key[d];
        if (begins || x > to_float(high[d])) high[d] = key[d];
    }
}

static void name_slots(const PageChoice& c, int64_t r) {
    float* rank = c.bounds.rank + r * c.bounds.n;
    int64_t total = c.bounds.pages[r], best = std::min(c.count[r], total), *to = c.index + r * c.width, n = 0;
    if (c.prefer && c.newest && c.newest[r] >= 0) rank[c.newest[r] / c.page] = INFINITY;
    std::vector<int64_t> chosen(best + 1);
    int64_t found = best > 0 ? places(rank, total, best, chosen.data()) : 0;
    for (int64_t i = 0; i < found; i++) {
        int64_t slot = chosen[i] * c.page, end = std::min(slot + c.page, c.lengths[r]);
        while (slot < end) to[n++] = slot++;
    }
    c.number[r] = n;
    std::fill(to + n, to + c.width, 0);
}

template <class T> static void choose_pages(const PageChoice& c, int64_t threads) {
    const Bounds& of = c.bounds;
    int64_t rows = of.batch * of.heads, parts = (of.n + PAGES - 1) / PAGES;
    std::vector<int64_t> left(rows, parts);
    for_each(threads, rows * parts, [&](int64_t i) {
        int64_t r = i / parts, first = i % parts * PAGES, end = std::min(first + PAGES, of.pages[r]);
        if (c.key && c.newest[r] >= 0 && c.newest[r] / c.page / PAGES == i % parts) widen<T>(c, r);
        if (first < end) bound_piece<T>(of, r, first, end);
        if (!__atomic_sub_fetch(&left[r], 1, __ATOMIC_ACQ_REL)) name_slots(c, r);
    });
}
