"""The HTTP server of a front, on aiohttp: its socket, connections with limits, requests, whole answers, streams, and clients
that leave.

aiohttp has no limits of time for the head of a request and for a response that is not read, and none of the number of
connections. They are kept below it: a client that sends half a head never reaches a front.

A client that closes its side of a connection (FIN) has gone, or has sent all and waits for its answer, as `nc -N` does. Nothing
tells these apart but data: the system of a client that has gone answers it with a reset. So such a client gets bytes that
change nothing for one that waits: of an answer that has not begun its first ones, which are those of every answer, one at a
time; in a stream of events a comment. An interim response (100, 102) would do in HTTP/1.1 only, and not all clients read it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_writer import HttpVersion11

from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Front
from foreword.api.outcomes import LOG_FIELDS, ClientGone
from foreword.errors import BadRequest, ConfigError
from foreword.process_config import ServerConfig
from foreword.tasks import background
from foreword.texts import readable

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
# Each answer begins so.
_START: Final = b"HTTP/1."
# Bytes of an answer after which aiohttp waits until the client has read enough of them (`StreamWriter.write`).
_UNDRAINED: Final = 1 << 16
_COMMENT: Final = b":\n\n"
_COMMENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT)
# Turns of the event loop after which aiohttp has begun with a request that has come. It takes about three.
_TURNS: Final = 10
# Seconds until a reset has come from a near client; then the sweeps look.
_NEAR_SECONDS: Final = 0.05
# Seconds until a client that has closed its side gets more bytes, then twice as long each time.
_MORE_SECONDS: Final = 1.0
_SERVER: Final = {"server": "foreword"}
# Bytes of a line of the log in JSON. Container runtimes divide lines of 16 KiB.
_LONGEST_LINE: Final = (16 << 10) - 1

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


def configure_logging(level: str, form: str = "text") -> None:
    """Log to standard error from `level` on, as lines of text or objects of JSON (`--log-format`)."""
    # Nothing in the format needs where a line was logged, which is a third of its cost (docs.python.org, "Logging HOWTO").
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Objects() if form == "json" else _ReadableLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _ReadableLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return readable(super().format(record))


class _Objects(logging.Formatter):
    """An object per line, in ASCII and bounded, whatever a client or a replica has said. Times are UTC, with milliseconds."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown = {"time": when, "level": record.levelname, "message": readable(record.getMessage())}
        if record.exc_info:
            shown["exception"] = readable(self.formatException(record.exc_info))
        known = {**shown, **getattr(record, LOG_FIELDS, dict)()}
        while len(line := json.dumps(known)) > _LONGEST_LINE:
            longest = max(known, key=lambda name: len(json.dumps(known[name])))
            quarter = len(known[longest]) // 4
            known[longest] = f"{known[longest][:quarter]} [...] {known[longest][-quarter:]}"
        return line


class _BegunTransport:
    """The transport that aiohttp writes the next answer to, of which the first bytes were sent."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        self._connection.write_rest(data)

    def writelines(self, data: Iterable[bytes]) -> None:
        self._connection.write_rest(b"".join(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)


def _bind_advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "ports below 1024 need special rights; choose another with --port"
    reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
    return f"{reason}; choose another with --port (0 takes a free one) or --host"


@asynccontextmanager
async def serving(front: Front, listener: socket.socket, config: ServerConfig) -> AsyncIterator[Callable[[], int]]:
    """Serve a front on a socket, on the running event loop, until the end of the block. Yields a function that accepts no more
    connections, closes those between two requests, and returns the number of the others."""
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
    for begin in front.on_serving:
        begin()
    server = await asyncio.get_running_loop().create_server(factory, sock=listener, backlog=_BACKLOG)
    sweep = background(connections.sweep(), "closing connections that exceed a limit")

    def leave() -> int:
        server.close()
        return connections.close_idle()

    try:
        yield leave
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
    """The handler that aiohttp calls for each request. It cancels the call when the client leaves."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        exchange = _AiohttpExchange(request, connections)
        with connections.serving(exchange):
            answer = await front.serve(exchange)
        if answer is not None:
            return web.Response(
                body=answer.body, status=answer.status, headers={**answer.headers, **connections.headers}
            )
        return exchange.out or web.Response(status=CLIENT_GONE)

    return handle


class _ConnectionLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's logger. Strangers cannot fill the log: a request that is no HTTP is a line at level debug, no traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        # A body that cannot be read was answered; aiohttp says it again as it drops the rest.
        if isinstance(exc_info, (HttpProcessingError, web.RequestPayloadError)):
            self.debug("%s: %s", msg % args if isinstance(msg, str) else msg, exc_info)
        else:
            self.error(msg, *args, exc_info=exc_info, **more)


class _EventStream(web.StreamResponse):
    # aiohttp then sends the head together with the first bytes.
    _send_headers_immediately = False


class _AiohttpExchange:
    def __init__(self, request: web.BaseRequest, connections: ClientConnections) -> None:
        self.request, self._connections = request, connections
        self.method = request.method
        self.headers: Mapping[str, str] = request.headers
        self.address = request.remote
        self.path, self.query = request.rel_url.raw_path, request.rel_url.raw_query_string
        if request.rel_url.raw_fragment:  # no client sends one; what it would narrow is not done to all
            self.query += f"#{request.rel_url.raw_fragment}"
        self.out: _EventStream | None = None
        # Where `write_now` sends, while the answer is open and is sent as it is.
        self._writer: Any = None
        self._ended = False

    def arrived(self, limit: int) -> bytes | None:
        request = self.request
        length = request.content_length
        if length is None or length > limit or not request.content.is_eof() or "content-encoding" in self.headers:
            return None
        return request.content.read_nowait()

    async def pieces(self) -> AsyncIterator[bytes]:
        request = self.request
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

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> _AiohttpExchange:
        self.out = _EventStream(status=status, headers={**headers, **self._connections.headers})
        if self.request.version < HttpVersion11:
            self.out.force_close()  # nothing else tells where it ends
        try:
            writer = await self.out.prepare(self.request)
            if at_once and writer is not None:
                writer.send_headers()
            self._writer = writer
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        return self

    def write_now(self, data: bytes) -> bool:
        writer = self._writer
        # aiohttp sends the head with the first bytes, and waits for a slow client after each `_UNDRAINED` bytes.
        if writer is None or writer.output_size == 0 or writer.buffer_size > _UNDRAINED:
            return False
        transport = writer.transport
        if transport is None or transport.is_closing():
            return False
        piece = b"%x\r\n%b\r\n" % (len(data), data) if writer.chunked else data
        writer.buffer_size += len(piece)
        writer.output_size += len(piece)
        transport.write(piece)
        return True

    async def write(self, data: bytes) -> None:
        assert self.out is not None
        try:
            await self.out.write(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error

    async def end(self, data: bytes = b"") -> None:
        assert self.out is not None
        self._ended, self._writer = True, None
        try:
            await self.out.write_eof(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error

    @property
    def begun(self) -> bool:
        """Whether something of the answer was sent."""
        return self.request.writer.output_size > 0

    @property
    def comment(self) -> bytes:
        """A comment that may be sent between two writes of a stream of events; empty where nothing may."""
        if self.out is None or self._ended or self.out.content_type != "text/event-stream":
            return b""
        writer: Any = self.request.writer  # the response itself does not say
        return _COMMENT_CHUNK if writer.chunked else _COMMENT


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
        self.headers: Mapping[str, str] = _SERVER  # of all answers

    def __len__(self) -> int:
        return len(self._open)

    def factory(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], ClientConnection]:
        """A protocol factory that adds the limits to another one."""
        return lambda: ClientConnection(self, make())

    def serving(self, exchange: _AiohttpExchange) -> AbstractContextManager[None]:
        """The application serves this request in the block."""
        transport = exchange.request.transport
        connection = self._open.get(transport) if transport is not None else None
        if connection is None:
            return nullcontext()
        connection.exchange = exchange
        return connection

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

    def close_idle(self) -> int:
        """Close connections without a request. Answers of the others ask their clients to close. Returns how many are left."""
        self.headers = {**_SERVER, "connection": "close"}
        for transport, one in list(self._open.items()):
            if one.head_since is None and not one.requests:
                transport.close()
                del self._open[transport]
        return len(self._open)

    async def sweep(self) -> None:
        """Close connections that exceed a limit. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            for connection in list(self._open.values()):
                connection.look()
            overdue = [one for one in self._open.values() if self._overdue(one, now)]
            # Requests that have come while this process stood still were not read yet, or have not begun.
            for _ in range(_TURNS if overdue else 0):
                await asyncio.sleep(0)
            for connection in overdue:
                if reason := self._overdue(connection, time.monotonic()):
                    logger.debug("a client's connection was closed: %s", reason)
                    connection.transport.abort()

    def _overdue(self, connection: ClientConnection, now: float) -> str:
        since = connection.head_since
        if not connection.requests and since is not None and now - since > self._head_seconds:
            return "the head of a request was incomplete"
        return "it read nothing" if connection.unread_seconds(now) > self._write_seconds else ""


class ClientConnection(asyncio.Protocol):
    """A connection: hands everything on to aiohttp's protocol.

    Attributes:
        requests: number of requests that the application serves. exchange: the last one that it began to serve.
        head_since: when the client began to send a head; None while it has not.
    """

    __slots__ = (
        "_all",
        "_half_closed",
        "_inner",
        "_next_probe",
        "_pause",
        "_sent",
        "_unread",
        "_unread_since",
        "exchange",
        "head_since",
        "requests",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, connections: ClientConnections, inner: Any) -> None:
        self._all = connections
        self._inner = inner
        self._unread, self._unread_since = 0, 0.0
        self._half_closed = False
        self._sent = 0  # bytes of an answer that has not begun
        self._next_probe, self._pause = 0.0, _MORE_SECONDS
        self.requests = 0
        self.exchange: _AiohttpExchange | None = None
        self.head_since: float | None = time.monotonic()

    def __enter__(self) -> None:
        self.requests += 1
        self.head_since = None

    def __exit__(self, *error: object) -> None:
        self.requests -= 1
        if self._half_closed:
            self._settle(_TURNS)

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

    def eof_received(self) -> bool:
        """The client sends nothing more. The transport stays open for the answers to the requests that have come."""
        self._half_closed = True
        self._settle(_TURNS)
        return True

    def _settle(self, turns: int) -> None:
        """After some turns of the loop, in which aiohttp begins with the next request that has come: close the connection if
        there is none, or if its body will never be complete; else find out whether the client is there."""
        if self.transport.is_closing():
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._settle, turns - 1)
        elif self.requests and self.exchange is not None and self.exchange.request.content.is_eof():
            self._probe()
            asyncio.get_running_loop().call_later(_NEAR_SECONDS, self.look)
        elif (
            self.requests or not self.transport.get_write_buffer_size()
        ):  # while an answer waits, aiohttp begins with no request
            self.transport.close()

    def look(self) -> None:
        """Look after a client that has closed its side: has it gone, are its answers complete?"""
        if not self._half_closed or self.transport.is_closing():
            return
        if not self.requests:
            self._settle(_TURNS)
        elif self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif time.monotonic() >= self._next_probe:
            self._probe()

    def _probe(self) -> None:
        assert self.exchange is not None
        self._next_probe, self._pause = time.monotonic() + self._pause, 2 * self._pause
        if self.exchange.begun:
            self.transport.write(self.exchange.comment)
        elif self._sent < len(_START):
            self.transport.write(_START[self._sent : self._sent + 1])
            self._sent += 1
            self._inner.transport = _BegunTransport(self)

    def write_rest(self, data: bytes) -> None:
        """Send the start of an answer, of which some bytes were sent."""
        sent, self._sent = self._sent, 0
        self._inner.transport = self.transport
        if not data.startswith(_START[:sent]):
            self.transport.abort()
        else:
            self.transport.write(data[sent:])

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self.transport)
        self._inner.connection_lost(error)
