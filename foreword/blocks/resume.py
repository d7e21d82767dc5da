"""Resumable positions: after how many tokens a cached prefix can be continued.

A model's layers form KV groups. Each group keeps KV in blocks of its own size. It continues from position `p` (the first `p`
tokens are cached) if it has:

    full attention       every block before p
    sliding window       the blocks with the last `span - 1` tokens before p, and those with the first `sinks` tokens
    chunked attention    the blocks of p's chunk before p; none if a chunk starts at p
    recurrent state      the state after p tokens, which is kept as block p / block_size - 1

A model can continue from `p` if all of its groups can. Positions are multiples of every group's block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

Present = Callable[[int, int], bool]


class GroupKind(StrEnum):
    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep KV alike.

    Attributes:
        block_size: tokens per block.
        span: tokens of the window, the current one included, or of a chunk.
        sinks: leading tokens that every token attends to besides its window.
    """

    kind: GroupKind
    block_size: int
    span: int = 0
    sinks: int = 0

    def needed(self, position: int) -> Iterator[int]:
        """Indexes of the blocks that the group needs to continue from `position`, the last one first."""
        stop = position // self.block_size
        if self.kind is GroupKind.STATE:
            return iter(range(stop - 1, max(stop - 2, -1), -1))
        start = self._first_token(position) // self.block_size
        sinks = min(-(-self.sinks // self.block_size), start) if self.kind is GroupKind.WINDOW else 0
        return chain(range(stop - 1, start - 1, -1), range(sinks - 1, -1, -1))

    def _first_token(self, position: int) -> int:
        if self.kind is GroupKind.WINDOW:
            return max(position - self.span + 1, 0)
        return position - position % self.span if self.kind is GroupKind.CHUNKED else 0

    @property
    def whole(self) -> bool:
        """Whether the group needs every block before a position."""
        return self.kind is GroupKind.FULL


def alignment(groups: Sequence[KVGroup]) -> int:
    """Resumable positions are multiples of this many tokens."""
    return math.lcm(*(group.block_size for group in groups))


def longest_resumable(groups: Sequence[KVGroup], limit: int, present: Present) -> int:
    """The last position up to `limit` tokens from which all groups can continue; 0 if there is none.

    `present(g, i)` tells whether block `i` of group `g` is there. It is asked about few blocks more than once.
    """
    step = alignment(groups)
    position = limit - limit % step
    for number, group in enumerate(groups):
        if group.whole:
            blocks = range(position // group.block_size)
            run = next((i for i in blocks if not present(number, i)), len(blocks))
            position = min(position, run * group.block_size // step * step)
    partial = [(number, group) for number, group in enumerate(groups) if not group.whole]
    while position:
        missing = next(_missing(partial, position, present), None)
        if missing is None:
            break
        # Every position between here and the missing block needs that block too.
        position = missing // step * step
    return position


def _missing(groups: Sequence[tuple[int, KVGroup]], position: int, present: Present) -> Iterator[int]:
    """First tokens of the missing blocks without which `position` is not resumable. A sink block that is missing rules out
    every position behind it."""
    for number, group in groups:
        for block in group.needed(position):
            if not present(number, block):
                yield block * group.block_size
