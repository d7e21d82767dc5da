"""What other instances may read of this one: the blocks on its device and in its memory tiers (`peer://` in their stores).

Asking what is there (`locate`) reads the index of the device from another thread; it is a hint. Giving blocks (`get`) takes
references on the engine's thread, between two steps, when every block that has a name is computed; copies on a thread of the
endpoint's while the engine goes on; and gives the references back. So a step waits for some bookkeeping and never for a copy,
at most one copy runs at a time, and no more than a share of the pool is held for peers.

Whoever asks must know a block's key, and with it the salt of its tenant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.blocks.pool import BlockPool
from foreword.disaggregation.frames import FrameServer, HeldBlock
from foreword.events import BlocksRemoved, BlocksStored, Event
from foreword.store.base import Name, Store

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena

# Of the pool, the part that one batch may hold; and of the free blocks, the part that it may take.
_HELD_SHARE: Final = 8
_FREE_SHARE: Final = 2
# A long chain's bookkeeping takes milliseconds of the engine's time: so often at most.
_TIDY_SECONDS: Final = 0.5

# Runs a function on the engine's thread between two steps; False if the engine has ended.
Post = Callable[[Callable[[], None]], bool]


class ChainIndex:
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


class BlockServer(FrameServer):
    """What an engine gives: its memory tiers, and the named blocks of its device.

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
        chains: ChainIndex,
        post: Post,
        staging: StagingArena,
        memory: Sequence[Store] = (),
    ) -> None:
        super().__init__(layout, staging, memory, most=pool.num_blocks // _HELD_SHARE)
        self._pool = pool
        self._chains = chains
        self._post = post
        # The engine's thread's own: ends of chains that were read since the last `_tidy`.
        self._ends: dict[bytes, None] = {}
        self._tidying = False

    @property
    def tidy(self) -> bool:
        """Whether all that was read so far is counted as used."""
        return not self._tidying

    # On the endpoint's threads

    def _on_device(self, keys: Sequence[bytes]) -> int:
        return len(self._pool.lookup(keys))

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> list[HeldBlock]:
        """References to what the device has of these names; none if the engine does not come to it in time."""
        answer: Future[list[HeldBlock]] = Future()

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

    def _let_go(self, held: Sequence[HeldBlock]) -> None:
        self._post(lambda: self._give_back(held))

    # On the engine's thread

    def _take(self, wanted: Sequence[tuple[int, Name]]) -> list[HeldBlock]:
        pool = self._pool
        held: list[HeldBlock] = []
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
            held.append(HeldBlock(number, blocks[0], self._header(key, *place)))
        return held

    def _give_back(self, held: Sequence[HeldBlock]) -> None:
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
