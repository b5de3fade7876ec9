// The C interface: plain pointers, strides in elements, sizes as int64. ops.py is its only caller and checks shapes.
#include "between.h"
#include "bounds.h"
#include "choose.h"
#include "decode.h"
#include "linear.h"
#include "mass.h"
#include "packed.h"
#include "pages.h"
#include "small.h"

template <class T>
static void decode_call(const T* q, const T* k, const T* v, T* out, float* lse, float* probs, int64_t batch,
                        int64_t heads, int64_t group, int64_t dim, const int64_t* stride, const int64_t* lengths,
                        const int64_t* index, int64_t index_width, int64_t width, float scale, int64_t threads) {
    Decode<T> d{Row(dim * sizeof(T)), int(group), dim, width, scale * LOG2E};
    auto source = [&](int64_t r) {
        int64_t b = r / heads, h = r % heads;
        return Source{(const char*)(k + b * stride[0] + h * stride[1]), (const char*)(v + b * stride[3] + h * stride[4]),
                      stride[2] * int64_t(sizeof(T)), stride[5] * int64_t(sizeof(T)),
                      index ? index + r * index_width : nullptr, nullptr, 0, 0, 0};
    };
    decode(d, batch * heads, q, out, lse, probs, threads, source, [&](int64_t r) { return lengths[r]; });
}

template <class T>
static void paged_call(const T* q, const T* k, const T* v, T* out, float* lse, float* probs, int64_t batch,
                       int64_t heads, int64_t group, int64_t dim, int64_t page, const int64_t* stride,
                       const int64_t* table, int64_t table_width, const int64_t* lengths, int64_t width, float scale,
                       int64_t threads) {
    Decode<T> d{Row(dim * sizeof(T)), int(group), dim, width, scale * LOG2E};
    int64_t size = sizeof(T);
    auto source = [&](int64_t r) {
        int64_t b = r / heads, h = r % heads;
        return Source{(const char*)(k + h * stride[1]), (const char*)(v + h * stride[4]), stride[2] * size,
                      stride[5] * size, nullptr, table + b * table_width, page, stride[0] * size, stride[3] * size};
    };
    decode(d, batch * heads, q, out, lse, probs, threads, source, [&](int64_t r) { return lengths[r]; });
}

template <class T>
static void packed_call(const T* q, const char* k, const char* k_scale, const char* v, const char* v_scale, T* out,
                        float* lse, float* probs, int64_t batch, int64_t heads, int64_t group, const Packing& packing,
                        const int64_t* stride, const int64_t* lengths, const int64_t* index, int64_t index_width,
                        int64_t width, float scale, int64_t threads) {
    PackedDecode<T> d({Row(packing.dim * 4), int(group), packing.dim, width, scale * LOG2E}, packing);
    auto side = [&](const char* codes, const char* scales, const int64_t* step, int64_t b, int64_t h) {
        return Side{codes + b * step[0] + h * step[1], scales + (b * step[3] + h * step[4]) * 2, step[2], step[5] * 2};
    };
    auto source = [&](int64_t r) {
        int64_t b = r / heads, h = r % heads;
        return PackedSource{side(k, k_scale, stride, b, h), side(v, v_scale, stride + 6, b, h),
                            index ? index + r * index_width : nullptr};
    };
    decode(d, batch * heads, q, out, lse, probs, threads, source, [&](int64_t r) { return lengths[r]; });
}

extern "C" {

// Names the instructions in use, for reports.
const char* kvatlas_isa() {
#if defined(KVATLAS_AMX)
    return tiles_allowed() ? "avx512+bf16+amx" : "avx512+bf16";
#elif defined(KVATLAS_BF16)
    return "avx512+bf16";
#elif defined(KVATLAS_AVX512)
    return "avx512";
#else
    return "generic";
#endif
}

void kvatlas_decode(int64_t half, const void* q, const void* k, const void* v, void* out, float* lse, float* probs,
                    int64_t batch, int64_t heads, int64_t group, int64_t dim, const int64_t* stride,
                    const int64_t* lengths, const int64_t* index, int64_t index_width, int64_t width, float scale,
                    int64_t threads) {
    auto call = [&](auto kind) {
        using T = decltype(kind);
        decode_call<T>((const T*)q, (const T*)k, (const T*)v, (T*)out, lse, probs, batch, heads, group, dim, stride,
                       lengths, index, index_width, width, scale, threads);
    };
    half ? call(bf16{}) : call(float{});
}

void kvatlas_decode_paged(int64_t half, const void* q, const void* k, const void* v, void* out, float* lse,
                          float* probs, int64_t batch, int64_t heads, int64_t group, int64_t dim, int64_t page,
                          const int64_t* stride, const int64_t* table, int64_t table_width, const int64_t* lengths,
                          int64_t width, float scale, int64_t threads) {
    auto call = [&](auto kind) {
        using T = decltype(kind);
        paged_call<T>((const T*)q, (const T*)k, (const T*)v, (T*)out, lse, probs, batch, heads, group, dim, page,
                      stride, table, table_width, lengths, width, scale, threads);
    };
    half ? call(bf16{}) : call(float{});
}

// bits and span: of the codes, and elements per scale. stride: k, k_scale, v, v_scale (b, h, slot each).
void kvatlas_decode_packed(int64_t half, const void* q, const void* k, const void* k_scale, const void* v,
                           const void* v_scale, void* out, float* lse, float* probs, int64_t batch, int64_t heads,
                           int64_t group, int64_t dim, int64_t bits, int64_t span, const int64_t* stride,
                           const int64_t* lengths, const int64_t* index, int64_t index_width, int64_t width,
                           float scale, int64_t threads) {
    Packing packing(dim, bits, span);
    auto call = [&](auto kind) {
        using T = decltype(kind);
        packed_call<T>((const T*)q, (const char*)k, (const char*)k_scale, (const char*)v, (const char*)v_scale, (T*)out,
                       lse, probs, batch, heads, group, packing, stride, lengths, index, index_width, width, scale,
                       threads);
    };
    half ? call(bf16{}) : call(float{});
}

void kvatlas_quantise(int64_t half, const void* x, void* codes, void* scales, int64_t rows, int64_t dim, int64_t bits,
                      int64_t span, int64_t threads) {
    Quantise call{(const char*)x, (uint8_t*)codes, (uint16_t*)scales, rows, Packing(dim, bits, span)};
    half ? quantise<bf16>(call, threads) : quantise<float>(call, threads);
}

// stride: q head, q row, k head, k row.
void kvatlas_column_mass(int64_t half, const void* q, const void* k, const float* lse, float* mass, int64_t heads,
                         int64_t kv_heads, int64_t queries, int64_t keys, int64_t dim, const int64_t* stride,
                         int64_t first_query, int64_t window, int64_t causal, float scale, int64_t threads) {
    int64_t size = half ? 2 : 4;
    MassCall call{(const char*)q, (const char*)k, lse, mass, heads, kv_heads, queries, keys, dim,
                  stride[0] * size, stride[1] * size, stride[2] * size, stride[3] * size,
                  first_query, window, causal != 0, scale * 1.44269504f};
#ifdef KVATLAS_AMX
    if (half && tiles_allowed()) return column_mass<bf16, AmxPanelProduct>(call, threads);
#endif
    half ? column_mass<bf16, PanelProduct<bf16>>(call, threads) : column_mass<float, PanelProduct<float>>(call, threads);
}

void kvatlas_linear(int64_t half, const void* x, const void* w, void* y, int64_t m, int64_t n, int64_t k,
                    int64_t threads) {
    LinearCall call{(const char*)x, (const char*)w, m, n, k};
#ifdef KVATLAS_AMX
    if (half && fits_tiles(call)) return linear_tiles(call, (bf16*)y, threads);
#endif
    half ? linear<bf16>(call, (bf16*)y, threads) : linear<float>(call, (float*)y, threads);
}

// sizes: rows, attended, hidden, inner, width, heads, dim.
void kvatlas_between(int64_t half, const void* out, const void* mlp_norm, const void* gate_up, const void* down,
                     const void* norm, const void* qkv_weight, const void* seen, void* x, void* h, void* qkv,
                     const void* cos, const void* sin, const int64_t* sizes, float eps, int64_t threads) {
    Widths of{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    auto call = [&](auto kind) {
        using T = decltype(kind);
        Weights<T> w{(const T*)out, (const T*)mlp_norm, (const T*)gate_up,
                     (const T*)down, (const T*)norm, (const T*)qkv_weight};
        between(w, of, (const T*)seen, (T*)x, (T*)h, (T*)qkv, (const T*)cos, (const T*)sin, eps, threads);
    };
    half ? call(bf16{}) : call(float{});
}

void kvatlas_rms_norm(int64_t half, const void* x, const void* weight, void* y, int64_t rows, int64_t n, float eps) {
    half ? rms_norm((const bf16*)x, (const bf16*)weight, (bf16*)y, rows, n, eps)
         : rms_norm((const float*)x, (const float*)weight, (float*)y, rows, n, eps);
}

void kvatlas_rope(int64_t half, void* x, const void* cos, const void* sin, int64_t rows, int64_t heads, int64_t dim,
                  int64_t stride) {
    half ? rope((bf16*)x, (const bf16*)cos, (const bf16*)sin, rows, heads, dim, stride)
         : rope((float*)x, (const float*)cos, (const float*)sin, rows, heads, dim, stride);
}

// stride: keys (b, h, slot).
void kvatlas_speculate(int64_t half, const void* q, const void* keys, const int64_t* lengths, const int64_t* hole,
                       float* rank, int64_t* near, int64_t batch, int64_t heads, int64_t group, int64_t dim, int64_t n,
                       const int64_t* stride, float scale, float alpha, int64_t combine, int64_t threads) {
    int64_t size = half ? 2 : 4;
    Speculation call{(const char*)q, (const char*)keys, {stride[0] * size, stride[1] * size, stride[2] * size},
                     lengths, hole, batch, heads, group, dim, n, scale, alpha, combine, rank, near};
    half ? speculate<bf16>(call, threads) : speculate<float>(call, threads);
}

// stride: low (b, h, page), high (b, h, page).
void kvatlas_bounds(int64_t half, const void* q, const void* low, const void* high, const int64_t* pages, float* rank,
                    int64_t batch, int64_t heads, int64_t group, int64_t dim, int64_t n, const int64_t* stride,
                    int64_t combine, int64_t threads) {
    int64_t size = half ? 2 : 4;
    Bounds call{(const char*)q, (const char*)low, (const char*)high,
                {stride[0] * size, stride[1] * size, stride[2] * size},
                {stride[3] * size, stride[4] * size, stride[5] * size},
                pages, batch, heads, group, dim, n, combine, rank};
    half ? bounds<bf16>(call, threads) : bounds<float>(call, threads);
}

// stride: low (b, h, page), high (b, h, page); pages: those that each row has.
void kvatlas_choose_pages(int64_t half, const void* q, void* low, void* high, const void* key, const int64_t* newest,
                          const int64_t* lengths, const int64_t* pages, const int64_t* count, float* rank,
                          int64_t* index, int64_t* number, int64_t batch, int64_t heads, int64_t group, int64_t dim,
                          int64_t n, int64_t page, int64_t width, const int64_t* stride, int64_t combine,
                          int64_t prefer, int64_t threads) {
    int64_t size = half ? 2 : 4;
    Bounds of{(const char*)q, (const char*)low, (const char*)high,
              {stride[0] * size, stride[1] * size, stride[2] * size},
              {stride[3] * size, stride[4] * size, stride[5] * size},
              pages, batch, heads, group, dim, n, combine, rank};
    PageChoice call{of, (const char*)key, newest, lengths, count, page, prefer, index, number, width};
    half ? choose_pages<bf16>(call, threads) : choose_pages<float>(call, threads);
}

void kvatlas_choose(const float* rank, const int64_t* count, int64_t* index, int64_t rows, int64_t n, int64_t width,
                    int64_t threads) {
    choose(rank, count, index, rows, n, width, threads);
}

void kvatlas_copy_rows(void* to, const void* from, const int64_t* index, int64_t batch, int64_t heads, int64_t n,
                       int64_t bytes, const int64_t* stride, int64_t threads) {
    copy_rows((char*)to, (const char*)from, index, batch, heads, n, bytes, stride, threads);
}
}
