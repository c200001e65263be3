// Attention for a few rows: lanes along the head, half floats read where they lie.
#include <type_traits>

#include "attention.h"

namespace tandem::TANDEM_ISA {
namespace {

// What a tile of rows works with; in the thread's scratch.
struct Room {
    float *q;       // [rows][dk]
    float *k;       // [64][dk]
    float *v;       // [64][dv]
    float *scores;  // [rows][64]
    float *acc;     // [rows][dv], of the segment
    float *total;   // [rows][dv], of the segments before
};

Room room_in(char *scratch, const Attention &a) {
    const int64_t dk = padded(a.dk), dv = padded(a.dv);
    Room room;
    room.q = reinterpret_cast<float *>(scratch);
    room.k = room.q + kAttentionRows * dk;
    room.v = room.k + kCells * dk;
    room.scores = room.v + kCells * dv;
    room.acc = room.scores + kAttentionRows * kCells;
    room.total = room.acc + kAttentionRows * dv;
    return room;
}

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
    each_columns<kParts == 1 ? 4 : 1>(dv, [&](auto columns, int64_t i) [[gnu::always_inline]] {
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
    each_columns<kParts == 1 ? 8 : 2>(dv, [&](auto columns, int64_t i) [[gnu::always_inline]] {
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

WideInt lanes_of_bits(uint64_t seen, int first) {
    static constexpr int32_t kBits[kWide] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    WideInt lanes;
    std::memcpy(&lanes, kBits, sizeof(lanes));
    return (wide_int(static_cast<int32_t>((seen >> first) & 0xffff)) & lanes) == lanes;
}

// Scaled scores of a row with cap, bias and mask, in place; the largest. `bias`: the mask's values, or null if they
// are zeros.
float adjust(const Attention &a, float *scores, uint64_t seen, const uint16_t *bias, float slope) {
    Wide top = wide(kNone);
    for (int g = 0; g < kCells; g += kWide) {
        Wide z = wide_load(scores + g) * wide(a.scale);
        if (a.softcap != 0.0f) {
            z = wide(a.softcap) * tanh(z / wide(a.softcap));
        }
        if (bias) {
            z = fma(wide(slope), wide_load_f16(bias + g), z);
        }
        if (seen != ~uint64_t{0}) {
            z = select(lanes_of_bits(seen, g), z, wide(kNone));
        }
        wide_store(scores + g, z);
        top = max(z, top);
    }
    return max_lane(top);
}

// A new maximum for a row, if a block's is one: what was gathered before fades.
void raise(Softmax &state, float block_max, float *acc, int64_t dv) {
    if (!(block_max > state.largest)) {
        return;
    }
    const float fade = state.largest == kNone ? 0.0f : exp_one(state.largest - block_max);
    if (state.largest != kNone) {
        for (int64_t i = 0; i < dv; i += kWide) {
            wide_store(acc + i, wide_load(acc + i) * wide(fade));
        }
    }
    state.sum *= fade;
    state.largest = block_max;
}

// Scores to weights, in place, and their sum.
float weigh(float *scores, float largest) {
    Wide z[kCells / kWide];
    for (int g = 0; g < kCells / kWide; ++g) {
        z[g] = exp(wide_load(scores + g * kWide) - wide(largest));
        wide_store(scores + g * kWide, z[g]);
    }
    return sum((z[0] + z[1]) + (z[2] + z[3]));
}

// Folds a segment into the ones before it.
void fold(Softmax &before, float *total, const Softmax &segment, const float *acc, int64_t dv) {
    if (segment.largest == kNone) {
        return;
    }
    if (before.largest == kNone) {
        before = segment;
        std::memcpy(total, acc, dv * sizeof(float));
        return;
    }
    const float largest = before.largest > segment.largest ? before.largest : segment.largest;
    const float old_fade = exp_one(before.largest - largest);
    const float new_fade = exp_one(segment.largest - largest);
    for (int64_t i = 0; i < dv; i += kWide) {
        wide_store(total + i, fma(wide_load(total + i), wide(old_fade), wide_load(acc + i) * wide(new_fade)));
    }
    before.sum = before.sum * old_fade + segment.sum * new_fade;
    before.largest = largest;
}

// The weighted sum over everything a row saw; zeros for a row that saw nothing.
void write_row(const Attention &a, const Softmax &state, const float *total, int64_t head, float *out) {
    if (state.largest == kNone) {
        std::memset(out, 0, a.dv * sizeof(float));
        return;
    }
    const Wide scale = wide(final_scale(a, state, head));
    for (int64_t i = 0; i < a.dv; i += kWide) {
        wide_store(out + i, wide_load(total + i) * scale, a.dv - i);
    }
}

struct Tile {
    const Attention &a;
    const AttentionTile &at;
    Room room;
    int64_t dk, dv;
    int n_rows;
    Softmax state[kAttentionRows];
    Softmax before[kAttentionRows];
};

// Calls f(rows, first) for rows taken four at a time, then for the rest.
template <class F>
void by_rows(int n, F f) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        f(std::integral_constant<int, 4>(), i);
    }
    switch (n - i) {
        case 3: return f(std::integral_constant<int, 3>(), i);
        case 2: return f(std::integral_constant<int, 2>(), i);
        case 1: return f(std::integral_constant<int, 1>(), i);
        default: return;
    }
}

// The rows that see a block, and what they see of it.
struct Active {
    int n;
    int64_t next_block;  // where to go after this one, or the block itself
    int rows[kAttentionRows];
    uint64_t seen[kAttentionRows];
};

template <class Keys, class Values>
void attend(Tile &tile, const Active &active, int64_t first, int last, Keys k, Values v) {
    const Attention &a = tile.a;
    const float *q[kAttentionRows];
    float *scores[kAttentionRows];
    float *acc[kAttentionRows];
    for (int i = 0; i < active.n; ++i) {
        q[i] = tile.room.q + active.rows[i] * tile.dk;
        scores[i] = tile.room.scores + active.rows[i] * kCells;
        acc[i] = tile.room.acc + active.rows[i] * tile.dv;
    }
    by_rows(active.n, [&](auto together, int i) { score_rows<together>(q + i, k, last, tile.dk, scores + i); });
    uint64_t common = ~uint64_t{0};
    // Step by step for all rows: each is a chain of operations that wait for each other, and rows wait for none.
    uint16_t bias[kCells] = {};
    float largest[kAttentionRows];
    for (int i = 0; i < active.n; ++i) {
        const int row = active.rows[i];
        const MaskRow &mask = mask_of(a, tile.at, row);
        if (mask.biased) {
            std::memcpy(bias, mask.values + first, last * sizeof(uint16_t));
        }
        largest[i] = adjust(a, scores[i], active.seen[i], mask.biased ? bias : nullptr,
                            slope_of(a, head_of(tile.at, row)));
        common &= active.seen[i];
    }
    for (int i = 0; i < active.n; ++i) {
        raise(tile.state[active.rows[i]], largest[i], acc[i], tile.dv);
    }
    for (int i = 0; i < active.n; ++i) {
        Softmax &state = tile.state[active.rows[i]];
        state.sum += weigh(scores[i], state.largest);
    }
    // A run of cells that all rows see is added for all of them at once; what a row sees before and behind it, alone.
    const int run = common ? __builtin_ctzll(common) : 0;
    const uint64_t hidden = ~(common >> run);
    const int run_end = common == 0 ? 0 : hidden == 0 ? kCells : run + __builtin_ctzll(hidden);
    const uint64_t below = (uint64_t{1} << run) - 1;
    const uint64_t above = run_end == kCells ? 0 : ~uint64_t{0} << run_end;
    for (int i = 0; i < active.n; ++i) {
        add_seen_values(scores[i], active.seen[i] & below, v, tile.dv, acc[i]);
    }
    by_rows(active.n, [&](auto together, int i) {
        add_values<together>(scores + i, v, run, run_end, tile.dv, acc + i);
    });
    for (int i = 0; i < active.n; ++i) {
        add_seen_values(scores[i], active.seen[i] & above, v, tile.dv, acc[i]);
    }
}

void process_block(Tile &tile, int64_t block, const Active &active) {
    const Attention &a = tile.a;
    const int64_t first = block * kCells;
    uint64_t any = 0;
    for (int i = 0; i < active.n; ++i) {
        any |= active.seen[i];
    }
    const int last = kCells - __builtin_clzll(any);  // cells from there on nobody sees
    const char *k = keys_of(a, tile.at), *v = values_of(a, tile.at);
    // Few rows read half floats where they lie; many rows share one unpacking.
    const bool in_place = active.n <= 4 && a.k_type == Type::F16 && a.v_type == Type::F16 && a.dk == tile.dk &&
                          a.dv == tile.dv && first + kCells <= a.n_kv;
    if (in_place) {
        const auto at = [](const char *base, int64_t stride, int64_t block) {
            return reinterpret_cast<const uint16_t *>(base + block * kCells * stride);
        };
        const HalfCells keys{at(k, a.k_stride, block), a.k_stride / 2, at(k, a.k_stride, active.next_block)};
        const HalfCells values{at(v, a.v_stride, block), a.v_stride / 2, at(v, a.v_stride, active.next_block)};
        return attend(tile, active, first, last, keys, values);
    }
    unpack_cells(a, a.k_type, k, a.k_stride, first, last, a.dk, tile.room.k);
    unpack_cells(a, a.v_type, v, a.v_stride, first, last, a.dv, tile.room.v);
    attend(tile, active, first, last, FloatCells{tile.room.k, tile.dk}, FloatCells{tile.room.v, tile.dv});
}

void clear_row(Tile &tile, int row) {
    tile.state[row] = Softmax();
    for (int64_t i = 0; i < tile.dv; ++i) {
        tile.room.acc[row * tile.dv + i] = 0.0f;
    }
}

}  // namespace

int64_t rows_scratch_floats(int64_t dk, int64_t dv) {
    return kAttentionRows * (padded(dk) + 2 * padded(dv) + kCells) + kCells * (padded(dk) + padded(dv));
}

// One tile over all its blocks, or (segment >= 0) over one segment of a single token's blocks, whose state and sums go
// to `partial` as [row][2 + dv padded].
void attend_rows(const Attention &a, const AttentionTile &at, char *scratch, float *partial) {
    Tile tile{a, at, room_in(scratch, a), padded(a.dk), padded(a.dv), at.n_tokens * at.n_heads, {}, {}};
    // Where each row stands in its list of visible blocks.
    int64_t next[kAttentionRows];
    int64_t end[kAttentionRows];
    for (int row = 0; row < tile.n_rows; ++row) {
        float *to = tile.room.q + row * tile.dk;
        std::memcpy(to, query_of(a, at, row), a.dk * sizeof(float));
        for (int64_t i = a.dk; i < tile.dk; ++i) {
            to[i] = 0.0f;
        }
        clear_row(tile, row);
        const MaskRow &mask = mask_of(a, tile.at, row);
        next[row] = at.segment < 0 ? 0 : at.segment * kSegmentBlocks;
        end[row] = at.segment < 0 || next[row] + kSegmentBlocks > mask.n_visible ? mask.n_visible
                                                                                : next[row] + kSegmentBlocks;
    }
    for (;;) {
        int64_t block = INT64_MAX;
        for (int row = 0; row < tile.n_rows; ++row) {
            if (next[row] < end[row]) {
                const int64_t b = mask_of(a, tile.at, row).visible[next[row]];
                block = b < block ? b : block;
            }
        }
        if (block == INT64_MAX) {
            break;
        }
        Active active;
        active.n = 0;
        active.next_block = block;
        for (int row = 0; row < tile.n_rows; ++row) {
            const MaskRow &mask = mask_of(a, tile.at, row);
            if (next[row] >= end[row] || mask.visible[next[row]] != block) {
                continue;
            }
            if (at.segment < 0 && next[row] > 0 && next[row] % kSegmentBlocks == 0) {
                fold(tile.before[row], tile.room.total + row * tile.dv, tile.state[row],
                     tile.room.acc + row * tile.dv, tile.dv);
                clear_row(tile, row);
            }
            active.rows[active.n] = row;
            active.seen[active.n++] = mask.seen[next[row]];
            if (++next[row] < mask.n_visible) {
                active.next_block = mask.visible[next[row]];
            }
        }
        process_block(tile, block, active);
    }
    for (int row = 0; row < tile.n_rows; ++row) {
        float *acc = tile.room.acc + row * tile.dv;
        if (at.segment >= 0) {
            float *to = partial + row * (2 + tile.dv);
            to[0] = tile.state[row].largest;
            to[1] = tile.state[row].sum;
            std::memcpy(to + 2, acc, tile.dv * sizeof(float));
            continue;
        }
        float *total = tile.room.total + row * tile.dv;
        fold(tile.before[row], total, tile.state[row], acc, tile.dv);
        const int64_t head = head_of(at, row);
        write_row(a, tile.before[row], total, head, a.out_row(token_of(at, row), head, at.sequence));
    }
}

// Folds the segments of one row, `stride` floats apart, as attention_tile would have.
void attention_fold(const Attention &a, const float *partial, int64_t stride, int64_t n_segments, int64_t token,
                    int64_t head, int64_t sequence, char *scratch) {
    const int64_t dv = padded(a.dv);
    auto *total = reinterpret_cast<float *>(scratch);
    Softmax before;
    for (int64_t s = 0; s < n_segments; ++s) {
        const float *p = partial + s * stride;
        fold(before, total, Softmax{p[0], p[1]}, p + 2, dv);
    }
    write_row(a, before, total, head, a.out_row(token, head, sequence));
}

}  // namespace tandem::TANDEM_ISA
