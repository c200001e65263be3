// The table of one instruction set's kernels.
#include "isa.h"

#define TANDEM_TEXT(name) #name
#define TANDEM_NAME(name) TANDEM_TEXT(name)

namespace tandem::TANDEM_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    TANDEM_NAME(TANDEM_ISA),
    quantize,
    matmul_quant,
    matmul_float,
    attention_scratch_bytes,
    attention_tile,
    attention_fold,
    reduce_mask_row,
    binary_row,
    scale_row,
    clamp_row,
    unary_row,
    glu_row,
    sum_row,
    rms_norm_row,
    norm_row,
    l2_norm_row,
    softmax_row,
    rope_row,
    exp_row,
    delta_row,
    scan_row,
    f16_to_f32,
    f32_to_f16,
};

}  // namespace tandem::TANDEM_ISA
