"""Host memory between a device and everything off it: slots of one frame each, and which of them are free."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol


class Staging(Protocol):
    """Host memory with one slot per frame, and the copies between it and the device (`foreword.offload.copies.Staging`)."""

    slots: int
    block_bytes: int
    frame_bytes: int

    def buffer(self, slot: int) -> memoryview: ...
    def gather(self, blocks: Sequence[int], slots: Sequence[int]) -> None: ...
    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None: ...


class Slots:
    """The free slots of the staging arena, lowest first, so that what is taken together tends to lie in a row."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = sorted(slots)
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int] | None:
        with self._changed:
            if len(self._free) < count:
                return None
            return [heapq.heappop(self._free) for _ in range(count)]

    def wait_for(self, count: int, deadline: float) -> list[int] | None:
        """`count` slots, or None if the deadline passes first."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self._free) >= count, max(deadline - time.monotonic(), 0))
            return [heapq.heappop(self._free) for _ in range(count)] if enough else None

    def give(self, slots: Iterable[int]) -> None:
        with self._changed:
            for slot in slots:
                heapq.heappush(self._free, slot)
            self._changed.notify_all()

    @property
    def free(self) -> int:
        return len(self._free)
