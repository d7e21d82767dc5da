"""Search in the stores for the longest prefix from which a model with several KV groups can continue."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from foreword.blocks.layout import block_names
from foreword.blocks.resume import KVGroup, alignment, longest_resumable
from foreword.store.base import Name
from foreword.store.tiered import TieredStore, TierSearch

# Blocks before a lookup whose names the stores get.
_BEFORE = 1024
# Blocks of windows and recurrent states are looked up in batches of this size, from the end of the prompt.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A KV group whose blocks are in the stores.

    Attributes:
        layouts: fingerprint of each rank's layout, or of each head unit's. A block is present if all its parts are.
        keys_per_block: block keys are made of this many times fewer tokens than a block of this group has.
        divided: every key of a block has a frame of its own, not only the last.
    """

    group: KVGroup
    layouts: tuple[bytes, ...]
    keys_per_block: int = 1
    divided: bool = False

    @property
    def frames(self) -> int:
        """Frames of a block in each layout."""
        return self.keys_per_block if self.divided else 1

    def keys(self, chain: Sequence[bytes], blocks: Iterable[int]) -> list[bytes]:
        """Keys of the frames of blocks, given the keys of the chain. A frame's key is that of the position at which it ends."""
        if self.keys_per_block == 1:
            return [chain[block] for block in blocks]
        ends = [(block + 1) * self.keys_per_block for block in blocks]
        return [key for end in ends for key in chain[end - self.frames : end]]

    def names(self, root: bytes, keys: Sequence[bytes]) -> list[Name]:
        """Names of the frames with these keys, in all layouts."""
        names = [block_names(layout, root, keys) for layout in self.layouts]
        return [name for part in zip(*names, strict=True) for name in part]

    def behind(self, chain: Sequence[bytes]) -> list[bytes]:
        """Keys of the frames with which a request continues behind a prefix, given the keys of the prefix."""
        position = len(chain) * self.group.block_size // self.keys_per_block
        return self.keys(chain, self.needed(position))

    def needed(self, position: int, held: int = 0) -> Sequence[int]:
        """The blocks that the group needs to continue from `position`, without those of the first `held` tokens, in the order
        of the chain."""
        first, size = -(-held // self.group.block_size), self.group.block_size
        if self.group.whole:
            return range(first, position // size)
        return [block for block in sorted(self.group.needed(position)) if block >= first]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        position: tokens after which the model can continue, with what it held and what the stores have.
        reach: tokens up to which the stores have all blocks of the groups that need every block. Where it is more than
            `position`, a window or a recurrent state was missing.
        places: the tier of each block that is to be loaded, by `(group, block)`.
        shorter: what can be loaded without the blocks of full attention in the slowest tier, in the two slowest ones, and so
            on, where that is another position.
        step: the model has one KV group with full attention: every position that is a multiple of this many tokens can be
            loaded too, with a part of `places`. 0: only `position` and those of `shorter`.
    """

    position: int
    reach: int
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    shorter: tuple[Found, ...] = ()
    step: int = 0


def find_resumable(
    store: TieredStore,
    groups: Sequence[StoredGroup],
    root: bytes,
    keys: Sequence[bytes],
    held: int,
    limit: int,
    search: TierSearch,
    *,
    inline: bool = False,
) -> Found:
    """Find the longest position up to `limit` tokens that the blocks of the first `held` tokens and the stores allow.

    `root` is the chain's root key, `keys` are those of its blocks, at least up to `limit`. Never raises: a store that fails
    has nothing, and a slow one has what it tells in time. With `inline`, only tiers that do not block are asked.
    """
    lookup = _Lookup(store, groups, root, keys, held, search, inline)
    kinds = [one.group for one in groups]
    step, whole = alignment(kinds), all(one.whole for one in kinds)
    limit -= limit % step
    for number, one in enumerate(kinds):
        if one.whole:
            limit = min(limit, lookup.run(number, limit) // step * step)
    reach = max(limit, held)

    def found(limit: int) -> Found:
        position = limit // step * step
        position = max(position if whole else longest_resumable(kinds, position, lookup.present), held)
        wanted = [(number, block) for number, one in enumerate(groups) for block in one.needed(position, held)]
        return Found(position, reach, {at: lookup.places[at] for at in wanted} if position > held else {})

    if whole and len(kinds) == 1:
        return Found(reach, reach, lookup.places, step=step)
    best = found(limit)
    shorter = {one.position: one for one in map(found, lookup.ends_by_tier(best.position))}
    return replace(best, shorter=tuple(one for one in shorter.values() if held < one.position < best.position))


class _Lookup:
    """A lookup of one chain in the stores, asked in batches."""

    def __init__(
        self,
        store: TieredStore,
        groups: Sequence[StoredGroup],
        root: bytes,
        keys: Sequence[bytes],
        held: int,
        search: TierSearch,
        inline: bool,
    ) -> None:
        self._store = store
        self._groups = groups
        self._root = root
        self._keys = keys
        self._held = held
        self._search = search
        self._inline = inline
        # Lookups that still share the time: one of each layout, and one for the groups that do not need every block.
        self._turns = sum(len(one.layouts) for one in groups if one.group.whole) + any(
            not one.group.whole for one in groups
        )
        self.places: dict[tuple[int, int], int] = {}

    def run(self, number: int, limit: int) -> int:
        """Tokens up to which a group has all blocks, from the start on."""
        one = self._groups[number]
        size = one.group.block_size
        blocks = range(self._held // size, limit // size)
        keys = one.keys(self._keys, blocks)
        ahead = self._keys_before(one, blocks.start)
        found: list[int] | None = None
        for layout in one.layouts if keys else ():
            names, before = self._names(layout, keys), self._names(layout, ahead)
            self._take_turn()
            places = self._store.locate(names, search=self._search, inline=self._inline, before=before)
            found = places if found is None or len(places) < len(found) else found[: len(places)]
        count = len(found or ()) // one.frames
        if one.frames > 1 and found:
            found = [max(found[at : at + one.frames]) for at in range(0, count * one.frames, one.frames)]
        self.places.update(zip(zip(itertools.repeat(number), blocks[:count]), found or (), strict=False))
        return (blocks.start + count) * size

    def ends_by_tier(self, limit: int) -> list[int]:
        """Tokens before `limit` up to which the groups with full attention need no block of the slowest tier that has some of
        theirs, of the two slowest ones, and so on."""
        ends: dict[int, int] = {}
        for (number, block), place in self.places.items():
            size = self._groups[number].group.block_size
            if self._groups[number].group.whole and (block + 1) * size <= limit:
                ends[place] = min(ends.get(place, limit), block * size)
        slower = sorted(ends, reverse=True)[:-1]
        return list(itertools.accumulate((ends[tier] for tier in slower), min))

    def _keys_before(self, group: StoredGroup, block: int) -> list[bytes]:
        """Keys of a group's last frames before a block."""
        return group.keys(self._keys, range(max(block - _BEFORE // group.frames, 0), block))

    def _names(self, layout: bytes, keys: Sequence[bytes]) -> list[bytes]:
        return block_names(layout, self._root, keys)

    def _take_turn(self) -> None:
        """The next lookup gets its part of the time: a slow store must not take that of the lookups that follow."""
        self._search.parts = max(self._turns, 1)
        self._turns -= 1

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
        keys = one.keys(self._keys, blocks)
        ahead = self._keys_before(one, blocks[0])
        self._search.parts = 1
        parts = [
            self._store.find(
                self._names(layout, keys),
                search=self._search,
                inline=self._inline,
                before=self._names(layout, ahead),
            )
            for layout in one.layouts
        ]
        for at, block in enumerate(blocks):
            places = [place for part in parts for place in part[at * one.frames : (at + 1) * one.frames]]
            self.places[number, block] = -1 if -1 in places else max(places)
