// Vectors of the widest registers that the compiler may use, and the two number formats.
//
// Matrices are read in words of 32 bits: one float, or a pair of bfloat16 numbers side by side. A dot product
// over words is the same loop for both: `Number::multiply_add(sum, words, words)`. Sums are float. Numbers of float16 are
// converted into words of one float each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// A product keeps ROWS x COLUMNS vectors of sums in registers, beside COLUMNS + 1 of operands.
constexpr int PANEL_VECTORS = 2;
constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 5 : 4;
// A tile is laid out from one vector of words per row, transposed.
static_assert(TILE_ROWS <= LANES);
constexpr int KEY_VECTORS = LANES == 16 ? 4 : 2;
// Blocks of keys are KEY_PARTS times as long: the state of the softmax is updated once for each.
constexpr int KEY_PARTS = LANES == 16 ? 1 : 2;
constexpr int QUERY_ROWS = 6;

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.4426950408889634f;

template <class V>
INLINE V load(const void* from) {
    V found;
    __builtin_memcpy(&found, from, sizeof found);
    return found;
}

template <class V>
INLINE void store(void* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

INLINE Floats broadcast(float value) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(value);
#elif defined(__aarch64__)
    return (Floats)vdupq_n_f32(value);
#else
    return Floats{} + value;
#endif
}
INLINE Words broadcast(int32_t value) { return Words{} + value; }
// a * b + c, rounded once where the processor can.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE Floats select(Words where, Floats a, Floats b) { return where ? a : b; }
INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

INLINE Words larger(Words a, Words b) {
#if defined(__AVX512F__)
    return (Words)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Words)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}

// A bit for each lane that is set.
INLINE uint32_t lanes_of(Words where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)where);
#else
    uint32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= (uint32_t)(where[lane] & 1) << lane;
    return found;
#endif
}

INLINE Bits widen(Halves v) {
#if defined(__AVX512F__)
    return (Bits)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    return (Bits)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, Bits);
#endif
}

// A loaded vector that stays in its register: a compiler may load it again for each row of a product.
INLINE Words in_register(Words v) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(v));
#elif defined(__AVX2__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

INLINE float sum_of(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

INLINE float largest_of(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    const __m128 halves = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 pairs = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
    return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_movehdup_ps(pairs)));
#else
    float found = v[0];
    for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
    return found;
#endif
}

// 2^x by a polynomial on [-1/2, 1/2]; its error is 4e-5 at degree 4 and 1e-7 at degree 6. 0 for minus infinity. SMALL: x is
// at most 127. What is not a number stays that: it is the second operand of `larger`.
template <int DEGREE, bool SMALL = false>
INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512F__)
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats bounded = larger(broadcast(SMALL ? -127.0f : -150.0f), x);
    const Floats whole = (bounded + 12582912.0f) - 12582912.0f;
#endif
#if defined(__AVX512F__)
    const Floats part = (Floats)_mm512_maskz_sub_ps(
        _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-150.0f), _CMP_NLT_UQ), (__m512)x, (__m512)whole);
#else
    const Floats part = bounded - whole;
#endif
    Floats y = broadcast(9.6181291e-3f);
    if (DEGREE >= 6) y = fused(fused(part, broadcast(1.5403530e-4f), broadcast(1.3333558e-3f)), part, y);
    y = fused(y, part, broadcast(5.5504109e-2f));
    y = fused(y, part, broadcast(2.4022651e-1f));
    y = fused(y, part, broadcast(6.9314718e-1f));
    y = fused(y, part, broadcast(1.0f));
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    const Words power = __builtin_convertvector(whole, Words);
    if (SMALL) return y * (Floats)((power + 127) << 23);
    const Words clamped = power < -126 ? broadcast(int32_t(-126)) : (power > 127 ? broadcast(int32_t(127)) : power);
    const Floats scaled = y * (Floats)((clamped + 127) << 23);
    const Floats beyond = select(whole > 127.0f, broadcast(INFINITE), scaled);
    return select(x == x, select(whole < -126.0f, broadcast(0.0f), beyond), x);
#endif
}

INLINE Floats exp_of(Floats x) { return exp2_of<6>(x * LOG2E); }
INLINE Floats tanh_of(Floats x) {
    const Floats clamped = select(x > 15.0f, broadcast(15.0f), select(x < -15.0f, broadcast(-15.0f), x));
    return 1.0f - 2.0f / (exp_of(2.0f * clamped) + 1.0f);
}

struct Float32 {
    typedef float Element;
    typedef Float32 Tiled;
    static constexpr bool CONVERTED = false;
    static constexpr int PER_WORD = 1;
    static constexpr int TILED_WORDS = 1;
    static constexpr int EXP_DEGREE = 6;
    typedef Float32 Number;
    static constexpr int PACKING = 1;
    INLINE Words columns(const int32_t* from) { return load<Words>(from); }

    INLINE Floats multiply_add(Floats sum, Words a, Words b) { return fused((Floats)a, (Floats)b, sum); }
    INLINE Floats read(const Element* from) { return load<Floats>(from); }
    INLINE void write(Element* to, Floats value) { store(to, value); }
    INLINE float to_float(Element value) { return value; }
    INLINE Element from_float(float value) { return value; }
    INLINE Floats rounded(Floats value) { return value; }
    // One word per column of two rows of values, to multiply by a word of two weights; here of one row. Zero up to a
    // whole number of vectors.
    INLINE void pair_rows(const Element* row, const Element*, int64_t count, int32_t* to) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load<Words>(row + i));
        if (i == count) return;
        Words last{};
        memcpy(&last, row + i, (count - i) * sizeof *row);
        store(to + i, last);
    }
};

struct BFloat16 {
    typedef uint16_t Element;
    static constexpr bool CONVERTED = false;
    static constexpr int PER_WORD = 2;
    // `Tiled`: as what attention lays out queries, keys and values, each of which it uses many times.
#if defined(__AVX512BF16__)
    static constexpr int TILED_WORDS = 1;
    typedef BFloat16 Tiled;
#else
    static constexpr int TILED_WORDS = 2;
    typedef Float32 Tiled;
#endif
    static constexpr int EXP_DEGREE = 4;
    typedef BFloat16 Number;
    static constexpr int PACKING = 1;
    INLINE Words columns(const int32_t* from) { return load<Words>(from); }

    INLINE Floats multiply_add(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        const int32_t high = (int32_t)0xffff0000;
        sum = fused((Floats)(a << 16), (Floats)(b << 16), sum);
        return fused((Floats)(a & high), (Floats)(b & high), sum);
#endif
    }
    INLINE Floats read(const Element* from) { return (Floats)(widen(load<Halves>(from)) << 16); }
    INLINE Halves halves(Floats value) {
#if defined(__AVX512BF16__)
        return (Halves)_mm512_cvtneps_pbh((__m512)value);
#else
        const Bits bits = (Bits)value;
        const Bits nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return __builtin_convertvector(value == value ? nearest : (Bits{} + 0x7fc0u), Halves);
#endif
    }
    INLINE void write(Element* to, Floats value) { store(to, halves(value)); }
    INLINE float to_float(Element value) {
        const uint32_t bits = (uint32_t)value << 16;
        float found;
        memcpy(&found, &bits, 4);
        return found;
    }
    INLINE Element from_float(float value) { return halves(broadcast(value))[0]; }
    INLINE Floats rounded(Floats value) { return (Floats)(widen(halves(value)) << 16); }
    INLINE Words pair(Halves first, Halves second) { return (Words)(widen(first) | (widen(second) << 16)); }
    INLINE void pair_rows(const Element* first, const Element* second, int64_t count, int32_t* to) {
        int64_t i = 0;
#if defined(__AVX512BW__)
        Words low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane | (lane + 32) << 16;
            high[lane] = low[lane] + (LANES | LANES << 16);
        }
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            const __m512i a = load<__m512i>(first + i), b = load<__m512i>(second + i);
            store(to + i, _mm512_permutex2var_epi16(a, (__m512i)low, b));
            store(to + i + LANES, _mm512_permutex2var_epi16(a, (__m512i)high, b));
        }
#endif
        for (; i + LANES <= count; i += LANES) store(to + i, pair(load<Halves>(first + i), load<Halves>(second + i)));
        if (i == count) return;
        Halves a{}, b{};
        memcpy(&a, first + i, (count - i) * sizeof *first);
        memcpy(&b, second + i, (count - i) * sizeof *second);
        store(to + i, pair(a, b));
    }
};

struct Float16 {
    typedef uint16_t Element;
    typedef Float32 Tiled;
    typedef Float16 Number;
    static constexpr bool CONVERTED = true;
    static constexpr int PER_WORD = 1;
    static constexpr int TILED_WORDS = 1;
    static constexpr int EXP_DEGREE = 6;
    static constexpr int PACKING = 1;
    INLINE Words columns(const int32_t* from) { return load<Words>(from); }

    INLINE Floats multiply_add(Floats sum, Words a, Words b) { return fused((Floats)a, (Floats)b, sum); }
    INLINE Floats read(const Element* from) { return floats(load<Halves>(from)); }
    INLINE Floats floats(Halves v) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps((__m256i)v);
#elif defined(__F16C__)
        return (Floats)_mm256_cvtph_ps((__m128i)v);
#else
        const Bits bits = widen(v), size = (bits & 0x7fffu) << 13;
        const Bits normal = (Bits)((Floats)size * 0x1p112f);  // the exponents' biases are 112 apart
        return (Floats)((((Words)size >= (0x7c00 << 13)) ? (size | 0x7f800000u) : normal) | (bits & 0x8000u) << 16);
#endif
    }
    INLINE Halves halves(Floats value) {
#if defined(__AVX512F__)
        return (Halves)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
        return (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
        const Bits sign = (Bits)value & 0x80000000u, size = (Bits)value ^ sign;
        // Below the smallest normal number an addition rounds; a NaN stays one.
        const Bits small = (Bits)((Floats)size + 0.5f) - 0x3f000000u;
        const Bits normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
        const Bits large = (Words)size > 0x7f800000 ? (Bits{} + 0x7e00u) : (Bits{} + 0x7c00u);
        const Bits found = (Words)size >= 0x477ff000 ? large : ((Words)size < (113 << 23) ? small : normal);
        return __builtin_convertvector(found | sign >> 16, Halves);
#endif
    }
    INLINE void write(Element* to, Floats value) { store(to, halves(value)); }
    INLINE float to_float(Element value) { return floats(Halves{} + value)[0]; }
    INLINE Element from_float(float value) { return halves(broadcast(value))[0]; }
    INLINE Floats rounded(Floats value) { return floats(halves(value)); }
};

// Weights of float16 as they are stored.
struct StoredFloat16 : Float16 {
    static constexpr int PACKING = 2;
    INLINE Words columns(const int32_t* from) { return (Words)floats(load<Halves>(from)); }
};

// Words of N from elements of T: those of memory, or each element converted.
template <class T, class N = T>
constexpr bool IN_MEMORY = std::is_same_v<T, N> && !T::CONVERTED;

template <class T, class N = T>
INLINE Words words_of(const typename T::Element* from) {
    if constexpr (IN_MEMORY<T, N>) return load<Words>(from);
    else return (Words)T::read(from);
}

// The first `count` words; zeros follow.
template <class T, class N = T>
INLINE Words some_words(const typename T::Element* from, int64_t count) {
    typename T::Element some[LANES * N::PER_WORD] = {};
    memcpy(some, from, count * N::PER_WORD * sizeof *from);
    return words_of<T, N>(some);
}

// Numbers of type T that are stored as 8-bit integers, in the same order: PACKING words of T fit into one.
template <class T>
struct Int8 : T {
    static constexpr int PACKING = 4 / T::PER_WORD;
    // A vector of words of T.
    INLINE Words columns(const int32_t* from) {
        if constexpr (T::PER_WORD == 1) {
#if defined(__AVX2__) && !defined(__AVX512F__)
            return (Words)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
            return (Words)__builtin_convertvector(load<Bytes>(from), Floats);
#endif
        } else {
#if defined(__AVX512BF16__)
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + 4)));
            return (Words)_mm512_cvtne2ps_pbh(high, low);
#else
            // Seven bits fit into the upper half of a float: no rounding.
            const Words pairs = (Words)widen(load<Halves>(from));
            return (Words)(((Bits)numbers(pairs, 0) >> 16) | ((Bits)numbers(pairs, 1) & 0xffff0000u));
#endif
        }
    }
    // The first or the second of each pair of 8-bit integers.
    INLINE Floats numbers(Words pairs, int which) {
        return __builtin_convertvector(which == 0 ? (pairs << 24) >> 24 : (pairs << 16) >> 24, Floats);
    }
};

// Words of a row that are laid out for a product (`multiply_tiled`): as they are, or, where there are no units for
// bfloat16, each as two floats.
template <class T>
INLINE Words tiled_words(Words words, int which) {
    if (T::TILED_WORDS == 1) return words;
    return which == 0 ? words << 16 : words & (int32_t)0xffff0000;
}

// A vector of words of weights as two of floats, where a word is two numbers without units for them.
template <class T>
INLINE void read_pairs(const int32_t* from, Floats (&found)[2]) {
    if constexpr (T::PACKING == 1) {
        const Words words = T::columns(from);
        for (int half = 0; half < 2; half++) found[half] = (Floats)tiled_words<T>(words, half);
    } else {
        const Words words = (Words)widen(load<Halves>(from));
        for (int half = 0; half < 2; half++) found[half] = T::numbers(words, half);
    }
}

// LANES vectors of LANES words each, transposed.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight unpackings of words, eight of pairs of words, eight exchanges of halves: each is one instruction.
INLINE void transpose(Words rows[LANES]) {
    Words made[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 2) {
        made[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        made[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Words a = made[i + half], b = made[i + half + 2];
            rows[i + 2 * half] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
            rows[i + 2 * half + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
    for (int i = 0; i < LANES / 2; i++) {
        const Words a = rows[i], b = rows[i + LANES / 2];
        rows[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + LANES / 2] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
// log2(LANES) rounds of interleaving row i with row i + LANES / 2.
INLINE void transpose(Words rows[LANES]) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#endif
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        Words made[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const Words a = rows[i], b = rows[i + LANES / 2];
#if defined(__AVX512F__)
            made[2 * i] = (Words)_mm512_permutex2var_epi32((__m512i)a, low, (__m512i)b);
            made[2 * i + 1] = (Words)_mm512_permutex2var_epi32((__m512i)a, high, (__m512i)b);
#else
            made[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            made[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = made[i];
    }
}
#endif

template <class T>
INLINE typename T::Element* at(void* base, int64_t elements) {
    return (typename T::Element*)base + elements;
}
template <class T>
INLINE const typename T::Element* at(const void* base, int64_t elements) {
    return (const typename T::Element*)base + elements;
}

INLINE int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Prefetches LINES cache lines with each step of a product.
template <int LINES>
struct Lines {
    const char* next;
    INLINE_MEMBER void operator()() {
#pragma GCC unroll 2
        for (int line = 0; line < LINES; line++) __builtin_prefetch(next + 64 * line, 0, 2);
        next += 64 * LINES;
    }
};

// sums[row][column] += the words of ROWS rows of `a`, multiplied by COLUMNS vectors of columns of `b`, over `steps`
// words. `b` is `[steps][stride]` words. Each step calls `ahead`.
template <class T, int ROWS, int COLUMNS, class Ahead>
INLINE void multiply(Floats (&sums)[ROWS][COLUMNS], const int32_t* a, int64_t a_stride, const int32_t* b,
                     int64_t stride, int64_t steps, Ahead& ahead) {
    for (int64_t step = 0; step < steps; step++) {
        if constexpr (LANES == 8 && ROWS < COLUMNS) {
            // Of 16 registers, the fewer operands stay in some.
            ahead();
            Words words[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) words[r] = broadcast(a[r * a_stride]);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) {
                const Words read = T::columns(b + c * LANES / T::PACKING), column = ROWS > 1 ? in_register(read) : read;
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) sums[r][c] = T::multiply_add(sums[r][c], words[r], column);
            }
            a++;
            b += stride;
            continue;
        }
        Words columns[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) columns[c] = in_register(T::columns(b + c * LANES / T::PACKING));
        ahead();
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Words word = broadcast(a[r * a_stride]);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = T::multiply_add(sums[r][c], word, columns[c]);
        }
        a++;
        b += stride;
    }
}

// The same where the words of the ROWS rows are laid out side by side: `a` is `[steps][T::TILED_WORDS][ROWS]`.
template <class T, int ROWS, int COLUMNS, class Ahead>
INLINE void multiply_tiled(Floats (&sums)[ROWS][COLUMNS], const int32_t* a, const int32_t* b, int64_t stride,
                           int64_t steps, Ahead& ahead) {
    for (int64_t step = 0; step < steps; step++) {
        Words columns[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) columns[c] = T::columns(b + c * LANES / T::PACKING);
        ahead();
        if (T::TILED_WORDS == 1) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const Words word = broadcast(a[r]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = T::multiply_add(sums[r][c], word, columns[c]);
            }
        } else {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Floats floats[COLUMNS];
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) floats[c] = (Floats)tiled_words<T>(columns[c], half);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const Floats word = (Floats)broadcast(a[half * ROWS + r]);
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; c++) sums[r][c] = fused(word, floats[c], sums[r][c]);
                }
            }
        }
        a += T::TILED_WORDS * ROWS;
        b += stride;
    }
}
