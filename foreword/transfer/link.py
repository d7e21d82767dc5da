"""How messages move between two processes: the base class of every link, and the link that is one stream socket (TCP or Unix).

A link is one connection that is open, authenticated, and agreed upon by both sides. It delivers messages in order, whole or
not at all. One thread sends, another one receives; any thread may call `close`. `LinkContract`
in the tests has what every link must pass.
"""

from __future__ import annotations

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.transfer.errors import BadMessage, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.sockets import POLL_SECONDS, SocketStream
from foreword.transfer.wire_format import (
    HEAD_BYTES,
    MAX_PAYLOAD,
    NO_TRANSFER,
    Buffer,
    Head,
    TransferMessage,
    decode,
    encode,
    payload_checksum,
    read_head,
)

_GRANULE: Final = 64 << 10
# Messages whose payloads have up to about this many bytes together are sent as one batch.
BATCH_BYTES: Final = 2 << 20
_SMALL: Final = 64 << 10


def reserve(size: int) -> memoryview:
    """Memory for `size` bytes. The system provides the pages of a large one as they are written, not as they are announced."""
    return memoryview(mmap.mmap(-1, size) if size > _SMALL else bytearray(size))


class Payload:
    """The bytes that came with a message, in the link's memory.

    The receiver calls `release` once, on any thread; after that the bytes may change. The link bounds the bytes that are
    received and not released.
    """

    __slots__ = ("_release", "view")

    def __init__(self, view: memoryview, release: Callable[[], None] | None = None) -> None:
        self.view = view
        self._release = release

    def release(self) -> None:
        """Give the memory back. Further calls do nothing."""
        release, self._release = self._release, None
        self.view = memoryview(b"")
        if release is not None:
            release()

    def __len__(self) -> int:
        return len(self.view)

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        self.release()


EMPTY: Final = Payload(memoryview(b""))


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it arrived. Its payload has not been checked: `sound` compares it with its checksum."""

    head: Head
    message: TransferMessage
    payload: Payload

    def sound(self) -> bool:
        """Whether the payload matches its checksum. Reads every byte. True also if the message has no checksum."""
        return self.head.payload_sum is None or payload_checksum([self.payload.view]) == self.head.payload_sum


class Link(ABC):
    """A stream socket for messages, and a way to move payloads that each kind of link defines.

    Deadlines are times of `time.monotonic()`. Methods raise TransferTimeout when a deadline passes, TransferUnavailable after
    the peer or this side has closed, and BadMessage for bytes that are not a message. After any of them, except a
    TransferTimeout of `receive`, the link cannot be used any more.

    Attributes:
        name: `tcp` or `shm`; the name in configuration and counters.
        largest: the longest payload of one message, in bytes.
    """

    def __init__(self, name: str, largest: int, stream: SocketStream) -> None:
        self.name = name
        self.largest = largest
        self._stream = stream
        self._head = bytearray(HEAD_BYTES)
        self._steps: Generator[None, None, Received] | None = None

    @property
    def last_received(self) -> float:
        """When the last bytes arrived, whether or not they were a whole message; initially when the link was made."""
        return self._stream.last_received

    def send(
        self,
        message: TransferMessage,
        transfer: bytes = NO_TRANSFER,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: float,
        checksum: bool = True,
        more: bool = False,
    ) -> None:
        """Send a message; its payload is the concatenated bytes of `buffers` (contiguous, item size 1).

        The buffers may change when this returns.

        Args:
            deadline: for the next progress of the transmission: a long payload on a slow link does not fail while bytes move.
            checksum: send a checksum of the payload with the message.
            more: another call follows at once, so the link may delay this message and send both together.
        """
        size = sum(map(len, buffers))
        if size > self.largest:
            raise TransferError(f"a payload of {size} bytes is longer than this link carries")
        payload_sum, position = self._prepare(buffers, size, checksum, deadline) if size else (None, 0)
        head = encode(message, transfer, payload=size, payload_sum=payload_sum, position=position)
        self._write(head, buffers, size, deadline, more)

    @abstractmethod
    def _prepare(self, buffers: Sequence[Buffer], size: int, checksum: bool, deadline: float) -> tuple[int | None, int]:
        """Prepare a payload of `size` bytes; returns its checksum, if asked for, and its position in a shared ring, or 0."""

    @abstractmethod
    def _write(self, head: bytes, buffers: Sequence[Buffer], size: int, deadline: float, more: bool) -> None:
        """Send an encoded message whose payload is prepared."""

    def receive(self, *, deadline: float) -> Received:
        """The next message. A TransferTimeout loses nothing: the next call continues in the middle of the message."""
        if self._steps is None:
            self._steps = self._read_message()
        while True:
            try:
                next(self._steps)
            except StopIteration as end:
                self._steps = None
                received: Received = end.value
                return received
            except TransferError:
                self._steps = _ended()
                raise
            if time.monotonic() >= deadline:
                raise TransferTimeout("no message came")

    def _read_message(self) -> Generator[None, None, Received]:
        yield from self._stream.fill(memoryview(self._head))
        head = read_head(self._head)
        metadata = reserve(head.metadata)
        yield from self._stream.fill(metadata)
        _, message = decode(self._head, metadata, head)
        payload = (yield from self._receive_payload(head)) if head.payload else EMPTY
        return Received(head, message, payload)

    @abstractmethod
    def _receive_payload(self, head: Head) -> Generator[None, None, Payload]:
        """Receive the payload that a head announces; yields while it can only wait."""

    def close(self) -> None:
        """Close both directions and wake both threads. May be called twice. Unreleased payloads stay readable."""
        self._stream.close()


def _ended() -> Generator[None, None, Received]:
    """The steps after an error: the position of the next message in the stream is unknown."""
    yield from ()
    raise TransferUnavailable("the connection has ended")


class ReceiveBuffers:
    """Memory for received payloads: buffers are reused, and the bytes of unreleased payloads are bounded.

    Mapping fresh memory costs more than copying into it, so up to `limit` bytes are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[memoryview] = []
        self._kept = 0
        self._in_use = 0
        self._changed = threading.Condition()

    def take(self, size: int, seconds: float) -> Payload | None:
        """Memory for `size` bytes; None if there is none within `seconds`. One payload may always be out, however long."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_use or self._in_use + size <= self.limit, seconds):
                return None
            self._in_use += size
            buffer = self._reuse(size) or reserve(-(-size // _GRANULE) * _GRANULE)
        return Payload(buffer[:size], lambda: self._give_back(buffer, size))

    def _reuse(self, size: int) -> memoryview | None:
        """The most recently released buffer that is long enough and not much too long: it is in the processor's cache."""
        for number in range(len(self._free) - 1, -1, -1):
            if size <= len(self._free[number]) <= 2 * max(size, _GRANULE):
                buffer = self._free.pop(number)
                self._kept -= len(buffer)
                return buffer
        return None

    def _give_back(self, buffer: memoryview, size: int) -> None:
        with self._changed:
            self._in_use -= size
            self._free.append(buffer)
            self._kept += len(buffer)
            while self._kept > self.limit and len(self._free) > 1:
                self._kept -= len(self._free.pop(0))
            self._changed.notify_all()


class TcpLink(Link):
    """See `link.Link`. `ring` bytes of received payloads may be unreleased at a time."""

    def __init__(self, stream: SocketStream, *, ring: int) -> None:
        super().__init__("tcp", min(ring, MAX_PAYLOAD), stream)
        self._buffers = ReceiveBuffers(ring)

    def _prepare(self, buffers: Sequence[Buffer], size: int, checksum: bool, deadline: float) -> tuple[int | None, int]:
        return payload_checksum(buffers) if checksum else None, 0

    def _write(self, head: bytes, buffers: Sequence[Buffer], size: int, deadline: float, more: bool) -> None:
        self._stream.send([head, *buffers], deadline)

    def _receive_payload(self, head: Head) -> Generator[None, None, Payload]:
        if head.payload > self.largest:
            raise BadMessage(f"a payload of {head.payload} bytes; this side receives at most {self.largest}")
        while (payload := self._buffers.take(head.payload, POLL_SECONDS)) is None:
            self._stream.last_received = time.monotonic()  # this side delays the peer, so the peer counts as alive
            yield
        yield from self._stream.fill(payload.view)
        return payload
