"""The free list: free blocks in eviction order, as a doubly linked list.

Block `b` is node `b` of two lists of links: an operation changes a few integers and creates no object. The node after the
last block is a sentinel that closes the ring. The list does not check whether a block is in it. `BlockPool` knows that from
its reference counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from foreword.errors import IntegrityError


class FreeList:
    """Blocks `0..num_blocks-1`, all free at first, in ascending order."""

    __slots__ = ("_end", "_length", "_next", "_prev")

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._length = num_blocks
        ring = list(range(num_blocks + 1))
        # Both lists share the integer objects of `ring`, which saves memory in large pools.
        self._next = ring[1:] + ring[:1]
        self._prev = ring[-1:] + ring[:-1]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """From front (evicted next) to back."""
        node = self._next[self._end]
        while node != self._end:
            yield node
            node = self._next[node]

    def take(self, count: int) -> list[int]:
        """Remove `count` blocks from the front. Raises IntegrityError if there are fewer."""
        if count > self._length:
            raise IntegrityError(f"free list: {count} blocks asked for, {self._length} are free")
        following, end = self._next, self._end
        node = following[end]
        taken: list[int] = []
        append = taken.append
        for _ in range(count):
            append(node)
            node = following[node]
        following[end] = node
        self._prev[node] = end
        self._length -= count
        return taken

    def remove(self, block: int) -> None:
        """Remove a block from any position."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._length -= 1

    def append(self, blocks: Sequence[int]) -> None:
        """Add blocks at the back in their order: the last one is evicted last."""
        following, previous, end = self._next, self._prev, self._end
        last = previous[end]
        for block in blocks:
            following[last] = block
            previous[block] = last
            last = block
        following[last] = end
        previous[end] = last
        self._length += len(blocks)

    def push_front(self, blocks: Iterable[int]) -> None:
        """Add blocks at the front one after the other: the last one is evicted first."""
        following, previous, end = self._next, self._prev, self._end
        first = following[end]
        for block in blocks:
            following[block] = first
            previous[first] = block
            first = block
            self._length += 1
        following[end] = first
        previous[first] = end
