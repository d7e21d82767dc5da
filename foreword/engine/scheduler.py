"""Which tokens the next step computes: continuous batching, chunked prefill, preemption (R8 to R11). Pure: no torch, no I/O.

A sequence is *waiting* (without blocks), *loading* (it has blocks, which a store is about to fill), *pulling* (another instance
computes its prompt and fills its blocks), *running*, *paused* (it keeps its blocks and rests), or finished.
Every step computes, for each running sequence in order of
admission, what is missing of its tokens: one for a sequence that decodes, a chunk for one that prefills. Then waiting
sequences are admitted in order of arrival while budget and memory last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from foreword.blocks import Copy, Match, PrefixCache
from foreword.engine.sequence import Arrival, Chunk, OffDevice, Pull, SequenceState, Step

__all__ = ["Arrival", "Chunk", "Pull", "Scheduler", "SequenceState", "Step"]


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    budget: int
    chunks: dict[int, Chunk] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Owns the queues; asks the prefix cache for blocks.

    Args:
        max_batch_tokens, max_num_seqs: bounds of a step.
        reserve: share of the pool that an admission leaves free while others run, so that they can grow (R11).
        offload: where blocks may lie that the device does not have.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        reserve: float = 0.01,
        offload: OffDevice[Any] | None = None,
    ) -> None:
        self.cache = cache
        self.loading: list[SequenceState] = []
        self.pulling: list[SequenceState] = []
        self.paused: list[SequenceState] = []
        self._off = offload
        self._arrived: list[SequenceState] = []
        self._in_flight: set[bytes] = set()
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._reserve = math.ceil(reserve * cache.pool.num_blocks)

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.loading) or any(_is_done(s) for s in self.pulling)

    def expects(self) -> bool:
        """Whether a store is about to bring news: then a step without work is no dead end."""
        return bool(self.loading) or any(s.store_load is not None and not s.store_load.answered for s in self.waiting)

    @property
    def in_blocks(self) -> int:
        """Sequences that hold blocks, or are about to."""
        return len(self.running) + len(self.loading) + len(self.pulling) + len(self.paused)

    def schedule(self) -> Step:
        """Decide the next step and take its blocks. An empty step means that there is nothing to do."""
        draft = _Draft(self._max_batch_tokens)
        if self.loading:
            self._collect()
        draft.admitted += self._arrived
        self._arrived = []
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        return Step(tuple(draft.chunks.values()), tuple(draft.copies), tuple(draft.preempted), tuple(draft.admitted))

    def _continue_running(self, draft: _Draft) -> None:
        # Decoding sequences never wait for a prefill chunk: their tokens are set aside first.
        decoding = sum(1 for sequence in self.running if len(sequence.table) - sequence.computed == 1)
        for_prefill = max(draft.budget - decoding, 0)
        for sequence in list(self.running):
            missing = len(sequence.table) - sequence.computed
            count = missing if missing == 1 else min(missing, for_prefill)
            if count == 0 or sequence in draft.preempted:
                continue
            if self._make_room(draft, sequence, sequence.computed + count):
                self._schedule(draft, sequence, count)
                for_prefill -= count if missing > 1 else 0

    def _make_room(self, draft: _Draft, sequence: SequenceState, num_tokens: int) -> bool:
        """Blocks for the sequence, if need be from the one admitted last. False if that was the sequence itself."""
        table = sequence.table
        if num_tokens < table.next_block_at:
            return True
        while True:
            named = table.published
            if self.cache.advance(table, num_tokens):
                draft.chunks[id(sequence)] = Chunk(sequence, 0, 0, 0, False, named)
                return True
            victim = self.running[-1]
            self._preempt(draft, victim)
            if victim is sequence:
                return False

    def _schedule(self, draft: _Draft, sequence: SequenceState, count: int) -> None:
        """Put a chunk into the draft; its blocks are already there."""
        start = sequence.computed
        table = sequence.table
        known = draft.chunks.get(id(sequence))
        named = known.published_before if known is not None else table.published
        write_from = max(start, named * self.cache.block_size)
        samples = start + count == len(table)
        draft.chunks[id(sequence)] = Chunk(sequence, start, count, write_from, samples, named)
        draft.budget -= count

    def _preempt(self, draft: _Draft, victim: SequenceState) -> None:
        """The request admitted last gives its blocks back and waits at the front; they stay cached while they can (R11).

        It may already have a chunk in this step: then the blocks that the chunk would have filled are withdrawn. Nobody
        shares them yet, because admissions come later and not at all in a step that preempts.
        """
        self.running.remove(victim)
        chunk = draft.chunks.pop(id(victim), None)
        if chunk is not None:
            draft.budget += chunk.count
            self.cache.retract(victim.table, chunk.published_before)
        self.cache.note_partial(victim.table, victim.computed)
        self.cache.release(victim.table)
        victim.computed = 0
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        draft.preempted.append(victim)

    def _admit_waiting(self, draft: _Draft) -> None:
        for sequence in list(self.waiting):
            if draft.budget <= 0 or self.in_blocks >= self._max_num_seqs:
                break
            if sequence.leader is not None and sequence.leader.pull is not None:
                continue  # the same prompt is on its way; it will be on the device then
            match = self.cache.lookup(sequence.table)
            if self._off is not None and not self._is_decided(sequence, match):
                continue  # the search is under way; whoever comes after it need not wait for that
            if not self._fits(sequence, match):
                break
            self.waiting.remove(sequence)
            count = self._to_load(sequence, match)
            if count:
                self._begin_load(sequence, match, count)
            elif self._is_pulled(sequence, match.cached_tokens):
                self.cache.admit(sequence.table, match)
                self._begin_pull(sequence)
            else:
                self._admit(draft, sequence, match)

    def _is_decided(self, sequence: SequenceState, match: Match) -> bool:
        """Whether it is known what the stores have of a sequence beyond what the device has; asks them if need be."""
        assert self._off is not None
        table, held = sequence.table, len(match.blocks)
        full = len(table) // self.cache.block_size
        if held >= full:
            return True
        keys = table.chain.keys_to(full)
        if keys[held] in self._in_flight:
            return False  # another request is loading it; it will be on the device in a moment
        if sequence.store_load is None or held < sequence.searched_from:
            sequence.store_load, sequence.searched_from = self._off.find(keys[held:full]), held
        return sequence.store_load.answered

    def _to_load(self, sequence: SequenceState, match: Match) -> int:
        """How many blocks after those of `match` come from a store."""
        held = len(match.blocks)
        if self._off is None or sequence.store_load is None or held < sequence.searched_from:
            return 0
        return self._off.worth_loading(sequence.store_load, held - sequence.searched_from, len(sequence.table))

    def _begin_load(self, sequence: SequenceState, match: Match, count: int) -> None:
        """Take blocks for what a store will bring. Nobody finds them before they are filled."""
        assert self._off is not None and sequence.store_load is not None
        table, held = sequence.table, len(match.blocks)
        self.cache.admit(table, match)
        blocks = self.cache.extend(table, held + count)
        assert blocks is not None, "`_fits` said that there is room"
        self._in_flight.update(table.chain.keys[held : held + count])
        sequence.computed = held * self.cache.block_size
        self._off.load(sequence.store_load, held - sequence.searched_from, blocks)
        self.loading.append(sequence)

    def _collect(self) -> None:
        """Loads that ended, whole, in part, or at their deadline: the sequences run, and compute what is missing."""
        for sequence in list(self.loading):
            assert sequence.store_load is not None
            if not sequence.store_load.done:
                continue
            tiers = self._end_load(sequence)
            held = sequence.table.published + len(tiers)
            self.cache.publish(sequence.table, held)
            shared = held * self.cache.block_size
            if self._is_pulled(sequence, shared):
                sequence.loaded = tiers
                if self._begin_pull(sequence):
                    continue
            sequence.computed = min(shared, len(sequence.table) - 1)
            self.running.append(sequence)
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = min(sequence.computed, sequence.num_prompt)
                sequence.shared_tokens = sequence.cached_tokens
                sequence.loaded = tiers
                sequence.recomputed = shared - sequence.cached_tokens
                self._arrived.append(sequence)

    def _end_load(self, sequence: SequenceState) -> list[int]:
        """Close a load; returns the tier of each block that it brought."""
        assert sequence.store_load is not None
        tiers = sequence.store_load.close()
        self._in_flight.difference_update(sequence.table.chain.keys)
        self.loading.remove(sequence)
        sequence.store_load = None
        return tiers

    def _is_pulled(self, sequence: SequenceState, cached_tokens: int) -> bool:
        """Whether the rest of a prompt is worth asking another instance for."""
        pull = sequence.pull
        if pull is not None and len(sequence.table) - cached_tokens < pull.min_tokens:
            sequence.pull = None
        return sequence.pull is not None

    def _begin_pull(self, sequence: SequenceState) -> bool:
        """Take blocks for the rest of a prompt and ask for it. Nobody finds them before they are filled. False if there is no
        room for them any more: then it is computed here, a chunk at a time."""
        table, size = sequence.table, self.cache.block_size
        assert sequence.pull is not None
        held = table.published
        blocks = self.cache.extend(table, -(-len(table) // size))
        if blocks is None:
            sequence.pull = None
            return False
        sequence.computed = sequence.arrived_from = held * size
        self.pulling.append(sequence)
        full = len(table) // size
        sequence.pull.begin(table.chain.keys_to(full)[:full], held, table.blocks[held:])
        return True

    def collect_pulls(self) -> list[SequenceState]:
        """Prompts that came, whole or in part: they run, and compute what is missing. One that came whole has no token to
        compute before the next one is appended (`arrival.token`)."""
        done = [sequence for sequence in self.pulling if _is_done(sequence)]
        for sequence in done:
            self._end_pull(sequence)
        return done

    def _end_pull(self, sequence: SequenceState) -> None:
        assert sequence.pull is not None
        table, size = sequence.table, self.cache.block_size
        sequence.arrival = arrival = sequence.pull.close()
        sequence.pull = None
        self.pulling.remove(sequence)
        self.running.append(sequence)
        self.cache.publish(table, arrival.blocks)
        if arrival.token is not None:
            sequence.computed = len(table)
            self.cache.note_partial(table, len(table))
        else:
            sequence.computed = min(arrival.blocks * size, len(table) - 1)
        held = sequence.arrived_from
        sequence.cached_tokens = max(held, min(arrival.cached_tokens, sequence.num_prompt - 1))
        sequence.shared_tokens = sequence.cached_tokens

    def pause(self, sequence: SequenceState) -> None:
        """It keeps its blocks, and takes no part in steps. It must run or wait."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.paused.append(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """Go on with a paused one: with its blocks, or from the front of the queue."""
        self.paused.remove(sequence)
        if sequence.table.blocks:
            self.running.append(sequence)
        else:
            self.waiting.appendleft(sequence)

    def hold(self, sequence: SequenceState, num_tokens: int, full: int) -> int | None:
        """Take blocks for `num_tokens` tokens of a sequence that comes from elsewhere, and keep it paused. Returns how many
        of its first `full` blocks are here already; None if there is no room for it."""
        table, size = sequence.table, self.cache.block_size
        if not num_tokens:
            self.paused.append(sequence)
            return 0
        if self.in_blocks >= self._max_num_seqs:
            return None
        found = self.cache.lookup(table)
        held = min(len(found.blocks), full)
        match = Match(found.blocks[:held], -1, 0, held * size)
        needed = self.cache.new_blocks(table, match, num_tokens)
        if self.in_blocks:
            needed += self._reserve + self._owed()
        if needed > self.cache.pool.num_free:
            return None
        self.cache.admit(table, match)
        taken = self.cache.extend(table, -(-num_tokens // size))
        assert taken is not None, "there was room a moment ago"
        self.paused.append(sequence)
        return held

    def _fits(self, sequence: SequenceState, match: Match) -> bool:
        """Whether the pool has room for all the tokens that the sequence has so far, and for what running prefills have yet
        to take, above the reserve. An engine without other work needs no reserve."""
        cache = self.cache
        needed = cache.new_blocks(sequence.table, match, len(sequence.table))
        if self.in_blocks:
            needed += self._reserve + self._owed()
        return needed <= cache.pool.num_free

    def _owed(self) -> int:
        size = self.cache.block_size
        return sum(max(-(-len(s.table) // size) - len(s.table.blocks), 0) for s in (*self.running, *self.loading))

    def _admit(self, draft: _Draft, sequence: SequenceState, match: Match) -> None:
        cache, table = self.cache, sequence.table
        sequence.store_load = sequence.pull = None
        # A prompt that is cached to its end computes its last token again, for the logits; its KV is not written (R8).
        sequence.computed = min(match.cached_tokens, len(table) - 1)
        count = min(len(table) - sequence.computed, draft.budget)
        cache.admit(table, match)
        named = table.published
        if not cache.advance(table, sequence.computed + count):  # pragma: no cover - `_fits` said that there is room
            raise AssertionError("admission without room")
        copy = cache.copy_partial(table, match)
        if copy is not None:
            draft.copies.append(copy)
        self.running.append(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(sequence.computed, sequence.num_prompt)
            sequence.shared_tokens = min(len(match.blocks) * cache.block_size, sequence.computed)
            draft.admitted.append(sequence)
        draft.chunks[id(sequence)] = Chunk(sequence, 0, 0, 0, False, named)
        self._schedule(draft, sequence, count)

    def settle(self, step: Step) -> None:
        """The step's KV is computed."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.samples and chunk.count > 1:
                self.cache.note_partial(sequence.table, sequence.computed)

    def withdraw(self, step: Step) -> None:
        """The step failed: no block that it would have filled, and none that it would have copied, may be found by anyone."""
        for chunk in step.chunks:
            self.cache.retract(chunk.sequence.table, chunk.published_before)
            chunk.sequence.computed = min(chunk.sequence.computed, chunk.published_before * self.cache.block_size)

    def finish(self, sequence: SequenceState) -> None:
        """Take a sequence out, wherever it is."""
        if sequence in self.running or sequence in self.paused:
            (self.running if sequence in self.running else self.paused).remove(sequence)
            self.cache.note_partial(sequence.table, sequence.computed)
            self.cache.release(sequence.table)
        elif sequence in self.loading:
            self._end_load(sequence)
            self.cache.release(sequence.table)
        elif sequence in self.pulling:
            self._abandon_pull(sequence)
            self.cache.release(sequence.table)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.pull = None

    def _abandon_pull(self, sequence: SequenceState) -> None:
        """What has come whole stays cached."""
        assert sequence.pull is not None
        self.cache.publish(sequence.table, sequence.pull.close().blocks)
        self.pulling.remove(sequence)

    def finish_all(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in list(sequences):
            self.finish(sequence)


def _is_done(sequence: SequenceState) -> bool:
    return sequence.pull is not None and sequence.pull.done
