"""A store in the memory of this process: one arena of fixed-size slots, mapped once, without an allocation per block.

The lock is held to find slots, never while bytes are copied. A slot that is being read or written is *in use*: it is
not evicted, and a deleted block releases its slot when its last reader is done. Memory is populated as the store fills,
so a start does not compete with the first requests. The store belongs to one process; a forked child has a copy of it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from foreword.errors import StoreConfigError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, StoredBlock, StoreStatus, time_left
from foreword.store.bases import LocalRecords
from foreword.store.frame import Frame
from foreword.store.memory.arena import ArenaUsage, MemoryArena, populate_pages
from foreword.store.memory.slot_table import SlotTable

_SCAN_SLOTS = 4096


@dataclass(slots=True)
class _Reservation:
    """What a put has to do.

    Attributes:
        mine: frames to write, with their slots.
        theirs: blocks that other threads are writing at this moment, with their slots.
        present: number of frames that were present (or repeated in the batch).
        full: whether a frame found no slot.
    """

    mine: list[tuple[int, Frame]] = field(default_factory=list)
    theirs: list[tuple[int, Name]] = field(default_factory=list)
    present: int = 0
    full: bool = False


class MemoryStore(LocalRecords):
    """A store of `size` bytes of memory.

    Args:
        size: bytes of the arena. The index takes about 400 bytes per block in addition.
        pin_share: share of the slots that may be pinned.
        slot_bytes: length of a slot; by default that of the largest frame of the first put. Longer frames are refused
            without an error (`notes["refused"]`), shorter ones take a whole slot.

    Raises:
        StoreConfigError: an impossible size or share.
        StoreUnavailable: the system refuses that much memory.
    """

    def __init__(
        self, size: int, *, label: str = "memory", pin_share: float = 0.5, slot_bytes: int | None = None
    ) -> None:
        if size < 1 or not 0.0 <= pin_share <= 1.0 or (slot_bytes is not None and not 1 <= slot_bytes <= size):
            raise StoreConfigError(
                f"no memory store of {size} bytes with slots of {slot_bytes} and a pin share of {pin_share}"
            )
        super().__init__(label)
        self.on_evicted: Callable[[Name], None] | None = None
        self._size = size
        self._pin_share = pin_share
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._arena: MemoryArena | None = MemoryArena(size)
        self._slots: SlotTable | None = None if slot_bytes is None else SlotTable(size, slot_bytes)
        self._evictions = 0
        self._refused = 0
        self._usage = ArenaUsage()
        weakref.finalize(self, self._usage.stop)
        threading.Thread(
            target=populate_pages, args=(self._arena, self._usage), name=f"foreword-{label}-pages", daemon=True
        ).start()

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        time_left(deadline)
        with self._lock:
            self._open()
            slots = self._slots
            if slots is None:
                return 0
            find, writing = slots.chains.index.get, slots.writing
            for count, name in enumerate(names):
                slot = find(name)
                if slot is None or slot in writing:
                    return count
            return len(names)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        time_left(deadline)
        with self._lock:
            arena = self._open()
            slots = self._slots
            if slots is None:
                return [0] * len(names)
            found = slots.acquire(names, buffers)
        try:
            for (slot, length), buffer in zip(found, buffers, strict=True):
                if length:
                    time_left(deadline)
                    arena.read(slot * slots.slot_bytes, length, buffer)
        finally:
            with self._lock:
                for slot, length in found:
                    if length:
                        slots.release(slot)
        return [length for _, length in found]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        time_left(deadline)
        with self._lock:
            arena = self._open()
            slots = self._slots
            if slots is None:
                slots = self._slots = self._divide(frames)
            if slots is None:
                return 0
            reserved = self._reserve(slots, frames)
            mine = reserved.mine
            if mine:
                self._usage.extend((max(slot for slot, _ in mine) + 1) * slots.slot_bytes)
        written = 0
        try:
            for slot, one in mine:
                time_left(deadline)
                arena.write(slot * slots.slot_bytes, one.data)
                with self._lock:
                    slots.publish(slot)
                written += 1
        finally:
            with self._written:
                for slot, _ in mine[written:]:
                    slots.abort_write(slot)
                self._written.notify_all()
        kept = reserved.present + written + self._wait_for(slots, reserved.theirs, deadline)
        if reserved.full and not kept:
            raise StoreFull("all blocks that could be evicted are pinned or in use")
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        time_left(deadline)
        with self._lock:
            self._open()
            found = self._find(names)
            for slot in found:
                assert self._slots is not None
                self._slots.remove(slot)
            return len(found)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        time_left(deadline)
        with self._lock:
            self._open()
            slots = self._slots
            if slots is None:
                return 0
            limit = int(slots.chains.slots * self._pin_share)
            return sum(slots.pin(slot, pinned, limit) for slot in self._find(names))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        time_left(deadline)
        with self._lock:
            self._open()
        return self._scan(deadline)

    def _scan(self, deadline: float) -> Iterator[StoredBlock]:
        start = 0
        while True:
            time_left(deadline)
            with self._lock:
                self._open()
                slots = self._slots
                if slots is None or start >= slots.chains.slots:
                    return
                blocks = slots.blocks(start, start + _SCAN_SLOTS)
            yield from blocks
            start += _SCAN_SLOTS

    def check_open(self, deadline: float) -> None:
        super().check_open(deadline)
        self._open()

    def status(self) -> StoreStatus:
        """`notes`: slots, slot_bytes (0 before the first put), refused (frames longer than a slot)."""
        with self._lock:
            slots = self._slots
            notes = {"slots": 0, "slot_bytes": 0, "refused": self._refused}
            if slots is None:
                return StoreStatus(blocks=0, budget=self._size, evictions=self._evictions, notes=notes)
            notes.update(slots=slots.chains.slots, slot_bytes=slots.slot_bytes)
            return StoreStatus(
                blocks=len(slots.chains.index) - len(slots.writing),
                bytes=slots.bytes,
                budget=self._size,
                pinned_bytes=slots.pinned_bytes,
                evictions=self._evictions,
                notes=notes,
            )

    def close(self) -> None:
        with self._lock:
            self._usage.stop()
            # Running calls and the populating thread have references to the arena; the last of them releases it.
            self._arena = None
            self._slots = None
            self._records.clear()

    def _open(self) -> MemoryArena:
        if self._arena is None:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        return self._arena

    def _divide(self, frames: Sequence[Frame]) -> SlotTable | None:
        """Divide the arena into slots as long as the longest of the first frames that fits."""
        fitting = [len(one.data) for one in frames if len(one.data) <= self._size]
        if not fitting:
            self._refused += len(frames)
            return None
        return SlotTable(self._size, max(fitting))

    def _find(self, names: Sequence[Name]) -> list[int]:
        """Slots of the names that are present, each once."""
        slots = self._slots
        if slots is None:
            return []
        found = (slots.chains.index.get(name) for name in dict.fromkeys(names))
        return [slot for slot in found if slot is not None and slot not in slots.writing]

    def _reserve(self, slots: SlotTable, frames: Sequence[Frame]) -> _Reservation:
        """Allocate slots for new frames, in use and not published. Evicts nothing that this call has used."""
        chains = slots.chains
        now = chains.tick()
        reserved = _Reservation()
        new: set[int] = set()
        slots.touch(frames, now)
        for one in frames:
            slot = chains.index.get(one.name)
            if slot is not None:
                if slot in new or slot not in slots.writing:
                    reserved.present += 1
                else:
                    reserved.theirs.append((slot, one.name))
                continue
            if len(one.data) > slots.slot_bytes:
                self._refused += 1
                continue
            slot = None if reserved.full else self._allocate(slots, now)
            if slot is None:  # skip the rest of the chain too: it would lie behind a gap
                reserved.full = True
                continue
            slots.begin_write(slot, one, now)
            new.add(slot)
            reserved.mine.append((slot, one))
        return reserved

    def _allocate(self, slots: SlotTable, now: int) -> int | None:
        slot = slots.chains.allocate()
        if slot is None:
            slot = slots.chains.evict(now)
            if slot is not None:
                slots.uncount(slot)
                self._evictions += 1
                if self.on_evicted is not None:
                    self.on_evicted(slots.chains.evicted)
        return slot

    def _wait_for(self, slots: SlotTable, theirs: Sequence[tuple[int, Name]], deadline: float) -> int:
        """Wait until other threads have written their blocks. Returns how many of them are present then."""
        if not theirs:
            return 0
        index = slots.chains.index

        def settled() -> bool:
            return not any(slot in slots.writing and index.get(name) == slot for slot, name in theirs)

        with self._written:
            if not self._written.wait_for(settled, timeout=max(0.0, deadline - time.monotonic())):
                raise StoreTimeout("another thread is still writing the same blocks")
            return sum(name in index for _, name in theirs)
