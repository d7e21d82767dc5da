// Work sharing on the threads of the OpenMP runtime that torch has loaded. A thread pool of our own would compete with
// that runtime's spinning threads for the cores.
//
// A call opens one parallel region. The first thread to arrive leads: it runs the call and publishes jobs, each a
// number of items; the others help. A job ends when all its items are done, so a helper without a core delays only the
// end of the region.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

typedef void (*Region)(void (*)(void*), void*, unsigned, unsigned);
static Region open_region = nullptr;

static inline void spin_wait(int& turns) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
    if (++turns % 4096 == 0) sched_yield();
}

class ThreadTeam {
  public:
    explicit ThreadTeam(int threads) : threads(open_region == nullptr ? 1 : threads) {}

    const int threads;

    // Run `lead` on one thread; the others help with its calls of `share`.
    template <class F>
    void run(const F& lead) {
        if (threads <= 1) return lead();
        struct Call {
            ThreadTeam* team;
            const F* lead;
        } call{this, &lead};
        open_region(
            [](void* data) {
                Call& call = *(Call*)data;
                if (call.team->led_.exchange(true)) return call.team->help();
                (*call.lead)();
                call.team->ticket_.store(CLOSED, std::memory_order_release);
            },
            &call, (unsigned)threads, 0);
    }

    // Call `work(item)` for every item of [0, items). Only the leader calls this.
    template <class F>
    void share(int64_t items, const F& work) {
        if (threads <= 1 || items <= 1) {
            for (int64_t item = 0; item < items; item++) work(item);
            return;
        }
        job_++;
        Job& job = jobs_[job_ % 2];
        job.work.store(&work, std::memory_order_relaxed);
        job.call.store([](const void* work, int64_t item) { (*(const F*)work)(item); }, std::memory_order_relaxed);
        job.items.store(items, std::memory_order_relaxed);
        job.done.store(0, std::memory_order_relaxed);
        ticket_.store(job_ << 32, std::memory_order_release);
        for (uint64_t ticket; take(ticket);) finish(ticket);
        for (int turns = 0; job.done.load(std::memory_order_acquire) < items;) spin_wait(turns);
    }

  private:
    static constexpr uint64_t CLOSED = ~(uint64_t)0;

    // Two, used in turns: a helper that still reads the previous job finds that the ticket has changed.
    struct Job {
        std::atomic<const void*> work{nullptr};
        std::atomic<void (*)(const void*, int64_t)> call{nullptr};
        std::atomic<int64_t> items{0}, done{0};
    };

    // Take the next item of the current job, if there is one. The ticket holds the job's number and its next item; it
    // is exchanged atomically, so the fields that were read belong to that job, which stays until its items are done.
    bool take(uint64_t& ticket) {
        ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            if (ticket == CLOSED || ticket == 0) return false;
            const int64_t items = jobs_[(ticket >> 32) % 2].items.load(std::memory_order_relaxed);
            if ((int64_t)(uint32_t)ticket >= items) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
                return true;
        }
    }

    void finish(uint64_t ticket) {
        Job& job = jobs_[(ticket >> 32) % 2];
        job.call.load(std::memory_order_relaxed)(job.work.load(std::memory_order_relaxed), (int64_t)(uint32_t)ticket);
        job.done.fetch_add(1, std::memory_order_release);
    }

    void help() {
        for (int turns = 0;;) {
            uint64_t ticket;
            if (take(ticket)) {
                finish(ticket);
                turns = 0;
            } else {
                if (ticket == CLOSED) return;
                spin_wait(turns);
            }
        }
    }

    uint64_t job_ = 0;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<bool> led_{false};
    Job jobs_[2];
};

// A thread's working memory, kept from call to call.
struct Scratch {
    char* start = nullptr;
    size_t size = 0;
    ~Scratch() { free(start); }
    char* reserve(size_t wanted) {
        if (wanted > size) {
            free(start);
            size = (wanted + 4095) / 4096 * 4096;
            start = (char*)aligned_alloc(4096, size);
            if (start == nullptr) abort();
        }
        return start;
    }
};
