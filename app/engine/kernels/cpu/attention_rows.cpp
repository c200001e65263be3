// Attention for a few rows: lanes along the head, half floats read where they lie.
#include "attention_cells.h"
#include "attention_softmax.h"

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
