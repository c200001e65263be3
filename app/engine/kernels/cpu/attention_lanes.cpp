// Attention for tiles of many rows, as prompts have them: a lane for each row, cell after cell, element after element.
//
// Keys and values are unpacked once per block for all rows of the tile. Queries, scores and sums lie transposed, so that
// nothing is ever summed across lanes: a score's sixteen chains follow one another and are added in the order in which
// `sum` adds lanes.
#include "attention.h"

namespace tandem::TANDEM_ISA {
namespace {

constexpr int kGroups = kAttentionRows / kGroupRows;
constexpr int kGroupWides = kGroupRows / kWide;
constexpr int kGroupVectors = kGroupRows / kNative;

// Register blocks: cells (or elements of a value) times native vectors of rows.
#if defined(__AVX512F__)
constexpr int kScoreCells = 4, kScoreVectors = 2, kValueElements = 8, kValueVectors = 2;
#elif defined(__aarch64__)
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

struct Lanes {
    const Attention &a;
    const AttentionTile &at;
    int64_t dk, dv;
    int n_rows, n_groups;
    float *k;  // [64][dk]
    float *v;  // [64][dv]
    Group groups[kGroups];

    int row_of(int group, int lane) const {
        const int row = group * kGroupRows + lane;
        return row < n_rows ? row : n_rows - 1;
    }
};

// Where each row stands in its list of visible blocks.
struct Walk {
    const MaskRow *mask[kAttentionRows];
    int64_t next[kAttentionRows];

    bool at_block(int row, uint32_t block) const {
        return next[row] < mask[row]->n_visible && mask[row]->visible[next[row]] == block;
    }
};

void place(Lanes &tile, char *scratch) {
    float *p = reinterpret_cast<float *>(scratch);
    const auto take = [&](int64_t n) {
        float *taken = p;
        p += n;
        return taken;
    };
    tile.k = take(kCells * tile.dk);
    tile.v = take(kCells * tile.dv);
    for (Group &group : tile.groups) {
        group.q = take(kGroupRows * tile.dk);
        group.weights = take(kGroupRows * kCells);
        group.acc = take(kGroupRows * tile.dv);
        group.total = take(kGroupRows * tile.dv);
    }
}

// Four vectors of four floats, turned.
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourIndices __attribute__((vector_size(16)));
TANDEM_INLINE void turn(Four (&v)[4]) {
    const FourIndices low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    const Four a = __builtin_shuffle(v[0], v[1], low), b = __builtin_shuffle(v[0], v[1], high);
    const Four c = __builtin_shuffle(v[2], v[3], low), d = __builtin_shuffle(v[2], v[3], high);
    v[0] = __builtin_shuffle(a, c, left);
    v[1] = __builtin_shuffle(a, c, right);
    v[2] = __builtin_shuffle(b, d, left);
    v[3] = __builtin_shuffle(b, d, right);
}

void load_queries(Lanes &tile, int g) {
    const int64_t dk = tile.a.dk, n = tile.dk / kWide;
    float *q = tile.groups[g].q;
    for (int lane = 0; lane < kGroupRows; lane += 4) {
        const float *from[4];
        for (int i = 0; i < 4; ++i) {
            from[i] = query_of(tile.a, tile.at, tile.row_of(g, lane + i));
        }
        for (int64_t e = 0; e < tile.dk; e += 4) {
            Four v[4] = {};
            for (int i = 0; i < 4; ++i) {
                const int64_t left = dk - e;
                std::memcpy(&v[i], from[i] + e, left >= 4 ? sizeof(Four) : left > 0 ? left * sizeof(float) : 0);
            }
            turn(v);
            for (int i = 0; i < 4; ++i) {
                const int64_t chain = (e + i) % kWide, at = (e + i) / kWide;
                std::memcpy(q + (chain * n + at) * kGroupRows + lane, &v[i], sizeof(Four));
            }
        }
    }
}

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
void score(const Group &group, const float *k, int64_t dk, int last) {
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
void add_bias(float *scores, const uint16_t *values, float slope, int last) {
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

// Whether any row's mask has values other than zero.
bool biased(const Walk &walk, const Lanes &tile, int g) {
    bool any = false;
    for (int lane = 0; lane < kGroupRows; ++lane) {
        any = any || walk.mask[tile.row_of(g, lane)]->biased;
    }
    return any;
}

// Scaled scores with cap and bias, in place, for all rows of the group.
void adjust(const Lanes &tile, const Walk &walk, int g, int64_t first_cell, int last) {
    float *scores = tile.groups[g].weights;
    const Wide scale = wide(tile.a.scale), cap = wide(tile.a.softcap);
    for (int i = 0; i < last * kGroupRows; i += kWide) {
        const Wide z = wide_load(scores + i) * scale;
        wide_store(scores + i, tile.a.softcap != 0.0f ? cap * tanh(z / cap) : z);
    }
    for (int lane = 0; lane < kGroupRows; ++lane) {
        const int row = tile.row_of(g, lane);
        if (walk.mask[row]->biased) {
            add_bias(scores + lane, walk.mask[row]->values + first_cell, slope_of(tile.a, head_of(tile.at, row)), last);
        }
    }
}

// Scores of sixteen rows to weights, in place. What scores are still to be multiplied by is `scale`, which is above
// zero: the largest score is then the largest before and after.
void weigh(Group &group, int w, int last, float scale) {
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

void add_values(const Group &group, const float *v, int64_t dv, int last) {
    for (int r = 0; r < kGroupVectors; r += kValueVectors) {
        for (int64_t e = 0; e < dv; e += kValueElements) {
            add_elements<kValueElements, kValueVectors>(group, v, dv, last, e, r);
        }
    }
}

// Folds the segment of the rows in `lanes` (-1 or 0 each) into those before, and begins a new one.
void fold(Group &group, const int32_t *lanes, int64_t dv) {
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

void begin(Group &group, int64_t dv) {
    for (int i = 0; i < kGroupRows; ++i) {
        group.largest[i] = group.largest_before[i] = kNone;
        group.sum[i] = group.sum_before[i] = 0.0f;
    }
    std::memset(group.acc, 0, kGroupRows * dv * sizeof(float));
    std::memset(group.total, 0, kGroupRows * dv * sizeof(float));
}

void write_rows(const Lanes &tile, int g) {
    const Attention &a = tile.a;
    const Group &group = tile.groups[g];
    alignas(64) float scales[kGroupRows];
    for (int lane = 0; lane < kGroupRows; ++lane) {
        const Softmax state{group.largest_before[lane], group.sum_before[lane]};
        scales[lane] = state.largest == kNone ? 0.0f : final_scale(a, state, head_of(tile.at, tile.row_of(g, lane)));
    }
    for (int lane = 0; lane < kGroupRows; lane += 4) {
        Four scale;
        std::memcpy(&scale, scales + lane, sizeof(scale));
        for (int64_t e = 0; e < tile.dv; e += 4) {
            Four v[4];
            for (int i = 0; i < 4; ++i) {
                std::memcpy(&v[i], group.total + (e + i) * kGroupRows + lane, sizeof(Four));
                v[i] *= scale;
            }
            turn(v);
            for (int i = 0; i < 4 && g * kGroupRows + lane + i < tile.n_rows; ++i) {
                const int row = tile.row_of(g, lane + i);
                float *out = a.out_row(token_of(tile.at, row), head_of(tile.at, row), tile.at.sequence);
                const int64_t left = a.dv - e;
                std::memcpy(out + e, &v[i], left >= 4 ? sizeof(Four) : left > 0 ? left * sizeof(float) : 0);
            }
        }
    }
}

// Whether any row of the group sees the block; rows that have a whole segment behind them fold it first.
bool meet(Lanes &tile, Walk &walk, int g, uint32_t block) {
    Group &group = tile.groups[g];
    alignas(64) int32_t full[kGroupRows];
    bool any_full = false;
    group.seen_by_any = 0;
    group.seen_by_all = ~uint64_t{0};
    for (int lane = 0; lane < kGroupRows; ++lane) {
        const int row = tile.row_of(g, lane);
        const bool sees = walk.at_block(row, block);
        const int64_t n = walk.next[row];
        const uint64_t seen = sees ? walk.mask[row]->seen[n] : 0;
        full[lane] = sees && n > 0 && n % kSegmentBlocks == 0 ? -1 : 0;
        any_full = any_full || full[lane] != 0;
        group.seen_low[lane] = static_cast<int32_t>(static_cast<uint32_t>(seen));
        group.seen_high[lane] = static_cast<int32_t>(static_cast<uint32_t>(seen >> 32));
        group.seen_by_any |= seen;
        group.seen_by_all &= seen;
    }
    if (any_full) {
        fold(group, full, tile.dv);
    }
    return group.seen_by_any != 0;
}

// Asks for the cells of a block, a line of the cache (64 bytes) at a time.
void fetch(const char *base, int64_t stride, int64_t row_bytes, int64_t first, int64_t n_cells) {
    const char *row = base + first * stride;
    for (int64_t c = 0; c < n_cells; ++c, row += stride) {
        for (int64_t i = 0; i < row_bytes; i += 64) {
            __builtin_prefetch(row + i);
        }
    }
}

void attend_block(Lanes &tile, Walk &walk, uint32_t block) {
    const Attention &a = tile.a;
    bool sees[kGroups] = {};
    uint64_t any = 0;
    for (int g = 0; g < tile.n_groups; ++g) {
        sees[g] = meet(tile, walk, g, block);
        any |= tile.groups[g].seen_by_any;
    }
    for (int row = 0; row < tile.n_rows; ++row) {
        walk.next[row] += walk.at_block(row, block);
    }
    const int64_t first = static_cast<int64_t>(block) * kCells;
    const int n_cells = kCells - __builtin_clzll(any);  // cells from there on nobody sees
    unpack_cells(a, a.k_type, keys_of(a, tile.at), a.k_stride, first, n_cells, a.dk, tile.k);
    unpack_cells(a, a.v_type, values_of(a, tile.at), a.v_stride, first, n_cells, a.dv, tile.v);
    const int64_t left = a.n_kv - first - kCells;
    const int64_t ahead = left < 0 ? 0 : left < kCells ? left : kCells;
    fetch(keys_of(a, tile.at), a.k_stride, a.k_row_bytes, first + kCells, ahead);
    fetch(values_of(a, tile.at), a.v_stride, a.v_row_bytes, first + kCells, ahead);
    for (int g = 0; g < tile.n_groups; ++g) {
        if (!sees[g]) {
            continue;
        }
        Group &group = tile.groups[g];
        const int last = kCells - __builtin_clzll(group.seen_by_any);
        score(group, tile.k, tile.dk, last);
        const bool simple = a.softcap == 0.0f && a.scale > 0.0f && !biased(walk, tile, g);
        if (!simple) {
            adjust(tile, walk, g, first, last);
        }
        for (int w = 0; w < kGroupWides; ++w) {
            weigh(group, w, last, simple ? a.scale : 1.0f);
        }
        add_values(group, tile.v, tile.dv, last);
    }
}

}  // namespace

int64_t lanes_scratch_floats(int64_t dk, int64_t dv) {
    const int64_t group = kGroupRows * (padded(dk) + kCells + 2 * padded(dv));
    return kCells * (padded(dk) + padded(dv)) + kGroups * group;
}

void attend_lanes(const Attention &a, const AttentionTile &at, char *scratch) {
    const int n_rows = at.n_tokens * at.n_heads;
    Lanes tile{a, at, padded(a.dk), padded(a.dv), n_rows, (n_rows + kGroupRows - 1) / kGroupRows, {}, {}, {}};
    place(tile, scratch);
    for (int g = 0; g < tile.n_groups; ++g) {
        load_queries(tile, g);
        begin(tile.groups[g], tile.dv);
    }
    Walk walk;
    for (int row = 0; row < n_rows; ++row) {
        walk.mask[row] = &mask_of(a, at, row);
        walk.next[row] = 0;
    }
    for (;;) {
        uint32_t block = UINT32_MAX;
        for (int row = 0; row < n_rows; ++row) {
            if (walk.next[row] < walk.mask[row]->n_visible) {
                const uint32_t candidate = walk.mask[row]->visible[walk.next[row]];
                block = candidate < block ? candidate : block;
            }
        }
        if (block == UINT32_MAX) {
            break;
        }
        attend_block(tile, walk, block);
    }
    alignas(64) int32_t all[kGroupRows];
    for (int32_t &lane : all) {
        lane = -1;
    }
    for (int g = 0; g < tile.n_groups; ++g) {
        fold(tile.groups[g], all, tile.dv);
        write_rows(tile, g);
    }
}

}  // namespace tandem::TANDEM_ISA
