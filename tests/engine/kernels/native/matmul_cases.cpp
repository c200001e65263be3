// Matrix products of every type with fast kernels: many tokens against each of them alone.
#include "harness.h"

namespace tandem::test {
namespace {

// Where the half floats of a block are, for types without an encoder: blocks are then random bytes with sane scales.
struct Packed {
    const char *name;
    Type type;
    int halves[2];  // offsets in the block, or -1
};
constexpr Packed kTypes[] = {
    {"f32", Type::F32, {}},           {"f16", Type::F16, {}},           {"bf16", Type::BF16, {}},
    {"q8_0", Type::Q8_0, {}},         {"q4_0", Type::Q4_0, {}},         {"q4_1", Type::Q4_1, {}},
    {"q5_0", Type::Q5_0, {}},         {"q5_1", Type::Q5_1, {}},         {"iq4_nl", Type::IQ4_NL, {}},
    {"q2_k", Type::Q2_K, {80, 82}},   {"q3_k", Type::Q3_K, {108, -1}},  {"q4_k", Type::Q4_K, {0, 2}},
    {"q5_k", Type::Q5_K, {0, 2}},     {"q6_k", Type::Q6_K, {208, -1}},  {"iq4_xs", Type::IQ4_XS, {0, -1}},
    {"mxfp4", Type::MXFP4, {-1, -1}},
};

bool encodes(const Packed &packed) { return packed.halves[0] == packed.halves[1]; }

void fill(Bench &bench, int weight, const Packed &packed, Random &random) {
    const Tensor &t = bench.at(weight);
    if (encodes(packed) && packed.type != Type::MXFP4) {
        std::vector<float> row(t.ne[0]);
        for (int64_t r = 0; r < t.rows(); ++r) {
            for (float &x : row) {
                x = random.real();
            }
            row_from_float(t.type, row.data(), t.row(r), t.ne[0]);
        }
        return;
    }
    const int64_t block_bytes = traits(t.type).block_bytes;
    const int64_t n_blocks = t.rows() * t.ne[0] / traits(t.type).block_elements;
    for (int64_t b = 0; b < n_blocks; ++b) {
        char *block = t.data + b * block_bytes;
        for (int64_t i = 0; i < block_bytes; ++i) {
            block[i] = static_cast<char>(random.next());
        }
        if (packed.type == Type::MXFP4) {
            block[0] = static_cast<char>(120 + random.below(8));  // an exponent
            continue;
        }
        for (const int offset : packed.halves) {
            if (offset >= 0) {
                const auto half = static_cast<uint16_t>(0x2000 + random.below(0x800));
                std::memcpy(block + offset, &half, sizeof(half));
            }
        }
    }
}

std::vector<float> multiply(const Packed &packed, int64_t k, int64_t n_rows, int64_t first, int64_t n,
                            const Kernels &kernels, int n_threads) {
    Random random(11);
    Bench bench;
    const int weight = bench.leaf(packed.type, {k, n_rows});
    fill(bench, weight, packed, random);
    const int x = bench.leaf(Type::F32, {k, n});
    for (int64_t i = 0; i < (first + n) * k; ++i) {
        const float value = random.real();
        if (i >= first * k) {
            bench.data<float>(x)[i - first * k] = value;
        }
    }
    const int out = bench.node(Op::MUL_MAT, {n_rows, n}, {weight, x});
    bench.run(kernels, n_threads);
    return bench.result(out);
}

std::vector<float> run(const Case &c, const Kernels &kernels, int n_threads, Report &report) {
    const Packed &packed = kTypes[c.arguments[0]];
    const int64_t k = c.arguments[1], n_rows = c.arguments[2], n_tokens = c.arguments[3];
    const std::vector<float> together = multiply(packed, k, n_rows, 0, n_tokens, kernels, n_threads);
    for (const int64_t token : {int64_t{0}, n_tokens - 1}) {
        const std::vector<float> alone = multiply(packed, k, n_rows, token, 1, kernels, n_threads);
        report.check(same(alone.data(), together.data() + token * n_rows, n_rows),
                     c.name + ": " + kernels.name + ": token " + std::to_string(token) +
                         " has other bits alone than among others");
    }
    return together;
}

}  // namespace

std::vector<Case> matmul_cases() {
    std::vector<Case> cases;
    for (size_t i = 0; i < std::size(kTypes); ++i) {
        for (const int64_t n_rows : {48, 37}) {  // whole groups of rows, and some behind them
            cases.push_back({std::string("matmul ") + kTypes[i].name + ", " + std::to_string(n_rows) + " rows", run,
                             {static_cast<int64_t>(i), 512, n_rows, 19}});
        }
    }
    return cases;
}

}  // namespace tandem::test
