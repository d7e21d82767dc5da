"""Blocks that a tier does not get yet: a faster tier has them, and what is deleted meanwhile is never written.

A tier with `hold=BYTES` takes what it is given as a promise. When more than that many bytes wait, the oldest are read from the
faster tiers and written; so are all of them when the store is closed. A process that is killed loses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from foreword.store.base import Name
from foreword.store.frame import Frame


class DeferredWrites:
    """Blocks that wait for one tier. Not thread-safe.

    Args:
        most: bytes that may wait.
        counts: gets, by `unneeded`, how many blocks were deleted before they were written.
    """

    def __init__(self, most: int, counts: Counter[str]) -> None:
        self._most, self._counts = most, counts
        self._sizes: dict[Name, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, frames: Sequence[Frame]) -> None:
        """Let these blocks wait, behind those that wait already."""
        for frame in frames:
            self._bytes += len(frame.data) - self._sizes.get(frame.name, 0)
            self._sizes[frame.name] = len(frame.data)

    def take(self, count: int, *, everything: bool = False) -> dict[Name, int]:
        """At most `count` of the oldest, with their sizes: as many as wait beyond the bound."""
        taken: dict[Name, int] = {}
        for name, size in self._sizes.items():
            if len(taken) == count or (self._bytes <= self._most and not everything):
                break
            taken[name] = size
            self._bytes -= size
        for name in taken:
            del self._sizes[name]
        return taken

    def drop(self, chosen: Callable[[Name], bool]) -> None:
        """Drop these blocks, which are not needed."""
        names = [name for name in self._sizes if chosen(name)]
        self._bytes -= sum(self._sizes.pop(name) for name in names)
        if names:
            self._counts["unneeded"] += len(names)
