"""Find prefixes that several texts share: the inner nodes of the trie of their blocks, found by sorting."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """Full blocks that several texts begin with.

    Attributes:
        tokens: tokens of these blocks, `blocks * block_size` of them.
        blocks: number of full blocks.
        users: number of texts that begin with them.
        on_device: leading blocks that are cached on the device now.
    """

    tokens: array[int]
    blocks: int
    users: int
    on_device: int = 0


def common_prefixes(texts: Sequence[array[int]], block_size: int, limit: int) -> list[CommonPrefix]:
    """The `limit` common prefixes that save the most recomputation.

    A prefix is listed where texts diverge after it or where one of them ends. It saves the blocks that it adds to the next
    shorter common prefix, times `users - 1`. Costs O(n log n) comparisons of texts.
    """
    ordered = sorted(texts, key=array.tobytes)
    best = heapq.nlargest(limit, _sharing_groups(ordered, block_size), key=lambda group: (group.saved, group.blocks))
    return [
        CommonPrefix(ordered[group.first][: group.blocks * block_size], group.blocks, group.users) for group in best
    ]


class _SharingGroup(NamedTuple):
    """Neighbors in sorted order that share a prefix.

    Attributes:
        first: position of the first text.
        blocks: full blocks that all of them share.
        shared_wider: leading blocks of these that more texts share.
        users: number of texts.
    """

    first: int
    blocks: int
    shared_wider: int
    users: int

    @property
    def saved(self) -> int:
        """Blocks that sharing saves."""
        return (self.users - 1) * (self.blocks - self.shared_wider)


def _sharing_groups(ordered: Sequence[array[int]], block_size: int) -> Iterator[_SharingGroup]:
    """All maximal groups of at least two texts that share at least one block."""
    open_groups: list[tuple[int, int]] = []
    for end in range(1, len(ordered) + 1):
        depth = common_prefix_length(ordered[end - 1], ordered[end]) // block_size if end < len(ordered) else 0
        start = end - 1
        while open_groups and open_groups[-1][0] > depth:
            blocks, start = open_groups.pop()
            yield _SharingGroup(start, blocks, max(depth, open_groups[-1][0] if open_groups else 0), end - start)
        if depth and (not open_groups or open_groups[-1][0] < depth):
            open_groups.append((depth, start))


def common_prefix_length(first: array[int] | str, second: array[int] | str) -> int:
    """Number of leading items or characters that are equal. A binary search over comparisons of slices."""
    a, b = _sliceable(first), _sliceable(second)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sliceable(items: array[int] | str) -> memoryview | str:
    return items if isinstance(items, str) else memoryview(items)  # a slice of an array would be a copy
