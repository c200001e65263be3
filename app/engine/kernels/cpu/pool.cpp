#include "pool.h"

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace tandem {
namespace {

// About fifty microseconds of spinning: longer than any wait inside a busy program, shorter than a scheduler's slice.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// The CPUs this process may use, in order.
std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &set)) {
                cpus.push_back(cpu);
            }
        }
    }
#endif
    return cpus;
}

// Binds the calling thread to the `index`-th of `cpus`; a wish, so a refusal is no error.
void bind_to(const std::vector<int> &cpus, int index) {
#if defined(__linux__)
    if (!cpus.empty()) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[index % cpus.size()], &set);
        pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
    }
#else
    (void)cpus;
    (void)index;
#endif
}

}  // namespace

Pool::Pool(int n_threads, bool pin) : n_threads_(n_threads), pin_(pin) {
    const std::vector<int> cpus = pin ? allowed_cpus() : std::vector<int>();
    try {
        for (int thread = 1; thread < n_threads; ++thread) {
            workers_.emplace_back([this, thread, cpus] {
                bind_to(cpus, thread);
                live(thread);
            });
        }
    } catch (const std::system_error &) {  // no destructor runs for a half-made pool: end its threads here
        const size_t n_made = workers_.size() + 1;
        stop();
        throw std::runtime_error("the system gave " + std::to_string(n_made) + " of " + std::to_string(n_threads) +
                                 " threads; ask for fewer with --threads");
    }
}

Pool::~Pool() {
    stop();
}

void Pool::stop() {
    stop_ = true;
    start_.fetch_add(1);
    start_.notify_all();
    for (std::thread &worker : workers_) {
        worker.join();
    }
}

void Pool::run(Job &job) {
    const std::lock_guard<std::mutex> guard(one_caller_);
    if (job.phases() == 0) {
        return;
    }
    tasks_ = job.tasks(0);
    job_ = &job;
    failed_ = false;
    failure_ = nullptr;
    next_[0].store(n_threads_, std::memory_order_relaxed);
    next_[1].store(n_threads_, std::memory_order_relaxed);
    if (n_threads_ > 1) {
        start_.fetch_add(1);
        if (dozing_.load() > 0) {
            start_.notify_all();
        }
    }
    work(0);
    if (failed_) {
        std::rethrow_exception(std::exchange(failure_, nullptr));
    }
}

// Does something for the job; what it throws is kept for `run`, as every thread must come to every barrier.
template <class F>
void Pool::guarded(F f) {
    try {
        f();
    } catch (...) {
        const std::lock_guard<std::mutex> guard(failure_lock_);
        failure_ = failure_ ? failure_ : std::current_exception();
        failed_ = true;
    }
}

void Pool::live(int thread) {
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        while (start_.load(std::memory_order_acquire) == seen) {
            if (++spins < kSpins) {
                relax();
                continue;
            }
            dozing_.fetch_add(1);
            start_.wait(seen);
            dozing_.fetch_sub(1);
        }
        if (stop_) {
            return;
        }
        ++seen;
        work(thread);
    }
}

void Pool::work(int thread) {
    Job &job = *job_;
    const int64_t phases = job.phases();
    for (int64_t phase = 0; phase < phases; ++phase) {
        // A thread can come late to a phase, but never to one that is over: the barrier counts every thread.
        std::atomic<int64_t> &next = next_[phase & 1];
        const int64_t tasks = tasks_;
        guarded([&] {
            for (int64_t task = thread; task < tasks && !failed_.load(std::memory_order_relaxed);
                 task = next.fetch_add(1, std::memory_order_relaxed)) {
                job.run(phase, task, thread);
            }
        });
        const uint32_t seen = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_threads_) {
            wait_for_generation(seen);
            continue;
        }
        // The last to arrive does what one thread must do, while its caches are warm, and opens the next phase.
        tasks_ = 0;
        guarded([&] {
            if (!failed_) {
                job.finish(phase);
                tasks_ = phase + 1 < phases ? job.tasks(phase + 1) : 0;
            }
        });
        next_[(phase + 1) & 1].store(n_threads_, std::memory_order_relaxed);
        release();
    }
}

void Pool::wait_for_generation(uint32_t seen) {
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen;) {
        if (++spins < kSpins) {
            relax();
            continue;
        }
        sleeping_.fetch_add(1);
        generation_.wait(seen);
        sleeping_.fetch_sub(1);
    }
}

void Pool::release() {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1);
    if (sleeping_.load() > 0) {
        generation_.notify_all();
    }
}

}  // namespace tandem
