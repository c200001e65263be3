// The team of threads: every task once, phases in order, several teams and callers at once, no core burnt while idle.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

using tandem::Job;
using tandem::Pool;

int n_wrong = 0;

void check(bool right, const char *what) {
    if (!right) {
        ++n_wrong;
        std::fprintf(stderr, "WRONG %s\n", what);
    }
}

// Each phase adds up what the phase before wrote, with plain memory: a barrier that leaks is a race.
class Chain final : public Job {
public:
    Chain(int64_t n_phases, int64_t n_tasks) : n_phases_(n_phases), cells_(n_phases * n_tasks, 0), n_tasks_(n_tasks) {}
    int64_t phases() const override { return n_phases_; }
    int64_t tasks(int64_t phase) const override { return phase % 5 == 4 ? 0 : n_tasks_ - phase % 3; }
    void run(int64_t phase, int64_t task, int) override { cells_[phase * n_tasks_ + task] += 1 + carried_; }
    void finish(int64_t phase) override {
        int64_t sum = 0;
        for (int64_t task = 0; task < tasks(phase); ++task) {
            sum += cells_[phase * n_tasks_ + task] - carried_;
        }
        done_ += sum;
        carried_ = sum % 7;
    }
    // Whether every task of every phase ran exactly once.
    bool right() const {
        int64_t expected = 0;
        for (int64_t phase = 0; phase < n_phases_; ++phase) {
            expected += tasks(phase);
        }
        return done_ == expected;
    }

private:
    const int64_t n_phases_;
    std::vector<int64_t> cells_;
    const int64_t n_tasks_;
    int64_t carried_ = 0, done_ = 0;
};

void run_many(Pool &pool, int n_jobs, const char *what) {
    for (int i = 0; i < n_jobs; ++i) {
        Chain chain(1 + i % 23, 3 + i % 17);
        pool.run(chain);
        check(chain.right(), what);
    }
}

double cpu_s() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto seconds = [](const timeval &t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void one_team() {
    for (const int n_threads : {1, 2, 3, 8}) {
        for (const bool pin : {false, true}) {
            Pool pool(n_threads, pin);
            run_many(pool, 300, "a team lost or repeated a task");
        }
    }
}

void teams_that_come_and_go() {
    for (int i = 0; i < 100; ++i) {
        Pool pool(4, false);
        if (i % 2) {
            run_many(pool, 1, "a new team lost or repeated a task");
        }
    }
}

// Two teams on the same cores, each with a caller of its own, and two callers of one team.
void two_teams() {
    Pool first(2, false), second(2, false);
    std::vector<std::thread> callers;
    for (Pool *pool : {&first, &second, &second}) {
        callers.emplace_back([pool] { run_many(*pool, 500, "a team beside another lost or repeated a task"); });
    }
    for (std::thread &caller : callers) {
        caller.join();
    }
}

void idle_team() {
    Pool pool(4, false);
    run_many(pool, 10, "a team lost or repeated a task");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // past the spinning
    const double before = cpu_s();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    check(cpu_s() - before < 0.03, "an idle team burns more than a tenth of a core");
    run_many(pool, 10, "a team that slept lost or repeated a task");
}

// Throws in one task of one phase, or between phases.
class Failing final : public Job {
public:
    Failing(int64_t phase, int64_t task) : phase_(phase), task_(task) {}
    int64_t phases() const override { return 5; }
    int64_t tasks(int64_t) const override { return 9; }
    void run(int64_t phase, int64_t task, int) override {
        if (phase == phase_ && task == task_) {
            throw std::bad_alloc();
        }
        late_ = late_ || phase > phase_;
    }
    void finish(int64_t phase) override {
        if (phase == phase_ && task_ < 0) {
            throw std::bad_alloc();
        }
    }
    bool late() const { return late_; }

private:
    int64_t phase_, task_;
    std::atomic<bool> late_{false};
};

void what_is_thrown_comes_out() {
    for (const int n_threads : {1, 2, 5}) {
        Pool pool(n_threads, false);
        for (int i = 0; i < 300; ++i) {
            Failing job(i % 5, i % 10 - 1);
            bool thrown = false;
            try {
                pool.run(job);
            } catch (const std::bad_alloc &) {
                thrown = true;
            }
            check(thrown, "a team swallowed what a task threw");
            check(!job.late(), "a team went on after a task threw");
            run_many(pool, 2, "a team lost or repeated a task after one threw");
        }
    }
}

}  // namespace

int main() {
    one_team();
    teams_that_come_and_go();
    two_teams();
    what_is_thrown_comes_out();
    idle_team();
    std::fprintf(stderr, "%s\n", n_wrong == 0 ? "the pool keeps its promises" : "FAILED");
    return n_wrong == 0 ? 0 : 1;
}
