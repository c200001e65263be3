#include "compile.h"

#include <algorithm>
#include <cstring>

#include "pack.h"
#include "quants.h"

namespace tandem {
namespace {

constexpr int64_t kAlignment = 64;

bool overlap(const Range &a, const Range &b) { return a.begin < b.end && b.begin < a.end; }

Range range_of(const Tensor &t) { return {t.data, t.data + t.span_bytes()}; }

bool is_view_op(Op op) {
    return op == Op::NONE || op == Op::RESHAPE || op == Op::VIEW || op == Op::PERMUTE || op == Op::TRANSPOSE;
}

bool is_leaf(const Tensor &t) { return t.op == Op::NONE && t.view_src < 0; }

// Whether some row of one tensor shares memory with another row of the other.
bool rows_clash(const Tensor &a, const Tensor &b) {
    const bool same = a.data == b.data && a.type == b.type && std::memcmp(a.ne, b.ne, sizeof(a.ne)) == 0 &&
                      std::memcmp(a.nb, b.nb, sizeof(a.nb)) == 0;
    return !same && overlap(range_of(a), range_of(b));
}

bool any_clash(const std::vector<Tensor> &tensors, const Tensor &with) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor &t) { return rows_clash(t, with); });
}

// Ranges that touch or overlap, as one.
std::vector<Range> merged(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) { return a.begin < b.begin; });
    std::vector<Range> out;
    for (const Range &range : ranges) {
        if (!out.empty() && range.begin <= out.back().end) {
            out.back().end = std::max(out.back().end, range.end);
        } else {
            out.push_back(range);
        }
    }
    return out;
}

// Whether this source of a node is read through Matrix: products and rows of a table.
bool reads_as_matrix(const Node &node, int source) {
    const Op op = node.out->op;
    return source == 0 && (op == Op::MUL_MAT || op == Op::MUL_MAT_ID || op == Op::GET_ROWS);
}

}  // namespace

Maker maker_of(Op op) {
    switch (op) {
        case Op::ADD: case Op::SUB: case Op::MUL: case Op::DIV:
            return make_binary;
        case Op::SCALE: case Op::CLAMP: case Op::UNARY: case Op::SQR: case Op::SQRT: case Op::LOG: case Op::SIN:
        case Op::COS: case Op::LEAKY_RELU:
            return make_elementwise;
        case Op::RMS_NORM: case Op::NORM: case Op::L2_NORM:
            return make_norm;
        case Op::GLU: return make_glu;
        case Op::SOFT_MAX: return make_soft_max;
        case Op::SUM: case Op::SUM_ROWS: case Op::MEAN: case Op::CUMSUM: case Op::ARGMAX:
            return make_reduction;
        case Op::CPY: case Op::DUP: case Op::CONT:
            return make_copy;
        case Op::GET_ROWS: return make_get_rows;
        case Op::SET_ROWS: return make_set_rows;
        case Op::ROPE: return make_rope;
        case Op::FLASH_ATTN_EXT: return make_attention;
        case Op::MUL_MAT: return make_matmul;
        case Op::MUL_MAT_ID: return make_matmul_id;
        case Op::ADD_ID: case Op::ADD1: case Op::ACC: case Op::SET: case Op::FILL: case Op::REPEAT: case Op::CONCAT:
        case Op::PAD: case Op::ARANGE: case Op::DIAG: case Op::TRI: case Op::SOLVE_TRI: case Op::GROUP_NORM:
            return make_layout;
        case Op::ARGSORT: case Op::TOP_K:
            return make_sort;
        case Op::SSM_CONV: case Op::SSM_SCAN: case Op::GATED_DELTA_NET: case Op::GATED_LINEAR_ATTN:
            return make_recurrent;
        default: return nullptr;
    }
}

Compiler::Compiler(const Kernels &kernels, Matrices &matrices, int n_threads)
    : kernels_(kernels), matrices_(matrices), n_threads_(n_threads) {}

Compiled Compiler::compile(std::vector<Tensor> tensors, const std::vector<int32_t> &nodes) {
    out_.tensors = std::move(tensors);
    for (const int32_t index : nodes) {
        const Tensor &t = out_.tensors[index];
        if (is_view_op(t.op) || (t.flags & kFlagCompute) == 0 || t.empty()) {
            continue;
        }
        Node node{&t, {}, index};
        for (int i = 0; i < kMaxSources; ++i) {
            node.src[i] = t.src[i] >= 0 ? &out_.tensors[t.src[i]] : nullptr;
            if (node.src[i] && !codebook_ready(node.src[i]->type)) {
                throw Unsupported(index, "the codebook of a source's type was not loaded");
            }
        }
        nodes_.push_back(node);
    }
    done_.assign(nodes_.size(), false);
    for (now_ = 0; now_ < nodes_.size(); ++now_) {
        if (!done_[now_]) {
            take_node(now_);
        }
    }
    std::vector<Range> claims;
    for (const Node &node : nodes_) {
        claims.push_back(range_of(*node.out));
        for (int i = 0; i < kMaxSources; ++i) {
            const Tensor *source = node.src[i];
            if (source && !source->empty() && !(reads_as_matrix(node, i) && matrix_of(*source))) {
                claims.push_back(range_of(*source));
            }
        }
    }
    out_.claims = merged(std::move(claims));
    return std::move(out_);
}

void Compiler::take_node(size_t at) {
    const Node &node = nodes_[at];
    const Maker maker = maker_of(node.out->op);
    if (!maker) {
        throw Unsupported(node.index, "no native kernel for it");
    }
    maker(*this, node);
    done_[at] = true;
    forget_written(*node.out);
}

void Compiler::add(StepPtr step) {
    out_.private_bytes = std::max(out_.private_bytes, step->scratch_bytes());
    step->node = nodes_[now_].index;
    out_.steps.push_back(std::move(step));
}

bool Compiler::joins(const RowStep &step, const std::vector<Tensor> &reads, const Tensor *writes) const {
    return !out_.steps.empty() && out_.steps.back().get() == chain_.step && chain_.step->n_rows() == step.n_rows() &&
           std::none_of(reads.begin(), reads.end(), [&](const Tensor &t) { return any_clash(chain_.writes, t); }) &&
           !(writes && (any_clash(chain_.writes, *writes) || any_clash(chain_.reads, *writes)));
}

void Compiler::add_rows(std::unique_ptr<RowStep> step, std::vector<Tensor> reads, const Tensor *writes) {
    if (joins(*step, reads, writes)) {
        out_.private_bytes = std::max(out_.private_bytes, step->scratch_bytes());
        chain_.step->append(std::move(step));
    } else {
        auto chain = std::make_unique<RowChain>(std::move(step));
        chain_ = {chain.get(), {}, {}};
        add(std::move(chain));
    }
    chain_.reads.insert(chain_.reads.end(), reads.begin(), reads.end());
    if (writes) {
        chain_.writes.push_back(*writes);
    }
}

int64_t Compiler::reserve(int64_t bytes) {
    const int64_t offset = out_.shared_bytes;
    out_.shared_bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
}

int64_t Compiler::reserve_turn(int64_t bytes) {
    // Two may live at a time: what a step reads, and what the next one was given meanwhile; more only while one node
    // needs them all.
    int64_t living = 0;
    for (const Cached &entry : cache_) {
        living += entry.capacity > 0;
    }
    for (size_t i = 0; living >= 2 && i < cache_.size();) {
        if (cache_[i].capacity == 0 || cache_[i].used_by == now_) {
            ++i;
            continue;
        }
        give_room_back(cache_[i]);
        cache_.erase(cache_.begin() + static_cast<int64_t>(i));
        --living;
    }
    for (size_t i = 0; i < turns_.size(); ++i) {
        if (turns_[i].end - turns_[i].begin >= bytes) {
            const auto offset = reinterpret_cast<int64_t>(turns_[i].begin);
            turns_.erase(turns_.begin() + static_cast<int64_t>(i));
            return offset;
        }
    }
    return reserve(bytes);
}

void Compiler::give_room_back(const Cached &entry) {
    if (entry.capacity > 0) {
        turns_.push_back({reinterpret_cast<const char *>(entry.offset),
                          reinterpret_cast<const char *>(entry.offset + entry.capacity)});
    }
}

const Compiler::Cached *Compiler::find(const int64_t (&key)[12]) {
    for (Cached &entry : cache_) {
        if (std::memcmp(entry.key, key, sizeof(entry.key)) == 0) {
            entry.used_by = now_;
            return &entry;
        }
    }
    return nullptr;
}

void Compiler::remember(const int64_t (&key)[12], const Range &source, int64_t offset, int64_t capacity,
                        const Range &second) {
    Cached entry{source, second, {}, offset, capacity, now_};
    std::memcpy(entry.key, key, sizeof(entry.key));
    cache_.push_back(entry);
}

void Compiler::forget_written(const Tensor &out) {
    const Range written = range_of(out);
    for (size_t i = 0; i < cache_.size();) {
        if (!overlap(cache_[i].source, written) && !overlap(cache_[i].second, written)) {
            ++i;
            continue;
        }
        give_room_back(cache_[i]);
        cache_.erase(cache_.begin() + static_cast<int64_t>(i));
    }
}

std::shared_ptr<Matrix> Compiler::matrix_of(const Tensor &weight) {
    if (!is_leaf(weight) || !is_packable(weight.type) || !weight.contiguous() || weight.ne[1] < kGroupRows) {
        return nullptr;
    }
    for (const std::shared_ptr<Matrix> &known : out_.matrices) {
        if (reinterpret_cast<char *>(known->data) == weight.data && known->type == weight.type &&
            known->k == weight.ne[0] && known->n_rows == weight.ne[1] &&
            known->n_matrices == weight.ne[2] * weight.ne[3]) {
            return known;
        }
    }
    const std::shared_ptr<Matrix> matrix =
        matrices_.add({weight.type, reinterpret_cast<uint8_t *>(weight.data), weight.ne[0], weight.ne[1],
                       weight.ne[2] * weight.ne[3]});
    out_.matrices.push_back(matrix);
    return matrix;
}

void Compiler::join_matmuls(const Node &first, std::vector<Node> &together) {
    constexpr size_t kReach = 16;  // nodes: q, k and v with what stands between them
    std::vector<Range> read, written;  // by those that join and by the nodes in between
    const Tensor &x = first.b();
    written.push_back(range_of(*first.out));
    read.push_back(range_of(first.a()));
    for (size_t i = now_ + 1; i < nodes_.size() && i <= now_ + kReach; ++i) {
        const Node &node = nodes_[i];
        if (done_[i]) {
            continue;
        }
        const Range out = range_of(*node.out);
        const auto clashes = [](const std::vector<Range> &ranges, const Range &range) {
            return std::any_of(ranges.begin(), ranges.end(), [&](const Range &r) { return overlap(r, range); });
        };
        const bool same = node.out->op == Op::MUL_MAT && node.src[1]->data == x.data && node.src[1]->type == x.type &&
                          std::memcmp(node.src[1]->ne, x.ne, sizeof(x.ne)) == 0 &&
                          std::memcmp(node.src[1]->nb, x.nb, sizeof(x.nb)) == 0 &&
                          activation_span(node.a().type) == activation_span(first.a().type);
        // Moving it here must change nothing: nobody in between writes what it reads, or touches what it writes.
        if (same && !clashes(written, out) && !clashes(read, out) && !clashes(written, range_of(node.a())) &&
            !clashes(written, range_of(x)) && !overlap(out, range_of(x))) {
            together.push_back(node);
            done_[i] = true;
            written.push_back(out);
            read.push_back(range_of(node.a()));
            continue;
        }
        written.push_back(out);
        for (const Tensor *source : node.src) {
            if (source) {
                read.push_back(range_of(*source));
            }
        }
    }
    // What the joined ones write may be the source of something remembered.
    for (size_t i = 1; i < together.size(); ++i) {
        forget_written(*together[i].out);
    }
}

}  // namespace tandem
