"""A simulated replica: the real scheduler and block pool, with steps that take virtual time."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.blocks import BlockTable, PrefixCache, Salt
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.routing.fleet import Fleet
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.decoding import DecodingSequences
from foreword.sim.prefill import SimulatedPrefill
from foreword.sim.stores import SimulatedStores
from foreword.sim.tokens import NOT_RUNNING, SequenceTokens, SimulatedChain, tokens_of

MODEL = b"simulated"
_MAX_REPEATS = 1 << 20
_PARAMS = SamplingParams()


@dataclass(slots=True)
class ReplicaTotals:
    """Totals of one replica. `busy` is seconds of computation, `up` seconds from its start to its end."""

    steps: int = 0
    busy: float = 0.0
    preemptions: int = 0
    up: float = 0.0


class SimulatedReplica:
    """One replica. The simulation calls `begin` when it is idle and `end` at the time `ends_at`.

    Attributes:
        step: the step that is being computed; None while idle.
        ends_at: end of the step and of its repetitions. An arrival may bring it forward.
    """

    def __init__(
        self,
        spec: FleetSpec,
        costs: EngineCosts,
        fleet: Fleet,
        stores: SimulatedStores | None,
        totals: ReplicaTotals,
        *,
        on_published: Callable[[BlockTable, int, int], None],
        on_removed: Callable[[list[bytes]], None],
        on_finished: Callable[[SequenceTokens], None] | None = None,
        on_prefilled: Callable[[SequenceTokens, int], None] | None = None,
    ) -> None:
        self.totals = totals
        self.step: Step | None = None
        self.ends_at = 0.0
        self._started = self._step_seconds = self._growth = 0.0
        # Further steps, equal except for the number of tokens, that are computed together with `step`.
        self._repeats = 0
        self._to_save: tuple[Chunk, ...] = ()
        self._admissions = itertools.count()
        self._costs = costs
        self._fleet = fleet
        self._stores = stores
        self._on_finished = on_finished
        self._on_prefilled = on_prefilled
        self._cache = PrefixCache(
            spec.device_tokens // spec.block_size,
            spec.block_size,
            model=MODEL,
            partial_reuse=spec.partial_reuse,
            lookahead_blocks=spec.lookahead_blocks,
            on_published=on_published,
            on_removed=on_removed,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_batch_tokens=spec.max_batch_tokens,
            max_num_seqs=spec.max_num_seqs,
            offload=stores,
        )
        self._decoding = DecodingSequences(self._scheduler)
        # The most blocks that a sequence takes in a step.
        self._most_blocks = spec.max_batch_tokens // spec.block_size + 2 + spec.lookahead_blocks

    def add(
        self, now: float, request: SequenceTokens, keys: Sequence[bytes], remote: SimulatedPrefill | None = None
    ) -> None:
        """A request arrives. `keys` are the keys of its full blocks. The step after the current one may admit it.

        `remote`: computes the prompt, if that is another replica.
        """
        tokens: Any = request
        traced = request.outcome.request
        salt = Salt(traced.tenant.encode())
        chain = SimulatedChain(self._cache.root(salt), self._cache.block_size, request, keys)
        table = BlockTable(chain, salt=salt)
        prompt_only = request.computed_for is not None
        max_total = len(request) + 1 if prompt_only else traced.prompt_tokens + traced.output_tokens
        sequence = SequenceState(Request(str(request.number), tokens, _PARAMS), table, 0, max_total)
        sequence.remote = remote
        self._scheduler.add(sequence)
        self._move_forward(traced.priority)
        if self.step is not None and self._repeats:
            self._repeats = bisect_left(range(self._repeats), now - self._started, key=self._duration)
            self.ends_at = self._started + self._duration(self._repeats)

    def _move_forward(self, priority: int) -> None:
        """Move the last waiting request before all that are less urgent."""
        waiting = self._scheduler.waiting
        place = len(waiting) - 1
        while place and tokens_of(waiting[place - 1]).outcome.request.priority > priority:
            place -= 1
        if place < len(waiting) - 1:
            waiting.insert(place, waiting.pop())

    @property
    def is_idle(self) -> bool:
        return self.step is None and not self._has_work() and not self._scheduler.waiting_for_kv

    def _has_work(self) -> bool:
        return bool(self._decoding.sequences) or self._scheduler.has_work()

    def fail(self, now: float) -> list[SequenceTokens]:
        """The replica fails. Returns its requests, in order of arrival, to be placed again.

        Complete repetitions of the current step count; the output of the one that is being computed is lost.
        """
        if self.step is not None:
            complete = bisect_right(range(self._repeats + 1), now - self._started, key=self._duration)
            if complete:
                self._repeats = complete - 1
                self.end(self._started + self._duration(self._repeats))
            self.step = None
        self._decoding.rejoin()
        scheduler = self._scheduler
        found = []
        for sequence in (*scheduler.running, *scheduler.waiting_for_kv, *scheduler.waiting):
            before = tokens_of(sequence)
            if before.computed_for is not None:
                before.computed_for.failed()
                continue
            again = SequenceTokens(before.number, before.outcome)
            again.length = before.length
            again.lost = before.lost if sequence.cached_tokens < 0 else sequence.computed
            before.outcome.failovers += 1
            self.totals.preemptions += sequence.preemptions
            found.append(again)
        return sorted(found, key=lambda one: one.number)

    def begin(self, now: float) -> bool:
        """Start the next step. False if there is nothing to compute now.

        Steps that the scheduler would repeat unchanged are computed together: all running sequences decode, none ends, fills a
        block or is admitted.
        """
        if not self._has_work():
            return False
        if self._stores is not None:
            self._stores.now = now
        scheduler, decoding = self._scheduler, self._decoding
        loaded = scheduler.collect() if scheduler.waiting_for_kv else []
        # Decoding sequences are scheduled when they need a block, and all of them when one could be preempted.
        if (len(scheduler.running) + len(decoding.short)) * self._most_blocks > self._cache.pool.num_free:
            decoding.rejoin()
        elif decoding.short:
            decoding.rejoin_short()
        step = scheduler.schedule(others=len(decoding.sequences))
        for sequence in (*loaded, *step.admitted):
            self._note_admission(sequence)
        self._number_admissions(step)
        chunks = decoding.leave(step.chunks)
        if not chunks and not decoding.sequences:
            return False
        self.step = Step(chunks, step.copies)
        self._to_save = step.chunks
        self._started, self._step_seconds = now, self._seconds(chunks)
        is_alone = not (scheduler.running or scheduler.waiting or scheduler.waiting_for_kv)
        self._repeats = min(decoding.left - 1, _MAX_REPEATS) if is_alone else 0
        # Each repetition finds one more token in every sequence.
        self._growth = self._costs.decode_context * len(decoding.sequences)
        self.ends_at = now + self._duration(self._repeats)
        return True

    def _number_admissions(self, step: Step) -> None:
        for sequence in step.preempted:
            tokens_of(sequence).admission = NOT_RUNNING
        for sequence in self._scheduler.running:
            tokens = tokens_of(sequence)
            if tokens.admission == NOT_RUNNING:
                tokens.admission = next(self._admissions)

    def _duration(self, repeats: int) -> float:
        """Seconds of the current step and the first `repeats` repetitions."""
        return self._step_seconds * (repeats + 1) + self._growth * repeats * (repeats + 1) / 2

    def end(self, now: float) -> None:
        """The step is over."""
        step = self.step
        assert step is not None
        self.step = None
        self.totals.steps += 1 + self._repeats
        self.totals.busy += now - self._started
        self._scheduler.settle(step)
        self._save(self._to_save)
        ended = self._decoding.advance(1 + self._repeats)
        answering = [chunk.sequence for chunk in step.chunks if chunk.samples]
        for sequence in answering:
            tokens_of(sequence).length += 1
        if ended:
            answering = sorted([*answering, *ended], key=lambda one: tokens_of(one).admission)
        for sequence in answering:
            self._answer(sequence, now)

    def _answer(self, sequence: SequenceState, now: float) -> None:
        """A sequence has its first token, its last one, or both."""
        tokens = tokens_of(sequence)
        if tokens.computed_for is None and not tokens.answered:
            tokens.answered = True
            if tokens.outcome.first_token < 0:
                tokens.outcome.first_token = now
            self._fleet.first_token(str(tokens.number), now)
        if tokens.length >= sequence.max_total:
            self._finish(sequence, tokens, now)
        else:
            self._decoding.add(sequence)

    def _seconds(self, chunks: Sequence[Chunk]) -> float:
        """Of a step with these chunks, besides one token of each decoding sequence."""
        costs, prefilled, pairs = self._costs, 0, 0
        decoding, context = len(self._decoding.sequences), self._decoding.context
        for chunk in chunks:
            if chunk.count == 1:
                decoding += 1
                context += chunk.start
            else:
                prefilled += chunk.count
                pairs += chunk.count * (chunk.start + chunk.count // 2)
        return (
            costs.base
            + costs.prefill * prefilled
            + costs.attention * pairs
            + costs.decode_each * decoding
            + costs.decode_context * context
        )

    def _note_admission(self, sequence: SequenceState) -> None:
        tokens = tokens_of(sequence)
        outcome = tokens.outcome
        outcome.recomputed += max(tokens.lost - sequence.cached_tokens, 0)
        if _is_continued(sequence):
            return  # the numbers of the prompt are those of the first attempt that answered
        if sequence.transferred is not None:  # the rest was noted where the prompt was computed
            outcome.cached_tokens = max(outcome.cached_tokens, sequence.cached_tokens)
            return
        outcome.cached_tokens, outcome.loaded = max(sequence.cached_tokens, 0), (0, 0, 0)
        loaded = sequence.loaded
        if loaded is not None and loaded.tiers and self._stores is not None:
            tiers = [self._stores.tiers[place].tier - 1 for place in loaded.tiers]
            counts = [0, 0, 0]
            for tier in tiers:
                counts[tier] += self._cache.block_size
            counts[tiers[-1]] -= (
                loaded.tokens - sequence.cached_tokens
            )  # a fully cached prompt recomputes its last token
            outcome.loaded = (counts[0], counts[1], counts[2])

    def _save(self, chunks: Sequence[Chunk]) -> None:
        if self._stores is None:
            return
        for chunk in chunks:
            table, first = chunk.sequence.table, chunk.published_before
            full = min((chunk.start + chunk.count) // self._cache.block_size, table.published)
            if full > first:
                self._stores.save(table.chain.key_before(first), first, table.chain.keys_to(full)[first:full])

    def _finish(self, sequence: SequenceState, tokens: SequenceTokens, now: float) -> None:
        outcome = tokens.outcome
        self.totals.preemptions += sequence.preemptions
        self._scheduler.finish(sequence)
        if tokens.computed_for is not None:
            assert self._on_prefilled is not None
            self._on_prefilled(tokens, max(sequence.cached_tokens, 0))
            return
        outcome.finished = now
        cached, output = outcome.cached_tokens, outcome.request.output_tokens
        if _is_continued(sequence):
            self._fleet.finished(str(tokens.number), now)  # the router learns nothing from its usage
        else:
            self._fleet.finished(str(tokens.number), now, cached_tokens=cached, output_tokens=output)
        if self._on_finished is not None:
            self._on_finished(tokens)


def _is_continued(sequence: SequenceState) -> bool:
    """Whether an earlier replica computed a part of the output."""
    return sequence.num_prompt > tokens_of(sequence).outcome.request.prompt_tokens
