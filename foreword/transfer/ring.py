"""Payloads in a ring of memory that the sender writes and its peer reads: what shared memory and NIXL have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final

import xxhash

from foreword.errors import BadMessage, TransferError
from foreword.transfer.link import TOGETHER, Capabilities
from foreword.transfer.messages import NO_TRANSFER, Buffer, Message, encode
from foreword.transfer.sockets import Stream

_ALIGNMENT: Final = 64
_WARM: Final = 2 << 20
_PIECE: Final = 512 << 10


class Ring:
    """Which bytes of a ring are taken: in order on one side, released up to a place on the other. No I/O.

    It goes round as soon as its beginning is free, not when its end is reached: while the other side keeps up, only the first
    megabytes are used, which stay in the processor's cache. What is taken are a few runs, oldest first; a new
    piece goes behind the newest one, to the beginning, or behind all of them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.released = 0
        self._runs: deque[list[int]] = deque()  # [begin, end], disjoint
        self._pieces: deque[tuple[int, int]] = deque()  # (place of the end, length), in the order of taking

    def take(self, length: int) -> int | None:
        """The place of `length` bytes in one piece, at `place % size`; None while there is no room."""
        need = -(-length // _ALIGNMENT) * _ALIGNMENT
        runs = self._runs
        newest = runs[-1][1] if runs else 0
        if newest + need <= _WARM and self._free(newest, need):
            at = newest
        else:
            places = (0, newest, max((end for _, end in runs), default=0))
            found = next((place for place in places if self._free(place, need)), None)
            if found is None:
                return None
            at = found
        if runs and at == newest:
            runs[-1][1] += need
        else:
            runs.append([at, at + need])
        last = self.taken % self.size or (self.size if self.taken else 0)
        place = self.taken - last + at + (0 if at >= last else self.size)
        self.taken = place + need
        self._pieces.append((self.taken, need))
        return place

    def _free(self, begin: int, need: int) -> bool:
        end = begin + need
        if end > self.size:
            return False
        for low, high in self._runs:  # noqa: SIM110 - on the path of every payload
            if low < end and begin < high:
                return False
        return True

    def release(self, upto: int) -> None:
        """The other side says so. Raises BadMessage if that cannot be."""
        if not self.released <= upto <= self.taken:
            raise BadMessage(f"the peer has released up to {upto} of {self.taken} bytes, after {self.released}")
        self.released = upto
        while self._pieces and self._pieces[0][0] <= upto:
            run = self._runs[0]
            run[0] += self._pieces.popleft()[1]
            if run[0] == run[1]:
                self._runs.popleft()


class Order:
    """Payloads are released in any order, but a ring is freed in the order in which it was filled. No I/O."""

    def __init__(self) -> None:
        self._open: deque[list[int]] = deque()  # [end, released]

    def add(self, place: int, length: int) -> list[int]:
        item = [place + -(-length // _ALIGNMENT) * _ALIGNMENT, 0]
        self._open.append(item)
        return item

    def release(self, item: list[int]) -> int | None:
        """The place before which everything is released now, if that changed."""
        item[1] = 1
        upto = None
        while self._open and self._open[0][1]:
            upto = self._open.popleft()[0]
        return upto


def copy_in(ring: memoryview, at: int, buffers: Sequence[Buffer], *, summed: bool) -> int | None:
    """Copy the bytes of the buffers in a row to `at`; returns the checksum of the copy if it is wanted, made piece by piece
    while the piece is in the processor's cache."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        for low in range(0, len(buffer), _PIECE):
            piece = buffer if len(buffer) <= _PIECE else memoryview(buffer)[low : low + _PIECE]
            end = at + len(piece)
            ring[at:end] = piece
            if summed:
                state.update(ring[at:end])
            at = end
    return state.intdigest() if summed else None


class RingLink(ABC):
    """The sending half of a `link.Link` whose messages go over a socket while their payloads lie in `out`, a ring.

    Messages that leave together are sent with one call, so that the peer is woken once for all of them.
    """

    def __init__(self, capabilities: Capabilities, stream: Stream, out: memoryview) -> None:
        self.capabilities = capabilities
        self._stream = stream
        self._out, self._ring = out, Ring(len(out))
        self._heads: list[bytes] = []
        self._unsaid = 0

    @property
    def heard(self) -> float:
        return self._stream.heard

    def send(
        self,
        message: Message,
        transfer: bytes = NO_TRANSFER,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: float,
        checksum: bool = True,
        more: bool = False,
    ) -> None:
        size = sum(map(len, buffers))
        place, summed = 0, None
        if size:
            if size > self.capabilities.largest:
                raise TransferError(f"a payload of {size} bytes is longer than this link carries")
            place = self._room(size, deadline)
            summed = copy_in(self._out, place % self._ring.size, buffers, summed=checksum)
            self._filled(place, size)
        self._heads.append(encode(message, transfer, payload=size, payload_sum=summed, place=place))
        self._unsaid += size
        if not more or self._unsaid >= TOGETHER:
            self._say(deadline)

    def _say(self, deadline: float) -> None:
        """Send the messages whose payloads are in the ring."""
        heads, self._heads, self._unsaid = self._heads, [], 0
        if heads:
            self._stream.send([b"".join(heads)], deadline)

    @abstractmethod
    def _room(self, size: int, deadline: float) -> int:
        """The place of `size` bytes in the ring. While there is none, says what is unsaid, so that the peer can read it, and
        waits."""

    @abstractmethod
    def _filled(self, place: int, size: int) -> None:
        """A payload lies there, and the peer is not told of it yet: the last chance to note what it will release."""
