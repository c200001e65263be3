// Passes over all tokens, written so that compilers vectorize them; each is built for several CPUs (see weights.h).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "weights.h"

namespace tandem {
namespace {

constexpr float kOut = std::numeric_limits<float>::infinity();
constexpr std::size_t kGroup = 64;
constexpr int kBuckets = 4096;       // and one more for what is out

TANDEM_CLONES std::int32_t largest_key(const float *x, std::size_t n) {
    std::int32_t largest = std::numeric_limits<std::int32_t>::min();
    for (std::size_t i = 0; i < n; ++i) {
        largest = std::max(largest, order_key(x[i]));
    }
    return largest;
}

TANDEM_CLONES bool any_nan(const float *x, std::size_t n) {
    std::int32_t found = 0;
    for (std::size_t i = 0; i < n; ++i) {
        found |= x[i] != x[i];
    }
    return found != 0;
}

TANDEM_CLONES void group_maxima(const float *x, std::size_t n_whole, std::int32_t *out) {
    for (std::size_t g = 0; g < n_whole; ++g) {
        std::int32_t largest = std::numeric_limits<std::int32_t>::min();
        for (std::size_t i = 0; i < kGroup; ++i) {
            largest = std::max(largest, order_key(x[g * kGroup + i]));
        }
        out[g] = largest;
    }
}

float from_key(std::int32_t key) {
    const std::int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

TANDEM_CLONES void distances(const float *x, std::size_t n, float peak, float *out) {
    for (std::size_t i = 0; i < n; ++i) {
        out[i] = peak - x[i];
    }
}

TANDEM_CLONES void weigh(const float *d, std::size_t n, float nearest, float scale, std::uint64_t *out) {
    for (std::size_t i = 0; i < n; ++i) {
        out[i] = weight((d[i] - nearest) * scale);
    }
}

TANDEM_CLONES std::uint64_t sum_weights(const float *d, std::size_t n, float nearest, float scale) {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < n; ++i) {
        total += weight((d[i] - nearest) * scale);
    }
    return total;
}

TANDEM_CLONES std::uint64_t sum_weights_of_logits(const float *x, std::size_t n, float peak, float scale) {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < n; ++i) {
        total += weight((peak - x[i]) * scale);
    }
    return total;
}

// Sums of weight * distance in units of 2^-40, both factors cut so that a whole vocabulary fits 64 bits.
TANDEM_CLONES std::uint64_t sum_surprise(const float *d, std::size_t n) {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const float near = d[i] < kFar ? d[i] : kFar;
        total += (weight(d[i]) >> 16) * static_cast<std::uint64_t>(static_cast<std::int32_t>(near * 65536.0f));
    }
    return total;
}

TANDEM_CLONES std::size_t count_heavy(const float *d, std::size_t n, std::uint64_t least) {
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        count += weight(d[i]) >= least;
    }
    return count;
}

TANDEM_CLONES std::size_t count_near(const float *d, std::size_t n, float reach) {
    std::uint32_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        count += d[i] <= reach && d[i] < kOut;
    }
    return count;
}

TANDEM_CLONES std::size_t count_less(const std::int32_t *v, std::size_t n, std::int32_t limit) {
    std::int32_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        count += v[i] < limit;
    }
    return count;
}

TANDEM_CLONES void deviations(const float *d, std::size_t n, float mean, float *out) {
    for (std::size_t i = 0; i < n; ++i) {
        out[i] = d[i] < kOut ? std::fabs(d[i] - mean) : kOut;
    }
}

// The least of v, none of them negative, and the largest that is not kOut; as integers, which vectorizes.
TANDEM_CLONES std::pair<float, float> range_of(const float *v, std::size_t n) {
    constexpr std::int32_t kOutKey = 0x7f800000;
    std::int32_t low = kOutKey, high = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t key = order_key(v[i]);
        low = std::min(low, key);
        high = std::max(high, key < kOutKey ? key : 0);
    }
    return {from_key(low), from_key(high)};
}

TANDEM_CLONES void bucket_of(const float *v, std::size_t n, float low, float scale, std::int32_t *out) {
    for (std::size_t i = 0; i < n; ++i) {
        const float place = (v[i] - low) * scale;
        const float bounded = place < kBuckets - 1 ? place : kBuckets - 1;
        out[i] = v[i] < kOut ? static_cast<std::int32_t>(bounded) : kBuckets;
    }
}

// What comes after (edge, place), in the order of v and then place, is out.
TANDEM_CLONES void keep_prefix(const float *v, std::size_t n, float edge, std::size_t place, float *d) {
    const std::size_t split = std::min(n, place + 1);
    for (std::size_t i = 0; i < split; ++i) {
        d[i] = v[i] <= edge ? d[i] : kOut;
    }
    for (std::size_t i = split; i < n; ++i) {
        d[i] = v[i] < edge ? d[i] : kOut;
    }
}

// What comes up to (edge, place), in the order of d and then place, is out.
TANDEM_CLONES void drop_prefix(std::size_t n, float edge, std::size_t place, float *d) {
    const std::size_t split = std::min(n, place + 1);
    for (std::size_t i = 0; i < split; ++i) {
        d[i] = d[i] <= edge ? kOut : d[i];
    }
    for (std::size_t i = split; i < n; ++i) {
        d[i] = d[i] < edge ? kOut : d[i];
    }
}

}  // namespace
}  // namespace tandem
