// What is wanted of rows of logits, see app/engine/rows.py: whole rows, and records of the best tokens of others.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "passes.h"

namespace tandem {
namespace {

constexpr std::size_t kMostFound = 4096;  // tokens kept beside the best ones before they are sorted out

using Ranked = std::pair<std::int64_t, std::uint32_t>;  // falling key, id

// The k best by (logit, lower id), best first, for k far below n: the k-th largest maximum of disjoint groups is a
// floor that at least k tokens reach, and only groups that reach it are looked at again.
std::vector<Ranked> top_ranked(const float *x, std::size_t n, std::size_t k, std::vector<std::int32_t> &maxima) {
    std::int32_t floor = std::numeric_limits<std::int32_t>::min();
    const std::size_t n_groups = (n + kGroup - 1) / kGroup;
    maxima.resize(2 * n_groups);
    group_maxima(x, n / kGroup, maxima.data() + n_groups);
    if (n % kGroup != 0) {
        maxima.back() = largest_key(x + n / kGroup * kGroup, n % kGroup);
    }
    if (k < n_groups) {
        std::copy(maxima.begin() + n_groups, maxima.end(), maxima.begin());
        std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.begin() + n_groups, std::greater<>());
        floor = maxima[k - 1];
    }
    std::vector<Ranked> found;
    for (std::size_t g = 0; g < n_groups; ++g) {
        if (maxima[n_groups + g] < floor) {
            continue;
        }
        for (std::size_t i = g * kGroup; i < std::min(n, (g + 1) * kGroup); ++i) {
            if (const std::int32_t key = order_key(x[i]); key >= floor) {
                found.emplace_back(-static_cast<std::int64_t>(key), static_cast<std::uint32_t>(i));
            }
        }
        if (found.size() > 2 * k + kMostFound) {  // many equal ones: those of higher ids are no better
            std::nth_element(found.begin(), found.begin() + k, found.end());
            found.resize(k);
        }
    }
    if (k < found.size()) {
        std::nth_element(found.begin(), found.begin() + k, found.end());
        found.resize(k);
    }
    std::sort(found.begin(), found.end());
    return found;
}

// One row's record: the weight of all of it where that is wanted, the best tokens in order of id, their logits. NaN
// anywhere makes every logit NaN.
std::uint8_t *put_record(const float *x, std::size_t n, std::size_t k, bool weighs, std::vector<std::int32_t> &maxima,
                         std::uint8_t *out) {
    std::vector<Ranked> found = top_ranked(x, n, k, maxima);
    const bool is_broken = found.size() < k || any_nan(x, n);  // fewer if somebody writes the row meanwhile
    found.resize(k);
    const float peak = x[found[0].second];
    std::sort(found.begin(), found.end(), [](const Ranked &a, const Ranked &b) { return a.second < b.second; });
    const std::uint64_t total = weighs && !is_broken && peak > -kOut ? sum_weights_of_logits(x, n, peak, 1.0f) : 0;
    std::memcpy(out, &total, sizeof total);
    std::uint8_t *ids = out + sizeof total, *values = ids + k * sizeof(std::uint32_t);
    for (std::size_t i = 0; i < k; ++i) {
        const float value = is_broken ? std::numeric_limits<float>::quiet_NaN() : x[found[i].second];
        std::memcpy(ids + i * sizeof(std::uint32_t), &found[i].second, sizeof(std::uint32_t));
        std::memcpy(values + i * sizeof value, &value, sizeof value);
    }
    return values + k * sizeof(float);
}

// u16 best tokens (0: the row), u16 whether to weigh.
struct RowWish {
    std::uint16_t n_best, weighs;
};

std::vector<RowWish> wishes_in(const char *bytes, std::size_t n_bytes) {
    std::vector<RowWish> wishes(n_bytes / sizeof(RowWish));
    std::memcpy(wishes.data(), bytes, wishes.size() * sizeof(RowWish));
    return wishes;
}

// The bytes of what is selected; SIZE_MAX where somebody wants more columns than there are.
std::size_t selected_bytes(const std::vector<RowWish> &wishes, std::size_t n_columns) {
    std::size_t n_bytes = 0;
    for (const RowWish &wish : wishes) {
        if (wish.n_best > n_columns) {
            return SIZE_MAX;
        }
        n_bytes += wish.n_best != 0 ? 8 + 8 * std::size_t{wish.n_best} : n_columns * sizeof(float);
    }
    return n_bytes;
}

void select_rows(const float *x, std::size_t n_columns, const std::vector<RowWish> &wishes,
                 std::vector<std::int32_t> &maxima, std::uint8_t *out) {
    for (const RowWish &wish : wishes) {
        if (wish.n_best != 0) {
            out = put_record(x, n_columns, wish.n_best, wish.weighs != 0, maxima, out);
        } else {
            std::memcpy(out, x, n_columns * sizeof(float));
            out += n_columns * sizeof(float);
        }
        x += n_columns;
    }
}

}  // namespace
}  // namespace tandem
