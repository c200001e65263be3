// Drawing a token from a whole vocabulary: the functions that Python calls. The filters stand in race.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "race.h"
#include "records.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

// Whole rows and records, as wished for.
void select_rows_of(const Bytes &rows, std::size_t n_columns, const nb::bytes &packed, Room out) {
    const std::vector<RowWish> wishes = wishes_in(packed.c_str(), packed.size());
    if (rows.size() != wishes.size() * n_columns * sizeof(float)) {
        throw std::invalid_argument("the rows have another size");
    }
    const std::size_t n_bytes = selected_bytes(wishes, n_columns);
    if (n_bytes == SIZE_MAX) {
        throw std::invalid_argument("more columns are wished for than there are");
    }
    if (out.size() != n_bytes) {
        throw std::invalid_argument("the room has another size");
    }
    const nb::gil_scoped_release nogil;
    select_rows(reinterpret_cast<const float *>(rows.data()), n_columns, wishes, scratch().maxima, out.data());
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
    m.def("select_rows", &select_rows_of, nb::arg("rows"), nb::arg("n_columns"), nb::arg("wishes"), nb::arg("out"));
    m.def("best", &best, nb::arg("logits"));
}
