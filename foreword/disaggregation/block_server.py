"""Lets other instances read this engine's blocks, on its device and in its memory tiers (stores at `peer://`).

`locate` reads the device's index from another thread; its answer is a hint. `get` refers to blocks on the engine's thread,
between two steps, when every published block is computed; copies them on a thread of the endpoint while the engine computes;
and releases them. A step waits for some bookkeeping and never for a copy, one copy runs at a time, and peers hold a
share of the pool at most.

A reader must know a block's key, and with it the salt of its tenant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from foreword.blocks.layout import Layout, key_of
from foreword.blocks.pool import BlockPool
from foreword.events import BlocksRemoved, BlocksStored, Event
from foreword.futures import complete
from foreword.store.base import Name, Store
from foreword.transfer.frame_server import FrameServer, HeldBlock

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena

# One batch holds at most this part of the pool, and at most that part of the free blocks.
_HELD_SHARE: Final = 8
_FREE_SHARE: Final = 2
# Seconds between two updates of the eviction order: a long chain takes milliseconds of the engine's time.
_TOUCH_SECONDS: Final = 0.5

# Runs a function on the engine's thread between two steps; False if the engine has ended.
Post = Callable[[Callable[[], None]], bool]


class ChainIndex:
    """An observer that knows where in its chain each published block of the device is. On the engine's thread."""

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
        # Children are evicted before their parent, so an unknown parent is the root.
        place = self._places.get(event.parent)
        parent, depth = event.parent, 0 if place is None else place[1] + 1
        for key in event.keys:
            self._places[key] = parent, depth
            parent, depth = key, depth + 1

    def place(self, key: bytes) -> tuple[bytes, int] | None:
        """The key of the block before it, and its number in the chain."""
        return self._places.get(key)

    def before(self, key: bytes) -> list[bytes]:
        """Keys of the blocks before this one that are on the device, in chain order."""
        parents: list[bytes] = []
        place = self._places.get(key)
        while place is not None and place[0] in self._places:
            parents.append(place[0])
            place = self._places[place[0]]
        return parents[::-1]


class BlockServer(FrameServer):
    """Gives blocks of an engine: those in its memory tiers, and the published ones on its device.

    Args:
        layout: of the engine's blocks; blocks of another layout are missing.
        pool, chains: of the device. `chains` has observed the pool since it was empty.
        staging: slots for frames and copies out of the device, for this server only.
        memory: stores of this process's memory, the fastest first.
    """

    def __init__(
        self,
        layout: Layout,
        pool: BlockPool,
        chains: ChainIndex,
        post: Post,
        staging: StagingArena,
        memory: Sequence[Store] = (),
    ) -> None:
        super().__init__([layout], staging, memory, most=pool.num_blocks // _HELD_SHARE)
        self._pool = pool
        self._chains = chains
        self._post = post
        # Last blocks that were read of each chain since `_touch_chains`; for the engine's thread only.
        self._last_read: dict[bytes, None] = {}
        self._touching = False

    @property
    def settled(self) -> bool:
        """Whether the eviction order reflects all reads so far."""
        return not self._touching

    # On the endpoint's threads

    def _on_device(self, names: Sequence[Name]) -> int:
        return len(self._pool.lookup([key_of(name) for name in names]))

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> list[HeldBlock]:
        """Refer to the named blocks that are on the device; to none if the engine's thread does not do it in time."""
        answer: Future[list[HeldBlock]] = Future()

        def work() -> None:
            if answer.set_running_or_notify_cancel():  # unless the peer's deadline has passed
                complete(answer, lambda: self._take(wanted))

        if not self._post(work):
            return []
        try:
            return answer.result(max(deadline - time.monotonic(), 0))
        except TimeoutError:
            # Either the call has not started and is cancelled, or it is running now.
            return [] if answer.cancel() else answer.result()

    def _release_held(self, held: Sequence[HeldBlock]) -> None:
        self._post(lambda: self._give_back(held))

    # On the engine's thread

    def _take(self, wanted: Sequence[tuple[int, Name]]) -> list[HeldBlock]:
        pool = self._pool
        held: list[HeldBlock] = []
        spare = pool.num_free // _FREE_SHARE
        for number, name in wanted:
            key = key_of(name)
            blocks, place = pool.lookup([key]), self._chains.place(key)
            if not blocks or place is None:
                continue
            free = pool.count_free(blocks)
            if free > spare:
                continue  # the engine is about to need what is free
            spare -= free
            pool.share(blocks)
            held.append(HeldBlock(number, blocks[0], self._header(name, *place)))
        return held

    def _give_back(self, held: Sequence[HeldBlock]) -> None:
        """Release what was read. The blocks before it are marked as used later, once for many reads of a chain."""
        self._pool.release([one.block for one in held])
        first, last = held[0].header, held[-1].header
        self._last_read.pop(first.parent, None)
        self._last_read[last.key] = None
        if not self._touching:
            self._touching = True
            later = threading.Timer(_TOUCH_SECONDS, lambda: self._post(self._touch_chains))
            later.daemon = True
            later.start()

    def _touch_chains(self) -> None:
        """Mark the chains that were read as used up to their last block read: a parent must not be evicted before its child."""
        for key in self._last_read:
            chain = self._pool.lookup([*self._chains.before(key), key])
            self._pool.share(chain)
            self._pool.release(chain)
        self._last_read.clear()
        self._touching = False
