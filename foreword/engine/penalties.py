"""What changes logits before sampling: penalties, logit bias, and tokens that are excluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
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
    """In place: exclude what the grammars of these rows forbid. A byte of a mask becomes eight numbers to add."""
    bits = torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device) & 1
    added = torch.where(bits == 1, 0.0, -torch.inf)
    masks = torch.nn.functional.embedding(torch.stack(tuple(allowed.values())).int(), added).flatten(1)
    rows = torch.tensor(tuple(allowed), device=logits.device)
    logits.index_add_(0, rows, masks[:, : logits.shape[1]])


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
    """All rows in one operation each, over the tokens that the rows have."""
    drawn = [draws[row] for row in rows]
    counted = [counts_of(draw) for draw in drawn]
    tokens, generated = (
        torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in zip(*counted, strict=True)
    )
    sizes = torch.tensor([len(part) for part, _ in counted])
    given = [(d.params.repetition_penalty, d.params.presence_penalty, d.params.frequency_penalty) for d in drawn]
    by, once, each = torch.tensor(given).to(logits.device).unbind(1)
    of_row = torch.arange(len(rows)).repeat_interleave(sizes).to(logits.device)
    flat, places = logits.view(-1), _index(rows, logits)[of_row] * logits.shape[1] + tokens
    values = flat[places]
    if any(one[0] != 1.0 for one in given):
        divisor = by[of_row]
        values = torch.where(values > 0, values / divisor, values * divisor)
    if any(one[1] or one[2] for one in given):
        values -= (once[of_row] + each[of_row] * generated).masked_fill_(generated == 0, 0.0)
    flat[places] = values


def counts_of(draw: Draw) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Distinct tokens and how often each was generated."""
    return (draw.counts or TokenCounts()).follow(draw.tokens, draw.num_prompt)


def excluded_tokens(draw: Draw) -> list[int]:
    """Tokens that may not come next: end tokens before `min_tokens`, and last tokens of bad words."""
    excluded = list(draw.end_tokens) if draw.num_output < draw.params.min_tokens else []
    for words in draw.bad_words:
        before = len(words) - 1
        if not before or (draw.num_output >= before and tuple(draw.tokens[-before:]) == words[:-1]):
            excluded.append(words[-1])
    return excluded
