// Drawing a token from a whole vocabulary: the functions that Python calls. The filters stand in race.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "race.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

Scratch &scratch() {
    thread_local Scratch kept;
    return kept;
}

std::pair<std::int64_t, double> draw(const Logits &logits, std::size_t top_k, double typical_p, double top_p, float reach,
                                     double xtc_threshold, std::size_t min_keep, float scale, double u) {
    const float *x = logits.data();
    const std::size_t n = logits.size();
    const nb::gil_scoped_release nogil;
    Scratch &kept = scratch();
    const float peak = from_key(largest_key(x, n));
    kept.ids.clear();
    const std::size_t keep = std::max<std::size_t>(min_keep, 1);
    Race race(kept);
    if (top_k > 0 && top_k < n) {  // by logit, as a record of the row was made: distances are rounded
        for (const Ranked &one : top_ranked(x, n, top_k, kept.maxima)) {
            kept.ids.push_back(one.second);
        }
        std::sort(kept.ids.begin(), kept.ids.end());
        kept.d.resize(kept.ids.size());
        for (std::size_t i = 0; i < kept.ids.size(); ++i) {
            kept.d[i] = peak - x[kept.ids[i]];
        }
    } else {
        kept.d.resize(n);
        distances(x, n, peak, kept.d.data());
    }
    if (typical_p < 1.0) {
        race.typical(typical_p, keep);
    }
    if (top_p < 1.0) {
        race.top_p(top_p, keep);
    }
    if (reach < kOut) {
        race.near(reach, keep);
    }
    if (xtc_threshold <= 0.5) {
        race.exclude_top(xtc_threshold, keep);
    }
    const auto [place, share] = race.draw(scale, u);
    return {static_cast<std::int64_t>(kept.ids.empty() ? place : kept.ids[place]), share};
}

std::vector<std::int64_t> top(const Logits &logits, std::size_t k) {
    std::vector<std::int64_t> ids;
    const nb::gil_scoped_release nogil;
    for (const Ranked &one : top_ranked(logits.data(), logits.size(), k, scratch().maxima)) {
        ids.push_back(one.second);
    }
    return ids;
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Room = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One row's record, see app/engine/rows.py: the weight of all of it where that is wanted, the best tokens in order of
// id, their logits. NaN anywhere makes every logit NaN.
std::uint8_t *put_record(const float *x, std::size_t n, std::size_t k, bool weighs, std::uint8_t *out) {
    std::vector<Ranked> found = top_ranked(x, n, k, scratch().maxima);
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

// Whole rows and records, as wished for: u16 best tokens (0: the row), u16 whether to weigh, for each row.
void select_rows(const Bytes &rows, std::size_t n_columns, const nb::bytes &wishes, Room out) {
    const std::size_t n_rows = wishes.size() / 4;
    const auto *wish = reinterpret_cast<const std::uint8_t *>(wishes.c_str());
    const auto *x = reinterpret_cast<const float *>(rows.data());
    if (rows.size() != n_rows * n_columns * sizeof(float)) {
        throw std::invalid_argument("the rows have another size");
    }
    std::size_t n_bytes = 0;
    for (std::size_t r = 0; r < n_rows; ++r) {
        std::uint16_t k;
        std::memcpy(&k, wish + 4 * r, sizeof k);
        if (k > n_columns) {
            throw std::invalid_argument("more columns are wished for than there are");
        }
        n_bytes += k != 0 ? 8 + 8 * std::size_t{k} : n_columns * sizeof(float);
    }
    if (out.size() != n_bytes) {
        throw std::invalid_argument("the room has another size");
    }
    std::uint8_t *at = out.data();
    const nb::gil_scoped_release nogil;
    for (std::size_t r = 0; r < n_rows; ++r, x += n_columns) {
        std::uint16_t entry[2];
        std::memcpy(entry, wish + 4 * r, sizeof entry);
        if (entry[0] != 0) {
            at = put_record(x, n_columns, entry[0], entry[1] != 0, at);
        } else {
            std::memcpy(at, x, n_columns * sizeof(float));
            at += n_columns * sizeof(float);
        }
    }
}

std::pair<double, double> total_weight(const Logits &logits, float scale) {
    const nb::gil_scoped_release nogil;
    const float peak = from_key(largest_key(logits.data(), logits.size()));
    const std::uint64_t total = sum_weights_of_logits(logits.data(), logits.size(), peak, scale);
    return {static_cast<double>(peak), static_cast<double>(total)};
}

std::pair<std::int64_t, bool> best(const Logits &logits) {
    const nb::gil_scoped_release nogil;
    const std::int32_t key = largest_key(logits.data(), logits.size());
    const float *x = logits.data();
    const float *end = x + logits.size();
    const float *at = std::find_if(x, end, [key](float value) { return order_key(value) == key; });
    return {at - x, any_nan(x, logits.size())};
}

}  // namespace
}  // namespace tandem

NB_MODULE(_sampling, m) {
    using namespace tandem;
    m.def("draw", &draw, nb::arg("logits"), nb::arg("top_k"), nb::arg("typical_p"), nb::arg("top_p"), nb::arg("reach"),
          nb::arg("xtc_threshold"), nb::arg("min_keep"), nb::arg("scale"), nb::arg("u"));
    m.def("top", &top, nb::arg("logits"), nb::arg("k"));
    m.def("total_weight", &total_weight, nb::arg("logits"), nb::arg("scale"));
    m.def("select_rows", &select_rows, nb::arg("rows"), nb::arg("n_columns"), nb::arg("wishes"), nb::arg("out"));
    m.def("best", &best, nb::arg("logits"));
}
