// Attention over paged, token-major K and V, read in place.
//
// A task is a few tokens of the step that see the same keys `[low, high)` of one block table: a tile of a prompt's
// chunk, a decoding sequence, or all sequences that share a prefix. For each KV head the queries of its query heads are
// rows of one matrix, so a key is read once for all of them. Keys are taken KEYS at a time: transposed into words,
// multiplied by the queries, weighted by an online softmax (base 2), and their values, paired, are added up
// (FlashAttention, Dao et al. 2022). Where a processor has no units for the model's numbers, words are floats.
//
// Each PART_KEYS keys, from multiples of PART_KEYS on, have a softmax of their own, and a row's parts are added up in order:
// by the task, or, where a row's keys are cut into several tasks, afterwards (flash decoding, Dao et al. 2023, with parts of
// one size). Keys are taken from multiples of KEYS on, wherever a task begins, and keys that a row does not see add exactly
// zero. So a row's result depends on its own keys alone, not on other rows and not on the cut. Sequences that share a prefix
// can see it in one task and each its own keys afterwards, with the bits of a task of its own.
#pragma once

#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

constexpr int KEYS = KEY_VECTORS * LANES * KEY_PARTS;

struct AttentionTask {
    int64_t rows_at, rows;  // in `AttentionTasks.rows`
    int64_t table_at;       // in `AttentionTasks.tables`
    int64_t low, high;      // positions of the keys
    int64_t position;       // of the first row; -1: every row sees all keys; ALONE_AFTERWARDS
    int64_t part;           // where the rows' parts begin in `AttentionTasks.parts`; -1: the result is whole
    int64_t parts;          // of each row
};

// Every row sees all keys `[low, high)`, and then its own from `high` on: behind the task's rows in `AttentionTasks.rows` are,
// for each, where its table begins and the end of its keys. `high` is a multiple of SHARED_KEYS.
constexpr int64_t ALONE_AFTERWARDS = -2, SHARED_KEYS = 64;
#ifndef FW_PART_KEYS
#define FW_PART_KEYS 512
#endif
constexpr int64_t PART_KEYS = FW_PART_KEYS;
static_assert(SHARED_KEYS % KEYS == 0 && PART_KEYS % SHARED_KEYS == 0);

struct Merge {
    int64_t row, first, count;  // parts `[first, first + count)` of `AttentionTasks.merged`
};

// Floats of a part of one row and head: its output, not normalized, its largest score, and the sum of its weights.
static int64_t part_floats(int64_t value_dim) { return round_up(value_dim, LANES) + 2; }

// The attention of one step.
struct AttentionTasks {
    const AttentionTask* tasks;
    const int64_t* rows;
    const int64_t* tables;
    const Merge* merges;
    const int64_t* merged;
    float* parts;  // `[parts, heads, part_floats]`
    int64_t num_tasks, num_merges;
    int64_t window, block_size;
};

struct AttentionLayer {
    void *k, *v;         // `[slots, kv_heads, dim]`
    const float* sinks;  // `[heads]`, or null
    int64_t kv_heads, group, key_dim, value_dim;
    float scale, softcap;
};

struct QueryRows {
    const void* q;
    void* out;                // `[tokens, heads, value_dim]`
    int64_t q_token, q_head;  // elements from one token, and from one head, to the next
};

// Hands out arrays from a piece of memory, each at the start of a cache line.
struct ArrayAllocator {
    uintptr_t next;
    template <class E>
    E* take(int64_t count) {
        E* array = (E*)next;
        next += round_up(count * sizeof(E), 64);
        return array;
    }
};

// A task and one KV head: the queries of the head's query heads, and the state of the online softmax.
template <class T>
struct Tile {
    typedef typename T::Element Element;
    typedef typename T::Tiled N;  // what words are made of

    const AttentionTasks& step;
    const AttentionLayer& layer;
    const AttentionTask& task;
    int64_t count = task.rows * layer.group;           // rows: a token and a query head each
    int64_t words = layer.key_dim / N::PER_WORD;       // of a query and of a key
    int64_t width = round_up(layer.value_dim, LANES);  // of a row of `out`

    // The head's own.
    int32_t* queries = nullptr;  // [count][words]
    float* out = nullptr;        // [count][width]
    float* largest = nullptr;    // [count], scores
    float* sums = nullptr;       // [count][LANES], of weights
    float* totals = nullptr;     // [count][part_floats], of the parts before; of a whole result
    // Used by one head after the other.
    int32_t* keys = nullptr;     // [words][KEYS]
    int32_t* values = nullptr;   // [KEYS / PER_WORD][width]
    typename N::Element* weights = nullptr;  // [QUERY_ROWS][KEYS]
    Element* zeros = nullptr;                // as many as a token's keys or values have

    // Where a row of a head is added up: in all, or in the task's part `number`.
    float* total(int64_t head, int64_t row, int64_t number) const {
        const int64_t size = part_floats(layer.value_dim);
        if (task.part < 0) return totals + row * size;
        const int64_t part = task.part + row / layer.group * task.parts + number;
        return step.parts + ((part * layer.kv_heads + head) * layer.group + row % layer.group) * size;
    }

    int64_t zero_count() const { return layer.kv_heads * max(layer.key_dim, layer.value_dim); }

    void place_head_arrays(ArrayAllocator& memory) {
        queries = memory.take<int32_t>(count * words);
        out = memory.take<float>(count * width);
        largest = memory.take<float>(count);
        sums = memory.take<float>(count * LANES);
        totals = memory.take<float>(task.part < 0 ? count * part_floats(layer.value_dim) : 0);
    }

    void place_common_arrays(ArrayAllocator& memory) {
        keys = memory.take<int32_t>(words * KEYS);
        values = memory.take<int32_t>(KEYS / N::PER_WORD * width);
        weights = memory.take<typename N::Element>(QUERY_ROWS * KEYS);
        zeros = memory.take<Element>(zero_count());
    }
};

// Prefetches cache lines of keys or values, those of one token after the other's.
struct LinesAhead {
    const char *const *token, *const *end;
    int64_t offset, bytes, place = 0;

    bool done() const { return token == end; }

    INLINE_MEMBER void line() {
        if (done()) return;
        __builtin_prefetch(*token + offset + place, 0, 2);
        place += 64;
        if (place < bytes) return;
        place = 0;
        token++;
    }
};

// What is prefetched for the next block while one head is computed: a share of the keys, then of the values. A processor has
// room for few lines at a time, so each step of a product asks for some of them; with 8 lanes there are as many steps as lines.
struct BlockAhead {
    static constexpr int STEP = LANES == 16 ? 2 : 1;
    LinesAhead keys, values;

    INLINE_MEMBER void line() {
        if (!keys.done()) keys.line();
        else values.line();
    }
    INLINE_MEMBER void operator()() {
#pragma GCC unroll 2
        for (int i = 0; i < STEP; i++) line();
    }
    void finish() {
        while (!values.done()) line();
    }
};

// Where the keys and values of KEYS tokens begin: of their first head.
template <class T>
struct KeyBlock {
    typedef typename T::Element Element;
    const Element *keys[KEYS], *values[KEYS];

    // Keys `[first, first + KEYS)` of a task; those that it does not see are zeros.
    void find(const AttentionTasks& step, const AttentionLayer& layer, const AttentionTask& task, int64_t first,
              const Element* zeros) {
        const int64_t key_words = layer.kv_heads * layer.key_dim, value_words = layer.kv_heads * layer.value_dim;
        for (int64_t i = 0; i < KEYS;) {
            const int64_t position = first + i, offset = position % step.block_size;
            const bool seen = position >= task.low && position < task.high;
            const int64_t end = seen ? min(KEYS, i + min(step.block_size - offset, task.high - position)) : i + 1;
            const Element *key = zeros, *value = zeros;
            if (seen) {
                const int64_t block = step.tables[task.table_at + position / step.block_size];
                key = at<T>((const void*)layer.k, (block * step.block_size + offset) * key_words);
                value = at<T>((const void*)layer.v, (block * step.block_size + offset) * value_words);
            }
            for (; i < end; i++, key += key_words, value += value_words) {
                keys[i] = key;
                values[i] = value;
            }
        }
    }

    // The share of heads `[first, last)` that is prefetched while head `head` of the block before is computed: whole tokens.
    BlockAhead ahead(const AttentionLayer& layer, int64_t first, int64_t head, int64_t last) const {
        const int64_t begin = KEYS * (head - first) / (last - first), end = KEYS * (head + 1 - first) / (last - first);
        const int64_t key = layer.key_dim * sizeof(Element), value = layer.value_dim * sizeof(Element);
        const char *const *k = (const char* const*)keys, *const *v = (const char* const*)values;
        return {{k + begin, k + end, first * key, (last - first) * key},
                {v + begin, v + end, first * value, (last - first) * value}};
    }
};

// LANES keys' words `[word, word + LANES)`, or as many as there are, transposed. A key's words begin at `offset`.
template <bool WHOLE, class T>
INLINE void transpose_keys(const typename T::Element* const* keys, int64_t offset, int64_t word, int64_t words,
                           int32_t* to, BlockAhead& ahead) {
    typedef typename T::Tiled N;
    Words block[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const typename T::Element* from = keys[i] + offset + word * N::PER_WORD;
        if (LANES == 16 || i == 0) ahead.line();
        block[i] = WHOLE ? words_of<T, N>(from) : some_words<T, N>(from, words - word);
    }
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (WHOLE || word + i < words) store(to + (word + i) * KEYS, block[i]);
}

// The same for words that are halves of words in memory: LANES keys' `[word, word + 2 * LANES)`, transposed in pairs.
template <class T>
INLINE void transpose_pairs(const typename T::Element* const* keys, int64_t offset, int64_t word, int32_t* to,
                            BlockAhead& ahead) {
    Words block[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (LANES == 16 || i == 0) ahead.line();
        block[i] = load<Words>(keys[i] + offset + word);
    }
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) store(to + (word + 2 * i + half) * KEYS, tiled_words<T>(block[i], half));
}

// `words` words from `from` on; zeros follow, up to `room` words.
template <class T, class N>
INLINE void put_words(const typename T::Element* from, int64_t words, int32_t* to, int64_t room) {
    int64_t i = 0;
    for (; i + LANES <= words; i += LANES) store(to + i, words_of<T, N>(from + i * N::PER_WORD));
    if (i == words) return;
    const Words last = some_words<T, N>(from + i * N::PER_WORD, words - i);
    memcpy(to + i, &last, min(LANES, room - i) * 4);
}

// Lay out a head's keys as `[words][KEYS]` and their values in pairs as `[KEYS / PER_WORD][width]`; meanwhile prefetch
// next keys.
template <class T>
static __attribute__((noinline)) void gather(const Tile<T>& tile, int64_t head, const KeyBlock<T>& current,
                                             bool with_values, BlockAhead& ahead) {
    const int64_t key_dim = tile.layer.key_dim, value_dim = tile.layer.value_dim, words = tile.words;
    const int64_t key = head * key_dim, value = head * value_dim;
    for (int64_t i = 0; i < KEYS; i += LANES) {
        int64_t word = 0;
        if constexpr (T::TILED_WORDS == 2)
            for (; word + 2 * LANES <= words; word += 2 * LANES)
                transpose_pairs<T>(current.keys + i, key, word, tile.keys + i, ahead);
        for (; word + LANES <= words; word += LANES)
            transpose_keys<true, T>(current.keys + i, key, word, words, tile.keys + i, ahead);
        if (word < words) transpose_keys<false, T>(current.keys + i, key, word, words, tile.keys + i, ahead);
    }
    if (!with_values) return;
    typedef typename T::Tiled N;
    for (int64_t i = 0; i < KEYS; i += N::PER_WORD) {
        int32_t* to = tile.values + i / N::PER_WORD * tile.width;
        if constexpr (IN_MEMORY<T, N>)
            T::pair_rows(current.values[i] + value, current.values[i + N::PER_WORD - 1] + value, value_dim, to);
        else
            put_words<T, N>(current.values[i] + value, value_dim, to, tile.width);
    }
}

// Where a word is one number, a row of values can be used as it is in memory.
template <class T>
constexpr bool READS_VALUES_IN_PLACE = T::Tiled::PER_WORD == 1;

// out = out * decay + what `add` adds, for some columns.
template <class T, int ROWS, int COLUMNS, class Add>
INLINE void add_to_columns(const Tile<T>& tile, int64_t row, int64_t column, const float* decay, const Add& add) {
    Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++)
            sums[r][c] = load<Floats>(tile.out + (row + r) * tile.width + column + c * LANES) * decay[r];
    add(sums);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) store(tile.out + (row + r) * tile.width + column + c * LANES, sums[r][c]);
}

// weights x values, of values that are laid out.
template <class T, int ROWS, int COLUMNS>
INLINE void add_values(const Tile<T>& tile, int64_t row, int64_t column, const float* decay, int64_t steps,
                       BlockAhead& ahead) {
    typedef typename T::Tiled N;
    add_to_columns<T, ROWS, COLUMNS>(tile, row, column, decay, [&](Floats(&sums)[ROWS][COLUMNS]) INLINE_LAMBDA {
        multiply<N, ROWS, COLUMNS>(sums, (const int32_t*)tile.weights, KEYS / N::PER_WORD, tile.values + column,
                                   tile.width, steps, ahead);
    });
}

// The same for values that are read where they are, from `values[i] + offset` on.
template <class T, int ROWS, int COLUMNS>
INLINE void add_values_in_place(const Tile<T>& tile, int64_t row, int64_t column, const float* decay, int64_t steps,
                                const typename T::Element* const* values, int64_t offset, BlockAhead& ahead) {
    const float* weights = (const float*)tile.weights;
    add_to_columns<T, ROWS, COLUMNS>(tile, row, column, decay, [&](Floats(&sums)[ROWS][COLUMNS]) INLINE_LAMBDA {
        for (int64_t i = 0; i < steps; i++) {
            const typename T::Element* from = values[i] + offset + column;
            ahead();
            // Of 16 registers, the fewer operands stay in some.
            if constexpr (ROWS < COLUMNS) {
                Floats weight[ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) weight[r] = broadcast(weights[r * KEYS + i]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    const Floats value = T::read(from + c * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; r++) sums[r][c] = fused(weight[r], value, sums[r][c]);
                }
            } else {
                Floats value[COLUMNS];
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) value[c] = T::read(from + c * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    const Floats weight = broadcast(weights[r * KEYS + i]);
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; c++) sums[r][c] = fused(weight, value[c], sums[r][c]);
                }
            }
        }
    });
}

// Rows `[row, row + ROWS)` of the tile over the gathered keys, `[first + begin, first + count)`, and over values that were
// gathered or, with `values_at`, are read where they are, from `offset` on. Inlined, its sums leave their registers.
template <class T, int ROWS>
static __attribute__((noinline)) void attend_rows(const Tile<T>& tile, int64_t row, int64_t first, int64_t begin,
                                                  int64_t count, const typename T::Element* const* values_at,
                                                  int64_t offset, BlockAhead& ahead) {
    const AttentionLayer& layer = tile.layer;
    const AttentionTask& task = tile.task;
    int64_t low[ROWS], high[ROWS];
    bool masked = count < KEYS;
    int64_t widest = 0;
    for (int r = 0; r < ROWS; r++) {
        low[r] = begin;
        high[r] = count;
        if (task.position >= 0) {
            const int64_t position = task.position + (row + r) / layer.group;
            high[r] = min(count, position + 1 - first);
            if (tile.step.window > 0) low[r] = max(begin, position + 1 - tile.step.window - first);
        }
        if (high[r] < KEYS || low[r] > 0) masked = true;
        if (high[r] > low[r]) widest = max(widest, high[r]);
    }
    if (widest == 0) return;
    // The scores of all rows, then one row at a time: mask, softmax, weights.
    typedef typename T::Tiled N;
    constexpr int VECTORS = KEYS / LANES;
    float decay[ROWS];
    Floats products[ROWS * VECTORS];
    // Few rows leave registers for more keys: sums of several vectors do not wait for each other.
    constexpr int TOGETHER = ROWS * VECTORS <= KEY_VECTORS * QUERY_ROWS ? VECTORS : KEY_VECTORS;
#pragma GCC unroll 1
    for (int part = 0; part < VECTORS; part += TOGETHER) {
        Floats scores[ROWS][TOGETHER] = {};
        multiply<N, ROWS, TOGETHER>(scores, tile.queries + row * tile.words, tile.words, tile.keys + part * LANES, KEYS,
                                    tile.words, ahead);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int c = 0; c < TOGETHER; c++) products[r * VECTORS + part + c] = scores[r][c];
    }
    const float scale = layer.scale * LOG2E;
    Words numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; r++) {
        Floats values[VECTORS];
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) {
            values[c] = products[r * VECTORS + c] * scale;
            if (__builtin_expect(layer.softcap > 0, 0))
                values[c] = tanh_of(values[c] * (1.0f / (layer.softcap * LOG2E))) * (layer.softcap * LOG2E);
            if (masked) {
                const Words number = numbers + c * LANES;
                values[c] =
                    select((number < (int32_t)high[r]) & (number >= (int32_t)low[r]), values[c], broadcast(-INFINITE));
            }
        }
        Floats top = values[0];
#pragma GCC unroll 8
        for (int c = 1; c < VECTORS; c++) top = larger(top, values[c]);
        const float old_largest = tile.largest[row + r];
        const float new_largest = largest_of(larger(top, broadcast(old_largest)));
        const float origin = new_largest == -INFINITE ? 0.0f : new_largest;
        // Most blocks have no larger score than those before them.
        const Floats rescale = old_largest == origin ? broadcast(1.0f) : exp2_of<6>(broadcast(old_largest - origin));
        decay[r] = rescale[0];
        Floats sum = load<Floats>(tile.sums + (row + r) * LANES) * rescale;
#pragma GCC unroll 8
        for (int c = 0; c < VECTORS; c++) {
            const Floats weight = exp2_of<T::EXP_DEGREE, true>(values[c] - origin);
            sum += weight;
            N::write(tile.weights + r * KEYS + c * LANES, weight);
        }
        store(tile.sums + (row + r) * LANES, sum);
        tile.largest[row + r] = new_largest;
    }
    const int64_t steps = (widest + N::PER_WORD - 1) / N::PER_WORD;
    int64_t column = 0;
    if constexpr (READS_VALUES_IN_PLACE<T>)
        if (values_at != nullptr) {
            constexpr int MANY = ROWS <= 3 ? 4 : 2;
            for (; column + MANY * LANES <= tile.width; column += MANY * LANES)
                add_values_in_place<T, ROWS, MANY>(tile, row, column, decay, widest, values_at, offset, ahead);
            for (; column < tile.width; column += LANES)
                add_values_in_place<T, ROWS, 1>(tile, row, column, decay, widest, values_at, offset, ahead);
            return;
        }
    for (; column + KEY_VECTORS * LANES <= tile.width; column += KEY_VECTORS * LANES)
        add_values<T, ROWS, KEY_VECTORS>(tile, row, column, decay, steps, ahead);
    for (; column < tile.width; column += LANES) add_values<T, ROWS, 1>(tile, row, column, decay, steps, ahead);
}

// The same for any number of rows up to QUERY_ROWS.
template <class T, int ROWS = QUERY_ROWS>
INLINE void attend_some(int64_t rows, const Tile<T>& tile, int64_t row, int64_t first, int64_t begin, int64_t count,
                        const typename T::Element* const* values_at, int64_t offset, BlockAhead& ahead) {
    if (rows == ROWS) return attend_rows<T, ROWS>(tile, row, first, begin, count, values_at, offset, ahead);
    if constexpr (ROWS > 1) attend_some<T, ROWS - 1>(rows, tile, row, first, begin, count, values_at, offset, ahead);
}

// Add a part of `width` columns to a total. A part without a key that the row sees changes nothing.
static void add_part(float* total, const float* out, float largest, float sum, int64_t width) {
    float &old_largest = total[width], &old_sum = total[width + 1];
    // A sum that is not a number stays one.
    if (largest == -INFINITE && sum == 0) return;
    if (old_largest == -INFINITE && old_sum == 0) {
        memcpy(total, out, width * sizeof(float));
        old_largest = largest;
        old_sum = sum;
        return;
    }
    const float origin = old_largest > largest ? old_largest : largest;
    const Floats old_factor = exp2_of<6>(broadcast(old_largest - origin)), factor = exp2_of<6>(broadcast(largest - origin));
    for (int64_t i = 0; i < width; i += LANES)
        store(total + i, fused(load<Floats>(total + i), old_factor, load<Floats>(out + i) * factor));
    old_sum = old_sum * old_factor[0] + sum * factor[0];
    old_largest = origin;
}

// Normalize a total into the result of one row and head.
template <class T>
static void put_result(const AttentionLayer& layer, const float* total, int64_t query_head, typename T::Element* to) {
    const int64_t dim = layer.value_dim, width = round_up(dim, LANES);
    const float largest = total[width];
    float sum = total[width + 1];
    if (layer.sinks != nullptr) sum += exp2f(layer.sinks[query_head] * LOG2E - largest);
    const float factor = sum > 0 ? 1.0f / sum : 0.0f * sum;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) T::write(to + i, load<Floats>(total + i) * factor);
    for (; i < dim; i++) to[i] = T::from_float(total[i] * factor);
}

// An empty softmax for rows `[first, last)` of a head.
template <class T>
static void empty_rows(const Tile<T>& tile, int64_t first, int64_t last) {
    memset(tile.out + first * tile.width, 0, (last - first) * tile.width * sizeof(float));
    memset(tile.sums + first * LANES, 0, (last - first) * LANES * sizeof(float));
    for (int64_t row = first; row < last; row++) tile.largest[row] = -INFINITE;
}

// Empty totals of a head, or parts.
template <class T>
static void start_totals(const Tile<T>& tile, int64_t head) {
    const int64_t parts = max(tile.task.parts, 1), width = tile.width;
    for (int64_t row = 0; row < tile.count; row++)
        for (int64_t part = 0; part < parts; part++) {
            float* total = tile.total(head, row, part);
            memset(total, 0, part_floats(tile.layer.value_dim) * sizeof(float));
            total[width] = -INFINITE;
        }
}

// Rows `[first, last)` of a head: add what they have to their totals, `number` parts after the task's first, and empty it.
template <class T>
static void end_part(const Tile<T>& tile, int64_t head, int64_t first, int64_t last, int64_t number) {
    for (int64_t row = first; row < last; row++) {
        float* out = tile.out + row * tile.width;
        add_part(tile.total(head, row, number), out, tile.largest[row], sum_of(load<Floats>(tile.sums + row * LANES)),
                 tile.width);
    }
    empty_rows(tile, first, last);
}

// Queries of a KV head from the step's rows, and an empty softmax.
template <class T>
static void start_head(const Tile<T>& tile, int64_t head, const QueryRows& rows) {
    const int64_t group = tile.layer.group;
    empty_rows(tile, 0, tile.count);
    start_totals(tile, head);
    for (int64_t row = 0; row < tile.count; row++) {
        const int64_t token = tile.step.rows[tile.task.rows_at + row / group], query_head = head * group + row % group;
        put_words<T, typename T::Tiled>(at<T>(rows.q, token * rows.q_token + query_head * rows.q_head), tile.words,
                                        tile.queries + row * tile.words, tile.words);
    }
}

// Heads `[first_head, last_head)` of a task, a block of keys at a time: the heads of one key are adjacent in memory.
template <class T>
static void attend_task(const AttentionTasks& step, const AttentionLayer& layer, const QueryRows& rows,
                        const AttentionTask& task, int64_t first_head, int64_t last_head) {
    static thread_local Scratch scratch;
    Tile<T> tile{step, layer, task};
    ArrayAllocator sizes{0};
    tile.place_common_arrays(sizes);
    const uintptr_t common_bytes = sizes.next;
    tile.place_head_arrays(sizes);
    const uintptr_t head_bytes = sizes.next - common_bytes;
    ArrayAllocator memory{(uintptr_t)scratch.reserve(common_bytes + head_bytes * (last_head - first_head))};
    tile.place_common_arrays(memory);
    memset(tile.zeros, 0, tile.zero_count() * sizeof *tile.zeros);
    auto switch_to = [&](int64_t head) {
        ArrayAllocator own{memory.next + head_bytes * (head - first_head)};
        tile.place_head_arrays(own);
    };
    for (int64_t head = first_head; head < last_head; head++) {
        switch_to(head);
        start_head(tile, head, rows);
    }
    auto part_at = [&](int64_t key) { return key / PART_KEYS - task.low / PART_KEYS; };
    // After the last key of some rows, before `high`.
    auto end_parts = [&](int64_t high, int64_t first_row, int64_t last_row) {
        for (int64_t head = first_head; head < last_head; head++) {
            switch_to(head);
            end_part(tile, head, first_row, last_row, part_at(high - 1));
        }
    };
    // Rows `[first_row, last_row)` of the tile over the keys of `seen`.
    auto attend_keys = [&](const AttentionTask& seen, int64_t first_row, int64_t last_row) {
        KeyBlock<T> blocks[2], *current = blocks, *next = blocks + 1;
        // Values that are used once or twice are not laid out.
        const int64_t tiles = (last_row - first_row + QUERY_ROWS - 1) / QUERY_ROWS;
        const int64_t tile_rows = (last_row - first_row + tiles - 1) / tiles;
        const bool in_place = READS_VALUES_IN_PLACE<T> && tiles <= 2 && layer.value_dim == tile.width;
        const int64_t start = seen.low / KEYS * KEYS;
        current->find(step, layer, seen, start, tile.zeros);
        for (int64_t first = start; first < seen.high; first += KEYS) {
            const int64_t begin = max(0, seen.low - first);
            const int64_t count = min(KEYS, seen.high - first);
            next->find(step, layer, seen, first + KEYS, tile.zeros);
            for (int64_t head = first_head; head < last_head; head++) {
                switch_to(head);
                BlockAhead ahead = next->ahead(layer, first_head, head, last_head);
                gather(tile, head, *current, !in_place, ahead);
                for (int64_t row = first_row; row < last_row; row += tile_rows)
                    attend_some<T>(min(tile_rows, last_row - row), tile, row, first, begin, count,
                                   in_place ? current->values : nullptr, head * layer.value_dim, ahead);
                ahead.finish();
                if ((first + KEYS) % PART_KEYS == 0) end_part(tile, head, first_row, last_row, part_at(first));
            }
            std::swap(current, next);
        }
    };
    attend_keys(task, 0, tile.count);
    if (task.position == ALONE_AFTERWARDS)
        for (int64_t i = 0; i < task.rows; i++) {
            const int64_t* own = step.rows + task.rows_at + task.rows + 2 * i;
            attend_keys(AttentionTask{0, 1, own[0], task.high, own[1], -1, -1, 0}, i * layer.group, (i + 1) * layer.group);
            end_parts(own[1], i * layer.group, (i + 1) * layer.group);
        }
    else
        end_parts(task.high, 0, tile.count);
    if (task.part >= 0) return;
    for (int64_t head = first_head; head < last_head; head++) {
        switch_to(head);
        for (int64_t row = 0; row < tile.count; row++) {
            const int64_t token = step.rows[task.rows_at + row / layer.group];
            const int64_t query_head = head * layer.group + row % layer.group;
            put_result<T>(layer, tile.total(head, row, 0), query_head,
                          at<T>(rows.out, (token * layer.kv_heads * layer.group + query_head) * layer.value_dim));
        }
    }
}

// Add up the parts of a row that several tasks computed.
template <class T>
static void merge_row(const AttentionTasks& step, const AttentionLayer& layer, const QueryRows& rows,
                      const Merge& merge) {
    static thread_local Scratch scratch;
    const int64_t heads = layer.kv_heads * layer.group, size = part_floats(layer.value_dim), width = size - 2;
    float* total = (float*)scratch.reserve(size * sizeof(float));
    for (int64_t head = 0; head < heads; head++) {
        total[width] = -INFINITE;
        total[width + 1] = 0;
        for (int64_t i = 0; i < merge.count; i++) {
            const float* part = step.parts + (step.merged[merge.first + i] * heads + head) * size;
            add_part(total, part, part[width], part[width + 1], width);
        }
        put_result<T>(layer, total, head, at<T>(rows.out, (merge.row * heads + head) * layer.value_dim));
    }
}

// A longer task, by its rows in all heads, is an item of work per KV head. Others have several heads in an item, whose keys are
// adjacent in memory, and one item where there are enough tasks for the threads.
constexpr int64_t MAX_ROWS_OF_ALL_HEADS = 256;

template <class T>
static void attend(const AttentionTasks& step, const AttentionLayer& layer, const QueryRows& rows, ThreadTeam& team) {
    const int64_t wanted = step.num_tasks < team.threads || team.threads == 1 ? team.threads : 2 * team.threads;
    const int64_t heads = min(max(layer.kv_heads * step.num_tasks / wanted, 1), layer.kv_heads);
    auto heads_of = [&](const AttentionTask& task) {
        return task.rows * layer.group * layer.kv_heads <= MAX_ROWS_OF_ALL_HEADS ? heads : 1;
    };
    static thread_local std::vector<int64_t> items;
    items.clear();
    for (int64_t task = 0; task < step.num_tasks; task++)
        for (int64_t head = 0; head < layer.kv_heads; head += heads_of(step.tasks[task]))
            items.push_back(task * layer.kv_heads + head);
    const int64_t* found = items.data();
    team.share((int64_t)items.size(), [&](int64_t item) {
        const AttentionTask& task = step.tasks[found[item] / layer.kv_heads];
        const int64_t head = found[item] % layer.kv_heads;
        attend_task<T>(step, layer, rows, task, head, min(head + heads_of(task), layer.kv_heads));
    });
    if (step.num_merges > 0)
        team.share(step.num_merges, [&](int64_t item) { merge_row<T>(step, layer, rows, step.merges[item]); });
}

// Row i of `keys` and `values` goes into slot `slots[i]`; -1: it is there already.
template <class T>
static void write(const AttentionLayer& layer, const int64_t* slots, int64_t tokens, const void* keys, int64_t k_token,
                  int64_t k_head, const void* values, int64_t v_token, int64_t v_head) {
    for (int64_t token = 0; token < tokens; token++) {
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < layer.kv_heads; head++) {
            const int64_t place = slots[token] * layer.kv_heads + head;
            memcpy(at<T>(layer.k, place * layer.key_dim), at<T>(keys, token * k_token + head * k_head),
                   layer.key_dim * sizeof(typename T::Element));
            memcpy(at<T>(layer.v, place * layer.value_dim), at<T>(values, token * v_token + head * v_head),
                   layer.value_dim * sizeof(typename T::Element));
        }
    }
}
