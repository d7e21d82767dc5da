"""Sampling: the next token of each sequence, from the logits of a step.

Random bits are a function of (seed, sequence index, position), not of a generator's state: a request draws the same numbers in
any batch, after a preemption, and on another machine (docs/decisions/0007-randomness.md).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreword.engine.choice import block_maxima, candidates, choose, largest
from foreword.engine.draw import Draw, Sampled
from foreword.engine.kernels.native import TYPES, Kernels
from foreword.engine.penalties import shape
from foreword.engine.request import TokenLogprob
from foreword.engine.sampled_rows import sampled_row

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
    from foreword.engine.structured.constraint import allowed_tokens

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
