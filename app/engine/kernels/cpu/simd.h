// Sixteen float lanes on every instruction set, with the same bits on each.
//
// All kernels are written over `Wide`: sixteen lanes, however many native vectors that takes. Every operation here is
// exact or correctly rounded by IEEE 754 (fused multiply-add included, which the baseline build emulates), and no
// operation depends on how lanes map to registers. That is why two machines with different instruction sets agree.
// Compile with -ffp-contract=off: a compiler that fuses on its own would break it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef TANDEM_ISA
#error "TANDEM_ISA names the namespace of one instruction set's kernels"
#endif

#define TANDEM_INLINE [[gnu::always_inline]] inline
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TANDEM_UNROLL  // what sanitizers add would be unrolled too
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define TANDEM_UNROLL _Pragma("GCC unroll 16")
#else
#define TANDEM_UNROLL  // the baseline is there to be right; unrolled it would take minutes to compile
#endif
#define TANDEM_ROLLED _Pragma("GCC unroll 1")

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_base.h"
#endif

namespace tandem::TANDEM_ISA {

constexpr int kWide = 16;
constexpr int kParts = kWide / kNative;

template <class To, class From>
TANDEM_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// Native vectors: what the instruction set's header does not need to know.
TANDEM_INLINE vf load(const float *p) {
    vf v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
TANDEM_INLINE void store(float *p, vf v) { std::memcpy(p, &v, sizeof(v)); }
TANDEM_INLINE vf splat(float x) { return x - vf{}; }
TANDEM_INLINE vi splat_int(int32_t x) { return x - vi{}; }
TANDEM_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

struct Wide {
    vf part[kParts];
};
struct WideInt {
    vi part[kParts];
};

#define TANDEM_EACH(result, expression)      \
    result out;                              \
    for (int i = 0; i < kParts; ++i) {       \
        out.part[i] = expression;            \
    }                                        \
    return out

TANDEM_INLINE Wide wide(float x) { TANDEM_EACH(Wide, splat(x)); }
TANDEM_INLINE WideInt wide_int(int32_t x) { TANDEM_EACH(WideInt, splat_int(x)); }
TANDEM_INLINE Wide operator+(Wide a, Wide b) { TANDEM_EACH(Wide, a.part[i] + b.part[i]); }
TANDEM_INLINE Wide operator-(Wide a, Wide b) { TANDEM_EACH(Wide, a.part[i] - b.part[i]); }
TANDEM_INLINE Wide operator*(Wide a, Wide b) { TANDEM_EACH(Wide, a.part[i] * b.part[i]); }
TANDEM_INLINE Wide operator/(Wide a, Wide b) { TANDEM_EACH(Wide, a.part[i] / b.part[i]); }
TANDEM_INLINE Wide operator-(Wide a) { TANDEM_EACH(Wide, -a.part[i]); }
TANDEM_INLINE WideInt operator+(WideInt a, WideInt b) { TANDEM_EACH(WideInt, a.part[i] + b.part[i]); }
TANDEM_INLINE WideInt operator-(WideInt a, WideInt b) { TANDEM_EACH(WideInt, a.part[i] - b.part[i]); }
TANDEM_INLINE WideInt operator&(WideInt a, WideInt b) { TANDEM_EACH(WideInt, a.part[i] & b.part[i]); }
TANDEM_INLINE WideInt operator|(WideInt a, WideInt b) { TANDEM_EACH(WideInt, a.part[i] | b.part[i]); }
TANDEM_INLINE WideInt operator^(WideInt a, WideInt b) { TANDEM_EACH(WideInt, a.part[i] ^ b.part[i]); }
TANDEM_INLINE WideInt operator<<(WideInt a, int n) { TANDEM_EACH(WideInt, a.part[i] << n); }
TANDEM_INLINE WideInt operator>>(WideInt a, int n) { TANDEM_EACH(WideInt, a.part[i] >> n); }
// Comparisons give -1 or 0 per lane. NaN compares false.
TANDEM_INLINE WideInt operator<(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] < b.part[i])); }
TANDEM_INLINE WideInt operator>(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] > b.part[i])); }
TANDEM_INLINE WideInt operator<=(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] <= b.part[i])); }
TANDEM_INLINE WideInt operator>=(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] >= b.part[i])); }
TANDEM_INLINE WideInt operator==(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] == b.part[i])); }
TANDEM_INLINE WideInt operator!=(Wide a, Wide b) { TANDEM_EACH(WideInt, (vi)(a.part[i] != b.part[i])); }
TANDEM_INLINE WideInt operator==(WideInt a, WideInt b) { TANDEM_EACH(WideInt, (vi)(a.part[i] == b.part[i])); }
TANDEM_INLINE WideInt operator>(WideInt a, WideInt b) { TANDEM_EACH(WideInt, (vi)(a.part[i] > b.part[i])); }
TANDEM_INLINE Wide select(WideInt mask, Wide yes, Wide no) {
    TANDEM_EACH(Wide, mask.part[i] ? yes.part[i] : no.part[i]);
}
TANDEM_INLINE WideInt select(WideInt mask, WideInt yes, WideInt no) {
    TANDEM_EACH(WideInt, mask.part[i] ? yes.part[i] : no.part[i]);
}
TANDEM_INLINE Wide fma(Wide a, Wide b, Wide c) { TANDEM_EACH(Wide, fused(a.part[i], b.part[i], c.part[i])); }
TANDEM_INLINE Wide sqrt(Wide a) { TANDEM_EACH(Wide, square_root(a.part[i])); }
TANDEM_INLINE WideInt nearest(Wide a) { TANDEM_EACH(WideInt, to_nearest(a.part[i])); }  // ties to even
TANDEM_INLINE Wide to_float(WideInt a) { TANDEM_EACH(Wide, to_float(a.part[i])); }
TANDEM_INLINE Wide as_float(WideInt a) { TANDEM_EACH(Wide, (vf)a.part[i]); }
TANDEM_INLINE WideInt as_int(Wide a) { TANDEM_EACH(WideInt, (vi)a.part[i]); }

// The larger of two; b where either is NaN.
TANDEM_INLINE Wide max(Wide a, Wide b) { TANDEM_EACH(Wide, larger(a.part[i], b.part[i])); }
TANDEM_INLINE Wide min(Wide a, Wide b) { TANDEM_EACH(Wide, smaller(a.part[i], b.part[i])); }
TANDEM_INLINE WideInt max(WideInt a, WideInt b) { return select(a > b, a, b); }
TANDEM_INLINE Wide abs(Wide a) { return as_float(as_int(a) & wide_int(0x7fffffff)); }

TANDEM_INLINE Wide wide_load(const float *p) { TANDEM_EACH(Wide, load(p + i * kNative)); }
TANDEM_INLINE Wide wide_load(const float *p, int64_t n) {
    if (n >= kWide) {
        return wide_load(p);
    }
    float padded[kWide] = {};
    std::memcpy(padded, p, n * sizeof(float));
    return wide_load(padded);
}
TANDEM_INLINE void wide_store(float *p, Wide v) {
    for (int i = 0; i < kParts; ++i) {
        store(p + i * kNative, v.part[i]);
    }
}
TANDEM_INLINE void wide_store(float *p, Wide v, int64_t n) {
    if (n >= kWide) {
        return wide_store(p, v);
    }
    float padded[kWide];
    wide_store(padded, v);
    std::memcpy(p, padded, n * sizeof(float));
}
template <class Narrow>
TANDEM_INLINE WideInt wide_widen(const Narrow *p) {
    TANDEM_EACH(WideInt, widen_from(p + i * kNative));
}
TANDEM_INLINE Wide wide_load_f16(const uint16_t *p) { TANDEM_EACH(Wide, load_f16(p + i * kNative)); }
TANDEM_INLINE Wide wide_load_bf16(const uint16_t *p) { return as_float(wide_widen(p) << 16); }
TANDEM_INLINE void wide_store_f16(uint16_t *p, Wide v) {
    for (int i = 0; i < kParts; ++i) {
        store_f16(p + i * kNative, v.part[i]);
    }
}
#undef TANDEM_EACH

// The lanes of a Wide folded to those of one native vector, by halves: lane i and i + 8, then i + 4.
template <class F>
TANDEM_INLINE vf fold_parts(Wide v, F f) {
    TANDEM_UNROLL
    for (int half = kParts / 2; half > 0; half /= 2) {
        TANDEM_UNROLL
        for (int i = 0; i < half; ++i) {
            v.part[i] = f(v.part[i], v.part[i + half]);
        }
    }
    return v.part[0];
}
TANDEM_INLINE vf sum_parts(Wide v) {
    return fold_parts(v, [](vf a, vf b) { return a + b; });
}

// Where `many_sums` and its kin want vector i, so that results come out in order.
constexpr int fold_place(int i) { return kSums == 16 ? i % 4 * 4 + i / 4 : i; }

// The sum of the lanes, by halves: lane i and i + 8, then i + 4, i + 2, i + 1.
TANDEM_INLINE float sum(Wide v) { return lanes_sum(sum_parts(v)); }
// The largest lane; lanes must not be NaN.
TANDEM_INLINE float max_lane(Wide v) {
    return lanes_max(fold_parts(v, [](vf a, vf b) { return a > b ? a : b; }));
}

// x 2^n with one rounding, for whole n = k between -152 and 128.
TANDEM_INLINE Wide times_power(Wide x, [[maybe_unused]] WideInt n, [[maybe_unused]] Wide k) {
#if defined(TANDEM_TIMES_POWER)
    Wide out;
    for (int i = 0; i < kParts; ++i) {
        out.part[i] = times_power(x.part[i], k.part[i]);
    }
    return out;
#else
    // In two factors, so that results next to overflow and among the denormals come out right.
    const WideInt half = n >> 1;
    const WideInt bias = wide_int(127);
    return x * as_float((half + bias) << 23) * as_float((n - half + bias) << 23);
#endif
}

// e^x. Cody-Waite reduction by ln 2 in two parts and a polynomial of degree 6; within 1 ulp. NaN stays NaN.
TANDEM_INLINE Wide exp(Wide x) {
    const Wide clipped = min(max(x, wide(-104.0f)), wide(89.0f));
    const WideInt n = nearest(clipped * wide(1.44269504f));
    const Wide k = to_float(n);
    Wide r = fma(k, wide(-0.693359375f), clipped);
    r = fma(k, wide(2.12194440e-4f), r);
    Wide p = fma(r, wide(1.3888889e-3f), wide(8.3333333e-3f));
    p = fma(p, r, wide(4.1666668e-2f));
    p = fma(p, r, wide(1.6666667e-1f));
    p = fma(p, r, wide(0.5f));
    p = fma(p, r * r, r) + wide(1.0f);
    return select(x == x, times_power(p, n, k), x);
}

TANDEM_INLINE Wide sigmoid(Wide x) { return wide(1.0f) / (wide(1.0f) + exp(-x)); }

// tanh x = 1 - 2 / (e^2x + 1), and a polynomial around zero where that would cancel.
TANDEM_INLINE Wide tanh(Wide x) {
    const Wide a = abs(x);
    const Wide far = wide(1.0f) - wide(2.0f) / (exp(a + a) + wide(1.0f));
    const Wide s = x * x;
    Wide p = fma(s, wide(-0.00886323552990219656886f), wide(0.0218694885361552028f));
    p = fma(p, s, wide(-0.0539682539682539682540f));
    p = fma(p, s, wide(0.133333333333333333333f));
    p = fma(p, s, wide(-0.333333333333333333333f));
    const Wide near = fma(p * s, x, x);
    const Wide sign = as_float(as_int(x) & wide_int(INT32_MIN));
    const Wide signed_far = as_float(as_int(far) | as_int(sign));
    return select(x == x, select(a < wide(0.4f), near, signed_far), x);
}

}  // namespace tandem::TANDEM_ISA
