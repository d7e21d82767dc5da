"""The sequences of a simulated replica that decode without needing a block: they are counted, not scheduled one by one."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, SequenceState
from foreword.sim.tokens import tokens_of

_UNLIMITED: Final = 1 << 30


class DecodingSequences:
    """A scheduler's paused sequences, each of which gets one token per step, until it needs a block or ends.

    Attributes:
        sequences: their numbers of tokens lag behind until they leave.
        short: those of them that need a block before the next step.
        context: tokens that the next step attends to, of all sequences.
    """

    __slots__ = ("_due", "_scheduler", "_steps", "context", "sequences", "short")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.sequences = scheduler.paused
        self.short: list[SequenceState] = []
        self.context = 0
        self._steps = 0
        # Step in which a sequence needs a block or ends, its admission (which is unique), and the sequence.
        self._due: list[tuple[int, int, SequenceState]] = []

    @property
    def left(self) -> int:
        """Steps until a sequence needs a block or ends."""
        if self.short:
            return 0
        return self._due[0][0] - self._steps if self._due else _UNLIMITED

    def add(self, sequence: SequenceState) -> None:
        """Take a running sequence out of the scheduler's steps. One token of it is not computed yet."""
        self._scheduler.pause(sequence)
        self._count(sequence)

    def advance(self, steps: int) -> list[SequenceState]:
        """All sequences got `steps` tokens, at most `left`. Returns those that ended, in any order; they are still paused."""
        if not self.sequences:
            return []
        self._steps += steps
        self.context += steps * len(self.sequences)
        ended: list[SequenceState] = []
        while self._due and self._due[0][0] <= self._steps:
            sequence = heappop(self._due)[2]
            self._catch_up(sequence)
            if tokens_of(sequence).length >= sequence.max_total:
                self.context -= sequence.computed
                ended.append(sequence)
            else:
                self.short.append(sequence)
        return ended

    def rejoin(self) -> None:
        """The scheduler takes all sequences back, in order of admission."""
        for _, _, sequence in self._due:
            self._catch_up(sequence)
        self._due.clear()
        self.short.clear()
        self._return(self.sequences)
        self.sequences.clear()
        self.context = 0

    def rejoin_short(self) -> None:
        """The scheduler takes those back that need a block."""
        for sequence in self.short:
            self.context -= sequence.computed
            self.sequences.remove(sequence)
        self._return(self.short)
        self.short.clear()

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
        self._scheduler.running = [one for one in self._scheduler.running if one not in leaving]
        for sequence in leaving:
            self.sequences.append(sequence)
            self._count(sequence)
        return tuple(others)

    def _count(self, sequence: SequenceState) -> None:
        tokens = tokens_of(sequence)
        tokens.counted_at = self._steps
        self.context += sequence.computed
        more = min(sequence.table.next_block_at, sequence.max_total) - tokens.length
        heappush(self._due, (self._steps + more, tokens.admission, sequence))

    def _catch_up(self, sequence: SequenceState) -> None:
        tokens = tokens_of(sequence)
        steps = self._steps - tokens.counted_at
        tokens.counted_at = self._steps
        tokens.length += steps
        sequence.computed += steps

    def _return(self, sequences: list[SequenceState]) -> None:
        scheduler = self._scheduler
        scheduler.running = sorted([*scheduler.running, *sequences], key=lambda one: tokens_of(one).admission)
