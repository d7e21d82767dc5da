"""Connections of clients with limits: time for the head of a request, time without reading a response, and their number.

aiohttp has none of these. They are kept below it: a client that sends half a head never reaches the application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from foreword.router.replicas import clock

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_SWEEP_SECONDS: Final = 0.5
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\nToo many connections\n"
)


class ClientConnections:
    """All connections of clients.

    Args:
        most: number of connections. At the limit, the oldest one without a request is closed for a new one.
        head_seconds: for the head of a request, from its first byte or from the start of the connection.
        write_seconds: that a client may read nothing while data waits for it.
    """

    def __init__(self, most: int, head_seconds: float, write_seconds: float) -> None:
        self._most = most
        self._head_seconds = head_seconds
        self._write_seconds = write_seconds
        self._open: dict[asyncio.BaseTransport, ClientConnection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], ClientConnection]:
        """A protocol factory that adds the limits to another one."""
        return lambda: ClientConnection(self, make())

    def serving(self, request: web.BaseRequest) -> AbstractContextManager[None]:
        """The application serves this request in the block."""
        transport = request.transport
        return (self._open.get(transport) if transport is not None else None) or nullcontext()

    def add(self, connection: ClientConnection, transport: asyncio.Transport) -> bool:
        """False if there are too many connections and all of them have a request."""
        if len(self._open) >= self._most:
            idle = next((other for other, one in self._open.items() if not one.requests), None)
            if idle is None:
                return False
            self._open.pop(idle).transport.abort()
        self._open[transport] = connection
        return True

    def discard(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)

    async def sweep(self) -> None:
        """Close connections that exceed a limit. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = clock()
            for connection in list(self._open.values()):
                reason = self._overdue(connection, now)
                if reason:
                    logger.debug("a client's connection was closed: %s", reason)
                    connection.transport.abort()

    def _overdue(self, connection: ClientConnection, now: float) -> str:
        since = connection.head_since
        if not connection.requests and since is not None and now - since > self._head_seconds:
            return "the head of a request was incomplete"
        return "it read nothing" if connection.unread_seconds(now) > self._write_seconds else ""


class ClientConnection(asyncio.Protocol):
    """One connection: hands everything on to aiohttp's protocol.

    Attributes:
        requests: number of requests that the application serves.
        head_since: when the client began to send a head; None while it has not.
    """

    __slots__ = ("_all", "_inner", "_unread", "_unread_since", "head_since", "requests", "transport")

    transport: asyncio.Transport

    def __init__(self, connections: ClientConnections, inner: asyncio.Protocol) -> None:
        self._all = connections
        self._inner = inner
        self._unread, self._unread_since = 0, 0.0
        self.requests = 0
        self.head_since: float | None = clock()

    def __enter__(self) -> None:
        self.requests += 1
        self.head_since = None

    def __exit__(self, *error: object) -> None:
        self.requests -= 1

    def unread_seconds(self, now: float) -> float:
        """Seconds in which the client read nothing although data waited for it."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        return now - self._unread_since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._inner.connection_made(transport)
        if not self._all.add(self, self.transport):
            self.transport.write(_FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.requests and self.head_since is None:
            self.head_since = clock()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self.transport)
        self._inner.connection_lost(error)
