"""Free slots of a staging arena."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterable


class StagingSlots:
    """Free slots of a staging arena. The lowest ones are taken first, so that slots taken together tend to be consecutive."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = sorted(slots)
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None if fewer are free."""
        with self._changed:
            return self._pop(count) if len(self._free) >= count else None

    def wait_for(self, count: int, deadline: float) -> list[int] | None:
        """`count` slots, or None if fewer are free until the deadline."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self._free) >= count, max(deadline - time.monotonic(), 0))
            return self._pop(count) if enough else None

    def _pop(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, slots: Iterable[int]) -> None:
        """Return slots."""
        with self._changed:
            for slot in slots:
                heapq.heappush(self._free, slot)
            self._changed.notify_all()
