// The running softmax of one row of attention: scores to weights, block after block and segment after segment.
#pragma once

#include "attention.h"

namespace tandem::TANDEM_ISA {

inline WideInt lanes_of_bits(uint64_t seen, int first) {
    static constexpr int32_t kBits[kWide] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    WideInt lanes;
    std::memcpy(&lanes, kBits, sizeof(lanes));
    return (wide_int(static_cast<int32_t>((seen >> first) & 0xffff)) & lanes) == lanes;
}

// Scaled scores of a row with cap, bias and mask, in place; the largest. `bias`: the mask's values, or null if they
// are zeros.
inline float adjust(const Attention &a, float *scores, uint64_t seen, const uint16_t *bias, float slope) {
    Wide top = wide(kNone);
    for (int g = 0; g < kCells; g += kWide) {
        Wide z = wide_load(scores + g) * wide(a.scale);
        if (a.softcap != 0.0f) {
            z = wide(a.softcap) * tanh(z / wide(a.softcap));
        }
        if (bias) {
            z = fma(wide(slope), wide_load_f16(bias + g), z);
        }
        if (seen != ~uint64_t{0}) {
            z = select(lanes_of_bits(seen, g), z, wide(kNone));
        }
        wide_store(scores + g, z);
        top = max(z, top);
    }
    return max_lane(top);
}

// A new maximum for a row, if a block's is one: what was gathered before fades.
inline void raise(Softmax &state, float block_max, float *acc, int64_t dv) {
    if (!(block_max > state.largest)) {
        return;
    }
    const float fade = state.largest == kNone ? 0.0f : exp_one(state.largest - block_max);
    if (state.largest != kNone) {
        for (int64_t i = 0; i < dv; i += kWide) {
            wide_store(acc + i, wide_load(acc + i) * wide(fade));
        }
    }
    state.sum *= fade;
    state.largest = block_max;
}

// Scores to weights, in place, and their sum.
inline float weigh(float *scores, float largest) {
    Wide z[kCells / kWide];
    for (int g = 0; g < kCells / kWide; ++g) {
        z[g] = exp(wide_load(scores + g * kWide) - wide(largest));
        wide_store(scores + g * kWide, z[g]);
    }
    return sum((z[0] + z[1]) + (z[2] + z[3]));
}

// Folds a segment into the ones before it.
inline void fold(Softmax &before, float *total, const Softmax &segment, const float *acc, int64_t dv) {
    if (segment.largest == kNone) {
        return;
    }
    if (before.largest == kNone) {
        before = segment;
        std::memcpy(total, acc, dv * sizeof(float));
        return;
    }
    const float largest = before.largest > segment.largest ? before.largest : segment.largest;
    const float old_fade = exp_one(before.largest - largest);
    const float new_fade = exp_one(segment.largest - largest);
    for (int64_t i = 0; i < dv; i += kWide) {
        wide_store(total + i, fma(wide_load(total + i), wide(old_fade), wide_load(acc + i) * wide(new_fade)));
    }
    before.sum = before.sum * old_fade + segment.sum * new_fade;
    before.largest = largest;
}

// The weighted sum over everything a row saw; zeros for a row that saw nothing.
inline void write_row(const Attention &a, const Softmax &state, const float *total, int64_t head, float *out) {
    if (state.largest == kNone) {
        std::memset(out, 0, a.dv * sizeof(float));
        return;
    }
    const Wide scale = wide(final_scale(a, state, head));
    for (int64_t i = 0; i < a.dv; i += kWide) {
        wide_store(out + i, wide_load(total + i) * scale, a.dv - i);
    }
}

}  // namespace tandem::TANDEM_ISA
