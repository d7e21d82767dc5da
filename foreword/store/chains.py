"""Which block of a memory store goes next: LRU over chains, tails before heads. Bookkeeping over numbered slots, no bytes.

A *leaf* is a block without a child here. Only leaves are evicted, the one used longest ago first, of those used at one time
the deepest (what lies behind a gap helps nobody); when it goes, its parent inherits its last use, so a chain goes as a whole,
from its end, before the chain that was used after it. A heap holds every
leaf once, with the use it had when it was pushed; an entry that is no longer true is mended when it comes up, so a use costs
O(1) and an eviction O(log n).
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
_DEEPEST = (1 << _DEPTH_BITS) - 1


class ChainLru:
    """Blocks in slots, who hangs on whom, and when each was last used.

    Args:
        slots: their number; each takes about 60 bytes here, a block another 400.
    """

    __slots__ = (
        "_children",
        "_free",
        "_fresh",
        "_heap",
        "_queued",
        "_used",
        "_waiting",
        "clock",
        "depths",
        "evicted",
        "held",
        "index",
        "names",
        "parents",
        "pinned",
        "slots",
    )

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.clock = 0
        self.evicted: Name = b""  # by the last `evict` that returned a slot
        self.index: dict[Name, int] = {}
        self.names: list[Name | None] = [None] * slots
        self.parents: list[Name | None] = [None] * slots
        self.depths = array("I", bytes(4 * slots))
        self.pinned = bytearray(slots)
        self.held = array("I", bytes(4 * slots))  # readers and writers at this moment: not to be evicted
        self._used = array("Q", bytes(8 * slots))
        self._children = array("I", bytes(4 * slots))
        self._waiting: dict[Name, int] = {}  # children of blocks that are not here
        self._queued = bytearray(slots)
        self._heap: list[int] = []
        self._free: list[int] = []
        self._fresh = 0  # slots from here on were never taken

    def tick(self) -> int:
        """The time of the next use."""
        self.clock += 1
        return self.clock

    def take(self) -> int | None:
        """A slot that nobody has, one whose pages were written before if there is one; None if all are taken."""
        if self._free:
            return self._free.pop()
        if self._fresh < self.slots:
            self._fresh += 1
            return self._fresh - 1
        return None

    def give_back(self, slot: int) -> None:
        """A slot that `remove` emptied may be taken again."""
        self._free.append(slot)

    def add(self, slot: int, name: Name, parent: Name, depth: int, now: int) -> None:
        """Put a block into a slot that was taken. The parent may come later, or never, as that of a chain's first block."""
        self.index[name] = slot
        self.names[slot] = name
        self.depths[slot] = depth
        self._used[slot] = now
        self.pinned[slot] = 0
        self._children[slot] = self._waiting.pop(name, 0)
        self.parents[slot] = self._join(parent) if parent != name else None
        self._queue(slot)

    def _join(self, parent: Name) -> Name:
        """Count a child of `parent`; returns the one object that stands for its name."""
        above = self.index.get(parent)
        if above is None:
            self._waiting[parent] = self._waiting.get(parent, 0) + 1
            return parent
        self._children[above] += 1
        return self.names[above] or parent

    def touch(self, slot: int, now: int) -> None:
        """Note a use."""
        self._used[slot] = now

    def pin(self, slot: int, pinned: bool) -> None:
        self.pinned[slot] = pinned
        self._queue(slot)

    def remove(self, slot: int) -> None:
        """Forget the block in a slot. The slot is not free before `give_back`."""
        name = self.names[slot]
        if name is None:
            raise IntegrityError(f"memory store: slot {slot} is empty")
        del self.index[name]
        self.names[slot] = None
        self.pinned[slot] = 0
        if self._children[slot]:
            self._waiting[name] = self._children[slot]
        parent = self.parents[slot]
        if parent is None:
            return
        above = self.index.get(parent)
        if above is not None:
            self._children[above] -= 1
            self._used[above] = max(self._used[above], self._used[slot])
            self._queue(above)
        elif self._waiting[parent] == 1:
            del self._waiting[parent]
        else:
            self._waiting[parent] -= 1

    def evict(self, before: int) -> int | None:
        """Remove the leaf used longest ago, and before the time `before`; returns its slot, None if there is none.

        Pinned blocks and held ones are passed over.
        """
        heap, busy = self._heap, []
        victim = None
        while heap:
            entry = heap[0]
            slot = entry & _SLOT_MASK
            if self.names[slot] is None or self._children[slot] or self.pinned[slot]:
                heappop(heap)
                self._queued[slot] = 0
                continue
            now = self._entry(slot)
            if now != entry:
                heappop(heap)
                heappush(heap, now)
                continue
            if self._used[slot] >= before:
                break
            heappop(heap)
            if self.held[slot]:
                busy.append(entry)
                continue
            self._queued[slot] = 0
            self.evicted = self.names[slot] or b""
            self.remove(slot)
            victim = slot
            break
        for entry in busy:
            heappush(heap, entry)
        return victim

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Name]]:
        """Slots and names of the blocks in a range of slots."""
        for slot in range(start, min(stop, self._fresh)):
            name = self.names[slot]
            if name is not None:
                yield slot, name

    def _queue(self, slot: int) -> None:
        """A leaf that can be evicted stands in the heap, once."""
        if self._children[slot] or self.pinned[slot] or self._queued[slot]:
            return
        self._queued[slot] = 1
        heappush(self._heap, self._entry(slot))

    def _entry(self, slot: int) -> int:
        """What stands in the heap for a leaf: last use, then depth downwards, then the slot."""
        depth = _DEEPEST - min(self.depths[slot], _DEEPEST)
        return ((self._used[slot] << _DEPTH_BITS) | depth) << _SLOT_BITS | slot

    def check(self) -> None:
        """Prove the invariants. Raises IntegrityError naming the first that does not hold. Takes O(slots)."""
        there = dict(self.blocks(0, self.slots))
        _hold(self.index == {name: slot for slot, name in there.items()}, "the index knows exactly the blocks in slots")
        _hold(not set(self._free) & there.keys(), "a free slot has no block")
        _hold(len(set(self._free)) == len(self._free), "a free slot is free once")
        counts: dict[Name, int] = {}
        for slot in there:
            parent = self.parents[slot]
            if parent is not None:
                counts[parent] = counts.get(parent, 0) + 1
        _hold(
            all(self._children[slot] == counts.get(name, 0) for slot, name in there.items()),
            "a block counts its children",
        )
        away = {name: count for name, count in counts.items() if name not in self.index}
        _hold(self._waiting == away, "children of absent blocks are counted")
        queued = [entry & _SLOT_MASK for entry in self._heap]
        _hold(len(set(queued)) == len(queued), "a slot stands in the heap once")
        _hold(set(queued) == {slot for slot in range(self.slots) if self._queued[slot]}, "the heap's slots are marked")
        leaves = {slot for slot in there if not self._children[slot] and not self.pinned[slot]}
        _hold(leaves <= set(queued), "every leaf that is not pinned stands in the heap")
        _hold(
            all(self._used[entry & _SLOT_MASK] >= entry >> (_SLOT_BITS + _DEPTH_BITS) for entry in self._heap),
            "no block was used before the time in the heap",
        )


def _hold(condition: bool, invariant: str) -> None:
    if not condition:
        raise IntegrityError(f"memory store: broken invariant: {invariant}")
