"""A simulated replica: the real scheduler and block pool, with steps that take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.salt import Salt
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.routing.fleet import Fleet
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.prefill import SimulatedPrefill
from foreword.sim.sequence_tokens import SequenceTokens, SimulatedChain, tokens_of
from foreword.sim.stores import SimulatedStores

MODEL = b"simulated"
_PARAMS = SamplingParams()


@dataclass(slots=True)
class ReplicaTotals:
    """Totals of one replica. `busy` is seconds of computation, `up` seconds from its start to its end."""

    steps: int = 0
    busy: float = 0.0
    preemptions: int = 0
    up: float = 0.0


class SimulatedReplica:
    """A replica. The simulation calls `begin` when it is idle and `end` at the time `ends_at`.

    Attributes:
        step: the step that is being computed; None while idle.
        ends_at: end of the step.
        costs: of the steps that begin from now on.
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
        self._started = 0.0
        self.costs = costs
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

    def add(self, request: SequenceTokens, keys: Sequence[bytes], remote: SimulatedPrefill | None = None) -> None:
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
        return self.step is None and not self._scheduler.has_work() and not self._scheduler.waiting_for_kv

    def fail(self, now: float) -> list[SequenceTokens]:
        """The replica fails. Returns its requests, in order of arrival, to be placed again.

        The output of the step that is being computed is lost, unless it ends now.
        """
        if self.step is not None and self.ends_at <= now:
            self.end(now)
        self.step = None
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
        """Start the next step. False if there is nothing to compute now."""
        scheduler = self._scheduler
        if not scheduler.has_work():
            return False
        if self._stores is not None:
            self._stores.now = now
        loaded = scheduler.collect() if scheduler.waiting_for_kv else []
        step = scheduler.schedule()
        for sequence in (*loaded, *step.admitted):
            self._note_admission(sequence)
        if not step.chunks:
            return False
        self.step, self._started = step, now
        self.ends_at = now + self._seconds(step.chunks)
        return True

    def end(self, now: float) -> None:
        """The step is over."""
        step = self.step
        assert step is not None
        self.step = None
        self.totals.steps += 1
        self.totals.busy += now - self._started
        self._scheduler.settle(step)
        self._save(step.chunks)
        for chunk in step.chunks:
            if chunk.samples:
                self._answer(chunk.sequence, now)

    def _answer(self, sequence: SequenceState, now: float) -> None:
        """A sequence has its first token, its last one, or both."""
        tokens = tokens_of(sequence)
        tokens.length += 1
        if tokens.computed_for is None and not tokens.answered:
            tokens.answered = True
            if tokens.outcome.first_token < 0:
                tokens.outcome.first_token = now
            self._fleet.first_token(str(tokens.number), now)
        if tokens.length >= sequence.max_total:
            self._finish(sequence, tokens, now)

    def _seconds(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step with these chunks."""
        costs = self.costs
        prefilled = pairs = decoding = context = 0
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
