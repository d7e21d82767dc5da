// The choice of one token from each row of logits, without sorting a vocabulary (dev/decisions/0007-randomness.md).
//
// A row is read in groups of tokens. One pass gives the maximum of each group, if the choice is greedy or by top-k or min-p,
// or the sum of its chords, which are above the weights and cheaper than exponentials. A token is drawn from all tokens by the
// inverse of the cumulative distribution function, in order of their ids, and kept with the probability weight / chord. Top-p
// is rejection sampling too (Ye et al. 2025, FlashInfer): if the tokens before the kept one, in order of descending logits,
// reach top_p, the next draw is among those. Groups whose sum is smaller than its chord need not be read again.
//
// The order in which numbers are added is part of what a seed promises: a change of it may change a token.
#pragma once

#include <algorithm>

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
constexpr int GROUP_VECTORS = GROUP / LANES;
constexpr int64_t FEW_LOGITS = 1 << 18;
// Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
constexpr double MIN_TEMPERATURE = 1e-6;

// `a` for the tokens of vector `i` of a group that have a bit, `b` for the others. `bits` are those of the group.
INLINE Floats select_bits(const uint32_t* bits, int i, Floats a, Floats b) {
    const int first = i * LANES % 32;
    const uint32_t found = bits[i * LANES / 32];
#if defined(__AVX512F__)
    return (Floats)_mm512_mask_blend_ps((__mmask16)(found >> first), (__m512)b, (__m512)a);
#else
    // A lane's bit moves to its sign.
    Bits places;
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) places[lane] = 31 - first - lane;
    return select((Words)((Bits{} + found) << places) < 0, a, b);
#endif
}

// The sum of each of LANES vectors, as `sum_of` adds them.
INLINE Floats sums_of(Words* vectors) {
#if defined(__AVX512F__)
    float sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = sum_of((Floats)vectors[i]);
    return load<Floats>(sums);
#else
    transpose(vectors);
    Floats sum{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) sum += (Floats)vectors[i];
    return sum;
#endif
}

INLINE Floats largest_of(Words* vectors) {
    transpose(vectors);
    Floats most = (Floats)vectors[0];
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) most = larger((Floats)vectors[i], most);
    return most;
}

// One row, or the tokens of it that top-k keeps.
template <class T>
struct Logits {
    typedef typename T::Element Element;
    const Element* row;
    int64_t size;

    int64_t groups() const { return (size + GROUP - 1) / GROUP; }
    int64_t end(int64_t group) const { return min(size, (group + 1) * GROUP); }
    float value(int64_t token) const { return T::to_float(row[token]); }
    // A group's logits. Those at the end are in `part`, where -inf follows.
    INLINE_MEMBER const Element* of(int64_t group, Element* part) const {
        const Element* from = row + group * GROUP;
        return (group + 1) * GROUP <= size ? from : filled(from, size - group * GROUP, part);
    }
    // Vector `i` of the group whose logits are `from`.
    INLINE_MEMBER Floats read(const Element* from, int64_t, int i) const { return T::read(from + i * LANES); }

  private:
    static __attribute__((noinline)) const Element* filled(const Element* from, int64_t count, Element* part) {
        std::fill(std::copy(from, from + count, part), part + GROUP, T::from_float(-INFINITE));
        return part;
    }
};

// A row with a repetition penalty (Keskar et al. 2019), which is applied while the row is read.
template <class T>
struct Repeated : Logits<T> {
    const uint32_t* seen;
    float penalty, inverse;

    float penalized(float value) const { return value * (value > 0 ? inverse : penalty); }
    float value(int64_t token) const {
        const float value = Logits<T>::value(token);
        return seen[token / 32] >> token % 32 & 1 ? penalized(value) : value;
    }
    INLINE_MEMBER Floats read(const typename T::Element* from, int64_t group, int i) const {
        const Floats values = T::read(from + i * LANES);
        // A zero stays the zero that it is.
        const Floats factors = select((Words)values < 0, broadcast(penalty), broadcast(inverse));
        return values * select_bits(seen + group * (GROUP / 32), i, factors, broadcast(1.0f));
    }
};

// What a pass over a row finds. Arrays have room for whole vectors.
struct Passed {
    float* maxima;  // of each group
    float* sums;    // of each group's chords
    float best;     // the largest logit, where the maxima are known
    float scale;    // weights are exp2(logit * scale + offset)
    float offset;   // plus the bias of an exponent, as the bits of a float

    // The chord of exp2 between the whole numbers next to logit * scale, which is not below the weight (but for rounding),
    // and at most 1 / LEAST_SHARE of it: a float's bits are linear between powers of two. NaN and what is too small have none.
    INLINE_MEMBER Floats chords(Floats values) const { return (Floats)larger(whole(bits(values)), Words{}); }
    INLINE_MEMBER Floats bits(Floats values) const { return fused(values, broadcast(scale * 0x1p23f), broadcast(offset)); }
    static INLINE_MEMBER Words whole(Floats bits) { return __builtin_convertvector(bits, Words); }
    double power(float value) const { return (double)value * scale + offset * 0x1p-23 - BIAS; }
    void set_offset(double power) { offset = (float)((power + BIAS) * 0x1p23); }

    static constexpr double BIAS = 127;
    static constexpr double LEAST_SHARE = 0.94207;
};

// The tokens before this one in order of descending logits, and of equal ones by id.
struct Before {
    float value;
    int64_t token;

    // Calls `use` with a function that tells which of a group's vector `i` are among them.
    template <class F>
    INLINE_MEMBER Floats in(int64_t group, const F& use) const {
        const float value = this->value;
        const int64_t left = token - group * GROUP;
        if (left >= GROUP) return use([=](Floats values, int) INLINE_LAMBDA { return values >= value; });
        if (left <= 0) return use([=](Floats values, int) INLINE_LAMBDA { return values > value; });
        return use([=](Floats values, int i) INLINE_LAMBDA {
            Words found = values > value;
            for (int lane = 0; i * LANES + lane < left && lane < LANES; lane++) found[lane] |= values[lane] == value ? -1 : 0;
            return found;
        });
    }
};

// The largest logit of each lane of a group. A NaN is no maximum.
template <class L>
INLINE Floats largest_in(const L& logits, int64_t group) {
    typename L::Element part[GROUP];
    const auto* from = logits.of(group, part);
    Floats most = broadcast(-INFINITE);
#pragma GCC unroll 32
    for (int i = 0; i < GROUP_VECTORS; i++) most = larger(logits.read(from, group, i), most);
    return most;
}

template <class L>
void find_maxima(const L& logits, Passed& passed) {
    float* const maxima = passed.maxima;
    Floats best = broadcast(-INFINITE);
    for (int64_t group = 0; group < logits.groups(); group += LANES) {
        Words most[LANES];
        for (int i = 0; i < LANES; i++)
            most[i] = (Words)(group + i < logits.groups() ? largest_in(logits, group + i) : broadcast(-INFINITE));
        const Floats found = largest_of(most);
        store(maxima + group, found);
        best = larger(found, best);
    }
    passed.best = largest_of(best);
}

// The sum, by lane, of a group's weights.
template <class L, class F>
INLINE Floats add_up(const L& logits, int64_t group, const F& weights) {
    typename L::Element part[GROUP];
    const auto* from = logits.of(group, part);
    Floats sum{};
#pragma GCC unroll 32
    for (int i = 0; i < GROUP_VECTORS; i++) sum += weights(logits.read(from, group, i), i);
    return sum;
}

// Returns the sum of all chords; 0 if the largest logit is where chords overflow or vanish.
template <class L>
double find_sums(const L& logits, Passed& passed) {
    const Passed known = passed;  // which the sums do not alias
    Words most{};
    double total = 0;
    for (int64_t group = 0; group < logits.groups(); group += LANES) {
        Words sums[LANES]{};
        const int count = (int)min(logits.groups() - group, LANES);
        for (int i = 0; i < count; i++)
            sums[i] = (Words)add_up(logits, group + i, [&](Floats values, int) INLINE_LAMBDA {
                const Floats bits = known.bits(values);
                most = larger((Words)bits, most);
                return (Floats)larger(known.whole(bits), Words{});
            });
        store(known.sums + group, sums_of(sums));
        for (int i = 0; i < count; i++) total += known.sums[group + i];
    }
    // Numbers above zero have the order of their bits, and NaN is above all.
    int32_t last = 0;
    for (int lane = 0; lane < LANES; lane++) last = std::max(last, most[lane]);
    float largest;
    memcpy(&largest, &last, sizeof last);
    if (std::fabs(largest * 0x1p-23 - known.BIAS) < 59) return total;
    find_maxima(logits, passed);
    return std::fabs(passed.power(passed.best)) < 60 ? total : 0;
}

// The sums again, of fewer tokens, each of which has a chord. Returns the sum of all their chords; where it is below `limit`,
// any number below. Then the rest of the row is not read. `total` is the sum so far.
template <class L>
double find_sums(const L& logits, Passed& passed, const Before& before, double total, double limit) {
    const Passed known = passed;
    const float least = known.chords(broadcast(before.value))[0];
    double found = 0;
    for (int64_t group = 0; group < logits.groups(); group++)
        if (known.sums[group] < least) total -= known.sums[group], known.sums[group] = 0;
    for (int64_t group = 0; group < logits.groups() && total >= limit;) {
        Words sums[LANES]{};
        float made[LANES];
        int64_t groups[LANES];
        int count = 0;
        for (; count < LANES && group < logits.groups(); group++) {
            if (!(known.sums[group] > 0)) continue;
            groups[count] = group;
            sums[count++] = (Words)before.in(group, [&](const auto& has) INLINE_LAMBDA {
                return add_up(logits, group, [&](Floats values, int i) INLINE_LAMBDA {
                    return select(has(values, i), (Floats)known.whole(known.bits(values)), broadcast(0.0f));
                });
            });
        }
        store(made, sums_of(sums));
        for (int i = 0; i < count; i++) {
            total -= known.sums[groups[i]];
            known.sums[groups[i]] = made[i];
            total += made[i];
            found += made[i];
        }
    }
    return total < limit ? total : found;
}

// The sums of the tokens that min-p keeps, which are `kept`. Returns what the sums of all do.
template <class L>
double find_sums(const L& logits, Passed& passed, double min_p, Before& kept) {
    kept = {-INFINITE, logits.size};
    if (min_p <= 0) return find_sums(logits, passed);
    find_maxima(logits, passed);
    if (!(std::fabs(passed.power(passed.best)) < 60)) return 0;
    kept.value = (float)(passed.best + std::log2(min_p) / passed.scale);
    if (!(passed.chords(broadcast(kept.value))[0] > 0)) return find_sums(logits, passed);
    // More than any token's chord where there is one of them.
    for (int64_t group = 0; group < logits.groups(); group++)
        passed.sums[group] = passed.maxima[group] >= kept.value ? 0x1p100f : 0.0f;
    return find_sums(logits, passed, kept, 0, -INFINITE);
}

// Whether the weights of some tokens are less than a share of those of others, all with at least a value. Weights are
// relative to that of the largest logit.
template <class L>
bool is_below(const L& logits, Passed& passed, const Before& some, const Before& others, double share) {
    find_maxima(logits, passed);
    const float best = passed.best, scale = passed.scale, least = others.value;
    double less = 0, more = 0;
    for (int64_t group = 0; group < logits.groups(); group++) {
        Floats all{};
        const Floats sum = some.in(group, [&](const auto& has) INLINE_LAMBDA {
            return add_up(logits, group, [&](Floats values, int i) INLINE_LAMBDA {
                const Floats weights = exp2_of<6, true>(larger((values - best) * scale, broadcast(-200.0f)));
                all += select(values >= least, weights, broadcast(0.0f));
                return select(has(values, i), weights, broadcast(0.0f));
            });
        });
        less += sum_of(sum);
        more += sum_of(all);
    }
    return less < share * more;
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

template <class L>
int64_t find_likeliest(const L& logits, Passed& passed) {
    find_maxima(logits, passed);
    return likeliest(logits, passed);
}

// The maxima without the penalty tell in which groups the largest logit may be.
template <class T>
int64_t find_likeliest(const Repeated<T>& logits, Passed& passed) {
    find_maxima<Logits<T>>(logits, passed);
    const float most = passed.best;
    passed.best = -INFINITE;
    const auto read = [&](int64_t group) {
        passed.maxima[group] = largest_of(largest_in(logits, group));
        passed.best = std::max(passed.best, passed.maxima[group]);
    };
    int64_t first = std::find(passed.maxima, passed.maxima + logits.groups(), most) - passed.maxima;
    read(first);
    for (int64_t group = 0; group < logits.groups(); group++) {
        const float bound = std::max(passed.maxima[group], logits.penalized(passed.maxima[group]));
        if (group != first && bound >= passed.best) read(group);
    }
    return likeliest(logits, passed);
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
    typename L::Element part[GROUP];
    const auto* from = logits.of(group, part);
    float chords[GROUP];
    before.in(group, [&](const auto& has) INLINE_LAMBDA {
        for (int i = 0; i < GROUP_VECTORS; i++) {
            const Floats values = logits.read(from, group, i);
            store(chords + i * LANES, select(has(values, i), passed.chords(values), broadcast(0.0f)));
        }
        return Floats{};
    });
    for (int i = 0; i < GROUP; i++) {
        if (!(chords[i] > 0)) continue;
        found = group * GROUP + i;
        sum += chords[i];
        if (sum > target) break;
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

// A token by top-p of those that min-p keeps. `total` is the sum of their chords.
template <class L>
int64_t draw(const L& logits, const SampledRow& row, Passed& passed, const Before& kept, double total) {
    Before before = kept;
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
        if (is_below(logits, passed, before, kept, row.top_p)) return token;
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
    Before kept;
    double total = std::fabs(guess) < 0x1p16 ? find_sums(logits, passed, row.min_p, kept) : 0;
    if (total > 0) return draw(logits, row, passed, kept, total);
    // It is not, or so large that a product would be rounded too much.
    find_maxima(logits, passed);
    if (!(std::fabs(passed.best) < INFINITE)) return likeliest(logits, passed);
    const double power = (double)passed.best * passed.scale;
    for (int64_t token = 0; token < logits.size; token++) near[token] = logits.value(token) - passed.best;
    passed.set_offset(power - std::floor(power));
    const Logits<Float32> moved{near, logits.size};
    total = find_sums(moved, passed, row.min_p, kept);
    return draw(moved, row, passed, kept, total);
}

// The `count`-th largest of these numbers, of which none is a NaN, or a smaller number that as many are not smaller than.
// Whole vectors are read; past the end is -inf.
INLINE float ranked(const float* values, int64_t size, int64_t count) {
    // As integers in the order of the numbers.
    const auto number = [](int32_t place) {
        const int32_t bits = place ^ (place >> 31 & 0x7fffffff);
        float found;
        memcpy(&found, &bits, 4);
        return found;
    };
    int64_t low = -0x7f800001, high = 0x7f800001;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        const float edge = number((int32_t)middle);
        Words found{};
        for (int64_t i = 0; i < size; i += LANES) found -= load<Floats>(values + i) >= edge;
        int64_t many = 0;
        for (int lane = 0; lane < LANES; lane++) many += found[lane];
        if (many == count) return edge;
        (many > count ? low : high) = middle;
    }
    return number((int32_t)low);
}

// The `count` largest logits of a row, of equal ones the first, in order of their ids. Returns how many there are: fewer
// where others are -inf.
template <class L>
int64_t select_largest(const L& logits, const Passed& passed, int64_t count, float* values, int32_t* tokens) {
    // As many groups have a token that is not smaller.
    float least = -std::numeric_limits<float>::max();
    if (count <= logits.groups()) least = std::max(least, ranked(passed.maxima, logits.groups(), count));
    int64_t found = 0;
    for (int64_t group = 0; group < logits.groups(); group++) {
        if (!(passed.maxima[group] >= least)) continue;
        typename L::Element part[GROUP];
        const auto* from = logits.of(group, part);
        for (int i = 0; i < GROUP_VECTORS; i++) {
            const Floats some = logits.read(from, group, i);
            for (uint32_t left = lanes_of(some >= least); left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                values[found] = some[lane];
                tokens[found++] = (int32_t)(group * GROUP + i * LANES + lane);
            }
        }
    }
    if (found <= count) return found;
    std::fill(values + found, values + round_up(found, LANES), -INFINITE);
    const float edge = ranked(values, found, count);
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
    uint32_t* bits;
    bool* changed;

    explicit SamplingMemory(int64_t size) {
        static thread_local Scratch scratch;
        const int64_t row = round_up(size + 1, GROUP);
        logits = (float*)scratch.reserve(7 * row * sizeof(float));
        values = logits + row, ranked = values + row, maxima = ranked + row, sums = maxima + row;
        tokens = (int32_t*)(sums + row);
        bits = (uint32_t*)(tokens + row);
        changed = (bool*)(bits + row / 32);
    }
};

// A row in which a request has changed some tokens, or of which it has left some only, in float32. Groups without a change
// are read where they are.
template <class L>
struct Shaped {
    typedef float Element;
    const L& given;
    const uint32_t* mask;  // a bit per token that is left; null: all
    float* changes;        // the logits of changed groups
    bool* changed;         // by group
    int64_t size;

    Shaped(const L& given, const uint32_t* mask, const SamplingMemory& memory)
        : given(given), mask(mask), changes(memory.logits), changed(memory.changed), size(given.size) {
        std::fill(changed, changed + groups(), false);
    }
    int64_t groups() const { return (size + GROUP - 1) / GROUP; }
    int64_t end(int64_t group) const { return min(size, (group + 1) * GROUP); }
    float value(int64_t token) const {
        if (changed[token / GROUP]) return changes[token];
        return mask == nullptr || (mask[token / 32] >> token % 32 & 1) ? given.value(token) : -INFINITE;
    }
    INLINE_MEMBER const float* of(int64_t group, float* part) const {
        return changed[group] ? changes + group * GROUP : left_of(given, group, part);
    }
    INLINE_MEMBER Floats read(const float* from, int64_t, int i) const { return load<Floats>(from + i * LANES); }
    // Calls `change` with a token's logit. Tokens outside of the vocabulary have none.
    template <class F>
    void at(int64_t token, const F& change) {
        if ((uint64_t)token >= (uint64_t)size) return;
        const int64_t group = token / GROUP;
        if (!changed[group]) copy_left(group, changes + group * GROUP);
        changed[group] = true;
        change(changes[token]);
    }

  private:
    template <class G>
    INLINE_MEMBER const float* left_of(const G&, int64_t group, float* part) const {
        return copy_left(group, part);
    }
    INLINE_MEMBER const float* left_of(const Logits<Float32>& plain, int64_t group, float* part) const {
        return mask == nullptr ? plain.of(group, part) : copy_left(group, part);
    }
    // A whole group is written. The mask ends with the vocabulary.
    INLINE_MEMBER const float* copy_left(int64_t group, float* out) const {
        typename L::Element part[GROUP];
        const auto* from = given.of(group, part);
        for (int i = 0; i < GROUP_VECTORS; i++) {
            Floats values = given.read(from, group, i);
            if (mask != nullptr && group * GROUP + i * LANES < size)
                values = select_bits(mask + group * (GROUP / 32), i, values, broadcast(-INFINITE));
            store(out + i * LANES, values);
        }
        return out;
    }
};

template <class L>
int64_t choose(const L& logits, const SampledRow& row, const SamplingMemory& memory) {
    Passed passed{memory.maxima, memory.sums, -INFINITE, 0, 0};
    if (row.temperature > 0 && (row.top_k <= 0 || row.top_k >= logits.size)) return draw(logits, row, passed, memory.ranked);
    if (row.temperature <= 0 || row.top_k == 1) return find_likeliest(logits, passed);
    find_maxima(logits, passed);
    if (!(std::fabs(passed.best) < INFINITE)) return likeliest(logits, passed);
    const int64_t kept = select_largest(logits, passed, row.top_k, memory.values, memory.tokens);
    return memory.tokens[draw(Logits<Float32>{memory.values, kept}, row, passed, memory.ranked)];
}

// Presence and frequency penalties (OpenAI), then biases, then exclusions.
template <class L>
void reshape(const SampledRow& row, Shaped<L>& logits) {
    const float once = (float)row.presence_penalty, each = (float)row.frequency_penalty;
    for (int64_t i = 0; i < row.num_generated; i++)
        logits.at(row.generated[i], [&](float& logit) { logit -= once + each * row.times[i]; });
    for (int64_t i = 0; i < row.num_biased; i++)
        logits.at(row.biased[i], [&](float& logit) { logit += row.biases[i]; });
    for (int64_t i = 0; i < row.num_excluded; i++)
        logits.at(row.excluded[i], [](float& logit) { logit = -INFINITE; });
}

// The bits of the tokens that both a request and a grammar allow, if there is one.
static inline const uint32_t* allowed_bits(const SampledRow& row, int64_t size, uint32_t* bits) {
    std::fill(bits, bits + round_up(size, GROUP) / 32, 0u);
    for (int64_t i = 0; i < row.num_allowed; i++) {
        const int64_t token = row.allowed[i];
        if ((uint64_t)token < (uint64_t)size) bits[token / 32] |= 1u << token % 32;
    }
    for (int64_t word = 0; row.mask != nullptr && word * 32 < size; word++) bits[word] &= row.mask[word];
    return bits;
}

// `given`: the logits without the repetition penalty.
template <class T, class L>
int64_t sample_row(const Logits<T>& given, const L& logits, const SampledRow& row) {
    const SamplingMemory memory(logits.size);
    if (row.mask == nullptr && !row.excludes()) return choose(logits, row, memory);
    Shaped<L> shaped(logits, row.allowed == nullptr ? row.mask : allowed_bits(row, logits.size, memory.bits), memory);
    reshape(row, shaped);
    if (row.mask != nullptr && row.excludes()) {
        // Where the grammar leaves no token, the other exclusions are dropped.
        Passed passed{memory.maxima, memory.sums, -INFINITE, 0, 0};
        find_maxima(shaped, passed);
        if (passed.best == -INFINITE) return choose(Shaped<Logits<T>>(given, row.mask, memory), row, memory);
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
