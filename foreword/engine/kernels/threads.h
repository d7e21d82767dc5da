// Work shared among the threads of the OpenMP runtime that torch has loaded: a second pool would wait for cores that the first keeps busy.
//
// A call opens one region. The thread that comes first leads: it goes through the steps of the call, and hands out the items of each step; the
// others help. A step ends when its items are done, whoever did them, so a helper that has no core just now holds nobody up until the
// region ends.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

typedef void (*Region)(void (*)(void*), void*, unsigned, unsigned);
static Region open_region = nullptr;

static inline void rest(int& turns) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
    if (++turns % 4096 == 0) sched_yield();
}

class Team {
  public:
    explicit Team(int threads) : threads(open_region == nullptr ? 1 : threads) {}

    const int threads;

    // `lead(team)` on one thread, whose calls of `share` the others help with.
    template <class F>
    void run(const F& lead) {
        if (threads <= 1) return lead();
        struct Call {
            Team* team;
            const F* lead;
        } call{this, &lead};
        open_region(
            [](void* data) {
                Call& mine = *(Call*)data;
                if (mine.team->led_.exchange(true)) return mine.team->help();
                (*mine.lead)();
                mine.team->ticket_.store(CLOSED, std::memory_order_release);
            },
            &call, (unsigned)threads, 0);
    }

    // `work(item)` for every item of [0, items). Only the leader calls it.
    template <class F>
    void share(int64_t items, const F& work) {
        if (threads <= 1 || items <= 1) {
            for (int64_t item = 0; item < items; item++) work(item);
            return;
        }
        step_++;
        Step& step = steps_[step_ % 2];
        step.work.store(&work, std::memory_order_relaxed);
        step.call.store([](const void* work, int64_t item) { (*(const F*)work)(item); }, std::memory_order_relaxed);
        step.items.store(items, std::memory_order_relaxed);
        step.done.store(0, std::memory_order_relaxed);
        ticket_.store(step_ << 32, std::memory_order_release);
        for (uint64_t ticket; take(ticket);) finish(ticket);
        for (int turns = 0; step.done.load(std::memory_order_acquire) < items;) rest(turns);
    }

  private:
    static constexpr uint64_t CLOSED = ~(uint64_t)0;

    // Two, taken in turns: who still looks at the last but one finds that the ticket has changed.
    struct Step {
        std::atomic<const void*> work{nullptr};
        std::atomic<void (*)(const void*, int64_t)> call{nullptr};
        std::atomic<int64_t> items{0}, done{0};
    };

    // Take the next item of the current step, if there is one. The ticket holds the step's number and that of its next item; that it is
    // changed in one go makes sure that what was read of the step belongs to it, and while an item is not done the step stays.
    bool take(uint64_t& ticket) {
        ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            if (ticket == CLOSED || ticket == 0) return false;
            const int64_t items = steps_[(ticket >> 32) % 2].items.load(std::memory_order_relaxed);
            if ((int64_t)(uint32_t)ticket >= items) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
        }
    }

    void finish(uint64_t ticket) {
        Step& step = steps_[(ticket >> 32) % 2];
        step.call.load(std::memory_order_relaxed)(step.work.load(std::memory_order_relaxed), (int64_t)(uint32_t)ticket);
        step.done.fetch_add(1, std::memory_order_release);
    }

    void help() {
        for (int turns = 0;;) {
            uint64_t ticket;
            if (take(ticket)) {
                finish(ticket);
                turns = 0;
            } else {
                if (ticket == CLOSED) return;
                rest(turns);
            }
        }
    }

    uint64_t step_ = 0;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<bool> led_{false};
    Step steps_[2];
};

// Memory of this thread that stays from call to call, aligned to cache lines.
struct Scratch {
    char* start = nullptr;
    size_t size = 0;
    ~Scratch() { free(start); }
    char* of(size_t wanted) {
        if (wanted > size) {
            free(start);
            size = (wanted + 4095) / 4096 * 4096;
            start = (char*)aligned_alloc(4096, size);
            if (start == nullptr) abort();
        }
        return start;
    }
};
