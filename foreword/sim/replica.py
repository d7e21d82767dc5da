"""A simulated replica: the real scheduler over the real pool, with steps that take virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from foreword.blocks import BlockTable, PrefixCache
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import SequenceState, Step
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.stores import SimStores
from foreword.sim.trace import TraceRequest

_PARAMS = SamplingParams()


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds of virtual time, -1 while not known.

    Attributes:
        cached_tokens: prompt tokens that were not computed.
        loaded: those of them that came from host memory, disk and the shared store.
    """

    request: TraceRequest
    replica: str = ""
    expected_cached: int = 0
    first_token: float = -1.0
    finished: float = -1.0
    cached_tokens: int = 0
    loaded: tuple[int, int, int] = (0, 0, 0)

    @property
    def loaded_tokens(self) -> int:
        return sum(self.loaded)

    @property
    def ttft(self) -> float:
        return self.first_token - self.request.arrival

    @property
    def seconds_per_token(self) -> float:
        """Between tokens, on average; 0 for answers of one token."""
        more = self.request.output_tokens - 1
        return (self.finished - self.first_token) / more if more else 0.0


class Watcher(Protocol):
    """Whoever wants to know of requests' ends."""

    def first_token(self, number: int, outcome: Outcome) -> None: ...
    def finished(self, number: int, outcome: Outcome) -> None: ...


@dataclass(slots=True)
class ReplicaTotals:
    """What a replica did."""

    steps: int = 0
    busy: float = 0.0
    computed_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class SimReplica:
    """One replica. `run.py` calls `begin` when it is idle and `end` when the step is over.

    Attributes:
        step: what is being computed, and `repeats` more steps like it.
    """

    name: str
    costs: EngineCosts
    cache: PrefixCache
    scheduler: Scheduler
    stores: SimStores | None
    watcher: Watcher
    totals: ReplicaTotals = field(default_factory=ReplicaTotals)
    step: Step | None = None
    repeats: int = 0
    _outcomes: dict[SequenceState, tuple[int, Outcome]] = field(default_factory=dict)
    _answers: dict[int, array[int]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        name: str,
        spec: FleetSpec,
        costs: EngineCosts,
        stores: SimStores | None,
        watcher: Watcher,
        on_published: Callable[[BlockTable, int, int], None],
        on_removed: Callable[[list[bytes]], None],
    ) -> SimReplica:
        cache = PrefixCache(
            spec.device_tokens // spec.block_size,
            spec.block_size,
            model=MODEL,
            partial_reuse=spec.partial_reuse,
            lookahead_blocks=spec.lookahead_blocks,
            on_published=on_published,
            on_removed=on_removed,
        )
        scheduler = Scheduler(
            cache,
            max_batch_tokens=spec.max_batch_tokens,
            max_num_seqs=spec.max_num_seqs,
            offload=stores,
        )
        return cls(name, costs, cache, scheduler, stores, watcher)

    def add(self, number: int, outcome: Outcome, tokens: array[int], keys: Sequence[bytes]) -> None:
        """A request arrives; `keys` are those of its full blocks."""
        request = Request(str(number), cast(Any, tokens), _PARAMS)
        table = self.cache.open(tokens)
        table.chain.keys = list(keys)
        sequence = SequenceState(request, table, 0, len(tokens) + outcome.request.output_tokens)
        self._outcomes[sequence] = (number, outcome)
        self.scheduler.add(sequence)

    def begin(self, now: float, until: float) -> float | None:
        """Make the next step; returns the seconds that it takes, None if there is nothing to compute now.

        Steps that the scheduler would repeat unchanged are taken together: all running sequences decode, none ends, fills a
        block or begins, and nobody can come before the time `until`.
        """
        if not self.scheduler.has_work():
            return None
        if self.stores is not None:
            self.stores.now = now
        loaded = self.scheduler.collect()
        step = self.scheduler.schedule()
        for sequence in (*loaded, *step.admitted):
            self._note_admission(sequence)
        if not step.chunks:
            return None
        self.step = step
        seconds = self._seconds(step)
        self.repeats = self._repeats(step, seconds, until - now)
        if self.repeats:
            # Each repetition finds one token more in every sequence.
            growth = self.costs.decode_context * len(step.chunks)
            seconds += self.repeats * seconds + growth * self.repeats * (self.repeats + 1) / 2
        self.totals.steps += 1 + self.repeats
        self.totals.busy += seconds
        return seconds

    def _repeats(self, step: Step, seconds: float, left: float) -> int:
        """How often the step can be repeated before anything but the number of tokens changes: the last repetition may end
        sequences, or end after `left` seconds, but not begin then."""
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.waiting_for_kv or len(step.chunks) != len(scheduler.running):
            return 0
        most = int(min(left / seconds, _MOST_REPEATS)) if seconds else _MOST_REPEATS
        for chunk in step.chunks:
            sequence, length = chunk.sequence, chunk.start + 1
            if chunk.count != 1 or not chunk.samples or self._outcomes[sequence][1].first_token < 0:
                return 0
            most = min(most, sequence.table.next_block_at - 1 - length, sequence.max_total - 1 - length)
        growth = self.costs.decode_context * len(step.chunks)
        while most > 0 and most * seconds + growth * most * (most - 1) / 2 >= left:
            most -= 1
        return max(most, 0)

    def end(self, now: float) -> None:
        """The step is over."""
        step = self.step
        assert step is not None
        self.step = None
        self.scheduler.settle(step)
        if self.stores is not None:
            self._save(step)
        for chunk in step.chunks:
            if self.repeats:
                self._repeat(chunk.sequence)
            if chunk.samples:
                self._sample(chunk.sequence, now)

    def _repeat(self, sequence: SequenceState) -> None:
        sequence.computed += self.repeats
        sequence.table.chain.tokens.extend(self._answer(sequence, self.repeats))

    def _seconds(self, step: Step) -> float:
        costs, prefilled, pairs, decoding, context = self.costs, 0, 0, 0, 0
        for chunk in step.chunks:
            if chunk.count == 1:
                decoding += 1
                context += chunk.start
            else:
                prefilled += chunk.count
                pairs += chunk.count * (chunk.start + chunk.count // 2)
        self.totals.computed_tokens += prefilled
        return (
            costs.base
            + costs.prefill * prefilled
            + costs.attention * pairs
            + costs.decode_each * decoding
            + costs.decode_context * context
        )

    def _note_admission(self, sequence: SequenceState) -> None:
        outcome = self._outcomes[sequence][1]
        outcome.cached_tokens = max(sequence.cached_tokens, 0)
        loaded = sequence.loaded
        if loaded is not None and loaded.tiers and self.stores is not None:
            counts = [0, 0, 0]
            for place in loaded.tiers:
                counts[self.stores.tiers[place].tier - 1] += self.cache.block_size
            # A prompt that is cached to its end recomputes its last token.
            counts[self.stores.tiers[loaded.tiers[-1]].tier - 1] -= loaded.tokens - sequence.cached_tokens
            outcome.loaded = (counts[0], counts[1], counts[2])

    def _save(self, step: Step) -> None:
        assert self.stores is not None
        for chunk in step.chunks:
            table, first = chunk.sequence.table, chunk.published_before
            full = min((chunk.start + chunk.count) // self.cache.block_size, table.published)
            if full > first:
                self.stores.save(table.chain.key_before(first), first, table.chain.keys_to(full)[first:full])

    def _sample(self, sequence: SequenceState, now: float) -> None:
        number, outcome = self._outcomes[sequence]
        if outcome.first_token < 0:
            outcome.first_token = now
            self.watcher.first_token(number, outcome)
        sequence.table.chain.tokens.extend(self._answer(sequence, 1))
        if len(sequence.table) >= sequence.max_total:
            outcome.finished = now
            self.totals.preemptions += sequence.preemptions
            self.scheduler.finish(sequence)
            del self._outcomes[sequence]
            self._answers.pop(number, None)
            self.watcher.finished(number, outcome)

    def _answer(self, sequence: SequenceState, count: int) -> array[int]:
        """The answer's next tokens; where they are not known, a token that no other answer has."""
        number, outcome = self._outcomes[sequence]
        if number not in self._answers:
            self._answers[number] = outcome.request.answer()
        done = sequence.num_output
        known = self._answers[number][done : done + count]
        if len(known) < count:
            known.extend(array("I", (_ANSWER | number & _NUMBERS,)) * (count - len(known)))
        return known


MODEL = b"simulated"
_MOST_REPEATS = 1 << 20
_ANSWER = 1 << 31
_NUMBERS = _ANSWER - 1
