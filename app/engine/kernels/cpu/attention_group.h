// Thirty-two rows of a tile that are computed together: scores, weights and sums, transposed, a lane for each row.
#pragma once

#include "attention.h"

namespace tandem::TANDEM_ISA {

constexpr int kGroups = kAttentionRows / kGroupRows;
constexpr int kGroupWides = kGroupRows / kWide;
constexpr int kGroupVectors = kGroupRows / kNative;

// Register blocks: cells (or elements of a value) times native vectors of rows.
#if defined(__AVX512F__)
constexpr int kScoreCells = 4, kScoreVectors = 2, kValueElements = 8, kValueVectors = 2;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kScoreCells = 4, kScoreVectors = 2, kValueElements = 8, kValueVectors = 2;
#elif defined(__AVX2__)
constexpr int kScoreCells = 2, kScoreVectors = 2, kValueElements = 4, kValueVectors = 2;
#else
constexpr int kScoreCells = 1, kScoreVectors = 1, kValueElements = 1, kValueVectors = 1;
#endif

// Thirty-two rows. Rows past the last one of the tile repeat it.
struct Group {
    float *q;        // [16 chains][dk / 16][32 rows]
    float *weights;  // [64 cells][32 rows]; scores at first
    float *acc;      // [dv][32 rows], of the segment
    float *total;    // [dv][32 rows], of the segments before
    alignas(64) float largest[kGroupRows], sum[kGroupRows];                // of the segment
    alignas(64) float largest_before[kGroupRows], sum_before[kGroupRows];  // of the segments before
    alignas(64) float fade[kGroupRows];  // what the sums so far are multiplied by as a block comes in
    alignas(64) int32_t seen_low[kGroupRows], seen_high[kGroupRows];  // of the block: bits of its cells
    uint64_t seen_by_any, seen_by_all;
};

template <int kC, int kR>
struct Block {
    vf v[kC][kR];
};

// The chains kFirst, kFirst + kStep, ... of sixteen, added as `sum` adds lanes.
template <int kFirst, int kStep, int kC, int kR>
TANDEM_INLINE Block<kC, kR> chains(const float *q, const float *k, int64_t dk) {
    Block<kC, kR> out;
    if constexpr (kStep == kWide) {
        const int64_t n = dk / kWide;
        q += kFirst * n * kGroupRows;
        TANDEM_UNROLL
        for (int c = 0; c < kC; ++c) {
            TANDEM_UNROLL
            for (int r = 0; r < kR; ++r) {
                out.v[c][r] = splat(0.0f);
            }
        }
        for (int64_t e = kFirst; e < dk; e += kWide) {
            vf rows[kR];
            TANDEM_UNROLL
            for (int r = 0; r < kR; ++r) {
                rows[r] = load(q + r * kNative);
            }
            q += kGroupRows;
            TANDEM_UNROLL
            for (int c = 0; c < kC; ++c) {
                const vf key = splat(k[c * dk + e]);
                TANDEM_UNROLL
                for (int r = 0; r < kR; ++r) {
                    out.v[c][r] = fused(rows[r], key, out.v[c][r]);
                }
            }
        }
    } else {
        out = chains<kFirst, 2 * kStep, kC, kR>(q, k, dk);
        const Block<kC, kR> other = chains<kFirst + kStep, 2 * kStep, kC, kR>(q, k, dk);
        TANDEM_UNROLL
        for (int c = 0; c < kC; ++c) {
            TANDEM_UNROLL
            for (int r = 0; r < kR; ++r) {
                out.v[c][r] = out.v[c][r] + other.v[c][r];
            }
        }
    }
    return out;
}

// Scores of all rows against the cells before `last` (and a few more).
inline void score(const Group &group, const float *k, int64_t dk, int last) {
    for (int r = 0; r < kGroupVectors; r += kScoreVectors) {
        for (int c = 0; c < last; c += kScoreCells) {
            const auto found =
                chains<0, 1, kScoreCells, kScoreVectors>(group.q + r * kNative, k + c * dk, dk);
            for (int i = 0; i < kScoreCells; ++i) {
                for (int j = 0; j < kScoreVectors; ++j) {
                    store(group.weights + (c + i) * kGroupRows + (r + j) * kNative, found.v[i][j]);
                }
            }
        }
    }
}

TANDEM_INLINE WideInt load_ints(const int32_t *p) {
    WideInt v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

// Which of sixteen rows see cell c.
TANDEM_INLINE WideInt rows_seeing(const Group &group, int w, int c) {
    const WideInt bit = wide_int(static_cast<int32_t>(uint32_t{1} << (c & 31)));
    return (load_ints((c < 32 ? group.seen_low : group.seen_high) + w * kWide) & bit) == bit;
}

// Adds the mask's values to one row's scores.
inline void add_bias(float *scores, const uint16_t *values, float slope, int last) {
    for (int c = 0; c < last; c += kWide) {
        const int n = last - c < kWide ? last - c : kWide;
        uint16_t some[kWide] = {};
        float sums[kWide] = {};
        std::memcpy(some, values + c, n * sizeof(uint16_t));
        for (int i = 0; i < n; ++i) {
            sums[i] = scores[(c + i) * kGroupRows];
        }
        wide_store(sums, fma(wide(slope), wide_load_f16(some), wide_load(sums)));
        for (int i = 0; i < n; ++i) {
            scores[(c + i) * kGroupRows] = sums[i];
        }
    }
}

// The sum of a block's weights, in the order in which lanes of cells would be added.
template <int kFirst, int kStep>
TANDEM_INLINE Wide block_sum(const float *weights) {
    if constexpr (kStep == kWide) {
        const auto of = [&](int i) { return wide_load(weights + (kFirst + i * kWide) * kGroupRows); };
        return (of(0) + of(1)) + (of(2) + of(3));
    } else {
        return block_sum<kFirst, 2 * kStep>(weights) + block_sum<kFirst + kStep, 2 * kStep>(weights);
    }
}

// Scores of sixteen rows to weights, in place. What scores are still to be multiplied by is `scale`, which is above
// zero: the largest score is then the largest before and after.
inline void weigh(Group &group, int w, int last, float scale) {
    float *weights = group.weights + w * kWide;
    const uint64_t all = group.seen_by_all;
    Wide top = wide(kNone);
    for (int c = 0; c < last; ++c) {
        Wide z = wide_load(weights + c * kGroupRows);
        if (!((all >> c) & 1)) {
            z = select(rows_seeing(group, w, c), z, wide(kNone));
        }
        top = max(z, top);
    }
    const Wide before = wide_load(group.largest + w * kWide);
    const Wide largest = max(top * wide(scale), before);
    const Wide fade = select(before == wide(kNone), wide(0.0f), exp(before - largest));
    wide_store(group.largest + w * kWide, largest);
    wide_store(group.fade + w * kWide, fade);
    for (int c = 0; c < last; ++c) {
        float *at = weights + c * kGroupRows;
        Wide e = exp(wide_load(at) * wide(scale) - largest);
        if (!((all >> c) & 1)) {
            e = select(rows_seeing(group, w, c), e, wide(0.0f));
        }
        wide_store(at, e);
    }
    for (int c = last; c < kCells; ++c) {
        wide_store(weights + c * kGroupRows, wide(0.0f));
    }
    const Wide sum = wide_load(group.sum + w * kWide) * fade;
    wide_store(group.sum + w * kWide, sum + block_sum<0, 1>(weights));
}

// acc += weights * values for the cells that are seen, one after the other, for kE elements of kR vectors of rows.
template <int kE, int kR>
TANDEM_INLINE void add_elements(const Group &group, const float *v, int64_t dv, int last, int64_t e, int r) {
    float *acc = group.acc + e * kGroupRows + r * kNative;
    const float *weights = group.weights + r * kNative;
    vf sums[kE][kR];
    TANDEM_UNROLL
    for (int j = 0; j < kR; ++j) {
        const vf fade = load(group.fade + (r + j) * kNative);
        TANDEM_UNROLL
        for (int i = 0; i < kE; ++i) {
            sums[i][j] = load(acc + i * kGroupRows + j * kNative) * fade;
        }
    }
    for (int c = 0; c < last;) {
        if ((group.seen_by_all >> c) & 1) {
            const uint64_t others = ~(group.seen_by_all >> c);
            const int run = others ? __builtin_ctzll(others) : kCells - c;
            for (const int end = c + run; c < end; ++c) {
                vf w[kR];
                TANDEM_UNROLL
                for (int j = 0; j < kR; ++j) {
                    w[j] = load(weights + c * kGroupRows + j * kNative);
                }
                TANDEM_UNROLL
                for (int i = 0; i < kE; ++i) {
                    const vf value = splat(v[c * dv + e + i]);
                    TANDEM_UNROLL
                    for (int j = 0; j < kR; ++j) {
                        sums[i][j] = fused(w[j], value, sums[i][j]);
                    }
                }
            }
            continue;
        }
        if ((group.seen_by_any >> c) & 1) {
            const int32_t *seen = (c < 32 ? group.seen_low : group.seen_high) + r * kNative;
            const vi bit = splat_int(static_cast<int32_t>(uint32_t{1} << (c & 31)));
            TANDEM_UNROLL
            for (int j = 0; j < kR; ++j) {
                vi bits;
                std::memcpy(&bits, seen + j * kNative, sizeof(bits));
                const vi sees = (bits & bit) == bit;
                const vf w = load(weights + c * kGroupRows + j * kNative);
                TANDEM_UNROLL
                for (int i = 0; i < kE; ++i) {
                    sums[i][j] = sees ? fused(w, splat(v[c * dv + e + i]), sums[i][j]) : sums[i][j];
                }
            }
        }
        ++c;
    }
    TANDEM_UNROLL
    for (int i = 0; i < kE; ++i) {
        TANDEM_UNROLL
        for (int j = 0; j < kR; ++j) {
            store(acc + i * kGroupRows + j * kNative, sums[i][j]);
        }
    }
}

inline void add_values(const Group &group, const float *v, int64_t dv, int last) {
    for (int r = 0; r < kGroupVectors; r += kValueVectors) {
        for (int64_t e = 0; e < dv; e += kValueElements) {
            add_elements<kValueElements, kValueVectors>(group, v, dv, last, e, r);
        }
    }
}

// Folds the segment of the rows in `lanes` (-1 or 0 each) into those before, and begins a new one.
inline void fold(Group &group, const int32_t *lanes, int64_t dv) {
    for (int w = 0; w < kGroupWides; ++w) {
        const auto at = [&](float *p) { return p + w * kWide; };
        const Wide segment = wide_load(at(group.largest)), before = wide_load(at(group.largest_before));
        const WideInt here = load_ints(lanes + w * kWide);
        const WideInt changed = here & (segment != wide(kNone));
        const WideInt first = before == wide(kNone);
        const Wide largest = select(before > segment, before, segment);
        const Wide old_fade = exp(before - largest), new_fade = exp(segment - largest);
        const auto combine = [&](float *totals, float *parts) {
            const Wide total = wide_load(totals), part = wide_load(parts);
            const Wide folded = select(first, part, fma(total, old_fade, part * new_fade));
            wide_store(totals, select(changed, folded, total));
            wide_store(parts, select(here, wide(0.0f), part));
        };
        for (int64_t e = 0; e < dv; ++e) {
            combine(at(group.total + e * kGroupRows), at(group.acc + e * kGroupRows));
        }
        const Wide sum = wide_load(at(group.sum)), sum_before = wide_load(at(group.sum_before));
        const Wide both = select(first, sum, sum_before * old_fade + sum * new_fade);
        wide_store(at(group.sum_before), select(changed, both, sum_before));
        wide_store(at(group.sum), select(here, wide(0.0f), sum));
        wide_store(at(group.largest_before), select(changed, select(first, segment, largest), before));
        wide_store(at(group.largest), select(here, wide(kNone), segment));
    }
}

inline void begin(Group &group, int64_t dv) {
    for (int i = 0; i < kGroupRows; ++i) {
        group.largest[i] = group.largest_before[i] = kNone;
        group.sum[i] = group.sum_before[i] = 0.0f;
    }
    std::memset(group.acc, 0, kGroupRows * dv * sizeof(float));
    std::memset(group.total, 0, kGroupRows * dv * sizeof(float));
}

}  // namespace tandem::TANDEM_ISA
