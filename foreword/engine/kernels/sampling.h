// The choice of one token from each row of logits, without sorting a vocabulary (docs/decisions/0007-randomness.md).
//
// A row is read in groups of tokens. One pass gives the maximum of each group or, unless the choice is greedy, the sum of
// its chords, which are above the weights and cheaper than exponentials. A token is drawn from all tokens by the inverse of
// the cumulative distribution function, in order of their ids, and kept with the probability weight / chord. Top-p is
// rejection sampling too (Ye et al. 2025, FlashInfer): if the tokens before the kept one, in order of descending logits,
// reach top_p, the next draw is among those. Groups whose sum is smaller than its chord need not be read again.
#pragma once

#include <algorithm>
#include <functional>

#include "threads.h"
#include "vectors.h"

// How one row is sampled, and the token. Arrays of tokens may name tokens outside of the vocabulary, which are ignored.
struct SampledRow {
    const uint32_t* seen;      // a bit per token of the sequence, up to a whole group; null: no repetition penalty
    const int64_t* generated;  // distinct tokens
    const float* times;        // how often each was generated
    const int64_t* biased;
    const float* biases;
    const int64_t* excluded;
    const int64_t* allowed;  // null: all
    const uint32_t* mask;    // a bit per token, of a grammar; null: all
    int64_t num_generated, num_biased, num_excluded, num_allowed;
    int64_t number;  // 53 random bits
    int64_t top_k;   // 0: all
    int64_t token;
    double temperature, top_p, min_p;  // a temperature of 0 is greedy
    double repetition_penalty, presence_penalty, frequency_penalty;

    bool excludes() const { return num_generated || num_biased || num_excluded || allowed != nullptr; }
};

constexpr int64_t GROUP = 128;
constexpr int64_t FEW_LOGITS = 1 << 18;
// Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
constexpr double MIN_TEMPERATURE = 1e-6;

// `a` for the tokens of a vector that have a bit, `b` for the others.
INLINE Floats select_bits(const uint32_t* bits, int64_t first, Floats a, Floats b) {
    const uint32_t found = bits[first / 32] >> first % 32;
#if defined(__AVX512F__)
    return (Floats)_mm512_mask_blend_ps((__mmask16)found, (__m512)b, (__m512)a);
#else
    Words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = 1 << lane;
    return select((lanes & (int32_t)found) != 0, a, b);
#endif
}

// One row, or the tokens of it that top-k keeps.
template <class T>
struct Logits {
    const typename T::Element* row;
    int64_t size;

    int64_t groups() const { return (size + GROUP - 1) / GROUP; }
    int64_t end(int64_t group) const { return min(size, (group + 1) * GROUP); }
    float value(int64_t token) const { return T::to_float(row[token]); }
    // A vector of tokens; -inf past the end.
    __attribute__((always_inline)) Floats read(int64_t first) const {
        if (first + LANES <= size) return T::read(row + first);
        typename T::Element part[LANES];
        for (int lane = 0; lane < LANES; lane++)
            part[lane] = first + lane < size ? row[first + lane] : T::from_float(-INFINITE);
        return T::read(part);
    }
};

// A row with a repetition penalty (Keskar et al. 2019), which is applied while the row is read.
template <class T>
struct Repeated : Logits<T> {
    const uint32_t* seen;
    float penalty, inverse;

    float value(int64_t token) const {
        const float value = Logits<T>::value(token);
        return seen[token / 32] >> token % 32 & 1 ? value * (value > 0 ? inverse : penalty) : value;
    }
    __attribute__((always_inline)) Floats read(int64_t first) const {
        const Floats values = Logits<T>::read(first);
        const Floats factors = select(values > 0.0f, broadcast(inverse), broadcast(penalty));
        return select_bits(seen, first, values * factors, values);
    }
};

// What a pass over a row finds.
struct Passed {
    float* maxima;  // of each group
    float* sums;    // of each group's chords
    float best;     // the largest logit
    float scale;    // weights are exp2(logit * scale + offset)
    float offset;   // plus the bias of an exponent, as the bits of a float

    // The chord of exp2 between the whole numbers next to logit * scale, which is not below the weight (but for rounding),
    // and at most 1 / LEAST_SHARE of it: a float's bits are linear between powers of two. NaN and what is too small have none.
    __attribute__((always_inline)) Floats chords(Floats values) const {
        const Floats bits = larger(values * (scale * 0x1p23f) + offset, broadcast(0.0f));
        return (Floats)__builtin_convertvector(bits, Words);
    }
    double power(float value) const { return (double)value * scale + offset * 0x1p-23 - BIAS; }
    void set_offset(double power) { offset = (float)((power + BIAS) * 0x1p23); }

    static constexpr double BIAS = 127;
    static constexpr double LEAST_SHARE = 0.94207;
};

// The tokens before this one in order of descending logits, and of equal ones by id.
struct Before {
    float value;
    int64_t token;

    __attribute__((always_inline)) Words has(Floats values, int64_t first) const {
        if (first + LANES <= token) return values >= value;
        Words found = values > value;
        for (int lane = 0; first + lane < token && lane < LANES; lane++) found[lane] |= values[lane] == value ? -1 : 0;
        return found;
    }
};

// Maxima. A NaN is no maximum.
template <class L>
void find_maxima(const L& logits, Passed& passed) {
    passed.best = -INFINITE;
    for (int64_t group = 0; group < logits.groups(); group++) {
        Floats most = broadcast(-INFINITE);
#pragma GCC unroll 8
        for (int64_t first = group * GROUP; first < (group + 1) * GROUP; first += LANES)
            most = larger(logits.read(first), most);
        passed.maxima[group] = largest_of(most);
        passed.best = std::max(passed.best, passed.maxima[group]);
    }
}

// Sums and the largest logit in one pass. Returns the sum of all chords; 0 if the largest logit is where chords overflow or
// vanish.
template <class L>
double find_sums(const L& logits, Passed& passed) {
    const Passed known = passed;  // which the sums do not alias
    Floats most = broadcast(-INFINITE);
    double total = 0;
    for (int64_t group = 0; group < logits.groups(); group++) {
        Floats sum = broadcast(0.0f);
#pragma GCC unroll 8
        for (int i = 0; i < GROUP / LANES; i++) {
            const Floats values = logits.read(group * GROUP + i * LANES);
            most = larger(values, most);
            sum += known.chords(values);
        }
        total += passed.sums[group] = sum_of(sum);
    }
    passed.best = largest_of(most);
    return std::fabs(passed.power(passed.best)) < 60 ? total : 0;
}

// The sums again, of fewer tokens. Returns the sum of all their chords; where it is below `limit`, any number below. Then
// the rest of the row is not read. `total` is the sum so far.
template <class L>
double find_sums(const L& logits, Passed& passed, const Before& before, double total, double limit) {
    const Passed known = passed;
    const float least = known.chords(broadcast(before.value))[0];
    double found = 0;
    for (int64_t group = 0; group < logits.groups(); group++)
        if (passed.sums[group] < least) total -= passed.sums[group], passed.sums[group] = 0;
    for (int64_t group = 0; group < logits.groups() && total >= limit; group++) {
        if (!(passed.sums[group] > 0)) continue;
        Floats sum = broadcast(0.0f);
#pragma GCC unroll 8
        for (int64_t first = group * GROUP; first < (group + 1) * GROUP; first += LANES) {
            const Floats values = logits.read(first);
            sum += select(before.has(values, first), known.chords(values), broadcast(0.0f));
        }
        total -= passed.sums[group];
        passed.sums[group] = sum_of(sum);
        total += passed.sums[group];
        found += passed.sums[group];
    }
    return total < limit ? total : found;
}

// The sum of weights, relative to that of the largest logit.
template <class L>
double mass(const L& logits, const Passed& passed, const Before& before) {
    double total = 0;
    for (int64_t group = 0; group < logits.groups(); group++) {
        Floats sum = broadcast(0.0f);
        for (int64_t first = group * GROUP; first < logits.end(group); first += LANES) {
            const Floats values = logits.read(first);
            const Floats power = larger((values - passed.best) * passed.scale, broadcast(-200.0f));
            sum += select(before.has(values, first), exp2_of<6>(power), broadcast(0.0f));
        }
        total += sum_of(sum);
    }
    return total;
}

// The first token with the largest logit; 0 if there is no number.
template <class L>
int64_t likeliest(const L& logits, const Passed& passed) {
    for (int64_t group = 0; group < logits.groups(); group++)
        if (passed.maxima[group] == passed.best)
            for (int64_t token = group * GROUP; token < logits.end(group); token++)
                if (logits.value(token) == passed.best) return token;
    return 0;
}

// The token at which the sum of chords, in order of ids, exceeds `target`. Rounding chooses no token without a chord.
template <class L>
int64_t token_at(const L& logits, const Passed& passed, const Before& before, double target) {
    double sum = 0;
    int64_t group = 0, found = 0;
    for (int64_t next = 0; next < logits.groups(); next++) {
        if (!(passed.sums[next] > 0)) continue;
        group = next;
        if (sum + passed.sums[group] > target) break;
        sum += passed.sums[group];
    }
    for (int64_t first = group * GROUP; first < logits.end(group); first += LANES) {
        const Floats values = logits.read(first);
        const Floats chords = select(before.has(values, first), passed.chords(values), broadcast(0.0f));
        for (int lane = 0; lane < LANES; lane++) {
            if (!(chords[lane] > 0)) continue;
            found = first + lane;
            sum += chords[lane];
            if (sum > target) return found;
        }
    }
    return found;
}

// The random bits of the next draw: splitmix64 (Steele et al. 2014) of those of the last one.
INLINE int64_t next_number(int64_t number) {
    uint64_t mixed = (uint64_t)number + 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return (int64_t)((mixed ^ (mixed >> 31)) >> 11);
}

// A token by min-p, then top-p. `total` is the sum of all chords.
template <class L>
int64_t draw(const L& logits, const SampledRow& row, Passed& passed, double total) {
    Before before{-INFINITE, logits.size};
    if (row.min_p > 0) {
        before.value = (float)(passed.best + std::log2(row.min_p) / passed.scale);
        total = find_sums(logits, passed, before, total, -INFINITE);
    }
    const Before all = before;
    const double limit = row.top_p * total, surely = limit * passed.LEAST_SHARE;
    for (int64_t number = row.number;; number = next_number(number)) {
        const int64_t token = token_at(logits, passed, before, (double)number * 0x1p-53 * total);
        const float value = logits.value(token);
        number = next_number(number);
        const double chord = passed.chords(broadcast(value))[0] * (1 + 0x1p-15);  // not below the weight, with rounding
        if ((double)number * 0x1p-53 * chord >= std::exp2(passed.power(value))) continue;
        if (row.top_p >= 1) return token;
        before = Before{value, token};
        total = find_sums(logits, passed, before, total, surely);
        if (total < surely) return token;
        if (total * passed.LEAST_SHARE >= limit) continue;
        if (mass(logits, passed, before) < row.top_p * mass(logits, passed, all)) return token;
    }
}

// A token by temperature, then min-p, then top-p.
template <class L>
int64_t draw(const L& logits, const SampledRow& row, Passed& passed, float* near) {
    passed.scale = (float)(LOG2E / std::max(row.temperature, MIN_TEMPERATURE));
    // The largest logit is near those of the first tokens.
    L start = logits;
    start.size = min(logits.size, 4 * GROUP);
    find_maxima(start, passed);
    const double guess = std::floor((double)passed.best * passed.scale);
    passed.set_offset(-guess);
    double total = std::fabs(guess) < 0x1p16 ? find_sums(logits, passed) : 0;
    if (total > 0) return draw(logits, row, passed, total);
    // It is not, or so large that a product would be rounded too much.
    find_maxima(logits, passed);
    if (!(std::fabs(passed.best) < INFINITE)) return likeliest(logits, passed);
    const double power = (double)passed.best * passed.scale;
    for (int64_t token = 0; token < logits.size; token++) near[token] = logits.value(token) - passed.best;
    passed.set_offset(power - std::floor(power));
    const Logits<Float32> moved{near, logits.size};
    total = find_sums(moved, passed);
    return draw(moved, row, passed, total);
}

// The `count` largest logits of a row, of equal ones the first, in order of their ids. Returns how many there are: fewer
// where others are -inf.
template <class L>
int64_t select_largest(const L& logits, const Passed& passed, int64_t count, float* values, int32_t* tokens,
                       float* ranked) {
    // As many groups have a token that is not smaller.
    float least = -std::numeric_limits<float>::max();
    if (count <= logits.groups()) {
        std::copy(passed.maxima, passed.maxima + logits.groups(), ranked);
        std::nth_element(ranked, ranked + count - 1, ranked + logits.groups(), std::greater<float>());
        least = std::max(least, ranked[count - 1]);
    }
    int64_t found = 0;
    for (int64_t group = 0; group < logits.groups(); group++) {
        if (!(passed.maxima[group] >= least)) continue;
        for (int64_t token = group * GROUP; token < logits.end(group); token++) {
            values[found] = logits.value(token);
            tokens[found] = (int32_t)token;
            found += values[found] >= least;
        }
    }
    if (found <= count) return found;
    std::copy(values, values + found, ranked);
    std::nth_element(ranked, ranked + count - 1, ranked + found, std::greater<float>());
    const float edge = ranked[count - 1];
    int64_t equal = count, kept = 0;
    for (int64_t i = 0; i < found; i++) equal -= values[i] > edge;
    for (int64_t i = 0; i < found; i++) {
        if (values[i] < edge || (values[i] == edge && equal-- <= 0)) continue;
        values[kept] = values[i];
        tokens[kept++] = tokens[i];
    }
    return kept;
}

// Working memory of a row of `size` tokens.
struct SamplingMemory {
    float *logits, *values, *ranked, *maxima, *sums;
    int32_t* tokens;

    explicit SamplingMemory(int64_t size) {
        static thread_local Scratch scratch;
        const int64_t row = round_up(size + 1, LANES);
        logits = (float*)scratch.reserve(6 * row * sizeof(float));
        values = logits + row, ranked = values + row, maxima = ranked + row, sums = maxima + row;
        tokens = (int32_t*)(sums + row);
    }
};

template <class L>
int64_t choose(const L& logits, const SampledRow& row, const SamplingMemory& memory) {
    Passed passed{memory.maxima, memory.sums, -INFINITE, 0, 0};
    if (row.temperature > 0 && (row.top_k <= 0 || row.top_k >= logits.size)) return draw(logits, row, passed, memory.ranked);
    find_maxima(logits, passed);
    if (row.temperature <= 0 || row.top_k == 1 || !(std::fabs(passed.best) < INFINITE)) return likeliest(logits, passed);
    const int64_t kept = select_largest(logits, passed, row.top_k, memory.values, memory.tokens, memory.ranked);
    return memory.tokens[draw(Logits<Float32>{memory.values, kept}, row, passed, memory.ranked)];
}

// The logits in float32, -inf where the grammar allows no token.
template <class L>
void copy_allowed(const L& logits, const uint32_t* mask, float* out) {
    for (int64_t first = 0; first < logits.size; first += LANES) {
        Floats values = logits.read(first);
        if (mask != nullptr) values = select_bits(mask, first, values, broadcast(-INFINITE));
        if (first + LANES <= logits.size)
            store(out + first, values);
        else
            for (int lane = 0; first + lane < logits.size; lane++) out[first + lane] = values[lane];
    }
}

// Presence and frequency penalties (OpenAI), then biases, then exclusions.
static inline void reshape(const SampledRow& row, float* logits, int64_t size, float* kept) {
    const auto known = [=](int64_t token) { return (uint64_t)token < (uint64_t)size; };
    const float once = (float)row.presence_penalty, each = (float)row.frequency_penalty;
    for (int64_t i = 0; i < row.num_generated; i++)
        if (known(row.generated[i])) logits[row.generated[i]] -= once + each * row.times[i];
    for (int64_t i = 0; i < row.num_biased; i++)
        if (known(row.biased[i])) logits[row.biased[i]] += row.biases[i];
    for (int64_t i = 0; i < row.num_excluded; i++)
        if (known(row.excluded[i])) logits[row.excluded[i]] = -INFINITE;
    if (row.allowed == nullptr) return;
    std::copy(logits, logits + size, kept);
    std::fill(logits, logits + size, -INFINITE);
    for (int64_t i = 0; i < row.num_allowed; i++)
        if (known(row.allowed[i])) logits[row.allowed[i]] = kept[row.allowed[i]];
}

// `given`: the logits without the repetition penalty.
template <class T, class L>
int64_t sample_row(const Logits<T>& given, const L& logits, const SampledRow& row) {
    const SamplingMemory memory(logits.size);
    if (row.mask == nullptr && !row.excludes()) return choose(logits, row, memory);
    const Logits<Float32> shaped{memory.logits, logits.size};
    copy_allowed(logits, row.mask, memory.logits);
    if (row.excludes()) {
        reshape(row, memory.logits, logits.size, memory.values);
        // Where the grammar leaves no token, the other exclusions are dropped.
        Passed passed{memory.maxima, memory.sums, -INFINITE, 0, 0};
        if (row.mask != nullptr) find_maxima(shaped, passed);
        if (row.mask != nullptr && passed.best == -INFINITE) copy_allowed(given, row.mask, memory.logits);
    }
    return choose(shaped, row, memory);
}

template <class T>
void sample_rows(const void* logits, int64_t stride, int64_t vocab, SampledRow* rows, int64_t count, ThreadTeam& team) {
    team.share(count, [=](int64_t i) {
        const Logits<T> given{at<T>(logits, i * stride), vocab};
        const float penalty = (float)rows[i].repetition_penalty;
        const Repeated<T> repeated{given, rows[i].seen, penalty, 1 / penalty};
        rows[i].token = rows[i].seen == nullptr ? sample_row(given, given, rows[i]) : sample_row(given, repeated, rows[i]);
    });
}
