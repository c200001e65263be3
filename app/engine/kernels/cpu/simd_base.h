// Plain C++ over four lanes, for x86-64 with SSE2 alone, Arm without dot products and any other machine. Correct first;
// the compiler vectorizes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace tandem::TANDEM_ISA {

constexpr int kNative = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint8_t vb __attribute__((vector_size(16)));

// a * b + c with one rounding. The product of two floats is exact in double; the sum is rounded to odd there, and a
// double rounded to odd rounds to float as the exact value would.
TANDEM_INLINE float fused_one(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = c;
    double sum = product + addend;
    const double back = sum - product;
    const double error = (product - (sum - back)) + (addend - back);
    int64_t bits;
    std::memcpy(&bits, &sum, 8);
    if (error != 0 && error == error && (bits & 1) == 0) {
        bits += (error > 0) == (sum > 0) ? 1 : -1;
        std::memcpy(&sum, &bits, 8);
    }
    return static_cast<float>(sum);
}
TANDEM_INLINE vf fused(vf a, vf b, vf c) {
    vf out{};
    for (int i = 0; i < kNative; ++i) {
        out[i] = fused_one(a[i], b[i], c[i]);
    }
    return out;
}
TANDEM_INLINE vf square_root(vf a) {
    vf out{};
    for (int i = 0; i < kNative; ++i) {
        out[i] = __builtin_sqrtf(a[i]);
    }
    return out;
}
TANDEM_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
TANDEM_INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
TANDEM_INLINE vi to_nearest(vf a) {
    vi out{};
    for (int i = 0; i < kNative; ++i) {
        // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits; what is out of its reach is
        // already whole.
        const float magic = 12582912.0f;
        const bool small = __builtin_fabsf(a[i]) < 4194304.0f;
        const bool sane = __builtin_fabsf(a[i]) < 2147483648.0f;
        const float moved = a[i] + magic;
        out[i] = small ? static_cast<int32_t>(moved - magic) : sane ? static_cast<int32_t>(a[i]) : INT32_MIN;
    }
    return out;
}
TANDEM_INLINE vf load_f16(const void *p) {
    uint16_t halves[kNative];
    std::memcpy(halves, p, sizeof(halves));
    vf out{};
    for (int i = 0; i < kNative; ++i) {
        out[i] = half_to_float(halves[i]);
    }
    return out;
}
TANDEM_INLINE void store_f16(void *p, vf v) {
    uint16_t halves[kNative];
    for (int i = 0; i < kNative; ++i) {
        halves[i] = float_to_half(v[i]);
    }
    std::memcpy(p, halves, sizeof(halves));
}
template <class Narrow>
TANDEM_INLINE vi widen_from(const Narrow *p) {
    return vi{p[0], p[1], p[2], p[3]};
}
TANDEM_INLINE vb lookup(const uint8_t *table, vb index) {
    vb out{};
    for (int i = 0; i < 4 * kNative; ++i) {
        out[i] = table[index[i] & 15];
    }
    return out;
}

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
template <int kMax, int kChunks>
TANDEM_INLINE vi dot_chunks(const vb *w, const int8_t *a, vi init) {
    int8_t bytes[kChunks][kNative][4];
    std::memcpy(bytes, w, sizeof(bytes));
    for (int i = 0; i < kNative; ++i) {
        int32_t sum = init[i];
        for (int c = 0; c < kChunks; ++c) {
            for (int j = 0; j < 4; ++j) {
                sum += bytes[c][i][j] * a[4 * c + j];
            }
        }
        init[i] = sum;
    }
    return init;
}

}  // namespace tandem::TANDEM_ISA
