"""Allocation in a ring of shared memory: the sender allocates pieces in order, the receiver releases them in any order.

No I/O. A position counts bytes since the start and never wraps; the piece lies at `position % size`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import xxhash

from foreword.errors import BadMessage
from foreword.transfer.messages import Buffer

_ALIGNMENT: Final = 64
_WARM: Final = 2 << 20
_PIECE: Final = 512 << 10


def aligned(length: int) -> int:
    """The bytes that a piece of this length occupies."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class RingAllocator:
    """Which bytes of a ring are allocated. Pieces are allocated here and released up to a position by the other side.

    The ring wraps as soon as its start is free, not only when its end is reached. While the receiver keeps up, only the first
    megabytes are used, and they stay in the processor's cache. Allocated bytes form a few runs, oldest first. A new piece is
    placed behind the newest run, at the start of the ring, or behind all runs.

    Attributes:
        allocated: position behind the newest piece.
        released: every piece that ends at or before this position has been released.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.allocated = 0
        self.released = 0
        self._runs: deque[list[int]] = deque()  # [start, end) offsets, disjoint
        self._pieces: deque[tuple[int, int]] = deque()  # (position of the end, length), in order of allocation

    def allocate(self, length: int) -> int | None:
        """The position of `length` contiguous bytes; None if they are not free."""
        need = aligned(length)
        offset = self._find_offset(need)
        if offset is None:
            return None
        if self._runs and offset == self._runs[-1][1]:
            self._runs[-1][1] += need
        else:
            self._runs.append([offset, offset + need])
        position = self._next_position(offset)
        self.allocated = position + need
        self._pieces.append((self.allocated, need))
        return position

    def _find_offset(self, need: int) -> int | None:
        """Where in the ring `need` free bytes begin: in the first megabytes if possible."""
        newest = self._runs[-1][1] if self._runs else 0
        if newest + need <= _WARM and self._is_free(newest, need):
            return newest
        highest = max((end for _, end in self._runs), default=0)
        return next((offset for offset in (0, newest, highest) if self._is_free(offset, need)), None)

    def _is_free(self, start: int, need: int) -> bool:
        end = start + need
        if end > self.size:
            return False
        for low, high in self._runs:  # noqa: SIM110 - on the path of every payload
            if low < end and start < high:
                return False
        return True

    def _next_position(self, offset: int) -> int:
        """The smallest position at or after `allocated` that lies at this offset: positions never decrease."""
        return self.allocated + (offset - self.allocated) % self.size

    def release(self, upto: int) -> None:
        """Free the pieces that end at or before `upto`. Raises BadMessage if the other side cannot have released them."""
        if not self.released <= upto <= self.allocated:
            raise BadMessage(f"the peer has released up to {upto} of {self.allocated} bytes, after {self.released}")
        self.released = upto
        while self._pieces and self._pieces[0][0] <= upto:
            run = self._runs[0]
            run[0] += self._pieces.popleft()[1]
            if run[0] == run[1]:
                self._runs.popleft()


class ReleaseOrder:
    """Turns releases in any order into one position up to which everything is released. No I/O."""

    def __init__(self) -> None:
        self._open: deque[list[int]] = deque()  # [position of the end, 1 if released]

    def add(self, position: int, length: int) -> list[int]:
        """Note a piece; returns the item to pass to `release`."""
        item = [position + aligned(length), 0]
        self._open.append(item)
        return item

    def release(self, item: list[int]) -> int | None:
        """The position before which everything is released now; None if that did not change."""
        item[1] = 1
        upto = None
        while self._open and self._open[0][1]:
            upto = self._open.popleft()[0]
        return upto


def copy_in(ring: memoryview, start: int, buffers: Sequence[Buffer], *, checksum: bool) -> int | None:
    """Copy the bytes of the buffers in a row to offset `start`; returns the checksum of the copy if asked for.

    The checksum is updated piece by piece, while the piece is in the processor's cache.
    """
    state = xxhash.xxh3_64()
    for buffer in buffers:
        for low in range(0, len(buffer), _PIECE):
            piece = buffer if len(buffer) <= _PIECE else memoryview(buffer)[low : low + _PIECE]
            end = start + len(piece)
            ring[start:end] = piece
            if checksum:
                state.update(ring[start:end])
            start = end
    return state.intdigest() if checksum else None
