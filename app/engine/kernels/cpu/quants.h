// Packed rows to floats and back, one block at a time, in plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace tandem {

// A block unpacked: element e is d[e / 16] * q[e] + m[e / 16].
struct Block {
    int8_t q[256];
    float d[16];
    float m[16];
};

// Unpacks one block of any quantized type.
void decode_block(Type type, const uint8_t *block, Block &out);

// A row of `n` elements of any float or quantized type as floats.
void row_to_float(Type type, const void *from, float *to, int64_t n);
// The way back, for the types caches may have; rounding as in ggml's reference encoders.
void row_from_float(Type type, const float *from, void *to, int64_t n);

// Tables of the codebook types, entries of 4 or 8 bytes; they must outlive every use.
enum class Codebook : int32_t { IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, COUNT };
void set_codebook(Codebook book, const int8_t *entries);
bool codebook_ready(Type type);

}  // namespace tandem
