"""Gives other instances sealed frames of blocks, from this process's memory tiers and from its device.

`FrameServer` reads the memory tiers. A subclass decides which blocks of the device may be read, and holds them during the copy.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import PREFIX_BYTES, Layout, key_of
from foreword.errors import StoreError
from foreword.offload.slots import StagingSlots
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, RAW, Header, seal
from foreword.transfer.wire_format import Buffer

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena

# Bounds of one batch: what is read and copied at a time.
BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 512
ARENA_BYTES: Final = 4 * BATCH_BYTES


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block of the device that does not change while it is held. `number` is the position of its name in the batch."""

    number: int
    block: int
    header: Header


@dataclass(frozen=True, slots=True)
class ServedStatus:
    """Blocks since the start: given from the device, given from memory, and asked for in vain."""

    device: int
    memory: int
    missing: int


class FrameServer:
    """Answers `locate` and `get` of a transfer service (`transfer.transfers.TransferService`), on the endpoint's threads.

    Args:
        layouts: of each KV group's blocks; blocks of another layout are missing.
        staging: slots for frames and copies out of the device, for this server only.
        memory: stores of this process's memory, the fastest first.
        most: blocks of the device that one batch may hold.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        staging: StagingArena,
        memory: Sequence[Store] = (),
        *,
        most: int = BATCH_BLOCKS,
    ) -> None:
        self.layout = layouts[0]
        self._groups = {layout.fingerprint: group for group, layout in enumerate(layouts)}
        self._staging = staging
        self._memory = tuple(memory)
        self._slots = StagingSlots(range(staging.slots))
        self._batch = max(min(BATCH_BYTES // staging.frame_bytes, BATCH_BLOCKS, most, staging.slots), 1)
        self._copying = threading.Lock()  # guards copies, and the counts of what was copied
        self._counts: Counter[str] = Counter()

    # The device, for subclasses

    def _on_device(self, names: Sequence[Name]) -> int:
        """How many of these blocks, from the first on, can be read on the device. A hint."""
        return 0

    def _hold(self, wanted: Sequence[tuple[int, Name]], deadline: float) -> Sequence[HeldBlock]:
        """Hold named blocks of the device until `_release_held`; fewer or none if that is not possible."""
        return ()

    def _release_held(self, held: Sequence[HeldBlock]) -> None:
        """The copies are done."""

    # For peers

    def status(self) -> ServedStatus:
        return ServedStatus(self._counts["device"], self._counts["memory"], self._counts["missing"])

    def locate(self, names: Sequence[Name], deadline: float) -> int:
        """How many of these blocks, from the first on, are on the device or in memory."""
        mine = list(itertools.takewhile(self._has_layout, names))
        done = before = 0
        while done < len(mine):
            done += self._on_device(mine[done:])
            done += found_in(self._memory, mine[done:], deadline)
            if done == before:
                break
            before = done
        return done

    def _has_layout(self, name: Name) -> bool:
        return name[:FINGERPRINT_BYTES] in self._groups

    def get(self, names: Sequence[Name], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        """Sealed frames in the order of `names`, in batches. The next batch reuses the memory of the one before."""
        if longest < self._staging.frame_bytes:
            return
        for start in range(0, len(names), self._batch):
            batch = names[start : start + self._batch]
            slots = self._slots.wait_for(len(batch), deadline)
            if slots is None:
                return
            try:
                yield self._frames(batch, slots, deadline)
            finally:
                self._slots.give(slots)

    def _frames(self, names: Sequence[Name], slots: Sequence[int], deadline: float) -> list[Buffer | None]:
        """A batch, from memory where possible: that does not disturb the engine."""
        buffers = [self._staging.buffer(slot) for slot in slots]
        frames: list[Buffer | None] = [None] * len(names)
        for store in self._memory:
            open_ = [i for i, frame in enumerate(frames) if frame is None]
            for i, length in zip(open_, self._read(store, names, buffers, open_, deadline), strict=True):
                frames[i] = buffers[i][:length] if length else None
        from_memory = sum(frame is not None for frame in frames)
        missing = [i for i, frame in enumerate(frames) if frame is None and self._has_layout(names[i])]
        from_device = self._from_device(names, missing, slots, deadline) if missing else {}
        for i, length in from_device.items():
            frames[i] = buffers[i][:length]
        missed = len(names) - from_memory - len(from_device)
        with self._copying:
            self._counts.update(device=len(from_device), memory=from_memory, missing=missed)
        return frames

    def _read(
        self, store: Store, names: Sequence[Name], buffers: Sequence[memoryview], which: Sequence[int], deadline: float
    ) -> list[int]:
        if not which:
            return []
        try:
            with self._copying:
                return store.get([names[i] for i in which], [buffers[i] for i in which], deadline=deadline)
        except StoreError:  # closed, or the deadline passed
            return [0] * len(which)

    def _from_device(
        self, names: Sequence[Name], which: Sequence[int], slots: Sequence[int], deadline: float
    ) -> dict[int, int]:
        """Copy the named blocks that are on the device into their slots; returns the lengths of their frames by position."""
        held = self._hold([(i, names[i]) for i in which], deadline)
        if not held:
            return {}
        try:
            with self._copying:
                for group, some in itertools.groupby(held, key=lambda one: self._groups[one.header.layout]):
                    members = list(some)
                    self._staging.gather([one.block for one in members], [slots[one.number] for one in members], group)
        finally:
            self._release_held(held)
        for one in held:
            buffer = self._staging.buffer(slots[one.number])
            seal(one.header, buffer[: HEADER_BYTES + one.header.length])
        return {one.number: HEADER_BYTES + one.header.length for one in held}

    def _header(self, name: Name, parent: bytes, depth: int) -> Header:
        layout, root = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:PREFIX_BYTES]
        group = self._groups[layout]
        size = self._staging.block_bytes[group]
        return Header(layout, root, key_of(name), parent, depth, RAW, size, size, group)


def found_in(stores: Sequence[Store], names: Sequence[Name], deadline: float) -> int:
    """How many of the named blocks, from the first on, the stores have together. A store that fails has none."""
    done = 0
    for store in stores:
        if done < len(names):
            try:
                done += store.lookup(names[done:], deadline=deadline)
            except StoreError:
                continue
    return done


def num_frame_slots(block_bytes: int) -> int:
    """Slots of the staging arena through which peers read blocks of up to `block_bytes` bytes."""
    return max(ARENA_BYTES // (block_bytes + HEADER_BYTES), 4)
