"""The block pool: a fixed number of blocks, their reference counts, their keys, and eviction.

A block is in one of three states. `BlockPool.check` verifies them:

    free, empty     no reference, no key        in the free list, taken first
    free, cached    no reference, a key         in its tenant's ring of the free list; lookups find it; may be evicted
    in use          references, maybe a key     not in the free list, never evicted

With one tenant the least recently used block is evicted. With several, `fair_share` chooses whose, so that a tenant that
floods the pool evicts its own blocks. A tenant has its cached blocks and those in use for its sequences.

Several blocks in use may have the same key. Of free blocks, at most one has a given key. `_index` maps a key to the block
that lookups return, `_copies` to the other blocks with that key, in the order in which they were published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from foreword.blocks.fair_share import TenantUse, choose, compared, share
from foreword.blocks.runs import consecutive_runs
from foreword.blocks.salt import TENANT_BYTES
from foreword.errors import ConfigError, IntegrityError

_MIN_RUN = 4
_IDLE_TURNS = 64  # pools full of allocations of others, after which a tenant without any has no share


class FreeList:
    """Free blocks in eviction order, as doubly linked rings: one for empty blocks, and one for each tenant.

    Block `b` is node `b` of two lists of links: an operation changes a few integers and creates no object. The nodes after the
    last block are sentinels, each of which closes a ring. Ring 0 is there from the start; blocks `0..num_blocks-1` are all in
    it at first, in ascending order. The list does not check whether a block is in it. `BlockPool` knows that from its
    reference counts.
    """

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
        """A ring, from front to back."""
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

    def push_front(self, blocks: Iterable[int], number: int = 0) -> None:
        """Add blocks at the front of a ring one after the other: the last one is evicted first."""
        following, previous, end = self._next, self._prev, self._end + number
        first = following[end]
        for block in blocks:
            following[block] = first
            previous[first] = block
            first = block
            self._length += 1
        following[end] = first
        previous[first] = end


class _Tenant:
    """The ring of a tenant's cached blocks, how many blocks it has, and when it last allocated one."""

    __slots__ = ("amount", "id", "ring", "used_at")

    def __init__(self, id: bytes, ring: int) -> None:
        self.id = id
        self.ring = ring
        self.amount = self.used_at = 0

    def usage(self) -> TenantUse:
        return TenantUse(self.amount, self.used_at)


class BlockPool:
    """Reference counts, keys and eviction over `num_blocks` blocks. A block is only a number here; the pool holds no KV.

    Args:
        num_blocks: size of the pool.
        on_removed: called with the keys that no block has any more.
    """

    __slots__ = (
        "_clock",
        "_copies",
        "_free",
        "_index",
        "_keys",
        "_mixed",
        "_on_removed",
        "_owners",
        "_refs",
        "_spare_rings",
        "_tenants",
        "_used",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, *, on_removed: Callable[[list[bytes]], None] | None = None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_removed = on_removed
        self._free = FreeList(num_blocks)
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._owners: list[bytes | None] = [None] * num_blocks  # None: empty, or in use only as the source of a copy
        self._used = [0] * num_blocks  # the clock when a cached block was freed
        self._clock = 0  # advances with each allocated block and each release
        self._tenants: dict[bytes, _Tenant] = {}
        self._spare_rings: list[int] = []
        self._mixed = False  # blocks were given to another owner: a table may have blocks of two tenants
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
        """The free list: empty blocks, then tenant by tenant the cached ones, from the block that is evicted next."""
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

    def allocate(self, count: int, owner: bytes = b"") -> list[int] | None:
        """Take `count` blocks, empty ones first, and evict what the others cache. None if too few are free.

        Each block has one reference and no key. `owner` is the root key of the chain: it names the tenant. The order is that of
        the free list, except that longer descending runs are reversed: blocks that were freed together, last one first, become
        consecutive again.
        """
        if count > len(self._free):
            return None
        if not count:
            return []
        self._clock += count
        tenant = self._tenants.get(owner[:TENANT_BYTES]) or self._add_tenant(owner[:TENANT_BYTES])
        tenant.amount += count
        tenant.used_at = self._clock
        blocks = self._free.take(count)
        if len(blocks) < count:
            self._evict(count - len(blocks), blocks)
        if count >= _MIN_RUN:
            _reverse_descending_runs(blocks)
        refs, keys, owners, index, copies = self._refs, self._keys, self._owners, self._index, self._copies
        removed: list[bytes] = []
        # The eviction: from here on no lookup finds the block. It is overwritten behind all copies out of it that are queued.
        for block in blocks:
            refs[block] = 1
            owners[block] = owner
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

    def _add_tenant(self, id: bytes) -> _Tenant:
        ring = self._spare_rings.pop() if self._spare_rings else self._free.add_ring()
        tenant = self._tenants[id] = _Tenant(id, ring)
        return tenant

    def _evict(self, count: int, blocks: list[int]) -> None:
        """Take `count` cached blocks out of the free list, from one tenant after the other, and append them to `blocks`."""
        while count:
            tenant, most = self._choose(count)
            taken = self._free.take(most, tenant.ring)
            blocks += taken
            count -= len(taken)
            self._disown(taken)

    def _choose(self, count: int) -> tuple[_Tenant, int]:
        """The tenant to evict from, and how many blocks, at most `count`, before another one may have to give some."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values())), count
        free, used, now, idle = self._free, self._used, self._clock, _IDLE_TURNS * self.num_blocks
        oldest: dict[_Tenant, int] = {}
        for group in (compared(self._tenants.values()), self._tenants.values()):
            fronts = ((one, free.front(one.ring)) for one in group)
            oldest = oldest or {one: used[front] for one, front in fronts if front is not None}
        usage = {one: one.usage() for one in self._tenants.values()}
        fair = share(usage.values(), self.num_blocks, now, idle)
        tenant = choose(oldest, usage, fair, now, idle)
        most = min(count, max(int(tenant.amount - fair), 1))
        together = 0
        for block in free.ring(tenant.ring):  # those that were freed at one time are taken at one time
            if together == most or used[block] != oldest[tenant]:
                break
            together += 1
        return tenant, max(together, 1)

    def _disown(self, blocks: Sequence[int]) -> None:
        """Blocks of one tenant are empty now."""
        if not blocks:
            return
        tenant = self._tenant_of(blocks[0])
        for block in blocks:
            self._owners[block] = None
        tenant.amount -= len(blocks)
        if not tenant.amount:
            del self._tenants[tenant.id]
            self._spare_rings.append(tenant.ring)

    def give(self, blocks: Sequence[int], owner: bytes) -> None:
        """Blocks in use that have no keys yet belong to another owner from now on."""
        if not blocks:
            return
        self._disown(blocks)
        tenant = self._tenants.get(owner[:TENANT_BYTES]) or self._add_tenant(owner[:TENANT_BYTES])
        tenant.amount += len(blocks)
        tenant.used_at = self._clock
        self._mixed = True
        for block in blocks:
            self._owners[block] = owner

    def _of_tenants(self, blocks: list[int]) -> Iterable[list[int]]:
        """The blocks of each tenant, in order."""
        if not self._mixed:
            return [blocks] if blocks else []
        parts: dict[_Tenant, list[int]] = {}
        for block in blocks:
            parts.setdefault(self._tenant_of(block), []).append(block)
        return parts.values()

    def _tenant_of(self, block: int) -> _Tenant:
        """The tenant of a block that has an owner."""
        owner = self._owners[block]
        assert owner is not None
        return self._tenants[owner[:TENANT_BYTES]]

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. Free blocks leave the free list."""
        refs, remove = self._refs, self._free.remove
        for block in blocks:
            if not refs[block]:
                remove(block)
            refs[block] += 1

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Give full blocks in use their keys, so that lookups find them. A known key stays mapped to its first block."""
        block_keys, index = self._keys, self._index
        for block, key in zip(blocks, keys, strict=True):
            block_keys[block] = key
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

        No two blocks of the table may have the same key, and all must have the same owner, but for those that were given to
        another one. Chained keys guarantee that for the table of one sequence.
        """
        refs, keys, index, owners = self._refs, self._keys, self._index, self._owners
        self._clock += 1
        used, now = self._used, self._clock
        cached: list[int] = []
        empty: list[int] = []
        for block in reversed(table):
            left = refs[block] - 1
            refs[block] = left
            if left:
                continue
            used[block] = now
            key = keys[block]
            if key is not None and (index[key] == block or self._release_copy(key, block)):
                cached.append(block)
            else:
                empty.append(block)
        for part in self._of_tenants(cached):
            self._free.append(part, self._tenant_of(part[0]).ring)
        if empty:
            self._free.push_front(empty)
            for part in self._of_tenants([block for block in empty if owners[block] is not None]):
                self._disown(part)

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
        self._disown([first])
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
        """The published blocks whose owners begin with `owner` that have references."""
        pairs = enumerate(zip(self._refs, self._keys, self._owners, strict=True))
        return [block for block, (refs, key, of) in pairs if refs and key is not None and (of or b"").startswith(owner)]

    def clear(self, owner: bytes = b"") -> int:
        """Drop the cached content of all free blocks, or of those whose owners begin with `owner`, and return their number.
        Blocks in use keep their keys."""
        cached = [(block, key) for block in self._free if (key := self._keys[block]) is not None]
        dropped = [(block, key) for block, key in cached if (self._owners[block] or b"").startswith(owner)]
        self._empty(dropped)
        return len(dropped)

    def retire(self, keys: Sequence[bytes], *, drop: bool) -> int:
        """Blocks of one chain, in order, that nothing will continue: those that are cached and not in use are evicted before
        all others of their tenant, the last one first. With `drop` they are empty at once. Returns their number."""
        found = ((self._index.get(key), key) for key in keys)
        free = [(block, key) for block, key in found if block is not None and not self._refs[block]]
        if drop:
            self._empty(free)
            return len(free)
        for block, _ in free:
            self._free.remove(block)
            self._used[block] = 0
            self._free.push_front((block,), self._tenant_of(block).ring)
        return len(free)

    def _empty(self, cached: Iterable[tuple[int, bytes]]) -> None:
        """Drop the content of free blocks, given with their keys."""
        removed = []
        for block, key in cached:
            self._keys[block] = None
            self._free.remove(block)
            self._free.append((block,))
            self._disown([block])
            if self._unindex(key):
                removed.append(key)
        self._report_removed(removed)

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
        for tenant in self._tenants.values():
            ring = list(self._free.ring(tenant.ring))
            owned = [*ring, *(block for block, refs in enumerate(self._refs) if refs)]
            owners = (self._owners[block] for block in owned)
            amount = sum(owner is not None and owner[:TENANT_BYTES] == tenant.id for owner in owners)
            _require(tenant.amount == amount > 0, "a tenant is counted with its blocks")
            _require(all(self._tenant_of(block) is tenant for block in ring), "a ring has one tenant's blocks")
            _require(
                [*map(self._used.__getitem__, ring)] == sorted(map(self._used.__getitem__, ring)), "a ring is in order"
            )


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise IntegrityError(f"block pool: broken invariant: {invariant}")


def _reverse_descending_runs(blocks: list[int]) -> None:
    """Reverse every descending run of at least _MIN_RUN blocks, in place."""
    for low, high in consecutive_runs(blocks, step=-1):
        if high - low >= _MIN_RUN:
            blocks[low:high] = blocks[low:high][::-1]
