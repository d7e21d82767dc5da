"""A link that is one stream socket (TCP or Unix): messages and payloads in a row, no copies beyond the kernel's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Final

from foreword.errors import TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import EMPTY, Capabilities, Payload, Received
from foreword.transfer.messages import (
    HEAD_BYTES,
    MAX_PAYLOAD,
    NO_TRANSFER,
    Buffer,
    Head,
    Message,
    decode,
    encode,
    payload_checksum,
    read_head,
)
from foreword.transfer.sockets import Stream

_GRAIN: Final = 64 << 10
_TICK: Final = 0.25


class Arena:
    """Memory into which payloads are received: pieces that are used again, and a bound on those that nobody has released.

    Fresh memory costs more than the copy into it, so up to `limit` bytes are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[bytearray] = []
        self._kept = 0
        self._out = 0
        self._changed = threading.Condition()

    def take(self, size: int, seconds: float) -> Payload | None:
        """Room for `size` bytes; None if there is none within `seconds`. One payload may always be out, however long."""
        with self._changed:
            if self._out and self._out + size > self.limit and not self._wait(size, seconds):
                return None
            self._out += size
            piece = self._reuse(size) or bytearray(-(-size // _GRAIN) * _GRAIN)
        return Payload(memoryview(piece)[:size], lambda: self._give(piece, size))

    def _wait(self, size: int, seconds: float) -> bool:
        return self._changed.wait_for(lambda: not self._out or self._out + size <= self.limit, seconds)

    def _reuse(self, size: int) -> bytearray | None:
        """The piece that was given back last and is not much too long: it is in the processor's cache."""
        for number in range(len(self._free) - 1, -1, -1):
            if size <= len(self._free[number]) <= 2 * max(size, _GRAIN):
                piece = self._free.pop(number)
                self._kept -= len(piece)
                return piece
        return None

    def _give(self, piece: bytearray, size: int) -> None:
        with self._changed:
            self._out -= size
            self._free.append(piece)
            self._kept += len(piece)
            while self._kept > self.limit and len(self._free) > 1:
                self._kept -= len(self._free.pop(0))
            self._changed.notify_all()


Steps = Generator[None, None, Received]


class SocketReader:
    """Messages out of a stream. A time limit that passes in the middle of one loses nothing: the next call goes on there.

    Args:
        payload_of: brings the payload that a head announces; yields while there is nothing to do but wait.
    """

    def __init__(self, stream: Stream, payload_of: Callable[[Head], Generator[None, None, Payload]]) -> None:
        self._stream = stream
        self._payload_of = payload_of
        self._head = bytearray(HEAD_BYTES)
        self._steps: Steps | None = None

    def receive(self, deadline: float) -> Received:
        if self._steps is None:
            self._steps = self._message()
        while True:
            try:
                next(self._steps)
            except StopIteration as end:
                self._steps = None
                received: Received = end.value
                return received
            except TransferError:
                self._steps = _over()
                raise
            if time.monotonic() >= deadline:
                raise TransferTimeout("no message came")

    def _message(self) -> Steps:
        yield from self._stream.fill(memoryview(self._head))
        head = read_head(self._head)
        metadata = bytearray(head.metadata)
        yield from self._stream.fill(memoryview(metadata))
        _, message = decode(self._head, metadata, head)
        payload = (yield from self._payload_of(head)) if head.payload else EMPTY
        return Received(head, message, payload)


def _over() -> Steps:
    """After an error nobody knows where a message begins."""
    yield from ()
    raise TransferUnavailable("the connection has ended")


class TcpLink:
    """See `link.Link`. `arena` bytes of received payloads may be unreleased at a time."""

    def __init__(self, stream: Stream, *, arena: int, same_host: bool = False) -> None:
        self.capabilities = Capabilities("tcp", same_host, min(arena, MAX_PAYLOAD), 2)
        self._stream = stream
        self._arena = Arena(arena)
        self._reader = SocketReader(stream, self._payload)

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
        summed = payload_checksum(buffers) if size and checksum else None
        self._stream.send([encode(message, transfer, payload=size, payload_sum=summed), *buffers], deadline)

    def receive(self, *, deadline: float) -> Received:
        return self._reader.receive(deadline)

    def _payload(self, head: Head) -> Generator[None, None, Payload]:
        while (payload := self._arena.take(head.payload, _TICK)) is None:
            self._stream.heard = time.monotonic()  # it is this side that does not listen
            yield
        yield from self._stream.fill(payload.view)
        return payload

    def close(self) -> None:
        self._stream.close()
