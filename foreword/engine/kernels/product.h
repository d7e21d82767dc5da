// Products with a weight that was packed beforehand: `out = x W^T + bias + residual`.
//
// A packed weight is a sequence of panels of PANEL output columns; a panel is `[words of K][PANEL]`, so it is read from one end to the other.
#pragma once

#include "threads.h"
#include "vectors.h"

constexpr int PANEL = PANEL_VECTORS * LANES;

struct Product {
    const int32_t* packed;
    const float* bias;  // `[outputs]`, or null
    int64_t inputs, outputs;
};

template <class T>
static int64_t packed_words(int64_t inputs, int64_t outputs) {
    return up_to(outputs, PANEL) * (inputs / T::PER_WORD);
}

// `weight` is `[outputs, inputs]`; `first` is the place of its first output among those of `packed`.
template <class T>
static void pack(const void* weight, int64_t inputs, int64_t outputs, int64_t first, int32_t* packed, Team& team) {
    const int64_t words = inputs / T::PER_WORD;
    const int32_t* rows = (const int32_t*)weight;
    team.share((outputs + PANEL - 1) / PANEL, [=](int64_t block) {
        for (int64_t output = block * PANEL; output < least(outputs, (block + 1) * PANEL); output++) {
            const int64_t place = first + output;
            int32_t* to = packed + place / PANEL * PANEL * words + place % PANEL;
            for (int64_t word = 0; word < words; word++) to[word * PANEL] = rows[output * words + word];
        }
    });
}

// The last panel of a weight may have fewer columns than a panel.
template <class T>
static __attribute__((noinline)) void put_some(const float* values, const Product& product, int64_t column, const void* residual, void* out, int64_t place) {
    for (int64_t i = 0; i < product.outputs - column; i++) {
        float value = values[i] + (product.bias != nullptr ? product.bias[column + i] : 0.0f);
        if (residual != nullptr) value = T::to_float(T::of(value)) + T::to_float(*at<T>(residual, place + i));
        *at<T>(out, place + i) = T::of(value);
    }
}

template <class T, int ROWS>
INLINE void put(Floats (&sums)[ROWS][PANEL_VECTORS], const Product& product, int64_t column, const void* residual, void* out, int64_t row, int64_t out_stride) {
    float values[ROWS * PANEL];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < PANEL_VECTORS; c++) store(values + r * PANEL + c * LANES, sums[r][c]);
    const bool whole = column + PANEL <= product.outputs;
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; r++) {
        const int64_t place = (row + r) * out_stride + column;
        if (!whole) {
            put_some<T>(values + r * PANEL, product, column, residual, out, place);
            continue;
        }
        for (int c = 0; c < PANEL_VECTORS; c++) {
            Floats value = load<Floats>(values + r * PANEL + c * LANES);
            if (product.bias != nullptr) value += load<Floats>(product.bias + column + c * LANES);
            if (residual != nullptr) value = T::rounded(value) + T::read(at<T>(residual, place + c * LANES));
            T::write(at<T>(out, place + c * LANES), value);
        }
    }
}

template <class T, int ROWS, int LINES>
static void tile(const Product& product, const int32_t* panel, int64_t column, const void* x, int64_t x_stride, int64_t row, const void* residual, void* out, int64_t out_stride, const char* ahead) {
    Floats sums[ROWS][PANEL_VECTORS] = {};
    const int32_t* words = (const int32_t*)at<T>(x, row * x_stride);
    multiply<T, ROWS, PANEL_VECTORS, LINES>(sums, words, x_stride / T::PER_WORD, panel, PANEL, product.inputs / T::PER_WORD, ahead);
    put<T, ROWS>(sums, product, column, residual, out, row, out_stride);
}

template <class T, int LINES, int ROWS = TILE_ROWS>
INLINE void tile_of(int rows, const Product& product, const int32_t* panel, int64_t column, const void* x, int64_t x_stride, int64_t row, const void* residual, void* out, int64_t out_stride, const char* ahead) {
    if (rows == ROWS) return tile<T, ROWS, LINES>(product, panel, column, x, x_stride, row, residual, out, out_stride, ahead);
    if constexpr (ROWS > 1) tile_of<T, LINES, ROWS - 1>(rows, product, panel, column, x, x_stride, row, residual, out, out_stride, ahead);
}

// `x` is `[rows, inputs]` with rows `x_stride` apart, `out` and `residual` `[rows, outputs]` with rows `out_stride` apart.
template <class T>
static void multiply_packed(const Product& product, const void* x, int64_t x_stride, int64_t rows, const void* residual, void* out, int64_t out_stride, Team& team) {
    const int64_t panels = (product.outputs + PANEL - 1) / PANEL, size = PANEL * (product.inputs / T::PER_WORD);
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    // A thread reads its panels one after the other, and asks for the next one while it multiplies by this one.
    const int64_t run = most(1, panels / (team.threads * 4));
    team.share((panels + run - 1) / run, [&](int64_t item) {
        for (int64_t number = item * run; number < least(panels, (item + 1) * run); number++) {
            const int32_t* panel = product.packed + number * size;
            const char* ahead = (const char*)(number + 1 < panels ? panel + size : panel);
            int64_t row = 0;
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t end = rows * (i + 1) / tiles;
                const int count = (int)(end - row);
                if (tiles == 1) {
                    tile_of<T, 2>(count, product, panel, number * PANEL, x, x_stride, row, residual, out, out_stride, ahead);
                } else if (i < 2) {
                    tile_of<T, 1>(count, product, panel, number * PANEL, x, x_stride, row, residual, out, out_stride, ahead + i * size * 2);
                } else {
                    tile_of<T, 0>(count, product, panel, number * PANEL, x, x_stride, row, residual, out, out_stride, ahead);
                }
                row = end;
            }
        }
    });
}
