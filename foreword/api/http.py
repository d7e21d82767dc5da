"""The HTTP server of a front, on aiohttp: its socket, connections with limits, requests, whole answers, streams, and clients
that leave.

aiohttp has no limits of time for the head of a request and for a response that is not read, and none of the number of
connections. They are kept below it: a client that sends half a head never reaches a front.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Front
from foreword.api.outcomes import ClientGone
from foreword.errors import BadRequest, ConfigError
from foreword.process_config import ServerConfig

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
# Seconds for the last bytes to reach slow clients.
_FLUSH_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 0.5
# Files that the process needs for other purposes than connections of clients.
_OTHER_FILES: Final = 128
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\nToo many connections\n"
)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_SERVER: Final = {"server": "foreword"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError with advice if that is not possible."""
    where = f"{config.host} port {config.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {config.host!r}: it is not an address of this machine (--host)") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen before the loop starts: the second of two servers on one port fails here.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {_bind_advice(error)}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL that the socket listens on."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configure_logging(level: str) -> None:
    """Log to standard error from `level` on."""
    # Nothing in the format needs where a line was logged, which is a third of its cost (docs.python.org, "Logging HOWTO").
    logging._srcfile = None
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )


def _bind_advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "ports below 1024 need special rights; choose another with --port"
    reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
    return f"{reason}; choose another with --port (0 takes a free one) or --host"


@asynccontextmanager
async def serving(front: Front, listener: socket.socket, config: ServerConfig) -> AsyncIterator[None]:
    """Serve a front on a socket, on the running event loop, until the end of the block."""
    most = max(min(config.max_connections, open_files() - _OTHER_FILES), 1)
    connections = ClientConnections(most, config.head_timeout, config.write_timeout)
    http = web.Server(
        handler_of(front, connections),
        handler_cancellation=True,
        keepalive_timeout=config.keep_alive,
        access_log=None,
        logger=_ConnectionLog(logger),
        lingering_time=config.head_timeout,
    )
    runner = web.ServerRunner(http, shutdown_timeout=_FLUSH_SECONDS)
    await runner.setup()
    factory = connections.factory(http)
    server = await asyncio.get_running_loop().create_server(factory, sock=listener, backlog=_BACKLOG)
    sweep = asyncio.create_task(connections.sweep())
    try:
        yield
    finally:
        server.close()
        await runner.cleanup()
        sweep.cancel()


def event_loop() -> asyncio.Runner:
    """Runs the event loop of a server."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def catch_signals(on_first: Callable[[], None]) -> None:
    """Call `on_first` for the first signal that ends a process; a second one ends it at once. On the running event loop."""
    seen: list[int] = []

    def on_signal(number: int) -> None:
        if seen:
            logging.shutdown()
            os._exit(128 + number)
        seen.append(number)
        on_first()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def open_files() -> int:
    """How many files this process may open, after the limit was raised as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def handler_of(front: Front, connections: ClientConnections) -> Handler:
    """What aiohttp calls for each request. It cancels the call when the client leaves."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        exchange = _Exchange(request)
        with connections.serving(request):
            answer = await front.serve(exchange)
        if answer is not None:
            return web.Response(body=answer.body, status=answer.status, headers={**answer.headers, **_SERVER})
        return exchange.out or web.Response(status=CLIENT_GONE)

    return handle


class _ConnectionLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp logs. Strangers cannot fill the log: a request that is no HTTP is a line at level debug, not a traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        # A body that cannot be read was answered; aiohttp says it again as it drops the rest.
        if isinstance(exc_info, (HttpProcessingError, web.RequestPayloadError)):
            self.debug("%s: %s", msg % args if isinstance(msg, str) else msg, exc_info)
        else:
            self.error(msg, *args, exc_info=exc_info, **more)


class _EventStream(web.StreamResponse):
    # aiohttp then sends the head together with the first bytes.
    _send_headers_immediately = False


class _Exchange:
    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.method = request.method
        self.headers: Mapping[str, str] = request.headers
        self.address = request.remote
        self.path, self.query = request.rel_url.raw_path, request.rel_url.raw_query_string
        self.out: _EventStream | None = None

    def arrived(self, limit: int) -> bytes | None:
        request = self._request
        length = request.content_length
        if length is None or length > limit or not request.content.is_eof() or "content-encoding" in self.headers:
            return None
        return request.content.read_nowait()

    async def pieces(self) -> AsyncIterator[bytes]:
        request = self._request
        try:
            if self.headers.get("expect", "").lower() == "100-continue":
                await request.writer.write(_CONTINUE)
                request.writer.output_size = 0  # the head of the answer is still to come
            while piece := await request.content.readany():
                yield piece
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise BadRequest(f"The body cannot be read: {error}") from None

    def watch(self) -> None:
        """aiohttp always does."""

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> _Exchange:
        self.out = _EventStream(status=status, headers={**headers, **_SERVER})
        try:
            writer = await self.out.prepare(self._request)
            if at_once and writer is not None:
                writer.send_headers()
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        return self

    async def write(self, data: bytes) -> None:
        assert self.out is not None
        try:
            await self.out.write(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error

    async def end(self, data: bytes = b"") -> None:
        assert self.out is not None
        try:
            await self.out.write_eof(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error


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
            now = time.monotonic()
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
        self.head_since: float | None = time.monotonic()

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
            self.head_since = time.monotonic()
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
