"""What changes logits before sampling: penalties, logit bias, and tokens that are excluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foreword.engine.request import SamplingParams
from foreword.engine.token_counts import TokenCounts

if TYPE_CHECKING:
    from foreword.engine.draw import Draw


def penalizes(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def reshapes(draw: Draw) -> bool:
    """Whether anything of this module applies to the row."""
    params = draw.params
    special = params.logit_bias or params.allowed_token_ids is not None or draw.bad_words
    return bool(penalizes(params) or special or draw.num_output < params.min_tokens)


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
    penalized = [row for row in rows if penalizes(draws[row].params)]
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
            generated, times = counted[row].generated
            places.append(row * logits.shape[1] + generated)
            less.append(draws[row].params.presence_penalty + draws[row].params.frequency_penalty * times)
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
