// AVX2 with FMA and F16C, and AVX-VNNI where the compiler was told so: two vectors are sixteen lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tandem::TANDEM_ISA {

constexpr int kNative = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(32)));

TANDEM_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
TANDEM_INLINE vf square_root(vf a) { return (vf)_mm256_sqrt_ps((__m256)a); }
TANDEM_INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
TANDEM_INLINE vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
TANDEM_INLINE vi to_nearest(vf a) { return (vi)_mm256_cvtps_epi32((__m256)a); }
TANDEM_INLINE vf load_f16(const void *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
TANDEM_INLINE void store_f16(void *p, vf v) {
    _mm_storeu_si128(static_cast<__m128i *>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
TANDEM_INLINE __m128i eight_bytes(const void *p) { return _mm_loadl_epi64(static_cast<const __m128i *>(p)); }
TANDEM_INLINE vi widen_from(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(eight_bytes(p)); }
TANDEM_INLINE vi widen_from(const int8_t *p) { return (vi)_mm256_cvtepi8_epi32(eight_bytes(p)); }
TANDEM_INLINE vi widen_from(const uint16_t *p) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
TANDEM_INLINE vb lookup(const uint8_t *table, vb index) {
    const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)index);
}

// Lanes folded by halves: i and i + 4, then + 2, + 1.
template <class F>
TANDEM_INLINE float fold_lanes(__m256 v, F f) {
    __m128 four = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = f(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(f(four, _mm_movehdup_ps(four)));
}
TANDEM_INLINE float lanes_sum(vf v) {
    return fold_lanes((__m256)v, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
TANDEM_INLINE float lanes_max(vf v) {
    return fold_lanes((__m256)v, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}

// Four vectors folded at once, each in the order of lanes_sum.
constexpr int kSums = 4;
template <class F>
TANDEM_INLINE void fold_many(const vf (&v)[kSums], float *out, F f) {
    const __m256 v0 = (__m256)v[0], v1 = (__m256)v[1], v2 = (__m256)v[2], v3 = (__m256)v[3];
    const __m256 a = f(_mm256_permute2f128_ps(v0, v2, 0x20), _mm256_permute2f128_ps(v0, v2, 0x31));
    const __m256 b = f(_mm256_permute2f128_ps(v1, v3, 0x20), _mm256_permute2f128_ps(v1, v3, 0x31));
    const __m256 twos = f(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    const __m256 ones = f(_mm256_shuffle_ps(twos, twos, 0x88), _mm256_shuffle_ps(twos, twos, 0xdd));
    _mm_storel_pi(reinterpret_cast<__m64 *>(out), _mm256_castps256_ps128(ones));
    _mm_storel_pi(reinterpret_cast<__m64 *>(out + 2), _mm256_extractf128_ps(ones, 1));
}
TANDEM_INLINE void many_sums(const vf (&v)[kSums], float *out) {
    fold_many(v, out, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
// The largest lane of each by its bits as a signed integer.
TANDEM_INLINE void many_maxima(const vf (&v)[kSums], float *out) {
    fold_many(v, out, [](__m256 a, __m256 b) {
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    });
}
// Whole numbers between -128 and 127 as bytes.
TANDEM_INLINE void store_bytes(int8_t *p, vi v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}

TANDEM_INLINE __m256i four_bytes(const int8_t *a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)

constexpr bool kSignedNeedsInit = true;
TANDEM_INLINE vb signed_form(vb w) { return w ^ (uint8_t)0x80; }
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    for (int c = 0; c < kChunks; ++c) {
        init = (vi)_mm256_dpbusd_avx_epi32((__m256i)init, (__m256i)w[c], four_bytes(a + 4 * c));
    }
    return init;
}

#else

constexpr bool kSignedNeedsInit = false;
TANDEM_INLINE vb signed_form(vb w) { return w; }

// vpmaddubsw adds two products into 16 bits: with weights up to kMax, `kFit` of its results still fit together.
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = (__m256i)init;
    if constexpr (kMax == 128) {
        for (int c = 0; c < kChunks; ++c) {
            const __m256i signs = (__m256i)w[c];
            const __m256i moved = _mm256_sign_epi8(four_bytes(a + 4 * c), signs);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), moved);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
        }
    } else {
        constexpr int kFit = 32767 / (2 * 127 * kMax) < kChunks ? 32767 / (2 * 127 * kMax) : kChunks;
        for (int c = 0; c < kChunks; c += kFit) {
            __m256i pairs = _mm256_maddubs_epi16((__m256i)w[c], four_bytes(a + 4 * c));
            for (int i = c + 1; i < c + kFit && i < kChunks; ++i) {
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)w[i], four_bytes(a + 4 * i)));
            }
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
        }
    }
    return (vi)total;
}

#endif

}  // namespace tandem::TANDEM_ISA
