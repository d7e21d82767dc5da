"""Sampling: the next token of each sequence, from the logits of a step.

Random bits are a function of (seed, sequence index, position), not of a generator's state: a request draws the same numbers in
any batch, after a preemption, and on another machine (dev/decisions/0007-randomness.md).

On CPUs the compiled kernels choose (kernels/sampling.h). Elsewhere PyTorch's operators do, for all rows of a batch at once and
on the device of the logits: the vocabulary is cut into blocks of tokens, and the maximum of each block is computed once, so the
largest tokens of a row are in the blocks with the largest maxima. Top-p is rejection sampling (Ye et al. 2025, FlashInfer).
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import compress
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.engine.kernels.native import TYPES, Kernels, SampledRow
from foreword.engine.request import SamplingParams
from foreword.engine.sequence import Draw, Sampled, TokenCounts
from foreword.tokens.token_logprob import TokenLogprob

# Logits that PyTorch's operators sample together on a CPU: temporary tensors of this size stay in the cache.
_LOGITS_AT_ONCE: Final = 1 << 20
# Tokens per block of the vocabulary.
_BLOCK: Final = 32
# Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
_MIN_TEMPERATURE: Final = 1e-6
_MASK: Final = (1 << 64) - 1
# The share of a chord that rounding may take, of which the compiled kernels keep fewer bits.
_ROUNDING: Final = 2.0**-15
_RANDOM_BITS: Final = blake2b(digest_size=8, person=b"foreword-sample")


def reshapes(draw: Draw) -> bool:
    """Whether penalties, a bias or exclusions apply to the row."""
    params = draw.params
    special = params.logit_bias or params.allowed_token_ids is not None or draw.bad_words
    return bool(params.penalizes or special or draw.num_output < params.min_tokens)


def shape(given: Tensor, draws: Sequence[Draw], allowed: Mapping[int, Tensor]) -> Tensor:
    """The logits in float32 after penalties and exclusions; the same tensor if nothing changes. `allowed`: by row, the packed
    mask of the tokens that a grammar allows."""
    reshaped = [row for row, draw in enumerate(draws) if reshapes(draw)]
    logits = given.float()
    if not allowed and not reshaped:
        return logits
    if logits is given:
        logits = logits.clone()
    before = {row: logits[row].clone() for row in reshaped if row in allowed}
    if reshaped:
        reshape(logits, draws, reshaped)
    if allowed:
        _exclude(logits, allowed)
    if before:
        # Where the grammar leaves no token, the other exclusions are dropped.
        left = logits[list(before)].amax(-1).tolist()
        without = {row: allowed[row] for row, best in zip(before, left, strict=True) if best == -torch.inf}
        for row in without:
            logits[row] = before[row]
        if without:
            _exclude(logits, without)
    return logits


def _exclude(logits: Tensor, allowed: Mapping[int, Tensor]) -> None:
    """In place: exclude what the grammars of these rows forbid."""
    added = _by_bit(tuple(allowed.values()), logits, torch.tensor([-torch.inf, 0.0]))
    logits.index_add_(0, torch.tensor(tuple(allowed), device=logits.device), added)


def _by_bit(packed: Sequence[Tensor], logits: Tensor, values: Tensor) -> Tensor:
    """`[rows, vocab]`: one of two values for each bit. A byte becomes eight numbers by a table."""
    table = values.to(logits.device)[torch.arange(256)[:, None] >> torch.arange(8) & 1]
    found = torch.nn.functional.embedding(torch.stack(tuple(packed)).to(logits.device).int(), table)
    return found.flatten(1)[:, : logits.shape[1]]


def reshape(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """In place, for the given rows: repetition (Keskar et al. 2019), presence and frequency penalties (OpenAI), logit bias, and
    exclusions."""
    penalized = [row for row in rows if draws[row].params.penalizes]
    if penalized:
        _penalize(logits, draws, penalized)
    biases = [(row, token, bias) for row in rows for token, bias in draws[row].params.logit_bias.items()]
    if biases:
        at, tokens, added = zip(*biases, strict=True)
        logits[_index(at, logits), _index(tokens, logits)] += torch.tensor(added, device=logits.device)
    excluded = [(row, token) for row in rows for token in excluded_tokens(draws[row])]
    if excluded:
        at, tokens = zip(*excluded, strict=True)
        logits[_index(at, logits), _index(tokens, logits)] = -torch.inf
    for row in rows:
        allowed = draws[row].params.allowed_token_ids
        if allowed is not None:
            kept = _index(allowed, logits)
            logits[row] = torch.full_like(logits[row], -torch.inf).index_copy_(0, kept, logits[row, kept])


def _index(numbers: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=logits.device)


def _penalize(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """All rows in one operation each."""
    counted = {row: counts_of(draws[row], logits.shape[1]) for row in rows}
    repeated = [row for row in rows if draws[row].params.repetition_penalty != 1.0]
    if repeated:
        seen = _by_bit([torch.from_numpy(counted[row].seen) for row in repeated], logits, torch.tensor([False, True]))
        by = torch.tensor([draws[row].params.repetition_penalty for row in repeated]).to(logits.device)[:, None]
        values = logits[repeated]
        logits[repeated] = torch.where(seen, values * torch.where(values > 0, 1 / by, by), values)
    of_output = [row for row in rows if draws[row].params.presence_penalty or draws[row].params.frequency_penalty]
    if of_output:
        places, less = [], []
        for row in of_output:
            params, counts = draws[row].params, counted[row]
            places.append(row * logits.shape[1] + np.array(counts.generated))
            less.append(params.presence_penalty + params.frequency_penalty * np.array(counts.times))
        where, values = (torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (places, less))
        logits.view(-1)[where] -= values


def counts_of(draw: Draw, vocab: int) -> TokenCounts:
    counts = draw.counts or TokenCounts()
    counts.follow(draw.tokens, draw.num_prompt, vocab)
    return counts


def excluded_tokens(draw: Draw) -> list[int]:
    """Tokens that may not come next: end tokens before `min_tokens`, and last tokens of bad words."""
    excluded = list(draw.end_tokens) if draw.num_output < draw.params.min_tokens else []
    for words in draw.bad_words:
        before = len(words) - 1
        if not before or (draw.num_output >= before and tuple(draw.tokens[-before:]) == words[:-1]):
            excluded.append(words[-1])
    return excluded


def block_maxima(logits: Tensor) -> Tensor:
    """The largest logit of each block of the vocabulary, `[rows, blocks]`, of float32 logits `[rows, vocab]`."""
    return _by_block(logits, Tensor.amax)


def _by_block(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Each block of the vocabulary reduced to one number, `[rows, blocks]`. The last block may be shorter."""
    vocab = values.shape[1]
    whole = vocab // _BLOCK
    found = reduce(values[:, : whole * _BLOCK].reshape(len(values), whole, _BLOCK), -1)
    if vocab % _BLOCK:
        found = torch.cat((found, reduce(values[:, whole * _BLOCK :], -1, keepdim=True)), 1)
    return found


def largest(logits: Tensor, maxima: Tensor) -> Tensor:
    """The first token with the largest logit of each row, `[rows]`."""
    values, tokens = _members(logits, maxima.argmax(-1, keepdim=True))
    return tokens.gather(1, values.argmax(-1, keepdim=True))[:, 0]


def candidates(logits: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their tokens, by size and then by token, `[rows, count]`."""
    values, tokens = logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    if count < maxima.shape[1]:
        # Each of these blocks has a token that comes before all tokens of the other blocks.
        blocks = torch.arange(maxima.shape[1], device=logits.device)
        values, tokens = _members(logits, _sort_keys(maxima, blocks).topk(count, -1).indices)
    order = _sort_keys(values, tokens).topk(min(count, values.shape[1]), -1).indices
    return values.gather(1, order), tokens.gather(1, order)


def _members(logits: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens of the given blocks `[rows, n]`, each `[rows, n * _BLOCK]`. Past the vocabulary's end the logit is
    -inf and the token the last one."""
    vocab = logits.shape[1]
    tokens = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    if not vocab % _BLOCK:
        return logits.gather(1, tokens), tokens
    known = tokens.clamp(max=vocab - 1)
    return logits.gather(1, known).masked_fill_(tokens >= vocab, -torch.inf), known


def _sort_keys(values: Tensor, tokens: Tensor) -> Tensor:
    """Integers in the order of the values, and of equal values the lower token first (as the larger key)."""
    bits = (values + 0.0).view(torch.int32)  # adding zero makes one of the two zeros
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.long() << 32) | (0x7FFFFFFF - tokens)


def next_number(number: int) -> int:
    """The 53 random bits of a row's next draw: splitmix64 (Steele et al. 2014) of those of the last one."""
    mixed = number + 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) >> 11


def choose(logits: Tensor, maxima: Tensor, params: Sequence[SamplingParams], numbers: Sequence[int]) -> Tensor:
    """A token of each row, `[rows]`: temperature, then top-k, min-p and top-p. A draw is the inverse of the cumulative
    distribution function, in order of token ids, at the row's number (53 random bits)."""
    limited = [row for row, one in enumerate(params) if 0 < one.top_k < logits.shape[1]]
    whole = [row for row in range(len(params)) if row not in limited]
    chosen = largest(logits, maxima)
    finite = maxima.amax(-1).isfinite()
    for part in (limited, whole):
        if not part:
            continue
        rows = torch.tensor(part, device=logits.device)
        some, tokens = logits if len(part) == len(params) else logits[rows], None
        if part is limited:
            some, tokens = _most(some, maxima[rows], [params[row].top_k for row in part])
        found = _sampled(some, [params[row] for row in part], [numbers[row] for row in part])
        found = found if tokens is None else tokens.gather(1, found)
        chosen[rows] = torch.where(finite[rows], found[:, 0], chosen[rows])
    return chosen


def _most(logits: Tensor, maxima: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The `counts` largest logits of each row and their tokens, in order of tokens, `[rows, n]`; -inf where a row has fewer."""
    top_k = torch.tensor(counts, device=logits.device)[:, None]
    values, tokens = candidates(logits, maxima, max(counts))
    values = values.masked_fill(torch.arange(values.shape[1], device=logits.device) >= top_k, -torch.inf)
    order = tokens.argsort(-1)
    return values.gather(1, order), tokens.gather(1, order)


def _sampled(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[int]) -> Tensor:
    """A place in each row, `[rows, 1]`, by temperature, min-p and top-p.

    Tokens are drawn by chords of exp2 between whole numbers, which are above it, and kept with the probability that the weight
    has of the chord. With top-p, the first draw is from all tokens. If those before the kept one, in order of descending
    logits, reach `top_p`, the next draw is among them. Of equal logits, the lower token comes first.
    """
    given = [(max(one.temperature, _MIN_TEMPERATURE), one.min_p, one.top_p) for one in params]
    temperature, min_p, top_p = torch.tensor(given, dtype=torch.float64).to(logits.device).unsqueeze(-1).unbind(1)
    scale, best = (math.log2(math.e) / temperature).float(), logits.amax(-1, keepdim=True)
    above = (best.double() * scale).frac()
    above = torch.where(above < 0, above + 1, above).float()
    powers = ((logits - best) * scale).add_(above)
    weights = powers.exp2()
    weights.masked_fill_((weights < min_p * above.exp2()) | (powers < -100), 0.0)
    whole = powers.clamp_(min=-100).floor()
    chords = powers.sub_(whole).add_(1).mul_(whole.exp2_()).mul_(weights > 0)
    nucleus = any(one.top_p < 1 for one in params)
    limit = torch.where(top_p < 1, top_p * _block_sums(weights).sum(-1, keepdim=True), torch.inf)
    chosen = torch.zeros(len(params), 1, dtype=torch.long, device=logits.device)
    left = torch.arange(len(params), device=logits.device)
    while len(left):
        drawn = _draw(chords, _uniform(numbers, chords))
        numbers = [next_number(number) for number in numbers]
        chord = chords.gather(1, drawn)  # not a number in a row without any
        kept = ~(_uniform(numbers, chords) * chord * (1 + _ROUNDING) >= weights.gather(1, drawn))
        numbers = [next_number(number) for number in numbers]
        more = ~kept
        if nucleus:
            values, lower = logits.gather(1, drawn), torch.arange(logits.shape[1], device=logits.device) < drawn
            before = torch.where(lower, logits >= values, logits > values)
            beyond = kept & (_block_sums(weights * before).sum(-1, keepdim=True) >= limit)
            before |= ~beyond
            weights, chords, more = weights.mul_(before), chords.mul_(before), more | beyond
        again = more[:, 0]
        chosen[left[~again]] = drawn[~again]
        left, logits, weights, chords, limit = (one[again] for one in (left, logits, weights, chords, limit))
        numbers = list(compress(numbers, again.tolist()))
    return chosen


def _uniform(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Numbers of 53 bits as shares of 1, `[rows, 1]`."""
    return torch.tensor(numbers, dtype=torch.float64).to(like.device)[:, None] * 2.0**-53


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of each block of the vocabulary, in float64: a sum over all tokens in float64 would copy them."""
    return _by_block(weights, Tensor.sum).double()


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row by weights `[rows, vocab]`, `[rows, 1]`."""
    sums = _block_sums(weights)
    up_to = sums.cumsum(-1)
    target = uniform * up_to[:, -1:]
    block = _place(up_to, target)
    inside, tokens = _members(weights, block)
    inside = inside.clamp(min=0.0).double().cumsum(-1)
    place = _place(inside, target - (up_to - sums).gather(1, block))
    return tokens.gather(1, place)


def _place(up_to: Tensor, target: Tensor) -> Tensor:
    """Where the cumulative weights `[rows, n]` first exceed the target `[rows, 1]`; at the latest where they reach their end,
    so that rounding chooses no token without weight."""
    last = (up_to < up_to[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(up_to, target, right=True), last.clamp(max=up_to.shape[1] - 1))


def sampled_row(draw: Draw, number: int, mask: NDArray[np.uint8] | None, vocab: int) -> SampledRow:
    """`number`: the row's random bits. `mask`: of the tokens that a grammar allows. `vocab`: logits per row."""
    params = draw.params
    row = SampledRow(
        number=number, top_k=params.top_k, temperature=params.temperature, top_p=params.top_p, min_p=params.min_p
    )
    arrays: list[Any] = [mask]

    def refer(numbers: array[Any]) -> int:
        arrays.append(numbers)
        return numbers.buffer_info()[0]

    row.memory = arrays
    if mask is not None:
        row.mask = int(mask.ctypes.data)
    if not reshapes(draw):
        return row
    if params.penalizes:
        counts = counts_of(draw, vocab)
        if params.repetition_penalty != 1.0:
            arrays.append(counts.seen)
            row.seen, row.repetition_penalty = counts.seen_address, params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            row.generated, row.times = refer(counts.generated), refer(counts.times)
            row.num_generated = len(counts.generated)
            row.presence_penalty, row.frequency_penalty = params.presence_penalty, params.frequency_penalty
    if params.logit_bias:
        row.biased, row.num_biased = refer(array("q", params.logit_bias)), len(params.logit_bias)
        row.biases = refer(array("f", params.logit_bias.values()))
    excluded = excluded_tokens(draw)
    if excluded:
        row.excluded, row.num_excluded = refer(array("q", excluded)), len(excluded)
    if params.allowed_token_ids is not None:
        row.allowed, row.num_allowed = refer(array("q", params.allowed_token_ids)), len(params.allowed_token_ids)
    return row


def random_bits(seed: int, index: int, position: int) -> int:
    """53 bits: BLAKE2b of the three."""
    hashed = _RANDOM_BITS.copy()  # three times as fast as a new one with these parameters
    hashed.update(struct.pack("<qqq", seed, index, position))
    return int.from_bytes(hashed.digest(), "little") >> 11


def sample(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None = None) -> list[Sampled]:
    """Sample a token per row of `logits` `[rows, vocab]`. Log-probabilities are those of the model's own distribution."""
    masks = _masks(draws, logits.shape[1])
    numbers = [0 if draw.params.greedy else random_bits(draw.seed, draw.index, len(draw.tokens)) for draw in draws]
    if kernels is not None and logits.device.type == "cpu":
        rows = [
            sampled_row(draw, number, masks.get(row), logits.shape[1])
            for row, (draw, number) in enumerate(zip(draws, numbers, strict=True))
        ]
        known = logits if logits.dtype in TYPES else logits.float()
        tokens = kernels.sample(known if known.stride(1) == 1 else known.contiguous(), rows)
    else:
        tokens = [
            token
            for part in _parts(range(len(draws)), logits)
            for token in _choose(logits, draws, numbers, masks, part)
        ]
    errors: list[str | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw.constraint is not None:
            errors[row] = draw.constraint.error()
            if errors[row] is None:
                tokens[row] = draw.constraint.choose(tokens[row], draw.left)
    found: dict[int, TokenLogprob] = {}
    for part in _parts([row for row, draw in enumerate(draws) if draw.params.logprobs is not None], logits):
        found |= _logprobs(logits, draws, tokens, part)
    return [Sampled(token, found.get(row), errors[row]) for row, token in enumerate(tokens)]


def _parts(rows: Sequence[int], logits: Tensor) -> list[Sequence[int]]:
    """The rows, some at once."""
    size = len(rows) if logits.device.type != "cpu" else _LOGITS_AT_ONCE // logits.shape[1]
    return [rows[start : start + max(1, size)] for start in range(0, len(rows), max(1, size))]


def _choose(
    logits: Tensor,
    draws: Sequence[Draw],
    numbers: Sequence[int],
    masks: Mapping[int, NDArray[np.uint8]],
    rows: Sequence[int],
) -> list[int]:
    """The tokens of consecutive rows, by PyTorch's operators."""
    given = {place: torch.from_numpy(masks[row]).to(logits.device) for place, row in enumerate(rows) if row in masks}
    shaped = shape(logits[rows[0] : rows[-1] + 1], [draws[row] for row in rows], given)
    maxima = block_maxima(shaped)
    best = largest(shaped, maxima)
    random = [place for place, row in enumerate(rows) if not draws[row].params.greedy]
    if random:
        at = torch.tensor(random, device=logits.device)
        some = (shaped, maxima) if len(random) == len(rows) else (shaped[at], maxima[at])
        best[at] = choose(*some, [draws[rows[one]].params for one in random], [numbers[rows[one]] for one in random])
    tokens: list[int] = best.tolist()
    return tokens


def _masks(draws: Sequence[Draw], vocab: int) -> dict[int, NDArray[np.uint8]]:
    """By row, the bits of the tokens that a grammar allows."""
    constraints = {row: draw.constraint for row, draw in enumerate(draws) if draw.constraint is not None}
    if not constraints:
        return {}
    from foreword.engine.structured.sequence_constraint import allowed_tokens

    return dict(zip(constraints, allowed_tokens(list(constraints.values()), vocab), strict=True))


def _logprobs(
    logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int], rows: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the chosen tokens and the largest ones, of some rows."""
    counts = [draws[row].params.logprobs or 0 for row in rows]
    own = logits[list(rows)].float()
    chosen = torch.tensor([[tokens[row]] for row in rows], device=logits.device)
    _, likeliest = candidates(own, block_maxima(own), min(max(1, *counts), own.shape[1]))
    # (`logsumexp` would add up a single row in several threads, and many rows in one each.)
    all_of_them = own.log_softmax(-1).gather(1, torch.cat((chosen, likeliest), 1))
    return {
        row: TokenLogprob(tokens[row], logprob, tuple(zip(best[:count], top[:count], strict=True)))
        for row, count, (logprob, *top), best in zip(
            rows, counts, all_of_them.tolist(), likeliest.tolist(), strict=True
        )
    }
