"""The choice of a token from each row of logits, for all rows of a batch at once and on the device of the logits, by PyTorch's
operators. (kernels/sampling.h is the same for CPUs, compiled.)

The vocabulary is cut into blocks of tokens, and the maximum of each block is computed once: the largest tokens of a row are in
the blocks with the largest maxima. Top-p is rejection sampling (Ye et al. 2025, FlashInfer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import Final

import torch
from torch import Tensor

from foreword.engine.request import SamplingParams

# Tokens per block of the vocabulary.
_BLOCK: Final = 32
# Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
_MIN_TEMPERATURE: Final = 1e-6
_MASK: Final = (1 << 64) - 1
# What rounding may take from a chord, of which the compiled kernels keep fewer bits.
_ROUNDING: Final = 2.0**-15


def block_maxima(logits: Tensor) -> Tensor:
    """The largest logit of each block of the vocabulary, `[rows, blocks]`, of float32 logits `[rows, vocab]`."""
    vocab = logits.shape[1]
    whole = vocab // _BLOCK
    maxima = logits[:, : whole * _BLOCK].reshape(len(logits), whole, _BLOCK).amax(-1)
    if vocab % _BLOCK:
        maxima = torch.cat((maxima, logits[:, whole * _BLOCK :].amax(-1, keepdim=True)), 1)
    return maxima


def largest(logits: Tensor, maxima: Tensor) -> Tensor:
    """The first token with the largest logit of each row, `[rows]`."""
    values, tokens = _members(logits, maxima.argmax(-1, keepdim=True))
    return tokens.gather(1, values.argmax(-1, keepdim=True))[:, 0]


def candidates(logits: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest logits of each row and their tokens, by size and then by token, `[rows, count]`; and an edge,
    `[rows, 1]`: all logits above it are among them. (Of those equal to it, some may not be.)"""
    blocks = maxima.shape[1]
    if count >= blocks:
        values, tokens = logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
        edge = torch.full_like(maxima[:, :1], -torch.inf)
    else:
        best = maxima.topk(count + 1, -1)
        values, tokens = _members(logits, best.indices[:, :count])
        edge = best.values[:, count:]
    complete = count >= logits.shape[1]
    order = _sort_keys(values, tokens).topk(min(count, values.shape[1]), -1).indices
    values, tokens = values.gather(1, order), tokens.gather(1, order)
    return values, tokens, edge if complete else torch.maximum(edge, values[:, -1:])


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
    values, tokens, edge = candidates(logits, maxima, min(2 * max(counts) + 64, logits.shape[1]))
    if not (values.gather(1, top_k - 1) > edge).all():  # of logits that equal the edge, some may be missing
        values, tokens, _ = candidates(logits, maxima, logits.shape[1])
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
    """Of each block of the vocabulary, in float64: a sum over all tokens in float64 would copy them."""
    vocab = weights.shape[1]
    whole = vocab // _BLOCK
    sums = weights[:, : whole * _BLOCK].reshape(len(weights), whole, _BLOCK).sum(-1)
    if vocab % _BLOCK:
        sums = torch.cat((sums, weights[:, whole * _BLOCK :].sum(-1, keepdim=True)), 1)
    return sums.double()


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
