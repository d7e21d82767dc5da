"""What changes logits before sampling: penalties, logit bias, and tokens that are excluded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foreword.engine.request import SamplingParams

if TYPE_CHECKING:
    from foreword.engine.sampling import Draw


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each was generated, kept from step to step on one device.

    It depends on nothing but the tokens: wherever a sequence continues, it is made again from them.
    """

    def __init__(self) -> None:
        self._length = -2  # no length is one more
        self._places: dict[int, int] = {}
        self._tokens = self._generated = torch.empty(0)

    def follow(self, tokens: Sequence[int], num_prompt: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Distinct tokens (int64) and how often each was generated (float32), valid until the next call. Constant
        time where there is one token more than at the last call."""
        if len(tokens) - self._length == 1:
            self._append(tokens[-1])
        elif len(tokens) != self._length:
            self._count(tokens, num_prompt, device)
        self._length = len(tokens)
        distinct = len(self._places)
        return self._tokens[:distinct], self._generated[:distinct]

    def _count(self, tokens: Sequence[int], num_prompt: int, device: torch.device) -> None:
        every = np.array(tokens, dtype=np.int64)
        distinct = np.unique(every)
        generated = np.zeros(len(distinct), dtype=np.float32)
        found, times = np.unique(every[num_prompt:], return_counts=True)
        generated[np.searchsorted(distinct, found)] = times
        self._places = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self._tokens = torch.from_numpy(distinct).to(device)
        self._generated = torch.from_numpy(generated).to(device)

    def _append(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = max(256, place)
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(more)))
            self._generated = torch.cat((self._generated, self._generated.new_zeros(more)))
        self._tokens[place] = token
        self._generated[place] += 1


def penalizes(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def reshapes(draw: Draw) -> bool:
    """Whether anything of this module applies to the row."""
    params = draw.params
    special = params.logit_bias or params.allowed_token_ids is not None or draw.bad_words
    return bool(penalizes(params) or special or draw.num_output < params.min_tokens)


def reshape(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """In place, for the given rows: repetition (Keskar et al. 2019), presence and frequency penalties (OpenAI), logit bias, and
    exclusions."""
    penalized = [row for row in rows if penalizes(draws[row].params)]
    if penalized:
        _penalize(logits, draws, penalized)
    biases = [(row, token, bias) for row in rows for token, bias in draws[row].params.logit_bias.items()]
    if biases:
        at, tokens, added = zip(*biases, strict=True)
        logits[_index(at, logits), _index(tokens, logits)] += torch.tensor(added, device=logits.device)
    excluded = [(row, token) for row in rows for token in _excluded(draws[row])]
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
    drawn = [draws[row] for row in rows]
    kept = [draw.counts or TokenCounts() for draw in drawn]
    found = [
        counts.follow(draw.tokens, draw.num_prompt, logits.device) for counts, draw in zip(kept, drawn, strict=True)
    ]
    params = zip(rows, (draw.params for draw in drawn), strict=True)
    given = [(row, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for row, p in params]
    sizes = torch.tensor([len(tokens) for tokens, _ in found])
    of_rows = torch.tensor(given, dtype=torch.float64).repeat_interleave(sizes, 0).to(logits.device, non_blocking=True)
    at, (repetition, presence, frequency) = of_rows[:, 0].long(), of_rows[:, 1:].float().unbind(1)
    tokens, generated = (torch.cat(parts) for parts in zip(*found, strict=True))
    values = logits[at, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at, tokens] = values - (presence + frequency * generated).masked_fill_(generated == 0, 0.0)


def _excluded(draw: Draw) -> list[int]:
    """Tokens that may not come next: end tokens before `min_tokens`, and last tokens of bad words."""
    excluded = list(draw.end_tokens) if draw.num_output < draw.params.min_tokens else []
    for words in draw.bad_words:
        before = len(words) - 1
        if not before or (draw.num_output >= before and tuple(draw.tokens[-before:]) == words[:-1]):
            excluded.append(words[-1])
    return excluded
