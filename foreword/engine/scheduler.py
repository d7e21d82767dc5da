"""The scheduler chooses the tokens of the next step: continuous batching, chunked prefill, preemption. Pure: no torch, no I/O.

A sequence is in one of these states:

- waiting: it has no blocks;
- waiting for KV: it holds blocks, which a store or another instance fills (`external_kv.ExternalKV`);
- running: each step computes what is missing, a chunk of its prompt or one token;
- paused: it keeps its blocks and takes no part in steps (the last round of its migration).

A step serves the running sequences in order of admission. Then it admits waiting ones in order of arrival, while its token
budget and the free blocks last.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from foreword.blocks.prefix_cache import NO_MATCH, Copy, Match, PrefixCache
from foreword.engine.external_kv import (
    ExternalKV,
    KVArrival,
    Prefetches,
    StoreKV,
    Stores,
    UnsettledBlocks,
)
from foreword.engine.prompt_logprobs import MAX_ROWS
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.store.tier_counters import LookupOutcome


class _StepDraft:
    """A step in the making. `rows` are those of logits, for prompts whose log-probabilities were requested."""

    __slots__ = ("admitted", "budget", "chunks", "copies", "preempted", "rows")

    def __init__(self, budget: int) -> None:
        self.budget, self.rows = budget, MAX_ROWS
        self.chunks: dict[SequenceState, Chunk] = {}
        self.copies: list[Copy] = []
        self.preempted: list[SequenceState] = []
        self.admitted: list[SequenceState] = []


class Scheduler:
    """Owns the queues, and takes blocks from the prefix cache.

    Args:
        max_batch_tokens, max_num_seqs: bounds of a step.
        reserve: share of the pool that an admission leaves free while other sequences run, so that they can grow.
        offload: stores that may hold blocks which the device does not.
        stored: the same stores, of a model with windows.
        reclaim: gives blocks that are kept for later requests back to the pool; False if there are none.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        reserve: float = 0.01,
        offload: Stores[Any] | None = None,
        reclaim: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cache = cache
        self.waiting: deque[SequenceState] = deque()
        self.waiting_for_kv: dict[SequenceState, ExternalKV] = {}
        self.running: list[SequenceState] = []
        self.paused: list[SequenceState] = []
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._reserve = math.ceil(reserve * cache.pool.num_blocks)
        self._stores = offload
        self._reclaim = reclaim
        self.short_of_memory: SequenceState | None = None  # for which the last step had no room
        self._in_flight: set[bytes] = set()  # keys of the blocks that stores are loading
        search = None if offload is None else lambda *chain: self._search(offload, *chain, patient=True)
        self._unsettled = UnsettledBlocks(cache.pool)
        self.prefetches = Prefetches(cache, search, self._in_flight, self._unsettled)

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    def has_work(self) -> bool:
        """Whether a call of `collect` and `schedule` can do anything, now or at a store's deadline."""
        return bool(self.running or self.waiting or self.prefetches or self._unsettled) or any(
            kv.done or kv.from_store for kv in self.waiting_for_kv.values()
        )

    def expects_store(self) -> bool:
        """Whether a store is searching or loading: a step without work is then no dead end."""
        searching = any(s.store is not None and not s.store.answered for s in self.waiting)
        prefetching = bool(self.prefetches) and not self.waiting
        return (
            searching
            or prefetching
            or bool(self._unsettled)
            or any(kv.from_store for kv in self.waiting_for_kv.values())
        )

    @property
    def settles(self) -> bool:
        """Whether blocks come back by themselves in a moment: copies into them are not done, whose requests have ended."""
        return bool(self._unsettled)

    @property
    def num_admitted(self) -> int:
        """Sequences that hold blocks, or are about to."""
        return len(self.running) + len(self.waiting_for_kv) + len(self.paused)

    def schedule(self) -> Step:
        """Decide the next step and take its blocks. An empty step means that there is nothing to do."""
        draft = _StepDraft(self._max_batch_tokens)
        self._continue_running(draft)
        self.short_of_memory = None if draft.preempted else self._admit_waiting(draft)
        if self.prefetches and not draft.preempted and self.short_of_memory is None:
            self.prefetches.start(self.cache.pool.num_free - self._reserve - self._owed())
        return Step(tuple(draft.chunks.values()), tuple(draft.copies), tuple(draft.preempted), tuple(draft.admitted))

    def settle(self, step: Step) -> None:
        """The step's KV is computed."""
        self._release_sources(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.samples and chunk.count > 1:
                self.cache.note_partial(sequence.table, sequence.computed)

    def withdraw(self, step: Step) -> None:
        """The step failed: the blocks that it would have filled or copied must not be found in the cache."""
        self._release_sources(step)
        for chunk in step.chunks:
            self.cache.retract(chunk.sequence.table, chunk.published_before)
            chunk.sequence.computed = min(chunk.sequence.computed, chunk.published_before * self.cache.block_size)

    def _release_sources(self, step: Step) -> None:
        for copy in step.copies:
            self.cache.pool.release(copy.sources)

    def finish(self, sequence: SequenceState) -> None:
        """Take a sequence out, whatever its state. Its blocks stay cached while they can."""
        if sequence in self.waiting_for_kv:
            self._end_wait(sequence)
        for queue in (self.running, self.paused, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        with contextlib.ExitStack() as ends:  # whatever raises, all of these are done
            if sequence.remote is not None and sequence.request.index == 0:
                ends.callback(sequence.remote.close)
            if sequence.table.blocks:
                ends.callback(self.cache.release, sequence.table)
                self.cache.note_partial(sequence.table, sequence.computed)

    # Running sequences

    def _continue_running(self, draft: _StepDraft) -> None:
        # Decoding sequences never wait for a prefill chunk: their tokens are subtracted from the budget first.
        all_missing = [len(sequence.table) - sequence.computed for sequence in self.running]
        for_prefill = max(draft.budget - all_missing.count(1), 0)
        windows = bool(self.cache.windows)
        for sequence, missing in zip(tuple(self.running), all_missing, strict=True):
            count = missing if missing == 1 else min(missing, for_prefill)
            if sequence.needs_logits:
                count = min(count, draft.rows)
            if count == 0 or sequence in draft.preempted:
                continue
            table, end = sequence.table, sequence.computed + count
            published_before = table.published
            if (end < table.next_block_at and not windows) or self._take_blocks(draft, sequence, end):
                self._add_chunk(draft, sequence, count, published_before, samples=count == missing)
                for_prefill -= count if missing > 1 else 0

    def _take_blocks(self, draft: _StepDraft, sequence: SequenceState, num_tokens: int) -> bool:
        """Give back what left the windows and take blocks for `num_tokens` tokens; preempt the sequences admitted last if
        memory is short. False if that preempted the sequence itself, which does not happen to one that runs alone while
        blocks are kept; or if blocks come back in a moment."""
        if self.cache.windows:
            self.cache.trim(sequence.table, sequence.computed)
        while not self.cache.advance(sequence.table, num_tokens):
            victim = self.running[-1]
            alone = self.num_admitted == 1
            if self._unsettled:  # there is more memory as soon as the copies into it are done
                return False
            if self.prefetches.cancel() or (alone and self._reclaim()):
                continue
            self._preempt(draft, victim)
            if victim is sequence:
                return False
        return True

    def _add_chunk(
        self, draft: _StepDraft, sequence: SequenceState, count: int, published_before: int, *, samples: bool
    ) -> None:
        """Add the next `count` tokens of a sequence to the step. The sequence already has blocks for them."""
        start = sequence.computed
        write_from = max(start, published_before * self.cache.block_size)
        draft.chunks[sequence] = Chunk(sequence, start, count, write_from, samples, published_before)
        draft.budget -= count
        draft.rows -= count if sequence.needs_logits else 0

    def _preempt(self, draft: _StepDraft, victim: SequenceState) -> None:
        """Take the blocks of a running sequence and put it at the front of the queue; its blocks stay cached while they can.

        It may already have a chunk in this step: then the blocks that the chunk would have filled are retracted. No other
        sequence shares them yet, because admissions come later, and not at all in a step that preempts.
        """
        self.running.remove(victim)
        chunk = draft.chunks.pop(victim, None)
        if chunk is not None:
            draft.budget += chunk.count
            self.cache.retract(victim.table, chunk.published_before)
        self.cache.note_partial(victim.table, victim.computed)
        self.cache.release(victim.table)
        victim.computed = 0
        victim.checkpoints = None
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        draft.preempted.append(victim)

    # Admission

    def _admit_waiting(self, draft: _StepDraft) -> SequenceState | None:
        """Admit sequences while there is room. Returns the one for which there is none."""
        for sequence in list(self.waiting):
            if draft.budget <= 0 or self.num_admitted >= self._max_num_seqs:
                break
            if sequence.request.index > 0 and (_is_open(sequence) or sequence.needs_logits):
                continue  # the request's first sequence waits for the same prompt
            if sequence.needs_logits and not draft.rows:
                continue
            match = NO_MATCH if sequence.needs_logits else self.cache.lookup(sequence.table)
            if not self._is_searched(sequence, len(match.blocks)):
                continue  # the sequences behind it need not wait for its search
            if self.cache.windows and (self._stores is not None or sequence.request.want_cache_report):
                self._note_reach(sequence)
            fitting = self._fitting(sequence, match)
            if fitting is None:
                return sequence
            self.waiting.remove(sequence)
            if not self._wait_for_kv(sequence, fitting):
                self._admit(draft, sequence, fitting)
        return None

    def _fitting(self, sequence: SequenceState, match: Match) -> Match | None:
        """The cached prefix of a sequence, if there is room for it. If not, prefetches end, and an engine without other work
        gives up what is kept for later requests."""
        while not self._fits(sequence, match, len(sequence.table)):
            if self._unsettled:
                return None  # there is more memory as soon as the copies into it are done
            if not self.prefetches.cancel() and (self.num_admitted or not self._reclaim()):
                return None
            match = self.cache.lookup(sequence.table)
        return match

    def _fits(self, sequence: SequenceState, match: Match, num_tokens: int) -> bool:
        """Whether the pool has room for the sequence's first `num_tokens` tokens, for what running prefills have yet to take,
        and for the reserve. An engine without other work needs no reserve."""
        needed = self.cache.new_blocks(sequence.table, match, num_tokens, self._max_batch_tokens)
        if self.num_admitted:
            needed += self._reserve + self._owed()
        return needed <= self.cache.pool.num_free

    def _owed(self) -> int:
        """Blocks that admitted prompts have yet to take."""
        owed, most = self.cache.owed_blocks, self._max_batch_tokens
        loading = [sequence for sequence, kv in self.waiting_for_kv.items() if kv.from_store]
        return sum(owed(s.table, len(s.table), most) for s in (*self.running, *loading))

    def _admit(self, draft: _StepDraft, sequence: SequenceState, match: Match) -> None:
        cache, table = self.cache, sequence.table
        sequence.store = None
        # A prompt that is cached to its end recomputes its last token, for the logits; its KV is not written.
        sequence.computed = min(match.cached_tokens, len(table) - 1)
        count = min(len(table) - sequence.computed, draft.budget)
        if sequence.needs_logits:
            count = min(count, draft.rows)
        cache.admit(table, match)
        published_before = table.published
        if not cache.advance(table, sequence.computed + count):  # pragma: no cover - `_fits` said that there is room
            raise AssertionError("admission without room")
        copy = cache.copy_partial(table, match)
        if copy is not None:
            # A load that begins in this step must not be given the source: it would write there before the copy is made.
            cache.pool.share(copy.sources)
            draft.copies.append(copy)
        self.running.append(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(sequence.computed, sequence.num_prompt)
            sequence.shared_tokens = min(len(match.blocks) * cache.block_size, sequence.cached_tokens)
            draft.admitted.append(sequence)
        self._add_chunk(draft, sequence, count, published_before, samples=sequence.computed + count == len(table))

    # Waiting for KV

    def _is_searched(self, sequence: SequenceState, held: int) -> bool:
        """Whether it is known which blocks after the first `held` the stores have. Starts the search if needed."""
        table = sequence.table
        full = len(table) // self.cache.block_size
        if self._stores is None:
            return True
        if sequence.needs_logits or not full:
            if not sequence.unsearched:
                sequence.unsearched = True
                outcome = LookupOutcome.NOT_ALLOWED if sequence.needs_logits else LookupOutcome.TOO_SMALL
                self._stores.refuse_lookup(outcome, len(table))
            return True
        if held >= full:
            return True
        keys = table.chain.keys_to(full)
        if keys[held] in self._in_flight:
            self.prefetches.hurry(keys[held])
            return False  # it is being loaded for another sequence, and will be on the device then
        if sequence.store is None or held < sequence.store.first:
            sequence.store = self._search(self._stores, table.chain.root, keys[:full], held)
        return sequence.store.answered

    def _search(
        self, stores: Stores[Any], root: bytes, keys: Sequence[bytes], held: int, *, patient: bool = False
    ) -> StoreKV:
        keys = keys[: self.cache.usable(keys)]
        return StoreKV(stores, root, keys, held, self.cache.block_size, self._in_flight, patient=patient)

    def _note_reach(self, sequence: SequenceState) -> None:
        stored = 0 if sequence.store is None else sequence.store.reach
        sequence.reach = max(stored, self.cache.whole_run(sequence.table))

    def _wait_for_kv(self, sequence: SequenceState, match: Match) -> bool:
        """Let a sequence wait for KV from the stores or from another instance. False if it is computed here."""
        held, store = len(match.blocks), sequence.store
        count = 0 if store is None or held < store.first else store.worth_loading(held)
        if count and store is not None:
            self.cache.admit(sequence.table, match)
            begun = self._begin(sequence, store, held + count)
            if not begun:  # a window group needs what it has until the load has ended, besides what is loaded
                self.cache.release(sequence.table)
            return begun
        if self._is_remote(sequence, match.cached_tokens):
            self.cache.admit(sequence.table, match)
            return self._begin_remote(sequence)
        return False

    def _is_remote(self, sequence: SequenceState, cached_tokens: int) -> bool:
        """Whether another instance is asked for the rest of a prompt. If too little is missing, or its
        tenant was forgotten, it never will be."""
        remote = sequence.remote
        if remote is not None and not remote.closed:
            few = len(sequence.table) - cached_tokens < remote.min_tokens
            if few or sequence.table.hidden:  # that instance may have forgotten the tenant already, and would keep it
                remote.close()
        return _is_open(sequence)

    def _begin_remote(self, sequence: SequenceState) -> bool:
        """Ask another instance for the rest of a prompt. False if memory is short: then it is computed here, in chunks."""
        assert sequence.remote is not None
        begun = self._begin(sequence, sequence.remote, -(-len(sequence.table) // self.cache.block_size))
        if not begun:
            sequence.remote.close()
        return begun

    def _begin(self, sequence: SequenceState, external: ExternalKV, num_blocks: int) -> bool:
        """Take blocks until the sequence has `num_blocks`; `external` fills those without KV. False if memory is short."""
        table, size = sequence.table, self.cache.block_size
        fresh = self.cache.extend(table, num_blocks)
        if fresh is None:
            return False
        held, full = table.published, min(num_blocks, len(table) // size)
        sequence.computed = held * size
        self.waiting_for_kv[sequence] = external
        blocks = fresh if self.cache.windows else table.blocks[held:]
        external.begin(table.chain.keys_to(full)[:full], held, blocks)
        return True

    def collect(self) -> list[SequenceState]:
        """Run the sequences whose KV has come, whole or in part; steps compute the rest. To be called before `schedule`.

        Returns those admitted for the first time. One whose prompt was computed elsewhere has nothing to compute until the
        token that came with it (`transferred.token`) is appended.
        """
        if self._unsettled:
            self._unsettled.release()
        if self.prefetches:
            self.prefetches.collect()
        done = [sequence for sequence, external in self.waiting_for_kv.items() if external.done]
        return [sequence for sequence in done if self.collect_one(sequence)]

    def collect_one(self, sequence: SequenceState) -> bool:
        """End a sequence's wait for KV. True if it runs now and was admitted for the first time."""
        first, from_store = sequence.cached_tokens < 0, self.waiting_for_kv[sequence].from_store
        arrival = self._end_wait(sequence)
        if first and arrival.origin:
            sequence.transferred = arrival
        elif first:
            sequence.loaded = arrival
        if self._is_remote(sequence, arrival.tokens) and self._begin_remote(sequence):
            return False  # the stores did not have all of it
        if not sequence.table.blocks and not from_store:  # migrated here before it had any KV
            self.waiting.appendleft(sequence)
            return False
        self._run_with(sequence, arrival)
        return first

    def _end_wait(self, sequence: SequenceState) -> KVArrival:
        """End a sequence's wait, and publish the blocks that came whole."""
        external = self.waiting_for_kv.pop(sequence)
        arrival = external.close()
        self._unsettled.hold(external)
        sequence.store = None
        if self.cache.windows:
            self.cache.truncate(sequence.table, arrival.tokens // self.cache.block_size)
        self.cache.publish(sequence.table, arrival.tokens // self.cache.block_size)
        return arrival

    def _run_with(self, sequence: SequenceState, arrival: KVArrival) -> None:
        table = sequence.table
        if arrival.token is not None:
            sequence.computed = len(table)
            self.cache.note_partial(table, len(table))
        else:
            sequence.computed = min(arrival.tokens, len(table) - 1)
        self.running.append(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = max(arrival.start, min(arrival.cached_tokens, sequence.num_prompt - 1))
            sequence.shared_tokens = sequence.cached_tokens

    # Migration

    def admit_migrated(self, sequence: SequenceState, external: ExternalKV, num_tokens: int, full: int) -> bool:
        """Take blocks for `num_tokens` tokens of a request that migrates here, and wait for its KV. The sender has the KV of
        its first `full` blocks; those that are cached here are not sent. False if there is no room."""
        if num_tokens:
            if self.num_admitted >= self._max_num_seqs:
                return False
            blocks = self.cache.lookup(sequence.table).blocks[:full]
            match = Match(blocks, -1, 0, len(blocks) * self.cache.block_size)
            if not self._fits(sequence, match, num_tokens):
                return False
            self.cache.admit(sequence.table, match)
        begun = self._begin(sequence, external, -(-num_tokens // self.cache.block_size))
        assert begun, "`_fits` said that there is room"
        return True

    def pause(self, sequence: SequenceState) -> None:
        """Keep a running or waiting sequence out of the steps. It keeps its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.paused.append(sequence)

    def resume(self, sequence: SequenceState) -> None:
        """Continue a paused sequence: with its blocks, or at the front of the queue if it has none."""
        self.paused.remove(sequence)
        if sequence.table.blocks:
            self.running.append(sequence)
        else:
            self.waiting.appendleft(sequence)


def _is_open(sequence: SequenceState) -> bool:
    """Whether the prompt is still expected from another instance, or will be asked for."""
    return sequence.remote is not None and not sequence.remote.closed
