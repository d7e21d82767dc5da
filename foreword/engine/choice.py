"""The choice of a token from each row of logits, for all rows of a batch at once and on the device of the logits.

Nothing here sorts a vocabulary where that can be avoided. The vocabulary is cut into blocks of tokens, and the maximum of
each block is computed once: the largest tokens of a row are in the blocks with the largest maxima. A full sort remains for
rows whose distribution is so flat that no limited number of candidates decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foreword.engine.request import SamplingParams

# Tokens per block of the vocabulary.
_BLOCK: Final = 32
# Candidates per row that are tried first; after these, the whole vocabulary.
_CANDIDATES: Final = (128, 2048)
# Elements of the temporary tensors of a sorted vocabulary.
_SORTED_AT_ONCE: Final = 1 << 21
# A float32 from 0 to 1 has 30 bits: an upper and a lower half.
_HALF: Final = 15
_LARGEST: Final = (1 << _HALF) - 1
_BITS: Final = (1 << 2 * _HALF) - 1
# Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
_MIN_TEMPERATURE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class _Filters:
    """Parameters of some rows, each `[rows, 1]` on the device of the logits.

    Attributes:
        maximum: the row's largest logit.
        number: uniform in [0, 1), float64.
        top_k: the vocabulary's size where there is no limit.
        total: weight of all tokens that the filters before top-p keep, where top-p counts against the whole vocabulary; NaN
            where it counts against the candidates. The likeliest token has the weight 1.
    """

    maximum: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    number: Tensor
    total: Tensor

    def of(self, rows: Tensor) -> _Filters:
        return _Filters(*(getattr(self, name)[rows] for name in self.__slots__))

    def weights(self, logits: Tensor) -> Tensor:
        """Float32, relative to the likeliest token. Subtracting the maximum first keeps tiny temperatures finite."""
        return ((logits - self.maximum) / self.temperature).exp()


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


def choose(logits: Tensor, maxima: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> Tensor:
    """A token of each row, `[rows]`: temperature, then top-k, min-p and top-p, then the inverse of the cumulative distribution
    function at the row's number: over the sorted tokens with top-k or top-p, over all in their order otherwise."""
    vocab = logits.shape[1]
    filters = _filters(maxima, params, numbers, vocab)
    limited = [0 < one.top_k < vocab for one in params]
    ranked = [row for row, one in enumerate(params) if limited[row] or one.top_p < 1.0]
    whole = [row for row, one in enumerate(params) if not limited[row]]
    chosen = torch.zeros(len(params), dtype=torch.long, device=logits.device)
    decided = [False] * len(params)
    if whole:
        rows = torch.tensor(whole, device=logits.device)
        shares = _shares(_select(logits, rows), filters.of(rows), any(params[row].min_p for row in whole))
        chosen[rows], filters.total[rows] = _choose_unsorted(shares, filters.of(rows))
    for count in (*_CANDIDATES, vocab):
        left = [row for row in ranked if not decided[row]]
        size = len(left) if count < vocab else max(1, _SORTED_AT_ONCE // vocab)
        for start in range(0, len(left), size or 1):
            some = left[start : start + size]
            rows = torch.tensor(some, device=logits.device)
            found = candidates(_select(logits, rows), maxima[rows], min(count, vocab))
            chosen[rows], known = _choose_sorted(*found, filters.of(rows))
            for row, one in zip(some, known.tolist(), strict=True):
                decided[row] = one
        flat = [place for place, row in enumerate(whole) if params[row].top_p < 1.0 and not decided[row]]
        if flat:
            rows = torch.tensor([whole[place] for place in flat], device=logits.device)
            chosen[rows] = _choose_by_mass(shares[torch.tensor(flat, device=logits.device)], filters.of(rows))
            for place in flat:
                decided[whole[place]] = True
    return chosen


def _filters(maxima: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float], vocab: int) -> _Filters:
    given = [
        (max(one.temperature, _MIN_TEMPERATURE), one.top_k or vocab, one.top_p, one.min_p, number, torch.nan)
        for one, number in zip(params, numbers, strict=True)
    ]
    temperature, top_k, top_p, min_p, number, total = (
        torch.tensor(given, dtype=torch.float64).to(maxima.device, non_blocking=True).unsqueeze(-1).unbind(1)
    )
    maximum = maxima.amax(-1, keepdim=True)
    return _Filters(maximum, temperature.float(), top_k, top_p, min_p.float(), number, total)


def _select(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows, in ascending order; not copied if they are all rows."""
    return logits if len(rows) == len(logits) else logits[rows]


def _shares(logits: Tensor, filters: _Filters, any_min_p: bool) -> Tensor:
    """Probabilities `[rows, vocab]` by temperature; zero where min-p drops a token."""
    shares = torch.softmax((logits - filters.maximum).div_(filters.temperature), -1)
    if any_min_p:
        shares.masked_fill_(shares < filters.min_p * shares.amax(-1, keepdim=True), 0.0)
    return shares


def _choose_unsorted(shares: Tensor, filters: _Filters) -> tuple[Tensor, Tensor]:
    """A token of each row by these probabilities, `[rows]`, and their sum, `[rows, 1]`, if the likeliest one were 1."""
    vocab = shares.shape[1]
    whole = vocab // _BLOCK
    sums = shares[:, : whole * _BLOCK].reshape(len(shares), whole, _BLOCK).sum(-1)
    if vocab % _BLOCK:
        sums = torch.cat((sums, shares[:, whole * _BLOCK :].sum(-1, keepdim=True)), 1)
    sums = sums.double()  # of blocks: a sum over all tokens in float64 would copy them
    up_to = sums.cumsum(-1)
    target = filters.number * up_to[:, -1:]
    block = _place(up_to, target)
    inside, tokens = _members(shares, block)
    inside = inside.clamp(min=0.0).double().cumsum(-1)
    place = _place(inside, target - (up_to - sums).gather(1, block))
    return tokens.gather(1, place)[:, 0], up_to[:, -1:] / shares.amax(-1, keepdim=True)


def _choose_sorted(values: Tensor, tokens: Tensor, edge: Tensor, filters: _Filters) -> tuple[Tensor, Tensor]:
    """A token of each row from its candidates, `[rows]`, and whether the candidates decide, `[rows]`.

    They do if all tokens that the filters keep are among them. Of the candidates, those above the edge count: every other
    token of the vocabulary comes after them.
    """
    counts = values > edge
    weights = filters.weights(values).masked_fill(~counts, 0.0)
    rank = torch.arange(values.shape[1], device=values.device)
    weights = weights.masked_fill((rank >= filters.top_k) | (weights < filters.min_p), 0.0).double()
    up_to = weights.cumsum(-1)
    own = up_to[:, -1:]
    total = torch.where(filters.total.isnan(), own, filters.total)
    limit = torch.where(filters.top_p < 1.0, filters.top_p * total, torch.inf)
    decided = (counts.sum(-1, keepdim=True) >= filters.top_k) | (edge == -torch.inf)
    decided |= filters.weights(edge) < filters.min_p
    decided |= (own >= limit) & ~filters.total.isnan()
    dropped = up_to - weights >= limit
    dropped[:, 0] = False  # the likeliest token stays, however small top_p is
    up_to = weights.masked_fill(dropped, 0.0).cumsum(-1)
    place = _place(up_to, filters.number * up_to[:, -1:])
    return tokens.gather(1, place)[:, 0], decided[:, 0]


def _choose_by_mass(shares: Tensor, filters: _Filters) -> Tensor:
    """A token of each row by top-p, `[rows]`, without sorting: two searches for a place in the order of the probabilities."""
    limit = filters.top_p * filters.total * shares.amax(-1, keepdim=True)
    _, kept = _search(shares, torch.nextafter(limit, torch.zeros_like(limit)))
    token, _ = _search(shares, filters.number * kept)
    return token


def _search(shares: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of descending probability, and of equal ones by token: the first token with which the sum exceeds `target`
    `[rows, 1]`, `[rows]`; and the sum with it, `[rows, 1]`. Probabilities of float32 are searched by their upper bits, then by
    their lower ones, then among equal ones."""
    bits = shares.view(torch.int32) & _BITS
    keys = _LARGEST - (bits >> _HALF)
    upper, before = _search_key(shares, keys, target)
    same = torch.where(keys == upper, shares, 0.0)
    lower, more = _search_key(same, _LARGEST - (bits & _LARGEST), target - before)
    before += more
    found = (_LARGEST - upper << _HALF) + _LARGEST - lower
    equal, value = bits == found, found.int().view(torch.float32).double()
    count = equal.sum(-1, keepdim=True)
    passed = ((target - before) / value).floor().nan_to_num(0.0).clamp(min=0).minimum(count - 1)
    place = torch.searchsorted(equal.cumsum(-1, dtype=torch.int32), passed.int(), right=True)
    return place.clamp(max=shares.shape[1] - 1)[:, 0], before + (passed + 1) * value


def _search_key(shares: Tensor, keys: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first key with which the sum over ascending keys exceeds the target, `[rows, 1]`, and the sum before it."""
    sums = torch.zeros(len(shares), _LARGEST + 1, dtype=torch.float64, device=shares.device)
    up_to = sums.scatter_add_(1, keys.long(), shares.double()).cumsum(-1)
    place = _place(up_to, target)
    return place, (up_to - sums).gather(1, place)


def _place(up_to: Tensor, target: Tensor) -> Tensor:
    """Where the cumulative weights `[rows, n]` first exceed the target `[rows, 1]`; at the latest where they reach their end,
    so that rounding chooses no token without weight."""
    last = (up_to < up_to[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(up_to, target, right=True), last.clamp(max=up_to.shape[1] - 1))
