// Products with a packed weight: `out = x W^T + bias + residual`.
//
// A packed weight is a sequence of panels of PANEL output columns; a panel is `[words of K][PANEL]`, so it is read from
// one end to the other. Weights of 8-bit integers have a scale for each output.
#pragma once

#include "threads.h"
#include "vectors.h"

constexpr int PANEL = PANEL_VECTORS * LANES;
constexpr int64_t BYTES_AHEAD = 1024;

struct PackedWeight {
    const int32_t* packed;
    const float* bias;    // `[outputs]`, or null
    const float* scales;  // `[outputs]` for weights of 8-bit integers, or null
    int64_t inputs, outputs;
};

template <class T>
static int64_t packed_words(int64_t inputs, int64_t outputs) {
    return round_up(outputs, PANEL) * (inputs / T::PER_WORD);
}

// `weight` is `[outputs, words]`; its first output is output number `first` of `target`.
template <class Word>
static void pack(const void* weight, int64_t words, int64_t outputs, int64_t first, void* target, ThreadTeam& team) {
    const Word* rows = (const Word*)weight;
    Word* packed = (Word*)target;
    team.share((outputs + PANEL - 1) / PANEL, [=](int64_t block) {
        for (int64_t output = block * PANEL; output < min(outputs, (block + 1) * PANEL); output++) {
            const int64_t place = first + output;
            Word* to = packed + place / PANEL * PANEL * words + place % PANEL;
            for (int64_t word = 0; word < words; word++) to[word * PANEL] = rows[output * words + word];
        }
    });
}

// `out = x W^T + bias + residual`: `x` is `[rows, inputs]` with rows `x_stride` apart, `out` and `residual` (or null)
// are `[rows, outputs]` with rows `out_stride` apart.
struct Operands {
    const void* x;
    int64_t x_stride;
    int64_t rows;
    const void* residual;
    void* out;
    int64_t out_stride;
};

// Columns of one row in the last panel, which may have fewer columns than PANEL.
template <class T>
static __attribute__((noinline)) void put_partial_panel(const float* sums, const PackedWeight& weight, int64_t column,
                                                        const Operands& operands, int64_t place) {
    for (int64_t i = 0; i < weight.outputs - column; i++) {
        float value = weight.scales != nullptr ? sums[i] * weight.scales[column + i] : sums[i];
        if (weight.bias != nullptr) value += weight.bias[column + i];
        if (operands.residual != nullptr)
            value = T::to_float(T::from_float(value)) + T::to_float(*at<T>(operands.residual, place + i));
        *at<T>(operands.out, place + i) = T::from_float(value);
    }
}

// Columns `[column, column + PANEL)` of ROWS rows.
template <class T, int ROWS>
INLINE void put(Floats (&sums)[ROWS][PANEL_VECTORS], const PackedWeight& weight, int64_t column,
                const Operands& operands, int64_t row) {
    float values[ROWS * PANEL];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < PANEL_VECTORS; c++) store(values + r * PANEL + c * LANES, sums[r][c]);
    const bool whole = column + PANEL <= weight.outputs;
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; r++) {
        const int64_t place = (row + r) * operands.out_stride + column;
        if (!whole) {
            put_partial_panel<T>(values + r * PANEL, weight, column, operands, place);
            continue;
        }
        for (int c = 0; c < PANEL_VECTORS; c++) {
            Floats value = load<Floats>(values + r * PANEL + c * LANES);
            if (weight.scales != nullptr) value *= load<Floats>(weight.scales + column + c * LANES);
            if (weight.bias != nullptr) value += load<Floats>(weight.bias + column + c * LANES);
            if (operands.residual != nullptr)
                value = T::rounded(value) + T::read(at<T>(operands.residual, place + c * LANES));
            T::write(at<T>(operands.out, place + c * LANES), value);
        }
    }
}

// ROWS rows, from `row` on, times the panel of outputs that begins at `column`. For each word of a row LINES cache
// lines at `ahead` are prefetched. `tile` are the rows' words side by side, or null: they are read where they are.
template <class T, int ROWS, int LINES>
static void multiply_rows(const PackedWeight& weight, const int32_t* panel, int64_t column, const Operands& operands,
                          int64_t row, const int32_t* tile, const char* ahead) {
    Floats sums[ROWS][PANEL_VECTORS] = {};
    const int64_t steps = weight.inputs / T::PER_WORD, stride = PANEL / T::PACKING;
    Lines<(T::PACKING > 1 && LINES > 1 ? 1 : LINES)> lines{ahead};
    if (LINES < 2 || T::CONVERTED || (T::TILED_WORDS > 1 && tile != nullptr)) {
        multiply_tiled<T, ROWS, PANEL_VECTORS>(sums, tile, panel, stride, steps, lines);
    } else {
        const int32_t* words = (const int32_t*)at<T>(operands.x, row * operands.x_stride);
        multiply<T, ROWS, PANEL_VECTORS>(sums, words, operands.x_stride / T::PER_WORD, panel, stride, steps, lines);
    }
    put<T, ROWS>(sums, weight, column, operands, row);
}

// The same for any number of rows up to TILE_ROWS.
template <class T, int LINES, int ROWS = TILE_ROWS>
INLINE void multiply_panel(int rows, const PackedWeight& weight, const int32_t* panel, int64_t column,
                           const Operands& operands, int64_t row, const int32_t* tile, const char* ahead) {
    if (rows == ROWS) return multiply_rows<T, ROWS, LINES>(weight, panel, column, operands, row, tile, ahead);
    if constexpr (ROWS > 1) multiply_panel<T, LINES, ROWS - 1>(rows, weight, panel, column, operands, row, tile, ahead);
}

// Words of a tile, and between one tile and the next: a vector is stored at once, so the last goes beyond the end.
template <class T>
static int64_t tile_words(int64_t inputs) {
    return round_up(T::TILED_WORDS * TILE_ROWS * (inputs / T::PER_WORD) + LANES, LANES);
}

// ROWS rows times PANELS panels side by side, the first at `panel` and for the outputs from `column` on. A core reads memory
// faster in several streams, and sums of several panels do not wait for each other. `words` are the rows' words,
// `row` words from one row to the next, and `next` from one word of a row to the next.
template <class T, int ROWS, int PANELS>
static void multiply_panels(const PackedWeight& weight, const int32_t* panel, int64_t column, const Operands& operands,
                            const int32_t* words, int64_t row, int64_t next) {
    constexpr int64_t STEP = PANEL / T::PACKING;  // a panel's words for each word of a row
    const int64_t steps = weight.inputs / T::PER_WORD;
    Floats sums[PANELS][ROWS][PANEL_VECTORS] = {};
    for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            const int32_t* from = panel + (p * steps + step) * STEP;
#pragma GCC unroll 2
            for (int line = 0; line < STEP * 4; line += 64)
                __builtin_prefetch((const char*)from + BYTES_AHEAD + line, 0, 3);
#pragma GCC unroll 4
            for (int c = 0; c < PANEL_VECTORS; c++) {
                const int32_t* at = from + c * LANES / T::PACKING;
                if constexpr (T::TILED_WORDS == 2) {
                    Floats pairs[2];
                    read_pairs<T>(at, pairs);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; r++) {
                            const Words word = tiled_words<T>(broadcast(words[r * row + step * next]), half);
                            sums[p][r][c] = fused((Floats)word, pairs[half], sums[p][r][c]);
                        }
                } else {
                    const Words weights = in_register(T::columns(at));
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; r++)
                        sums[p][r][c] = T::multiply_add(sums[p][r][c], broadcast(words[r * row + step * next]), weights);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) put<T, ROWS>(sums[p], weight, column + p * PANEL, operands, 0);
}

// The words of `rows` rows from `row` on, side by side. Rows that are a power of two apart would share a few sets of the
// cache, and bfloat16 would be widened once for each panel.
template <class T>
static void lay_out_tile(const Operands& operands, int64_t inputs, int64_t row, int rows, int32_t* tile) {
    const int64_t words = inputs / T::PER_WORD, stride = operands.x_stride;
    const typename T::Element* from = at<T>(operands.x, row * stride);
    int64_t word = 0;
    for (; word + LANES <= words; word += LANES) {
        Words block[LANES];
        for (int r = 0; r < LANES; r++)
            block[r] = r < rows ? words_of<T>(from + r * stride + word * T::PER_WORD) : Words{};
        transpose(block);
        for (int i = 0; i < LANES; i++)
            for (int half = 0; half < T::TILED_WORDS; half++)
                store(tile + ((word + i) * T::TILED_WORDS + half) * rows, tiled_words<T>(block[i], half));
    }
    for (; word < words; word++)
        for (int half = 0; half < T::TILED_WORDS; half++)
            for (int r = 0; r < rows; r++)
                tile[(word * T::TILED_WORDS + half) * rows + r] =
                    tiled_words<T>(some_words<T>(from + r * stride + word * T::PER_WORD, 1), half)[0];
}

// A panel of 8-bit integers as the words that it stands for.
template <class T>
static const int32_t* widen_panel(const int32_t* panel, int64_t words, const char* ahead) {
    static thread_local Scratch scratch;
    int32_t* wide = (int32_t*)scratch.reserve(words * 4);
    for (int64_t word = 0; word < words; word += LANES) {
        const int32_t* from = panel + word / T::PACKING;
        __builtin_prefetch(ahead + ((const char*)from - (const char*)panel), 0, 2);
        store(wide + word, T::columns(from));
    }
    return wide;
}

template <class T>
static void multiply_weights(const PackedWeight& weight, const Operands& operands, ThreadTeam& team) {
    if (operands.rows == 0) return;
    typedef typename T::Number Number;
    const int64_t panels = (weight.outputs + PANEL - 1) / PANEL, words = PANEL * (weight.inputs / T::PER_WORD);
    const int64_t size = words / T::PACKING;
    const int64_t tiles = (operands.rows + TILE_ROWS - 1) / TILE_ROWS;
    // A thread reads its panels one after the other, and prefetches the next one while it multiplies by this one.
    int64_t run = max(1, panels / (team.threads * 4));
    const int64_t together = operands.rows > 3 ? 1 : operands.rows == 1 ? 4 : 2;
    if (run * 2 >= together) run = round_up(run, together);
    static thread_local Scratch scratch;
    const int64_t pitch = tile_words<T>(weight.inputs);
    int32_t* laid_out = nullptr;
    if (tiles > 1 || T::CONVERTED || (T::TILED_WORDS > 1 && operands.rows > 2 && together == 1)) {
        laid_out = (int32_t*)scratch.reserve(tiles * pitch * 4);
        team.share(tiles, [&](int64_t i) {
            const int64_t row = operands.rows * i / tiles;
            lay_out_tile<T>(operands, weight.inputs, row, (int)(operands.rows * (i + 1) / tiles - row),
                            laid_out + i * pitch);
        });
    }
    team.share((panels + run - 1) / run, [&](int64_t item) {
        int64_t number = item * run;
        const int64_t end = min(panels, number + run);
        for (; together > 1 && number + together <= end; number += together) {
            const int32_t* panel = weight.packed + number * size;
            const auto multiply = operands.rows == 1   ? multiply_panels<T, 1, 4>
                                  : operands.rows == 2 ? multiply_panels<T, 2, 2>
                                                       : multiply_panels<T, 3, 2>;
            if (laid_out != nullptr)
                multiply(weight, panel, number * PANEL, operands, laid_out, 1, operands.rows);
            else
                multiply(weight, panel, number * PANEL, operands, (const int32_t*)operands.x,
                         operands.x_stride / T::PER_WORD, 1);
        }
        for (; number < end; number++) {
            const int32_t* panel = weight.packed + number * size;
            const char* ahead = (const char*)(number + 1 < panels ? panel + size : panel);
            const int64_t column = number * PANEL;
            // With more rows the panel is converted once for all of them.
            const bool wide = T::PACKING > 1 && tiles > 1;
            if (wide) panel = widen_panel<T>(panel, words, ahead);
            int64_t row = 0;
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t end = operands.rows * (i + 1) / tiles;
                const int rows = (int)(end - row);
                const int32_t* tile = laid_out == nullptr ? nullptr : laid_out + i * pitch;
                if (tiles == 1) {
                    multiply_panel<T, 2>(rows, weight, panel, column, operands, row, tile, ahead);
                } else if (i < 2 && !wide) {
                    multiply_panel<Number, 1>(rows, weight, panel, column, operands, row, tile, ahead + i * size * 2);
                } else {
                    multiply_panel<Number, 0>(rows, weight, panel, column, operands, row, tile, ahead);
                }
                row = end;
            }
        }
    });
}

template <class T>
static void multiply_packed(const PackedWeight& weight, const Operands& operands, ThreadTeam& team) {
    if (weight.scales != nullptr) return multiply_weights<Int8<T>>(weight, operands, team);
    multiply_weights<std::conditional_t<std::is_same_v<T, Float16>, StoredFloat16, T>>(weight, operands, team);
}
