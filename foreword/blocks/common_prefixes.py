"""Which beginnings do texts share? The inner nodes of the trie of their blocks, found by sorting."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.blocks.miss_history import common_prefix_length


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A chain of full blocks with which several texts begin.

    Attributes:
        tokens: its tokens, `blocks * block_size` of them.
        blocks: full blocks.
        users: texts that begin with it.
        on_device: its leading blocks that a lookup on the device finds now.
    """

    tokens: array[int]
    blocks: int
    users: int
    on_device: int = 0


def common_prefixes(texts: Sequence[array[int]], block_size: int, limit: int) -> list[CommonPrefix]:
    """The `limit` chains whose sharing is worth most: blocks that a chain adds to the one it continues, times `users - 1`,
    need not be computed again because of it.

    A chain is listed where texts part after it, or where one of them ends. Costs O(n log n) comparisons of texts.
    """
    ordered = sorted(texts, key=array.tobytes)
    best = heapq.nlargest(limit, _runs(ordered, block_size), key=lambda run: (run.worth, run.blocks))
    return [CommonPrefix(ordered[run.first][: run.blocks * block_size], run.blocks, run.users) for run in best]


class _Run(NamedTuple):
    """Neighbours with a common beginning: number of the first, full blocks in common, how many of these are in common with
    more texts, length of the run."""

    first: int
    blocks: int
    wider: int
    users: int

    @property
    def worth(self) -> int:
        return (self.users - 1) * (self.blocks - self.wider)


def _runs(ordered: Sequence[array[int]], block_size: int) -> Iterator[_Run]:
    """All maximal runs of at least two texts and one block."""
    open_runs: list[tuple[int, int]] = []
    for end in range(1, len(ordered) + 1):
        depth = common_prefix_length(ordered[end - 1], ordered[end]) // block_size if end < len(ordered) else 0
        start = end - 1
        while open_runs and open_runs[-1][0] > depth:
            blocks, start = open_runs.pop()
            yield _Run(start, blocks, max(depth, open_runs[-1][0] if open_runs else 0), end - start)
        if depth and (not open_runs or open_runs[-1][0] < depth):
            open_runs.append((depth, start))
