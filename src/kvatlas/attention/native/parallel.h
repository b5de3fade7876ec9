// Threads: the pool that torch already has. GOMP_parallel is the entry point that GCC's `#pragma omp parallel` calls;
// calling it directly needs no -fopenmp, so any compiler will do, and no second OpenMP runtime can be linked in.
#pragma once
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);

template <class Body> static void run_body(void* body) { (*static_cast<Body*>(body))(); }

// Runs body() on each of `threads` threads, or on fewer: the bodies share work through a counter.
template <class Body> static void parallel(int64_t threads, Body body) {
    if (threads <= 1)
        body();
    else
        GOMP_parallel(run_body<Body>, &body, unsigned(threads), 0);
}

// Calls task(i) for i in 0 .. count-1, in this order of starting.
template <class Task> static void for_each(int64_t threads, int64_t count, Task task) {
    std::atomic<int64_t> next{0};
    parallel(threads < count ? threads : count, [&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    });
}
