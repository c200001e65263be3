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

// A sum, then its rows scaled: as they stand or in another order, into memory of their own or over what was added. Where
// both ops may take turns row by row they do; what comes out must be as if the second had waited for the first.
std::vector<float> run_two(const Case &c, const Kernels &kernels, int n_threads, Report &report) {
    const bool turned = c.arguments[0] != 0, over_source = c.arguments[1] != 0;
    const std::vector<int64_t> shape = {kColumns, 20, 30}, turned_shape = {kColumns, 30, 20};
    const std::vector<int32_t> factors = {bits(1.3f), bits(0.25f)};
    Random random(5);
    Bench bench;
    const int a = bench.floats(shape, random), b = bench.floats(shape, random);
    const int sum = bench.node(Op::ADD, shape, {a, b});
    const int view = bench.leaf(Type::F32, turned ? turned_shape : shape);
    bench.at(view).data = bench.at(sum).data;
    if (turned) {
        bench.at(view).nb[1] = bench.at(sum).nb[2];
        bench.at(view).nb[2] = bench.at(sum).nb[1];
    }
    const int out = bench.node(Op::SCALE, turned ? turned_shape : shape, {view}, factors);
    if (over_source) {
        bench.at(out).data = bench.at(a).data;
    }
    bench.run(kernels, n_threads);

    Bench second;
    const int x = second.leaf(Type::F32, turned ? turned_shape : shape);
    for (int64_t r = 0; r < second.at(x).rows(); ++r) {
        std::memcpy(second.at(x).row(r), bench.at(view).row(r), kColumns * sizeof(float));
    }
    const int waited = second.node(Op::SCALE, turned ? turned_shape : shape, {x}, factors);
    second.run(kernels, 1);
    report.check(same(bench.data<float>(out), second.data<float>(waited), second.at(waited).elements()),
                 c.name + ": " + kernels.name + ": one op did not wait for rows of the other");
    return bench.result(out);
}

}  // namespace

std::vector<Case> row_cases() {
    std::vector<Case> cases;
    for (size_t i = 0; i < std::size(kOps); ++i) {
        cases.push_back({std::string("rows ") + kOps[i].name, run, {static_cast<int64_t>(i)}});
    }
    for (const int64_t turned : {0, 1}) {
        for (const int64_t over_source : {0, 1}) {
            cases.push_back({std::string("two ops, rows ") + (turned ? "turned" : "alike") +
                                 (over_source ? ", over a source" : ""),
                             run_two, {turned, over_source}});
        }
    }
    return cases;
}

}  // namespace tandem::test
