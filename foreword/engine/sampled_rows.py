"""What the compiled kernels need to know to sample a row (kernels/sampling.h)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreword.engine.draw import Draw
from foreword.engine.kernels.native import SampledRow
from foreword.engine.penalties import counts_of, excluded_tokens, penalizes, reshapes


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
