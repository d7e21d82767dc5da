"""The share of a memory tier that loads are lent: never all of it, however many they are."""

from __future__ import annotations

import threading
from typing import Final

_PARTS: Final = 2  # loads are lent one of so many parts of a tier


class LentShare:
    """Slots that loads are lent. A load takes half of what is left, so another one finds some without waiting.

    A block is given in any case: a load that finds nothing left has one at a time. So the bound is a part of the tier, and a
    block for each stretch that is lent then.

    Args:
        size: bytes of the tier.
        most: bytes that a load is lent together at most.
    """

    def __init__(self, size: int, most: int) -> None:
        self._left = size // _PARTS
        self._most = most
        self._lock = threading.Lock()

    def take(self, wanted: int, stride: int, room: int) -> int:
        """How many of `wanted` slots of `stride` bytes a load is lent now: all of them, or at least one, and a multiple of
        `room` where they are more than that. `give` returns them."""
        with self._lock:
            count = max(min(wanted, min(self._left // 2, self._most) // stride), 1)
            if room < count < wanted:
                count -= count % room
            self._left -= count * stride
            return count

    def give(self, count: int, stride: int) -> None:
        with self._lock:
            self._left += count * stride
