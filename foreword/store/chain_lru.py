"""LRU eviction over chains of blocks, leaf first. Bookkeeping over numbered slots only, without bytes.

A *leaf* is a block without a child in the store. Only leaves are evicted: the least recently used one, and among leaves
of equal last use the deepest. (A block behind a gap can never be found again, so a parent must outlive its children.)
When a leaf is evicted, its parent inherits its last use. A chain is therefore evicted as a whole, from its end, before
a chain used later.

Each tenant has a heap that holds all of its leaves, with the last use at the time they were pushed. An outdated entry is
corrected or dropped when it reaches the top. So a use costs O(1) and an eviction O(log n). `fair_share` chooses the
tenant to evict from.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from foreword.blocks.fair_share import IDLE_SECONDS, TenantUse, choose, compared
from foreword.errors import IntegrityError
from foreword.store.base import Name

_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_DEPTH_BITS = 24
_MOST_OUTDATED = 1000
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1


class FairShare:
    """The share of each tenant, where all are too many to look at for each eviction: idle ones are counted when one more is
    idle, and once a minute, since other processes may use the same store."""

    def __init__(self, budget: int) -> None:
        self._budget, self._idle, self._counted_at, self._next = budget, 0, -IDLE_SECONDS, -math.inf

    def among(self, tenants: int, now: float, idle_since: Callable[[float], tuple[int, float]]) -> float:
        """The share among so many tenants. `idle_since` counts those of them that were not used after a time, and says when the
        first of the others was used last; infinity if there is none."""
        # The clock of an index that is made anew may be behind.
        if now >= self._next or not 0 <= now - self._counted_at < IDLE_SECONDS / 60:
            self._idle, active = idle_since(now - IDLE_SECONDS)
            self._counted_at, self._next = now, active + IDLE_SECONDS
        return self._budget / max(tenants - self._idle, 1)

    def note_end(self, used_at: float) -> None:
        """A tenant that was used last at this time is used again, or has no block any more: it is not idle from now on."""
        self._idle -= used_at <= self._counted_at - IDLE_SECONDS


class _Tenant:
    """The leaves of a tenant, and how much it uses."""

    __slots__ = ("heap", "slots", "used_at")

    def __init__(self) -> None:
        self.heap: list[int] = []
        self.slots = 0
        self.used_at = time.monotonic()


class ChainLru:
    """The blocks in a fixed number of slots, their parents, and their last uses.

    Args:
        slots: number of slots. Each takes about 60 bytes here, a block about 400 more.
        tenant_of: the tenant of a block by its name; by default all blocks have one tenant.
        quota: the most slots of a tenant; None: all.

    Attributes:
        evicted: name of the block that the last `allocate` evicted, None if it evicted none.
        in_use: number of readers and writers of each slot at this moment. A slot in use is not evicted. `last_used`: a tick.
    """

    __slots__ = (
        "_children",
        "_free",
        "_next_unused",
        "_orphans",
        "_queued",
        "_quota",
        "_share",
        "_tenant_of",
        "_tenants",
        "clock",
        "depths",
        "evicted",
        "in_use",
        "index",
        "last_used",
        "names",
        "parents",
        "pinned",
        "slots",
    )

    def __init__(
        self, slots: int, tenant_of: Callable[[Name], bytes] = lambda _: b"", quota: int | None = None
    ) -> None:
        self.slots = slots
        self._quota = slots if quota is None else quota
        self._share = FairShare(slots)
        self._tenant_of = tenant_of
        self._tenants: dict[bytes, _Tenant] = {}
        self.clock = 0
        self.evicted: Name | None = None
        self.index: dict[Name, int] = {}
        self.names: list[Name | None] = [None] * slots
        self.parents: list[Name | None] = [None] * slots
        self.depths = array("I", bytes(4 * slots))
        self.pinned = bytearray(slots)
        self.in_use = array("I", bytes(4 * slots))
        self.last_used = array("Q", bytes(8 * slots))
        self._children = array("I", bytes(4 * slots))
        self._orphans: dict[Name, int] = {}  # number of children of each block that is not in the store
        self._queued = bytearray(slots)
        self._free: list[int] = []
        self._next_unused = 0  # slots from here on were never allocated

    def tick(self) -> int:
        """Advance the clock and return the time of the next use."""
        self.clock += 1
        return self.clock

    def allocate(self, before: int, name: Name = b"") -> int | None:
        """A free slot, preferably one used before, whose pages exist. If there is none, evict a block and return its slot.

        None if no block last used before the time `before` can be evicted. `name` is that of the block to add.
        """
        self.evicted = None
        if self._quota < self.slots:
            tenant = self._tenants.get(adding := self._tenant_of(name))
            if tenant is not None and tenant.slots >= self._quota:
                return self._evict(before, adding, [adding])
        if self._free:
            return self._free.pop()
        if self._next_unused < self.slots:
            self._next_unused += 1
            return self._next_unused - 1
        return self._evict(before, self._tenant_of(name))

    def free(self, slot: int) -> None:
        """Make a slot available to `allocate` again. Its block was removed before."""
        self._free.append(slot)

    def add(self, slot: int, name: Name, parent: Name, depth: int, now: int, *, queue: bool = True) -> None:
        """Put a block into an allocated slot. Its parent may be added later or never (the root of a chain).

        `queue`: without it the block can be evicted after `enqueue` only: most blocks of a chain are no leaves then; and the
        caller notes that the tenant uses the store.
        """
        self.index[name] = slot
        self.names[slot] = name
        self.depths[slot] = depth
        self.last_used[slot] = now
        self.pinned[slot] = 0
        self._children[slot] = self._orphans.pop(name, 0)
        key = self._tenant_of(name)
        tenant = self._tenants.get(key)
        if tenant is None:
            tenant = self._tenants[key] = _Tenant()
        tenant.slots += 1
        if queue:
            self._use(tenant)
        self.parents[slot] = self._add_child(parent) if parent != name else None
        if queue and not self._children[slot]:
            self._push(slot, tenant)

    def enqueue(self, slots: Iterable[int]) -> None:
        """Let blocks be evicted that were added without."""
        children = self._children
        for slot in slots:
            if not children[slot]:
                self._enqueue(slot)

    def move(self, slot: int, parent: Name, depth: int) -> None:
        """Put a block, whose parent and depth were not known, behind its parent. Nothing if it was removed."""
        before, name = self.parents[slot], self.names[slot]
        if before != parent and name is not None:
            if before is not None:
                self._lose_child(before, slot)
            self.parents[slot] = self._add_child(parent) if parent != name else None
        self.depths[slot] = depth

    def _add_child(self, parent: Name) -> Name:
        """Count a child of `parent`. Returns the one object that represents its name, to save memory."""
        slot = self.index.get(parent)
        if slot is None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
            return parent
        self._children[slot] += 1
        return self.names[slot] or parent

    def touch(self, slot: int, now: int) -> None:
        """Note a use."""
        self.last_used[slot] = now

    def note_use(self, name: Name) -> None:
        """Note that the tenant of this block uses the store."""
        tenant = self._tenants.get(self._tenant_of(name))
        if tenant is not None:
            self._use(tenant)

    def _use(self, tenant: _Tenant) -> None:
        self._share.note_end(tenant.used_at)
        tenant.used_at = time.monotonic()

    def pin(self, slot: int, pinned: bool) -> None:
        self.pinned[slot] = pinned
        self._enqueue(slot)

    def remove(self, slot: int) -> None:
        """Remove the block in a slot. The caller frees the slot."""
        name = self.names[slot]
        if name is None:
            raise IntegrityError(f"memory store: slot {slot} is empty")
        del self.index[name]
        self.names[slot] = None
        self.pinned[slot] = 0
        self._queued[slot] = 0
        self._leave(self._tenant_of(name))
        if self._children[slot]:
            self._orphans[name] = self._children[slot]
        parent = self.parents[slot]
        if parent is not None:
            self._lose_child(parent, slot)

    def _lose_child(self, parent: Name, slot: int) -> None:
        """Count a child of `parent` less, the block in a slot: the parent was used when that was."""
        parent_slot = self.index.get(parent)
        if parent_slot is not None:
            self._children[parent_slot] -= 1
            self.last_used[parent_slot] = max(self.last_used[parent_slot], self.last_used[slot])
            self._enqueue(parent_slot)
        elif self._orphans[parent] == 1:
            del self._orphans[parent]
        else:
            self._orphans[parent] -= 1

    def _evict(self, before: int, tenant_to_add: bytes, only: Sequence[bytes] | None = None) -> int | None:
        """Remove the least recently used leaf that was last used before the time `before`. Returns its slot, or None.

        Skips pinned blocks and slots in use. `only`: the tenants to evict from; None: any.
        """
        oldest: dict[bytes, int] = {}
        for group in [only] if only else [compared(self._tenants), self._tenants]:
            for tenant in group:
                entry = self._oldest(tenant, before)
                if entry is not None:
                    oldest[tenant] = entry
            if oldest:
                break
        else:
            return None
        slot = oldest[self._choose(oldest, tenant_to_add)] & _SLOT_MASK
        self.evicted = self.names[slot]
        self.remove(slot)
        return slot

    def _choose(self, oldest: dict[bytes, int], tenant_to_add: bytes) -> bytes:
        if len(self._tenants) == 1:
            return next(iter(oldest))
        tenants, now = self._tenants, time.monotonic()
        usage = {one: TenantUse(tenants[one].slots + (one == tenant_to_add), tenants[one].used_at) for one in oldest}
        return choose(oldest, usage, self._share.among(len(tenants), now, self._idle_since), now)

    def _idle_since(self, used_at: float) -> tuple[int, float]:
        later = [one.used_at for one in self._tenants.values() if one.used_at > used_at]
        return len(self._tenants) - len(later), min(later, default=math.inf)

    def _oldest(self, tenant: bytes, before: int) -> int | None:
        """The entry of a tenant's least recently used leaf that can be evicted. It stays in the heap."""
        heap, skipped = self._tenants[tenant].heap, []
        found = None
        while heap:
            entry = heap[0]
            slot = entry & _SLOT_MASK
            name = self.names[slot]
            if name is None or self._tenant_of(name) != tenant:  # an entry of a block that was removed
                heappop(heap)
                continue
            if self._children[slot] or self.pinned[slot]:
                heappop(heap)
                self._queued[slot] = 0
                continue
            current = self._heap_entry(slot)
            if current != entry:
                heapreplace(heap, current)
                continue
            if self.last_used[slot] >= before:
                break
            if not self.in_use[slot]:
                found = entry
                break
            skipped.append(heappop(heap))
        for entry in skipped:
            heappush(heap, entry)
        return found

    def _leave(self, tenant: bytes) -> None:
        """Count one block less."""
        mine = self._tenants[tenant]
        mine.slots -= 1
        if not mine.slots:
            self._share.note_end(mine.used_at)
            del self._tenants[tenant]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Name]]:
        """Slots and names of the blocks in a range of slots."""
        for slot in range(start, min(stop, self._next_unused)):
            name = self.names[slot]
            if name is not None:
                yield slot, name

    def _enqueue(self, slot: int) -> None:
        """Push a leaf that can be evicted on the heap, unless it is there already."""
        if self._children[slot] or self.pinned[slot] or self._queued[slot]:
            return
        name = self.names[slot]
        if name is None:
            return
        self._push(slot, self._tenants[self._tenant_of(name)])

    def _push(self, slot: int, tenant: _Tenant) -> None:
        self._queued[slot] = 1
        heappush(tenant.heap, self._heap_entry(slot))
        if len(tenant.heap) > 2 * tenant.slots + _MOST_OUTDATED:
            self._rebuild(tenant)

    def _rebuild(self, tenant: _Tenant) -> None:
        """Drop the entries of blocks that were removed."""
        slots = {entry & _SLOT_MASK for entry in tenant.heap}
        tenant.heap = [self._heap_entry(slot) for slot in slots if self._is_queued_of(slot, tenant)]
        heapify(tenant.heap)

    def _is_queued_of(self, slot: int, tenant: _Tenant) -> bool:
        name = self.names[slot]
        return name is not None and bool(self._queued[slot]) and self._tenants.get(self._tenant_of(name)) is tenant

    def _heap_entry(self, slot: int) -> int:
        """The sort key of a leaf: last use, then the deepest first, then the slot, packed into one integer."""
        depth = _MAX_DEPTH - min(self.depths[slot], _MAX_DEPTH)
        return ((self.last_used[slot] << _DEPTH_BITS) | depth) << _SLOT_BITS | slot
