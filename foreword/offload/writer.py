"""Write-behind: a queue of staged blocks, and one thread per tier that writes them to its store.

The engine's thread adds blocks that were copied into staging slots. Each tier's thread writes the oldest ones: at once if the
tier is idle, and what has come during a write together as the next. A slot is free again when every tier has written its
block, or when the queue is full and the block is dropped for new ones because a tier has it (`drop_stored`).

Loading threads add blocks that came from a slower tier and belong into faster ones (`promote`). Such promotions are written
when nothing has been loaded for a moment: they take no processor from a load and from the step behind it. Where they hold many
slots they are written at once, and where a load needs their slots they are *postponed*: the slots are given back, and the
blocks are read from the slower tier once more, into slots that no load needs. So all of a load reaches the faster tiers,
however few slots there are. A tier that has no room for blocks of a load gets no more of it.

    slots:  the queue's while a tier is pending, given back at the latest when a load needs them;  headers: until all is written
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from foreword.offload.slots import StagingSlots
from foreword.store.background import background_thread
from foreword.store.frame import HEADER_BYTES, Frame, Header, seal
from foreword.store.tiered import FetchedBlock, TieredStore

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena
    from foreword.store.base import Name

WRITE_BLOCKS: Final = 32  # blocks that are queued together
# Per write: more blocks where they are short. Each write of a disk has a fixed cost, and may make a file.
_MOST_WRITTEN: Final = 1024
_WRITE_BYTES: Final = (8 << 20) + (64 << 10)
WRITE_TIMEOUT: Final = 30.0  # seconds
logger = logging.getLogger(__name__)
# Promotions wait until nothing has been loaded for this long, and at most as long as the second: a step with a loaded prefix
# takes about the first.
_PROMOTION_PAUSE: Final = 0.25  # seconds
_LONGEST_PAUSE: Final = 2.0
_MOST_ERASED: Final = 1024  # roots that one load remembers
_MOST_POSTPONED: Final = 16_384  # blocks: their headers take about 8 MiB
_ROOM_POLL: Final = 0.05  # seconds between two looks for slots that no load needs
# Writing threads run at a slightly lower priority than compute threads. Not much lower: a full queue drops blocks.
_WRITE_NICE: Final = 5


# Reads one block into each slot before a deadline, as `SlotReader.read` does: what was read, and the slots to keep.
ReadBlocks = Callable[["Sequence[Name]", Sequence[int], float], tuple[Sequence[FetchedBlock | None], set[int]]]


class SlotPool(Protocol):
    """Where slots come from."""

    def take(self, count: int) -> list[int] | None:
        """Slots, or None if there are too few."""
        ...

    def give(self, slots: Iterable[int]) -> None:
        """Return slots."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class BlockRead:
    """A load, or a save, that may bring blocks from one tier into another (`WriteBehind.began`): what does that refers to it,
    however long a store hangs. `erased`: what roots begin with whose blocks were erased since it began; of many, b""."""

    erased: tuple[bytes, ...] = ()


@dataclass(slots=True, eq=False)
class WriteBatch:
    """Blocks that wait to be written.

    Attributes:
        pool: where the slots are returned.
        pending: tiers that have not started to write the blocks; `writing` tiers are writing them now.
        sealed: headers and checksums are written into the slots.
        promotion: the blocks came from a slower tier.
        postponed: there are no slots: the blocks are read again when they are written.
        latest: when a promotion is written although blocks are being loaded.
        load: that of a promotion.
        number: the order in which promotions came.
        kept: largest number of these blocks that one tier has stored.
        lent: the frames, if they lie in a tier, which has counted them, and not in the staging arena.
    """

    headers: list[Header]
    slots: list[int]
    pool: SlotPool
    pending: set[int]
    writing: int = 0
    sealed: bool = False
    promotion: bool = False
    postponed: bool = False
    latest: float = -math.inf
    load: BlockRead | None = None
    number: int = 0
    kept: int = 0
    lent: list[Frame] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_stored(self) -> bool:
        """Whether a tier has all of the blocks, and none is writing them."""
        return not self.writing and not self.postponed and (self.promotion or self.kept == len(self.slots))

    def is_of(self, roots: tuple[bytes, ...]) -> bool:
        """Whether some of the blocks have a root that begins with one of these bytes."""
        return any(header.root.startswith(roots) for header in self.headers)


class WriteBehind:
    """Writes staged blocks into every tier, with one thread per tier: a slow tier does not delay the others.

    Attributes:
        dropped: blocks that were never written, or not by every tier, because the queue was full.
        dropped_promotions: promotions that were not written: the faster tier had no room, or too many were postponed.
        saved, failed: blocks (without promotions) that at least one tier has stored, and blocks that no tier has stored.
    """

    def __init__(self, store: TieredStore, staging: StagingArena, read: ReadBlocks) -> None:
        self._store = store
        self._staging = staging
        self._read = read
        # A store whose write hangs keeps these slots; others remain for the writes to other tiers.
        short = min(_WRITE_BYTES // staging.frame_bytes, _MOST_WRITTEN)
        self._max_write_slots = min(max(short, WRITE_BLOCKS), max(staging.slots // 4, 1))
        self._max_promotion_slots = max(staging.slots // 4, 1)
        self._batches: list[WriteBatch] = []  # oldest first
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = 0
        self._promoted = 0
        self._quiet = -math.inf  # when nothing has been loaded for `_PROMOTION_PAUSE`
        self._reads: weakref.WeakSet[BlockRead] = weakref.WeakSet()
        self._erasing: list[tuple[bytes, ...]] = []  # roots of which the tiers are being swept
        self.dropped = 0
        self.dropped_promotions = 0
        self.saved = 0
        self.failed = 0
        self._threads = [
            background_thread(partial(self._run, tier), f"write-{tier}", nice=_WRITE_NICE) for tier in store.writable
        ]

    @property
    def queued(self) -> int:
        with self._changed:
            return sum(len(batch.headers) for batch in self._batches)

    @property
    def lent(self) -> int:
        """Blocks that wait in the slots of a tier."""
        with self._changed:
            return sum(len(batch.headers) for batch in self._batches if batch.lent is not None)

    def began(self) -> BlockRead:
        """Note that a load or a save begins. It may read a tier that is not swept yet, into one that was."""
        with self._changed:
            read = BlockRead(tuple(itertools.chain.from_iterable(self._erasing)))
            self._reads.add(read)
            return read

    def add(self, batches: Iterable[WriteBatch]) -> None:
        """Queue blocks whose payloads are in their slots, without headers and checksums yet."""
        for batch in batches:
            self._queue(batch)

    def drop_promotion(self, slots: Sequence[int], pool: StagingSlots) -> None:
        """Count blocks that a faster tier has no room for, and give their slots back."""
        with self._changed:
            self.dropped_promotions += len(slots)
        pool.give(slots)

    def promote(
        self, headers: list[Header], slots: list[int], pool: StagingSlots, tiers: Iterable[int], load: BlockRead
    ) -> None:
        """Queue complete frames in `slots` for faster tiers, unless the blocks were erased since their load began."""
        now = time.monotonic()
        batch = WriteBatch(headers, slots, pool, set(tiers), sealed=True, promotion=True, latest=now + _LONGEST_PAUSE)
        batch.load = load
        self._quiet = now + _PROMOTION_PAUSE
        self._queue(batch, load)

    def add_lent(self, frames: list[Frame], pool: SlotPool, tiers: Iterable[int], save: BlockRead, most: int) -> None:
        """Queue frames that lie in a tier for further ones, unless they were erased since their save began, or
        more than `most` would wait: a slow tier gets the starts of chains then. `pool` ends the loan."""
        headers = [frame.header for frame in frames]
        batch = WriteBatch(headers, [*range(len(frames))], pool, set(tiers), sealed=True, lent=frames)
        with self._changed:
            held = sum(len(one.slots) for one in self._batches if one.lent is not None)
            if held + len(frames) > most:
                self.dropped += len(frames)
                batch.pending.clear()
        self._queue(batch, save)

    def _queue(self, batch: WriteBatch, read: BlockRead | None = None) -> None:
        with self._changed:
            if read is not None and batch.is_of(read.erased):
                batch.pending.clear()
            if batch.pending and not self._closing:
                batch.number = self._promoted = self._promoted + 1
                self._batches.append(batch)
                self._changed.notify_all()
                return
        batch.pool.give(batch.slots)

    def drop_stored(self, pool: StagingSlots) -> bool:
        """Drop the newest batch in slots of `pool` that is not being written and whose blocks a tier has: a slower tier gets
        the first blocks of chains, without which no lookup finds the rest. A promotion is postponed. False if there is none."""
        with self._changed:
            batch = next((one for one in reversed(self._batches) if one.pool is pool and one.is_stored()), None)
            if batch is None:
                return False
            self._batches.remove(batch)
            slots, batch.slots = batch.slots, []
            if batch.promotion:
                self._postpone(batch)
            else:
                self.dropped += len(slots)
        pool.give(slots)
        return True

    def _postpone(self, batch: WriteBatch) -> None:
        """Let a promotion wait without slots, behind those that came before it: first blocks of chains are written first."""
        waiting = sum(len(one.headers) for one in self._batches if one.postponed)
        if waiting + len(batch.headers) > _MOST_POSTPONED or self._closing:
            self.dropped_promotions += len(batch.headers)
            batch.pending.clear()  # a tier that is taking batches may have it in its list
            return
        batch.postponed = True
        batch.latest = time.monotonic() + _LONGEST_PAUSE
        bisect.insort(self._batches, batch, key=lambda one: one.number)

    def drop_postponed(self) -> None:
        """Read nothing again for a promotion, since the process is about to end."""
        with self._changed:
            late = [one for one in self._batches if one.postponed and not one.writing]
            self._batches = [one for one in self._batches if one not in late]
            self.dropped_promotions += sum(len(one.headers) for one in late)
            self._changed.notify_all()

    @contextlib.contextmanager
    def erasing(self, roots: Sequence[bytes], timeout: float) -> Iterator[int]:
        """The caller sweeps the tiers inside. Drop the blocks whose roots begin with one of these bytes, and promotions of such
        blocks by loads that began before the end, and wait for those that are being written. Gives how many are still being
        written after `timeout` seconds."""
        erased = tuple(roots)
        with self._changed:
            self._erasing.append(erased)
        try:
            yield self._drop_erased(erased, timeout)
        finally:
            with self._changed:
                self._erasing.remove(erased)

    def _drop_erased(self, erased: tuple[bytes, ...], timeout: float) -> int:
        # A load may have read such blocks before they are erased from the stores, and promote them afterwards, or begin before
        # all stores are swept (`began`). Each learns of it, so nothing is to be remembered when the erasure has ended.
        with self._changed:
            for read in self._reads:
                both = {*read.erased, *erased}
                read.erased = tuple(both) if len(both) <= _MOST_ERASED else (b"",)  # every root begins with that
            mine = [batch for batch in self._batches if batch.is_of(erased)]
            for batch in mine:
                batch.pending.clear()
            idle = [batch for batch in mine if not batch.writing]
            self._batches = [batch for batch in self._batches if batch not in idle]
            self._changed.notify_all()
        for batch in idle:
            batch.pool.give(batch.slots)
        busy = [batch for batch in mine if batch.writing]
        with self._changed:
            self._changed.wait_for(lambda: not any(batch.writing for batch in busy), timeout)
            return sum(len(batch.headers) for batch in busy if batch.writing)

    def unless_erased(self, load: BlockRead, headers: Sequence[Header], publish: Callable[[], object]) -> bool:
        """Make a call that lets blocks be found, unless some were erased since their load began, or are being erased. It must
        be quick. Returns whether it was made. An erasure that begins later finds the blocks in their tier."""
        with self._changed:
            if load.erased and any(one.root.startswith(load.erased) for one in headers):
                return False
            publish()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty. False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            empty = self._changed.wait_for(lambda: not self._batches, timeout)
            self._flushing -= 1
            return empty

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(0.5)

    def _run(self, tier: int) -> None:
        while (taken := self._take(tier)) is not None:
            kept = 0
            try:
                frames = [frame for batch in taken for frame in self._sealed(batch)]
                if frames:
                    kept = self._store.tiers[tier].put(frames, time.monotonic() + WRITE_TIMEOUT)
            except Exception:  # stores fail with a StoreError, which the tier counts; this thread outlives all else
                logger.exception("%s: blocks were not written", self._store.tiers[tier].label)
            finally:
                self._finish(tier, taken, kept)

    def _take(self, tier: int) -> list[WriteBatch] | None:
        """Wait for batches that this tier has not written, and take the oldest, up to `_max_write_slots`. None at the end."""
        with self._changed:
            while True:
                mine = [batch for batch in self._batches if tier in batch.pending]
                wait = self._pause(mine)
                # Promotions that hold very many slots are written although blocks are being loaded.
                promoted = sum(len(one.slots) for one in self._batches if one.promotion) if wait else 0
                crowded = promoted > self._max_promotion_slots
                due = [one for one in mine if not wait or not one.promotion or (crowded and not one.postponed)]
                if taken := self._claim(tier, due):
                    return taken
                if self._closing:
                    return None
                self._changed.wait(_ROOM_POLL if due else wait or None)

    def _pause(self, batches: Sequence[WriteBatch]) -> float:
        """Seconds until promotions among these may be written."""
        if self._closing or self._flushing:
            return 0.0
        latest = min((batch.latest for batch in batches if batch.promotion), default=-math.inf)
        return max(min(self._quiet, latest) - time.monotonic(), 0.0)

    # Slots belong to the queue while a tier is `pending`, and to the tiers that write them while `writing` is not 0. The last
    # tier finds neither, under the lock, and gives them back, once. `drop_stored` and `erasing` leave them to tiers that write.
    def _claim(self, tier: int, mine: Sequence[WriteBatch]) -> list[WriteBatch]:
        taken: list[WriteBatch] = []
        size, waits = 0, set[BlockRead | None]()
        for batch in mine:
            if tier not in batch.pending:  # it lost its slots to an earlier one, and was dropped
                continue
            if batch.promotion and batch.load in waits:  # first blocks of chains are written first
                continue
            if taken and size + len(batch.headers) > self._max_write_slots:
                break
            if batch.postponed and not batch.slots:
                slots = self._slots_for(batch)
                if slots is None:  # loads have them
                    waits.add(batch.load)
                    continue
                batch.slots = slots
            batch.pending.discard(tier)
            batch.writing += 1
            taken.append(batch)
            size += len(batch.headers)
        return taken

    def _slots_for(self, batch: WriteBatch) -> list[int] | None:
        """Slots for a postponed promotion: free ones, or those of later blocks of its load, which wait for it."""
        slots = batch.pool.take(len(batch.headers))
        while slots is None:
            mine = (one for one in reversed(self._batches) if one.load is batch.load and one.slots)
            last = next(filter(WriteBatch.is_stored, mine), None)
            if last is None:
                return None
            self._batches.remove(last)
            given, last.slots = last.slots, []
            self._postpone(last)
            batch.pool.give(given)
            slots = batch.pool.take(len(batch.headers))
        return slots

    def _sealed(self, batch: WriteBatch) -> list[Frame]:
        """The batch's frames. The first tier that writes the batch adds headers and checksums, or reads what was postponed."""
        if batch.lent is not None:
            return batch.lent
        # The second of two tiers that took the batch at once waits for the first. A sealed slot does not change any more.
        with batch.lock:
            if batch.postponed:
                self._read_again(batch)
            buffers = [self._staging.buffer(slot) for slot in batch.slots]
            if not batch.sealed:
                for header, buffer in zip(batch.headers, buffers, strict=True):
                    seal(header, buffer)
                batch.sealed = True
        pairs = zip(batch.headers, buffers, strict=True)
        return [Frame(header, buffer[: HEADER_BYTES + header.length]) for header, buffer in pairs]

    def _read_again(self, batch: WriteBatch) -> None:
        """Read the blocks of a postponed promotion into its slots, up to the first that is not there any more."""
        # The batch counts as being written: an erasure waits for it, and so does what erases the blocks from the tiers.
        slots, batch.slots, batch.postponed = batch.slots, [], False
        kept, usable = set(slots), list[Frame]()
        try:
            names = [header.name for header in batch.headers]
            found, kept = self._read(names, slots, time.monotonic() + WRITE_TIMEOUT)
            usable = [one.frame for one in itertools.takewhile(bool, found) if one is not None]
        finally:
            batch.headers = [frame.header for frame in usable]
            batch.slots = slots[: len(usable)]
            batch.pool.give(slot for slot in slots[len(usable) :] if slot not in kept)

    def _finish(self, tier: int, taken: Sequence[WriteBatch], kept: int) -> None:
        """A tier has written these batches and stored `kept` of their blocks: the first ones, since stores keep prefixes."""
        done: list[WriteBatch] = []
        with self._changed:
            for batch in taken:
                stored = min(kept, len(batch.slots))
                batch.kept = max(batch.kept, stored)
                kept = max(kept - len(batch.slots), 0)
                batch.writing -= 1
                if batch.promotion and stored < len(batch.slots) and not self._store.tiers[tier].defers:
                    self._give_up(tier, batch.load)
                    self.dropped_promotions += len(batch.slots) - stored
            done = [one for one in self._batches if not one.writing and not one.pending]
            self._batches = [one for one in self._batches if one.writing or one.pending]
            for batch in done:
                if not batch.promotion and batch.lent is None:
                    self.saved += batch.kept
                    self.failed += len(batch.slots) - batch.kept
            self._changed.notify_all()
        for batch in done:
            batch.pool.give(batch.slots)

    def _give_up(self, tier: int, load: BlockRead | None) -> None:
        """A tier has no room for blocks of a load: it gets no later ones, which would push out the first."""
        for batch in self._batches:
            if batch.promotion and batch.load is load and tier in batch.pending:
                batch.pending.discard(tier)
                if not batch.pending and not batch.writing:
                    self.dropped_promotions += len(batch.headers)
