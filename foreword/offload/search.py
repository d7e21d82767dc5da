"""Search in the stores for the longest prefix from which a model with several KV groups can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.blocks.resume import KVGroup, alignment, longest_resumable
from foreword.store.base import Name
from foreword.store.tiered import TieredStore

# Blocks of windows and recurrent states are looked up in batches of this size, from the end of the prompt.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A KV group whose blocks are in the stores.

    Attributes:
        layouts: fingerprint of each rank's layout. A block is present if every rank's part is.
        keys_per_block: block keys are made of this many times fewer tokens than a block of this group has.
    """

    group: KVGroup
    layouts: tuple[bytes, ...]
    keys_per_block: int = 1

    def key(self, keys: Sequence[bytes], block: int) -> bytes:
        """The key of a block: that of the position at which it ends."""
        return keys[(block + 1) * self.keys_per_block - 1]

    def name(self, keys: Sequence[bytes], block: int, rank: int = 0) -> Name:
        return self.layouts[rank] + self.key(keys, block)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        position: tokens after which the model can continue, with what it held and what the stores have.
        reach: tokens up to which the stores have all blocks of the groups that need every block. Where it is more than
            `position`, a window or a recurrent state was missing.
        places: the tier of each block that is to be loaded, by `(group, block)`.
    """

    position: int
    reach: int
    places: dict[tuple[int, int], int] = field(default_factory=dict)


def find_resumable(
    store: TieredStore, groups: Sequence[StoredGroup], keys: Sequence[bytes], held: int, limit: int, *, deadline: float
) -> Found:
    """Find the longest position up to `limit` tokens that the blocks of the first `held` tokens and the stores allow.

    `keys` are those of the chain's blocks, at least up to `limit`. Never raises: a store that fails has nothing.
    """
    lookup = _Lookup(store, groups, keys, held, deadline)
    kinds = [one.group for one in groups]
    step = alignment(kinds)
    limit -= limit % step
    for number, one in enumerate(kinds):
        if one.whole:
            limit = min(limit, lookup.run(number, limit) // step * step)
    position = max(longest_resumable(kinds, limit, lookup.present), held)
    wanted = [
        (number, block)
        for number, one in enumerate(kinds)
        for block in sorted(one.needed(position))
        if position > held and block * one.block_size >= held
    ]
    return Found(position, max(limit, held), {at: lookup.places[at] for at in wanted})


class _Lookup:
    """What the stores have of one chain, asked in batches."""

    def __init__(
        self, store: TieredStore, groups: Sequence[StoredGroup], keys: Sequence[bytes], held: int, deadline: float
    ) -> None:
        self._store = store
        self._groups = groups
        self._keys = keys
        self._held = held
        self._deadline = deadline
        self.places: dict[tuple[int, int], int] = {}

    def run(self, number: int, limit: int) -> int:
        """Tokens up to which a group has all blocks, from the start on."""
        one = self._groups[number]
        size = one.group.block_size
        blocks = range(self._held // size, limit // size)
        found: list[int] | None = None
        for rank in range(len(one.layouts)):
            names = [one.name(self._keys, block, rank) for block in blocks]
            places = self._store.locate(names, deadline=self._deadline) if names else []
            found = places if found is None or len(places) < len(found) else found[: len(places)]
        for block, place in zip(blocks, found or (), strict=False):
            self.places[number, block] = place
        return (blocks.start + len(found or ())) * size

    def present(self, number: int, block: int) -> bool:
        one = self._groups[number]
        if block * one.group.block_size < self._held:
            return True
        place = self.places.get((number, block))
        if place is None and one.group.whole:
            return False
        if place is None:
            self._ask(number, block)
        return self.places[number, block] >= 0

    def _ask(self, number: int, last: int) -> None:
        """Look up a block and those before it."""
        one = self._groups[number]
        first = max(last + 1 - _BATCH, self._held // one.group.block_size)
        blocks = [block for block in range(first, last + 1) if (number, block) not in self.places]
        by_rank = []
        for rank in range(len(one.layouts)):
            names = [one.name(self._keys, block, rank) for block in blocks]
            by_rank.append(self._store.find(names, deadline=self._deadline))
        for block, places in zip(blocks, zip(*by_rank, strict=True), strict=True):
            self.places[number, block] = -1 if -1 in places else max(places)
