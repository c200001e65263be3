// MUL_MAT and MUL_MAT_ID as steps: which rows and tokens make a task.
#include <algorithm>
#include <cstring>

#include "compile.h"
#include "pack.h"
#include "quants.h"

namespace tandem {
namespace {

constexpr int64_t kTaskBytes = 1 << 20;    // of weights, when few tokens make their reading the work
constexpr int64_t kTokensAtOnce = 256;     // of activations that should stay in a core's cache
constexpr int64_t kTaskElements = 8192;    // of a group's row in turn, when many tokens make a quarter of a millisecond of it

bool is_float(Type type) { return type == Type::F32 || type == Type::F16 || type == Type::BF16; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One matrix times its tokens, quantized or float.
struct Product {
    bool quantized;
    QuantMatmul quant;
    FloatMatmul floats;
    int64_t units;           // groups of sixteen rows
    int64_t units_per_task;
    int64_t tokens;
    int64_t tokens_per_task;  // a multiple of the tile
    int64_t first_task;

    int64_t unit_tasks() const { return divide_up(units, units_per_task); }
    int64_t tasks() const { return unit_tasks() * divide_up(tokens, tokens_per_task); }
};

// Chooses the cut of a product. Nothing here changes a result.
void cut(Product &p, int64_t row_size, int n_threads, int64_t tile) {
    const int64_t unit_bytes = 16 * row_size;
    if (p.tokens <= 2 * kTileTokens) {
        p.tokens_per_task = std::max<int64_t>(p.tokens, tile);
        // One long run for each thread: memory streams best when nobody changes places. Only large matrices are cut
        // further, so that a thread that was held up can be helped.
        const int64_t share = divide_up(p.units, static_cast<int64_t>(n_threads));
        p.units_per_task = std::max<int64_t>(1, std::min(share, divide_up(kTaskBytes, unit_bytes)));
        return;
    }
    p.tokens_per_task = kTokensAtOnce;
    // Quantized groups of long rows share little, and smaller tasks end closer together.
    const int64_t most = p.quantized ? std::min<int64_t>(4, kTaskElements / std::max<int64_t>(1, p.quant.k)) : 4;
    p.units_per_task = std::max<int64_t>(1, std::min(most, p.units / (4 * n_threads)));
}

class MatmulStep final : public Step {
public:
    // `x` points into the arena by offsets until the program runs.
    struct Part {
        Product product;
        std::shared_ptr<Matrix> matrix;
        int64_t x_offset;  // of float activations; -1: they lie where they are
        Activations x;     // of quantized ones, with offsets as pointers
    };

    void add(Part part) {
        part.product.first_task = tasks_;
        tasks_ += part.product.tasks();
        if (part.product.quantized) {
            scratch_ = std::max(scratch_, matmul_quant_scratch_bytes(part.product.quant.type, part.product.quant.k));
        }
        parts_.push_back(std::move(part));
    }
    bool parallel() const override { return tasks_ > 1; }
    int64_t tasks(const Context &) const override { return tasks_; }
    int64_t scratch_bytes() const override { return scratch_; }
    void run(Context &context, int64_t task, int thread) override {
        const Part &part = part_of(task);
        const Product &p = part.product;
        const int64_t at = task - p.first_task;
        const int64_t unit = at % p.unit_tasks() * p.units_per_task;
        const int64_t token = at / p.unit_tasks() * p.tokens_per_task;
        const int64_t unit_end = std::min(p.units, unit + p.units_per_task);
        const int64_t token_end = std::min(p.tokens, token + p.tokens_per_task);
        if (p.quantized) {
            QuantMatmul m = p.quant;
            m.x = placed(part.x, context);
            context.kernels.matmul_quant(m, unit, unit_end, token / m.x.tile, divide_up(token_end, m.x.tile),
                                         context.scratch(thread));
        } else {
            FloatMatmul m = p.floats;
            if (part.x_offset >= 0) {
                m.x = context.at<float>(part.x_offset);
            }
            context.kernels.matmul_float(m, unit * 16, std::min(m.n_rows, unit_end * 16), token, token_end);
        }
    }
    static Activations placed(Activations x, const Context &context) {
        const auto move = [&](auto *&p) {
            p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(context.shared + reinterpret_cast<intptr_t>(p));
        };
        move(x.q);
        move(x.d);
        move(x.sum32);
        move(x.sum16);
        move(x.start32);
        move(x.start16);
        return x;
    }

private:
    const Part &part_of(int64_t task) const {
        size_t i = parts_.size() - 1;
        while (parts_[i].product.first_task > task) {
            --i;
        }
        return parts_[i];
    }

    std::vector<Part> parts_;
    int64_t tasks_ = 0;
    int64_t scratch_ = 0;
};

// Arrays of activations one behind the other, as offsets from `base`.
Activations layout_activations(int64_t base, int64_t rows, int64_t k, int32_t tile, int32_t span, int64_t &bytes) {
    const int64_t blocks = rows * (k / 32);
    int64_t at = base;
    const auto take = [&](int64_t size) {
        const int64_t here = at;
        at += divide_up(size, 64) * 64;
        return here;
    };
    Activations x;
    x.q = reinterpret_cast<int8_t *>(take(blocks * 32));
    x.d = reinterpret_cast<float *>(take(blocks * 4));
    x.sum32 = reinterpret_cast<float *>(take(blocks * 4));
    x.start32 = reinterpret_cast<int32_t *>(take(blocks * 4));
    x.sum16 = reinterpret_cast<float *>(take(blocks * 8));
    x.start16 = reinterpret_cast<int32_t *>(take(blocks * 8));
    x.k = k;
    x.tile = tile;
    x.span = span;
    bytes = at - base;
    return x;
}

// The same activations seen from matrix `i` of a stack on.
Activations from_row(Activations x, int64_t row) {
    const int64_t blocks = row * (x.k / 32);
    x.q += blocks * 32;
    x.d += blocks;
    x.sum32 += blocks;
    x.start32 += blocks;
    x.sum16 += 2 * blocks;
    x.start16 += 2 * blocks;
    return x;
}

}  // namespace

// Rows of a stack are padded to whole tiles per matrix. Pointers are offsets in the arena.
Activations Compiler::activations(const Tensor &x, int32_t tile, int32_t span) {
    const int64_t k = x.ne[0], per_matrix = x.ne[1], n_matrices = x.ne[2] * x.ne[3];
    const int64_t padded = divide_up(per_matrix, tile) * tile;
    int64_t key[12] = {1, reinterpret_cast<int64_t>(x.data), static_cast<int64_t>(x.type), k, x.ne[1], x.ne[2],
                       x.ne[3], x.nb[1], x.nb[2], x.nb[3], tile, span};
    const Range source{x.data, x.data + x.span_bytes()};
    int64_t bytes;
    layout_activations(0, padded * n_matrices, k, tile, span, bytes);
    if (const Cached *found = find(key)) {
        return layout_activations(found->offset, padded * n_matrices, k, tile, span, bytes);
    }
    const int64_t offset = reserve_turn(bytes);
    const Activations out = layout_activations(offset, padded * n_matrices, k, tile, span, bytes);
    // Whole tiles, whose rows share lines of the cache: two cores that write to one line wait for each other.
    const int64_t per_task = divide_up(rows_per_task(k), tile) * tile;
    add_rows(rows_step(per_matrix * n_matrices, per_task, divide_up(k, 16) * 64,
                       [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                           const Activations to = MatmulStep::placed(out, context);
                           for (int64_t r = begin; r < end; ++r) {
                               const float *row = read_row(context, x, x.row(r), reinterpret_cast<float *>(scratch));
                               context.kernels.quantize(row, r / per_matrix * padded + r % per_matrix, to);
                           }
                       }),
             {x}, nullptr);
    remember(key, source, offset, bytes);
    return out;
}

// Float activations as packed rows of float32: the offset of a copy, or -1 when they may be read where they are.
int64_t Compiler::float_rows(const Tensor &x) {
    return x.type == Type::F32 && x.packed_rows() ? -1 : float_copy(x);
}

int64_t Compiler::float_copy(const Tensor &x) {
    const int64_t key[12] = {4, reinterpret_cast<int64_t>(x.data), static_cast<int64_t>(x.type), x.ne[0], x.ne[1],
                             x.ne[2], x.ne[3], x.nb[0], x.nb[1], x.nb[2], x.nb[3]};
    const Range source{x.data, x.data + x.span_bytes()};
    if (const Cached *found = find(key)) {
        return found->offset;
    }
    const int64_t bytes = x.elements() * 4;
    const int64_t offset = reserve_turn(bytes);
    add(rows_step(x.rows(), rows_per_task(x.ne[0]), divide_up(x.ne[0], 16) * 64,
                  [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                      for (int64_t r = begin; r < end; ++r) {
                          const float *row = read_row(context, x, x.row(r), reinterpret_cast<float *>(scratch));
                          std::memcpy(context.at<float>(offset) + r * x.ne[0], row, x.ne[0] * 4);
                      }
                  }));
    remember(key, source, offset, bytes);
    return offset;
}

namespace {

void add_products(Compiler &c, const Node &node, MatmulStep &step, const Activations *x, int64_t float_offset) {
    const Tensor &a = node.a(), &b = node.b(), &out = *node.out;
    const int64_t m = b.ne[1];
    const std::shared_ptr<Matrix> matrix = x ? c.matrix_of(a) : nullptr;
    for (int64_t i3 = 0; i3 < b.ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < b.ne[2]; ++i2) {
            MatmulStep::Part part{};
            Product &p = part.product;
            const char *weights = a.at(0, i2 / (b.ne[2] / a.ne[2]), i3 / (b.ne[3] / a.ne[3]));
            auto *to = reinterpret_cast<float *>(out.at(0, i2, i3));
            p.quantized = x != nullptr;
            p.units = divide_up(a.ne[1], 16);
            p.tokens = m;
            part.x_offset = -1;
            if (x) {
                const int64_t padded = divide_up(m, x->tile) * x->tile;
                part.matrix = matrix;
                part.x = from_row(*x, (i3 * b.ne[2] + i2) * padded);
                p.quant = QuantMatmul{a.type, reinterpret_cast<const uint8_t *>(weights), a.nb[1],
                                      matrix ? &matrix->packed : nullptr, a.ne[1], a.ne[0], {}, m, to, out.nb[1] / 4,
                                      nullptr};
                cut(p, row_bytes(a.type, a.ne[0]), c.n_threads(), x->tile);
            } else {
                p.floats = FloatMatmul{a.type, weights, a.nb[1], a.ne[1], a.ne[0], nullptr, 0, nullptr, m, to,
                                       out.nb[1] / 4, nullptr};
                if (float_offset >= 0) {
                    part.x_offset = float_offset + ((i3 * b.ne[2] + i2) * m) * b.ne[0] * 4;
                    p.floats.x_stride = b.ne[0];
                } else {
                    p.floats.x = reinterpret_cast<const float *>(b.at(0, i2, i3));
                    p.floats.x_stride = b.nb[1] / 4;
                }
                cut(p, row_bytes(a.type, a.ne[0]), c.n_threads(), 1);
            }
            step.add(std::move(part));
        }
    }
}

}  // namespace

void make_matmul(Compiler &c, const Node &node) {
    const Tensor &b = node.b();
    // Others that multiply the same activations join, so that they share the bytes and one round of tasks.
    std::vector<Node> together{node};
    c.join_matmuls(node, together);
    auto step = std::make_unique<MatmulStep>();
    const int32_t span = activation_span(node.a().type);
    Activations x{};
    int64_t float_offset = -1;
    if (span > 0) {
        x = c.activations(b, b.ne[1] == 1 ? 1 : kTileTokens, span);
    } else {
        float_offset = c.float_rows(b);
    }
    for (const Node &n : together) {
        add_products(c, n, *step, span > 0 ? &x : nullptr, float_offset);
    }
    c.add(std::move(step));
}

namespace {

// Which (token, slot) pairs chose each expert; filled as the program runs.
struct Routes {
    int32_t *counts;  // [experts]
    int32_t *first;   // [experts]
    int32_t *x_rows;  // [pairs], by expert
    int32_t *y_rows;  // [pairs]
    int64_t *tasks;   // [experts + 1] first task of each
};

class ExpertStep final : public Step {
public:
    ExpertStep(const Node &node, std::shared_ptr<Matrix> matrix, Activations x, int64_t float_offset, int64_t routes,
               int n_threads)
        : matrix_(std::move(matrix)), x_(x), float_offset_(float_offset), routes_(routes) {
        const Tensor &a = node.a(), &b = node.b(), &ids = *node.src[2];
        a_ = a;
        b_ = b;
        out_ = *node.out;
        experts_ = a.ne[2];
        pairs_ = ids.ne[0] * ids.ne[1];
        quantized_ = !is_float(a.type);
        units_ = divide_up(a.ne[1], 16);
        const int64_t unit_bytes = 16 * row_bytes(a.type, a.ne[0]);
        units_per_task_ = std::max<int64_t>(
            1, std::min(divide_up(units_, 2 * static_cast<int64_t>(n_threads)), divide_up(kTaskBytes, unit_bytes)));
        if (quantized_) {
            layout_activations(0, kTileTokens * kTilesAtOnce, a.ne[0], kTileTokens, x.span, gathered_bytes_);
            scratch_ = gathered_bytes_ + matmul_quant_scratch_bytes(a.type, a.ne[0]);
        }
    }
    bool parallel() const override { return true; }
    int64_t scratch_bytes() const override { return scratch_; }
    int64_t tasks(const Context &context) const override {
        return context.failed ? 0 : at(context).tasks[experts_];
    }
    static int64_t routes_bytes(int64_t experts, int64_t pairs) { return 8 * (experts + 1) + 4 * (2 * experts + 2 * pairs); }
    Routes at(const Context &context) const {
        Routes r;
        r.tasks = context.at<int64_t>(routes_);
        r.counts = reinterpret_cast<int32_t *>(r.tasks + experts_ + 1);
        r.first = r.counts + experts_;
        r.x_rows = r.first + experts_;
        r.y_rows = r.x_rows + pairs_;
        return r;
    }
    int64_t tasks_per_expert() const { return divide_up(units_, units_per_task_); }

    void run(Context &context, int64_t task, int thread) override {
        const Routes r = at(context);
        int64_t expert = 0;
        while (r.tasks[expert + 1] <= task) {
            ++expert;
        }
        const int64_t unit = (task - r.tasks[expert]) * units_per_task_;
        const int64_t unit_end = std::min(units_, unit + units_per_task_);
        const char *weights = a_.at(0, expert, 0);
        auto *out = reinterpret_cast<float *>(out_.data);
        const int32_t *x_rows = r.x_rows + r.first[expert], *y_rows = r.y_rows + r.first[expert];
        const int64_t count = r.counts[expert];
        if (!quantized_) {
            const float *x = float_offset_ >= 0 ? context.at<float>(float_offset_)
                                                : reinterpret_cast<const float *>(b_.data);
            const FloatMatmul m{a_.type, weights, a_.nb[1], a_.ne[1], a_.ne[0], x, a_.ne[0], x_rows, count, out,
                                out_.ne[0], y_rows};
            context.kernels.matmul_float(m, unit * 16, std::min(a_.ne[1], unit_end * 16), 0, count);
            return;
        }
        QuantMatmul m{a_.type, reinterpret_cast<const uint8_t *>(weights), a_.nb[1],
                      matrix_ ? &matrix_->packed : nullptr, a_.ne[1], a_.ne[0], {}, 1, out, out_.ne[0], y_rows};
        const Activations x = MatmulStep::placed(x_, context);
        char *scratch = context.scratch(thread);
        if (count == 1) {
            m.x = from_row(x, x_rows[0]);
            context.kernels.matmul_quant(m, unit, unit_end, 0, 1, scratch + gathered_bytes_);
            return;
        }
        int64_t bytes;
        m.x = layout_activations(reinterpret_cast<intptr_t>(scratch), kTileTokens * kTilesAtOnce, a_.ne[0],
                                 kTileTokens, x.span, bytes);
        for (int64_t first = 0; first < count; first += kTileTokens * kTilesAtOnce) {
            m.n_tokens = std::min<int64_t>(kTileTokens * kTilesAtOnce, count - first);
            m.out_index = y_rows + first;
            for (int64_t i = 0; i < m.n_tokens; ++i) {
                gather(x, x_rows[first + i], m.x, i);
            }
            context.kernels.matmul_quant(m, unit, unit_end, 0, divide_up(m.n_tokens, kTileTokens),
                                         scratch + gathered_bytes_);
        }
    }

private:
    static constexpr int64_t kTilesAtOnce = 8;

    // A row of single tokens into place `i` of tiles.
    static void gather(const Activations &from, int64_t row, const Activations &to, int64_t i) {
        const int64_t blocks = from.k / 32, tile = i / to.tile, t = i % to.tile;
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t at = row * blocks + b;
            const int64_t place = (tile * blocks + b) * to.tile + t;
            std::memcpy(to.q + place * 32, from.q + at * 32, 32);
            to.d[place] = from.d[at];
            to.sum32[place] = from.sum32[at];
            to.start32[place] = from.start32[at];
            for (int half = 0; half < 2; ++half) {
                const int64_t half_place = ((tile * blocks + b) * 2 + half) * to.tile + t;
                to.sum16[half_place] = from.sum16[2 * at + half];
                to.start16[half_place] = from.start16[2 * at + half];
            }
        }
    }

    Tensor a_, b_, out_;
    std::shared_ptr<Matrix> matrix_;
    Activations x_;
    int64_t float_offset_, routes_;
    int64_t experts_, pairs_, units_, units_per_task_;
    int64_t scratch_ = 0, gathered_bytes_ = 0;
    bool quantized_;
};

}  // namespace

void make_matmul_id(Compiler &c, const Node &node) {
    const Tensor b = node.b(), ids = *node.src[2];
    Tensor flat = b;  // all rows of all tokens as one matrix
    flat.ne[1] = b.ne[1] * b.ne[2];
    flat.ne[2] = 1;
    const bool rows_in_line = b.nb[2] == b.nb[1] * b.ne[1] || b.ne[2] == 1;
    const bool single = b.ne[1] == 1;
    if (single) {
        flat.nb[1] = b.nb[2];
    }
    const bool quantized = !is_float(node.a().type);
    // Tokens with gaps between them stay a stack; in tiles of one their rows come out in the same order.
    const Tensor &source = rows_in_line || single ? flat : b;
    Activations x{};
    int64_t float_offset = -1;
    if (quantized) {
        x = c.activations(source, 1, activation_span(node.a().type));
    } else {
        float_offset = b.contiguous() ? -1 : c.float_copy(source);
    }
    const int64_t experts = node.a().ne[2];
    const int64_t pairs = ids.ne[0] * ids.ne[1];
    const int64_t routes = c.reserve(ExpertStep::routes_bytes(experts, pairs));
    auto step = std::make_unique<ExpertStep>(node, quantized ? c.matrix_of(node.a()) : nullptr, x, float_offset,
                                             routes, c.n_threads());
    const ExpertStep *expert_step = step.get();
    c.add(rows_step(1, 1, 0, [=](Context &context, int64_t, int64_t, char *) {
        const Routes r = expert_step->at(context);
        std::fill(r.counts, r.counts + experts, 0);
        const auto id_of = [&](int64_t j, int64_t t) {
            int32_t id;
            std::memcpy(&id, ids.data + j * ids.nb[0] + t * ids.nb[1], 4);
            return id;
        };
        for (int64_t t = 0; t < ids.ne[1]; ++t) {
            for (int64_t j = 0; j < ids.ne[0]; ++j) {
                const int32_t id = id_of(j, t);
                if (id < 0 || id >= experts) {
                    context.fail("MUL_MAT_ID: expert " + std::to_string(id) + " is out of range, there are " +
                                 std::to_string(experts));
                    return;
                }
                ++r.counts[id];
            }
        }
        int32_t pair = 0;
        r.tasks[0] = 0;
        for (int64_t e = 0; e < experts; ++e) {
            r.first[e] = pair;
            pair += r.counts[e];
            r.tasks[e + 1] = r.tasks[e] + (r.counts[e] > 0 ? expert_step->tasks_per_expert() : 0);
            r.counts[e] = 0;
        }
        for (int64_t t = 0; t < ids.ne[1]; ++t) {
            for (int64_t j = 0; j < ids.ne[0]; ++j) {
                const int32_t id = id_of(j, t);
                const int32_t at = r.first[id] + r.counts[id]++;
                r.x_rows[at] = static_cast<int32_t>(t * b.ne[1] + j % b.ne[1]);
                r.y_rows[at] = static_cast<int32_t>(t * ids.ne[0] + j);
            }
        }
    }));
    c.add(std::move(step));
}

}  // namespace tandem
