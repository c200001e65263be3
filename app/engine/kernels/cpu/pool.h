// A team of threads that works through phases together.
//
// A job is a list of phases; a phase has tasks that any thread may take, in any order, and they are all done before
// the next phase begins. Thread i begins with task i, so that a thread meets the same weights again; the rest goes to
// whoever is free. What a task computes never depends on who runs it. The caller of `run` is a member of the
// team. Waiting threads spin for some microseconds and then sleep, so that an idle team costs nothing and two teams
// on the same cores do not fight.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

class Job {
public:
    virtual ~Job() = default;
    virtual int64_t phases() const = 0;
    virtual int64_t tasks(int64_t phase) const = 0;  // asked when the phase before is done; 0 is allowed
    virtual void run(int64_t phase, int64_t task, int thread) = 0;
    // What one thread does between the last task of a phase and the first of the next.
    virtual void finish(int64_t phase) = 0;
};

class Pool {
public:
    // `n_threads` counts the caller. `pin`: bind the other threads, and the caller while it runs, to one CPU each.
    Pool(int n_threads, bool pin);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return n_threads_; }
    // Works through the job and returns when it is done. One caller at a time; others wait. What a task throws is thrown
    // here, the first of it, once nobody works on the job any more; tasks that had not begun are left out.
    void run(Job &job);

private:
    void live(int thread);
    void work(int thread);
    void wait_for_generation(uint32_t seen);
    void release();
    void stop();  // ends the other threads
    template <class F>
    void guarded(F f);

    const int n_threads_;
    const bool pin_;
    std::mutex one_caller_;
    std::vector<std::thread> workers_;

    // Written by one thread, spun on by the others: each on a cache line of its own.
    alignas(64) std::atomic<uint32_t> generation_{0};  // of the barrier; moves on when a phase may begin
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<int32_t> sleeping_{0};
    alignas(64) std::atomic<int64_t> next_[2];  // the next task of even and of odd phases
    alignas(64) std::atomic<uint32_t> start_{0};  // moves on when a job begins
    std::atomic<int32_t> dozing_{0};
    alignas(64) Job *job_ = nullptr;
    int64_t tasks_ = 0;
    bool stop_ = false;
    std::atomic<bool> failed_{false};
    std::mutex failure_lock_;
    std::exception_ptr failure_;
};

}  // namespace tandem
