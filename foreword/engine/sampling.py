"""Sampling: the next token of each sequence, from the logits of a step.

A random number is a function of (seed, sequence index, position), not of a generator's state: a request draws the same
numbers in any batch, after a preemption, and on another machine (docs/decisions/0007-randomness.md).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from foreword.engine.choice import block_maxima, candidates, choose, largest
from foreword.engine.draw import Draw, Sampled
from foreword.engine.penalties import reshape, reshapes
from foreword.engine.request import TokenLogprob

# Logits that are sampled together on a CPU: temporary tensors of this size stay in the cache.
_LOGITS_AT_ONCE: Final = 1 << 20


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the three."""
    data = struct.pack("<qqq", seed, index, position)
    (bits,) = struct.unpack("<Q", blake2b(data, digest_size=8, person=b"foreword-sample").digest())
    return float(bits >> 11) / float(1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of `logits` `[rows, vocab]`. Log-probabilities are those of the model's own distribution."""
    allowed = _allowed_tokens(draws, logits)
    size = len(draws) if logits.device.type != "cpu" else max(1, _LOGITS_AT_ONCE // logits.shape[1])
    sampled: list[Sampled] = []
    for start in range(0, len(draws), size):
        rows = range(start, min(start + size, len(draws)))
        masks = {row - start: allowed[row] for row in rows if row in allowed}
        sampled += _sample(logits[rows.start : rows.stop], draws[rows.start : rows.stop], masks)
    return sampled


def _sample(given: Tensor, draws: Sequence[Draw], allowed: Mapping[int, Tensor]) -> list[Sampled]:
    logits = _shape(given, draws, allowed)
    maxima = block_maxima(logits)
    best = largest(logits, maxima)
    random = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        some = (logits, maxima) if len(random) == len(draws) else (logits[rows], maxima[rows])
        drawn = [draws[row] for row in random]
        numbers = [uniform(draw.seed, draw.index, len(draw.tokens)) for draw in drawn]
        best[rows] = choose(*some, [draw.params for draw in drawn], numbers)
    tokens: list[int] = best.tolist()
    errors: list[str | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw.constraint is not None:
            errors[row] = draw.constraint.error()
            if errors[row] is None:
                tokens[row] = draw.constraint.choose(tokens[row], draw.left)
    logprobs = _logprobs(given, draws, tokens)
    return [Sampled(*one) for one in zip(tokens, logprobs, errors, strict=True)]


def _allowed_tokens(draws: Sequence[Draw], logits: Tensor) -> dict[int, Tensor]:
    """By row, the packed mask of the tokens that a grammar allows."""
    constraints = {row: draw.constraint for row, draw in enumerate(draws) if draw.constraint is not None}
    if not constraints:
        return {}
    from foreword.engine.structured.constraint import allowed_tokens

    masks = allowed_tokens(list(constraints.values()), logits.shape[1])
    return dict(zip(constraints, torch.from_numpy(masks).to(logits.device), strict=True))


def _shape(given: Tensor, draws: Sequence[Draw], allowed: Mapping[int, Tensor]) -> Tensor:
    """The logits in float32 after penalties and exclusions; the same tensor if nothing changes."""
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
    """In place: exclude what the grammars of these rows forbid. A byte of a mask becomes eight numbers to add."""
    bits = torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device) & 1
    added = torch.where(bits == 1, 0.0, -torch.inf)
    masks = torch.nn.functional.embedding(torch.stack(tuple(allowed.values())).int(), added).flatten(1)
    rows = torch.tensor(tuple(allowed), device=logits.device)
    logits.index_add_(0, rows, masks[:, : logits.shape[1]])


def _logprobs(logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[TokenLogprob | None]:
    """Log-probabilities of the chosen tokens and the largest ones, of the rows that asked for them."""
    found: list[TokenLogprob | None] = [None] * len(draws)
    wanted = {row: draw.params.logprobs for row, draw in enumerate(draws) if draw.params.logprobs is not None}
    if not wanted:
        return found
    own = logits[list(wanted)].float()
    chosen = torch.tensor([[tokens[row]] for row in wanted], device=logits.device)
    values, likeliest, _ = candidates(own, block_maxima(own), min(max(1, *wanted.values()), own.shape[1]))
    all_of_them = torch.cat((own.gather(1, chosen), values), 1) - own.logsumexp(-1, keepdim=True)
    for (row, count), (logprob, *top), best in zip(
        wanted.items(), all_of_them.tolist(), likeliest.tolist(), strict=True
    ):
        found[row] = TokenLogprob(tokens[row], logprob, tuple(zip(best[:count], top[:count], strict=True)))
    return found
