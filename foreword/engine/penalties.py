"""What changes logits before sampling: penalties, logit bias, and tokens that are excluded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    """All rows in one operation each, over the tokens that the rows have."""
    drawn = [draws[row] for row in rows]
    kept = [draw.counts or TokenCounts() for draw in drawn]
    found = [
        counts.follow(draw.tokens, draw.num_prompt, logits.device) for counts, draw in zip(kept, drawn, strict=True)
    ]
    tokens, generated = (torch.cat(parts) for parts in zip(*found, strict=True))
    sizes = torch.tensor([len(part) for part, _ in found])
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


def _excluded(draw: Draw) -> list[int]:
    """Tokens that may not come next: end tokens before `min_tokens`, and last tokens of bad words."""
    excluded = list(draw.end_tokens) if draw.num_output < draw.params.min_tokens else []
    for words in draw.bad_words:
        before = len(words) - 1
        if not before or (draw.num_output >= before and tuple(draw.tokens[-before:]) == words[:-1]):
            excluded.append(words[-1])
    return excluded
