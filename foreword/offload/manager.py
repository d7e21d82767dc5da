"""The offload manager: one interface for an engine to all its stores. It finds, loads, saves and pins blocks.

The engine's thread calls it, and no call blocks; threads of this module wait for the stores. Whatever a store does:

- A step never waits for a save. Saving copies blocks into the staging arena and returns. If the arena is full, the newest
  queued blocks that a tier has already are dropped for the slower ones (`WriteBehind.drop_stored`).
- A request waits no longer than a load can save. `policy.py` compares the measured bandwidth of each tier with the
  engine's measured prefill speed, and a load that turns out to be slower than computing is cut off.
- No thread waits for the model, and the engine's thread waits for no copy. The blocks of a load are ordered behind the engine's
  work once, when they are handed over. Groups of blocks are read and their copies queued while earlier ones run; a thread of
  the loads waits for its own copies, and a slot is used again after the copy out of it.
- Nothing is written into a block after the engine has taken it back: `StoreLoad.close` is a flag, after which no copy begins,
  and the engine keeps the blocks until the load is `done`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from foreword.blocks.keys import named_root
from foreword.blocks.layout import BlockUnits, Layout, key_of, whole_blocks
from foreword.blocks.resume import KVGroup
from foreword.errors import StoreError
from foreword.offload.counters import OffloadStatus
from foreword.offload.direct_extra import direct_extra
from foreword.offload.load import GroupBlocks, StoreLoad
from foreword.offload.lookups import StoreLookups
from foreword.offload.policy import PATIENCE, LoadCosts
from foreword.offload.slot_reads import read_into
from foreword.offload.slots import SlotReader, StagingSlots
from foreword.offload.writer import WRITE_BLOCKS, WRITE_TIMEOUT, BlockRead, WriteBatch, WriteBehind
from foreword.store.background import use_background_cores
from foreword.store.base import Loan, Name
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header
from foreword.store.layout_records import LAYOUTS, LayoutRecord
from foreword.store.shared_records import SharedRecords
from foreword.store.tier_counters import Rate
from foreword.store.tier_rules import BlockUse
from foreword.store.tiered import FetchedBlock, TieredStore, Tiers

if TYPE_CHECKING:
    from foreword.offload.device import Event
    from foreword.offload.direct_interfaces import DirectCopies, DirectLoad
    from foreword.offload.staging import StagingArena

Done = TypeVar("Done")

# Bytes that a load reads and copies at once. On a GPU each is a few launches and an event: fewer, larger ones are faster.
_GROUP_BYTES: Final = 8 << 20
_GROUP_BYTES_ON_DEVICE: Final = 32 << 20
_PROBE_BYTES: Final = 1 << 20  # the first group from a store of unknown speed
_TOGETHER: Final = 2  # groups that are read into slots at once: reserving and publishing have a cost of their own
MIN_PATIENCE: Final = 0.05  # seconds
_LOADERS: Final = 4
_MEMORY_LOADERS: Final = 2


@dataclass(slots=True)
class _GroupCopy:
    """Blocks of a load whose copy into the device is queued, from `slots`. Those hold the blocks until it is `copied`."""

    copied: Event | None
    slots: list[int]
    found: list[FetchedBlock]
    direct: DirectLoad | None = None  # in place of slots


class OffloadManager:
    """Moves blocks between the device and a tiered store. Calls come from the engine's thread and do not block.

    Args:
        store: the tiers.
        staging: at least four slots. Half of them are for saves, half for loads.
        groups: how the blocks of each KV group divide into frames; a layout if a block is one frame.
        lookup_timeout: seconds for a lookup in remote tiers, if computing does not take long (`policy.search_seconds`).
        load_timeout: upper limit in seconds for a load.
        on_change: called from other threads when a search or a load has changed; wakes the engine.
        direct: on a device, copy straight to and from the first tier where that is possible (`direct_extra.py`).
    """

    def __init__(
        self,
        store: TieredStore,
        staging: StagingArena,
        groups: Sequence[Layout | BlockUnits],
        *,
        lookup_timeout: float = 0.25,
        load_timeout: float = 30.0,
        on_change: Callable[[], None] = lambda: None,
        direct: bool = False,
    ) -> None:
        self.store = store
        self.units = [whole_blocks(one) if isinstance(one, Layout) else one for one in groups]
        self.on_change = on_change
        self.prefill_rate = Rate()  # tokens per second
        self._fingerprints = [[layout.fingerprint for layout in one.layouts] for one in self.units]
        self.block_size = self.units[0].tokens * self.units[0].per_block
        self.costs = LoadCosts(
            [
                (HEADER_BYTES + size) * one.block_units
                for size, one in zip(staging.block_bytes, self.units, strict=True)
            ],
            [one.tokens * one.per_block for one in self.units],
            self.read_rates,
            lambda: self.prefill_rate.value,
        )
        self._staging = staging
        half = staging.slots // 2
        self._saving_slots = StagingSlots(range(half))
        self._loading_slots = StagingSlots(range(half, staging.slots))
        self._reader = SlotReader(store, staging, self._loading_slots, staging.slots - half)
        self._writer = WriteBehind(store, staging, self._read_again)
        self._direct: DirectCopies | None = direct_extra().open(store, staging, self._writer) if direct else None
        if self._direct is None:
            staging.allocate()
        self._write_step = max(min(WRITE_BLOCKS, staging.slots // 4), 1)
        self._group_bytes = _GROUP_BYTES if staging.device.type == "cpu" else _GROUP_BYTES_ON_DEVICE
        self._gathering: list[tuple[int, Sequence[int], WriteBatch]] | None = None
        self.lookups = StoreLookups(store, lookup_timeout, load_timeout, lambda: self.prefill_rate.last, self._notify)
        self._load_timeout = load_timeout
        # Loads from memory have threads of their own: they never wait for a store that may block.
        self._loaders = ThreadPoolExecutor(_LOADERS, "foreword-load", use_background_cores)
        self._memory_loaders = ThreadPoolExecutor(_MEMORY_LOADERS, "foreword-load-memory", use_background_cores)
        self._control = ThreadPoolExecutor(1, "foreword-control", use_background_cores)
        self._tasks: list[Future[Any]] = []
        self._unsaved: dict[bytes, object] = {}  # keys of blocks that are to be deleted, unless they are saved before
        self._changed = threading.Condition()  # of what loading threads count and change; nothing else is done under it
        self.changes = 0
        self._dropped = 0
        self._counts = dict.fromkeys(("loaded", "cut", "stopped", "refused"), 0)
        self._closed = False

    # Loading

    def read_rates(self) -> list[float]:
        """Measured bytes per second of each tier; 0.0 for one without a recent measurement."""
        return [tier.read_rate.value for tier in self.store.tiers]

    def note_refused(self, loads: int) -> None:
        """Count loads that were not started because the blocks may not be used any more."""
        self._count(refused=loads)

    def hand_over(self, root: bytes, parts: Iterable[GroupBlocks], tokens: int, *, patient: bool = False) -> StoreLoad:
        """Give device blocks to a load, which starts now or later, from any thread. What was computed with their former
        contents is queued on the device.

        `root` is the root key of the chain. The load saves `tokens` tokens. `patient`: it may take longer than computing them.
        """
        names: list[Name] = []
        groups: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for part in parts:
            units = self.units[part.group]
            frames = units.block_units
            names += units.names(root, part.keys)
            groups += [part.group] * (len(part.blocks) * frames)
            places += part.places if frames == 1 else [place for place in part.places for _ in range(frames)]
            blocks += part.blocks if frames == 1 else units.of_blocks(part.blocks)
        read, mark = self._writer.began(), self._staging.mark()
        return StoreLoad(self._changed, names, groups, places, blocks, tokens, read, patient, mark)

    def start(self, load: StoreLoad) -> None:
        """Start to load into the blocks that were handed over."""
        load.started = time.monotonic()
        per_token = self.costs.seconds_per_token
        compute = self._load_timeout if load.patient or per_token is None else load.tokens * per_token
        # Twice the compute time is a fallback: a slow load is cut off earlier, by its measured rate.
        limit = max(2 * compute, 2 * MIN_PATIENCE)
        load.deadline = load.started + min(self._load_timeout, limit)
        loaders = self._loaders if self._is_blocking(load.places) else self._memory_loaders
        load.task = loaders.submit(self._load, load, compute)

    def _is_blocking(self, places: Iterable[int]) -> bool:
        """Whether some of these tiers may block."""
        return any(self.store.tiers[place].blocking for place in set(places))

    def _load(self, store_load: StoreLoad, compute: float) -> None:
        # Whatever ends the load, its copies are awaited: until then the device writes into the blocks and reads the slots.
        queued: deque[_GroupCopy] = deque()
        try:
            self._load_groups(store_load, compute, queued)
        finally:
            store_load.close()
            try:
                self._await_copies(store_load, queued)
            finally:
                self._count(loaded=store_load.loaded, cut=int(store_load.loaded < len(store_load.blocks)))
                self._notify()

    def drain(self, loads: Collection[StoreLoad]) -> None:
        """Wait until nothing is written into the blocks of these loads, which were closed. For an engine whose device is about
        to lose its contents; others look at `StoreLoad.done`."""
        with self._changed:
            self._changed.wait_for(lambda: not any(load.copying for load in loads))

    def _load_groups(self, store_load: StoreLoad, compute: float, queued: deque[_GroupCopy]) -> None:
        """Read blocks and queue their copies, group after group. `queued` has those that were not waited for."""
        frame_bytes = self._staging.frame_bytes
        done, requested = 0, len(store_load.blocks)
        while done < requested and not store_load.finished:
            known = done > 0 or bool(self.store.tiers[store_load.places[0]].read_rate.value)
            size = self._group_bytes if known else _PROBE_BYTES
            count = min(max(size // frame_bytes, 1), requested - done, self._staging.slots // 4 or 1)
            patience = max(PATIENCE * compute, MIN_PATIENCE)
            deadline = store_load.deadline if done else min(store_load.deadline, time.monotonic() + patience)
            if directly := self._load_direct(store_load, done, deadline, queued, known=known):
                done += directly
                continue
            part = store_load, done, count, deadline
            loaded = self._load_lent(*part) or self._load_through(*part)
            if not loaded:
                slots = self._slots_to_load(store_load, count, deadline, queued)
                loaded = self._load_group(store_load, done, slots, deadline, queued) if slots is not None else 0
                if loaded < count:
                    return
            done += loaded
            if self._is_slower_than_computing(store_load, done, compute):
                self._count(stopped=1)
                return

    def _load_direct(
        self, store_load: StoreLoad, done: int, deadline: float, queued: deque[_GroupCopy], *, known: bool
    ) -> int:
        """Queue the copies of the next blocks from the memory of the first tier straight into the device, and return how many
        there are: 0 if that is not possible. Whether they are right is known when they are copied."""
        direct = self._direct
        size = sys.maxsize if known else _PROBE_BYTES
        count = 0 if direct is None else direct.count(store_load.places, done, size)
        if direct is None or not count:
            return 0
        begun = 0
        with contextlib.closing(direct.loads(store_load, done, count, deadline)) as loads:
            while True:
                while queued and (len(queued) >= direct.loads_at_once or not direct.has_room):
                    self._await_copy(store_load, queued)
                if (load := next(loads, None)) is None:
                    return begun
                queued.append(_GroupCopy(load.copied, [], [], load))
                begun += load.count

    def _slots_to_load(
        self, store_load: StoreLoad, count: int, deadline: float, queued: deque[_GroupCopy]
    ) -> list[int] | None:
        """Slots for the next blocks of a load: free ones, or those of its own oldest copies, when these are done. None if there
        are none until the deadline."""
        pool = self._loading_slots
        while (slots := self._take_slots(pool, count)) is None and queued:
            self._await_copy(store_load, queued)
        if slots is None:
            slots = pool.wait_for(count, deadline)
        return slots

    def _await_copies(self, store_load: StoreLoad, queued: deque[_GroupCopy]) -> None:
        """Wait for all copies of a load, also if one fails."""
        try:
            while queued:
                self._await_copy(store_load, queued)
        finally:
            if queued:
                self._await_copies(store_load, queued)

    def _await_copy(self, store_load: StoreLoad, queued: deque[_GroupCopy]) -> None:
        """Wait for the oldest copy of a load. Its slots are free from then on, or hold what is promoted.

        The first copy comes after what the engine had queued when it handed the blocks over. Computing the blocks would have
        come after that, too: the load is late by its own time only.
        """
        oldest, loaded = queued.popleft(), False
        began = time.monotonic()
        try:
            if oldest.copied is not None:
                store_load.held_up = store_load.mark is not None
                oldest.copied.synchronize()
            loaded = True
        finally:
            held_up = store_load.held_up
            if held_up:
                waited = time.monotonic() - began
                store_load.waited += waited
                store_load.deadline += waited
                store_load.mark = None
                store_load.held_up = False
            if oldest.direct is not None:
                oldest.direct.end(store_load, copied=loaded, timed=not held_up)
            else:
                store_load.end_copy([one.tier for one in oldest.found] if loaded else None)
                if loaded and store_load.full:
                    self._writer.drop_promotion(oldest.slots, self._loading_slots)
                elif loaded:
                    self._promote(oldest.found, oldest.slots, store_load.read)
                else:
                    self._loading_slots.give(oldest.slots)

    def _load_lent(self, store_load: StoreLoad, done: int, count: int, deadline: float) -> int:
        """Load up to `count` blocks straight from the memory of their tier, up to the first that is not there or not sound, and
        return how many were loaded. None from tiers that lend no memory, or have faster ones, and into devices."""
        place, *others = store_load.places[done : done + count]
        if not self._staging.copies_lent or self.store.promotion_targets(place):
            return 0
        same = 1 + len(list(itertools.takewhile(place.__eq__, others)))
        groups = store_load.groups[done : done + same]
        with self.store.tiers[place].lend(store_load.names[done : done + same], deadline) as (lent, frames):
            usable = self._count_usable(frames, groups)
            if not usable or not store_load.begin_copy():
                return 0
            self._copy(store_load, done, lent.slots[:usable], groups, lent)
            store_load.end_copy([place] * usable)
            return usable

    def _load_through(self, store_load: StoreLoad, done: int, count: int, deadline: float) -> int:
        """Read `count` blocks, behind the first group twice as many, straight into the memory of a faster tier, which keeps
        them, load them from there up to the first that was not read, and return how many were loaded. Into devices none."""
        count *= _TOGETHER if done else 1  # the first has a tenth of the time for computing
        place, *others = store_load.places[done : done + count]
        if store_load.full or not self._staging.copies_lent:
            return 0
        end = done + 1 + len(list(itertools.takewhile(place.__eq__, others)))
        names, groups = store_load.names[done:end], store_load.groups[done:end]
        sizes = [self._staging.block_bytes[group] for group in groups]
        before = store_load.names[max(done - count, 0) : done]
        read = read_into(self.store, place, names, sizes, deadline=deadline, before=before)
        if read is None:
            return 0
        store_load.full = read.reserved.full and not read.reserved.busy
        try:
            lent = read.loan
            usable = self._count_usable((one for one in read.frames if one is not None), groups[: len(lent.slots)])
            if not usable or not store_load.begin_copy():
                return 0
            self._copy(store_load, done, lent.slots[:usable], groups, lent)
            store_load.end_copy([place] * usable)
            return usable
        finally:
            read.end(lambda headers, publish: self._writer.unless_erased(store_load.read, headers, publish))

    def _load_group(
        self, store_load: StoreLoad, done: int, slots: list[int], deadline: float, queued: deque[_GroupCopy]
    ) -> int:
        """Read one block per slot, up to the first failure, queue their copy, and return how many there are."""
        end = done + len(slots)
        names, groups = store_load.names[done:end], store_load.groups[done:end]
        copied = 0
        kept: set[int] = set()
        try:
            blocking = self._is_blocking(store_load.places[done:end])
            found, kept = self._reader.read(names, slots, deadline=deadline, blocking=blocking)
            usable = [one for one in itertools.takewhile(bool, found) if one is not None]
            count = self._count_usable((one.frame for one in usable), groups)
            while any(one.direct is not None for one in queued):
                self._await_copy(store_load, queued)  # a thread that waits for a piece of the device's memory has none
            if not count or not store_load.begin_copy():
                return 0
            copy = self._copy(store_load, done, slots[:count], groups)
            queued.append(_GroupCopy(copy, slots[:count], usable[:count]))
            copied = count
            if copy is None:
                self._await_copy(store_load, queued)
            return count
        finally:
            self._loading_slots.give(slot for slot in slots[copied:] if slot not in kept)

    def _copy(
        self, store_load: StoreLoad, done: int, slots: Sequence[int], groups: Sequence[int], lent: Loan | None = None
    ) -> Event | None:
        """Copy the payloads of `slots`, by default of the staging arena, into the device blocks from number `done` on, or queue
        that. Returns the end of the copy; None if it is complete."""
        low, until = 0, store_load.deadline
        mark = None if done else store_load.mark
        try:
            for group, members in itertools.groupby(groups[: len(slots)]):
                high = low + len(list(members))
                blocks = store_load.blocks[done + low : done + high]
                self._staging.start_scatter(slots[low:high], blocks, group, mark=mark, lent=lent, until=until)
                low, mark = high, None
        except BaseException:
            try:
                if (begun := self._staging.scattered()) is not None:
                    begun.synchronize()
            finally:
                store_load.end_copy([])
            raise
        return self._staging.scattered()

    def _promote(self, found: Sequence[FetchedBlock], slots: Sequence[int], load: BlockRead) -> None:
        """Queue loaded blocks, with their slots, for the tiers that are faster than the one they came from."""
        for tier, some in itertools.groupby(zip(found, slots, strict=True), key=lambda pair: pair[0].tier):
            pairs = list(some)
            headers = [one.frame.header for one, _ in pairs]
            for tiers, low, high in self.store.promoted(headers, tier):
                freed = [slot for _, slot in pairs[low:high]]
                self._writer.promote(headers[low:high], freed, self._loading_slots, tiers, load)

    def _read_again(
        self, names: Sequence[Name], slots: Sequence[int], deadline: float
    ) -> tuple[Sequence[FetchedBlock | None], set[int]]:
        """Read blocks of a promotion that was postponed."""
        return self._reader.read(names, slots, deadline=deadline, blocking=True)

    def _count_usable(self, frames: Iterable[Frame], groups: Sequence[int]) -> int:
        """How many of these frames of blocks, up to the first that is not, are as long as the blocks are and not encoded."""
        lengths = (self._staging.block_bytes[group] for group in groups)
        fits = (
            frame.header.codec == RAW and frame.header.length == size
            for frame, size in zip(frames, lengths, strict=False)
        )
        return sum(1 for _ in itertools.takewhile(bool, fits))

    def _is_slower_than_computing(self, store_load: StoreLoad, done: int, compute: float) -> bool:
        """Whether the rest of a load, at its speed so far, would take longer than computing the rest."""
        left = len(store_load.blocks) - done
        pace = (time.monotonic() - store_load.started - store_load.waited) / done
        return left > 0 and left * pace > compute * left / len(store_load.blocks)

    def wait(self, seen: int, timeout: float) -> None:
        """Wait until a search or a load changes. Returns at once if `changes` is not `seen` any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.changes != seen, timeout)

    def _notify(self) -> None:
        with self._changed:
            self.changes += 1
            self._changed.notify_all()
        self.on_change()

    # Saving

    def save(
        self,
        root: bytes,
        keys: Sequence[bytes],
        parent: bytes,
        depth: int,
        blocks: Sequence[int],
        group: int = 0,
        *,
        prompt: int | None = None,
        again: bool = False,
    ) -> int:
        """Queue full, computed blocks of a KV group for writing. They follow `parent` at position `depth` of the chain with
        the root key `root`. Returns how many of the first are done with; for the others the queue had no room. They may be
        given once more; else the caller counts them (`note_dropped`).

        The blocks are copied before the call returns. Blocks are written even if they were written before: the engine computed
        them because no store had them. Where blocks are divided, keys and positions are those of their units of tokens.

        `prompt` is the length of the request's prompt. With `again`, the request has not computed the blocks but found them:
        they are written to tiers that have refused them before (`store/tier_admission.py`).
        """
        if self._unsaved:
            with self._changed:
                for key in keys:
                    self._unsaved.pop(key, None)
        if not self.store.writable or (
            again and not self.store.takes_again(self.units[group].names(root, keys[-1:])[-1])
        ):
            return len(blocks)
        units = self.units[group].of_blocks(blocks)
        headers = self._headers(root, keys, parent, depth, group)
        use = BlockUse(prompt, self.units[group].tokens, again)
        for tiers, low, high in self.store.admitted(headers, use):
            queued = self._save_units(units[low:high], headers[low:high], tiers, group) if tiers else high - low
            if queued < high - low:
                return (low + queued) * len(blocks) // len(units)
        return len(blocks)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Copy and queue all calls of `save` inside together, at the end: one copy for each KV group."""
        self._gathering = []
        try:
            yield
        finally:
            waiting, self._gathering = self._gathering, None
            self._gather(waiting)

    def await_room(self, timeout: float) -> None:
        """Wait until `save` may find room, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self._direct is not None:
            self._direct.await_room(timeout)
        self._saving_slots.wait_for_room(self._write_step, deadline)

    def note_dropped(self, blocks: int) -> None:
        """Count blocks for which the queue had no room, and which are not given again."""
        self._dropped += blocks

    def _save_units(self, units: Sequence[int], headers: list[Header], tiers: Tiers, group: int) -> int:
        """Queue units for these tiers. Returns for how many there was room."""
        direct = self._direct
        if direct is not None and direct.usable and direct.place in tiers:
            taken, tiers = direct.save(units, headers, tiers, group)
            if self._gathering is None:
                direct.launch()
            if not tiers:
                return taken
        step = self._write_step
        for low in range(0, len(units), step):
            part = units[low : low + step]
            slots = self._take_slots(self._saving_slots, len(part))
            if slots is None:
                return low
            queued = (group, part, WriteBatch(headers[low : low + step], slots, self._saving_slots, set(tiers)))
            if self._gathering is None:
                self._gather([queued])
            else:
                self._gathering.append(queued)
        return len(units)

    def _gather(self, waiting: Sequence[tuple[int, Sequence[int], WriteBatch]]) -> None:
        """Copy units of groups into their slots, and queue them."""
        try:
            if self._direct is not None:
                self._direct.launch()
            for group in {number for number, _, _ in waiting}:
                mine = [(units, queued.slots) for number, units, queued in waiting if number == group]
                units, slots = (list(itertools.chain.from_iterable(some)) for some in zip(*mine, strict=True))
                self._staging.gather(units, slots, group)
        except BaseException:
            self._saving_slots.give(slot for _, _, queued in waiting for slot in queued.slots)
            raise
        self._writer.add([queued for _, _, queued in waiting])

    def _headers(self, root: bytes, keys: Sequence[bytes], parent: bytes, depth: int, group: int) -> list[Header]:
        size, fingerprints = self._staging.block_bytes[group], self._fingerprints[group]
        return [
            Header(fingerprint, named_root(root, key), key, before, position, RAW, size, size, group)
            for position, (key, before) in enumerate(zip(keys, (parent, *keys[:-1]), strict=True), start=depth)
            for fingerprint in fingerprints
        ]

    def _take_slots(self, pool: StagingSlots, count: int) -> list[int] | None:
        """`count` slots of a pool. Drops what waits to be written but is in a tier already; None if that is not enough."""
        slots = pool.take(count)
        while slots is None:
            if not self._writer.drop_stored(pool):
                return None
            slots = pool.take(count)
        return slots

    # Deletion, records, status

    def delete(self, keys: Sequence[bytes], names: Callable[[], Sequence[Name]]) -> Future[dict[str, int]]:
        """Delete blocks that are not needed, from every tier, after what is queued was written. `names`, which have these keys,
        are asked for when it is done. A block that is saved again before it is gone stays. Returns how many were there, by the
        label of the tier. A tier that fails keeps them until it evicts them."""

        def work() -> dict[str, int]:
            self.flush_writes(WRITE_TIMEOUT)
            counts, wanted, deadline = {}, names(), time.monotonic() + WRITE_TIMEOUT
            for tier in (self.store.tiers[index] for index in self.store.writable):
                with contextlib.suppress(StoreError):
                    counts[tier.label] = tier.delete_unneeded(wanted, self._is_unsaved, deadline)
            return counts

        return self._unless_saved(keys, work)

    def retire(self, keys: Sequence[bytes], names: Callable[[], Sequence[Name]], *, drop: bool) -> None:
        """Nothing continues these blocks: tiers that hold them back do not write them. With `drop` delete them."""
        if drop:
            self.delete(keys, names)
        elif self.store.defers:
            self._unless_saved(keys, lambda: self.store.drop_deferred([*filter(self._is_unsaved, names())]))

    def _unless_saved(self, keys: Sequence[bytes], work: Callable[[], Done]) -> Future[Done]:
        """Do something later to the blocks of these keys that are not saved again until then (`_is_unsaved`)."""
        mine = object()
        with self._changed:
            self._unsaved.update(dict.fromkeys(keys, mine))

        def done() -> Done:
            try:
                return work()
            finally:
                with self._changed:
                    for key in keys:
                        if self._unsaved.get(key) is mine:  # nothing else waits to delete it
                            del self._unsaved[key]

        return self.later(done)

    def _is_unsaved(self, name: Name) -> bool:
        return key_of(name) in self._unsaved

    def describe(self, model: str, fingerprint: bytes, groups: Sequence[KVGroup], key_size: int = 0) -> Future[None]:
        """Write the records of the layouts, for tools. `model`: its name; `groups`: the KV groups; `key_size`: tokens per block
        key, 0 for those of a block."""

        def work() -> None:
            records = SharedRecords(self.store, LAYOUTS)
            pairs = zip(self.units, groups, strict=True)
            for layout, one in ((layout, group) for units, group in pairs for layout in units.layouts):
                facts = layout.describe(), fingerprint.hex(), one.kind, one.span, one.sinks, key_size
                with contextlib.suppress(StoreError):  # the tier counts the error; blocks are found without the record
                    records.put(LAYOUTS.key(layout.fingerprint.hex()), LayoutRecord(model, *facts))

        return self.later(work)

    def later(self, work: Callable[[], Done]) -> Future[Done]:
        """Do something after what was asked for before, on the thread for that."""
        task = self._control.submit(work)
        self._tasks = [*(one for one in self._tasks if not one.done()), task]
        return task

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all queued blocks, pins and records are written. False if that takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        written = self.flush_writes(timeout)
        _, late = futures.wait(self._tasks, max(deadline - time.monotonic(), 0.0))
        return written and not late

    def flush_writes(self, timeout: float) -> bool:
        """Wait until all queued blocks are written. False if that takes longer."""
        deadline = time.monotonic() + timeout
        published = self._direct is None or self._direct.flush(timeout)
        return self._writer.flush(max(deadline - time.monotonic(), 0.0)) and published

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, amount in more.items():
                self._counts[name] += amount

    @property
    def direct_state(self) -> str:
        """Whether blocks are copied straight to and from the first tier: "on", or why not; "" while that is being tested."""
        if self._direct is None:
            return "it was not asked for, or something is missing: see the log"
        return self._direct.state

    @property
    def queued(self) -> int:
        """Blocks that wait to be written."""
        return self._writer.queued + (0 if self._direct is None else self._direct.pending)

    def status(self) -> OffloadStatus:
        direct = self._direct
        return OffloadStatus(
            queued=self.queued,
            dropped=self._dropped + self._writer.dropped,
            dropped_promotions=self._writer.dropped_promotions,
            saved=self._writer.saved + (0 if direct is None else direct.saved),
            failed=self._writer.failed + (0 if direct is None else direct.failed),
            lookups=self.lookups.counts(),
            declined=self.costs.declined,
            too_small=self.costs.too_small,
            **self._counts,
        )

    def close(self, timeout: float = 30.0) -> None:
        """Write queued blocks and pins, for at most `timeout` seconds, and close the stores."""
        if self._closed:
            return
        self._closed = True
        self._writer.drop_postponed()
        self.flush(timeout)
        self.store.write_deferred(timeout)
        self._writer.close()
        self.lookups.close()
        for pool in (self._loaders, self._memory_loaders, self._control):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._direct is not None:
            self._direct.close()
        self.store.close()
