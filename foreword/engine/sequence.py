"""What the scheduler schedules: sequences, and the steps that it makes of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from foreword.blocks import BlockTable, Copy
from foreword.engine.request import CacheReport, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Arrival:
    """What another instance has brought of a prompt.

    Attributes:
        origin: whose it is, in words.
        blocks: full blocks of the prompt that are here now, from its first block on.
        cached_tokens: leading tokens of the prompt that were cached there.
        token, logprob: the token after the prompt, if all of the prompt's KV is here.
    """

    origin: str
    blocks: int
    cached_tokens: int
    token: int | None
    logprob: TokenLogprob | None


class Search(Protocol):
    """A search off the device, and the load that may follow (`cache.StoreLoad`)."""

    @property
    def answered(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    def close(self) -> list[int]: ...


SearchT = TypeVar("SearchT", bound=Search)


class OffDevice(Protocol[SearchT]):
    """Where blocks may lie that the device does not have (`cache.OffloadManager`)."""

    def find(self, keys: Sequence[bytes], /) -> SearchT: ...
    def worth_loading(self, store_load: SearchT, skip: int, tokens: int, /) -> int: ...
    def load(self, store_load: SearchT, skip: int, blocks: Sequence[int], /) -> None: ...


class Pull(Protocol):
    """A prompt that another instance computes (`engine.pull.Pull`)."""

    min_tokens: int

    @property
    def done(self) -> bool: ...
    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None: ...
    def close(self) -> Arrival: ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """One running continuation of a prompt: the engine's only mutable record of it.

    Attributes:
        computed: tokens whose KV is in the table's blocks. A decoding sequence has exactly one more token than that.
        arrived: seconds of the engine's clock.
        cached_tokens: prompt tokens found in the cache at the first admission (-1: never admitted yet).
        store_load: the search for its blocks off the device, and their load; it began at block `searched_from`.
        loaded: the tier of each block that was loaded at the first admission. Of the last one, `recomputed` tokens do not
            count as reused.
        pull: how another instance is asked for the prompt; None once that has ended or was not worth it.
        leader: the sequence of the same request whose prompt is waited for.
        arrival: what came, `arrived_from` tokens of the prompt were here already.
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
    store_load: Search | None = None
    searched_from: int = 0
    loaded: list[int] = field(default_factory=list)
    recomputed: int = 0
    pull: Pull | None = None
    leader: SequenceState | None = None
    arrival: Arrival | None = None
    arrived_from: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.tokens)

    @property
    def num_output(self) -> int:
        return len(self.table) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.table.chain.tokens[self.num_prompt :].tolist()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of one sequence, to be computed in this step.

    Attributes:
        write_from: KV is written for positions from here on; before it lie blocks that others share.
        samples: these are the sequence's last tokens, so the step samples the next one.
        published_before: blocks that were visible before this step (what a failed step must withdraw).
    """

    sequence: SequenceState
    start: int
    count: int
    write_from: int
    samples: bool
    published_before: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes. `copies` come first, in order. `preempted` lost their blocks while it was made."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    preempted: tuple[SequenceState, ...] = ()
    admitted: tuple[SequenceState, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
