"""Saves computed blocks in the stores: what each step filled, what arrived, and what the next turn needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from foreword.blocks.checkpoints import CheckpointPlan
from foreword.blocks.prefix_cache import HOLE, PrefixCache
from foreword.blocks.runs import consecutive_runs
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.offload.manager import OffloadManager

if TYPE_CHECKING:
    from foreword.engine.loop import Hooks

# Steps with fewer prompt tokens say little about the speed of prefill.
_MEASURED_TOKENS: Final = 64


class BlockSaver:
    """Runs on the engine's thread.

    Args:
        cache: the device's blocks.
        offload: copies blocks to the stores.
    """

    def __init__(self, cache: PrefixCache, offload: OffloadManager) -> None:
        self._cache, self._offload = cache, offload

    def attach(self, hooks: Hooks) -> None:
        """Save from now on."""
        hooks.stepped.append(self.note_step)
        hooks.arrived.append(self.save_arrived)
        hooks.computed.append(self.save_chunk)
        hooks.ended.append(self.end)

    def note_step(self, step: Step, seconds: float) -> None:
        """Measure the speed of prefill: a step took `seconds` seconds."""
        prefill = sum(chunk.count for chunk in step.chunks if chunk.count > 1)
        if prefill >= _MEASURED_TOKENS:
            self._offload.prefill_rate.note(step.num_tokens, seconds)

    def save_chunk(self, step: Step, chunk: Chunk) -> None:
        """Save the blocks that a step filled in one sequence, of prompt and output."""
        sequence = chunk.sequence
        full = min((chunk.start + chunk.count) // self._cache.block_size, sequence.table.published)
        if self._cache.windows and sequence.checkpoints is None:
            sequence.checkpoints = self._plan_checkpoints(chunk)
        if sequence in step.admitted:
            sequence.unsaved.clear()  # a preempted sequence has other blocks now
            self._save_again(sequence, chunk.published_before)
        self._save_blocks(sequence, chunk.published_before, full)

    def save_arrived(self, sequence: SequenceState, start: int | None) -> None:
        """Save the blocks of a sequence whose KV has arrived: computed by another instance from token `start` on, or loaded."""
        published = sequence.table.published
        first = published if start is None else start // self._cache.block_size
        self._save_again(sequence, first)
        self._save_blocks(sequence, first, published)

    def _save_again(self, sequence: SequenceState, count: int) -> None:
        """Offer the blocks that a sequence had when it was admitted to tiers that have refused them before."""
        if self._offload.store.selective and not sequence.preemptions:
            for number, blocks in enumerate(sequence.table.groups):
                self._save_group(sequence, number, [i for i in range(count) if blocks[i] != HOLE], again=True)

    def _save_blocks(self, sequence: SequenceState, first: int, full: int) -> None:
        if full <= first and not sequence.unsaved:
            return
        plan = sequence.checkpoints
        for number in range(len(self._cache.groups)):
            wanted = [i for i in range(first, full) if plan is None or plan.wanted(number, i)]
            self._save_in_order(sequence, number, wanted)

    def _save_in_order(self, sequence: SequenceState, number: int, wanted: Sequence[int]) -> None:
        """Save these blocks, after those for which there was no room before: a chain without its first block is found by no
        lookup. What has no room now is tried again in the sequence's next steps."""
        blocks, late = sequence.table.groups[number], sequence.unsaved.pop(number, [])
        left = [i for i in late if blocks[i] != HOLE]
        self._offload.note_dropped(len(late) - len(left))
        left += wanted
        left = left[self._save_group(sequence, number, left) :]
        if left:
            sequence.unsaved[number] = left

    def end(self, sequence: SequenceState, complete: bool) -> None:
        """The sequence's blocks are free from now on. What the next turn needs of a complete one is saved."""
        if complete and sequence.checkpoints is not None:
            self._save_turn(sequence, sequence.checkpoints)
        if sequence.unsaved:
            self._offload.note_dropped(sum(map(len, sequence.unsaved.values())))

    def _save_group(self, sequence: SequenceState, number: int, wanted: Sequence[int], *, again: bool = False) -> int:
        """Save these blocks of one KV group, in order of their positions. Returns for how many of the first there was room."""
        chain, blocks = sequence.table.chain, sequence.table.groups[number]
        if self._cache.quarantined and wanted:
            usable = self._cache.usable(chain.keys_to(wanted[-1] + 1))
            wanted = [block for block in wanted if block < usable]
        for low, high in consecutive_runs(wanted):
            first, stop = wanted[low], wanted[high - 1] + 1
            keys = chain.keys_to(stop)[first:stop]
            where = chain.key_before(first), first, blocks[first:stop], number
            done = self._offload.save(chain.root, keys, *where, prompt=sequence.num_prompt, again=again)
            if done < stop - first:
                return low + done
        return len(wanted)

    def _plan_checkpoints(self, chunk: Chunk) -> CheckpointPlan:
        """Plan the blocks of window groups that a sequence saves whose first chunk was computed."""
        sequence = chunk.sequence
        sizes = [one.layouts[0].block_bytes for one in self._offload.units]
        length = max(sequence.num_prompt, chunk.start + chunk.count)
        plan = CheckpointPlan(self._cache.groups, sizes, length, resumed=chunk.start, cached=sequence.reach)
        for wish in sequence.request.retain:
            plan.add(wish.end)
        return plan

    def _save_turn(self, sequence: SequenceState, plan: CheckpointPlan) -> None:
        table = sequence.table
        full = min(sequence.computed // self._cache.block_size, table.published)
        unsaved = {
            number: [i for i in range(full) if table.groups[number][i] != HOLE and not plan.wanted(number, i)]
            for number in self._cache.windows
        }
        if plan.end_turn(full * self._cache.block_size):
            for number, blocks in unsaved.items():
                self._save_group(sequence, number, [i for i in blocks if plan.wanted(number, i)])
