"""The interface between the engine's loop and the model runner, between bookkeeping and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from foreword.engine.draw import Draw, Sampled
from foreword.engine.penalties import penalizes
from foreword.engine.sequence import SequenceState, Step
from foreword.engine.token_counts import TokenCounts


class Runner(Protocol):
    """Computes a step's KV and the next tokens.

    `run` carries out `step.copies` in order, writes the KV of every chunk and samples one token for each sequence in `draws`
    (all those whose chunk `samples`). If the device raises, `run` raises the same, and nothing of the step may be used.
    """

    num_blocks: int
    bytes_per_block: int

    def run(self, step: Step, draws: Mapping[SequenceState, Draw]) -> dict[SequenceState, Sampled]: ...


def draw_of(sequence: SequenceState, end_tokens: tuple[int, ...]) -> Draw:
    """What sampling the sequence's next token needs to know."""
    params = sequence.request.params
    if sequence.counts is None and penalizes(params):
        sequence.counts = TokenCounts()
    return Draw(
        params=params,
        seed=sequence.seed,
        index=sequence.request.index,
        tokens=sequence.table.chain.tokens,
        num_prompt=sequence.num_prompt,
        end_tokens=end_tokens,
        left=sequence.left - 1,
        constraint=sequence.constraint,
        bad_words=sequence.bad_words,
        counts=sequence.counts,
    )
