// Drawing a token from a whole vocabulary without sorting it.
//
// The set of tokens still in the race is an array of distances from the best one (see weights.h), in order of id. Each
// filter keeps a prefix of some order; where it ends is found with a histogram over buckets of that order, and by
// sorting one bucket. app/engine/serving/filters.py says the same in numpy, token by token.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <functional>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "weights.h"

namespace nb = nanobind;

namespace tandem {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr float kOut = std::numeric_limits<float>::infinity();
constexpr std::size_t kBlock = 1024;
constexpr std::size_t kGroup = 64;
constexpr int kBuckets = 4096;       // and one more for what is out
constexpr std::size_t kSparse = 4;   // a race with less than a quarter left closes ranks
constexpr float kMaxRange = 64.0f;   // beyond it weights are zero, so only counts matter

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

// The last of a prefix in an order of values, equal ones by place, and how many it has.
struct Edge {
    float value;
    std::size_t place;
    std::size_t count;
};

struct Scratch {
    std::vector<float> d, v;
    std::vector<std::uint32_t> ids;  // of d's places; empty: place is id
    std::vector<std::int32_t> maxima;
};

class Race {
public:
    explicit Race(Scratch &scratch) : d_(scratch.d), v_(scratch.v), ids_(scratch.ids) {}

    void best(std::size_t count) { keep(d_, prefix<Count>(d_, [count](std::uint64_t) { return count; })); }

    void top_p(double p, std::size_t min_keep) {
        const auto needed = [p](std::uint64_t all) {
            return static_cast<std::uint64_t>(std::ceil(p * static_cast<double>(all)));
        };
        keep(d_, prefix_of(d_, needed, min_keep));
    }

    void typical(double p, std::size_t min_keep) {
        const std::uint64_t total = sum_weights(d_.data(), d_.size(), 0.0f, 1.0f);
        const double mean = static_cast<double>(sum_surprise(d_.data(), d_.size())) / static_cast<double>(total);
        v_.resize(d_.size());
        deviations(d_.data(), d_.size(), static_cast<float>(mean), v_.data());
        const auto needed = [p](std::uint64_t all) {
            return static_cast<std::uint64_t>(std::floor(p * static_cast<double>(all))) + 1;
        };
        keep(v_, prefix_of(v_, needed, min_keep));
    }

    void near(float reach, std::size_t min_keep) {
        const float limit = range_of(d_.data(), d_.size()).first + reach;
        const std::size_t n_near = count_near(d_.data(), d_.size(), limit);
        if (n_near >= min_keep) {
            keep(d_, {limit, d_.size(), n_near});
        } else {
            best(min_keep);
        }
    }

    void exclude_top(double threshold, std::size_t min_keep) {
        const std::uint64_t total = sum_weights(d_.data(), d_.size(), 0.0f, 1.0f);
        const auto least = static_cast<std::uint64_t>(std::ceil(threshold * static_cast<double>(total)));
        const std::size_t n_heavy = count_heavy(d_.data(), d_.size(), std::max<std::uint64_t>(least, 1));
        const std::size_t n_all = count_near(d_.data(), d_.size(), kOut);
        if (n_heavy < 2 || n_all - (n_heavy - 1) < min_keep) {
            return;
        }
        const Edge edge = prefix<Count>(d_, [n_heavy](std::uint64_t) { return n_heavy - 1; });
        drop_prefix(d_.size(), edge.value, edge.place, d_.data());
    }

    // The place at `u` of the cumulative weights in order of place, and its share of them.
    std::pair<std::size_t, double> draw(float scale, double u) const {
        const std::size_t n = d_.size();
        const float nearest = range_of(d_.data(), n).first;
        std::vector<std::uint64_t> sums;
        std::uint64_t total = 0;
        for (std::size_t start = 0; start < n; start += kBlock) {
            sums.push_back(sum_weights(d_.data() + start, std::min(kBlock, n - start), nearest, scale));
            total += sums.back();
        }
        auto mark = std::min(static_cast<std::uint64_t>(u * static_cast<double>(total)), total - 1);
        std::size_t block = 0;
        while (mark >= sums[block]) {
            mark -= sums[block++];
        }
        std::array<std::uint64_t, kBlock> weights;
        const std::size_t start = block * kBlock;
        weigh(d_.data() + start, std::min(kBlock, n - start), nearest, scale, weights.data());
        std::size_t i = 0;
        while (mark >= weights[i]) {
            mark -= weights[i++];
        }
        return {start + i, static_cast<double>(weights[i]) / static_cast<double>(total)};
    }

private:
    struct Weight {
        static void measure(const float *d, std::size_t n, std::uint64_t *out) { weigh(d, n, 0.0f, 1.0f, out); }
    };
    struct Count {
        static void measure(const float *, std::size_t n, std::uint64_t *out) { std::fill_n(out, n, 1); }
    };

    // Where both enough weight and enough tokens are held.
    template <typename Needed>
    Edge prefix_of(const std::vector<float> &v, Needed needed, std::size_t min_keep) const {
        const Edge heavy = prefix<Weight>(v, needed);
        if (heavy.count >= min_keep) {
            return heavy;
        }
        return prefix<Count>(v, [min_keep](std::uint64_t) { return min_keep; });
    }

    // The last of the fewest first places, in order of (v, place), whose measures sum up to what is needed of them all.
    template <typename Measure, typename Needed>
    Edge prefix(const std::vector<float> &v, Needed needed_of) const {
        const auto [low, high] = range_of(v.data(), v.size());
        const float range = std::min(high - low, kMaxRange);
        const float scale = range > 0.0f ? (kBuckets - 1) / range : 0.0f;
        std::vector<std::uint64_t> sums(kBuckets + 1);
        std::array<std::int32_t, kBlock> bucket;
        std::array<std::uint64_t, kBlock> measures;
        for (std::size_t start = 0; start < v.size(); start += kBlock) {
            const std::size_t n = std::min(kBlock, v.size() - start);
            bucket_of(v.data() + start, n, low, scale, bucket.data());
            Measure::measure(d_.data() + start, n, measures.data());
            for (std::size_t i = 0; i < n; ++i) {
                sums[bucket[i]] += measures[i];
            }
        }
        sums.pop_back();  // what is out
        const std::uint64_t all = std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
        const std::uint64_t needed = needed_of(all);
        if (needed > all) {
            return {std::numeric_limits<float>::max(), v.size(), v.size()};
        }
        std::int32_t last = 0;
        std::uint64_t held = 0;
        while (held + sums[last] < needed) {
            held += sums[last++];
        }
        return edge_in<Measure>(v, low, scale, last, held, needed);
    }

    // The edge is known to lie in this bucket; those before it hold `held`.
    template <typename Measure>
    Edge edge_in(const std::vector<float> &v, float low, float scale, std::int32_t wanted, std::uint64_t held,
                 std::uint64_t needed) const {
        std::vector<std::pair<float, std::size_t>> members;
        std::array<std::int32_t, kBlock> bucket;
        std::size_t n_before = 0;
        for (std::size_t start = 0; start < v.size(); start += kBlock) {
            const std::size_t n = std::min(kBlock, v.size() - start);
            bucket_of(v.data() + start, n, low, scale, bucket.data());
            n_before += count_less(bucket.data(), n, wanted);
            for (std::size_t i = 0; i < n; ++i) {
                if (bucket[i] == wanted) {
                    members.emplace_back(v[start + i], start + i);
                }
            }
        }
        std::sort(members.begin(), members.end());
        std::size_t at = 0;
        for (std::uint64_t one = 0;; ++at) {
            Measure::measure(&d_[members[at].second], 1, &one);
            held += one;
            if (held >= needed) {
                break;
            }
        }
        return {members[at].first, members[at].second, n_before + at + 1};
    }

    // What comes after the edge is out; where most is, the rest closes ranks.
    void keep(const std::vector<float> &v, const Edge &edge) {
        keep_prefix(v.data(), d_.size(), edge.value, edge.place, d_.data());
        if (edge.count > d_.size() / kSparse) {
            return;
        }
        const bool is_first = ids_.empty();
        ids_.resize(is_first ? edge.count : ids_.size());
        std::size_t n = 0;
        for (std::size_t i = 0; i < d_.size(); ++i) {
            if (d_[i] < kOut) {  // never ahead of i, so it can be done in place
                ids_[n] = is_first ? static_cast<std::uint32_t>(i) : ids_[i];
                d_[n++] = d_[i];
            }
        }
        d_.resize(n);
        ids_.resize(n);
    }

    std::vector<float> &d_;
    std::vector<float> &v_;
    std::vector<std::uint32_t> &ids_;
};

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
    if (top_k > 0 && top_k < n / kGroup) {
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
        if (top_k > 0 && top_k < n) {
            race.best(top_k);
        }
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
    m.def("best", &best, nb::arg("logits"));
}
