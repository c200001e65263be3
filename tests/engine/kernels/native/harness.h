// Programs of a few tensors for the kernels' tests: memory, numbers that are the same on every machine, and hashes.
#pragma once

#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "quants.h"

namespace tandem::test {

// Numbers from a seed: the same on every machine (splitmix64).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
    float real() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) / (1 << 23); }  // -1 to 1

private:
    uint64_t state_;
};

// A program under construction. Memory is this object's; sources of nodes are numbers of tensors made before.
class Bench {
public:
    int leaf(Type type, std::vector<int64_t> ne) { return add(type, Op::NONE, std::move(ne), {}); }
    int floats(std::vector<int64_t> ne, Random &random) {
        const int t = leaf(Type::F32, std::move(ne));
        for (int64_t i = 0; i < at(t).elements(); ++i) {
            data<float>(t)[i] = random.real();
        }
        return t;
    }
    int node(Op op, std::vector<int64_t> ne, std::vector<int> sources, std::vector<int32_t> params = {}) {
        const int t = add(Type::F32, op, std::move(ne), sources);
        std::copy(params.begin(), params.end(), tensors_[t].params);
        tensors_[t].flags = kFlagCompute;
        nodes_.push_back(t);
        return t;
    }
    Tensor &at(int t) { return tensors_[t]; }
    template <class T>
    T *data(int t) {
        return reinterpret_cast<T *>(tensors_[t].data);
    }
    // Runs on an engine of its own; exits with a message where that fails.
    void run(const Kernels &kernels, int n_threads) {
        const auto engine = std::make_shared<Engine>(kernels, n_threads, false);
        const std::string failure = engine->compile(tensors_, nodes_)->execute();
        // Weights may lie interleaved now: put them back, for the next engine.
        for (const Tensor &t : tensors_) {
            engine->touch(t.data, t.data + t.span_bytes(), false);
        }
        if (!failure.empty()) {
            std::fprintf(stderr, "a program failed: %s\n", failure.c_str());
            std::exit(2);
        }
    }
    std::vector<float> result(int t) {
        const float *values = data<float>(t);
        return std::vector<float>(values, values + tensors_[t].elements());
    }

private:
    int add(Type type, Op op, std::vector<int64_t> ne, const std::vector<int> &sources) {
        Tensor t{};
        t.type = type;
        t.op = op;
        t.view_src = -1;
        ne.resize(4, 1);
        t.nb[0] = traits(type).block_bytes;
        t.nb[1] = row_bytes(type, ne[0]);
        for (int i = 0; i < 4; ++i) {
            t.ne[i] = ne[i];
            t.src[i] = -1;
            if (i >= 2) {
                t.nb[i] = t.nb[i - 1] * ne[i - 1];
            }
        }
        for (int i = 0; i < kMaxSources; ++i) {
            t.src[i] = i < static_cast<int>(sources.size()) ? sources[i] : -1;
        }
        // Exactly as long as it must be: a sanitizer sees a byte too much.
        const int64_t bytes = t.nb[3] * ne[3];
        memory_.emplace_back(new char[bytes]());
        t.data = memory_.back().get();
        t.buffer_bytes_behind = bytes;
        t.use_count = 1;
        tensors_.push_back(t);
        return static_cast<int>(tensors_.size()) - 1;
    }

    std::deque<std::unique_ptr<char[]>> memory_;
    std::vector<Tensor> tensors_;
    std::vector<int32_t> nodes_;
};

inline int32_t bits(float x) {
    int32_t out;
    std::memcpy(&out, &x, sizeof(out));
    return out;
}

inline bool same(const float *a, const float *b, int64_t n) { return std::memcmp(a, b, n * sizeof(float)) == 0; }

// FNV-1a of the bits.
inline uint64_t hash(const std::vector<float> &values) {
    uint64_t h = 0xcbf29ce484222325u;
    const auto *bytes = reinterpret_cast<const unsigned char *>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(float); ++i) {
        h = (h ^ bytes[i]) * 0x100000001b3u;
    }
    return h;
}

// What a run of all cases has found.
struct Report {
    int n_wrong = 0;
    void line(const std::string &name, uint64_t h) { std::printf("%-44s %016llx\n", name.c_str(), static_cast<unsigned long long>(h)); }
    void check(bool right, const std::string &what) {
        if (!right) {
            ++n_wrong;
            std::fprintf(stderr, "WRONG %s\n", what.c_str());
        }
    }
};

// A program made anew for every run, so that no run sees what another left behind.
struct Case {
    std::string name;
    // Computes on these kernels and threads; returns the output. `report` hears of broken promises inside one run.
    std::vector<float> (*run)(const Case &, const Kernels &, int n_threads, Report &report);
    int64_t arguments[8];
};

std::vector<Case> attention_cases();
std::vector<Case> matmul_cases();
std::vector<Case> row_cases();

}  // namespace tandem::test
