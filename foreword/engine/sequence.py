"""Sequences: the state of one and the text of its output, the steps made of them, and what a model runner computes of a step.
Pure: no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from foreword.blocks.checkpoints import CheckpointPlan
from foreword.blocks.prefix_cache import BlockTable, Copy
from foreword.engine.external_kv import KVArrival, RemoteKV, StoreKV
from foreword.engine.prompt_leases import PromptLeases
from foreword.engine.request import CacheReport, Request, SamplingParams
from foreword.tokens.reasoning_stops import stop_finder
from foreword.tokens.stops import StopFinder
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from foreword.engine.prompt_logprobs import PromptLogprobs
    from foreword.engine.structured.sequence_constraint import Constraint
    from foreword.tokens.tokenizer import Tokenizer

# Bits of tokens are a multiple of this: a group of kernels/sampling.h.
_GROUP = 128


@dataclass(slots=True, eq=False)
class SequenceState:
    """A running continuation of a prompt: the engine's only mutable record of it. It is hashed by identity.

    Attributes:
        computed: tokens whose KV is in the table's blocks. A decoding sequence has exactly one more token than that.
        arrived: seconds of the engine's clock.
        cached_tokens: prompt tokens found in the cache at the first admission (-1: not admitted yet).
        store: the search for its blocks in the stores, and their load.
        reach: leading tokens whose KV the groups of full attention had cached when it was admitted. It may be more than can be
            used, because a window is missing.
        checkpoints: which blocks of window groups are saved; None before the first save.
        unsaved: by KV group, numbers of its blocks for which the write queue had no room yet.
        remote: where the prompt is computed, if not here. The `n` sequences of a request share it: the first one gets the
            KV, the others wait for it.
        loaded, transferred: what the stores and the other instance brought before the first admission.
        leases: its retentions; None if there are none.
        constraint: what the output must match, after the output so far.
        counts: of its tokens, from its first step with penalties on.
        bad_words: tokens that are not generated one after the other.
        prompt_logprobs: gathers those of the prompt; None if they were not requested.
        broken: what raised when it was admitted; it ends behind its step.
    """

    request: Request
    table: BlockTable
    seed: int
    max_total: int
    arrived: float = 0.0
    admitted_at: float = -1.0
    last_token_at: float = -1.0
    computed: int = 0
    cached_tokens: int = -1
    shared_tokens: int = 0
    preemptions: int = 0
    report: CacheReport | None = None
    store: StoreKV | None = None
    unsearched: bool = False
    reach: int = 0
    checkpoints: CheckpointPlan | None = None
    unsaved: dict[int, list[int]] = field(default_factory=dict)
    remote: RemoteKV | None = None
    loaded: KVArrival | None = None
    transferred: KVArrival | None = None
    leases: PromptLeases | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    counts: TokenCounts | None = None
    prompt_logprobs: PromptLogprobs | None = None
    broken: Exception | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.tokens)

    @property
    def needs_logits(self) -> bool:
        """Logits of the prompt are still to be computed, also where its KV is cached."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.complete

    @property
    def num_output(self) -> int:
        return len(self.table) - self.num_prompt

    @property
    def left(self) -> int:
        """Tokens that may still be generated. (`max_total` may be less, where only the first one is computed.)"""
        params = self.request.params
        longest = self.max_total if params.max_tokens is None else self.num_prompt + params.max_tokens
        return longest - len(self.table)

    @property
    def output(self) -> list[int]:
        return self.table.chain.tokens[self.num_prompt :].tolist()


@dataclass(slots=True)
class Chunk:
    """Tokens `[start, start + count)` of one sequence, to be computed in this step. Never changed; not frozen, because creating
    a frozen one takes several times as long.

    Attributes:
        write_from: KV is written for positions from here on; the blocks before it are shared.
        samples: these are the sequence's last tokens, so the step samples the next one.
        published_before: blocks that were published before this step (a failed step retracts the rest).
    """

    sequence: SequenceState
    start: int
    count: int
    write_from: int
    samples: bool
    published_before: int


@dataclass(slots=True)
class Step:
    """The work of one step. `copies` come first, in order. `preempted` lost their blocks while it was made. Never changed, see
    `Chunk`."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    preempted: tuple[SequenceState, ...] = ()
    admitted: tuple[SequenceState, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class TokenCounts:
    """The tokens of a growing sequence and how often each was generated, kept from step to step: what penalties depend on.

    It depends on nothing but the tokens: wherever a sequence continues, it is made again from them.

    Attributes:
        seen: a bit per token of the vocabulary, the lowest first.
        seen_address: where it is in memory.
    """

    def __init__(self) -> None:
        self._length = -2  # no length is one more
        self.seen: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.seen_address = 0
        self._places: dict[int, int] = {}
        self.generated, self.times = array("q"), array("f")

    def follow(self, tokens: Sequence[int], num_prompt: int, vocab: int) -> None:
        """Constant time where there is one token more than at the last call. Tokens outside of the vocabulary have no bit."""
        if len(tokens) - self._length == 1:
            self._append(tokens[-1])
        elif len(tokens) != self._length:
            self._count(tokens, num_prompt, vocab)
        self._length = len(tokens)

    def _count(self, tokens: Sequence[int], num_prompt: int, vocab: int) -> None:
        every = np.array(tokens, dtype=np.int64)
        seen = np.zeros(-(-vocab // _GROUP) * _GROUP, dtype=np.bool_)
        seen[every[every < len(seen)]] = True
        self.seen = np.packbits(seen, bitorder="little")
        self.seen_address = self.seen.ctypes.data
        generated, times = np.unique(every[num_prompt:], return_counts=True)
        self.generated, self.times = array("q", generated.tobytes()), array("f", times.astype(np.float32).tobytes())
        self._places = {token: place for place, token in enumerate(self.generated)}

    def _append(self, token: int) -> None:
        if token < 8 * self.seen.size:
            self.seen[token >> 3] |= 1 << (token & 7)
        place = self._places.setdefault(token, len(self._places))
        if place == len(self.generated):
            self.generated.append(token)
            self.times.append(0)
        self.times[place] += 1


class OutputText:
    """Used by the engine, and by a server that continues an output of another one."""

    __slots__ = ("_least", "_stops", "_stream", "_tokens")

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._stream = tokenizer.stream(request.tokens, skip_special_tokens=params.skip_special_tokens)
        self._stops: StopFinder | None = None
        if strings := params.stop_strings:
            self._stops = stop_finder(strings, include=params.include_stop, reasoning=params.reasoning)
        self._least, self._tokens = params.min_tokens, 0

    def push(self, token: int) -> tuple[str, str | None]:
        """The text that can be returned after one more token, and the stop string that it completes, if any."""
        self._tokens += 1
        text = self._stream.push(token)
        return (text, None) if self._stops is None else self._stops.push(text, counts=self._counts)

    def close(self) -> tuple[str, str | None]:
        """The text that was held back, as no more tokens follow, and the stop string that it completes, if any."""
        text = self._stream.flush()
        return (text, None) if self._stops is None else self._stops.close(text, counts=self._counts)

    @property
    def _counts(self) -> bool:
        # As in vLLM: a stop string counts if a token behind the first `min_tokens` completes it.
        return self._tokens > self._least


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
