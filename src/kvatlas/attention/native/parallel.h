// Threads: the pool that torch already has. GOMP_parallel is the entry point that GCC's `#pragma omp parallel` calls;
// calling it directly needs no -fopenmp, so any compiler will do, and no second OpenMP runtime can be linked in.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_num_threads();

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

// What the threads of one region know of each other.
struct Meeting {
    static constexpr int SHARES = 16, PATIENCE = 4096;
    std::atomic<int64_t> next[SHARES] = {}, waiting{0}, round{0};

    // Until all are here. A thread may be off its core, so whoever has waited for long gives way.
    void wait(int64_t threads) {
        int64_t now = round.load(std::memory_order_acquire);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            waiting.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int turn = 0; round.load(std::memory_order_acquire) == now; turn++)
            turn < PATIENCE ? _mm_pause() : (void)sched_yield();
    }
};

// One thread's side of a region of several steps, at most SHARES: each is shared out and over before the next begins.
struct Team {
    Meeting& meeting;
    int64_t threads;
    int step = 0;

    template <class Task> void share(int64_t count, Task task) {
        std::atomic<int64_t>& next = meeting.next[step++];
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
        meeting.wait(threads);
    }
};

// Runs body(team) on each of `threads` threads, or on fewer.
template <class Body> static void together(int64_t threads, Body body) {
    Meeting meeting;
    parallel(threads, [&] {
        Team team{meeting, threads <= 1 ? 1 : omp_get_num_threads()};
        body(team);
    });
}
