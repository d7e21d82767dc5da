"""The sequences of a simulated replica that decode without needing a block: they are counted, not scheduled one by one."""

from __future__ import annotations

from typing import Any, Final

from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, SequenceState
from foreword.sim.tokens import tokens_of

_UNLIMITED: Final = 1 << 30


class DecodingSequences:
    """A scheduler's paused sequences, each of which gets one token per step. They join the others when one needs a block.

    Attributes:
        sequences: in order of joining. Their numbers of tokens lag behind until `catch_up`.
        context: tokens that the next step attends to, of all sequences.
        left: steps until a sequence needs a block or ends.
    """

    __slots__ = ("_behind", "_scheduler", "context", "left", "sequences")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.sequences = scheduler.paused
        self._behind = 0
        self.context, self.left = 0, _UNLIMITED

    def add(self, sequence: SequenceState) -> None:
        """Take a running sequence out of the scheduler's steps. One token of it is not computed yet."""
        self.catch_up()
        self._scheduler.pause(sequence)
        self._count(sequence)

    def advance(self, steps: int) -> None:
        """All sequences got `steps` tokens."""
        if self.sequences:
            self._behind += steps
            self.context += steps * len(self.sequences)
            self.left -= steps

    def catch_up(self) -> None:
        """Bring the numbers of tokens of all sequences up to date."""
        steps = self._behind
        if steps:
            for sequence in self.sequences:
                sequence.computed += steps
                tokens: Any = sequence.table.chain.tokens
                tokens.length += steps
            self._behind = 0

    def recount(self) -> None:
        """Sequences have ended."""
        self.context, self.left = 0, _UNLIMITED
        for sequence in self.sequences:
            self._count(sequence)

    def rejoin(self) -> None:
        """The scheduler takes all sequences back, in order of admission."""
        self.catch_up()
        scheduler = self._scheduler
        scheduler.running = sorted((*scheduler.running, *self.sequences), key=lambda one: tokens_of(one).admission)
        self.sequences.clear()
        self.recount()

    def leave(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Take those sequences out that only decode in this step. Returns the other chunks."""
        others: list[Chunk] = []
        leaving: dict[SequenceState, None] = {}
        for chunk in chunks:
            if chunk.count == 1 and chunk.samples and tokens_of(chunk.sequence).answered:
                leaving[chunk.sequence] = None
            else:
                others.append(chunk)
        if not leaving:
            return chunks
        self.catch_up()
        self._scheduler.running = [one for one in self._scheduler.running if one not in leaving]
        self.sequences += leaving
        for sequence in leaving:
            self._count(sequence)
        return tuple(others)

    def _count(self, sequence: SequenceState) -> None:
        table = sequence.table
        self.context += sequence.computed
        self.left = min(self.left, min(table.next_block_at, sequence.max_total) - len(table.chain.tokens))
