"""LRU eviction over chains of blocks, leaf first. Bookkeeping over numbered slots only, without bytes.

A *leaf* is a block without a child in the store. Only leaves are evicted: the least recently used one, and among leaves
of equal last use the deepest. (A block behind a gap can never be found again, so a parent must outlive its children.)
When a leaf is evicted, its parent inherits its last use. A chain is therefore evicted as a whole, from its end, before
a chain used later.

A heap holds every leaf once, with the last use at the time it was pushed. An outdated entry is corrected when it
reaches the top. So a use costs O(1) and an eviction O(log n).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush

from foreword.errors import IntegrityError
from foreword.store.base import Name

_SLOT_BITS = 40
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_DEPTH_BITS = 24
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1


class ChainLru:
    """The blocks in a fixed number of slots, their parents, and their last uses.

    Args:
        slots: number of slots. Each takes about 60 bytes here, a block about 400 more.

    Attributes:
        evicted: name of the block that the last `allocate` evicted, None if it evicted none.
        in_use: number of readers and writers of each slot at this moment. A slot in use is not evicted.
    """

    __slots__ = (
        "_children",
        "_free",
        "_heap",
        "_next_unused",
        "_orphans",
        "_queued",
        "_used",
        "clock",
        "depths",
        "evicted",
        "in_use",
        "index",
        "names",
        "parents",
        "pinned",
        "slots",
    )

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.clock = 0
        self.evicted: Name | None = None
        self.index: dict[Name, int] = {}
        self.names: list[Name | None] = [None] * slots
        self.parents: list[Name | None] = [None] * slots
        self.depths = array("I", bytes(4 * slots))
        self.pinned = bytearray(slots)
        self.in_use = array("I", bytes(4 * slots))
        self._used = array("Q", bytes(8 * slots))
        self._children = array("I", bytes(4 * slots))
        self._orphans: dict[Name, int] = {}  # number of children of each block that is not in the store
        self._queued = bytearray(slots)
        self._heap: list[int] = []
        self._free: list[int] = []
        self._next_unused = 0  # slots from here on were never allocated

    def tick(self) -> int:
        """Advance the clock and return the time of the next use."""
        self.clock += 1
        return self.clock

    def allocate(self, before: int) -> int | None:
        """A free slot, preferably one used before, whose pages exist. If there is none, evict a block and return its slot.

        None if no block last used before the time `before` can be evicted.
        """
        self.evicted = None
        if self._free:
            return self._free.pop()
        if self._next_unused < self.slots:
            self._next_unused += 1
            return self._next_unused - 1
        return self._evict(before)

    def free(self, slot: int) -> None:
        """Make a slot available to `allocate` again. Its block was removed before."""
        self._free.append(slot)

    def add(self, slot: int, name: Name, parent: Name, depth: int, now: int) -> None:
        """Put a block into an allocated slot. Its parent may be added later or never (the root of a chain)."""
        self.index[name] = slot
        self.names[slot] = name
        self.depths[slot] = depth
        self._used[slot] = now
        self.pinned[slot] = 0
        self._children[slot] = self._orphans.pop(name, 0)
        self.parents[slot] = self._add_child(parent) if parent != name else None
        self._enqueue(slot)

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
        self._used[slot] = now

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
        if self._children[slot]:
            self._orphans[name] = self._children[slot]
        parent = self.parents[slot]
        if parent is None:
            return
        parent_slot = self.index.get(parent)
        if parent_slot is not None:
            self._children[parent_slot] -= 1
            self._used[parent_slot] = max(self._used[parent_slot], self._used[slot])
            self._enqueue(parent_slot)
        elif self._orphans[parent] == 1:
            del self._orphans[parent]
        else:
            self._orphans[parent] -= 1

    def _evict(self, before: int) -> int | None:
        """Remove the least recently used leaf that was last used before the time `before`. Returns its slot, or None.

        Skips pinned blocks and slots in use.
        """
        heap, skipped = self._heap, []
        victim = None
        while heap:
            entry = heap[0]
            slot = entry & _SLOT_MASK
            if self.names[slot] is None or self._children[slot] or self.pinned[slot]:
                heappop(heap)
                self._queued[slot] = 0
                continue
            current = self._heap_entry(slot)
            if current != entry:
                heappop(heap)
                heappush(heap, current)
                continue
            if self._used[slot] >= before:
                break
            heappop(heap)
            if self.in_use[slot]:
                skipped.append(entry)
                continue
            self._queued[slot] = 0
            self.evicted = self.names[slot]
            self.remove(slot)
            victim = slot
            break
        for entry in skipped:
            heappush(heap, entry)
        return victim

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
        self._queued[slot] = 1
        heappush(self._heap, self._heap_entry(slot))

    def _heap_entry(self, slot: int) -> int:
        """The sort key of a leaf: last use, then the deepest first, then the slot, packed into one integer."""
        depth = _MAX_DEPTH - min(self.depths[slot], _MAX_DEPTH)
        return ((self._used[slot] << _DEPTH_BITS) | depth) << _SLOT_BITS | slot
