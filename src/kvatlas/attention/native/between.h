// All that lies between two attentions of a plain Llama-shaped decoder, for few rows, in one parallel region: output
// projection, MLP, and the next layer's norm, q, k, v and rotation. It rounds where the separate operations round.
#pragma once
#include <memory>

#include "linear.h"
#include "small.h"

template <class T> struct Weights {
    const T *out, *mlp_norm, *gate_up, *down;  // [hidden, attended], [hidden], [2 inner, hidden], [hidden, inner]
    const T *norm, *qkv;                       // the next layer's [hidden], [width, hidden]; null after the last
};

struct Widths {
    int64_t rows, attended, hidden, inner, width, heads, dim;  // heads: those that are rotated, q's and k's
};

// silu(gate) * up over gate. Sums of exponents past 126 are infinite enough.
template <class T> static void silu_mul(T* gate, const T* up, int64_t n) {
    for (int64_t first = 0; first < n; first += LANES) {
        int count = int(std::min<int64_t>(LANES, n - first));
        float lane[LANES] = {};
        for (int i = 0; i < count; i++) lane[i] = to_float(gate[first + i]);
        Floats x = load(lane), power = x * -1.44269504f, most = splat(126.0f);
        store(lane, x / (exp2_of(power < most ? power : most) + 1.0f));
        for (int i = 0; i < count; i++) from_float(gate[first + i], rounded<T>(lane[i]) * to_float(up[first + i]));
    }
}

template <class T> static void add(T* to, const T* from, int64_t n) {
    for (int64_t i = 0; i < n; i++) from_float(to[i], to_float(to[i]) + to_float(from[i]));
}

// seen [rows, attended] is the attention's output; x [rows, hidden] is followed in place; h [rows, hidden] and
// qkv [rows, width] are the next attention's input and its q, k (rotated) and v. cos, sin [rows, dim] as for `rope`.
template <class T>
static void between(const Weights<T>& w, const Widths& of, const T* seen, T* x, T* h, T* qkv, const T* cos, const T* sin,
                    float eps, int64_t threads) {
    Laid<T> wide(of.rows, of.attended), slim(of.rows, of.hidden), inner(of.rows, of.inner);
    std::unique_ptr<T[]> sum(new T[of.rows * of.hidden]), normed(new T[of.rows * of.hidden]);
    std::unique_ptr<T[]> gate(new T[of.rows * of.inner * 2]);
    auto follow = [&](int64_t r, const T* norm, T* to) {
        add(x + r * of.hidden, &sum[r * of.hidden], of.hidden);
        if (!norm) return;
        rms_norm(x + r * of.hidden, norm, to + r * of.hidden, 1, of.hidden, eps);
        slim.put(r, to + r * of.hidden);
    };
    together(threads, [&](Team& team) {
        auto each = [&](int64_t count, auto piece) { team.share(count, piece); };
        team.share(of.rows, [&](int64_t r) { wide.put(r, seen + r * of.attended); });
        multiply(each, wide, w.out, of.rows, of.hidden, sum.get());
        team.share(of.rows, [&](int64_t r) { follow(r, w.mlp_norm, normed.get()); });
        multiply(each, slim, w.gate_up, of.rows, 2 * of.inner, gate.get());
        team.share(of.rows, [&](int64_t r) {
            T* mine = &gate[r * 2 * of.inner];
            silu_mul(mine, mine + of.inner, of.inner);
            inner.put(r, mine);
        });
        multiply(each, inner, w.down, of.rows, of.hidden, sum.get());
        team.share(of.rows, [&](int64_t r) { follow(r, w.norm, h); });
        if (!w.norm) return;
        multiply(each, slim, w.qkv, of.rows, of.width, qkv);
        team.share(of.rows, [&](int64_t r) {
            rope(qkv + r * of.width, cos + r * of.dim, sin + r * of.dim, 1, of.heads, of.dim, of.width);
        });
    });
}
