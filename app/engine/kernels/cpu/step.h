// A step: one op (or a few that belong together) of a compiled program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "types.h"

namespace tandem {

// What steps work with while a program runs.
struct Context {
    const Kernels &kernels;
    char *shared = nullptr;    // the program's arena: activations, mask bits, tables
    char *private_ = nullptr;  // scratch, one piece per thread
    int64_t private_bytes = 0;
    std::atomic<bool> failed{false};
    std::mutex failure_lock;
    std::string failure;

    explicit Context(const Kernels &k) : kernels(k) {}
    char *scratch(int thread) const { return private_ + thread * private_bytes; }
    template <class T>
    T *at(int64_t offset) const {
        return reinterpret_cast<T *>(shared + offset);
    }
    // The first failure is kept; steps after it are skipped.
    void fail(const std::string &what) {
        const std::lock_guard<std::mutex> guard(failure_lock);
        if (!failed) {
            failure = what;
            failed = true;
        }
    }
};

class Step {
public:
    virtual ~Step() = default;
    // Tasks may run in any order and on any thread. A step with one task runs between phases. Asked as the step begins.
    virtual int64_t tasks(const Context &context) const {
        (void)context;
        return 1;
    }
    // Whether `tasks` may be more than one.
    virtual bool parallel() const { return false; }
    virtual void run(Context &context, int64_t task, int thread) = 0;
    virtual int64_t scratch_bytes() const { return 0; }

    int32_t node = -1;  // whose op it belongs to, among the program's tensors
};

using StepPtr = std::unique_ptr<Step>;

// A step whose number of tasks is known: `n` items, `per_task` of them to a task.
class ItemsStep : public Step {
public:
    ItemsStep(int64_t n, int64_t per_task) : n_(n), per_task_(per_task < 1 ? 1 : per_task) {}
    int64_t tasks(const Context &) const override { return (n_ + per_task_ - 1) / per_task_; }
    bool parallel() const override { return n_ > per_task_; }
    void run(Context &context, int64_t task, int thread) override {
        const int64_t begin = task * per_task_;
        const int64_t end = begin + per_task_ < n_ ? begin + per_task_ : n_;
        items(context, begin, end, thread);
    }

protected:
    virtual void items(Context &context, int64_t begin, int64_t end, int thread) = 0;
    int64_t n_;
    int64_t per_task_;
};

// How many rows of n floats make a task worth waking a thread for.
inline int64_t rows_per_task(int64_t n) { return n >= 8192 ? 1 : 8192 / (n < 1 ? 1 : n); }

// A step over rows.
class RowStep : public ItemsStep {
public:
    RowStep(int64_t n, int64_t per_task, int64_t scratch) : ItemsStep(n, per_task), scratch_(scratch) {}
    int64_t scratch_bytes() const override { return scratch_; }
    int64_t n_rows() const { return n_; }
    int64_t per_task() const { return per_task_; }
    virtual void rows(Context &context, int64_t begin, int64_t end, char *scratch) = 0;

protected:
    void items(Context &context, int64_t begin, int64_t end, int thread) override {
        rows(context, begin, end, context.scratch(thread));
    }
    int64_t scratch_;
};

// Made of a function over a range of rows: the short way to write most ops.
template <class F>
class RowsStep final : public RowStep {
public:
    RowsStep(int64_t n, int64_t per_task, int64_t scratch, F f) : RowStep(n, per_task, scratch), f_(f) {}
    void rows(Context &context, int64_t begin, int64_t end, char *scratch) override {
        f_(context, begin, end, scratch);
    }

private:
    F f_;
};

// f(context, begin, end, scratch)
template <class F>
std::unique_ptr<RowStep> rows_step(int64_t n_rows, int64_t per_task, int64_t scratch_bytes, F f) {
    return std::make_unique<RowsStep<F>>(n_rows, per_task, scratch_bytes, f);
}

// Steps over the same rows, a few rows at a time through all of them while they are in the nearest caches.
class RowChain final : public RowStep {
public:
    explicit RowChain(std::unique_ptr<RowStep> first)
        : RowStep(first->n_rows(), first->per_task(), first->scratch_bytes()), at_once_(first->per_task()) {
        links_.push_back(std::move(first));
    }
    void append(std::unique_ptr<RowStep> link) {
        at_once_ = std::min(at_once_, link->per_task());
        per_task_ = std::max(per_task_, link->per_task());
        scratch_ = std::max(scratch_, link->scratch_bytes());
        links_.push_back(std::move(link));
    }
    void rows(Context &context, int64_t begin, int64_t end, char *scratch) override {
        for (; begin < end; begin += at_once_) {
            for (const std::unique_ptr<RowStep> &link : links_) {
                link->rows(context, begin, std::min(begin + at_once_, end), scratch);
            }
        }
    }

private:
    std::vector<std::unique_ptr<RowStep>> links_;
    int64_t at_once_;
};

// A row as packed floats: where it lies, or unpacked into `scratch`.
const float *read_row(const Context &context, const Tensor &t, const char *row, float *scratch);
// The packed floats of a row back into a tensor's type and strides, unless they are there already.
void write_row(const Context &context, const Tensor &t, char *row, const float *values);
// Where to compute a row before write_row: in place if that will do, else `scratch`.
float *row_target(const Tensor &t, char *row, float *scratch);

// ALiBi's slope of each head: 1 for all when max_bias is 0.
std::vector<float> alibi_slopes(int64_t n_heads, float max_bias);

}  // namespace tandem
