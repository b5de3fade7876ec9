// The small operations between a decode step's matrix products, for few rows: one call each instead of three to six.
// They round where PyTorch's separate operations round, so that bf16 results are those of the plain path.
#pragma once
#include "vec.h"

template <class T> static inline float rounded(float x) {
    T as;
    from_float(as, x);
    return to_float(as);
}

// y = T(x / rms(x)) * weight, row by row; x, y [rows, n].
template <class T> static void rms_norm(const T* x, const T* weight, T* y, int64_t rows, int64_t n, float eps) {
    for (int64_t r = 0; r < rows; r++, x += n, y += n) {
        float squares[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int j = 0; j < LANES; j++) squares[j] += to_float(x[i + j]) * to_float(x[i + j]);
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += squares[j];
        for (; i < n; i++) sum += to_float(x[i]) * to_float(x[i]);
        float scale = 1.0f / std::sqrt(sum / n + eps);
        for (i = 0; i < n; i++) from_float(y[i], rounded<T>(to_float(x[i]) * scale) * to_float(weight[i]));
    }
}

// In place on x [rows, heads, dim] (rows `stride` apart): x * cos + swap(x) * sin, where sin's first half is negated.
template <class T>
static void rope(T* x, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim, int64_t stride) {
    int64_t half = dim / 2;
    for (int64_t r = 0; r < rows; r++, cos += dim, sin += dim)
        for (int64_t h = 0; h < heads; h++) {
            T* head = x + r * stride + h * dim;
            for (int64_t i = 0; i < half; i++) {
                float a = to_float(head[i]), b = to_float(head[i + half]);
                from_float(head[i], rounded<T>(a * to_float(cos[i])) + rounded<T>(b * to_float(sin[i])));
                from_float(head[i + half],
                           rounded<T>(b * to_float(cos[i + half])) + rounded<T>(a * to_float(sin[i + half])));
            }
        }
}
