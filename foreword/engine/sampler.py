"""Sampling: the next token of each sequence, from the logits of a step.

Random bits are a function of (seed, sequence index, position), not of a generator's state: a request draws the same numbers in
any batch, after a preemption, and on another machine (docs/decisions/0007-randomness.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.engine.draw import Draw, Sampled
from foreword.engine.kernels.native import TYPES, Kernels, SampledRow
from foreword.engine.penalties import counts_of, excluded_tokens, penalizes, reshapes, shape
from foreword.engine.request import TokenLogprob
from foreword.engine.token_choice import block_maxima, candidates, choose, largest


def sampled_row(draw: Draw, number: int, mask: NDArray[np.uint8] | None, vocab: int) -> SampledRow:
    """`number`: the row's random bits. `mask`: of the tokens that a grammar allows. `vocab`: logits per row."""
    params = draw.params
    row = SampledRow(
        number=number, top_k=params.top_k, temperature=params.temperature, top_p=params.top_p, min_p=params.min_p
    )
    arrays: list[NDArray[Any]] = []

    def refer(array: NDArray[Any]) -> int:
        arrays.append(array)
        return int(array.ctypes.data)

    row.memory = arrays
    if mask is not None:
        row.mask = refer(mask)
    if not reshapes(draw):
        return row
    if penalizes(params):
        counts = counts_of(draw, vocab)
        if params.repetition_penalty != 1.0:
            arrays.append(counts.seen)
            row.seen, row.repetition_penalty = counts.seen_address, params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            generated, times = counts.generated
            row.generated, row.times, row.num_generated = refer(generated), refer(times), len(generated)
            row.presence_penalty, row.frequency_penalty = params.presence_penalty, params.frequency_penalty
    if params.logit_bias:
        row.biased, row.num_biased = refer(_tokens(params.logit_bias)), len(params.logit_bias)
        row.biases = refer(np.array(tuple(params.logit_bias.values()), np.float64).astype(np.float32))
    excluded = excluded_tokens(draw)
    if excluded:
        row.excluded, row.num_excluded = refer(_tokens(excluded)), len(excluded)
    if params.allowed_token_ids is not None:
        row.allowed, row.num_allowed = refer(_tokens(params.allowed_token_ids)), len(params.allowed_token_ids)
    return row


def _tokens(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64)


# Logits that PyTorch's operators sample together on a CPU: temporary tensors of this size stay in the cache.
_LOGITS_AT_ONCE: Final = 1 << 20


def random_bits(seed: int, index: int, position: int) -> int:
    """53 bits: BLAKE2b of the three."""
    data = struct.pack("<qqq", seed, index, position)
    (bits,) = struct.unpack("<Q", blake2b(data, digest_size=8, person=b"foreword-sample").digest())
    return int(bits >> 11)


def sample(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None = None) -> list[Sampled]:
    """One token per row of `logits` `[rows, vocab]`. Log-probabilities are those of the model's own distribution."""
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
    values, likeliest, _ = candidates(own, block_maxima(own), min(max(1, *counts), own.shape[1]))
    all_of_them = torch.cat((own.gather(1, chosen), values), 1) - own.logsumexp(-1, keepdim=True)
    return {
        row: TokenLogprob(tokens[row], logprob, tuple(zip(best[:count], top[:count], strict=True)))
        for row, count, (logprob, *top), best in zip(
            rows, counts, all_of_them.tolist(), likeliest.tolist(), strict=True
        )
    }
