"""Slots of a staging arena: the free ones, and those that reads of stores use, also when a read hangs."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from foreword.store.tiered import FetchedBlock, TieredStore

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena
    from foreword.store.base import Name
    from foreword.store.tier_threads import TierCall

_SHARE: Final = 2  # reads of stores that may block use at most one in this number of slots directly


def _until(deadline: float) -> float:
    """Seconds, within what a condition takes."""
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


class StagingSlots:
    """Free slots of a staging arena. The lowest ones are taken first, so that slots taken together tend to be consecutive.

    Attributes:
        changed: guards the free slots, and what readers count of the slots that they have. Nothing else is done under it.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = sorted(slots)
        self.changed = threading.Condition()

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None if fewer are free."""
        with self.changed:
            return self._pop(count) if len(self._free) >= count else None

    def wait_for(self, count: int, deadline: float) -> list[int] | None:
        """`count` slots, or None if fewer are free until the deadline."""
        with self.changed:
            enough = self.changed.wait_for(lambda: len(self._free) >= count, _until(deadline))
            return self._pop(count) if enough else None

    def wait_for_room(self, count: int, deadline: float) -> None:
        """Wait until `count` slots are free, or the deadline has passed."""
        with self.changed:
            self.changed.wait_for(lambda: len(self._free) >= count, _until(deadline))

    def _pop(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, slots: Iterable[int]) -> None:
        """Return slots."""
        with self.changed:
            for slot in slots:
                heapq.heappush(self._free, slot)
            self.changed.notify_all()


class SlotReader:
    """Reads blocks into staging slots.

    A store that may block writes into the slots directly while no read is hung and enough slots are left for other reads;
    else it reads into memory of its own, and the blocks are copied. So hung reads never take all slots. A slot that a hung
    read has is free again when the read returns.
    """

    def __init__(self, store: TieredStore, staging: StagingArena, pool: StagingSlots, slots: int) -> None:
        self._store = store
        self._staging = staging
        self._pool = pool
        self._limit = max(slots // _SHARE, 1)
        self._direct = self._hung = 0  # slots; under the pool's lock

    def read(
        self, names: Sequence[Name], slots: Sequence[int], *, deadline: float, blocking: bool
    ) -> tuple[list[FetchedBlock | None], set[int]]:
        """Read one block into each slot. Returns what was read, and the slots that are not to be given back to the pool.

        `blocking`: a store that may block is expected to have some of the blocks.
        """
        kept: set[int] = set()

        def late(positions: Sequence[int], call: TierCall[Any]) -> None:
            hung = [slots[i] for i in positions]
            kept.update(hung)
            self._change(hung=len(hung))
            call.when_returned(lambda: self._return(hung))

        buffers = [self._staging.buffer(slot) for slot in slots]
        direct = len(slots) if blocking else 0
        if not self._may_write(direct):
            return self._store.fetch(names, buffers, deadline=deadline), kept
        try:
            return self._store.fetch(names, buffers, deadline=deadline, on_late=late), kept
        finally:
            self._change(direct=-direct)

    def _may_write(self, count: int) -> bool:
        with self._pool.changed:
            if self._hung or self._direct + count > self._limit:
                return False
            self._direct += count
            return True

    def _change(self, *, direct: int = 0, hung: int = 0) -> None:
        with self._pool.changed:
            self._direct += direct
            self._hung += hung

    def _return(self, slots: Sequence[int]) -> None:
        self._change(hung=-len(slots))
        self._pool.give(slots)
