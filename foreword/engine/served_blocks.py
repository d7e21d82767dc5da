"""What other instances may read of this one: the blocks on its device and in its memory tiers (`peer://` in their stores).

Asking what is there (`locate`) reads the index of the device from another thread; it is a hint. Giving blocks (`get`) takes
references on the engine's thread, between two steps, when every block that has a name is computed; copies on a thread of the
endpoint's while the engine goes on; and gives the references back. So a step waits for some bookkeeping and never for a copy,
at most one copy runs at a time, and no more than a share of the pool is held for peers.

Whoever asks must know a block's key, and with it the salt of its tenant.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.blocks.pool import BlockPool
from foreword.cache import Slots, Staging
from foreword.config import TransferConfig
from foreword.errors import StoreError
from foreword.events import BlocksRemoved, BlocksStored, Event
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, RAW, Header, seal
from foreword.transfer.endpoint import Endpoint
from foreword.transfer.messages import Buffer
from foreword.transfer.service import Idle

# What is read in one go, and copied for peers at a time.
BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 512
ARENA_BYTES: Final = 4 * BATCH_BYTES
# Of the pool, the part that one batch may hold; and of the free blocks, the part that it may take.
_HELD_SHARE: Final = 8
_FREE_SHARE: Final = 2
# A long chain's bookkeeping takes milliseconds of the engine's time: so often at most.
_TIDY_SECONDS: Final = 0.5

# Runs a function on the engine's thread between two steps; False if the engine has ended.
Post = Callable[[Callable[[], None]], bool]


class DeviceChains:
    """An observer that knows the place of every named block on the device in its chain, which the pool does not need to know.

    The engine's thread writes and reads it.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def notify(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                self._places.pop(key, None)

    def _stored(self, event: BlocksStored) -> None:
        # Parents leave the device after their children, so one that is not known is the root.
        above = self._places.get(event.parent)
        parent, depth = event.parent, 0 if above is None else above[1] + 1
        for key in event.keys:
            self._places[key] = parent, depth
            parent, depth = key, depth + 1

    def place(self, key: bytes) -> tuple[bytes, int] | None:
        """The key before it, and its number in the chain."""
        return self._places.get(key)

    def before(self, key: bytes) -> list[bytes]:
        """Keys of the blocks before this one that are here, the first of the chain first."""
        above: list[bytes] = []
        place = self._places.get(key)
        while place is not None and place[0] in self._places:
            above.append(place[0])
            place = self._places[place[0]]
        return above[::-1]


@dataclass(frozen=True, slots=True)
class _Held:
    """A block of the device with a reference of ours: which name of the batch it is for, its number, and its header."""

    number: int
    block: int
    header: Header


@dataclass(frozen=True, slots=True)
class ServedStatus:
    """Blocks since the start: given from the device, given from memory, asked for and not there."""

    device: int
    memory: int
    missing: int


class ServedBlocks:
    """Answers `locate` and `get` of a transfer service (`foreword.transfer.service.Service`).

    Args:
        layout: of the engine's blocks; names of any other are not there.
        pool, chains: of the device. `chains` has observed the pool from the beginning.
        staging: slots for frames and copies out of the device, used by nobody else.
        memory: stores of this process's memory, the fastest first.
    """

    def __init__(
        self,
        layout: Layout,
        pool: BlockPool,
        chains: DeviceChains,
        post: Post,
        staging: Staging,
        memory: Sequence[Store] = (),
    ) -> None:
        self.layout = layout
        self._fingerprint = layout.fingerprint
        self._pool = pool
        self._chains = chains
        self._post = post
        self._staging = staging
        self._memory = tuple(memory)
        self._slots = Slots(range(staging.slots))
        most = min(BATCH_BYTES // staging.frame_bytes, BATCH_BLOCKS, pool.num_blocks // _HELD_SHARE, staging.slots)
        self._batch = max(most, 1)
        self._copying = threading.Lock()
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        # The engine's thread's own: ends of chains that were read since the last `_tidy`.
        self._ends: dict[bytes, None] = {}
        self._tidying = False

    @property
    def tidy(self) -> bool:
        """Whether all that was read so far is counted as used."""
        return not self._tidying

    def status(self) -> ServedStatus:
        return ServedStatus(self._counts["device"], self._counts["memory"], self._counts["missing"])

    # On the endpoint's threads

    def locate(self, names: Sequence[Name], deadline: float) -> int:
        """How many of these blocks, from the first on, are on the device or in memory."""
        mine = itertools.takewhile(lambda name: name.startswith(self._fingerprint), names)
        keys = [name[FINGERPRINT_BYTES:] for name in mine]
        done = before = 0
        while done < len(keys):
            done += len(self._pool.lookup(keys[done:]))
            for store in self._memory:
                done += _found(store, names[done : len(keys)], deadline)
            if done == before:
                break
            before = done
        return done

    def get(self, names: Sequence[Name], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        """Sealed frames in the order of `names`, in batches; a batch's memory is used again when the next one is asked for."""
        if longest < self._staging.frame_bytes:
            return
        for start in range(0, len(names), self._batch):
            batch = names[start : start + self._batch]
            slots = self._slots.wait_for(len(batch), deadline)
            if slots is None:
                return
            try:
                yield self._frames(batch, slots, deadline)
            finally:
                self._slots.give(slots)

    def _frames(self, names: Sequence[Name], slots: Sequence[int], deadline: float) -> list[Buffer | None]:
        """A batch. What is in memory is taken from there, because that does not concern the engine."""
        buffers = [self._staging.buffer(slot) for slot in slots]
        frames: list[Buffer | None] = [None] * len(names)
        for store in self._memory:
            open_ = [i for i, frame in enumerate(frames) if frame is None]
            for i, length in zip(open_, self._read(store, names, buffers, open_, deadline), strict=True):
                frames[i] = buffers[i][:length] if length else None
        from_memory = sum(frame is not None for frame in frames)
        missing = [i for i, frame in enumerate(frames) if frame is None and names[i].startswith(self._fingerprint)]
        from_device = self._from_device(names, missing, slots, deadline) if missing else []
        for i in from_device:
            frames[i] = buffers[i]
        self._count(device=len(from_device), memory=from_memory, missing=len(names) - from_memory - len(from_device))
        return frames

    def _read(
        self, store: Store, names: Sequence[Name], buffers: Sequence[memoryview], which: Sequence[int], deadline: float
    ) -> list[int]:
        if not which:
            return []
        try:
            with self._copying:
                return store.get([names[i] for i in which], [buffers[i] for i in which], deadline=deadline)
        except StoreError:  # closed, or the deadline passed
            return [0] * len(which)

    def _from_device(
        self, names: Sequence[Name], which: Sequence[int], slots: Sequence[int], deadline: float
    ) -> list[int]:
        """Copy those of the names that the device has into their slots; returns which ones."""
        held = self._hold([(i, names[i]) for i in which], deadline)
        if not held:
            return []
        targets = [slots[one.number] for one in held]
        try:
            with self._copying:
                self._staging.gather([one.block for one in held], targets)
        finally:
            self._post(lambda: self._give_back(held))
        for one, slot in zip(held, targets, strict=True):
            seal(one.header, self._staging.buffer(slot))
        return [one.number for one in held]

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> list[_Held]:
        """References to what the device has of these names; none if the engine does not come to it in time."""
        answer: Future[list[_Held]] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                answer.set_result(self._take(wanted))
            except BaseException as error:  # noqa: BLE001 - handed to the peer's thread: the engine goes on
                answer.set_exception(error)

        if not self._post(work):
            return []
        try:
            return answer.result(max(deadline - time.monotonic(), 0))
        except TimeoutError:
            # Either it is not begun and never will be, or the engine is at it in this moment.
            return [] if answer.cancel() else answer.result()

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)

    # On the engine's thread

    def _take(self, wanted: Sequence[tuple[int, Name]]) -> list[_Held]:
        pool = self._pool
        held: list[_Held] = []
        spare = pool.num_free // _FREE_SHARE
        for number, name in wanted:
            key = name[FINGERPRINT_BYTES:]
            blocks, place = pool.lookup([key]), self._chains.place(key)
            if not blocks or place is None:
                continue
            free = pool.count_free(blocks)
            if free > spare:
                continue  # what is free is about to be needed
            spare -= free
            pool.share(blocks)
            held.append(_Held(number, blocks[0], self._header(key, *place)))
        return held

    def _header(self, key: bytes, parent: bytes, depth: int) -> Header:
        size = self._staging.block_bytes
        return Header(self._fingerprint, key, parent, depth, RAW, size, size)

    def _give_back(self, held: Sequence[_Held]) -> None:
        """Release what was read. The blocks before it are counted as used a little later, once for many reads of a chain."""
        self._pool.release([one.block for one in held])
        first, last = held[0].header, held[-1].header
        self._ends.pop(first.parent, None)
        self._ends[last.key] = None
        if not self._tidying:
            self._tidying = True
            later = threading.Timer(_TIDY_SECONDS, lambda: self._post(self._tidy))
            later.daemon = True
            later.start()

    def _tidy(self) -> None:
        """Whoever reads a chain's end uses all of it: a block that had been used after its parent would outlive it."""
        for key in self._ends:
            chain = self._pool.lookup([*self._chains.before(key), key])
            self._pool.share(chain)
            self._pool.release(chain)
        self._ends.clear()
        self._tidying = False


def _found(store: Store, names: Sequence[Name], deadline: float) -> int:
    if not names:
        return 0
    try:
        return store.lookup(names, deadline=deadline)
    except StoreError:
        return 0


def slots_for(layout: Layout) -> int:
    """How many blocks the arena has room for from which they are given to peers."""
    return max(ARENA_BYTES // (layout.block_bytes + HEADER_BYTES), 4)


class Library(Idle):
    """A transfer service that gives blocks and does nothing else."""

    def __init__(self, served: ServedBlocks) -> None:
        super().__init__(served.layout)
        self.locate = served.locate  # type: ignore[method-assign]
        self.get = served.get  # type: ignore[method-assign]


def serve_blocks(served: ServedBlocks, config: TransferConfig) -> Endpoint:
    """Listen at `config.bind` for instances that read blocks; close the endpoint in the end. Raises ConfigError."""
    endpoint = Endpoint(config, Library(served))
    endpoint.listen()
    return endpoint
