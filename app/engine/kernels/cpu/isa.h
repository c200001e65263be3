// The kernels of one instruction set, as its translation units see each other.
#pragma once

#include "kernels.h"

namespace tandem::TANDEM_ISA {

void quantize(const float *x, int64_t row, const Activations &out);
void matmul_quant(const QuantMatmul &m, int64_t group_begin, int64_t group_end, int64_t tile_begin, int64_t tile_end,
                  char *scratch);
void matmul_float(const FloatMatmul &m, int64_t row_begin, int64_t row_end, int64_t token_begin, int64_t token_end);
int64_t attention_scratch_bytes(int64_t dk, int64_t dv);
void attention_tile(const Attention &a, const AttentionTile &tile, char *scratch, float *partial);
void attention_fold(const Attention &a, const float *partial, int64_t stride, int64_t n_segments, int64_t token,
                    int64_t head, int64_t sequence, char *scratch);
void reduce_mask_row(const uint16_t *mask, int64_t n_kv, MaskRow &out, uint32_t *visible, uint64_t *seen);
void binary_row(Op op, const float *a, const float *b, int64_t n_b, float *y, int64_t n);
void scale_row(const float *x, float *y, int64_t n, float s, float b);
void clamp_row(const float *x, float *y, int64_t n, float low, float high);
void unary_row(Unary op, const float *params, const float *x, float *y, int64_t n);
void glu_row(Glu op, const float *a, const float *b, float *y, int64_t n, float alpha, float limit);
float sum_row(const float *x, int64_t n);
void rms_norm_row(const float *x, float *y, int64_t n, float eps);
void norm_row(const float *x, float *y, int64_t n, float eps);
void l2_norm_row(const float *x, float *y, int64_t n, float eps);
void softmax_row(const float *x, const float *mask, float *y, int64_t n, float scale, float slope, const float *sink);
void rope_row(const float *x, float *y, const float *table, int64_t n_dims, int64_t n, int64_t first, bool neighbours,
              int64_t distance);
void exp_row(const float *x, float *y, int64_t n);
void delta_row(float *s, int64_t n, const float *decay, bool decay_per_key, const float *k, const float *q, float v,
               float beta, float scale, float *out);
float scan_row(float *s, int64_t n, const float *decay, bool decay_per_element, const float *b, float input, const
               float *c);
void f16_to_f32(const uint16_t *x, float *y, int64_t n);
void f32_to_f16(const float *x, uint16_t *y, int64_t n);

}  // namespace tandem::TANDEM_ISA
