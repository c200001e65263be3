#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace tandem {

Arena::~Arena() { std::free(data_); }

char *Arena::grow(int64_t bytes) {
    if (bytes > size_) {
        constexpr int64_t kPage = 4096;
        bytes = (bytes + kPage - 1) / kPage * kPage;
        std::free(std::exchange(data_, nullptr));
        size_ = 0;
        data_ = static_cast<char *>(std::aligned_alloc(kPage, bytes));
        if (!data_) {
            throw std::bad_alloc();
        }
        size_ = bytes;
        // Tiles that are not full are computed to the end; what lies there must be numbers.
        std::memset(data_, 0, size_);
    }
    return data_;
}

std::shared_ptr<Program> Engine::compile(std::vector<Tensor> tensors, const std::vector<int32_t> &nodes) {
    Compiler compiler(kernels, matrices, pool.threads());
    return std::make_shared<Program>(shared_from_this(), compiler.compile(std::move(tensors), nodes));
}

Program::Program(std::shared_ptr<Engine> engine, Compiled compiled)
    : engine_(std::move(engine)), compiled_(std::move(compiled)), context_(engine_->kernels) {
    for (const StepPtr &step : compiled_.steps) {
        if (step->parallel()) {
            phases_.push_back({step.get(), {}});
        } else {
            if (phases_.empty()) {
                phases_.emplace_back();
            }
            phases_.back().alone.push_back(step.get());
        }
    }
    compiled_.matrices = engine_->matrices.claim(compiled_.claims, compiled_.matrices);
}

Program::~Program() { engine_->matrices.release(compiled_.claims); }

std::string Program::execute() {
    engine_->matrices.settle(compiled_.matrices, engine_->pool);
    context_.private_bytes = private_bytes();
    context_.shared = engine_->shared_.grow(compiled_.shared_bytes);
    context_.private_ = engine_->private_.grow(context_.private_bytes * engine_->pool.threads());
    context_.failed = false;
    context_.failure.clear();
    engine_->pool.run(*this);
    return context_.failure;
}

int64_t Program::tasks(int64_t phase) const {
    const Step *step = phases_[phase].together;
    return step && !context_.failed ? step->tasks(context_) : 0;
}

void Program::run(int64_t phase, int64_t task, int thread) { phases_[phase].together->run(context_, task, thread); }

void Program::finish(int64_t phase) {
    if (times_ && phases_[phase].together) {
        note(*phases_[phase].together);
    }
    for (Step *step : phases_[phase].alone) {
        const int64_t tasks = context_.failed ? 0 : step->tasks(context_);
        for (int64_t task = 0; task < tasks; ++task) {
            step->run(context_, task, 0);
        }
        if (times_) {
            note(*step);
        }
    }
}

namespace {

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Program::note(const Step &step) {
    const double now = now_s();
    times_->emplace_back(step.node, now - last_);
    last_ = now;
}

std::vector<std::pair<int32_t, double>> Program::profile() {
    std::vector<std::pair<int32_t, double>> times;
    times_ = &times;
    last_ = now_s();
    execute();
    times_ = nullptr;
    return times;
}

}  // namespace tandem
