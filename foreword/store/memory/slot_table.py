"""The index of a memory store: which block is in which slot of the arena, with lengths, uses and pins.

A slot that is being read or written is *in use*. A block that is being written is in the index, so no other thread
writes it too, and in `writing`, so no thread reads it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from foreword.blocks.fair_share import tenant_of
from foreword.blocks.layout import PREFIX_BYTES
from foreword.store.base import BAD, MISSING, Name, StoredBlock
from foreword.store.chain_lru import ChainLru
from foreword.store.frame import Frame


class SlotTable:
    """The slots of an arena, none if `slot_bytes` is 0. All methods are called under the store's lock.

    Args:
        quota: bytes that a tenant may have; None: all.

    Attributes:
        writing: slots whose block is being written.
    """

    def __init__(self, size: int, slot_bytes: int, quota: int | None = None) -> None:
        count = size // slot_bytes if slot_bytes else 0
        self.slot_bytes = slot_bytes
        self.chains = ChainLru(
            count, tenant_of, None if quota is None or not slot_bytes else max(quota // slot_bytes, 1)
        )
        self.writing: set[int] = set()
        self.bytes = 0
        self.pinned_bytes = 0
        self._pins = 0
        self._lengths = array("Q", bytes(8 * count))
        self._hits = array("I", bytes(4 * count))
        self._stored_at = array("d", bytes(8 * count))
        self._used_at = array("d", bytes(8 * count))
        self._deleted: set[int] = set()  # deleted while in use: freed by the last reader

    def acquire(self, names: Sequence[Name], buffers: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Slot and length of each name, or (0, MISSING or BAD). Marks the slots as in use and notes a use."""
        chains, lengths, writing = self.chains, self._lengths, self.writing
        find, in_use = chains.index.get, chains.in_use
        now, clock = chains.tick(), time.time()
        found = []
        if names:
            chains.note_use(names[0])
        for name, buffer in zip(names, buffers, strict=True):
            slot = find(name)
            if slot is None or slot in writing:
                found.append((0, MISSING))
                continue
            if lengths[slot] > buffer.nbytes:
                found.append((0, BAD))
                continue
            in_use[slot] += 1
            chains.touch(slot, now)
            self._hits[slot] += 1
            self._used_at[slot] = clock
            found.append((slot, lengths[slot]))
        return found

    def release(self, slot: int) -> None:
        """End a use that `acquire` began."""
        in_use = self.chains.in_use
        in_use[slot] -= 1
        if not in_use[slot] and slot in self._deleted:
            self._deleted.discard(slot)
            self.chains.free(slot)

    def touch(self, frames: Sequence[Frame], now: int) -> None:
        """Note a use of the blocks of `frames` that are present, and of their parents."""
        find = self.chains.index.get
        for one in frames:
            header = one.header
            for slot in (find(one.name), find(header.parent_name)):
                if slot is not None:
                    self.chains.touch(slot, now)

    def allocate(self, now: int, name: Name) -> int | None:
        """A slot for a new block. Evicts the block in it if no slot is free (`chains.evicted`)."""
        slot = self.chains.allocate(now, name)
        if slot is not None and self.chains.evicted is not None:
            self.bytes -= self._lengths[slot]
        return slot

    def begin_write(self, slot: int, name: Name, one: Frame, now: int) -> None:
        """Enter a block that is about to be written into an allocated slot."""
        header = one.header
        self.chains.add(slot, name, header.parent_name, header.depth, now)
        self.chains.in_use[slot] = 1
        self.writing.add(slot)
        self._lengths[slot] = len(one.data)
        self._hits[slot] = 0
        self._stored_at[slot] = self._used_at[slot] = time.time()
        self.bytes += len(one.data)

    def publish(self, slot: int) -> None:
        """Make a block visible: it is completely written."""
        self.writing.discard(slot)
        self.chains.in_use[slot] = 0

    def abort_write(self, slot: int) -> None:
        self.publish(slot)
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Remove a block. Its slot is freed when no reader uses it."""
        self._unpin(slot)
        self.chains.remove(slot)
        self.bytes -= self._lengths[slot]
        if self.chains.in_use[slot]:
            self._deleted.add(slot)
        else:
            self.chains.free(slot)

    def pin(self, slot: int, pinned: bool, limit: int) -> bool:
        """Pin or unpin a block, with at most `limit` pins. Returns whether it has the wanted state now."""
        if not pinned:
            self._unpin(slot)
            return True
        if self.chains.pinned[slot]:
            return True
        if self._pins >= limit:
            return False
        self.chains.pin(slot, True)
        self._pins += 1
        self.pinned_bytes += self._lengths[slot]
        return True

    def _unpin(self, slot: int) -> None:
        if self.chains.pinned[slot]:
            self.chains.pin(slot, False)
            self._pins -= 1
            self.pinned_bytes -= self._lengths[slot]

    def blocks(self, start: int, stop: int) -> list[StoredBlock]:
        """The published blocks in a range of slots."""
        chains = self.chains
        return [
            StoredBlock(
                name,
                parent=(chains.parents[slot] or b"")[PREFIX_BYTES:],
                depth=chains.depths[slot],
                size=self._lengths[slot],
                stored_at=self._stored_at[slot],
                used_at=self._used_at[slot],
                hits=self._hits[slot],
                pinned=bool(chains.pinned[slot]),
            )
            for slot, name in chains.blocks(start, stop)
            if slot not in self.writing
        ]
