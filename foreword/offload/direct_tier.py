"""The memory tier as the place that a device copies to and from (ring.py): no staging arena lies between, and no queue.

A save reserves slots in the tier, in which the device writes whole frames, sealed; a thread publishes them when the copies have
ended. Tiers behind it get the blocks from these slots, which are lent until they are written, at most half of the tier: what is
more is dropped for them. A load copies lent slots; the device tells which frames were right. A slot in flight is not evicted.

All of that only with memory that is page-locked, and after a test on the device at the start: what it seals the host must find
right, and what was changed must be found wrong. Until then, and where something is missing, blocks take the way through the
staging arena.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES
from foreword.blocks.layout import ROOT_BYTES
from foreword.errors import BadFrame
from foreword.offload.direct_interfaces import DirectCopies, DirectExtra
from foreword.offload.lent_share import LentShare
from foreword.offload.pinned import PIN_BYTES, AllocatedArena, CudaPinning, PinnedMemory, Pinning
from foreword.offload.ring import (
    PIECE_BYTES,
    PIECES_OF_A_LOAD,
    DeviceRing,
    LoadBatch,
    Part,
    Piece,
    RingLoad,
    TierMemory,
    copies_of,
)
from foreword.offload.ring_copies import RingCopies
from foreword.offload.writer import BlockRead, WriteBehind
from foreword.store.background import background_thread
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, check
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore, Tiers

if TYPE_CHECKING:
    from foreword.offload.device import DeviceCopies, Event
    from foreword.offload.load import StoreLoad
    from foreword.offload.staging import StagingArena
    from foreword.store.base import Loan, Name, ReservedSlots
    from foreword.store.tier import StoreTier

log = logging.getLogger("foreword.offload")
SMALLEST_PAYLOAD: Final = 16 << 10  # bytes; shorter frames are faster through the staging arena
_CALL_SECONDS: Final = 5.0
# Lent together to a load: 1 GiB of KV, with headers. Other blocks may be evicted meanwhile.
_LENT_BYTES: Final = 1040 << 20
_PIECES_AT_ONCE: Final = 8  # of a load, through one piece of the ring, that are waited for and counted together
_TESTED: Final = 3  # frames of each group in the test at the start
_CLOSE_SECONDS: Final = 5.0
_ROOM_PAUSE: Final = 0.02  # seconds between two looks whether a further tier has given slots back
_WORD: Final = 8


class _LaterError(Exception):
    """The free slots are not page-locked yet."""


@dataclass(slots=True, eq=False)
class _Save:
    """Blocks that the device is about to write into reserved slots, or writes.

    Attributes:
        units: coordinates of those that have a slot.
        headers: of all blocks, also of those that the tier has already: `others`, further tiers, may not.
        read: what was erased since they were given. `began`: when that was.
    """

    group: int
    units: Any
    headers: Sequence[Header]
    reserved: ReservedSlots
    others: Tiers
    read: BlockRead
    began: float = field(default_factory=time.monotonic)

    @property
    def written(self) -> list[Header]:
        """The headers of the reserved slots."""
        return [self.headers[at] for at in self.reserved.positions]


@dataclass(slots=True, eq=False)
class _TierLoad:
    """Blocks on their way from the tier into the device, through a piece of the ring. `release` returns it, and what is lent
    if no other piece of it is on its way."""

    tier: DirectTier
    copy: RingLoad
    names: Sequence[Name]
    size: int
    release: Callable[[], None]
    began: float = field(default_factory=time.monotonic)

    @property
    def copied(self) -> Event:
        return self.copy.copied

    @property
    def count(self) -> int:
        return len(self.names)

    def end(self, load: StoreLoad, *, copied: bool, timed: bool) -> None:
        direct, began = self.tier, max(self.began, load.copied_at)
        sound = self.copy.sound() if copied else 0
        self.release()
        load.copied_at = time.monotonic()
        whole = sound == self.count
        damaged = copied and not whole
        try:
            if damaged:
                # The block is deleted before the load can end: what is computed in its place is saved then.
                direct.read_again(self.names[sound])
        finally:
            load.end_copy([direct.place] * sound if copied else None, whole=whole)
            direct.tier.count_read(sound, self.size * sound // self.count, load.copied_at - began if timed else 0.0)
            if damaged:
                load.close()


@dataclass(slots=True, eq=False)
class _LentBlocks:
    """Blocks of a load that the tier lends together: what they need is made once, and each piece of the ring takes some. Used
    by one thread, and lent until `release` and the ends of all its copies.

    Attributes:
        sizes: bytes of the frames.
    """

    tier: DirectTier
    batch: LoadBatch
    sizes: Sequence[int]
    end: Callable[[], None]
    users: int = 1

    def load(self, number: int, count: int, piece: Piece, mark: Event | None) -> _TierLoad:
        """Queue the copies of so many pieces of blocks through a piece of the ring, which the caller has."""
        (low, high), ring = self.batch.frames(number, count), self.tier.ring
        try:
            copy = ring.load(self.batch, number, piece, mark, count)
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is raised says more
                ring.loaded().synchronize()
            ring.give(piece)
            raise
        self.users += 1
        size = sum(self.sizes[low:high])
        return _TierLoad(self.tier, copy, self.batch.names[low:high], size, partial(self._ended, piece))

    def _ended(self, piece: Piece) -> None:
        self.tier.ring.give(piece)
        self.release()

    def release(self) -> None:
        """No further piece is queued, or the copies of one have ended."""
        self.users -= 1
        if not self.users:
            self.end()


@dataclass(slots=True, eq=False)
class LentSlots:
    """Slots of a tier, which are lent until all of them were written further: the pool of the write queue for these."""

    end: Callable[[], None]

    def take(self, count: int) -> list[int] | None:
        return None

    def give(self, slots: Iterable[int]) -> None:
        self.end()


class DirectTier(DirectCopies):
    """Saves into and loads from the first tier without a copy by the host.

    Args:
        store: the first tier reserves slots.
        memory: of the first tier.
        places: the coordinates of a group's units, int64 `[units, 3]`.
        writer: writes to further tiers.
        pinning: page-locks the tier's memory; None: it is not necessary.

    """

    place = 0
    loads_at_once = PIECES_OF_A_LOAD

    def __init__(
        self,
        store: TieredStore,
        memory: memoryview,
        ring: DeviceRing,
        places: Callable[[int, Any], Any],
        writer: WriteBehind,
        pinning: Pinning | None,
    ) -> None:
        self.ring = ring
        self.usable = False
        self.state = ""
        self.saved = self.failed = 0
        self.tier: StoreTier = store.tiers[self.place]
        self._places = places
        self._writer = writer
        self._share = LentShare(len(memory), _LENT_BYTES)
        # Bytes of a slot that was longer than the store had said, or had become so. Set by loads' threads: the last one counts,
        # and a load that has counted too little finds out.
        self._stride = 0
        self._waiting: list[_Save] = []
        self._launched: list[_Save] = []  # changed under `_changed`, as the counts are
        self._pending = 0
        self._full = False
        self._changed = threading.Condition()
        self._copies: queue.SimpleQueue[tuple[list[_Save], Event] | None] = queue.SimpleQueue()
        self._pinned: PinnedMemory | None = None
        self._memory: TierMemory | None = None
        self._thread = background_thread(self._run, "publish")
        if pinning is None:
            self._begin()
        else:
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            self._pinned = PinnedMemory(memory, address, len(memory), pinning, self._begin, self._move)
            self._pinned.start()

    # The start

    def _begin(self) -> bool | None:
        """Use the tier if the device passes the test, or say why not. None: not yet, since other blocks are where memory is
        page-locked."""
        reason = self._pinned.refused if self._pinned is not None else ""
        try:
            reason = reason and f"its memory cannot be page-locked: {reason}"
            reason = reason or self._test()
        except _LaterError:
            if self._pinned is not None and self._pinned.end < self._pinned.size:
                return None
            reason = "other blocks are where its memory is page-locked"
        except Exception as error:  # noqa: BLE001 - whatever a driver or compiler raises: blocks take the other way
            reason = f"the device failed: {type(error).__name__}: {error}"
            self.ring.copy_by_torch()  # what failed may be the driver's call for copies
        if reason:
            self._refuse(reason)
        else:
            self.usable, self.state = True, "on"
            log.info("the device copies blocks directly to and from %s, and seals and checks them", self.tier.label)
        return self.usable

    def _refuse(self, reason: str) -> None:
        """Blocks go through the staging arena from now on, and through the ring, which has all of the device's memory that they
        need: at any later time an engine may have left none."""
        self.usable, self.state = False, reason
        log.warning(
            "blocks go through the staging arena, not directly between the device and %s: %s", self.tier.label, reason
        )

    def _move(self, memory: memoryview | None) -> str:
        """Put other memory in place of the tier's, if there is some. Returns what is in the way; "" if nothing is known."""
        store = self.tier.store
        if not isinstance(store, MemoryStore):
            return f"{self.tier.label} keeps its memory"
        if store.status().pinned_bytes:
            return "a block is pinned"
        return "" if memory is None or store.move_to(AllocatedArena(memory)) else "blocks are in use"

    def _test(self) -> str:
        """Let the device seal and check frames in the tier's own memory. Returns what is wrong; "" if nothing is."""
        for size in sorted(set(self.ring.block_bytes)):
            made = [_made_up(size) for _ in range(_TESTED)]
            reserved = self.tier.reserve(made, time.monotonic() + _CALL_SECONDS)
            try:
                room = min(_TESTED, self.ring.piece_bytes // reserved.stride)
                if not room or not self.ring.room(reserved.stride):
                    return _too_long(reserved.stride)
                if len(reserved.slots) < room:
                    return "the tier has no room for a test"
                if not self._is_pinned(reserved.slots[:room], reserved.stride):
                    raise _LaterError
                if wrong := self._test_frames(made[:room], reserved, size):
                    return wrong
            finally:
                self.tier.abandon(reserved)
        return ""

    def _test_frames(self, made: Sequence[Header], reserved: ReservedSlots, size: int) -> str:
        memory, count = self._tier_memory(reserved.memory, reserved.stride), len(made)
        frames, slots = reserved.frames()[:count], reserved.slots[:count]
        payloads = [os.urandom(size) for _ in made]
        for place, payload in zip(frames, payloads, strict=True):
            place[:size] = payload
            place[size:] = bytes(HEADER_BYTES)
        self.ring.reseal(size, made, memory, slots)
        for header, place, payload in zip(made, frames, payloads, strict=True):
            try:
                whole = check(place, header.name)
            except BadFrame as error:
                return f"what it sealed is wrong: {error.message}"
            if whole.header != header or whole.payload != payload:
                return "what it sealed is another block"
        names = [header.name for header in made]
        verdicts = [self.ring.verdicts(size, names, memory, slots)]
        frames[count // 2][size // 2] ^= 1
        verdicts.append(self.ring.verdicts(size, names, memory, slots))
        frames[count // 2][size // 2] ^= 1
        verdicts.append(self.ring.verdicts(size, [*names[:-1], _made_up(size).name], memory, slots))
        right, last = [1] * count, [1] * (count - 1) + [0]
        if verdicts != [right, [int(one != count // 2) for one in range(count)], last]:
            return f"its verdicts over whole, changed and other frames are {verdicts}"
        return ""

    def _tier_memory(self, memory: memoryview | bytes, stride: int) -> TierMemory:
        known = self._memory
        if known is None or known.stride != stride:
            cut = sys.maxsize if self._pinned is None or self._pinned.moved else PIN_BYTES
            self._memory = known = TierMemory.of(memory, stride, cut)
        return known

    def _is_pinned(self, slots: Sequence[int], stride: int) -> bool:
        return self._pinned is None or not slots or (max(slots) + 1) * stride <= self._pinned.end

    # Saving, on the engine's thread or, as the caller takes care, one at a time

    def save(self, units: Sequence[int], headers: Sequence[Header], tiers: Tiers, group: int) -> tuple[int, Tiers]:
        if self.tier.deletes(header.name for header in headers):  # the write queue waits for it
            return 0, tiers
        read = self._writer.began()
        reserved = self.tier.reserve(headers, time.monotonic() + _CALL_SECONDS)
        if not self.ring.room(reserved.stride):  # slots have grown; they never shrink
            self._refuse(_too_long(reserved.stride))
        if not (self.usable and self._is_pinned(reserved.slots, reserved.stride)):
            self.tier.abandon(reserved)
            return 0, tiers
        others = tuple(tier for tier in tiers if tier != self.place)
        done = len(headers)
        if reserved.full:
            done = reserved.positions[-1] + 1 if reserved.slots else 0
        in_flight = reserved.slots or self._waiting or self.pending or self._writer.lent or self.ring.loading
        if done < len(headers) and not in_flight:
            # Nothing is in flight that would make room: pins have it, or a tenant's quota is used up. Further tiers may have
            # room; where there are none, these blocks are not given again.
            self.tier.abandon(reserved)
            self._full = False
            self._add(failed=0 if others else len(headers))
            return len(headers), others
        if self._is_refused(headers[:done], reserved):
            self.tier.abandon(reserved)
            return 0, tiers
        self._full = done < len(headers)
        taken = np.asarray(units, np.int64)[np.asarray(reserved.positions, np.int64)]
        self._waiting.append(_Save(group, self._places(group, taken), headers[:done], reserved, others, read))
        return done, ()

    def _is_refused(self, headers: Sequence[Header], reserved: ReservedSlots) -> bool:
        """Whether one of the blocks has no slot, is not there, and is not on its way there: the tier has failed."""
        if not reserved.full and len(reserved.slots) + reserved.present >= len(headers):
            return False
        # First those on their way: they are found before they are none of these any more.
        with self._changed:
            known = {one.name for save in (*self._waiting, *self._launched) for one in save.written}
        known.update(headers[at].name for at in reserved.positions)
        unknown = [one for one in headers if one.name not in known]
        return bool(self._absent(unknown))

    def _absent(self, headers: Sequence[Header]) -> int:
        """How many of these blocks the tier does not have."""
        names, until = [one.name for one in headers], time.monotonic() + _CALL_SECONDS
        return self.tier.attempt(lambda: self.tier.store.present(names, deadline=until).count(False), len(names))

    def await_room(self, timeout: float) -> None:
        """Wait until `save` may find room, if it found none: for the copies in flight, or a moment for further tiers."""
        if self.flush(timeout) and self._full:
            time.sleep(min(timeout, _ROOM_PAUSE))

    def launch(self) -> None:
        saves, self._waiting = self._waiting, []
        if not saves:
            return
        event: Event | None = None
        try:
            for _, some in itertools.groupby(sorted(saves, key=lambda one: one.group), key=lambda one: one.group):
                event = self._launch_group([*some]) or event
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is raised says more
                self.ring.saved().synchronize()
            self._abandon(saves)
            raise
        with self._changed:
            self._pending += sum(len(one.headers) for one in saves)
            self._launched += saves
        self._copies.put((saves, event if event is not None else self.ring.mark()))

    def _abandon(self, saves: Iterable[_Save]) -> None:
        """Blocks are not in their slots."""
        for one in saves:
            self.tier.abandon(one.reserved)
            self._count(one, 0)

    def _count(self, save: _Save, kept: int) -> None:
        """The copies have ended, and so many of the blocks are found that had a slot: others may be there by another save."""
        absent = len(save.headers) - kept - save.reserved.present
        absent = max(absent, 0) and self._absent(save.headers)
        self._add(saved=len(save.headers) - absent, failed=absent)

    def _add(self, *, saved: int = 0, failed: int = 0) -> None:
        with self._changed:  # the engine's thread counts, too
            self.saved += saved
            self.failed += failed

    def _launch_group(self, saves: Sequence[_Save]) -> Event | None:
        """Queue the copies of one group's blocks, a piece of the ring at a time. Returns the end of the last."""
        units = np.concatenate([one.units for one in saves])
        headers = [header for one in saves for header in one.written]
        slots = [slot for one in saves for slot in one.reserved.slots]
        event: Event | None = None
        if slots:
            first = (
                saves[0].reserved
                if saves[0].reserved.slots
                else next(one.reserved for one in saves if one.reserved.slots)
            )
            memory = self._tier_memory(first.memory, first.stride)
            event = self.ring.save(saves[0].group, units, headers, memory, slots)
        return event

    # Publishing, on a thread of its own

    def _run(self) -> None:
        while (taken := self._copies.get()) is not None:
            saves, event = taken
            left = deque(saves)
            try:
                event.synchronize()
                while left:
                    seconds = time.monotonic() - left[0].began
                    kept = self.tier.publish(left[0].reserved, left[0].written, seconds)
                    self._count(left.popleft(), kept)
                for one in saves:
                    self._write_further(one)
            except Exception:  # a device's error has many types; the next ones fail by themselves
                log.exception("%s: blocks were not saved, or not in all tiers", self.tier.label)
                self._abandon(left)
            finally:
                with self._changed:
                    self._pending -= sum(len(one.headers) for one in saves)
                    self._launched = [one for one in self._launched if one not in saves]
                    self._changed.notify_all()

    def _write_further(self, save: _Save) -> None:
        """Blocks are found: let them be written to further tiers."""
        if not save.others or not save.headers:
            return
        with contextlib.ExitStack() as stack:
            names = [header.name for header in save.headers]
            loan = stack.enter_context(self.tier.lend_unverified(names, time.monotonic() + _CALL_SECONDS))
            pairs = zip(save.headers, loan.frames, strict=False)
            frames = [Frame(header, data) for header, data in pairs if len(data) == HEADER_BYTES + header.length]
            if frames:
                most = len(loan.memory) // loan.stride // 2
                self._writer.add_lent(frames, LentSlots(stack.pop_all().close), save.others, save.read, most)

    @property
    def pending(self) -> int:
        with self._changed:
            return self._pending

    def flush(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    # Loading, on the threads of the loads

    def count(self, places: Sequence[int], done: int, size: int) -> int:
        if not self.usable:
            return 0
        longest = HEADER_BYTES + max(self.ring.block_bytes)
        some = places[done : done + max(min(size, _LENT_BYTES) // longest, 1)]
        if some.count(self.place) == len(some):
            return len(some)
        return len([*itertools.takewhile(self.place.__eq__, some)])

    @property
    def has_room(self) -> bool:
        return self.ring.free

    def loads(self, load: StoreLoad, done: int, count: int, deadline: float) -> Generator[_TierLoad, None, None]:
        lent = None
        while lent is None:
            stride = max(HEADER_BYTES + max(self.ring.block_bytes), self.tier.store.slot_bytes, self._stride)
            if stride > self.ring.piece_bytes:
                return
            count = self._share.take(count, stride, self.ring.piece_bytes // stride)
            end = done + count
            give = partial(self._share.give, count, stride)
            lent = self._lend(load.names[done:end], load.groups[done:end], load.blocks[done:end], stride, give)
            if lent is None and self._stride <= stride:
                return
        try:
            for number in range(0, lent.batch.pieces, _PIECES_AT_ONCE):
                piece = self.ring.wait_for(load.deadline if number else deadline)
                if piece is None:
                    return
                if not load.begin_copy():
                    self.ring.give(piece)
                    return
                try:
                    some = min(_PIECES_AT_ONCE, lent.batch.pieces - number)
                    one = lent.load(number, some, piece, None if done + number else load.mark)
                except BaseException:
                    load.end_copy([])
                    raise
                yield one
        finally:
            lent.release()

    def _lend(
        self,
        names: Sequence[Name],
        groups: Sequence[int],
        blocks: Sequence[int],
        stride: int,
        give: Callable[[], None],
    ) -> _LentBlocks | None:
        """The first of these blocks, for units of their groups, up to the first that the tier does not have; None if there is
        none, or if slots are longer than the `stride` bytes that were counted for each. The caller releases them. `give` is
        called when they are not lent any more."""
        with contextlib.ExitStack() as stack:
            stack.callback(give)
            loan = stack.enter_context(self.tier.lend_unverified(names, time.monotonic() + _CALL_SECONDS))
            if loan.stride > stride:
                self._stride = loan.stride
                return None
            sizes = [*map(len, loan.frames)]
            count = self._usable(loan, sizes, groups)
            if not count:
                return None
            parts: list[Part] = []
            low = 0
            while low < count:
                group, high = groups[low], count
                if groups.count(group) < len(groups):
                    high = low + sum(1 for _ in itertools.takewhile(group.__eq__, groups[low:count]))
                parts.append((group, self._places(group, blocks[low:high]), names[low:high]))
                low = high
            memory = self._tier_memory(loan.memory, loan.stride)
            batch = self.ring.plan_load(parts, memory, loan.slots[:count])
            return _LentBlocks(self, batch, sizes, stack.pop_all().close)

    def _usable(self, loan: Loan, sizes: Sequence[int], groups: Sequence[int]) -> int:
        """How many of the first lent frames are as long as those of their groups, and page-locked, if a piece has room."""
        if not sizes or loan.stride > self.ring.piece_bytes:
            return 0
        lengths = [HEADER_BYTES + size for size in self.ring.block_bytes]
        wanted = [lengths[group] for group in groups[: len(sizes)]]
        count = len(sizes)
        if sizes != wanted:
            pairs = zip(sizes, wanted, strict=True)
            count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._pinned is not None and count:
            pinned = self._pinned.end // loan.stride
            if max(loan.slots[:count]) >= pinned:
                count = sum(1 for _ in itertools.takewhile(pinned.__gt__, loan.slots[:count]))
        return count

    def read_again(self, name: Name) -> None:
        """Read a block on the host that the device found wrong: it is counted, and deleted if it is damaged."""
        size = HEADER_BYTES + max(self.ring.block_bytes)
        self.tier.get([name], [memoryview(bytearray(size))], time.monotonic() + _CALL_SECONDS)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Publish what is copied, and release the memory if no copy uses it."""
        self._copies.put(None)
        self._thread.join(timeout)
        if self._pinned is not None and not (self._thread.is_alive() or self.ring.loading):
            self._pinned.close(timeout)


def _open(store: TieredStore, staging: StagingArena, writer: WriteBehind) -> DirectTier | None:
    """The first tier, for copies without the host, or None and a line in the log that says what is missing."""
    memory = store.tiers[0].store.memory if store.writable[:1] == (0,) else None
    ring: DeviceRing | None = None
    reason = ""
    if memory is None:
        reason = "the first store is not memory://"
    elif unfit := [size for size in staging.block_bytes if size < SMALLEST_PAYLOAD or size % _WORD]:
        reason = f"blocks of {min(unfit)} bytes are too small, or no multiple of {_WORD}"
    elif HEADER_BYTES + max(staging.block_bytes) > PIECE_BYTES // 2:
        reason = f"blocks of {max(staging.block_bytes)} bytes are larger than half a piece of the ring"
    elif not importlib.util.find_spec("triton"):
        reason = "Triton is not installed"
    elif torch.version.hip:
        reason = "it was never tried with AMD's devices"
    else:
        queues = staging.queues
        if queues is not None:
            copies = copies_of(staging.device)
            ring = DeviceRing(staging.planes(), staging.block_bytes, staging.device, queues, PIECE_BYTES, copies)
        reason = "" if ring is not None else "KV is on the CPU"
    if ring is None or memory is None:
        log.warning("store.direct has no effect: %s; blocks go through the staging arena", reason)
        return None
    staging.use(partial(_through, ring, staging))
    pinning = CudaPinning(staging.device) if is_cuda(staging.device) else None
    return DirectTier(store, memory, ring, lambda group, units: staging.places(group, units), writer, pinning)


def _through(ring: DeviceRing, staging: StagingArena, arena: torch.Tensor) -> DeviceCopies:
    """The copies of the staging arena, which need no memory of the device besides the ring."""
    assert staging.queues is not None
    return RingCopies(arena, staging.planes(), ring, staging.queues)


def is_cuda(device: torch.device) -> bool:
    """Whether only page-locked memory is copied at full speed, and beside the thread."""
    return device.type == "cuda"


def _too_long(stride: int) -> str:
    return f"its slots of {stride} bytes are larger than a piece of the ring"


def _made_up(size: int) -> Header:
    """The header of a block that no chain has."""
    layout, root, key, parent = (os.urandom(n) for n in (FINGERPRINT_BYTES, ROOT_BYTES, KEY_BYTES, KEY_BYTES))
    return Header(layout, root, key, parent, 0, RAW, size, size)


class _Extra(DirectExtra):
    def open(self, store: TieredStore, staging: StagingArena, writer: WriteBehind) -> DirectTier | None:
        return _open(store, staging, writer)


DIRECT: Final = _Extra()
