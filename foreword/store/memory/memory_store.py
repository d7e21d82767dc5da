"""A store in the memory of this process: one arena of fixed-size slots, mapped once, without an allocation per block.

The lock is held to find slots, never while bytes are copied. A slot that is being read or written is *in use*: it is
not evicted, and a deleted block releases its slot when its last reader, or its writer, is done. Slots may be written by someone
else (`reserve`), such as a device. Memory is populated as the store fills, so a start does not compete with the first requests:
the first write to a page costs more than the copy itself, so a low-priority thread populates pages before they are used. The
store belongs to one process; in a forked child it is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from foreword.blocks.layout import PREFIX_BYTES, tenant_of
from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreUnavailable
from foreword.store.background import CORES, PagePopulator, renew_in_child
from foreword.store.base import (
    BAD,
    FAILED,
    MISSING,
    Erased,
    Loan,
    Name,
    ReservedSlots,
    StoredBlock,
    StoreStatus,
    has_prefix,
    quota_of,
    time_left,
)
from foreword.store.chain_lru import ChainLru
from foreword.store.frame import HEADER_BYTES, Frame, Header, UnreadBlock, place_in_chain
from foreword.store.local_records import LocalRecords

_UNLOCKED_BYTES = 64 << 10  # copies of at least this size release the GIL
_RUN_BYTES = 8 << 20
_WORD = 8  # bytes
_FULL = "all blocks that could be evicted are pinned or in use"


class SharedNames(Protocol):
    """Names that other processes read (`transfer/name_table.py`). Calls come under the store's lock: `start` once there are
    slots, `add` before a block is found."""

    def start(self, slots: int, names: Sequence[Name]) -> None: ...
    def add(self, name: Name) -> None: ...
    def discard(self, name: Name) -> None: ...
    def close(self) -> None: ...


class SlotTable:
    """The index of the store: which block is in which slot of the arena, with lengths, uses and pins; no slots if `slot_bytes`
    is 0. All methods are called under the store's lock.

    A block that is being written is in the index, so no other thread writes it too, and in `writing`, so no thread reads it.

    Args:
        quota: bytes that a tenant may have; None: all.

    Attributes:
        writing: slots whose block is being written.
        names: the table of names for other processes; None: there is none.
    """

    def __init__(self, size: int, slot_bytes: int, quota: int | None = None) -> None:
        count = size // slot_bytes if slot_bytes else 0
        self.slot_bytes = slot_bytes
        self.chains = ChainLru(
            count, tenant_of, None if quota is None or not slot_bytes else max(quota // slot_bytes, 1)
        )
        self.writing: set[int] = set()
        self.names: SharedNames | None = None
        self.bytes = 0
        self.pinned_bytes = 0
        self._pins = 0
        self._lengths = array("Q", bytes(8 * count))
        self._hits = array("I", bytes(4 * count))
        self._stored_at = array("d", bytes(8 * count))
        self._used_at = array("d", bytes(8 * count))
        self._deleted: set[int] = set()  # deleted while in use: freed by the last reader

    def acquire(self, names: Sequence[Name]) -> list[tuple[int, int]]:
        """Slot and length of each name, or (0, MISSING). Marks the slots as in use and notes a use."""
        chains, lengths, writing = self.chains, self._lengths, self.writing
        find, in_use, last_used = chains.index.get, chains.in_use, chains.last_used
        hits, used_at = self._hits, self._used_at
        now, clock = chains.tick(), time.time()
        found = []
        if names:
            chains.note_use(names[0])
        for name in names:
            slot = find(name)
            if slot is None or slot in writing:
                found.append((0, MISSING))
                continue
            in_use[slot] += 1
            last_used[slot] = now
            hits[slot] += 1
            used_at[slot] = clock
            found.append((slot, lengths[slot]))
        return found

    def release(self, *slots: int) -> None:
        """End uses that `acquire` began, or a write."""
        in_use, deleted = self.chains.in_use, self._deleted
        for slot in slots:
            in_use[slot] -= 1
            if deleted and not in_use[slot] and slot in deleted:
                deleted.discard(slot)
                self.chains.free(slot)

    def touch(self, names: Iterable[Name], now: int) -> None:
        """Note a use of the blocks that are present."""
        find, touch = self.chains.index.get, self.chains.touch
        for name in names:
            slot = find(name)
            if slot is not None:
                touch(slot, now)

    def allocate(self, now: int, name: Name) -> int | None:
        """A slot for a new block. Evicts the block in it if no slot is free (`chains.evicted`)."""
        slot = self.chains.allocate(now, name)
        if slot is not None and self.chains.evicted is not None:
            self.bytes -= self._lengths[slot]
            if self.names is not None:
                self.names.discard(self.chains.evicted)
        return slot

    def begin_write(self, slot: int, name: Name, parent: Name, depth: int, length: int, now: int, clock: float) -> None:
        """Enter a block that is about to be written into an allocated slot. It is not evicted before `chains.enqueue`."""
        self.chains.add(slot, name, parent, depth, now, queue=False)
        self.chains.in_use[slot] = 1
        self.writing.add(slot)
        self._lengths[slot] = length
        self._hits[slot] = 0
        self._stored_at[slot] = self._used_at[slot] = clock
        self.bytes += length

    # The race of a write is with `remove`: the block is out of the index then, another may have its name, and the slot waits in
    # `_deleted` for its only user, the writer. Whatever ends the write frees the slot, once.
    def publish(self, slot: int) -> bool:
        """Make a block visible: it is completely written. False if it was removed meanwhile."""
        if slot in self._deleted:
            self.release(slot)
            return False
        name = self.chains.names[slot]
        if self.names is not None and name is not None:
            self.names.add(name)
        self.writing.discard(slot)
        self.chains.in_use[slot] = 0
        return True

    def abort_write(self, slot: int) -> None:
        """Free the slot of a block that was not completely written."""
        if slot not in self._deleted:
            self.remove(slot)
        self.release(slot)

    def remove_writing(self, chosen: Callable[[Name], bool]) -> None:
        """Remove blocks that are being written."""
        for slot in [*self.writing]:
            name = self.chains.names[slot]
            if name is not None and chosen(name):
                self.remove(slot)

    def remove(self, slot: int) -> None:
        """Remove a block. Its slot is freed when neither a reader nor its writer uses it."""
        self._unpin(slot)
        self.writing.discard(slot)
        name = self.chains.names[slot]
        self.chains.remove(slot)
        if self.names is not None and name is not None:
            self.names.discard(name)
        self.bytes -= self._lengths[slot]
        if self.chains.in_use[slot]:
            self._deleted.add(slot)
        else:
            self.chains.free(slot)

    def pin(self, slot: int, pinned: bool, limit: int) -> bool:
        """Pin or unpin a block, with at most `limit` pins. Returns whether it has the wanted state now."""
        if not pinned:
            self._unpin(slot)
            return True
        if self.chains.pinned[slot]:
            return True
        if self._pins >= limit:
            return False
        self.chains.pin(slot, True)
        self._pins += 1
        self.pinned_bytes += self._lengths[slot]
        return True

    def _unpin(self, slot: int) -> None:
        if self.chains.pinned[slot]:
            self.chains.pin(slot, False)
            self._pins -= 1
            self.pinned_bytes -= self._lengths[slot]

    @property
    def held(self) -> bool:
        """Whether a block is in use or pinned."""
        return bool(self._pins or self.writing or self._deleted or any(self.chains.in_use))

    def blocks(self, start: int, stop: int) -> list[StoredBlock]:
        """The published blocks in a range of slots."""
        chains = self.chains
        return [
            StoredBlock(
                name,
                parent=(chains.parents[slot] or b"")[PREFIX_BYTES:],
                depth=chains.depths[slot],
                size=self._lengths[slot],
                stored_at=self._stored_at[slot],
                used_at=self._used_at[slot],
                hits=self._hits[slot],
                pinned=bool(chains.pinned[slot]),
            )
            for slot, name in chains.blocks(start, stop)
            if slot not in self.writing
        ]


class MemoryArena:
    """Anonymous private memory, released with the last reference to this object.

    Raises:
        StoreUnavailable: the system refuses that much memory.
    """

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreUnavailable(f"the system refuses {size} bytes of memory: {error}") from error
        self.size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the kernel does not support it: slower, but correct
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def write(self, offset: int, data: memoryview, size: int = 0) -> None:
        """Copy `data` to `offset`, and what lies behind it in memory up to `size` bytes."""
        size = size or data.nbytes
        if size > data.nbytes or (size >= _UNLOCKED_BYTES and not data.readonly):
            ctypes.memmove(self.address + offset, _address(data), size)
        else:
            self.view[offset : offset + size] = data if data.format == "B" else data.cast("B")


def _copy(data: memoryview, buffer: memoryview) -> None:
    """Copy to the start of `buffer`."""
    if data.nbytes >= _UNLOCKED_BYTES:
        ctypes.memmove(_address(buffer), _address(data), data.nbytes)
    else:
        (buffer if buffer.format == "B" else buffer.cast("B"))[: data.nbytes] = data


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _adjacent(places: Sequence[tuple[int, Frame]], slot_bytes: int) -> Iterator[list[tuple[int, Frame]]]:
    """Frames that lie behind each other in memory, as their slots do, up to some MiB: they are copied at once. Each copy gives
    the interpreter to another thread and takes it back, for which a computing thread waits."""
    run: list[tuple[int, Frame]] = []
    end = 0
    for slot, one in places:
        size = one.data.nbytes
        address = 0 if one.data.readonly else _address(one.data)
        if run and (slot != run[-1][0] + 1 or not address or address != end or len(run) * size >= _RUN_BYTES):
            yield run
            run = []
        run.append((slot, one))
        end = address + size if address and size == slot_bytes else -1
    if run:
        yield run


_SCAN_SLOTS = 4096


class MemoryStore(LocalRecords):
    """A store of `size` bytes of memory.

    Args:
        size: bytes of the arena. The index takes about 400 bytes per block in addition.
        pin_share: share of the slots that may be pinned.
        tenant_quota: share, or bytes, that the blocks of one tenant may take; None: all.
        slot_bytes: length of a slot; by default that of the largest frame of the first put. Shorter frames take a whole slot. A
            longer frame makes all slots longer, for which the store is emptied (`notes["emptied"]`). Where a block is in use or
            pinned at that moment, or where the length is given, it is refused without an error (`notes["refused"]`).
        longest: bytes of the longest frame that is expected, in place of the first put's.

    Raises:
        StoreConfigError: an impossible size or share.
        StoreUnavailable: the system refuses that much memory.
    """

    blocking = False
    local = True
    # Copying and verifying a large batch keeps one core busy. An engine on CPUs needs the other cores.
    readers = min(4, max(CORES // 2, 1))

    def __init__(
        self,
        size: int,
        *,
        label: str = "memory",
        pin_share: float = 0.5,
        slot_bytes: int | None = None,
        tenant_quota: float | None = None,
        longest: int = 0,
    ) -> None:
        self.check_options(size, pin_share=pin_share, slot_bytes=slot_bytes, tenant_quota=tenant_quota)
        super().__init__(label)
        self.on_evicted: Callable[[Name], None] | None = None
        self._size = size
        self._pin_share = pin_share
        self._quota = None if tenant_quota is None else quota_of(tenant_quota, size)
        self._arena: MemoryArena | None = MemoryArena(size)
        self._fixed = slot_bytes or 0
        self._longest = longest if longest <= size else 0
        self._evictions = 0
        self._refused = 0
        self._emptied = 0
        self.after_fork()
        self._populator = PagePopulator(self._arena, self._arena.address, size, f"{label}-pages")
        weakref.finalize(self, self._populator.stop)
        renew_in_child(self)

    def after_fork(self) -> None:
        """Begin without blocks: a thread that the child does not have may have been in the middle of a change, or have slots in
        use, and readers of the table of names look for the parent's."""
        self._lock = threading.Lock()
        # No slots before the first put, unless their length is given.
        self._slots = SlotTable(self._size, self._fixed, self._quota)
        self._names: SharedNames | None = None
        self._lost: deque[tuple[SlotTable, Sequence[int]]] = deque()

    @property
    def memory(self) -> memoryview | None:
        arena = self._arena
        return None if arena is None else arena.view

    @property
    def slot_bytes(self) -> int:
        return self._slots.slot_bytes

    def move_to(self, arena: MemoryArena) -> bool:
        """Keep blocks in other memory, of the same size, from now on; those that it has are gone. False, and nothing changes,
        while a block is in use or pinned."""
        with self._lock:
            if self._arena is None or arena.size != self._size:
                return False
            self._take((), (), math.inf)  # takes no slot, and gives back those of lost reservations
            if self._slots.held:
                return False
            self._empty(self._slots.slot_bytes)
            self._populator.stop()
            self._arena = arena
            return True

    @staticmethod
    def check_options(
        size: int, *, pin_share: float = 0.5, slot_bytes: int | None = None, tenant_quota: float | None = None
    ) -> None:
        """Raises StoreConfigError for what the constructor would refuse."""
        if size < 1 or not 0.0 <= pin_share <= 1.0:
            what = f"no memory store of {size} bytes" if size < 1 else f"pin_share is from 0 to 1, not {pin_share}"
            raise StoreConfigError(what)
        if slot_bytes is not None and not 1 <= slot_bytes <= size:
            raise StoreConfigError(f"a memory store of {size} bytes has no slots of {slot_bytes}")
        quota_of(tenant_quota, size)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        with self._lock:
            self._open(deadline)
            find, writing = self._slots.chains.index.get, self._slots.writing
            for count, name in enumerate(names):
                slot = find(name)
                if slot is None or slot in writing:
                    return count
            return len(names)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        with self._lock:
            self._open(deadline)
            find, writing = self._slots.chains.index.get, self._slots.writing
            slots = [find(name) for name in names]
            return [slot is not None and slot not in writing for slot in slots]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths: list[int] = []
        with self.lend(names, deadline=deadline) as lent:
            for data, buffer in zip(lent.frames, buffers, strict=True):
                length = data.nbytes if data.nbytes <= buffer.nbytes else BAD
                if length > 0 and time.monotonic() >= deadline:
                    length = FAILED
                elif length > 0:
                    _copy(data, buffer)
                lengths.append(length)
        if FAILED in lengths and max(lengths) <= MISSING:
            time_left(deadline)
        return lengths

    @contextlib.contextmanager
    def lend(self, names: Sequence[Name], *, deadline: float) -> Iterator[Loan]:
        with self._lock:
            arena, slots = self._open(deadline), self._slots
            found = slots.acquire(names)
        try:
            stride = slots.slot_bytes or 1
            memory = arena.view[: arena.size // stride * stride]
            frames = [memory[slot * stride : slot * stride + length] for slot, length in found]
            yield Loan(memory, stride, [slot for slot, _ in found], frames)
        finally:
            with self._lock:
                slots.release(*[slot for slot, length in found if length > 0])

    def reserve(
        self, headers: Sequence[Header] | Sequence[UnreadBlock], *, unread: bool = False, deadline: float
    ) -> ReservedSlots:
        """Reserve slots. A block that another thread is writing at this moment has no slot and is not counted. With `unread`
        there are none in memory that is not populated yet: a read would wait for its pages, ten times as long as for the
        bytes; what evicts a block has its pages."""
        lengths = [HEADER_BYTES + header.length for header in headers]
        with self._lock:
            arena, slots, found, present, full = self._take(headers, lengths, deadline, unread=unread)
            used = slots.chains.in_use
            busy = full and len(used) - used.count(0) > len(found)
        stride = slots.slot_bytes or 1
        reserved = ReservedSlots(
            arena.view[: arena.size // stride * stride],
            stride,
            list(found),
            [lengths[at] for at in found.values()],
            list(found.values()),
            present,
            full,
            unread,
            busy,
        )
        if found:
            # Without the lock: this thread may hold it when the garbage collector runs.
            reserved.unused = weakref.finalize(reserved, self._lost.append, (slots, reserved.slots))
            reserved.unused.atexit = False
        return reserved

    def publish(self, reserved: ReservedSlots, chosen: Collection[int] | None = None) -> int:
        with self._lock:
            self._open(math.inf)
            return self._end(reserved, chosen)

    def abandon(self, reserved: ReservedSlots) -> None:
        with self._lock:
            self._end(reserved, ())

    def _end(self, reserved: ReservedSlots, chosen: Collection[int] | None) -> int:
        """End a reservation and publish its blocks, or the chosen ones. Under the lock."""
        ended = None if reserved.unused is None else reserved.unused.detach()
        if ended is None:
            return 0
        ((slots, taken),) = ended[2]
        if chosen is None and not reserved.unread:
            return sum([slots.publish(slot) for slot in taken])
        published, wanted = 0, frozenset(range(len(taken)) if chosen is None else chosen)
        memory, move = memoryview(reserved.memory), slots.chains.move
        for index, (slot, length) in enumerate(zip(taken, reserved.lengths, strict=True)):
            if index in wanted:
                if reserved.unread:
                    move(slot, *place_in_chain(memory, slot * reserved.stride + length))
                published += slots.publish(slot)
            else:
                slots.abort_write(slot)
        return published

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames. Blocks that another thread is writing at this moment are not counted."""
        headers, lengths = [one.header for one in frames], [len(one.data) for one in frames]
        with self._lock:
            arena, slots, found, present, full = self._take(headers, lengths, deadline)
        reserved = [(slot, frames[at]) for slot, at in found.items()]
        done = written = 0
        try:
            for run in _adjacent(reserved, slots.slot_bytes):
                time_left(deadline)
                size = sum(one.data.nbytes for _, one in run)
                arena.write(run[0][0] * slots.slot_bytes, run[0][1].data, size)
                with self._lock:
                    written += sum(slots.publish(slot) for slot, _ in run)
                done += len(run)
        finally:
            if done < len(reserved):
                with self._lock:
                    for slot, _ in reserved[done:]:
                        slots.abort_write(slot)
        if full and not present + written:
            raise StoreFull(_FULL)
        return present + written

    def _take(
        self,
        headers: Sequence[Header] | Sequence[UnreadBlock],
        lengths: Sequence[int],
        deadline: float,
        *,
        unread: bool = False,
    ) -> tuple[MemoryArena, SlotTable, dict[int, int], int, bool]:
        """Slots for new frames of these lengths, by slot the index of the header; and how many are present, and whether one
        found no slot. Under the lock."""
        arena = self._open(deadline)
        while self._lost:  # reservations that ended with their last reference
            table, lost = self._lost.popleft()
            for slot in lost:
                table.abort_write(slot)
        slots = self._slots_for(lengths)
        found, present, full = self._reserve(slots, headers, lengths, unread=unread)
        if found:
            self._populator.extend((max(found) + 1) * slots.slot_bytes)
        return arena, slots, found, present, full

    def _slots_for(self, lengths: Sequence[int]) -> SlotTable:
        """The slots, as long as the longest frame so far that fits into the store, given lengths of frames. Under the lock."""
        slots = self._slots
        if self._fixed:
            return slots
        longest = max((length for length in lengths if length <= self._size), default=0)
        # Blocks of several KV groups differ in length, and so do outputs of encoders. A block that is read, written or pinned
        # stays where it is. By a quarter: else frames that grow by a byte would empty the store each time. Devices want words.
        if longest > slots.slot_bytes and not slots.held:
            self._emptied += bool(slots.chains.index)
            words = -(-max(longest, self._longest, slots.slot_bytes * 5 // 4) // _WORD)
            self._empty(min(words * _WORD, self._size))
        return self._slots

    def _empty(self, slot_bytes: int) -> None:
        """Evict all blocks, of which none is in use, for slots of so many bytes. Under the lock."""
        gone, names = list(self._slots.chains.index), self._slots.names
        self._slots = SlotTable(self._size, slot_bytes, self._quota)
        self._slots.names = names
        if names is None:
            self._start_names()
        else:  # readers in other processes look into the same table
            for name in gone:
                names.discard(name)
        self._evictions += len(gone)
        if self.on_evicted is not None:
            for name in gone:
                self.on_evicted(name)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        """Delete blocks. Those that are being written do not appear, and do not count."""
        with self._lock:
            self._open(deadline)
            slots = self._slots
            found = {slot for name in names if (slot := slots.chains.index.get(name)) is not None}
            count = len(found - slots.writing)
            for slot in found:
                slots.remove(slot)
            return count

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        try:  # those that are published before this are listed
            with self._lock:
                self._open(deadline)
                self._slots.remove_writing(
                    lambda name: has_prefix(name, layout, root) and (chosen is None or name in chosen)
                )
        except StoreError as error:
            yield Erased.failed(error)
            return
        yield from super().erase_steps(layout, root, chosen=chosen, deadline=deadline)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        with self._lock:
            self._open(deadline)
            limit = int(self._slots.chains.slots * self._pin_share)
            return sum(self._slots.pin(slot, pinned, limit) for slot in self._find(names))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        start = 0
        while True:
            with self._lock:
                self._open(deadline)
                if start >= self._slots.chains.slots:
                    return
                blocks = self._slots.blocks(start, start + _SCAN_SLOTS)
            yield from blocks
            start += _SCAN_SLOTS

    def share_names(self, names: SharedNames) -> None:
        """Keep the names of the blocks in a table, too, which other processes read."""
        with self._lock:
            self._names = names
            self._start_names()

    def _start_names(self) -> None:
        slots = self._slots
        if self._names is not None and slots.chains.slots:
            published = [name for slot, name in slots.chains.blocks(0, slots.chains.slots) if slot not in slots.writing]
            self._names.start(slots.chains.slots, published)
            slots.names = self._names

    def check_open(self, deadline: float) -> None:
        self._open(deadline)

    def status(self) -> StoreStatus:
        """`notes`: slots, slot_bytes (0 before the first put), refused (frames longer than a slot), emptied (for longer
        slots)."""
        with self._lock:
            slots = self._slots
            return StoreStatus(
                blocks=len(slots.chains.index) - len(slots.writing),
                bytes=slots.bytes,
                budget=self._size,
                pinned_bytes=slots.pinned_bytes,
                evictions=self._evictions,
                pin_budget=int(self._size * self._pin_share),
                notes={
                    "slots": slots.chains.slots,
                    "slot_bytes": slots.slot_bytes,
                    "refused": self._refused,
                    "emptied": self._emptied,
                },
            )

    def close(self) -> None:
        with self._lock:
            self._populator.stop()
            # Running calls and the populating thread have references to the arena; the last of them releases it.
            self._arena = None
            self._slots = SlotTable(self._size, 0)
            if self._names is not None:
                self._names.close()
            self._records.clear()

    def _open(self, deadline: float) -> MemoryArena:
        """Return the arena. Raises StoreTimeout, StoreUnavailable."""
        time_left(deadline)
        if self._arena is None:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        return self._arena

    def _find(self, names: Sequence[Name]) -> list[int]:
        """Slots of the names that are present, each once."""
        slots = self._slots
        found = (slots.chains.index.get(name) for name in dict.fromkeys(names))
        return [slot for slot in found if slot is not None and slot not in slots.writing]

    def _reserve(
        self,
        slots: SlotTable,
        headers: Sequence[Header] | Sequence[UnreadBlock],
        lengths: Sequence[int],
        *,
        unread: bool,
    ) -> tuple[dict[int, int], int, bool]:
        """Allocate slots for new frames, in use and not published. Evicts nothing that this call has used.

        Returns the index of the header by slot, the number of frames that are present or repeated in the batch, and whether a
        frame found no slot. With `unread` it ends behind the first that gets none. For want of pages all get none unless a half
        has them: the rest is read together.
        """
        chains = slots.chains
        now, clock = chains.tick(), time.time()
        ready = self._populator.ready // max(slots.slot_bytes, 1) if unread else chains.slots
        reserved: dict[int, int] = {}
        present, full = 0, False
        pairs = [(header.name, header.parent_name) for header in headers]
        slots.touch(itertools.chain.from_iterable(pairs), now)
        for name in {tenant_of(name): name for name, _ in pairs}.values():
            chains.note_use(name)
        for at, (name, parent) in enumerate(pairs):
            if unread and len(reserved) < at:
                break
            slot = chains.index.get(name)
            if slot is not None:
                present += slot in reserved or slot not in slots.writing
                continue
            if lengths[at] > slots.slot_bytes:
                self._refused += 1
                continue
            slot = None if full else slots.allocate(now, name)
            if slot is None:  # skip the rest of the chain too: it would lie behind a gap
                full = True
                continue
            if slot >= ready and chains.evicted is None:
                chains.free(slot)
                self._populator.extend((slot + len(pairs) - at) * slots.slot_bytes)
                while reserved and 2 * at < len(pairs):  # in this order the first slot is the next
                    slots.abort_write(reserved.popitem()[0])
                break
            if chains.evicted is not None:
                self._evictions += 1
                if self.on_evicted is not None:
                    self.on_evicted(chains.evicted)
            slots.begin_write(slot, name, parent, headers[at].depth, lengths[at], now, clock)
            reserved[slot] = at
        chains.enqueue(reserved)
        return reserved, present, full
