// Activations as bytes: per span of values the scale amax / 127, values to nearest with ties to even, and the sums of
// blocks and half blocks.
#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {
namespace {

constexpr int kHalves = kSums;  // half blocks of sixteen values that are folded at once
constexpr int kBlocks = kHalves / 2;

// The largest magnitude in each lane of `n` values.
vf largest(const float *x, int n) {
    const auto larger_bits = [](vf a, vf b) { return (vf)((vi)a > (vi)b ? (vi)a : (vi)b); };
    WideInt most = wide_int(0);
    for (int i = 0; i < n; i += kWide) {
        most = max(most, as_int(wide_load(x + i)) & wide_int(0x7fffffff));
    }
    return fold_parts(as_float(most), larger_bits);
}

struct Scale {
    float scale;
    float inverse;
};

// Those of `n` spans (kSums or fewer).
void find_scales(const float *x, int n, int span, Scale *scales) {
    vf folded[kSums];
    for (int i = 0; i < kSums; ++i) {
        folded[fold_place(i)] = i < n ? largest(x + i * span, span) : vf{};
    }
    float maxima[kSums];  // as bits they order NaN above everything, so that no NaN is lost
    many_maxima(folded, maxima);
    for (int i = 0; i < n; ++i) {
        // Where all is tiny the inverse would overflow: such a span counts as zeros.
        const bool tiny = maxima[i] <= 1e-30f;
        scales[i] = {tiny ? 0.0f : maxima[i] / 127.0f, tiny ? 0.0f : 127.0f / maxima[i]};
        if (!(maxima[i] <= 3.402823466e38f)) {  // what is not finite makes all products of its span NaN
            scales[i] = {__builtin_nanf(""), 0.0f};
        }
    }
}

// `n` blocks (kBlocks or fewer) of one row from `block` on; `scales` are those of the row's spans from the one on that
// the first of them is in.
void quantize_blocks(const float *x, int n, int64_t block, const Scale *scales, int64_t tile, int64_t t,
                     const Activations &out) {
    const int64_t blocks_per_span = out.span / 32, first = block % blocks_per_span;
    vf folded[kHalves];
    for (int b = 0; b < kBlocks; ++b) {
        if (b >= n) {
            folded[fold_place(2 * b)] = folded[fold_place(2 * b + 1)] = vf{};
            continue;
        }
        const Scale scale = scales[(first + b) / blocks_per_span];
        const bool finite = scale.scale == scale.scale;
        int8_t *q = out.q + ((tile * (out.k / 32) + block + b) * out.tile + t) * 32;
        TANDEM_UNROLL
        for (int h = 0; h < 2; ++h) {
            const Wide value = finite ? wide_load(x + 32 * b + 16 * h) : wide(0.0f);
            const WideInt whole = nearest(value * wide(scale.inverse));
            for (int i = 0; i < kParts; ++i) {
                store_bytes(q + 16 * h + kNative * i, whole.part[i]);
            }
            folded[fold_place(2 * b + h)] = sum_parts(to_float(whole));
        }
    }
    float sums[kHalves];  // of whole numbers below 2^11: exact
    many_sums(folded, sums);
    for (int b = 0; b < n; ++b) {
        const int64_t at = (tile * (out.k / 32) + block + b) * out.tile + t;
        const int64_t half = (tile * (out.k / 32) + block + b) * 2 * out.tile + t;
        const float scale = scales[(first + b) / blocks_per_span].scale;
        const float both = sums[2 * b] + sums[2 * b + 1];
        out.d[at] = scale;
        out.sum32[at] = scale * both;
        out.start32[at] = kWholeBits + static_cast<int32_t>(-128.0f * both);
        out.sum16[half] = scale * sums[2 * b];
        out.sum16[half + out.tile] = scale * sums[2 * b + 1];
        out.start16[half] = kWholeBits + static_cast<int32_t>(-128.0f * sums[2 * b]);
        out.start16[half + out.tile] = kWholeBits + static_cast<int32_t>(-128.0f * sums[2 * b + 1]);
    }
}

}  // namespace

void quantize(const float *x, int64_t row, const Activations &out) {
    const int64_t n_spans = out.k / out.span, blocks_per_span = out.span / 32;
    for (int64_t first = 0; first < n_spans; first += kSums) {
        const int64_t end = n_spans - first < kSums ? n_spans : first + kSums;
        Scale scales[kSums];
        find_scales(x + first * out.span, static_cast<int>(end - first), out.span, scales);
        for (int64_t b = first * blocks_per_span; b < end * blocks_per_span; b += kBlocks) {
            const int64_t left = end * blocks_per_span - b;
            const int n = static_cast<int>(left < kBlocks ? left : kBlocks);
            quantize_blocks(x + 32 * b, n, b, scales + (b / blocks_per_span - first), row / out.tile, row % out.tile,
                            out);
        }
    }
}

}  // namespace tandem::TANDEM_ISA
