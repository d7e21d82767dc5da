// The functions that Python calls (native.py). `type` is 0 for float32, 1 for bfloat16, 2 for float16.
#include "decoder.h"
#include "sampling.h"

// `function` with a number of this type.
template <class F>
static auto with_type(int type, const F& function) {
    return type == 0 ? function(Float32{}) : type == 1 ? function(BFloat16{}) : function(Float16{});
}

extern "C" {

int fw_lanes() { return LANES; }

int fw_part_keys() { return PART_KEYS; }

int64_t fw_part_floats(int64_t value_dim) { return part_floats(value_dim); }

void fw_use_openmp(void* region) { open_region = (Region)region; }

int64_t fw_packed_words(int type, int64_t inputs, int64_t outputs) {
    return with_type(type, [=](auto number) { return packed_words<decltype(number)>(inputs, outputs); });
}

// `word` is the size of a word in bytes: 4, for weights of float16 2, of 8-bit integers 1, and 2 for bfloat16.
void fw_pack(int word, const void* weight, int64_t words, int64_t outputs, int64_t first, void* packed, int threads) {
    ThreadTeam team(threads);
    const auto function = word == 4 ? pack<int32_t> : word == 2 ? pack<int16_t> : pack<int8_t>;
    team.run([&] { function(weight, words, outputs, first, packed, team); });
}

void fw_multiply(int type, const PackedWeight* weight, const void* x, int64_t x_stride, int64_t rows, void* out,
                 int threads) {
    ThreadTeam team(threads);
    team.run([&] {
        with_type(type, [&](auto number) {
            multiply_packed<decltype(number)>(*weight, Operands{x, x_stride, rows, nullptr, out, weight->outputs}, team);
        });
    });
}

void fw_write(int type, const AttentionLayer* layer, const int64_t* slots, int64_t tokens, const void* keys,
              int64_t k_token, int64_t k_head, const void* values, int64_t v_token, int64_t v_head) {
    with_type(type, [&](auto number) {
        write<decltype(number)>(*layer, slots, tokens, keys, k_token, k_head, values, v_token, v_head);
    });
}

void fw_attend(int type, const AttentionTasks* tasks, const AttentionLayer* layer, const QueryRows* rows, int threads) {
    ThreadTeam team(threads);
    team.run([&] {
        with_type(type, [&](auto number) { attend<decltype(number)>(*tasks, *layer, *rows, team); });
    });
}

void fw_norm(int type, const void* x, const void* weight, float epsilon, int64_t rows, int64_t size, void* out,
             int threads) {
    ThreadTeam team(rows > SOME_ROWS ? threads : 1);
    team.run([&] {
        with_type(type, [&](auto number) {
            typedef decltype(number) T;
            for_rows(team, rows, [=](int64_t row) {
                norm<T>(at<T>(x, row * size), weight, epsilon, size, at<T>(out, row * size));
            });
        });
    });
}

void fw_gate(int type, const void* gate_up, int64_t rows, int64_t inner, void* out, int threads) {
    ThreadTeam team(threads);
    team.run([&] {
        with_type(type, [&](auto number) { gate_rows<decltype(number)>(gate_up, rows, inner, out, team); });
    });
}

void fw_prepare(int type, const DecoderLayer* decoder, const DecoderStep* step, int threads) {
    ThreadTeam team(threads);
    team.run([&] {
        with_type(type, [&](auto number) { prepare_rows<decltype(number)>(*decoder, *step, team); });
    });
}

void fw_decode(int type, const DecoderLayer* const* layers, int64_t count, const DecoderStep* step, int threads) {
    ThreadTeam team(threads);
    team.run([&] {
        with_type(type, [&](auto number) { decode_layers<decltype(number)>(layers, count, *step, team); });
    });
}

void fw_sample(int type, const void* logits, int64_t stride, int64_t vocab, SampledRow* rows, int64_t count,
               int threads) {
    // Few logits take less time than the threads need to meet, which they do late where other processes have the cores.
    ThreadTeam team(count * vocab < FEW_LOGITS ? 1 : threads);
    team.run([&] {
        with_type(type, [&](auto number) { sample_rows<decltype(number)>(logits, stride, vocab, rows, count, team); });
    });
}
}
