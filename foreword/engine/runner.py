"""The interface between the engine's loop and the model runner, between bookkeeping and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foreword.engine.request import SamplingParams
from foreword.engine.sequence import SequenceState, Step, TokenCounts
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.structured.sequence_constraint import Constraint


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling state of one sequence, for its row of logits.

    Attributes:
        tokens: token ids of prompt and output so far.
        num_prompt: how many of them are the prompt.
        end_tokens: tokens that are excluded until there are `params.min_tokens` output tokens.
        left: tokens that may follow this one.
        constraint: what the output must match. It comes before all other exclusions.
        bad_words: token sequences that are excluded.
        counts: the sequence's, for penalties; without it the tokens are counted each time.
    """

    params: SamplingParams
    seed: int
    index: int
    tokens: Sequence[int]
    num_prompt: int
    end_tokens: tuple[int, ...]
    left: int = 0
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    counts: TokenCounts | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with log-probabilities if they were requested. `error`: why there is no token."""

    token: int
    logprob: TokenLogprob | None
    error: str | None = None


class Runner(Protocol):
    """Computes a step's KV and the next tokens.

    `run` carries out `step.copies` in order, writes the KV of every chunk and samples one token for each sequence in `draws`
    (all those whose chunk `samples`). If the device raises, `run` raises the same, and nothing of the step may be used.
    """

    num_blocks: int
    bytes_per_block: int

    def run(self, step: Step, draws: Mapping[SequenceState, Draw]) -> dict[SequenceState, Sampled]: ...


def draw_of(sequence: SequenceState, end_tokens: tuple[int, ...]) -> Draw:
    """The sampling state that the sequence's next token needs."""
    params = sequence.request.params
    if sequence.counts is None and params.penalizes:
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
