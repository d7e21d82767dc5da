"""The free list: free blocks in eviction order, as doubly linked rings: one for empty blocks, and one for each tenant.

Block `b` is node `b` of two lists of links: an operation changes a few integers and creates no object. The nodes after the
last block are sentinels, each of which closes a ring. Ring 0 is there from the start. The list does not check whether a block
is in it. `BlockPool` knows that from its reference counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class FreeList:
    """Blocks `0..num_blocks-1`, all in ring 0 at first, in ascending order."""

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
        """Ring by ring, each from front (evicted next) to back."""
        for number in range(len(self._next) - self._end):
            yield from self.ring(number)

    def ring(self, number: int) -> Iterator[int]:
        """One ring, from front to back."""
        end = self._end + number
        node = self._next[end]
        while node != end:
            yield node
            node = self._next[node]

    def front(self, number: int) -> int | None:
        """The first block of a ring, None if it is empty."""
        node = self._next[self._end + number]
        return node if node < self._end else None

    def add_ring(self) -> int:
        """Make an empty ring and return its number."""
        sentinel = len(self._next)
        self._next.append(sentinel)
        self._prev.append(sentinel)
        return sentinel - self._end

    def take(self, most: int, number: int = 0) -> list[int]:
        """Remove up to `most` blocks from the front of a ring."""
        following, end = self._next, self._end + number
        node = following[end]
        taken: list[int] = []
        append = taken.append
        for _ in range(most):
            if node == end:
                break
            append(node)
            node = following[node]
        following[end] = node
        self._prev[node] = end
        self._length -= len(taken)
        return taken

    def remove(self, block: int) -> None:
        """Remove a block from any position of its ring."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._length -= 1

    def append(self, blocks: Sequence[int], number: int = 0) -> None:
        """Add blocks at the back of a ring in their order: the last one is evicted last."""
        following, previous, end = self._next, self._prev, self._end + number
        last = previous[end]
        for block in blocks:
            following[last] = block
            previous[block] = last
            last = block
        following[last] = end
        previous[end] = last
        self._length += len(blocks)

    def push_front(self, blocks: Iterable[int]) -> None:
        """Add blocks at the front of ring 0 one after the other: the last one is evicted first."""
        following, previous, end = self._next, self._prev, self._end
        first = following[end]
        for block in blocks:
            following[block] = first
            previous[first] = block
            first = block
            self._length += 1
        following[end] = first
        previous[first] = end
