"""What sampling takes from a sequence, and what it gives back. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreword.engine.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.structured.sequence_constraint import Constraint
    from foreword.engine.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class Draw:
    """What sampling one row of logits needs from its sequence.

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
