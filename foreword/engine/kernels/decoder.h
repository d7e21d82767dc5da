// A whole decoder layer of Llama's kind, from the products and the attention above: norm, query/key/value, rotary
// embedding, attention, output, norm, gated feed-forward, both with their residuals. Results between two
// operations are rounded to the model's dtype, as in a model that runs operator by operator.
#pragma once

#include "attention.h"
#include "product.h"

struct DecoderLayer {
    AttentionLayer layer;
    PackedWeight qkv, output, gate_up, down;
    const void *input_norm, *output_norm;  // weights, `[hidden]`
    const void *query_norm, *key_norm;     // `[key_dim]`, or null
    int64_t hidden, inner, rotated;        // `rotated`: dimensions with rotary embedding
    float input_epsilon, output_epsilon, query_epsilon, key_epsilon;
};

struct DecoderStep {
    const AttentionTasks* tasks;
    const int64_t* slot_mapping;
    const void *cosines, *sines;  // `[tokens, rotated]`
    const void* x;                // `[tokens, hidden]`
    void *normed, *qkv, *attended, *between, *gate_up, *inner, *out;
    const PackedWeight* head;  // the model's output layer, after the last layer and a norm; or null
    const void* last_norm;
    void* logits;  // `[tokens, head's outputs]`
    int64_t tokens;
    float last_epsilon;
};

// Root mean square norm of one row. Two vectors of sums, so that additions do not wait for each other.
template <class T>
static void norm(const void* x, const void* weight, float epsilon, int64_t size, void* out) {
    const typename T::Element *from = at<T>(x, 0), *weights = at<T>(weight, 0);
    typename T::Element* to = at<T>(out, 0);
    Floats sums{}, more{};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        const Floats a = T::read(from + i), b = T::read(from + i + LANES);
        sums = fused(a, a, sums);
        more = fused(b, b, more);
    }
    float sum = sum_of(sums + more);
    for (; i < size; i++) sum += T::to_float(from[i]) * T::to_float(from[i]);
    const float factor = 1.0f / sqrtf(sum / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        T::write(to + i, T::rounded(T::read(from + i) * factor) * T::read(weights + i));
    for (; i < size; i++)
        to[i] = T::from_float(T::to_float(T::from_float(T::to_float(from[i]) * factor)) * T::to_float(weights[i]));
}

// silu(gate) * up of some columns of one row.
template <class T>
static void gate(const void* gates, const void* ups, void* out, int64_t size) {
    const typename T::Element *one = at<T>(gates, 0), *two = at<T>(ups, 0);
    typename T::Element* to = at<T>(out, 0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats x = T::read(one + i);
        T::write(to + i, T::rounded(x / (1.0f + exp_of(-x))) * T::read(two + i));
    }
    for (; i < size; i++) {
        const float x = T::to_float(one[i]);
        to[i] = T::from_float(T::to_float(T::from_float(x / (1.0f + expf(-x)))) * T::to_float(two[i]));
    }
}

// The first `rotated` dimensions of a head, rotated in place: dimension i together with i + rotated / 2.
template <class T>
INLINE void rotate(typename T::Element* head, const typename T::Element* cosines, const typename T::Element* sines,
                   int64_t rotated) {
    const int64_t half = rotated / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Floats a = T::read(head + i), b = T::read(head + half + i);
        T::write(head + i, T::rounded(a * T::read(cosines + i)) - T::rounded(b * T::read(sines + i)));
        T::write(head + half + i,
                 T::rounded(b * T::read(cosines + half + i)) + T::rounded(a * T::read(sines + half + i)));
    }
    for (; i < half; i++) {
        const float a = T::to_float(head[i]), b = T::to_float(head[half + i]);
        auto times = [](float x, typename T::Element y) { return T::to_float(T::from_float(x * T::to_float(y))); };
        head[i] = T::from_float(times(a, cosines[i]) - times(b, sines[i]));
        head[half + i] = T::from_float(times(b, cosines[half + i]) + times(a, sines[half + i]));
    }
}

// Norms and rotary embedding of one token's queries and keys, in place, and its K and V into their slot.
template <class T>
static void prepare(const DecoderLayer& decoder, const DecoderStep& step, int64_t token) {
    const AttentionLayer& layer = decoder.layer;
    const int64_t heads = layer.kv_heads * layer.group, dim = layer.key_dim, all_heads = heads + layer.kv_heads;
    typename T::Element* row = at<T>(step.qkv, token * decoder.qkv.outputs);
    for (int64_t head = 0; head < all_heads; head++) {
        typename T::Element* one = row + head * dim;
        const bool query = head < heads;
        const void* weight = query ? decoder.query_norm : decoder.key_norm;
        if (weight != nullptr) norm<T>(one, weight, query ? decoder.query_epsilon : decoder.key_epsilon, dim, one);
        if (decoder.rotated > 0)
            rotate<T>(one, at<T>(step.cosines, token * decoder.rotated), at<T>(step.sines, token * decoder.rotated),
                      decoder.rotated);
    }
    write<T>(layer, step.slot_mapping + token, 1, row + heads * dim, 0, dim, row + all_heads * dim, 0, layer.value_dim);
}

// Rows that a thread takes at a time.
constexpr int64_t SOME_ROWS = 4;

template <class F>
static void for_rows(ThreadTeam& team, int64_t rows, const F& work) {
    team.share((rows + SOME_ROWS - 1) / SOME_ROWS, [&](int64_t item) {
        for (int64_t row = item * SOME_ROWS; row < min(rows, (item + 1) * SOME_ROWS); row++) work(row);
    });
}

template <class T>
static void prepare_rows(const DecoderLayer& decoder, const DecoderStep& step, ThreadTeam& team) {
    for_rows(team, step.tokens, [&](int64_t row) { prepare<T>(decoder, step, row); });
}

// `gate_up` is `[rows, 2 * inner]`, gates first.
template <class T>
static void gate_rows(const void* gate_up, int64_t rows, int64_t inner, void* out, ThreadTeam& team) {
    for_rows(team, rows, [=](int64_t row) {
        gate<T>(at<T>(gate_up, row * 2 * inner), at<T>(gate_up, (row * 2 + 1) * inner), at<T>(out, row * inner), inner);
    });
}

template <class T>
static void norm_rows(const DecoderStep& step, const void* x, const void* weight, float epsilon, int64_t hidden,
                      ThreadTeam& team) {
    for_rows(team, step.tokens, [&](int64_t row) {
        norm<T>(at<T>(x, row * hidden), weight, epsilon, hidden, at<T>(step.normed, row * hidden));
    });
}

template <class T>
static void decode(const DecoderLayer& decoder, const DecoderStep& step, ThreadTeam& team) {
    const AttentionLayer& layer = decoder.layer;
    const int64_t tokens = step.tokens, hidden = decoder.hidden, inner = decoder.inner, qkv = decoder.qkv.outputs;
    const int64_t attended = layer.kv_heads * layer.group * layer.value_dim;
    norm_rows<T>(step, step.x, decoder.input_norm, decoder.input_epsilon, hidden, team);
    multiply_packed<T>(decoder.qkv, Operands{step.normed, hidden, tokens, nullptr, step.qkv, qkv}, team);
    prepare_rows<T>(decoder, step, team);
    attend<T>(*step.tasks, layer, QueryRows{step.qkv, step.attended, qkv, layer.key_dim}, team);
    multiply_packed<T>(decoder.output, Operands{step.attended, attended, tokens, step.x, step.between, hidden}, team);
    norm_rows<T>(step, step.between, decoder.output_norm, decoder.output_epsilon, hidden, team);
    multiply_packed<T>(decoder.gate_up, Operands{step.normed, hidden, tokens, nullptr, step.gate_up, 2 * inner}, team);
    gate_rows<T>(step.gate_up, tokens, inner, step.inner, team);
    multiply_packed<T>(decoder.down, Operands{step.inner, inner, tokens, step.between, step.out, hidden}, team);
}

// Layers of the same sizes. All but the first read their input from `step.out`, and replace it. Then the output layer.
template <class T>
static void decode_layers(const DecoderLayer* const* layers, int64_t count, DecoderStep step, ThreadTeam& team) {
    for (int64_t i = 0; i < count; i++) {
        decode<T>(*layers[i], step, team);
        step.x = step.out;
    }
    if (step.head == nullptr) return;
    const int64_t hidden = step.head->inputs;
    norm_rows<T>(step, step.out, step.last_norm, step.last_epsilon, hidden, team);
    const Operands operands{step.normed, hidden, step.tokens, nullptr, step.logits, step.head->outputs};
    multiply_packed<T>(*step.head, operands, team);
}
