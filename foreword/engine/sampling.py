"""Sampling: the next token of each sequence, from the logits of a step.

A random number is a function of (seed, sequence index, position), not of a generator's state: a request draws the same
numbers in any batch, after a preemption, and on another machine (docs/decisions/0007-randomness.md).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.engine.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.structured.constraint import Constraint

# Lower temperatures are zero in float32. Only the likeliest token has weight long before that.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Draw:
    """What sampling one row of logits needs from its sequence.

    Attributes:
        position: number of tokens before the one to be sampled.
        prompt, output: token ids so far, for penalties.
        end_tokens: tokens that are excluded until there are `params.min_tokens` output tokens.
        left: tokens that may follow this one.
        constraint: what the output must match. It comes before all other exclusions.
        bad_words: token sequences that are excluded.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    end_tokens: tuple[int, ...]
    left: int = 0
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with log-probabilities if they were requested. `error`: why there is no token."""

    token: int
    logprob: TokenLogprob | None
    error: str | None = None


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: BLAKE2b of the three."""
    data = struct.pack("<qqq", seed, index, position)
    (bits,) = struct.unpack("<Q", blake2b(data, digest_size=8, person=b"foreword-sample").digest())
    return float(bits >> 11) / float(1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of `logits` `[rows, vocab]`. Log-probabilities are those of the model's own distribution."""
    given, logits = logits, logits.float()
    logprobs = _logprobs(logits, draws)
    shaped = _shape(logits, draws, in_place=logits is not given)
    tokens: list[int] = torch.argmax(shaped, dim=-1).tolist()
    errors: list[str | None] = [None] * len(draws)
    for row, draw in enumerate(draws):
        if draw.constraint is not None and (error := draw.constraint.error()) is not None:
            errors[row] = error
            continue
        if not draw.params.greedy:
            tokens[row] = _choose(shaped[row], draw)
        if draw.constraint is not None:
            tokens[row] = draw.constraint.choose(tokens[row], draw.left)
    if logprobs is None:
        return [Sampled(token, None, error) for token, error in zip(tokens, errors, strict=True)]
    found = [logprobs.of_token(row, token, draws[row].params.logprobs) for row, token in enumerate(tokens)]
    return [Sampled(*one) for one in zip(tokens, found, errors, strict=True)]


def _shape(logits: Tensor, draws: Sequence[Draw], *, in_place: bool) -> Tensor:
    """The logits after penalties and exclusions; the same tensor if there are none, or if they may be made in place."""
    constraints = {row: draw.constraint for row, draw in enumerate(draws) if draw.constraint is not None}
    reshaped = [row for row, draw in enumerate(draws) if _reshapes(draw)]
    if not constraints and not reshaped:
        return logits
    before = {row: logits[row].clone() for row in reshaped if row in constraints}
    shaped = logits if in_place else logits.clone()
    for row in reshaped:
        _apply_penalties(shaped[row], draws[row])
    if constraints:
        _constrain(shaped, constraints, before)
    return shaped


def _constrain(shaped: Tensor, constraints: Mapping[int, Constraint], before: Mapping[int, Tensor]) -> None:
    """In place: exclude what the grammars forbid. Where that leaves no token, the other exclusions are dropped: `before` has
    the rows without them."""
    from foreword.engine.structured.constraint import forbidden_tokens

    forbidden = torch.from_numpy(forbidden_tokens(list(constraints.values()), shaped.shape[-1])).to(shaped.device)
    for row, excluded in zip(constraints, forbidden, strict=True):
        shaped[row].masked_fill_(excluded, -torch.inf)
        if row in before and shaped[row].max() == -torch.inf:
            shaped[row] = before[row].masked_fill(excluded, -torch.inf)


def _reshapes(draw: Draw) -> bool:
    params = draw.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.allowed_token_ids is not None
        or draw.bad_words
        or len(draw.output) < params.min_tokens
    )


def _apply_penalties(row: Tensor, draw: Draw) -> None:
    """In place: logit bias, repetition (Keskar et al. 2019), presence and frequency penalties (OpenAI), and exclusions."""
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
    for words in draw.bad_words:
        if len(words) == 1 or tuple(draw.output[1 - len(words) :]) == words[:-1]:
            row[words[-1]] = -torch.inf
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.long, device=row.device)
        row[:] = torch.full_like(row, -torch.inf).index_copy_(0, allowed, row[allowed])


def _choose(row: Tensor, draw: Draw) -> int:
    """Temperature, then top-k, min-p and top-p, then the inverse of the cumulative distribution function."""
    params = draw.params
    # Subtracting the maximum first keeps tiny temperatures finite.
    row = (row - row.max()) / max(params.temperature, _MIN_TEMPERATURE)
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
    """Probabilities in descending order with their tokens, if a filter needs the order, else as they are."""
    if 0 < params.top_k < probabilities.numel():
        ranked, tokens = torch.topk(probabilities, params.top_k)
        return ranked, tokens
    if params.top_p < 1.0:
        ranked, tokens = torch.sort(probabilities, descending=True, stable=True)
        return ranked, tokens
    return probabilities, None


@dataclass(frozen=True, slots=True)
class _StepLogprobs:
    """Log-probabilities `[rows, vocab]`, and each row's largest with their tokens."""

    all: Tensor
    values: list[list[float]]
    tokens: list[list[int]]

    def of_token(self, row: int, token: int, count: int | None) -> TokenLogprob | None:
        """The token's log-probability and the `count` largest; None if they were not requested."""
        if count is None:
            return None
        top = tuple(zip(self.tokens[row][:count], self.values[row][:count], strict=True))
        return TokenLogprob(token, float(self.all[row, token]), top)


def _logprobs(logits: Tensor, draws: Sequence[Draw]) -> _StepLogprobs | None:
    requested = [draw.params.logprobs for draw in draws if draw.params.logprobs is not None]
    if not requested:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, min(max(requested), logits.shape[-1]), dim=-1)
    return _StepLogprobs(logprobs, top.values.tolist(), top.indices.tolist())
