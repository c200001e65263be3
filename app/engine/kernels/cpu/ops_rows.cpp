// Ops on rows: element by element, norms, gated units, softmax, sums.
#include <cmath>
#include <cstring>

#include "compile.h"

namespace tandem {
namespace {

int64_t row_scratch(const Tensor &t, int n_rows) { return n_rows * ((t.ne[0] + 15) / 16 * 16) * 4 + 64; }

float *part(char *scratch, const Tensor &t, int i) {
    return reinterpret_cast<float *>(scratch) + i * ((t.ne[0] + 15) / 16 * 16);
}

// The row of `b` that meets row r of `a`: dimensions wrap.
const char *repeated_row(const Tensor &a, const Tensor &b, int64_t r) {
    const int64_t i1 = r % a.ne[1];
    const int64_t rest = r / a.ne[1];
    return b.at(i1 % b.ne[1], rest % a.ne[2] % b.ne[2], rest / a.ne[2] % b.ne[3]);
}

// Adds a step that maps rows of source 0 to rows of the result; f(context, x, y, n).
template <class F>
void map_rows(Compiler &c, const Node &node, F f) {
    const Tensor x = node.a();
    const Tensor y = *node.out;
    c.add_rows(rows_step(y.rows(), rows_per_task(y.ne[0]), row_scratch(x, 1) + row_scratch(y, 1),
                         [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                             for (int64_t r = begin; r < end; ++r) {
                                 const float *in = read_row(context, x, x.row(r), part(scratch, x, 0));
                                 float *out = row_target(y, y.row(r), part(scratch, x, 1));
                                 f(context, in, out, y.ne[0]);
                                 write_row(context, y, y.row(r), out);
                             }
                         }),
               {x}, &y);
}

float square_root(float x) { return std::sqrt(x); }

}  // namespace

void make_binary(Compiler &c, const Node &node) {
    const Tensor a = node.a(), b = node.b(), y = *node.out;
    const Op op = y.op;
    c.add_rows(rows_step(y.rows(), rows_per_task(y.ne[0]), row_scratch(y, 3),
                         [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                             for (int64_t r = begin; r < end; ++r) {
                                 const float *left = read_row(context, a, a.row(r), part(scratch, y, 0));
                                 const float *right = read_row(context, b, repeated_row(a, b, r), part(scratch, y, 1));
                                 float *out = row_target(y, y.row(r), part(scratch, y, 2));
                                 context.kernels.binary_row(op, left, right, b.ne[0], out, y.ne[0]);
                                 write_row(context, y, y.row(r), out);
                             }
                         }),
               {a, b}, &y);
}

void make_elementwise(Compiler &c, const Node &node) {
    const float p0 = node.param_f32(0), p1 = node.param_f32(1), p2 = node.param_f32(2), p3 = node.param_f32(3),
                p4 = node.param_f32(4);
    const Unary unary = static_cast<Unary>(node.param(0));
    const auto by_element = [&](float (*f)(float)) {
        map_rows(c, node, [f](Context &, const float *x, float *y, int64_t n) {
            for (int64_t i = 0; i < n; ++i) {
                y[i] = f(x[i]);
            }
        });
    };
    switch (node.out->op) {
        case Op::SCALE:
            return map_rows(c, node, [=](Context &context, const float *x, float *y, int64_t n) {
                context.kernels.scale_row(x, y, n, p0, p1);
            });
        case Op::CLAMP:
            return map_rows(c, node, [=](Context &context, const float *x, float *y, int64_t n) {
                context.kernels.clamp_row(x, y, n, p0, p1);
            });
        case Op::UNARY:
            return map_rows(c, node, [=](Context &context, const float *x, float *y, int64_t n) {
                const float params[4] = {p1, p2, p3, p4};
                context.kernels.unary_row(unary, params, x, y, n);
            });
        case Op::SQR:
            return map_rows(c, node, [](Context &context, const float *x, float *y, int64_t n) {
                context.kernels.binary_row(Op::MUL, x, x, n, y, n);
            });
        case Op::LEAKY_RELU:
            return map_rows(c, node, [=](Context &, const float *x, float *y, int64_t n) {
                for (int64_t i = 0; i < n; ++i) {
                    y[i] = x[i] > 0.0f ? x[i] : x[i] * p0;
                }
            });
        case Op::SQRT: return by_element(square_root);
        case Op::LOG: return by_element([](float x) { return std::log(x); });
        case Op::SIN: return by_element([](float x) { return std::sin(x); });
        default: return by_element([](float x) { return std::cos(x); });
    }
}

void make_norm(Compiler &c, const Node &node) {
    const float eps = node.param_f32(0);
    const Op op = node.out->op;
    map_rows(c, node, [=](Context &context, const float *x, float *y, int64_t n) {
        if (op == Op::RMS_NORM) {
            context.kernels.rms_norm_row(x, y, n, eps);
        } else if (op == Op::NORM) {
            context.kernels.norm_row(x, y, n, eps);
        } else {
            context.kernels.l2_norm_row(x, y, n, eps);
        }
    });
}

void make_glu(Compiler &c, const Node &node) {
    const Tensor a = node.a(), y = *node.out;
    const Tensor b = node.src[1] ? node.b() : a;
    const bool halves = node.src[1] == nullptr;
    const bool swapped = halves && node.param(1) != 0;
    const Glu op = static_cast<Glu>(node.param(0));
    const float alpha = node.param_f32(2), limit = node.param_f32(3);
    c.add_rows(rows_step(y.rows(), rows_per_task(y.ne[0]), row_scratch(a, 2) + row_scratch(y, 1),
                         [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                             const int64_t n = y.ne[0];
                             for (int64_t r = begin; r < end; ++r) {
                                 const float *left = read_row(context, a, a.row(r), part(scratch, a, 0));
                                 const float *right =
                                     halves ? left + n : read_row(context, b, b.row(r), part(scratch, a, 1));
                                 float *out = row_target(y, y.row(r), part(scratch, a, 2));
                                 context.kernels.glu_row(op, swapped ? right : left, swapped ? left : right, out, n,
                                                         alpha, limit);
                                 write_row(context, y, y.row(r), out);
                             }
                         }),
               {a, b}, &y);
}

void make_soft_max(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const bool masked = node.src[1] != nullptr;
    const Tensor mask = masked ? node.b() : x;
    const float *sinks = node.src[2] ? reinterpret_cast<const float *>(node.src[2]->data) : nullptr;
    const float scale = node.param_f32(0);
    const std::vector<float> slopes = alibi_slopes(x.ne[2], node.param_f32(1));
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), row_scratch(y, 1),
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        for (int64_t r = begin; r < end; ++r) {
                            const int64_t head = r / x.ne[1] % x.ne[2];
                            const float *bias = nullptr;
                            if (masked) {
                                const char *row = mask.at(r % x.ne[1], head % mask.ne[2],
                                                          r / (x.ne[1] * x.ne[2]) % mask.ne[3]);
                                bias = read_row(context, mask, row, part(scratch, y, 0));
                            }
                            context.kernels.softmax_row(reinterpret_cast<const float *>(x.row(r)), bias,
                                                        reinterpret_cast<float *>(y.row(r)), x.ne[0], scale,
                                                        slopes[head], sinks ? sinks + head : nullptr);
                        }
                    }));
}

void make_reduction(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const Op op = y.op;
    if (op == Op::SUM) {
        c.add(rows_step(1, 1, row_scratch(x, 1), [=](Context &context, int64_t, int64_t, char *scratch) {
            double total = 0;
            for (int64_t r = 0; r < x.rows(); ++r) {
                total += context.kernels.sum_row(read_row(context, x, x.row(r), part(scratch, x, 0)), x.ne[0]);
            }
            *reinterpret_cast<float *>(y.data) = static_cast<float>(total);
        }));
        return;
    }
    c.add(rows_step(x.rows(), rows_per_task(x.ne[0]), row_scratch(x, 1),
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        for (int64_t r = begin; r < end; ++r) {
                            const float *in = read_row(context, x, x.row(r), part(scratch, x, 0));
                            const int64_t n = x.ne[0];
                            auto *out = reinterpret_cast<float *>(y.data);
                            if (op == Op::CUMSUM) {
                                float total = 0.0f;
                                for (int64_t i = 0; i < n; ++i) {
                                    total += in[i];
                                    out[r * n + i] = total;
                                }
                            } else if (op == Op::ARGMAX) {
                                int64_t best = 0;  // the first of the largest, or the first NaN
                                for (int64_t i = 1; i < n && in[best] == in[best]; ++i) {
                                    best = !(in[i] <= in[best]) ? i : best;
                                }
                                reinterpret_cast<int32_t *>(y.data)[r] = static_cast<int32_t>(best);
                            } else {
                                const float total = context.kernels.sum_row(in, n);
                                out[r] = op == Op::MEAN ? total / static_cast<float>(n) : total;
                            }
                        }
                    }));
}

}  // namespace tandem
