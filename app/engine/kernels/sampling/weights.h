// Probabilities as integers: weight = exp(-distance) in units of 2^-40, so that sums are exact in any order.
//
// `distance` is how far a logit lies below the largest one, in nats and times 1/temperature; infinity is "out". Each
// step rounds as app/engine/serving/weights.py does.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
// One body for every CPU: the loader picks. All operations are exact or round once, so all clones give the same bits.
#define TANDEM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TANDEM_CLONES
#endif

namespace tandem {

constexpr float kFar = 43.0f;  // nats; weights are zero from here on
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e4p-1f;  // few enough bits for exact products with small integers
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr float kRound = 0x1.8p+23f;  // adding and taking it away rounds to an integer
constexpr float kTaylor[] = {0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0x1p-1f, 1.0f, 1.0f};
constexpr float kMantissa = 0x1p+24f;
constexpr int kFractionBits = 40;

inline std::uint64_t weight(float distance) {
    const float x = distance < kFar ? distance : kFar;
    const float n = (x * kLog2E + kRound) - kRound;
    const float f = (n * kLn2High - x) + n * kLn2Low;
    float p = kTaylor[0];
    for (int i = 1; i < 7; ++i) {
        p = p * f + kTaylor[i];
    }
    const auto mantissa = static_cast<std::int32_t>(p * kMantissa);
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(mantissa)) << (kFractionBits - 24)) >>
           static_cast<std::uint64_t>(static_cast<std::int32_t>(n));
}

// As signed integers these compare as the floats do; both zeros are one.
inline std::int32_t order_key(float x) {
    x += 0.0f;
    std::int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

}  // namespace tandem
