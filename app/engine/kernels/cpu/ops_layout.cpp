// Ops that lay out elements: windows, repetition, joining, padding, triangles, sorting.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "compile.h"

namespace tandem {
namespace {

struct Index {
    int64_t i1, i2, i3;
};
Index index_of(const Tensor &t, int64_t row) {
    const int64_t rest = row / t.ne[1];
    return {row % t.ne[1], rest % t.ne[2], rest / t.ne[2]};
}

float *floats(const Tensor &t, int64_t row) { return reinterpret_cast<float *>(t.row(row)); }

// n elements from a strided row to a packed one.
void gather(const char *from, int64_t stride, char *to, int64_t n, int64_t size) {
    if (stride == size) {
        std::memcpy(to, from, n * size);
    } else if (size == 4) {
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + 4 * i, from + i * stride, 4);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + i * size, from + i * stride, size);
        }
    }
}

void make_window(Compiler &c, const Node &node) {
    const Tensor a = node.a(), b = node.b(), y = *node.out;
    const bool add = y.op == Op::ACC;
    const int64_t nb1 = node.param(0), nb2 = node.param(1), nb3 = node.param(2), offset = node.param(3);
    c.add(rows_step(1, 1, 0, [=](Context &, int64_t, int64_t, char *) {
        if (y.data != a.data) {
            std::memcpy(y.data, a.data, a.span_bytes());
        }
        for (int64_t r = 0; r < (b.empty() ? 0 : b.rows()); ++r) {
            const Index i = index_of(b, r);
            auto *to = reinterpret_cast<float *>(y.data + offset + i.i1 * nb1 + i.i2 * nb2 + i.i3 * nb3);
            for (int64_t e = 0; e < b.ne[0]; ++e) {
                float value;
                std::memcpy(&value, b.row(r) + e * b.nb[0], 4);
                to[e] = add ? to[e] + value : value;
            }
        }
    }));
}

void make_fill(Compiler &c, const Node &node) {
    const Tensor y = *node.out;
    const float value = node.param_f32(0);
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), y.ne[0] * 4, [=](Context &context, int64_t begin, int64_t end,
                                                                       char *scratch) {
        for (int64_t r = begin; r < end; ++r) {
            float *out = row_target(y, y.row(r), reinterpret_cast<float *>(scratch));
            std::fill(out, out + y.ne[0], value);
            write_row(context, y, y.row(r), out);
        }
    }));
}

void make_repeat(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const int64_t size = traits(x.type).block_bytes;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            const Index i = index_of(y, r);
            const char *from = x.at(i.i1 % x.ne[1], i.i2 % x.ne[2], i.i3 % x.ne[3]);
            for (int64_t e = 0; e < y.ne[0]; e += x.ne[0]) {
                gather(from, x.nb[0], y.row(r) + e * size, x.ne[0], size);
            }
        }
    }));
}

void make_concat(Compiler &c, const Node &node) {
    const Tensor a = node.a(), b = node.b(), y = *node.out;
    const int dim = node.param(0);
    const int64_t size = traits(a.type).block_bytes;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            const Index i = index_of(y, r);
            if (dim == 0) {
                if (a.ne[0] > 0) {
                    gather(a.at(i.i1, i.i2, i.i3), a.nb[0], y.row(r), a.ne[0], size);
                }
                if (b.ne[0] > 0) {
                    gather(b.at(i.i1, i.i2, i.i3), b.nb[0], y.row(r) + a.ne[0] * size, b.ne[0], size);
                }
                continue;
            }
            int64_t at[4] = {0, i.i1, i.i2, i.i3};
            const bool second = at[dim] >= a.ne[dim];
            const Tensor &from = second ? b : a;
            at[dim] -= second ? a.ne[dim] : 0;
            gather(from.at(at[1], at[2], at[3]), from.nb[0], y.row(r), y.ne[0], size);
        }
    }));
}

void make_pad(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const bool circular = node.param(8) != 0;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &, int64_t begin, int64_t end, char *) {
        // Where a coordinate of the result comes from; -1: from nowhere.
        const auto source = [&](int d, int64_t i) {
            const int64_t at = i - y.params[2 * d];
            if (circular) {
                return ((at % x.ne[d]) + x.ne[d]) % x.ne[d];
            }
            return at >= 0 && at < x.ne[d] ? at : -1;
        };
        for (int64_t r = begin; r < end; ++r) {
            const Index i = index_of(y, r);
            const int64_t i1 = source(1, i.i1), i2 = source(2, i.i2), i3 = source(3, i.i3);
            float *out = floats(y, r);
            for (int64_t e = 0; e < y.ne[0]; ++e) {
                const int64_t i0 = source(0, e);
                out[e] = 0.0f;
                if (i0 >= 0 && i1 >= 0 && i2 >= 0 && i3 >= 0) {
                    std::memcpy(out + e, x.at(i1, i2, i3) + i0 * x.nb[0], 4);
                }
            }
        }
    }));
}

void make_arange(Compiler &c, const Node &node) {
    const Tensor y = *node.out;
    const float start = node.param_f32(0), step = node.param_f32(2);
    c.add(rows_step(1, 1, 0, [=](Context &, int64_t, int64_t, char *) {
        for (int64_t i = 0; i < y.ne[0]; ++i) {
            floats(y, 0)[i] = start + static_cast<float>(i) * step;
        }
    }));
}

void make_diag(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            const Index i = index_of(y, r);
            std::fill(floats(y, r), floats(y, r) + y.ne[0], 0.0f);
            floats(y, r)[i.i1] = reinterpret_cast<const float *>(x.at(0, i.i2, i.i3))[i.i1];
        }
    }));
}

void make_tri(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const int kind = node.param(0);
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t i1 = r % y.ne[1];
            const float *in = floats(x, r);
            float *out = floats(y, r);
            for (int64_t i0 = 0; i0 < y.ne[0]; ++i0) {
                const bool kept[] = {i0 >= i1, i0 > i1, i0 <= i1, i0 < i1};
                out[i0] = kept[kind] ? in[i0] : 0.0f;
            }
        }
    }));
}

// Forward substitution, one matrix to a task.
void make_solve_tri(Compiler &c, const Node &node) {
    const Tensor a = node.a(), b = node.b(), y = *node.out;
    c.add(rows_step(a.ne[2] * a.ne[3], 1, 0, [=](Context &, int64_t begin, int64_t end, char *) {
        const int64_t n = a.ne[0], k = b.ne[0];
        for (int64_t m = begin; m < end; ++m) {
            for (int64_t i = 0; i < n; ++i) {
                const float *weights = floats(a, m * n + i);
                float *x = floats(y, m * n + i);
                std::memcpy(x, floats(b, m * n + i), k * 4);
                for (int64_t j = 0; j < i; ++j) {
                    const float *known = floats(y, m * n + j);
                    for (int64_t e = 0; e < k; ++e) {
                        x[e] -= weights[j] * known[e];
                    }
                }
                for (int64_t e = 0; e < k; ++e) {
                    x[e] /= weights[i];
                }
            }
        }
    }));
}

void make_group_norm(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const int64_t groups = node.param(0);
    const float eps = node.param_f32(1);
    const int64_t channels = (x.ne[2] + groups - 1) / groups;  // the last group may be smaller
    c.add(rows_step(x.ne[3] * groups, 1, 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        for (int64_t g = begin; g < end; ++g) {
            const int64_t first = g % groups * channels;
            const int64_t n = std::min(channels, x.ne[2] - first);
            if (n > 0) {
                context.kernels.norm_row(reinterpret_cast<const float *>(x.at(0, first, g / groups)),
                                         reinterpret_cast<float *>(y.at(0, first, g / groups)),
                                         n * x.ne[0] * x.ne[1], eps);
            }
        }
    }));
}

void make_add1(Compiler &c, const Node &node) {
    const Tensor x = node.a(), b = node.b(), y = *node.out;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            context.kernels.binary_row(Op::ADD, floats(x, r), reinterpret_cast<const float *>(b.data), 1, floats(y, r),
                                       y.ne[0]);
        }
    }));
}

void make_add_id(Compiler &c, const Node &node) {
    const Tensor x = node.a(), table = node.b(), y = *node.out;
    const Ids ids = check_ids(c, *node.src[2], table.ne[1], "ADD_ID");
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            const Index i = index_of(y, r);
            const int64_t id = ids.at(context, i.i1, i.i2, 0);
            context.kernels.binary_row(Op::ADD, floats(x, r), reinterpret_cast<const float *>(table.at(id, 0, 0)),
                                       y.ne[0], floats(y, r), y.ne[0]);
        }
    }));
}

// Indices in order of their values: NaN last, equal values by index. Nobody may change the values meanwhile.
void sort_indices(const float *x, int64_t n, bool descending, int64_t k, int32_t *out) {
    std::iota(out, out + n, 0);
    const auto before = [=](int32_t i, int32_t j) {
        const float a = descending ? -x[i] : x[i], b = descending ? -x[j] : x[j];
        if (a < b || b < a) {
            return a < b;
        }
        const bool a_nan = a != a, b_nan = b != b;
        return a_nan != b_nan ? b_nan : i < j;
    };
    if (k < n) {
        std::partial_sort(out, out + k, out + n, before);
    } else {
        std::sort(out, out + n, before);
    }
}

}  // namespace

void make_sort(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const bool descending = y.op == Op::TOP_K || node.param(0) == 1;
    c.add(rows_step(y.rows(), rows_per_task(8 * x.ne[0]), x.ne[0] * 8,
                    [=](Context &, int64_t begin, int64_t end, char *scratch) {
                        auto *order = reinterpret_cast<int32_t *>(scratch);
                        auto *values = reinterpret_cast<float *>(order + x.ne[0]);
                        for (int64_t r = begin; r < end; ++r) {
                            std::memcpy(values, floats(x, r), x.ne[0] * 4);
                            sort_indices(values, x.ne[0], descending, y.ne[0], order);
                            std::memcpy(y.row(r), order, y.ne[0] * 4);
                        }
                    }));
}

void make_layout(Compiler &c, const Node &node) {
    switch (node.out->op) {
        case Op::ACC: case Op::SET: return make_window(c, node);
        case Op::FILL: return make_fill(c, node);
        case Op::REPEAT: return make_repeat(c, node);
        case Op::CONCAT: return make_concat(c, node);
        case Op::PAD: return make_pad(c, node);
        case Op::ARANGE: return make_arange(c, node);
        case Op::DIAG: return make_diag(c, node);
        case Op::TRI: return make_tri(c, node);
        case Op::SOLVE_TRI: return make_solve_tri(c, node);
        case Op::GROUP_NORM: return make_group_norm(c, node);
        case Op::ADD1: return make_add1(c, node);
        default: return make_add_id(c, node);
    }
}

}  // namespace tandem
