// Attention of one query per sequence over keys that lie anywhere: in a row, by index, or in pages. Each key and value
// is read once for all queries of its group. Work is cut by length alone, so a sequence's result is the same, to the
// bit, whoever shares the batch and however many threads there are.
#pragma once
#include <algorithm>
#include <vector>

#include "dots.h"
#include "parallel.h"

constexpr int BLOCK = 64;    // keys between two rescalings
constexpr int SPLIT = 512;   // keys per piece of work, at most
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// Where the keys and values of one (sequence, KV head) are. Distances are in bytes.
struct Source {
    const char *k, *v;
    int64_t k_step, v_step;    // from one slot to the next
    const int64_t* index;      // or null: slots in order
    const int64_t* table;      // or null: the block of each `page` slots
    int64_t page, k_page, v_page;

    void rows(int64_t first, int count, const char** k_rows, const char** v_rows) const {
        for (int i = 0; i < count; i++) {
            k_rows[i] = k + (first + i) * k_step;
            v_rows[i] = v + (first + i) * v_step;
        }
    }
    void indexed_rows(int64_t first, int count, const char** k_rows, const char** v_rows) const {
        for (int i = 0; i < count; i++) {
            k_rows[i] = k + index[first + i] * k_step;
            v_rows[i] = v + index[first + i] * v_step;
        }
    }
    void paged_rows(int64_t first, int count, const char** k_rows, const char** v_rows) const {
        int64_t block = first / page, at = first % page;
        for (int i = 0; i < count; i++, at++) {
            if (at == page) at = 0, block++;
            k_rows[i] = k + table[block] * k_page + at * k_step;
            v_rows[i] = v + table[block] * v_page + at * v_step;
        }
    }
};

// The rows of one block of keys. Rows past the end repeat the last one, so whole vectors of rows can be read.
struct Block {
    int count = 0;
    const char *k[BLOCK], *v[BLOCK];

    void find(const Source& source, int64_t first, int64_t end) {
        count = int(std::min<int64_t>(BLOCK, end - first));
        if (count <= 0) return;
        if (source.table)
            source.paged_rows(first, count, k, v);
        else if (source.index)
            source.indexed_rows(first, count, k, v);
        else
            source.rows(first, count, k, v);
        for (int i = count; i % LANES; i++) k[i] = k[count - 1];
    }
};

// What a piece of work knows when it is done: per query a maximum, a sum, and the weighted values, in base 2.
// `values` are spread (dots.h).
struct Partial {
    float *top, *sum, *values;
};

// T: what rows are made of; O: queries and output.
template <class T, class O = T> struct Decode {
    using Query = Own<T>;
    static constexpr int H = HALVES<T>;
    Row row;
    int group;
    int64_t dim, width;
    float scale;  // includes log2(e)

    int64_t values_size() const { return spread_size<T>(row); }
    int64_t query_size() const { return spread_size<T, Query>(row); }
    void lay_out(const O* q, Query* to) const {
        std::fill_n(to, group * query_size(), Query{});
        for (int j = 0; j < group; j++) spread<T>(q + j * dim, dim, to + j * query_size());
    }
    int64_t partial_size() const { return group * (values_size() + LANES); }
    void fetch(const char* const* rows, int count) const {
        for (int i = 0; i < count; i++)
            for (int line = 0; line < this->row.lines; line++) fetch_line(rows[i] + line * LINE);
    }
    Partial partial(float* at) const { return {at, at + group, at + group * LANES}; }

    // values[j] += sum over the keys of weight[j, i] * v[i], for L lines of Q queries.
    template <int Q, int L>
    void weigh(const Block& block, int line, const float* weight, float* values) const {
        Floats sum[Q][L * H];
        float* at = values + line * H * LANES;
        unroll<Q * L * H>([&](int u) INLINE {
            sum[u / (L * H)][u % (L * H)] = load(at + u / (L * H) * values_size() + u % (L * H) * LANES);
        });
        int last = row.words(line + L - 1);
        for (int i = 0; i < block.count; i++) {
            Floats v[L * H];
            unroll<L>([&](int l) INLINE {
                spread_line<T>(block.v[i] + (line + l) * LINE, l + 1 < L ? LANES : last, v + l * H);
            });
            unroll<Q>([&](int j) INLINE {
                Floats w = splat(weight[j * BLOCK + i]);
                unroll<L * H>([&](int u) INLINE { sum[j][u] += w * v[u]; });
            });
        }
        unroll<Q * L * H>([&](int u) INLINE {
            store(at + u / (L * H) * values_size() + u % (L * H) * LANES, sum[u / (L * H)][u % (L * H)]);
        });
    }

    template <int Q> void weigh_lines(const Block& block, const float* weight, float* values) const {
        int line = 0;
        for (; line + 2 <= row.lines; line += 2) weigh<Q, 2>(block, line, weight, values);
        if (line < row.lines) weigh<Q, 1>(block, line, weight, values);
    }

    void weigh_all(const Block& block, const float* weight, float* values) const {
        for (int j = 0; j < group; j += MOST) {
            const float* w = weight + j * BLOCK;
            float* to = values + j * values_size();
            switch (std::min(group - j, MOST)) {
                case 1: weigh_lines<1>(block, w, to); break;
                case 2: weigh_lines<2>(block, w, to); break;
#ifdef KVATLAS_AVX512
                case 3: weigh_lines<3>(block, w, to); break;
                case 4: weigh_lines<4>(block, w, to); break;
#endif
            }
        }
    }

    // score[j, i] = scaled dot of query j with key i, -inf past the block's end. Fetches the keys of the next block.
    void score_block(const Block& block, const Block& next, const Query* q, float* score) const {
        Floats part[group * (LANES / 4)];
        for (int i = 0; i < block.count; i += LANES) {
            fetch(next.k + i, std::min(LANES, next.count - i));
            dot_rows<T>(block.k + i, row, q, group, part);
            for (int j = 0; j < group; j++) store(score + j * BLOCK + i, part[j * (LANES / 4)] * scale);
        }
        for (int j = 0; j < group; j++)
            std::fill(score + j * BLOCK + block.count, score + (j + 1) * BLOCK, -INFINITY);
    }

    // Scores become weights relative to the maximum so far; what was summed before is rescaled when that grows.
    void soften(int j, float* score, Partial& to) const {
        Floats high = load(score);
        for (int i = LANES; i < BLOCK; i += LANES) high = maximum(load(score + i), high);
        float top = std::max(largest(high), to.top[j]);
        float shrink = exp2_of(splat(to.top[j] - top))[0];
        if (to.top[j] != top) {
            float* values = to.values + j * values_size();
            for (int64_t u = 0; u < values_size(); u += LANES) store(values + u, load(values + u) * shrink);
        }
        Floats sum{};
        for (int i = 0; i < BLOCK; i += LANES) {
            Floats p = exp2_of(load(score + i) - top);
            sum += p;
            store(score + i, p);
        }
        to.sum[j] = to.sum[j] * shrink + total(sum);
        to.top[j] = top;
    }

    void clear(Partial& to) const {
        std::fill_n(to.top, group, -INFINITY);
        std::fill_n(to.sum, group, 0.0f);
        std::fill_n(to.values, group * values_size(), 0.0f);
    }

    void keep_scores(const Block& block, const float* score, int64_t first, float* probs) const {
        for (int j = 0; j < group; j++) std::copy_n(score + j * BLOCK, block.count, probs + j * width + first);
    }

    // One piece: keys first .. end-1. `probs` (or null) receives the raw scores, `width` apart per query.
    void piece(const Source& source, const Query* q, int64_t first, int64_t end, Partial to, float* probs) const {
        float score[group * BLOCK];
        clear(to);
        Block blocks[2];
        blocks[0].find(source, first, end);
        fetch(blocks[0].k, blocks[0].count);
        fetch(blocks[0].v, blocks[0].count);
        for (int turn = 0; first < end; first += BLOCK, turn ^= 1) {
            const Block &block = blocks[turn], &next = blocks[turn ^ 1];
            blocks[turn ^ 1].find(source, first + BLOCK, end);
            score_block(block, next, q, score);
            if (probs) keep_scores(block, score, first, probs);
            for (int j = 0; j < group; j++) soften(j, score + j * BLOCK, to);
            fetch(next.v, next.count);
            weigh_all(block, score, to.values);
        }
    }

    // Pieces of one row, `pieces` in order at `from`, become its output [group, dim] and log-sum-exp [group].
    void merge(float* from, int64_t pieces, O* out, float* lse) const {
        for (int j = 0; j < group; j++) {
            float top = -INFINITY, sum = 0;
            float values[values_size()];
            for (int64_t p = 0; p < pieces; p++) top = std::max(top, partial(from + p * partial_size()).top[j]);
            std::fill_n(values, values_size(), 0.0f);
            for (int64_t p = 0; p < pieces; p++) {
                Partial piece = partial(from + p * partial_size());
                float shrink = exp2_of(splat(piece.top[j] - top))[0];
                sum += shrink * piece.sum[j];
                for (int64_t u = 0; u < values_size(); u++) values[u] += shrink * piece.values[j * values_size() + u];
            }
            lse[j] = (top + std::log2(sum)) * LN2;
            for (int64_t d = 0; d < dim; d++) from_float(out[j * dim + d], values[spread_place<T>(d)] / sum);
        }
    }

    void normalise(float* probs, const float* lse, int64_t length) const {
        for (int j = 0; j < group; j++) {
            float* row = probs + j * width;
            Floats base = splat(lse[j] * LOG2E);
            int64_t i = 0;
            for (; i + LANES <= length; i += LANES) store(row + i, exp2_of(load(row + i) - base));
            for (; i < length; i++) row[i] = exp2_of(splat(row[i] - base[0]))[0];
            std::fill(row + length, row + width, 0.0f);
        }
    }

    void empty(O* out, float* lse, float* probs) const {
        std::memset((void*)out, 0, sizeof(O) * group * dim);
        std::fill_n(lse, group, -INFINITY);
        if (probs) std::fill_n(probs, group * width, 0.0f);
    }
};

struct Piece {
    int64_t row, first, end, at;  // `at`: which piece of its row
};

// `source(row)` says where the keys of row = sequence * heads + head are, `length(row)` how many.
template <class D, class O, class Where, class Length>
static void decode(const D& d, int64_t rows, const O* q, O* out, float* lse, float* probs, int64_t threads,
                   Where source, Length length) {
    std::vector<Piece> pieces;
    std::vector<int64_t> first_piece, left;
    for (int64_t r = 0; r < rows; r++) {
        int64_t n = length(r), count = (n + SPLIT - 1) / SPLIT, size = 0;
        first_piece.push_back(pieces.size());
        left.push_back(count);
        if (count) size = (n + count * BLOCK - 1) / (count * BLOCK) * BLOCK;
        for (int64_t p = 0; p < count; p++) pieces.push_back({r, p * size, std::min(n, (p + 1) * size), p});
        if (!count) d.empty(out + r * d.group * d.dim, lse + r * d.group, probs ? probs + r * d.group * d.width : nullptr);
    }
    std::vector<float> partials(pieces.size() * d.partial_size());
    for_each(threads, pieces.size(), [&](int64_t i) {
        const Piece& piece = pieces[i];
        int64_t r = piece.row, count = (length(r) + SPLIT - 1) / SPLIT;
        float* row_probs = probs ? probs + r * d.group * d.width : nullptr;
        alignas(64) typename D::Query queries[d.group * d.query_size()];
        d.lay_out(q + r * d.group * d.dim, queries);
        d.piece(source(r), queries, piece.first, piece.end, d.partial(&partials[i * d.partial_size()]), row_probs);
        if (__atomic_sub_fetch(&left[r], 1, __ATOMIC_ACQ_REL)) return;
        d.merge(&partials[first_piece[r] * d.partial_size()], count, out + r * d.group * d.dim, lse + r * d.group);
        if (probs) d.normalise(row_probs, lse + r * d.group, length(r));
    });
}
