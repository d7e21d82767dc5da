// Work shared among the threads of the OpenMP runtime that torch has loaded: a second one would wait for cores that the first keeps busy.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

typedef void (*Region)(void (*)(void*), void*, unsigned, unsigned);
static Region open_region = nullptr;

// `work(item)` for every item of [0, items), on up to `threads` threads, which take the next item when they are free.
template <class F>
static void parallel(int threads, int64_t items, const F& work) {
    if (threads <= 1 || items <= 1 || open_region == nullptr) {
        for (int64_t item = 0; item < items; item++) work(item);
        return;
    }
    struct Shared {
        const F* work;
        int64_t items;
        std::atomic<int64_t> next;
    } shared{&work, items, {0}};
    open_region(
        [](void* data) {
            Shared& mine = *(Shared*)data;
            for (;;) {
                const int64_t item = mine.next.fetch_add(1, std::memory_order_relaxed);
                if (item >= mine.items) return;
                (*mine.work)(item);
            }
        },
        &shared, (unsigned)(threads < items ? threads : items), 0);
}

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
