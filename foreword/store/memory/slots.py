"""Which block lies in which slot of a memory store's arena: lengths, uses, pins, and who holds a slot at this moment.

Bookkeeping only: no bytes are copied here. A slot that is being read or written is held; a block that is being written is in
the index, so that nobody writes it twice, but in `writing` too, so that nobody sees it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from foreword.store.base import Name, StoredBlock
from foreword.store.chains import ChainLru
from foreword.store.frame import Frame


class Slots:
    """What lies in the slots of an arena. Every method is called under the store's lock."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        count = size // slot_bytes
        self.slot_bytes = slot_bytes
        self.chains = ChainLru(count)
        self.writing: set[int] = set()
        self.bytes = 0
        self.pinned_bytes = 0
        self._pins = 0
        self._lengths = array("Q", bytes(8 * count))
        self._hits = array("I", bytes(4 * count))
        self._stored_at = array("d", bytes(8 * count))
        self._used_at = array("d", bytes(8 * count))
        self._leaving: set[int] = set()  # deleted while somebody read them

    def hold(self, names: Sequence[Name], buffers: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Slot and length of each name, held and noted as used; length 0 for what is missing or does not fit."""
        chains, lengths, writing = self.chains, self._lengths, self.writing
        find, held = chains.index.get, chains.held
        now, clock = chains.tick(), time.time()
        found = []
        for name, buffer in zip(names, buffers, strict=True):
            slot = find(name)
            if slot is None or slot in writing or lengths[slot] > buffer.nbytes:
                found.append((0, 0))
                continue
            held[slot] += 1
            chains.touch(slot, now)
            self._hits[slot] += 1
            self._used_at[slot] = clock
            found.append((slot, lengths[slot]))
        return found

    def let_go(self, slot: int) -> None:
        held = self.chains.held
        held[slot] -= 1
        if not held[slot] and slot in self._leaving:
            self._leaving.discard(slot)
            self.chains.give_back(slot)

    def touch(self, frames: Sequence[Frame], now: int) -> None:
        """What is there of frames that come, and what they hang on, is in use."""
        find = self.chains.index.get
        for one in frames:
            header = one.header
            for slot in (find(one.name), find(header.layout + header.parent)):
                if slot is not None:
                    self.chains.touch(slot, now)

    def begin(self, slot: int, one: Frame, now: int) -> None:
        """A slot that was taken gets a block that is about to be written."""
        header = one.header
        self.chains.add(slot, one.name, header.layout + header.parent, header.depth, now)
        self.chains.held[slot] = 1
        self.writing.add(slot)
        self._lengths[slot] = len(one.data)
        self._hits[slot] = 0
        self._stored_at[slot] = self._used_at[slot] = time.time()
        self.bytes += len(one.data)

    def publish(self, slot: int) -> None:
        """The block is whole."""
        self.writing.discard(slot)
        self.chains.held[slot] = 0

    def abandon(self, slot: int) -> None:
        """The block will not be written."""
        self.publish(slot)
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Forget a block; its slot is free once nobody reads it."""
        self._unpin(slot)
        self.chains.remove(slot)
        self.forget(slot)
        if self.chains.held[slot]:
            self._leaving.add(slot)
        else:
            self.chains.give_back(slot)

    def forget(self, slot: int) -> None:
        """The block that was evicted from a slot no longer counts."""
        self.bytes -= self._lengths[slot]

    def pin(self, slot: int, pinned: bool, limit: int) -> bool:
        """Whether it is as wanted now; no more than `limit` are pinned."""
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

    def entries(self, start: int, stop: int) -> list[StoredBlock]:
        """The blocks in a range of slots."""
        chains = self.chains
        return [
            StoredBlock(
                name,
                parent=(chains.parents[slot] or b"")[-32:],
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
