"""The block pool: a fixed number of blocks, their reference counts, their keys, and eviction.

A block is in one of three states. `BlockPool.check` verifies them:

    free, empty     no reference, no key        in the free list, towards the front
    free, cached    no reference, a key         in the free list; lookups find it; evicted when it is allocated
    in use          references, maybe a key     not in the free list, never evicted

Several blocks in use may have the same key. Of free blocks, at most one has a given key. `_index` maps a key to the block
that lookups return, `_copies` to the other blocks with that key, in the order in which they were published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.blocks.free_list import FreeList
from foreword.blocks.runs import consecutive_runs
from foreword.errors import ConfigError, IntegrityError

_MIN_RUN = 4


class BlockPool:
    """Reference counts, keys and eviction over `num_blocks` blocks. A block is only a number here; the pool holds no KV.

    Args:
        num_blocks: size of the pool.
        unfilled_first: evict freed blocks without a key before all others.
        on_removed: called with the keys that no block has any more.
    """

    __slots__ = (
        "_copies",
        "_free",
        "_index",
        "_keys",
        "_on_removed",
        "_owners",
        "_refs",
        "_unfilled_first",
        "num_blocks",
    )

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
        self._owners = [b""] * num_blocks  # of blocks with a key
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
        """The free list, from the block that is evicted next."""
        return list(self._free)

    def references(self, block: int) -> int:
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def find(self, key: bytes) -> int | None:
        """The block that lookups return for a key."""
        return self._index.get(key)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain of keys. Changes nothing."""
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
        """How many of `blocks` are free. Sharing the blocks reduces `num_free` by that number."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks from the front of the free list and evict what they cache. None if too few are free.

        Each block has one reference and no key. The order is that of the free list, except that longer descending runs are
        reversed: blocks that were freed together, last one first, become consecutive again.
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
                    self._promote_copy(key)
                else:
                    del index[key]  # a free block with a key is always the one in the index
                    removed.append(key)
        self._report_removed(removed)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. Free blocks leave the free list."""
        refs, remove = self._refs, self._free.remove
        for block in blocks:
            if not refs[block]:
                remove(block)
            refs[block] += 1

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], owner: bytes = b"") -> None:
        """Give full blocks in use their keys, so that lookups find them. A known key stays mapped to its first block. `owner`
        is the chain's root key, for `clear`."""
        block_keys, owners, index = self._keys, self._owners, self._index
        for block, key in zip(blocks, keys, strict=True):
            block_keys[block] = key
            owners[block] = owner
            first = index.setdefault(key, block)
            if first != block:
                self._copies.setdefault(key, []).append(block)

    def retract(self, blocks: Sequence[int]) -> None:
        """Remove the keys of blocks in use whose content is not what the key says."""
        removed = []
        for block in blocks:
            key = self._keys[block]
            if key is None:
                continue
            self._keys[block] = None
            if self._index[key] != block:
                self._drop_copy(key, block)
            elif self._unindex(key):
                removed.append(key)
        self._report_removed(removed)

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of each block of a block table, last block first, so that a chain is evicted from its end.

        No two blocks of the table may have the same key. Chained keys guarantee that for the table of one sequence.
        """
        refs, keys, index = self._refs, self._keys, self._index
        cached: list[int] = []
        empty: list[int] = []
        for block in reversed(table):
            left = refs[block] - 1
            refs[block] = left
            if left:
                continue
            key = keys[block]
            if key is not None and (index[key] == block or self._release_copy(key, block)):
                cached.append(block)
            elif self._unfilled_first:
                empty.append(block)
            else:
                cached.append(block)
        self._free.append(cached)
        if empty:
            self._free.push_front(empty)

    def _release_copy(self, key: bytes, block: int) -> bool:
        """Free a copy. True if it keeps its key.

        Of two free blocks with one key, the one used last keeps it: otherwise a parent could be evicted before its children.
        """
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
        copies = self._copies[key]
        copies.remove(block)
        if not copies:
            del self._copies[key]

    def _promote_copy(self, key: bytes) -> None:
        """Index the oldest copy in place of the block that had the key."""
        copies = self._copies[key]
        self._index[key] = copies.pop(0)
        if not copies:
            del self._copies[key]

    def _unindex(self, key: bytes) -> bool:
        """The indexed block has lost its key. True if no other block has it."""
        if key in self._copies:
            self._promote_copy(key)
            return False
        del self._index[key]
        return True

    def _report_removed(self, keys: list[bytes]) -> None:
        if keys and self._on_removed is not None:
            self._on_removed(keys)

    def in_use(self, owner: bytes) -> list[int]:
        """The published blocks of an owner that have references."""
        pairs = enumerate(zip(self._refs, self._keys, self._owners, strict=True))
        return [block for block, (refs, key, of) in pairs if refs and key is not None and of == owner]

    def clear(self, owner: bytes = b"") -> int:
        """Drop the cached content of all free blocks, or of those whose owners begin with `owner`, and return their number.
        Blocks in use keep their keys."""
        cached = [(block, key) for block in self._free if (key := self._keys[block]) is not None]
        dropped = [(block, key) for block, key in cached if self._owners[block].startswith(owner)]
        removed = []
        for block, key in dropped:
            self._keys[block] = None
            if self._unindex(key):
                removed.append(key)
        self._report_removed(removed)
        return len(dropped)

    def check(self) -> None:
        """Verify the invariants. Raises IntegrityError with the first that is broken. Costs O(num_blocks)."""
        free = list(self._free)
        _require(len(free) == len(set(free)) == len(self._free), "the free list has each block once")
        _require(all(count >= 0 for count in self._refs), "no reference count is negative")
        _require(
            set(free) == {block for block, count in enumerate(self._refs) if count == 0},
            "a block is in the free list exactly when it has no reference",
        )
        holders: dict[bytes, set[int]] = {}
        for block, key in enumerate(self._keys):
            if key is not None:
                holders.setdefault(key, set()).add(block)
        _require(holders.keys() == self._index.keys(), "the index has exactly the keys that blocks have")
        for key, blocks in holders.items():
            listed = [self._index[key], *self._copies.get(key, ())]
            _require(
                len(listed) == len(set(listed)) and set(listed) == blocks,
                "index and copies list each block of a key once",
            )
            free_holders = [block for block in listed if not self._refs[block]]
            _require(len(free_holders) <= 1, "at most one free block has a given key")
            _require(free_holders in ([], listed[:1]), "a free block with a key is the one in the index")
        _require(
            self._copies.keys() <= holders.keys() and all(self._copies.values()), "no empty or stray list of copies"
        )


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise IntegrityError(f"block pool: broken invariant: {invariant}")


def _reverse_descending_runs(blocks: list[int]) -> None:
    """Reverse every descending run of at least _MIN_RUN blocks, in place."""
    for low, high in consecutive_runs(blocks, step=-1):
        if high - low >= _MIN_RUN:
            blocks[low:high] = blocks[low:high][::-1]
