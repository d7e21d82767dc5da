"""The block pool: a fixed number of blocks, made once, and what each of them is at this moment (R1, R4 to R7).

A block is in one of three states, and `BlockPool.check` proves it:

    free, empty     no reference, no key        in the free list, towards its front
    free, cached    no reference, a key         in the free list, found by lookups, evicted when it is taken
    in use          references, maybe a key     not in the free list, never evicted

Several blocks in use may have the same key (R7); among free blocks a key stands once. `index` leads to the block that a
lookup finds, `copies` to the others, in the order in which they were filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.blocks.free_list import FreeList
from foreword.blocks.runs import consecutive_runs
from foreword.errors import ConfigError, IntegrityError

_MIN_RUN = 4


class BlockPool:
    """Reference counts, keys and eviction over `num_blocks` blocks. It holds no KV: a block is its number.

    Args:
        num_blocks: size of the pool.
        unfilled_first: blocks without a key go to the front of the free list (R6); off in R12's example.
        on_removed: called with the keys that no block holds any more, after each allocation that evicted some.
    """

    __slots__ = ("_copies", "_free", "_index", "_keys", "_on_removed", "_refs", "_unfilled_first", "num_blocks")

    def __init__(
        self,
        num_blocks: int,
        *,
        unfilled_first: bool = True,
        on_removed: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._unfilled_first = unfilled_first
        self._on_removed = on_removed
        self._free = FreeList(num_blocks)
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Distinct keys that a lookup can find."""
        return len(self._index)

    def free_blocks(self) -> list[int]:
        """The free list, next to be evicted first."""
        return list(self._free)

    def references(self, block: int) -> int:
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain. Changes nothing (R3)."""
        find = self._index.get
        found: list[int] = []
        append = found.append
        for key in keys:
            block = find(key)
            if block is None:
                break
            append(block)
        return found

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free: sharing them takes that many away from `num_free`."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks from the front of the free list, evicting what they cache; None if there are not as many.

        The blocks come with one reference each and without a key (R4, miss), in the order of the free list but for longer
        runs of descending numbers, which are turned around: a chain that was freed tail first lies in a row again.
        """
        if count > len(self._free):
            return None
        blocks = self._free.take(count)
        if count >= _MIN_RUN:
            _reverse_descending_runs(blocks)
        refs, keys, index, copies = self._refs, self._keys, self._index, self._copies
        removed: list[bytes] = []
        for block in blocks:
            refs[block] = 1
            key = keys[block]
            if key is not None:
                keys[block] = None
                if copies and key in copies:
                    self._promote(key)
                else:
                    del index[key]  # a free block with a key is always the one that the index names
                    removed.append(key)
        if removed and self._on_removed is not None:
            self._on_removed(removed)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; free ones leave the free list (R4, both kinds of hit)."""
        refs, remove = self._refs, self._free.remove
        for block in blocks:
            if not refs[block]:
                remove(block)
            refs[block] += 1

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Name blocks in use that are full from now on. A key that is known already keeps leading to its first block."""
        names, index = self._keys, self._index
        for block, key in zip(blocks, keys, strict=True):
            names[block] = key
            first = index.setdefault(key, block)
            if first != block:
                self._copies.setdefault(key, []).append(block)

    def retract(self, blocks: Sequence[int]) -> None:
        """Take the names of blocks in use away: what they hold is not, or will never be, what the key says."""
        removed = []
        for block in blocks:
            key = self._keys[block]
            if key is None:
                continue
            self._keys[block] = None
            if self._index[key] != block:
                self._drop_copy(key, block)
            elif self._lose(key):
                removed.append(key)
        if removed and self._on_removed is not None:
            self._on_removed(removed)

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a block table, the tail first, so that the tail is evicted first (R6)."""
        refs, keys, index = self._refs, self._keys, self._index
        cached: list[int] = []
        empty: list[int] = []
        for block in reversed(table):
            left = refs[block] - 1
            refs[block] = left
            if left:
                continue
            key = keys[block]
            if (key is not None and index[key] == block) or (key is not None and self._release_copy(key, block)):
                cached.append(block)
            elif self._unfilled_first:
                empty.append(block)
            else:
                cached.append(block)
        self._free.append(cached)
        if empty:
            self._free.push_front(empty)

    def _release_copy(self, key: bytes, block: int) -> bool:
        """A copy is no longer in use. Of two free blocks with one key the one used last stays, or a parent could be
        evicted before its children. True if `block` keeps the key."""
        first = self._index[key]
        self._drop_copy(key, block)
        if self._refs[first]:
            self._keys[block] = None
            return False
        self._index[key] = block
        self._keys[first] = None
        self._free.remove(first)
        self._free.push_front((first,))
        return True

    def _drop_copy(self, key: bytes, block: int) -> None:
        others = self._copies[key]
        others.remove(block)
        if not others:
            del self._copies[key]

    def _promote(self, key: bytes) -> None:
        """The block that the index names is lost; the oldest of its copies takes its place."""
        others = self._copies[key]
        self._index[key] = others.pop(0)
        if not others:
            del self._copies[key]

    def _lose(self, key: bytes) -> bool:
        """The block that the index names has lost its key. True if no other block has it."""
        if key in self._copies:
            self._promote(key)
            return False
        del self._index[key]
        return True

    def clear(self) -> int:
        """Forget all cached blocks that are free; returns how many. Blocks in use keep their keys."""
        dropped = [block for block in self._free if self._keys[block] is not None]
        removed = []
        for block in dropped:
            key = self._keys[block]
            assert key is not None
            self._keys[block] = None
            if self._lose(key):
                removed.append(key)
        if removed and self._on_removed is not None:
            self._on_removed(removed)
        return len(dropped)

    def check(self) -> None:
        """Prove the invariants. Raises IntegrityError naming the first that does not hold. Takes O(num_blocks)."""
        free = list(self._free)
        _hold(len(free) == len(set(free)) == len(self._free), "the free list has each block once")
        _hold(all(count >= 0 for count in self._refs), "no reference count is negative")
        _hold(
            set(free) == {block for block, count in enumerate(self._refs) if count == 0},
            "a block is in the free list exactly when nobody refers to it",
        )
        holders: dict[bytes, set[int]] = {}
        for block, key in enumerate(self._keys):
            if key is not None:
                holders.setdefault(key, set()).add(block)
        _hold(holders.keys() == self._index.keys(), "the index knows exactly the keys that blocks hold")
        for key, blocks in holders.items():
            named = [self._index[key], *self._copies.get(key, ())]
            _hold(
                len(named) == len(set(named)) and set(named) == blocks, "index and copies name a key's blocks once each"
            )
            _hold(sum(not self._refs[block] for block in blocks) <= 1, "among free blocks a key stands once")
            free_named = [block for block in named if not self._refs[block]]
            _hold(free_named in ([], named[:1]), "a free block with a key is the one that the index names")
        _hold(self._copies.keys() <= holders.keys() and all(self._copies.values()), "no empty or stray list of copies")


def _hold(condition: bool, invariant: str) -> None:
    if not condition:
        raise IntegrityError(f"block pool: broken invariant: {invariant}")


def _reverse_descending_runs(blocks: list[int]) -> None:
    """Reverse every descending run of at least _MIN_RUN blocks, in place."""
    for low, high in consecutive_runs(blocks, step=-1):
        if high - low >= _MIN_RUN:
            blocks[low:high] = blocks[low:high][::-1]
