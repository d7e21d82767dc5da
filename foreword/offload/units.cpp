// Copies between arrays of any strides: units of a paged KV cache and the payloads of frames (integrations/vllm/packing.py).
//
// A copy is a list of axes. What is contiguous on both sides is copied as it is; where the two sides have different innermost
// axes, words are transposed in registers.
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int MOST = 8;  // axes
constexpr int64_t STREAMED = 4096;  // bytes

// Sizes in words, strides in bytes.
struct Axis {
    int64_t size, target, source;
};

struct Copy {
    Axis axes[MOST];
    int count;
    int64_t word;
    bool stream;
};

// A register has two lanes of 16 bytes. Shuffles stay within lanes, so that two tiles are transposed at once.
template <class W>
struct Vector {
    static constexpr int LANE = 16 / sizeof(W);
    typedef W Half __attribute__((vector_size(16)));
    typedef W Words __attribute__((vector_size(32)));
};

typedef int64_t Quads __attribute__((vector_size(32)));

template <class V>
INLINE V load(const char* from) {
    V found;
    __builtin_memcpy(&found, from, sizeof found);
    return found;
}

template <class V>
INLINE void store(char* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

// One lane from each address.
template <class W>
INLINE typename Vector<W>::Words load_lanes(const char* low, const char* high) {
    const auto a = load<typename Vector<W>::Half>(low), b = load<typename Vector<W>::Half>(high);
    if constexpr (sizeof(W) == 2)
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    else
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}

// Two registers, interleaved word by word within each lane: the lower and the upper half of each lane's result.
template <class W>
INLINE void interleave(const typename Vector<W>::Words& a, const typename Vector<W>::Words& b,
                       typename Vector<W>::Words& low, typename Vector<W>::Words& high) {
    if constexpr (sizeof(W) == 2) {
        low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
        high = __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    } else {
        low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
        high = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    }
}

// The words at even and at odd places of 32 bytes and the 32 after them.
template <class W>
INLINE void separate(const char* from, typename Vector<W>::Words& even, typename Vector<W>::Words& odd) {
    const auto a = load<typename Vector<W>::Words>(from), b = load<typename Vector<W>::Words>(from + 32);
    if constexpr (sizeof(W) == 2) {
        even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    } else {
        even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
        odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    }
}

template <class W>
INLINE void scalar(char* target, const char* source, const Axis& a, int64_t a_from, int64_t a_to, const Axis& b,
                   int64_t b_from, int64_t b_to) {
    for (int64_t j = b_from; j < b_to; ++j)
        for (int64_t i = a_from; i < a_to; ++i)
            memcpy(target + i * a.target + j * b.target, source + i * a.source + j * b.source, sizeof(W));
}

// `a` is contiguous in the target, `b` in the source. Tiles of 2 LANE x LANE words.
template <class W>
INLINE void transpose(char* target, const char* source, const Axis& a, const Axis& b) {
    constexpr int N = Vector<W>::LANE;
    typedef typename Vector<W>::Words Words;
    const int64_t a_end = a.size / (2 * N) * (2 * N), b_end = b.size / N * N;
    for (int64_t i = 0; i < a_end; i += 2 * N)
        for (int64_t j = 0; j < b_end; j += N) {
            Words rows[N], mixed[N];
            const char* from = source + i * a.source + j * (int64_t)sizeof(W);
            char* to = target + i * (int64_t)sizeof(W) + j * b.target;
#pragma GCC unroll 8
            for (int k = 0; k < N; ++k) rows[k] = load_lanes<W>(from + k * a.source, from + (k + N) * a.source);
#pragma GCC unroll 3
            for (int stage = 1; stage < N; stage *= 2) {
#pragma GCC unroll 4
                for (int k = 0; k < N / 2; ++k) interleave<W>(rows[k], rows[k + N / 2], mixed[2 * k], mixed[2 * k + 1]);
#pragma GCC unroll 8
                for (int k = 0; k < N; ++k) rows[k] = mixed[k];
            }
#pragma GCC unroll 8
            for (int k = 0; k < N; ++k) store(to + k * b.target, rows[k]);
        }
    scalar<W>(target, source, a, a_end, a.size, b, 0, b.size);
    scalar<W>(target, source, a, 0, a_end, b, b_end, b.size);
}

// Pairs in the target: `a` has two words, which lie side by side; `b` is contiguous in the source.
template <class W>
INLINE void join_pairs(char* target, const char* source, const Axis& a, const Axis& b) {
    constexpr int N = Vector<W>::LANE;
    typedef typename Vector<W>::Words Words;
    const int64_t end = b.size / (2 * N) * (2 * N);
    for (int64_t j = 0; j < end; j += 2 * N) {
        const char* from = source + j * (int64_t)sizeof(W);
        char* to = target + 2 * j * (int64_t)sizeof(W);
        const Words first = load<Words>(from), second = load<Words>(from + a.source);
        Words low, high;
        interleave<W>(first, second, low, high);
        store(to, __builtin_shufflevector((Quads)low, (Quads)high, 0, 1, 4, 5));
        store(to + 32, __builtin_shufflevector((Quads)low, (Quads)high, 2, 3, 6, 7));
    }
    scalar<W>(target, source, a, 0, 2, b, end, b.size);
}

// Pairs in the source: `b` has two words, which lie side by side; `a` is contiguous in the target.
template <class W>
INLINE void split_pairs(char* target, const char* source, const Axis& a, const Axis& b) {
    constexpr int N = 2 * Vector<W>::LANE;
    const int64_t end = a.size / N * N;
    for (int64_t i = 0; i < end; i += N) {
        typename Vector<W>::Words even, odd;
        separate<W>(source + 2 * i * (int64_t)sizeof(W), even, odd);
        store(target + i * (int64_t)sizeof(W), even);
        store(target + i * (int64_t)sizeof(W) + b.target, odd);
    }
    scalar<W>(target, source, a, end, a.size, b, 0, 2);
}

// Long runs out of frames pass by the cache: ordinary stores would first read what they overwrite.
INLINE void copy_run(char* target, const char* source, int64_t bytes, bool stream) {
#ifdef __AVX__
    constexpr int64_t STEP = 4 * sizeof(__m256i);
    if (stream && bytes >= STREAMED && (uintptr_t)target % sizeof(__m256i) == 0) {
        for (; bytes >= STEP; bytes -= STEP, target += STEP, source += STEP) {
            __m256i words[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) words[k] = _mm256_loadu_si256((const __m256i*)source + k);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) _mm256_stream_si256((__m256i*)target + k, words[k]);
        }
    }
#endif
    memcpy(target, source, bytes);
}

template <class Inner>
INLINE void for_last(const Axis* axes, int count, char* target, const char* source, const Inner& inner) {
    if (!count) return inner(target, source);
    const Axis axis = *axes;
    for (int64_t i = 0; i < axis.size; ++i) inner(target + i * axis.target, source + i * axis.source);
}

template <class Inner>
void for_all(const Axis* axes, int count, char* target, const char* source, const Inner& inner) {
    if (count <= 1) return for_last(axes, count, target, source, inner);
    for (int64_t i = 0; i < axes->size; ++i)
        for_all(axes + 1, count - 1, target + i * axes->target, source + i * axes->source, inner);
}

// Axes of size 1 dropped, the rest in the order of the target's memory, and joined where both sides allow it.
void simplify(Copy& copy) {
    int count = 0;
    for (int k = 0; k < copy.count; ++k) {
        const Axis axis = copy.axes[k];
        if (axis.size == 1) continue;
        int at = count++;
        for (; at && copy.axes[at - 1].target < axis.target; --at) copy.axes[at] = copy.axes[at - 1];
        copy.axes[at] = axis;
    }
    copy.count = 0;
    for (int k = 0; k < count; ++k) {
        const Axis axis = copy.axes[k];
        Axis* last = copy.count ? &copy.axes[copy.count - 1] : nullptr;
        if (last && last->target == axis.size * axis.target && last->source == axis.size * axis.source)
            *last = Axis{last->size * axis.size, axis.target, axis.source};
        else
            copy.axes[copy.count++] = axis;
    }
}

// What is contiguous on both sides becomes one word, if it is as long as one.
void widen(Copy& copy) {
    if (!copy.count) return;
    const Axis& last = copy.axes[copy.count - 1];
    const int64_t run = last.size * copy.word;
    if (last.target == copy.word && last.source == copy.word && (run == 2 || run == 4 || run == 8)) {
        copy.word = run;
        --copy.count;
    }
}

// `a` is the innermost axis of the target, `b` that of the source; the other axes come before.
template <class W>
void shuffle_words(const Copy& copy, char* target, const char* source, const Axis a, const Axis b) {
    constexpr int64_t word = sizeof(W);
    const auto all = [&](const auto& inner) { for_all(copy.axes, copy.count - 2, target, source, inner); };
    if (a.size == 2 && b.target == 2 * word)
        all([=](char* to, const char* from) { join_pairs<W>(to, from, a, b); });
    else if (b.size == 2 && a.source == 2 * word)
        all([=](char* to, const char* from) { split_pairs<W>(to, from, a, b); });
    else
        all([=](char* to, const char* from) { transpose<W>(to, from, a, b); });
}

template <class W>
void copy_words(Copy& copy, char* target, const char* source) {
    const int64_t word = sizeof(W);
    if (!copy.count) {
        memcpy(target, source, sizeof(W));
        return;
    }
    const Axis a = copy.axes[copy.count - 1];
    if (a.target == word && a.source == word)
        return for_all(copy.axes, copy.count - 1, target, source, [=](char* to, const char* from) {
            copy_run(to, from, a.size * word, copy.stream);
        });
    int other = copy.count - 2;
    while (other >= 0 && copy.axes[other].source != word) --other;
    if (a.target != word || other < 0)
        return for_all(copy.axes, copy.count, target, source, [](char* to, const char* from) { memcpy(to, from, sizeof(W)); });
    const Axis b = copy.axes[other];
    for (int k = other; k < copy.count - 2; ++k) copy.axes[k] = copy.axes[k + 1];
    if constexpr (sizeof(W) != 2 && sizeof(W) != 4)
        return for_all(copy.axes, copy.count - 2, target, source, [=](char* to, const char* from) {
            scalar<W>(to, from, a, 0, a.size, b, 0, b.size);
        });
    else
        shuffle_words<W>(copy, target, source, a, b);
}

void add(Copy& copy, int64_t size, int64_t paged, int64_t staged, int into_frames) {
    copy.axes[copy.count++] = into_frames ? Axis{size, staged, paged} : Axis{size, paged, staged};
}

bool run(Copy& copy, char* target, const char* source) {
    simplify(copy);
    widen(copy);
    switch (copy.word) {
        case 1: copy_words<uint8_t>(copy, target, source); return true;
        case 2: copy_words<uint16_t>(copy, target, source); return true;
        case 4: copy_words<uint32_t>(copy, target, source); return true;
        case 8: copy_words<uint64_t>(copy, target, source); return true;
    }
    return false;
}

}  // namespace

extern "C" {

// K or V of one layer (offload/frame_copies.py). Strides and offsets in bytes.
struct UnitPlane {
    char* paged;
    int64_t offset;
    int64_t word;
    int64_t units[3];
    int64_t count;
    int64_t sizes[6], strides[6], frame_strides[6];
};

// Copies units into frames, or out of them. `starts` and `counts` are of blocks, units of tokens and head units, which are in this
// order in consecutive slots; `slots` are the strides of the three in the arena. 0 if the copy was made, 1 for an unknown word.
int fw_copy_units(const UnitPlane* planes, int64_t num_planes, char* frames, const int64_t* starts, const int64_t* counts,
                  const int64_t* slots, int into_frames) {
    // Block after block, so that the frames of a block stay in the cache.
    for (int64_t block = 0; block < counts[0]; ++block)
        for (int64_t k = 0; k < num_planes; ++k) {
            const UnitPlane& plane = planes[k];
            char* paged = plane.paged + (starts[0] + block) * plane.units[0];
            char* staged = frames + plane.offset + block * slots[0];
            Copy copy{};
            copy.word = plane.word;
            copy.stream = !into_frames;
            for (int axis = 1; axis < 3; ++axis) {
                paged += starts[axis] * plane.units[axis];
                add(copy, counts[axis], plane.units[axis], slots[axis], into_frames);
            }
            for (int64_t axis = 0; axis < plane.count; ++axis)
                add(copy, plane.sizes[axis], plane.strides[axis], plane.frame_strides[axis], into_frames);
            if (!run(copy, into_frames ? staged : paged, into_frames ? paged : staged)) return 1;
        }
#ifdef __AVX__
    // What was streamed is in memory before another thread hears that it is.
    _mm_sfence();
#endif
    return 0;
}
}
