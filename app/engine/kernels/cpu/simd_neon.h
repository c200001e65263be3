// Arm with dot products (Armv8.2 dotprod), and with products of small matrices (i8mm): four vectors are sixteen lanes.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace tandem::TANDEM_ISA {

constexpr int kNative = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint8_t vb __attribute__((vector_size(16)));

TANDEM_INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
TANDEM_INLINE vf square_root(vf a) { return (vf)vsqrtq_f32((float32x4_t)a); }
TANDEM_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
TANDEM_INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
TANDEM_INLINE vi to_nearest(vf a) { return (vi)vcvtnq_s32_f32((float32x4_t)a); }
TANDEM_INLINE vf load_f16(const void *p) {
    float16x4_t h;
    std::memcpy(&h, p, sizeof(h));
    return (vf)vcvt_f32_f16(h);
}
TANDEM_INLINE void store_f16(void *p, vf v) {
    const float16x4_t h = vcvt_f16_f32((float32x4_t)v);
    std::memcpy(p, &h, sizeof(h));
}
TANDEM_INLINE vi widen_from(const uint8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
TANDEM_INLINE vi widen_from(const int8_t *p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
TANDEM_INLINE vi widen_from(const uint16_t *p) { return (vi)vmovl_u16(vld1_u16(p)); }
TANDEM_INLINE vb lookup(const uint8_t *table, vb index) { return (vb)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index); }

// Lanes folded by halves: i and i + 2, then + 1.
TANDEM_INLINE float lanes_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
TANDEM_INLINE float lanes_max(vf v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
constexpr int kSums = 4;
TANDEM_INLINE void many_sums(const vf (&v)[kSums], float *out) {
    for (int i = 0; i < kSums; ++i) {
        out[i] = lanes_sum(v[i]);
    }
}

// The largest lane of each by its bits as a signed integer.
TANDEM_INLINE void many_maxima(const vf (&v)[kSums], float *out) {
    for (int i = 0; i < kSums; ++i) {
        const vi bits = (vi)v[i];
        int32_t largest = bits[0];
        for (int j = 1; j < kNative; ++j) {
            largest = bits[j] > largest ? bits[j] : largest;
        }
        std::memcpy(out + i, &largest, sizeof(largest));
    }
}
// Whole numbers between -128 and 127 as bytes.
TANDEM_INLINE void store_bytes(int8_t *p, vi v) {
    for (int i = 0; i < kNative; ++i) {
        p[i] = static_cast<int8_t>(v[i] < -128 ? -128 : v[i] > 127 ? 127 : v[i]);
    }
}

constexpr bool kSignedNeedsInit = false;
TANDEM_INLINE vb signed_form(vb w) { return w; }

// All unsigned weights are at most 127, so the signed dot product serves both kinds.
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    for (int c = 0; c < kChunks; c += 4) {
        const int8x16_t four = vld1q_s8(a + 4 * c);
        init = (vi)vdotq_laneq_s32((int32x4_t)init, (int8x16_t)w[c], four, 0);
        init = (vi)vdotq_laneq_s32((int32x4_t)init, (int8x16_t)w[c + 1], four, 1);
        init = (vi)vdotq_laneq_s32((int32x4_t)init, (int8x16_t)w[c + 2], four, 2);
        init = (vi)vdotq_laneq_s32((int32x4_t)init, (int8x16_t)w[c + 3], four, 3);
    }
    return init;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Two rows times two tokens at once, eight bytes of each: twice the products per instruction.
#define TANDEM_TOKEN_PAIRS

// Chunks c and c + 1, four bytes of four rows each, to eight bytes of rows 0 and 1, and of rows 2 and 3.
template <int kChunks>
TANDEM_INLINE void pair_rows(vb *w) {
    TANDEM_UNROLL
    for (int c = 0; c < kChunks; c += 2) {
        const auto first = (uint32x4_t)w[c], second = (uint32x4_t)w[c + 1];
        w[c] = (vb)vzip1q_u32(first, second);
        w[c + 1] = (vb)vzip2q_u32(first, second);
    }
}

// Adds to dots[0] and dots[1] what dot_chunks would for the tokens a and b; `w` as pair_rows leaves it.
template <int kChunks>
TANDEM_INLINE void dot_pairs(const vb *w, const int8_t *a, const int8_t *b, vi *dots) {
    // Row by row, and in a row token by token.
    int32x4_t upper = vzip1q_s32((int32x4_t)dots[0], (int32x4_t)dots[1]);
    int32x4_t lower = vzip2q_s32((int32x4_t)dots[0], (int32x4_t)dots[1]);
    TANDEM_UNROLL
    for (int c = 0; c < kChunks; c += 4) {
        const int64x2_t of_a = vreinterpretq_s64_s8(vld1q_s8(a + 4 * c));
        const int64x2_t of_b = vreinterpretq_s64_s8(vld1q_s8(b + 4 * c));
        const int8x16_t begin = vreinterpretq_s8_s64(vzip1q_s64(of_a, of_b));
        const int8x16_t end = vreinterpretq_s8_s64(vzip2q_s64(of_a, of_b));
        upper = vmmlaq_s32(upper, (int8x16_t)w[c], begin);
        lower = vmmlaq_s32(lower, (int8x16_t)w[c + 1], begin);
        upper = vmmlaq_s32(upper, (int8x16_t)w[c + 2], end);
        lower = vmmlaq_s32(lower, (int8x16_t)w[c + 3], end);
    }
    dots[0] = (vi)vuzp1q_s32(upper, lower);
    dots[1] = (vi)vuzp2q_s32(upper, lower);
}
#endif

}  // namespace tandem::TANDEM_ISA
