"""The copies of a staging arena through the pieces of a ring, in place of a mirror. The host seals and checks its frames."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foreword.errors import StoreTimeout
from foreword.offload.device import DeviceCopies, Event, Plane, Queues, Units, _Copy
from foreword.offload.ring import PIECES_OF_A_LOAD, DeviceRing, Piece, TierMemory


class RingCopies(DeviceCopies):
    """`DeviceCopies` without a mirror. A thread that waits for a piece holds none."""

    def __init__(self, arena: Tensor, groups: Sequence[Sequence[Plane]], ring: DeviceRing, queues: Queues) -> None:
        super().__init__(arena, groups, ring.device, queues)
        self._ring = ring
        self._memory = TierMemory(arena.view(-1), arena.stride(0))
        self._loading = threading.local()

    def save(self, group: int, units: Units, slots: Sequence[int]) -> None:
        end = self._ring.save(group, units, (), self._memory, slots)
        if end is not None:
            self._saves.update(dict.fromkeys(slots, _Copy(end)))

    def load(self, group: int, slots: Sequence[int], units: Units, mark: Event | None, until: float = math.inf) -> None:
        for slot in slots:
            self.wait(slot)
        room = self._ring.piece_bytes // self._memory.stride
        for low in range(0, len(slots), room):
            part = slice(low, low + room)
            batch = self._ring.plan_load([(group, units[part], ())], self._memory, slots[part], checked=True)
            piece = self._take(until)
            # Counted first: where queueing fails, the caller waits for what was queued.
            self._held.append(_Held(piece, self._ring))
            self._held[-1].end = self._ring.load(batch, 0, piece, mark).copied
            mark = None

    def loaded(self) -> Event:
        return _Loaded(super().loaded(), [*self._held], self._held)

    @property
    def _held(self) -> deque[_Held]:
        """Pieces that this thread's copies have, the oldest first."""
        if not hasattr(self._loading, "held"):
            self._loading.held = deque[_Held]()
        found: deque[_Held] = self._loading.held
        return found

    def _take(self, until: float) -> Piece:
        """A piece. Raises StoreTimeout: the copies of other threads have all of them `until` then."""
        held, ring = self._held, self._ring
        while held:
            piece = ring.wait_for(0.0) if len(held) < PIECES_OF_A_LOAD else None
            if piece is not None:
                return piece
            held.popleft().release()
        piece = ring.wait_for(until)
        if piece is None:
            raise StoreTimeout("no piece of the device's memory is free")
        return piece


@dataclass(slots=True, eq=False)
class _Held:
    """A piece, until a copy through it has ended."""

    piece: Piece
    ring: DeviceRing
    end: Event | None = None
    given: bool = False

    def release(self) -> None:
        """Wait for the copy, and give the piece back."""
        try:
            (self.end or self.ring.loaded()).synchronize()
        finally:
            if not self.given:
                self.given = True
                self.ring.give(self.piece)


@dataclass(slots=True, eq=False)
class _Loaded:
    """The end of a thread's loads, which that thread waits for: their pieces are free then."""

    event: Event
    loads: Sequence[_Held]
    held: deque[_Held]

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        finally:
            for one in self.loads:
                if not one.given:
                    one.given = True
                    self.held.remove(one)
                    one.ring.give(one.piece)
