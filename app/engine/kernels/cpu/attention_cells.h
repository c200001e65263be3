// What attention for a few rows does with the cells of a block: scores of its keys, weighted sums of its values.
#pragma once

#include <type_traits>

#include "attention.h"

namespace tandem::TANDEM_ISA {

constexpr int kLineHalves = 32;  // half floats in a line of the cache

// Cells of a block, as a kernel reads them: rows of floats unpacked before, or half floats where they lie in the cache.
// `fetch` asks for the same elements of the block that comes next.
struct FloatCells {
    const float *first;
    int64_t stride;
    TANDEM_INLINE void fetch(int64_t, int64_t) const {}
    TANDEM_INLINE Wide load(int64_t cell, int64_t i) const { return wide_load(first + cell * stride + i); }
};
struct HalfCells {
    const uint16_t *first;
    int64_t stride;
    const uint16_t *next;
    TANDEM_INLINE void fetch(int64_t cell, int64_t i) const { __builtin_prefetch(next + cell * stride + i); }
    TANDEM_INLINE Wide load(int64_t cell, int64_t i) const { return wide_load_f16(first + cell * stride + i); }
};

// Scores of kRows rows against the cells before `last`, kSums at a time (which may be a few more).
template <int kRows, class Cells>
void score_rows(const float *const *q, Cells k, int last, int64_t dk, float *const *scores) {
    constexpr int kTogether = kSums / (kRows == 3 ? 4 : kRows);  // cells; they divide a block
    const auto place = [](int r, int c) { return fold_place(r * kTogether + c); };  // sums come out row by row
    for (int c = 0; c < last; c += kTogether) {
        Wide acc[kSums];
        TANDEM_UNROLL
        for (int i = 0; i < kSums; ++i) {
            acc[i] = wide(0.0f);
        }
        for (int64_t i = 0; i < dk; i += kWide) {
            Wide qs[kRows];
            TANDEM_UNROLL
            for (int r = 0; r < kRows; ++r) {
                qs[r] = wide_load(q[r] + i);
            }
            TANDEM_UNROLL
            for (int j = 0; j < kTogether; ++j) {
                if (i % kLineHalves == 0) {
                    k.fetch(c + j, i);
                }
                const Wide ks = k.load(c + j, i);
                TANDEM_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    acc[place(r, j)] = fma(qs[r], ks, acc[place(r, j)]);
                }
            }
        }
        vf folded[kSums];
        TANDEM_UNROLL
        for (int i = 0; i < kSums; ++i) {
            folded[i] = sum_parts(acc[i]);
        }
        float out[kSums];
        many_sums(folded, out);
        TANDEM_UNROLL
        for (int r = 0; r < kRows; ++r) {
            std::memcpy(scores[r] + c, out + r * kTogether, kTogether * sizeof(float));
        }
    }
}

// Calls f(columns, first) for runs of columns that registers hold; `columns` is a constant.
template <int kMost, class F>
TANDEM_INLINE void each_columns(int64_t dv, F f) {
    int64_t i = 0;
    for (; i + kMost * kWide <= dv; i += kMost * kWide) {
        f(std::integral_constant<int, kMost>(), i);
    }
    for (; i < dv; i += kWide) {
        f(std::integral_constant<int, 1>(), i);
    }
}

// acc[r] += weights[r][c] * v[c] for the cells [first, last) in order.
template <int kRows, class Cells>
void add_values(const float *const *weights, Cells v, int first, int last, int64_t dv, float *const *acc) {
    each_columns<kParts == 1 ? 4 : 1>(dv, [&](auto columns, int64_t i) {
        constexpr int kN = columns;
        Wide sums[kRows][kN];
        TANDEM_UNROLL
        for (int r = 0; r < kRows; ++r) {
            TANDEM_UNROLL
            for (int j = 0; j < kN; ++j) {
                sums[r][j] = wide_load(acc[r] + i + j * kWide);
            }
        }
        for (int c = first; c < last; ++c) {
            TANDEM_UNROLL
            for (int j = 0; j * kWide < kN * kWide; j += kLineHalves / kWide) {
                v.fetch(c, i + j * kWide);
            }
            Wide vs[kN];
            TANDEM_UNROLL
            for (int j = 0; j < kN; ++j) {
                vs[j] = v.load(c, i + j * kWide);
            }
            TANDEM_UNROLL
            for (int r = 0; r < kRows; ++r) {
                const Wide w = wide(weights[r][c]);
                TANDEM_UNROLL
                for (int j = 0; j < kN; ++j) {
                    sums[r][j] = fma(w, vs[j], sums[r][j]);
                }
            }
        }
        TANDEM_UNROLL
        for (int r = 0; r < kRows; ++r) {
            TANDEM_UNROLL
            for (int j = 0; j < kN; ++j) {
                wide_store(acc[r] + i + j * kWide, sums[r][j]);
            }
        }
    });
}

// The same for one row and the cells it sees; the others are not touched.
template <class Cells>
void add_seen_values(const float *weights, uint64_t seen, Cells v, int64_t dv, float *acc) {
    if (seen == 0) {
        return;
    }
    each_columns<kParts == 1 ? 8 : 2>(dv, [&](auto columns, int64_t i) {
        constexpr int kN = columns;
        Wide sums[kN];
        TANDEM_UNROLL
        for (int j = 0; j < kN; ++j) {
            sums[j] = wide_load(acc + i + j * kWide);
        }
        for (uint64_t left = seen; left; left &= left - 1) {
            const int c = __builtin_ctzll(left);
            const Wide w = wide(weights[c]);
            TANDEM_UNROLL
            for (int j = 0; j < kN; ++j) {
                sums[j] = fma(w, v.load(c, i + j * kWide), sums[j]);
            }
        }
        TANDEM_UNROLL
        for (int j = 0; j < kN; ++j) {
            wide_store(acc + i + j * kWide, sums[j]);
        }
    });
}

}  // namespace tandem::TANDEM_ISA
