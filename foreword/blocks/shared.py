"""Which beginnings do texts share? The inner nodes of the trie of their blocks, found by sorting."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.blocks.history import common_prefix


@dataclass(frozen=True, slots=True)
class SharedChain:
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


def shared_chains(texts: Sequence[array[int]], block_size: int, limit: int) -> list[SharedChain]:
    """The `limit` chains whose sharing is worth most: `(users - 1) * blocks` blocks need not be computed again.

    A chain is listed where texts part after it, or where one of them ends: the chains that one text goes through are listed
    each with its own users. Costs O(n log n) comparisons of texts.
    """
    ordered = sorted(texts, key=array.tobytes)
    found = [SharedChain(ordered[first][: blocks * block_size], blocks, users)
             for first, blocks, users in _intervals(ordered, block_size)]  # fmt: skip
    found.sort(key=lambda chain: ((chain.users - 1) * chain.blocks, chain.blocks), reverse=True)
    return found[:limit]


def _intervals(ordered: Sequence[array[int]], block_size: int) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of neighbours with a common beginning: number of the first, full blocks in common, length of the run."""
    open_runs: list[tuple[int, int]] = []
    for end in range(1, len(ordered) + 1):
        depth = common_prefix(ordered[end - 1], ordered[end]) // block_size if end < len(ordered) else 0
        start = end - 1
        while open_runs and open_runs[-1][0] > depth:
            blocks, start = open_runs.pop()
            yield start, blocks, end - start
        if depth and (not open_runs or open_runs[-1][0] < depth):
            open_runs.append((depth, start))
