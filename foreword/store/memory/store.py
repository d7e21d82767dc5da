"""Blocks in this process's memory: one arena of fixed slots, mapped once, no allocation per block.

The lock is held to find slots and never while bytes are copied. A slot that is being read or written is *held*: it is not
evicted, and a block that is deleted meanwhile leaves its slot only when the last reader is done. A block that is being
written is in the index, so that nobody writes it twice, but not visible.

The arena's pages are touched shortly ahead of use by a thread of low priority, because the first write to a page costs as
much as the copy; so memory is taken as it fills, and a start does not compete with the first requests. The store belongs to
one process; after a fork the child has a copy of it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from foreword.errors import StoreConfigError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, check_record, check_record_key, time_left
from foreword.store.frame import Frame
from foreword.store.memory.arena import Arena, Pages, populate
from foreword.store.memory.slots import Slots

_SCAN_SLOTS = 4096


class MemoryStore(Store):
    """A store of `size` bytes in memory.

    Args:
        size: bytes of the arena. The index takes about 400 bytes per block besides.
        pin_share: how much of the slots may be pinned.
        slot_bytes: length of a slot; the largest frame of the first put decides if it is not given. Frames longer than
            that are refused (not kept, not counted, no error; `notes["refused"]`), shorter ones take a whole slot.

    Attributes:
        on_evicted: called with each block that makes room for another, under the store's lock: it must be quick.

    Raises:
        StoreConfigError: a size or share that makes no sense.
        StoreUnavailable: the system does not give that much memory.
    """

    def __init__(
        self, size: int, *, label: str = "memory", pin_share: float = 0.5, slot_bytes: int | None = None
    ) -> None:
        if size < 1 or not 0.0 <= pin_share <= 1.0 or (slot_bytes is not None and not 1 <= slot_bytes <= size):
            raise StoreConfigError(
                f"no memory store of {size} bytes with slots of {slot_bytes} and a share of {pin_share}"
            )
        self.label = label
        self.readers = 1
        self.size = size
        self._pin_share = pin_share
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._closed = False
        self._arena: Arena | None = Arena(size)
        self._slots: Slots | None = None if slot_bytes is None else Slots(size, slot_bytes)
        self._records: dict[str, bytes] = {}
        self._evictions = 0
        self._refused = 0
        self.on_evicted: Callable[[Name], None] | None = None
        self._pages = Pages()
        weakref.finalize(self, self._pages.stop)
        threading.Thread(
            target=populate, args=(self._arena, self._pages), name=f"foreword-{label}-pages", daemon=True
        ).start()

    @property
    def arena(self) -> memoryview:
        """The whole arena, for who wants to register it with a device. Not to be written. Raises StoreUnavailable."""
        with self._lock:
            return self._open().view.toreadonly()

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
            found = slots.hold(names, buffers)
        try:
            for (slot, length), buffer in zip(found, buffers, strict=True):
                if length:
                    time_left(deadline)
                    arena.read(slot * slots.slot_bytes, length, buffer)
        finally:
            with self._lock:
                for slot, length in found:
                    if length:
                        slots.let_go(slot)
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
            mine, theirs, kept, no_room = self._reserve(slots, frames)
            if mine:
                self._pages.used((max(slot for slot, _ in mine) + 1) * slots.slot_bytes)
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
                    slots.abandon(slot)
                self._written.notify_all()
        kept += written + self._wait(slots, theirs, deadline)
        if no_room and not kept:
            raise StoreFull("all that could be evicted is pinned or in use")
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        time_left(deadline)
        with self._lock:
            self._open()
            found = self._there(names)
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
            return sum(slots.pin(slot, pinned, limit) for slot in self._there(names))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        time_left(deadline)
        with self._lock:
            self._open()
        return self._scan(deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        time_left(deadline)
        check_record_key(word)
        check_record(data)
        with self._lock:
            self._open()
            self._records[word] = bytes(data)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        time_left(deadline)
        with self._lock:
            self._open()
            return self._records.get(word)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        time_left(deadline)
        with self._lock:
            self._open()
            return self._records.pop(word, None) is not None

    def records(self, start: str, *, deadline: float) -> list[str]:
        time_left(deadline)
        with self._lock:
            self._open()
            return sorted(word for word in self._records if word.startswith(start))

    def status(self) -> StoreStatus:
        """`notes`: slots, slot_bytes (0 before the first put), refused (frames longer than a slot)."""
        with self._lock:
            slots = self._slots
            notes = {"slots": 0, "slot_bytes": 0, "refused": self._refused}
            if slots is None:
                return StoreStatus(blocks=0, budget=self.size, evictions=self._evictions, notes=notes)
            notes.update(slots=slots.chains.slots, slot_bytes=slots.slot_bytes)
            return StoreStatus(
                blocks=len(slots.chains.index) - len(slots.writing),
                bytes=slots.bytes,
                budget=self.size,
                pinned_bytes=slots.pinned_bytes,
                evictions=self._evictions,
                notes=notes,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._pages.stop()
            # Calls that are under way have the arena in hand; the last of them, or the thread that touches pages, frees it.
            self._arena = None
            self._slots = None
            self._records = {}

    def check(self) -> None:
        """Prove the invariants of the bookkeeping. Raises IntegrityError. Takes O(slots)."""
        with self._lock:
            if self._slots is not None:
                self._slots.chains.check()

    def _open(self) -> Arena:
        if self._arena is None:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        return self._arena

    def _divide(self, frames: Sequence[Frame]) -> Slots | None:
        """Slots as long as the longest of the first frames that fits at all."""
        fitting = [len(one.data) for one in frames if len(one.data) <= self.size]
        if not fitting:
            self._refused += len(frames)
            return None
        return Slots(self.size, max(fitting))

    def _there(self, names: Sequence[Name]) -> list[int]:
        """Slots of those of the names that are there, each once."""
        slots = self._slots
        if slots is None:
            return []
        found = (slots.chains.index.get(name) for name in dict.fromkeys(names))
        return [slot for slot in found if slot is not None and slot not in slots.writing]

    def _reserve(
        self, slots: Slots, frames: Sequence[Frame]
    ) -> tuple[list[tuple[int, Frame]], list[tuple[int, Name]], int, bool]:
        """Slots for what is new, held and not yet visible; what other threads are writing; how many are there already (names
        that come twice included); and whether there was too little room. Evicts nothing that was used in this call."""
        chains = slots.chains
        now = chains.tick()
        mine: list[tuple[int, Frame]] = []
        theirs: list[tuple[int, Name]] = []
        new: set[int] = set()
        kept = 0
        no_room = False
        slots.touch(frames, now)
        for one in frames:
            name = one.name
            slot = chains.index.get(name)
            if slot is not None:
                if slot in new or slot not in slots.writing:
                    kept += 1
                else:
                    theirs.append((slot, name))
                continue
            if len(one.data) > slots.slot_bytes:
                self._refused += 1
                continue
            slot = None if no_room else self._room(slots, now)
            if slot is None:  # what comes after it would only make a gap
                no_room = True
                continue
            slots.begin(slot, one, now)
            new.add(slot)
            mine.append((slot, one))
        return mine, theirs, kept, no_room

    def _room(self, slots: Slots, now: int) -> int | None:
        slot = slots.chains.take()
        if slot is None:
            slot = slots.chains.evict(now)
            if slot is not None:
                slots.forget(slot)
                self._evictions += 1
                if self.on_evicted is not None:
                    self.on_evicted(slots.chains.evicted)
        return slot

    def _wait(self, slots: Slots, theirs: Sequence[tuple[int, Name]], deadline: float) -> int:
        """Wait for what other threads are writing; how many of them are there then."""
        if not theirs:
            return 0
        index = slots.chains.index

        def settled() -> bool:
            return not any(slot in slots.writing and index.get(name) == slot for slot, name in theirs)

        with self._written:
            if not self._written.wait_for(settled, timeout=max(0.0, deadline - time.monotonic())):
                raise StoreTimeout("another thread is still writing the same blocks")
            return sum(name in index for _, name in theirs)

    def _scan(self, deadline: float) -> Iterator[StoredBlock]:
        start = 0
        while True:
            time_left(deadline)
            with self._lock:
                self._open()
                slots = self._slots
                if slots is None or start >= slots.chains.slots:
                    return
                entries = slots.entries(start, start + _SCAN_SLOTS)
            yield from entries
            start += _SCAN_SLOTS
