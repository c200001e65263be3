// What the attention kernels of one instruction set share.
//
// Cells are met in index order in aligned blocks of 64. For one query row a block is either hidden, and then nothing
// happens, or visible: scores of its cells (sixteen chains of fused multiply-adds along the head, then their sum), the
// new maximum, weights, and the values added cell by cell. Every eight visible blocks of a row make a segment with its
// own maximum and sum; segments are folded together in order. So a row's result depends on its own visible blocks
// alone: not on its neighbours in the tile, nor on how blocks are shared between threads.
//
// Two kernels compute it with the same bits. attention_rows.cpp takes rows one by one, lanes along the head: for a few
// rows, which read the cache where it lies. attention_lanes.cpp takes a lane for each row: for prompts.
#pragma once

#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {

constexpr int kCells = kAttentionBlock;
constexpr int kGroupRows = 32;  // rows whose lanes are computed together
constexpr float kNone = -__builtin_inff();

constexpr int64_t padded(int64_t n) { return (n + kWide - 1) / kWide * kWide; }

// A row's running softmax.
struct Softmax {
    float largest = kNone;
    float sum = 0.0f;
};

inline float exp_one(float x) {
    float lanes[kWide];
    wide_store(lanes, exp(wide(x)));
    return lanes[0];
}

// Where the keys or values of a tile's head begin.
inline const char *keys_of(const Attention &a, const AttentionTile &at) {
    return a.k + at.kv_head * a.k_head_stride + at.sequence * a.k_sequence_stride;
}
inline const char *values_of(const Attention &a, const AttentionTile &at) {
    return a.v + at.kv_head * a.v_head_stride + at.sequence * a.v_sequence_stride;
}

// The rows of a tile: some query tokens times some heads that share keys and values.
inline int64_t token_of(const AttentionTile &at, int row) { return at.first_token + row / at.n_heads; }
inline int64_t head_of(const AttentionTile &at, int row) { return at.first_head + row % at.n_heads; }
inline const MaskRow &mask_of(const Attention &a, const AttentionTile &at, int row) {
    return a.mask_rows[a.mask_row_index(token_of(at, row), head_of(at, row), at.sequence)];
}
inline const float *query_of(const Attention &a, const AttentionTile &at, int row) {
    return reinterpret_cast<const float *>(a.q + token_of(at, row) * a.q_token_stride +
                                           head_of(at, row) * a.q_head_stride + at.sequence * a.q_sequence_stride);
}
inline float slope_of(const Attention &a, int64_t head) { return a.max_bias == 0.0f ? 1.0f : a.slopes[head]; }

// Unpacks cells [first, first + n_cells) of `n` elements to rows of padded(n) floats.
void unpack_cells(const Attention &a, Type type, const char *base, int64_t stride, int64_t first, int64_t n_cells,
                  int64_t n, float *out);

// What a row's weighted sum is multiplied by in the end, its sink included.
float final_scale(const Attention &a, const Softmax &state, int64_t head);

void attend_rows(const Attention &a, const AttentionTile &at, char *scratch, float *partial);
void attend_lanes(const Attention &a, const AttentionTile &at, char *scratch);
int64_t rows_scratch_floats(int64_t dk, int64_t dv);
int64_t lanes_scratch_floats(int64_t dk, int64_t dv);

}  // namespace tandem::TANDEM_ISA
