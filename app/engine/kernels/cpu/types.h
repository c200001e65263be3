// ggml's numbers as native code needs them, and tensors of a program with their addresses.
#pragma once

#include <cstdint>

namespace tandem {

enum class Type : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23,
    I8 = 24, I16 = 25, I32 = 26, I64 = 27, F64 = 28, IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39,
    NVFP4 = 40, Q1_0 = 41, Q2_0 = 42,
};

enum class Op : int32_t {
    NONE = 0, DUP = 1, ADD = 2, ADD_ID = 3, ADD1 = 4, ACC = 5, SUB = 6, MUL = 7, DIV = 8, SQR = 9, SQRT = 10, LOG = 11,
    SIN = 12, COS = 13, SUM = 14, SUM_ROWS = 15, CUMSUM = 16, MEAN = 17, ARGMAX = 18, REPEAT = 20, CONCAT = 22,
    NORM = 24, RMS_NORM = 25, GROUP_NORM = 27, L2_NORM = 28, MUL_MAT = 29, MUL_MAT_ID = 30, OUT_PROD = 31, SCALE = 32,
    SET = 33, CPY = 34, CONT = 35, RESHAPE = 36, VIEW = 37, PERMUTE = 38, TRANSPOSE = 39, GET_ROWS = 40, SET_ROWS = 42,
    DIAG = 43, SOFT_MAX = 46, ROPE = 48, CLAMP = 50, PAD = 64, ARANGE = 67, ARGSORT = 69, TOP_K = 70, LEAKY_RELU = 71,
    TRI = 72, FILL = 73, FLASH_ATTN_EXT = 74, SSM_CONV = 76, SSM_SCAN = 77, GATED_LINEAR_ATTN = 83, SOLVE_TRI = 85,
    GATED_DELTA_NET = 86, UNARY = 91, GLU = 100,
};

constexpr uint32_t kFlagCompute = 16;
constexpr int kMaxSources = 10;

struct Traits {
    int32_t block_elements;
    int32_t block_bytes;
};

// How one type lies in memory; {0, 0} for a type nobody knows.
Traits traits(Type type);

inline bool is_plain(Type type) { return traits(type).block_elements == 1; }
inline int64_t row_bytes(Type type, int64_t n) {
    const Traits t = traits(type);
    return n / t.block_elements * t.block_bytes;
}

// One tensor of a program as Python hands it over: 248 bytes, little-endian, no padding.
struct Tensor {
    Type type;
    Op op;
    uint32_t flags;
    int32_t view_src;
    int64_t ne[4];
    int64_t nb[4];
    int32_t params[16];
    int32_t src[kMaxSources];
    char *data;  // null: it lives on another device
    int64_t buffer_bytes_behind;  // from data to the end of its buffer
    int64_t use_count;

    int64_t elements() const { return ne[0] * ne[1] * ne[2] * ne[3]; }
    int64_t rows() const { return ne[1] * ne[2] * ne[3]; }
    bool empty() const { return elements() == 0; }
    int64_t span_bytes() const;  // first to past the last byte; gaps of a view included
    bool contiguous() const;
    bool packed_rows() const { return ne[0] == traits(type).block_elements || nb[0] == traits(type).block_bytes; }
    float param_f32(int i) const;
    char *at(int64_t i1, int64_t i2, int64_t i3) const { return data + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]; }
    // Row r in logical order: dimension 1 fastest.
    char *row(int64_t r) const {
        const int64_t i1 = r % ne[1];
        const int64_t rest = r / ne[1];
        return at(i1, rest % ne[2], rest / ne[2]);
    }
};
static_assert(sizeof(Tensor) == 16 + 32 + 32 + 64 + 40 + 24);

}  // namespace tandem
