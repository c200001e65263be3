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
TANDEM_INLINE vi to_nearest(vf a) { return (vi)_mm512_cvtps_epi32((__m512)a); }
TANDEM_INLINE vf load_f16(const void *p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}
TANDEM_INLINE void store_f16(void *p, vf v) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
TANDEM_INLINE vb lookup(const uint8_t *table, vb index) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)index);
}

// Integer dot products: lane i of `init` plus, over the chunks, four products of bytes. Weights are unsigned bytes up
// to kMax, or (kMax = 128) in the form `signed_form` gives them, which asks for `init` = -128 times the sum of the
// activations.
constexpr bool kSignedNeedsInit = true;
TANDEM_INLINE vb signed_form(vb w) { return w ^ (uint8_t)0x80; }
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    for (int c = 0; c < kChunks; ++c) {
        int32_t four;
        std::memcpy(&four, a + 4 * c, 4);
        init = (vi)_mm512_dpbusd_epi32((__m512i)init, (__m512i)w[c], _mm512_set1_epi32(four));
    }
    return init;
}

}  // namespace tandem::TANDEM_ISA
