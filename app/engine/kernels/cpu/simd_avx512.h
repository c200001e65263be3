// AVX-512 (F, BW, VL, DQ) with VNNI: one vector is sixteen lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tandem::TANDEM_ISA {

constexpr int kNative = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint8_t vb __attribute__((vector_size(64)));

TANDEM_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TANDEM_INLINE vf square_root(vf a) { return (vf)_mm512_sqrt_ps((__m512)a); }
TANDEM_INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
TANDEM_INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#define TANDEM_TIMES_POWER
TANDEM_INLINE vf times_power(vf a, vf n) { return (vf)_mm512_scalef_ps((__m512)a, (__m512)n); }
TANDEM_INLINE vi to_nearest(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
TANDEM_INLINE vf load_f16(const void *p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}
TANDEM_INLINE void store_f16(void *p, vf v) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
TANDEM_INLINE __m128i sixteen_bytes(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
TANDEM_INLINE vi widen_from(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(sixteen_bytes(p)); }
TANDEM_INLINE vi widen_from(const int8_t *p) { return (vi)_mm512_cvtepi8_epi32(sixteen_bytes(p)); }
TANDEM_INLINE vi widen_from(const uint16_t *p) {
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
TANDEM_INLINE vb lookup(const uint8_t *table, vb index) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)index);
}

// Lanes folded by halves: i and i + 8, then + 4, + 2, + 1.
template <class F8, class F4>
TANDEM_INLINE float fold_lanes(__m512 v, F8 f8, F4 f4) {
    const __m256 eight = f8(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = f4(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = f4(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(f4(four, _mm_movehdup_ps(four)));
}
TANDEM_INLINE float lanes_sum(vf v) {
    return fold_lanes((__m512)v, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
                      [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
TANDEM_INLINE float lanes_max(vf v) {
    return fold_lanes((__m512)v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
                      [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

// Sixteen vectors folded at once, each in the order of lanes_sum: out[4 * j + e] belongs to v[4 * e + j].
constexpr int kSums = 16;
template <class F>
TANDEM_INLINE __m512 fold_many(const vf (&v)[kSums], F f) {
    __m512 eights[8], fours[4], twos[2];
    TANDEM_UNROLL
    for (int i = 0; i < 8; ++i) {
        const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        eights[i] = f(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    TANDEM_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512 a = eights[2 * i], b = eights[2 * i + 1];
        fours[i] = f(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    TANDEM_UNROLL
    for (int i = 0; i < 2; ++i) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        twos[i] = f(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    return f(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
}
TANDEM_INLINE void many_sums(const vf (&v)[kSums], float *out) {
    _mm512_storeu_ps(out, fold_many(v, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); }));
}
// The largest lane of each by its bits as a signed integer.
TANDEM_INLINE void many_maxima(const vf (&v)[kSums], float *out) {
    _mm512_storeu_ps(out, fold_many(v, [](__m512 a, __m512 b) {
                         return _mm512_castsi512_ps(
                             _mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
                     }));
}
// Whole numbers between -128 and 127 as bytes.
TANDEM_INLINE void store_bytes(int8_t *p, vi v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8((__m512i)v));
}

// Integer dot products: lane i of `init` plus, over the chunks, four products of bytes. Weights are unsigned bytes up
// to kMax, or (kMax = 128) in the form `signed_form` gives them, which asks for `init` = -128 times the sum of the
// activations.
constexpr bool kSignedNeedsInit = true;
TANDEM_INLINE vb signed_form(vb w) { return w ^ (uint8_t)0x80; }
struct Four {
    int8_t bytes[4];
};
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    TANDEM_UNROLL
    for (int c = 0; c < kChunks; ++c) {
        // Of the intrinsic gcc makes two instructions, one to repeat the four bytes and one to multiply by them.
        __asm__("vpdpbusd %2%{1to16%}, %1, %0"
                : "+v"(init)
                : "v"(w[c]), "m"(*reinterpret_cast<const Four *>(a + 4 * c)));
    }
    return init;
}

}  // namespace tandem::TANDEM_ISA
