// From a checked program to steps.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "step.h"
#include "types.h"

namespace tandem {

// An op, a type or a layout that no kernel here knows.
struct Unsupported : std::runtime_error {
    // `node`: its index among the tensors; the message is "index: reason".
    Unsupported(int32_t node, const std::string &reason)
        : std::runtime_error(std::to_string(node) + ": " + reason) {}
};

// A computed node with its sources.
struct Node {
    const Tensor *out;
    const Tensor *src[kMaxSources];
    int32_t index;  // of `out` among the tensors

    const Tensor &a() const { return *src[0]; }
    const Tensor &b() const { return *src[1]; }
    int32_t param(int i) const { return out->params[i]; }
    float param_f32(int i) const { return out->param_f32(i); }
};

struct Compiled {
    std::vector<Tensor> tensors;
    std::vector<StepPtr> steps;
    std::vector<std::shared_ptr<Matrix>> matrices;  // weights the steps multiply by
    std::vector<Range> claims;                      // all other bytes that are read or written
    int64_t shared_bytes = 0;
    int64_t private_bytes = 0;
};

// Collects the steps of a program. Values that several nodes need (quantized activations, mask bits, rope tables) are
// made once and found again by the address they came from, until a node writes there.
class Compiler {
public:
    Compiler(const Kernels &kernels, Matrices &matrices, int n_threads);
    Compiled compile(std::vector<Tensor> tensors, const std::vector<int32_t> &nodes);

    // For the makers of steps.
    const Kernels &kernels() const { return kernels_; }
    int n_threads() const { return n_threads_; }
    void add(StepPtr step);
    // A step whose row r is made of the rows r of `reads`, or of a row that all share. `writes` is null where rows go
    // to the arena. Right behind another one it joins it, if no row needs another row of what the other one makes.
    void add_rows(std::unique_ptr<RowStep> step, std::vector<Tensor> reads, const Tensor *writes);
    // Bytes in the arena: for the whole program, or until two more were asked for in turn.
    int64_t reserve(int64_t bytes);
    int64_t reserve_turn(int64_t bytes);
    // The matrix of a weight, or null where it may not be interleaved.
    std::shared_ptr<Matrix> matrix_of(const Tensor &weight);

    // Rows as bytes in tiles, rows as packed floats, mask bits, rope tables: made where the step list stands, unless
    // that was done before. What comes back are offsets in the arena.
    Activations activations(const Tensor &x, int32_t tile, int32_t span);
    int64_t float_rows(const Tensor &x);
    int64_t float_copy(const Tensor &x);
    int64_t mask_rows(const Tensor *mask, int64_t n_kv);
    int64_t rope_table(const Node &node);

    // Takes later products of the same activations that may as well be computed now.
    void join_matmuls(const Node &first, std::vector<Node> &together);

private:
    struct Cached {
        Range source, second;
        int64_t key[12];
        int64_t offset;
        int64_t capacity;  // of activations, whose room is used again; 0 otherwise
        size_t used_by;    // the last node that asked for it
    };
    // The rows that the last step, `step`, reads and writes.
    struct Chain {
        RowChain *step = nullptr;
        std::vector<Tensor> reads, writes;
    };
    bool joins(const RowStep &step, const std::vector<Tensor> &reads, const Tensor *writes) const;
    void take_node(size_t at);
    void forget_written(const Tensor &out);
    void give_room_back(const Cached &entry);
    const Cached *find(const int64_t (&key)[12]);
    // The key names all that the value depends on; a write to either range makes it forgotten.
    void remember(const int64_t (&key)[12], const Range &source, int64_t offset, int64_t capacity = 0,
                  const Range &second = {nullptr, nullptr});

    const Kernels &kernels_;
    Matrices &matrices_;
    int n_threads_;
    Compiled out_;
    std::vector<Node> nodes_;
    std::vector<bool> done_;
    size_t now_ = 0;  // the node in work
    Chain chain_;
    std::vector<Cached> cache_;
    std::vector<Range> turns_;  // rooms of activations that nobody needs any more, as offsets
};

using Maker = void (*)(Compiler &, const Node &);
Maker maker_of(Op op);  // null: no kernel

// Row ids that were checked and copied to the arena: steps use these and never look at the tensor again, whose bytes
// anything that runs after the check may change.
struct Ids {
    int64_t offset;  // of int64 [ne2][ne1][ne0]
    int64_t ne[3];
    int64_t at(const Context &context, int64_t i0, int64_t i1, int64_t i2) const {
        return context.at<int64_t>(offset)[(i2 * ne[1] + i1) * ne[0] + i0];
    }
};
constexpr int64_t kLaterWins = -1;
// Adds a step that copies ids of I32 or I64, and fails the run unless all of them are below n_rows. With `last_wins`, of
// equal ids along dimension 0 only the last stays; the others become kLaterWins.
Ids check_ids(Compiler &, const Tensor &ids, int64_t n_rows, const char *what, bool last_wins = false);

// The makers, by file.
void make_binary(Compiler &, const Node &);
void make_elementwise(Compiler &, const Node &);
void make_norm(Compiler &, const Node &);
void make_glu(Compiler &, const Node &);
void make_soft_max(Compiler &, const Node &);
void make_reduction(Compiler &, const Node &);
void make_copy(Compiler &, const Node &);
void make_get_rows(Compiler &, const Node &);
void make_set_rows(Compiler &, const Node &);
void make_rope(Compiler &, const Node &);
void make_attention(Compiler &, const Node &);
void make_matmul(Compiler &, const Node &);
void make_matmul_id(Compiler &, const Node &);
void make_layout(Compiler &, const Node &);
void make_sort(Compiler &, const Node &);
void make_recurrent(Compiler &, const Node &);

}  // namespace tandem
