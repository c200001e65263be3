// What one instruction set's kernels offer: a table of functions over plain memory.
//
// Everything else (programs, threads, checks) is compiled once and calls through this table.
#pragma once

#include <cstdint>

#include "types.h"

namespace tandem {

// Activations as bytes: blocks of 32 along a row, each with a float scale. Rows come in tiles of `tile` tokens (1 or
// kTileTokens) so that a kernel reads a block of all its tokens from one place. For token t of a tile and block b of
// `blocks` = k / 32:
//   q[((tile_index * blocks + b) * tile + t) * 32 ...]    values in -127..127
//   d[(tile_index * blocks + b) * tile + t]               scale, the same for all blocks of a span
//   sum32[same], sum16[((tile_index * blocks + b) * 2 + half) * tile + t]   scale times the sum of the values
//   start32, start16[same]    kWholeBits - 128 times the sum: what integer sums with signed weights begin with
constexpr int kTileTokens = 8;
constexpr int kShortSpan = 32, kLongSpan = 128;
constexpr int kLongBlock = 256;  // elements
constexpr float kWhole = 12582912.0f;      // 1.5 * 2^23: floats around it are the whole numbers,
constexpr int32_t kWholeBits = 0x4b400000;  // and as integers they follow each other
struct Activations {
    int8_t *q;
    float *d;
    float *sum32;
    float *sum16;
    int32_t *start32;
    int32_t *start16;
    int64_t k;
    int32_t tile;
    int32_t span;  // values that share a scale, see activation_span
};

// y = W x for a quantized W [n_rows, k].
struct QuantMatmul {
    Type type;
    const uint8_t *weights;
    int64_t row_stride;  // bytes from row to row of a matrix that is not packed
    const bool *packed;  // whether whole groups of sixteen rows are interleaved now; may be null
    int64_t n_rows;
    int64_t k;
    Activations x;
    int64_t n_tokens;
    float *out;
    int64_t out_stride;        // floats between tokens
    const int32_t *out_index;  // null, or the row of `out` for each token
};

// y = W x for W of float rows; both sides have packed rows.
struct FloatMatmul {
    Type type;  // F32, F16 or BF16
    const char *weights;
    int64_t row_stride;  // bytes
    int64_t n_rows;
    int64_t k;
    const float *x;
    int64_t x_stride;  // floats between tokens
    const int32_t *x_index;  // null, or the row of `x` for each token
    int64_t n_tokens;
    float *out;
    int64_t out_stride;
    const int32_t *out_index;
};

enum class Unary : int32_t {
    ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARDSWISH, HARDSIGMOID, EXP, EXPM1, SOFTPLUS,
    GELU_ERF, XIELU, FLOOR, CEIL, ROUND, TRUNC,
};
enum class Glu : int32_t { REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP };

// Rare functions, the same code for every instruction set.
struct ScalarFunctions {
    float (*erf)(float);
    float (*elu)(float);
    float (*expm1)(float);
    float (*softplus)(float);
    float (*xielu)(float x, float alpha_n, float alpha_p, float beta, float eps);
    float (*floor)(float);
    float (*ceil)(float);
    float (*round)(float);
    float (*trunc)(float);
};
const ScalarFunctions &scalar_functions();

// One row of floats out of a row of any type, and back.
using ToFloat = void (*)(Type type, const void *from, float *to, int64_t n);

constexpr int kAttentionBlock = 64;
constexpr int kSegmentBlocks = 8;   // visible blocks of a row that share one maximum
constexpr int kAttentionRows = 64;  // rows of a tile: query tokens times heads

// What one row of the mask shows.
struct MaskRow {
    int64_t n_visible;
    const uint32_t *visible;  // [n_visible] blocks of 64 cells, rising
    const uint64_t *seen;     // [n_visible] cells of each
    const uint16_t *values;   // the row itself, half floats; null without a mask
    bool biased;              // whether shown cells have values other than zero
};

struct Attention {
    const char *q, *k, *v;
    int64_t q_token_stride, q_head_stride, q_sequence_stride;
    int64_t k_stride, k_head_stride, k_sequence_stride;  // bytes from cell to cell, ...
    int64_t v_stride, v_head_stride, v_sequence_stride;
    int64_t k_row_bytes, v_row_bytes;                    // of one head of a cell
    Type k_type, v_type;
    int64_t dk, dv, n_tokens, n_heads, n_kv;
    float scale, softcap, max_bias;
    const float *slopes;  // [n_heads], where max_bias is not 0
    const float *sinks;   // [n_heads] or null
    const MaskRow *mask_rows;
    int64_t mask_heads, mask_sequences, mask_tokens;  // extents of the mask; tokens and heads beyond them wrap
    float *out;  // [dv, n_heads, n_tokens, sequences]
    ToFloat to_float;

    int64_t mask_row_index(int64_t token, int64_t head, int64_t sequence) const {
        return ((sequence % mask_sequences) * mask_heads + head % mask_heads) * mask_tokens + token % mask_tokens;
    }
    float *out_row(int64_t token, int64_t head, int64_t sequence) const {
        return out + ((sequence * n_tokens + token) * n_heads + head) * dv;
    }
};

// Some tokens times some heads of one key/value head; `segment` -1: all of them.
struct AttentionTile {
    int64_t sequence, kv_head, first_token, first_head;
    int32_t n_tokens, n_heads;
    int64_t segment;
};

struct Kernels {
    const char *name;
    void (*quantize)(const float *x, int64_t row, const Activations &out);
    // Rows [16 * group_begin, 16 * group_end) for tokens of tiles [tile_begin, tile_end). `scratch` as below.
    void (*matmul_quant)(const QuantMatmul &m, int64_t group_begin, int64_t group_end, int64_t tile_begin,
                         int64_t tile_end, char *scratch);
    void (*matmul_float)(const FloatMatmul &m, int64_t row_begin, int64_t row_end, int64_t token_begin,
                         int64_t token_end);

    int64_t (*attention_scratch_bytes)(int64_t dk, int64_t dv);
    void (*attention_tile)(const Attention &a, const AttentionTile &tile, char *scratch, float *partial);
    void (*attention_fold)(const Attention &a, const float *partial, int64_t stride, int64_t n_segments, int64_t token,
                           int64_t head, int64_t sequence, char *scratch);
    void (*reduce_mask_row)(const uint16_t *mask, int64_t n_kv, MaskRow &out, uint32_t *visible, uint64_t *seen);

    void (*binary_row)(Op op, const float *a, const float *b, int64_t n_b, float *y, int64_t n);
    void (*scale_row)(const float *x, float *y, int64_t n, float s, float b);
    void (*clamp_row)(const float *x, float *y, int64_t n, float low, float high);
    void (*unary_row)(Unary op, const float *params, const float *x, float *y, int64_t n);
    void (*glu_row)(Glu op, const float *a, const float *b, float *y, int64_t n, float alpha, float limit);
    float (*sum_row)(const float *x, int64_t n);
    void (*rms_norm_row)(const float *x, float *y, int64_t n, float eps);
    void (*norm_row)(const float *x, float *y, int64_t n, float eps);
    void (*l2_norm_row)(const float *x, float *y, int64_t n, float eps);
    void (*softmax_row)(const float *x, const float *mask, float *y, int64_t n, float scale, float slope,
                        const float *sink);
    void (*rope_row)(const float *x, float *y, const float *table, int64_t n_dims, int64_t n, int64_t first,
                     bool neighbours, int64_t distance);
    void (*exp_row)(const float *x, float *y, int64_t n);
    void (*delta_row)(float *s, int64_t n, const float *decay, bool decay_per_key, const float *k, const float *q,
                      float v, float beta, float scale, float *out);
    float (*scan_row)(float *s, int64_t n, const float *decay, bool decay_per_element, const float *b, float input,
                      const float *c);
    void (*f16_to_f32)(const uint16_t *x, float *y, int64_t n);
    void (*f32_to_f16)(const float *x, uint16_t *y, int64_t n);
};

// The variants this machine can run, best first, and one of them by name (null: none of that name runs here).
const Kernels *const *runnable_kernels();  // ends with null
const Kernels *kernels_named(const char *name);

// How many activations share a scale when weights of this type multiply them; 0: they stay floats. Next to weights in
// blocks of 256 a scale for each 32 activations would cost more instructions than it is worth.
int32_t activation_span(Type type);

// Bytes of scratch that matmul_quant needs for rows of `k` elements, per thread.
int64_t matmul_quant_scratch_bytes(Type type, int64_t k);

}  // namespace tandem
