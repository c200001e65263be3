// The native half of a CPU device: threads, weights and programs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compile.h"
#include "kernels.h"
#include "matrix.h"
#include "pool.h"
#include "step.h"

namespace tandem {

// Memory that grows and is never smaller than what the largest program asked for.
class Arena {
public:
    ~Arena();
    Arena() = default;
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
    char *grow(int64_t bytes);

private:
    char *data_ = nullptr;
    int64_t size_ = 0;
};

class Program;

class Engine : public std::enable_shared_from_this<Engine> {
public:
    Engine(const Kernels &kernels, int n_threads, bool pin) : kernels(kernels), pool(n_threads, pin) {}
    // Throws Unsupported.
    std::shared_ptr<Program> compile(std::vector<Tensor> tensors, const std::vector<int32_t> &nodes);
    // The bytes are about to be read or changed by someone other than a program; in lane order. `replaced`: every byte
    // of it will be overwritten, so it need not be put back first.
    void touch(const char *begin, const char *end, bool replaced) { matrices.touch(begin, end, replaced, pool); }
    void forget(const char *begin, const char *end) { matrices.forget(begin, end); }

    const Kernels &kernels;
    Pool pool;
    Matrices matrices;

private:
    friend class Program;
    Arena shared_;    // one program runs at a time, so they share their scratch
    Arena private_;
};

class Program final : private Job {
public:
    Program(std::shared_ptr<Engine> engine, Compiled compiled);
    ~Program() override;
    // Runs once. Empty, or what failed; results are then undefined. In lane order.
    std::string execute();
    // The same, and how many seconds each node's steps took, by its index among the tensors; for benchmarks. Rows that
    // went through several ops together count for the first.
    std::vector<std::pair<int32_t, double>> profile();
    // Scratch that it needs while it runs; programs of an engine share it.
    int64_t scratch_bytes() const { return compiled_.shared_bytes + private_bytes() * engine_->pool.threads(); }
    int64_t n_steps() const { return static_cast<int64_t>(compiled_.steps.size()); }
    int64_t n_phases() const { return static_cast<int64_t>(phases_.size()); }

private:
    // A step that all threads share, then steps that one thread does.
    struct Phase {
        Step *together = nullptr;
        std::vector<Step *> alone;
    };
    int64_t phases() const override { return static_cast<int64_t>(phases_.size()); }
    int64_t tasks(int64_t phase) const override;
    void run(int64_t phase, int64_t task, int thread) override;
    void finish(int64_t phase) override;
    void note(const Step &step);
    int64_t private_bytes() const { return std::max<int64_t>(256, (compiled_.private_bytes + 255) / 256 * 256); }

    std::shared_ptr<Engine> engine_;
    Compiled compiled_;
    std::vector<Phase> phases_;
    Context context_;
    std::vector<std::pair<int32_t, double>> *times_ = nullptr;
    double last_ = 0;
};

}  // namespace tandem
