// Attention over paged, token-major K and V that are read where they lie.
//
// A task is a few tokens of the step that see the same keys `[low, high)` of one block table: a tile of a prompt's chunk, a decoding
// sequence, or all sequences that share a prefix. For each KV head the queries of its query heads are rows of one matrix, so a key is read
// once for all of them. Keys are taken KEYS at a time: transposed into words, multiplied by the queries, weighted by an online softmax (base 2),
// and their values, paired, are added up (FlashAttention, Dao et al. 2022). A sequence cut into several tasks is put together afterwards
// from each part's output and log-sum-exp.
#pragma once

#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

constexpr int KEYS = KEY_VECTORS * LANES;

struct Task {
    int64_t rows_at, rows;  // in `Plan.rows`
    int64_t table_at;       // in `Plan.tables`
    int64_t low, high;      // positions of the keys
    int64_t position;       // of the first row; -1: every row sees all keys
    int64_t part;           // where the rows' parts begin; -1: the result is whole
};

struct Merge {
    int64_t row, first, count;  // parts `[first, first + count)` of `Plan.merged`
};

struct Plan {
    const Task* tasks;
    int64_t num_tasks;
    const int64_t* rows;
    const int64_t* tables;
    const Merge* merges;
    int64_t num_merges;
    const int64_t* merged;
    float* parts;  // `[parts, heads, value_dim + 1]`: output, log-sum-exp
    int64_t window;
    int64_t block_size;
};

struct Layer {
    void *k, *v;  // `[slots, kv_heads, dim]`
    int64_t kv_heads, group, key_dim, value_dim;
    const float* sinks;  // `[heads]`, or null
    float scale, softcap;
};

struct Rows {
    const void* q;
    void* out;
    int64_t q_token, q_head;  // elements from one token, and from one head, to the next; `out` is `[tokens, heads, value_dim]`
};

template <class T>
struct Tile {
    const Plan& plan;
    const Layer& layer;
    const Task& task;
    int64_t count, words, width;
    int32_t* queries;           // [rows][words]
    float *out, *largest, *sums;  // [rows][width], [rows], [rows][LANES]
    int32_t *keys, *values;     // [words][KEYS], [KEYS / PER_WORD][width]
    typename T::Element* weights;  // [QUERY_ROWS][KEYS]
};

// The slots of keys `[first, first + count)`.
static void find_slots(const Plan& plan, const Task& task, int64_t first, int64_t count, int64_t* slots) {
    const int64_t* block = plan.tables + task.table_at + first / plan.block_size;
    int64_t offset = first % plan.block_size;
    for (int64_t i = 0; i < count; i++) {
        slots[i] = *block * plan.block_size + offset;
        if (++offset == plan.block_size) {
            offset = 0;
            block++;
        }
    }
}

// Ask for the keys and values of a head that are wanted next.
template <class T>
INLINE void prefetch(const Layer& layer, int64_t head, const int64_t* slots, int64_t count) {
    const int64_t key_bytes = layer.key_dim * sizeof(typename T::Element), value_bytes = layer.value_dim * sizeof(typename T::Element);
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = slots[i] * layer.kv_heads + head;
        const char* key = (const char*)layer.k + place * key_bytes;
        const char* value = (const char*)layer.v + place * value_bytes;
        for (int64_t byte = 0; byte < key_bytes; byte += 64) __builtin_prefetch(key + byte, 0, 2);
        for (int64_t byte = 0; byte < value_bytes; byte += 64) __builtin_prefetch(value + byte, 0, 2);
    }
}

// Keys in some slots, while others are asked for that are `wanted` next: as `[words][KEYS]`, and their values in pairs as `[KEYS / PER_WORD][width]`; zero where there are none.
template <class T>
static __attribute__((noinline)) void gather(const Tile<T>& tile, int64_t head, const int64_t* slots, int64_t count, const int64_t* wanted, int64_t num_wanted) {
    const Layer& layer = tile.layer;
    const typename T::Element *keys[KEYS], *values[KEYS];
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = slots[i] * layer.kv_heads + head;
        keys[i] = at<T>((const void*)layer.k, place * layer.key_dim);
        values[i] = at<T>((const void*)layer.v, place * layer.value_dim);
    }
    for (int64_t i = 0; i < KEYS; i += LANES) {
        // A few at a time: a processor drops what it cannot note.
        prefetch<T>(layer, head, wanted + i, least(LANES, num_wanted - i));
        for (int64_t word = 0; word < tile.words; word += LANES) {
            const int64_t left = least(LANES, tile.words - word);
            Words block[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                if (i + j >= count) {
                    block[j] = Words{};
                } else if (left == LANES) {
                    block[j] = load<Words>((const int32_t*)keys[i + j] + word);
                } else {
                    Words some{};
                    memcpy(&some, (const int32_t*)keys[i + j] + word, left * 4);
                    block[j] = some;
                }
            }
            transpose(block);
            for (int64_t j = 0; j < left; j++) store(tile.keys + (word + j) * KEYS + i, block[j]);
        }
    }
    const int64_t dim = layer.value_dim, whole = dim / LANES * LANES;
    typename T::Element first_end[LANES], second_end[LANES];
    const typename T::Element nothing[LANES] = {};
    for (int64_t i = 0; i < up_to(count, KEYS); i += T::PER_WORD) {
        int32_t* to = tile.values + i / T::PER_WORD * tile.width;
        const int64_t held = least(T::PER_WORD, count - i);
        const typename T::Element* one = held > 0 ? values[i] : nullptr;
        const typename T::Element* two = held > 1 ? values[i + 1] : nullptr;
        for (int64_t j = 0; j < whole; j += LANES)
            store(to + j, T::pair(one ? one + j : nothing, two ? two + j : nothing));
        if (whole < dim) {
            memset(first_end, 0, sizeof first_end);
            memset(second_end, 0, sizeof second_end);
            if (one) memcpy(first_end, one + whole, (dim - whole) * sizeof *one);
            if (two) memcpy(second_end, two + whole, (dim - whole) * sizeof *two);
            store(to + whole, T::pair(first_end, second_end));
        }
    }
}

template <class T, int ROWS, int COLUMNS>
INLINE void add_values(const Tile<T>& tile, int64_t row, int64_t column, const float* decay, int64_t steps) {
    Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = load<Floats>(tile.out + (row + r) * tile.width + column + c * LANES) * decay[r];
    multiply<T, ROWS, COLUMNS, 0>(sums, (const int32_t*)tile.weights, KEYS / T::PER_WORD, tile.values + column, tile.width, steps, nullptr);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) store(tile.out + (row + r) * tile.width + column + c * LANES, sums[r][c]);
}

// Rows `[row, row + ROWS)` of the tile over the gathered keys, the first of which is `first`.
template <class T, int ROWS>
static void attend_rows(const Tile<T>& tile, int64_t row, int64_t first, int64_t count) {
    const Layer& layer = tile.layer;
    const Task& task = tile.task;
    int64_t low[ROWS], high[ROWS];
    bool masked = count < KEYS;
    int64_t widest = 0;
    for (int r = 0; r < ROWS; r++) {
        low[r] = 0;
        high[r] = count;
        if (task.position >= 0) {
            const int64_t position = task.position + (row + r) / layer.group;
            high[r] = least(count, position + 1 - first);
            if (tile.plan.window > 0) low[r] = most(0, position + 1 - tile.plan.window - first);
        }
        if (high[r] < KEYS || low[r] > 0) masked = true;
        if (high[r] > low[r]) widest = most(widest, high[r]);
    }
    if (widest == 0) return;
    Floats scores[ROWS][KEY_VECTORS] = {};
    multiply<T, ROWS, KEY_VECTORS, 0>(scores, tile.queries + row * tile.words, tile.words, tile.keys, KEYS, tile.words, nullptr);
    float decay[ROWS];
    Floats held[ROWS * KEY_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < KEY_VECTORS; c++) held[r * KEY_VECTORS + c] = scores[r][c];
    const float scale = layer.scale * LOG2E;
    Words numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; r++) {
        Floats values[KEY_VECTORS];
#pragma GCC unroll 4
        for (int c = 0; c < KEY_VECTORS; c++) {
            values[c] = held[r * KEY_VECTORS + c] * scale;
            if (__builtin_expect(layer.softcap > 0, 0))
                values[c] = tanh_of(values[c] * (1.0f / (layer.softcap * LOG2E))) * (layer.softcap * LOG2E);
            if (masked) {
                const Words number = numbers + c * LANES;
                values[c] = choose((number < (int32_t)high[r]) & (number >= (int32_t)low[r]), values[c], all(-INFINITE));
            }
        }
        Floats top = values[0];
#pragma GCC unroll 4
        for (int c = 1; c < KEY_VECTORS; c++) top = larger(top, values[c]);
        const float before = tile.largest[row + r];
        const float now = largest_of(larger(top, all(before)));
        const float origin = now == -INFINITE ? 0.0f : now;
        const Floats fall = exp2_of<6>(all(before - origin));
        decay[r] = fall[0];
        Floats sum = load<Floats>(tile.sums + (row + r) * LANES) * fall;
#pragma GCC unroll 4
        for (int c = 0; c < KEY_VECTORS; c++) {
            const Floats weight = exp2_of<T::EXP_DEGREE>(values[c] - origin);
            sum += weight;
            T::write(tile.weights + r * KEYS + c * LANES, weight);
        }
        store(tile.sums + (row + r) * LANES, sum);
        tile.largest[row + r] = now;
    }
    const int64_t steps = (widest + T::PER_WORD - 1) / T::PER_WORD;
    int64_t column = 0;
    for (; column + KEY_VECTORS * LANES <= tile.width; column += KEY_VECTORS * LANES) add_values<T, ROWS, KEY_VECTORS>(tile, row, column, decay, steps);
    for (; column < tile.width; column += LANES) add_values<T, ROWS, 1>(tile, row, column, decay, steps);
}

template <class T, int ROWS = QUERY_ROWS>
INLINE void attend_some(int64_t rows, const Tile<T>& tile, int64_t row, int64_t first, int64_t count) {
    if (rows == ROWS) return attend_rows<T, ROWS>(tile, row, first, count);
    if constexpr (ROWS > 1) attend_some<T, ROWS - 1>(rows, tile, row, first, count);
}

template <class T>
static void finish(const Tile<T>& tile, int64_t head, const Rows& rows) {
    const Layer& layer = tile.layer;
    const int64_t heads = layer.kv_heads * layer.group, dim = layer.value_dim;
    for (int64_t row = 0; row < tile.count; row++) {
        const int64_t query_head = head * layer.group + row % layer.group, number = row / layer.group;
        float sum = sum_of(load<Floats>(tile.sums + row * LANES));
        const float largest = tile.largest[row];
        const float* found = tile.out + row * tile.width;
        if (tile.task.part >= 0) {
            float* part = tile.plan.parts + ((tile.task.part + number) * heads + query_head) * (dim + 1);
            for (int64_t i = 0; i < dim; i++) part[i] = sum > 0 ? found[i] / sum : 0.0f;
            part[dim] = largest + log2f(sum);
            continue;
        }
        if (layer.sinks != nullptr) sum += exp2f(layer.sinks[query_head] * LOG2E - largest);
        const float factor = sum > 0 ? 1.0f / sum : 0.0f * sum;
        typename T::Element* to = at<T>(rows.out, (tile.plan.rows[tile.task.rows_at + number] * heads + query_head) * dim);
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) T::write(to + i, load<Floats>(found + i) * factor);
        for (; i < dim; i++) to[i] = T::of(found[i] * factor);
    }
}

// Heads `[first_head, last_head)` of a task, a block of keys at a time: what lies together in memory is read together.
template <class T>
static void attend_task(const Plan& plan, const Layer& layer, const Rows& rows, const Task& task, int64_t first_head, int64_t last_head) {
    static thread_local Scratch scratch;
    const int64_t count = task.rows * layer.group, words = layer.key_dim / T::PER_WORD, width = up_to(layer.value_dim, LANES);
    const int64_t own[] = {count * words, count * width, count, count * LANES};
    const int64_t common[] = {words * KEYS, KEYS / T::PER_WORD * width, QUERY_ROWS * KEYS};
    int64_t own_bytes = 0, bytes = 0;
    for (int64_t size : own) own_bytes += up_to(size * 4, 64);
    for (int64_t size : common) bytes += up_to(size * 4, 64);
    char* place = scratch.of(bytes + own_bytes * (last_head - first_head));
    char *places[7], *next = place;
    for (int i = 0; i < 3; i++) {
        places[4 + i] = next;
        next += up_to(common[i] * 4, 64);
    }
    auto tile_of_head = [&](int64_t head) {
        char* here = place + bytes + own_bytes * (head - first_head);
        for (int i = 0; i < 4; i++) {
            places[i] = here;
            here += up_to(own[i] * 4, 64);
        }
        return Tile<T>{plan, layer, task, count, words, width, (int32_t*)places[0], (float*)places[1], (float*)places[2], (float*)places[3], (int32_t*)places[4], (int32_t*)places[5], (typename T::Element*)places[6]};
    };
    for (int64_t head = first_head; head < last_head; head++) {
        const Tile<T> tile = tile_of_head(head);
        memset(tile.out, 0, count * width * 4);
        memset(tile.sums, 0, count * LANES * 4);
        for (int64_t row = 0; row < count; row++) {
            tile.largest[row] = -INFINITE;
            const int64_t token = plan.rows[task.rows_at + row / layer.group], query_head = head * layer.group + row % layer.group;
            memcpy(tile.queries + row * words, at<T>(rows.q, token * rows.q_token + query_head * rows.q_head), words * 4);
        }
    }
    int64_t slots[2 * KEYS], *now = slots, *then = slots + KEYS;
    find_slots(plan, task, task.low, least(KEYS, task.high - task.low), now);
    for (int64_t first = task.low; first < task.high; first += KEYS) {
        const int64_t held = least(KEYS, task.high - first), wanted = least(KEYS, task.high - first - held);
        find_slots(plan, task, first + held, wanted, then);
        for (int64_t head = first_head; head < last_head; head++) {
            const Tile<T> tile = tile_of_head(head);
            gather(tile, head, now, held, then, wanted);
            for (int64_t row = 0; row < count; row += QUERY_ROWS) attend_some<T>(least(QUERY_ROWS, count - row), tile, row, first, held);
        }
        std::swap(now, then);
    }
    for (int64_t head = first_head; head < last_head; head++) finish(tile_of_head(head), head, rows);
}

template <class T>
static void merge_row(const Plan& plan, const Layer& layer, const Rows& rows, const Merge& merge) {
    const int64_t heads = layer.kv_heads * layer.group, dim = layer.value_dim;
    for (int64_t head = 0; head < heads; head++) {
        float largest = -INFINITE, sum = 0;
        auto part = [&](int64_t i) { return plan.parts + (plan.merged[merge.first + i] * heads + head) * (dim + 1); };
        for (int64_t i = 0; i < merge.count; i++) largest = fmaxf(largest, part(i)[dim]);
        for (int64_t i = 0; i < merge.count; i++) sum += exp2f(part(i)[dim] - largest);
        if (layer.sinks != nullptr) sum += exp2f(layer.sinks[head] * LOG2E - largest);
        typename T::Element* to = at<T>(rows.out, (merge.row * heads + head) * dim);
        for (int64_t j = 0; j < dim; j++) {
            float value = 0;
            for (int64_t i = 0; i < merge.count; i++) value += exp2f(part(i)[dim] - largest) * part(i)[j];
            to[j] = T::of(value / sum);
        }
    }
}

// Rows of all heads of a task, up to which the heads are one item of work.
constexpr int64_t ROWS_TOGETHER = 256;

template <class T>
static void attend(const Plan& plan, const Layer& layer, const Rows& rows, Team& team) {
    const bool enough = plan.num_tasks >= 2 * team.threads || team.threads == 1;
    auto heads_of = [&](const Task& task) { return enough && task.rows * layer.group * layer.kv_heads <= ROWS_TOGETHER ? layer.kv_heads : 1; };
    static thread_local std::vector<int64_t> items;
    items.clear();
    for (int64_t task = 0; task < plan.num_tasks; task++)
        for (int64_t head = 0; head < layer.kv_heads; head += heads_of(plan.tasks[task])) items.push_back(task * layer.kv_heads + head);
    const int64_t* found = items.data();
    team.share((int64_t)items.size(), [&](int64_t item) {
        const Task& task = plan.tasks[found[item] / layer.kv_heads];
        const int64_t head = found[item] % layer.kv_heads;
        attend_task<T>(plan, layer, rows, task, head, head + heads_of(task));
    });
    if (plan.num_merges > 0) team.share(plan.num_merges, [&](int64_t item) { merge_row<T>(plan, layer, rows, plan.merges[item]); });
}

// Row i of `keys` and `values` goes into slot `slots[i]`; -1: it lies there already.
template <class T>
static void write(const Layer& layer, const int64_t* slots, int64_t tokens, const void* keys, int64_t k_token, int64_t k_head, const void* values, int64_t v_token, int64_t v_head) {
    for (int64_t token = 0; token < tokens; token++) {
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < layer.kv_heads; head++) {
            const int64_t place = slots[token] * layer.kv_heads + head;
            memcpy(at<T>(layer.k, place * layer.key_dim), at<T>(keys, token * k_token + head * k_head), layer.key_dim * sizeof(typename T::Element));
            memcpy(at<T>(layer.v, place * layer.value_dim), at<T>(values, token * v_token + head * v_head), layer.value_dim * sizeof(typename T::Element));
        }
    }
}
