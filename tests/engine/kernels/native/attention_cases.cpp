// Attention: one ubatch against each of its tokens alone, over caches of every type whose unseen cells hold NaN.
#include <cmath>
#include <limits>

#include "harness.h"

namespace tandem::test {
namespace {

enum Mask : int64_t { CAUSAL, WINDOW, SEQUENCES, BIASED };

struct Shape {
    Type type;
    int64_t head, value_head, n_heads, n_kv_heads, n_tokens, n_kv;
    Mask mask;
};

// Whether token t of n sees a cell.
bool sees(const Shape &s, int64_t t, int64_t cell) {
    const int64_t position = s.n_kv - s.n_tokens + t;
    switch (s.mask) {
        case WINDOW: return cell <= position && cell > position - 70;
        case SEQUENCES: return cell / 64 % 3 == t % 3 && cell <= position;
        default: return cell <= position && cell != 5;
    }
}

void fill_cache(Bench &bench, int cache, const std::vector<bool> &seen, int64_t n_heads, Random &random) {
    const Tensor &t = bench.at(cache);
    std::vector<float> row(t.ne[0]);
    for (int64_t h = 0; h < n_heads; ++h) {
        for (int64_t cell = 0; cell < t.ne[1]; ++cell) {
            for (float &x : row) {
                x = random.real();
            }
            char *to = t.at(cell, h, 0);
            if (seen[cell]) {
                row_from_float(t.type, row.data(), to, t.ne[0]);
            } else {
                std::memset(to, 0xff, t.nb[1]);  // a NaN, in floats and in scales
            }
        }
    }
}

// Tokens [first, first + n) of the shape's ubatch.
std::vector<float> attend(const Shape &s, int64_t first, int64_t n, const Kernels &kernels, int n_threads) {
    Random random(7);
    Bench bench;
    const int q = bench.leaf(Type::F32, {s.head, n, s.n_heads});
    for (int64_t h = 0; h < s.n_heads; ++h) {
        for (int64_t t = 0; t < s.n_tokens; ++t) {
            for (int64_t i = 0; i < s.head; ++i) {
                const float x = 3.0f * random.real();
                if (t >= first && t < first + n) {
                    bench.data<float>(q)[(h * n + t - first) * s.head + i] = x;
                }
            }
        }
    }
    std::vector<bool> seen(s.n_kv);
    for (int64_t cell = 0; cell < s.n_kv; ++cell) {
        for (int64_t t = 0; t < s.n_tokens; ++t) {
            seen[cell] = seen[cell] || sees(s, t, cell);
        }
    }
    const int k = bench.leaf(s.type, {s.head, s.n_kv, s.n_kv_heads});
    const int v = bench.leaf(s.type, {s.value_head, s.n_kv, s.n_kv_heads});
    fill_cache(bench, k, seen, s.n_kv_heads, random);
    fill_cache(bench, v, seen, s.n_kv_heads, random);
    const int mask = bench.leaf(Type::F16, {s.n_kv, n});
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t cell = 0; cell < s.n_kv; ++cell) {
            const bool shown = sees(s, first + t, cell);
            const uint16_t value = s.mask == BIASED ? 0x3000 + cell % 7 : 0;
            bench.data<uint16_t>(mask)[t * s.n_kv + cell] = shown ? value : 0xfc00;
        }
    }
    const bool all = s.mask == BIASED;  // cap, slopes and sinks come along
    const int sinks = bench.floats({s.n_heads}, random);
    std::vector<int> sources = {q, k, v, mask};
    if (all) {
        sources.push_back(sinks);
    }
    const int out = bench.node(Op::FLASH_ATTN_EXT, {s.value_head, s.n_heads, n}, sources,
                               {bits(1.0f / std::sqrt(static_cast<float>(s.head))), bits(all ? 8.0f : 0.0f),
                                bits(all ? 30.0f : 0.0f)});
    bench.run(kernels, n_threads);
    return bench.result(out);
}

std::vector<float> run(const Case &c, const Kernels &kernels, int n_threads, Report &report) {
    const int64_t *x = c.arguments;
    const Shape s{static_cast<Type>(x[0]), x[1], x[2], x[3], x[4], x[5], x[6], static_cast<Mask>(x[7])};
    const std::vector<float> together = attend(s, 0, s.n_tokens, kernels, n_threads);
    const int64_t row = s.n_heads * s.value_head;
    for (const int64_t token : {int64_t{0}, s.n_tokens / 2, s.n_tokens - 1}) {
        const std::vector<float> alone = attend(s, token, 1, kernels, n_threads);
        report.check(same(alone.data(), together.data() + token * row, row),
                     c.name + ": " + kernels.name + ": token " + std::to_string(token) +
                         " has other bits alone than in its ubatch");
    }
    for (const float value : together) {
        if (std::isnan(value)) {
            report.check(false, c.name + ": " + kernels.name + ": what nobody sees came through");
            break;
        }
    }
    return together;
}

}  // namespace

std::vector<Case> attention_cases() {
    const auto f16 = static_cast<int64_t>(Type::F16);
    std::vector<Case> cases = {
        {"attention f16 64", run, {f16, 64, 64, 6, 2, 37, 700, CAUSAL}},
        {"attention f16 64, window", run, {f16, 64, 64, 6, 2, 37, 700, WINDOW}},
        {"attention f16 64, sequences", run, {f16, 64, 64, 4, 1, 9, 640, SEQUENCES}},
        {"attention f16 64, cap bias sinks", run, {f16, 64, 64, 6, 2, 21, 600, BIASED}},
        {"attention f16 80, values 48", run, {f16, 80, 48, 4, 4, 19, 150, CAUSAL}},
        {"attention f16 72, ragged", run, {f16, 72, 40, 3, 1, 11, 131, CAUSAL}},
        {"attention f16 128, one head", run, {f16, 128, 128, 1, 1, 40, 200, CAUSAL}},
        {"attention f16 96 of 64, many heads", run, {f16, 96, 64, 16, 1, 5, 320, CAUSAL}},
    };
    const std::pair<const char *, Type> types[] = {{"f32", Type::F32}, {"bf16", Type::BF16}, {"q8_0", Type::Q8_0},
                                                   {"q4_0", Type::Q4_0}};
    for (const auto &[name, type] : types) {
        cases.push_back({std::string("attention ") + name + " 64", run,
                         {static_cast<int64_t>(type), 64, 64, 6, 2, 23, 300, CAUSAL}});
    }
    return cases;
}

}  // namespace tandem::test
