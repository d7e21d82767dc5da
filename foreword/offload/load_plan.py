"""Plans of loads: the blocks with which a sequence continues from a later position. Pure.

A search says what the stores have (`search.Found`), `policy.LoadCosts.best` how much of it is worth loading: a `LoadPlan`. A
load takes the blocks of each KV group with their keys and the device blocks that they go into (`GroupBlocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foreword.offload.search import StoredGroup


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load that lets a sequence continue from `position` instead of `held` tokens.

    Attributes:
        places: the tier of each block by `(group, block)`: of those that are needed, and perhaps of more.
    """

    held: int
    position: int
    places: Mapping[tuple[int, int], int]

    def wanted(self, groups: Sequence[StoredGroup]) -> Iterator[tuple[int, int]]:
        """Group and tier of each block that is loaded."""
        for number, one in enumerate(groups):
            for block in one.needed(self.position, self.held):
                yield number, self.places[number, block]

    def blocks(
        self, groups: Sequence[StoredGroup], keys: Sequence[bytes], device_block: Callable[[int, int], int | None]
    ) -> Iterator[GroupBlocks]:
        """The blocks that are loaded, group by group and in the order of the chain, whose keys are `keys`.

        `device_block(group, block)` is the device block for a block; None where a window does not reach.
        """
        for number, one in enumerate(groups):
            wanted = [(block, device_block(number, block)) for block in one.needed(self.position, self.held)]
            pairs = [(block, into) for block, into in wanted if into is not None]
            if pairs:
                numbers, into = zip(*pairs, strict=True)
                places = tuple(self.places[number, block] for block in numbers)
                yield GroupBlocks(number, numbers, tuple(one.keys(keys, numbers)), places, into)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV group to be loaded.

    Attributes:
        numbers: index of each block in the chain.
        keys: keys of the blocks' frames, without a layout fingerprint: one per block, or per unit of its tokens.
        places: index of the tier that has each block.
        blocks: the device blocks.
    """

    group: int
    numbers: tuple[int, ...]
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]
