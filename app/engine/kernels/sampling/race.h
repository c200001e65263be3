// The tokens still in the race for one draw, thinned out by filters without sorting them.
//
// The set of tokens still in the race is an array of distances from the best one (see weights.h), in order of id. Each
// filter keeps a prefix of some order; where it ends is found with a histogram over buckets of that order, and by
// sorting one bucket. app/engine/serving/filters.py says the same in numpy, token by token.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "passes.h"

namespace tandem {
namespace {

constexpr std::size_t kBlock = 1024;
constexpr std::size_t kSparse = 4;   // a race with less than a quarter left closes ranks
constexpr float kMaxRange = 64.0f;   // beyond it weights are zero, so only counts matter

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
        // Values closer together than that would all fall into the last bucket: then one sorted bucket holds them.
        const float scale = range > kBuckets / std::numeric_limits<float>::max() ? (kBuckets - 1) / range : 0.0f;
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

}  // namespace
}  // namespace tandem
