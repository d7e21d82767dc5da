"""The next token of each sequence, from the logits of a step.

Randomness is a function of (seed, sequence index, position), not of a generator's state: the same request draws the same
numbers whatever else is in the batch, after a preemption, and on another machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from foreword.engine.request import SamplingParams, TokenLogprob

# Below this a temperature is zero in float32, and nothing but the likeliest token is left long before.
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits needs to know of its sequence.

    Attributes:
        position: number of tokens before the one to be sampled.
        prompt, output: token ids so far, for penalties.
        end_tokens: tokens that must not come before `params.min_tokens` tokens have.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the three."""
    data = struct.pack("<qqq", seed, index, position)
    (bits,) = struct.unpack("<Q", blake2b(data, digest_size=8, person=b"foreword-sample").digest())
    return float(bits >> 11) / float(1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of `logits` `[rows, vocab]`. Log-probabilities are those of the model's own distribution."""
    logits = logits.float()
    reported = _logprobs(logits, draws)
    shaped = logits
    if any(_reshapes(draw) for draw in draws):
        shaped = logits.clone()
        for row, draw in enumerate(draws):
            if _reshapes(draw):
                _penalise(shaped[row], draw)
    tokens: list[int] = torch.argmax(shaped, dim=-1).tolist()
    for row, draw in enumerate(draws):
        if not draw.params.greedy:
            tokens[row] = _choose(shaped[row], draw)
    return [Sampled(token, _report(reported, row, token, draws[row])) for row, token in enumerate(tokens)]


def _reshapes(draw: Draw) -> bool:
    params = draw.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or len(draw.output) < params.min_tokens
    )


def _penalise(row: Tensor, draw: Draw) -> None:
    """Bias, repetition (Keskar et al. 2019), presence and frequency penalties (OpenAI), and no early end, in place."""
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*draw.prompt, *draw.output}), dtype=torch.long, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if draw.output and (params.presence_penalty or params.frequency_penalty):
        output = torch.tensor(list(draw.output), dtype=torch.long, device=row.device)
        tokens, counts = torch.unique(output, return_counts=True)
        row[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(draw.output) < params.min_tokens and draw.end_tokens:
        row[list(draw.end_tokens)] = -torch.inf


def _choose(row: Tensor, draw: Draw) -> int:
    """Temperature, then top-k, min-p and top-p, then the inverse of the cumulative distribution."""
    params = draw.params
    # Subtracting the maximum first keeps tiny temperatures finite.
    row = (row - row.max()) / max(params.temperature, _COLDEST)
    probabilities = torch.softmax(row, dim=-1)
    ranked, tokens = _rank(probabilities, params)
    if params.min_p > 0:
        ranked = ranked.masked_fill(ranked < params.min_p * probabilities.max(), 0.0)
    if params.top_p < 1.0:
        before = torch.cumsum(ranked, 0) - ranked
        dropped = before >= params.top_p * ranked.sum()
        dropped[0] = False  # the likeliest token stays, however small top_p is
        ranked = ranked.masked_fill(dropped, 0.0)
    summed = torch.cumsum(ranked.double(), 0)
    target = uniform(draw.seed, draw.index, draw.position) * summed[-1]
    place = int(torch.searchsorted(summed, target, right=True))
    place = min(place, int(ranked.nonzero()[-1]))
    return place if tokens is None else int(tokens[place])


def _rank(probabilities: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Probabilities best first with their tokens, if an order is needed, else as they are."""
    if 0 < params.top_k < probabilities.numel():
        ranked, tokens = torch.topk(probabilities, params.top_k)
        return ranked, tokens
    if params.top_p < 1.0:
        ranked, tokens = torch.sort(probabilities, descending=True, stable=True)
        return ranked, tokens
    return probabilities, None


@dataclass(frozen=True, slots=True)
class _Reported:
    logprobs: Tensor
    values: list[list[float]]
    tokens: list[list[int]]


def _logprobs(logits: Tensor, draws: Sequence[Draw]) -> _Reported | None:
    wanted = [draw.params.logprobs for draw in draws if draw.params.logprobs is not None]
    if not wanted:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, min(max(wanted), logits.shape[-1]), dim=-1)
    return _Reported(logprobs, top.values.tolist(), top.indices.tolist())


def _report(reported: _Reported | None, row: int, token: int, draw: Draw) -> TokenLogprob | None:
    count = draw.params.logprobs
    if reported is None or count is None:
        return None
    top = tuple(zip(reported.tokens[row][:count], reported.values[row][:count], strict=True))
    return TokenLogprob(token, float(reported.logprobs[row, token]), top)
