// Norms, softmax, rotation and gates over rows that are no multiple of any vector.
#include "harness.h"

namespace tandem::test {
namespace {

constexpr int64_t kColumns = 203, kRows = 9;

struct RowOp {
    const char *name;
    Op op;
    int32_t params[4];
    int n_sources;
};
const RowOp kOps[] = {
    {"rms_norm", Op::RMS_NORM, {bits(1e-5f)}, 1},
    {"norm", Op::NORM, {bits(1e-5f)}, 1},
    {"l2_norm", Op::L2_NORM, {bits(1e-6f)}, 1},
    {"soft_max", Op::SOFT_MAX, {bits(0.7f), bits(0.0f)}, 1},
    {"scale", Op::SCALE, {bits(1.3f), bits(0.25f)}, 1},
    {"add", Op::ADD, {}, 2},
    {"div", Op::DIV, {}, 2},
    {"silu", Op::UNARY, {10}, 1},
    {"tanh", Op::UNARY, {4}, 1},
    {"exp", Op::UNARY, {13}, 1},
    {"sum_rows", Op::SUM_ROWS, {}, 1},
    {"swiglu", Op::GLU, {2}, 2},
    {"geglu", Op::GLU, {1}, 2},
};

std::vector<float> run(const Case &c, const Kernels &kernels, int n_threads, Report &) {
    const RowOp &op = kOps[c.arguments[0]];
    Random random(3);
    Bench bench;
    std::vector<int> sources;
    for (int i = 0; i < op.n_sources; ++i) {
        sources.push_back(bench.floats({kColumns, kRows}, random));
    }
    const int64_t columns = op.op == Op::SUM_ROWS ? 1 : kColumns;
    const int out = bench.node(op.op, {columns, kRows}, sources, {std::begin(op.params), std::end(op.params)});
    bench.run(kernels, n_threads);
    return bench.result(out);
}

}  // namespace

std::vector<Case> row_cases() {
    std::vector<Case> cases;
    for (size_t i = 0; i < std::size(kOps); ++i) {
        cases.push_back({std::string("rows ") + kOps[i].name, run, {static_cast<int64_t>(i)}});
    }
    return cases;
}

}  // namespace tandem::test
