"""HTTP connections with limits: time for heads, bodies and writes, bytes of heads, and the number of connections.

uvicorn has neither of these. The limits are kept here, below the application: a client that sends or reads nothing, or one
byte now and then, does not reach it.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_PIPELINED: Final = 16
# A body may take longer than its limit if it comes at least this fast, in bytes per second.
_BODY_RATE: Final = 16 << 10
# Seconds between two looks at all connections.
_SWEEP_SECONDS: Final = 0.5
# Files that the process needs for other purposes than connections.
_OTHER_FILES: Final = 128
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\nToo many connections\n"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections; times in seconds.

    Attributes:
        connections: at a time. At the limit, the oldest connection without a request is closed for a new one.
        head_seconds: for the head of a request, from its first byte or from the start of the connection.
        body_seconds: for a body; more if it comes faster than 16 KiB per second.
        write_seconds: that a client may read nothing while its response waits.
    """

    connections: int = 4096
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0

    def within_open_files(self) -> ConnectionLimits:
        """The limits, with no more connections than this process may open. Raises the soft limit of open files if needed."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections + _OTHER_FILES
        if resource.RLIM_INFINITY != soft < wanted:
            with suppress(ValueError, OSError):
                most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
        files = wanted if soft == resource.RLIM_INFINITY else soft
        most = max(min(self.connections, files - _OTHER_FILES), 1)
        return ConnectionLimits(most, self.head_seconds, self.body_seconds, self.write_seconds)


class Connections:
    """The open connections of a server. `protocol` is the factory that uvicorn calls for each new one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[LimitedProtocol, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, **arguments: Any) -> LimitedProtocol:
        return LimitedProtocol(self, **arguments)

    def add(self, protocol: LimitedProtocol) -> bool:
        """Count a connection. False if there are too many and all of them have a request."""
        if len(self._open) >= self.limits.connections:
            # In the order in which they were opened.
            waiting = next((one for one in self._open if one.is_waiting), None)
            if waiting is None:
                return False
            waiting.abort("there are too many connections")
            del self._open[waiting]
        self._open[protocol] = None
        if self._timer is None:
            self._timer = protocol.loop.call_later(_SWEEP_SECONDS, self._sweep, protocol.loop)
        return True

    def discard(self, protocol: LimitedProtocol) -> None:
        self._open.pop(protocol, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for protocol in list(self._open):
            reason = protocol.overdue(now)
            if reason is not None:
                protocol.abort(reason)
        self._timer = loop.call_later(_SWEEP_SECONDS, self._sweep, loop) if self._open else None


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, all_connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = all_connections
        self._limits = all_connections.limits
        # When the client began to send a head; None while none is expected or none has begun.
        self._head_since: float | None = self.loop.time()
        self._head_bytes = 0
        self._in_body = False
        self._body_since = 0.0
        self._body_bytes = 0
        self._write_paused_at = 0.0
        self._closing_since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    def overdue(self, now: float) -> str | None:
        """Which time limit the client has exceeded."""
        limits = self._limits
        if self.transport.is_closing():
            # Closing waits until the client has read everything.
            self._closing_since = self._closing_since or now
            return "its response was not read" if now - self._closing_since > limits.write_seconds else None
        if self.flow.write_paused:
            return "its response was not read" if now - self._write_paused_at > limits.write_seconds else None
        if self.is_waiting:
            late = self._head_since is not None and now - self._head_since > limits.head_seconds
            return "the head of a request was incomplete" if late else None
        if not self.cycle.more_body:
            return None
        if self.flow.read_paused:  # the application is not reading
            self._body_since = now
        allowed = max(limits.body_seconds, self._body_bytes / _BODY_RATE)
        return "the body of a request was incomplete" if now - self._body_since > allowed else None

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        logger.debug("connection of %s closed: %s", self.client, reason)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.add(self):
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        super().connection_lost(exc)
        # A connection that was aborted has no further use for it either.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self.is_waiting:
            if self._head_since is None:
                self._head_since = self.loop.time()
            # The rest of a body that was refused is read and dropped, within the time for a head.
            self._head_bytes += 0 if self._in_body else len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests at once")
        self._head_since, self._head_bytes, self._in_body = None, 0, True
        self._body_since, self._body_bytes = self.loop.time(), 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_since, self._head_bytes, self._in_body = None, 0, False
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._write_paused_at = self.loop.time()
        super().pause_writing()
