// Activations as bytes: per 32 values the scale amax / 127, values to nearest with ties to even, and their sums.
#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {
namespace {

constexpr int kHalves = kSums;  // half blocks of sixteen values that are folded at once
constexpr int kBlocks = kHalves / 2;

// `n` blocks (kBlocks or fewer) from `block` on of one row.
void quantize_blocks(const float *x, int n, int64_t block, int64_t tile, int64_t t, const Activations &out) {
    Wide values[kHalves];
    vf folded[kHalves];
    TANDEM_UNROLL
    for (int h = 0; h < kHalves; ++h) {
        values[h] = h < 2 * n ? wide_load(x + 16 * h) : wide(0.0f);
        const WideInt magnitude = as_int(values[h]) & wide_int(0x7fffffff);
        folded[fold_place(h)] = fold_parts(as_float(magnitude), [](vf a, vf b) {
            return (vf)((vi)a > (vi)b ? (vi)a : (vi)b);
        });
    }
    float maxima[kHalves];  // as bits they order NaN above everything, so that no NaN is lost
    many_maxima(folded, maxima);
    float scales[kBlocks];
    for (int b = 0; b < n; ++b) {
        const int32_t low = bits_as<int32_t>(maxima[2 * b]), high = bits_as<int32_t>(maxima[2 * b + 1]);
        const float amax = bits_as<float>(low > high ? low : high);
        // Where all is tiny the inverse would overflow: such a block counts as zeros.
        const bool tiny = amax <= 1e-30f;
        scales[b] = tiny ? 0.0f : amax / 127.0f;
        if (!(amax <= 3.402823466e38f)) {  // what is not finite makes all products of its block NaN
            scales[b] = __builtin_nanf("");
            values[2 * b] = values[2 * b + 1] = wide(0.0f);
        }
        const Wide inverse = wide(tiny ? 0.0f : 127.0f / amax);
        int8_t *q = out.q + ((tile * (out.k / 32) + block + b) * out.tile + t) * 32;
        for (int h = 0; h < 2; ++h) {
            const WideInt whole = nearest(values[2 * b + h] * inverse);
            values[2 * b + h] = to_float(whole);
            for (int i = 0; i < kParts; ++i) {
                store_bytes(q + 16 * h + kNative * i, whole.part[i]);
            }
        }
    }
    TANDEM_UNROLL
    for (int h = 0; h < kHalves; ++h) {
        folded[fold_place(h)] = sum_parts(values[h]);
    }
    float sums[kHalves];  // of whole numbers below 2^11: exact
    many_sums(folded, sums);
    for (int b = 0; b < n; ++b) {
        const int64_t at = (tile * (out.k / 32) + block + b) * out.tile + t;
        const int64_t half = (tile * (out.k / 32) + block + b) * 2 * out.tile + t;
        const float both = sums[2 * b] + sums[2 * b + 1];
        out.d[at] = scales[b];
        out.sum32[at] = scales[b] * both;
        out.start32[at] = kWholeBits + static_cast<int32_t>(-128.0f * both);
        out.sum16[half] = scales[b] * sums[2 * b];
        out.sum16[half + out.tile] = scales[b] * sums[2 * b + 1];
        out.start16[half] = kWholeBits + static_cast<int32_t>(-128.0f * sums[2 * b]);
        out.start16[half + out.tile] = kWholeBits + static_cast<int32_t>(-128.0f * sums[2 * b + 1]);
    }
}

}  // namespace

void quantize(const float *x, int64_t row, const Activations &out) {
    const int64_t blocks = out.k / 32;
    for (int64_t b = 0; b < blocks; b += kBlocks) {
        const int n = static_cast<int>(blocks - b < kBlocks ? blocks - b : kBlocks);
        quantize_blocks(x + 32 * b, n, b, row / out.tile, row % out.tile, out);
    }
}

}  // namespace tandem::TANDEM_ISA
