// Attention for tiles of many rows, as prompts have them: a lane for each row, cell after cell, element after element.
//
// Keys and values are unpacked once per block for all rows of the tile. Queries, scores and sums lie transposed, so that
// nothing is ever summed across lanes: a score's sixteen chains follow one another and are added in the order in which
// `sum` adds lanes.
#include "attention_group.h"

namespace tandem::TANDEM_ISA {
namespace {

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

typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__)
#define TANDEM_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t FourIndices __attribute__((vector_size(16)));
#define TANDEM_PICK(a, b, ...) __builtin_shuffle(a, b, FourIndices{__VA_ARGS__})
#endif

// Four vectors of four floats, turned.
TANDEM_INLINE void turn(Four (&v)[4]) {
    const Four a = TANDEM_PICK(v[0], v[1], 0, 4, 1, 5), b = TANDEM_PICK(v[0], v[1], 2, 6, 3, 7);
    const Four c = TANDEM_PICK(v[2], v[3], 0, 4, 1, 5), d = TANDEM_PICK(v[2], v[3], 2, 6, 3, 7);
    v[0] = TANDEM_PICK(a, c, 0, 1, 4, 5);
    v[1] = TANDEM_PICK(a, c, 2, 3, 6, 7);
    v[2] = TANDEM_PICK(b, d, 0, 1, 4, 5);
    v[3] = TANDEM_PICK(b, d, 2, 3, 6, 7);
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
