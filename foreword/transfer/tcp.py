"""A link that is one stream socket (TCP or Unix): messages and payloads in a row, no copies except the kernel's."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from typing import Final

from foreword.errors import BadMessage
from foreword.transfer.link import Link, Payload, reserve
from foreword.transfer.sockets import POLL_SECONDS, SocketStream
from foreword.transfer.wire_format import MAX_PAYLOAD, Buffer, Head, payload_checksum

_GRANULE: Final = 64 << 10


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
