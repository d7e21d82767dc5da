"""A gRPC server of a few methods, on the event loop: HTTP/2 (RFC 9113) as far as gateways and probes speak it.

All that a client may do with few bytes is bounded: streams, headers, messages, what is held of all of them, and answers that it
does not read.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, cast
from urllib.parse import quote

from hpack import Decoder, HPACKError

from foreword.api.errors import MAX_BODY_BYTES
from foreword.tasks import background

logger = logging.getLogger(__name__)
# The library logs every header of every call at level debug.
logging.getLogger("hpack").setLevel(logging.WARNING)

# Status codes of gRPC.
_OK: Final = 0
_UNKNOWN: Final = 2
_LATE: Final = 4
NOT_FOUND: Final = 5
_EXHAUSTED: Final = 8
_UNIMPLEMENTED: Final = 12
_INTERNAL: Final = 13
UNAVAILABLE: Final = 14

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = struct.Struct(">BHBBI")
_HEAD_BYTES: Final = _HEAD.size
# Kinds of frames.
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _AWAY, _WINDOW, _MORE = range(10)
# Flags: of frames of settings and pings, of those with a stream's bytes, and of headers.
_ACK: Final = 1
_LAST: Final = 1
_WHOLE: Final = 4
_PADDED: Final = 8
_RANKED: Final = 32
# Errors of HTTP/2.
_NO_ERROR, _PROTOCOL_ERROR, _INTERNAL_ERROR, _FLOW_ERROR, _, _CLOSED, _SIZE_ERROR, _REFUSED, _CANCEL, _TABLE_ERROR = (
    range(10)
)
_TOO_MUCH: Final = 11

# The largest frame that is taken, and that is sent until the client says otherwise: what HTTP/2 begins with.
_FRAME_BYTES: Final = 16_384
_FIRST_WINDOW: Final = 65_535
_MOST_WINDOW: Final = (1 << 31) - 1
# Bytes of messages that may be under way: of a stream, unless it waits for more of one message, and of a connection.
_STREAM_WINDOW: Final = 1 << 20
_CONNECTION_WINDOW: Final = 16 << 20
# A body in one message, and its envelope.
_MESSAGE_BYTES: Final = MAX_BODY_BYTES + (1 << 20)
# Bytes of all messages that are not whole, or not read yet.
_HELD_BYTES: Final = 512 << 20
# Calls per connection; a gateway opens one connection more. And calls of all connections, and connections: a gateway has one or
# two for each of its threads.
_CALLS: Final = 100
_ALL_CALLS: Final = 8192
_CONNECTIONS: Final = 1024
# Connections count once their TLS handshake has ended.
_HANDSHAKE_SECONDS: Final = 10.0
# A gateway that disappeared without a word: its calls end, and with them their requests' load.
_QUIET_SECONDS: Final = 20.0
_ANSWER_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05
_BACKLOG: Final = 1024
# Headers of a call: bytes of their block, and what it says, as HTTP/2 counts: an index of one byte may name thousands.
_HEADER_BYTES: Final = 64 << 10
_MOST_PARTS: Final = 16
# A message that waits takes this beside its bytes.
_WAITING_BYTES: Final = 64
# A call without a message ends after so many times of `_QUIET_SECONDS`. A call whose answers are not read has longer: its
# gateway may wait for a slow client.
_SILENT_BEATS: Final = 3
_BLOCKED_BEATS: Final = 30

_PREFIX: Final = struct.Struct(">BI")
_TYPE: Final = b"\x0f\x10\x10application/grpc"  # content-type, which has a number among the names that HTTP/2 knows
_BEGIN: Final = b"\x88" + _TYPE  # status 200
_SETTING: Final = struct.Struct(">HI")
_MOST_STREAMS, _WINDOW_OF_STREAMS, _SIZE_OF_FRAMES, _SIZE_OF_HEADERS = 3, 4, 5, 6


class GrpcError(Exception):
    """A call ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientFault(GrpcError):
    """A client has sent what is no message of the method."""

    def __init__(self, message: str) -> None:
        super().__init__(_INTERNAL, message)


class _ConnectionFault(Exception):
    """The connection ends with this error of HTTP/2."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class GrpcCall:
    """A call: an iterator over the client's messages, which raises what `decode` does, and `write` for the answers.

    Its handler is cancelled if the client cancels the call or the connection breaks.
    """

    __slots__ = (
        "_beats",
        "_begun",
        "_blocked",
        "_closed",
        "_connection",
        "_decode",
        "_ended",
        "_heard",
        "_messages",
        "_number",
        "_owed",
        "_part",
        "_room",
        "_running",
        "_task",
        "_unread",
        "_waiting",
        "window",
    )

    def __init__(
        self, connection: GrpcConnection, number: int, window: int, decode: Callable[[bytes], Any] = bytes
    ) -> None:
        self._connection, self._number, self.window, self._decode = connection, number, window, decode
        self._messages = deque[bytes]()
        self._part = bytearray()
        self._unread = self._owed = 0
        self._room = _STREAM_WINDOW
        self._begun = self._ended = self._closed = self._heard = self._blocked = self._running = False
        self._beats = 0
        self._waiting: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        message = self._messages.popleft()
        self._hold(-len(message) - _WAITING_BYTES)
        if self._owed:
            self._grant()
        return self._decode(message)

    async def write(self, message: bytes) -> None:
        """Send an answer. Waits while the client takes no more."""
        data, connection, at = _PREFIX.pack(0, len(message)) + message, self._connection, 0
        head = b"" if self._begun else _frame(_HEADERS, _WHOLE, self._number, _BEGIN)
        self._begun = True
        while at < len(data):
            most = min(self.window, connection.window, connection.frame_bytes, len(data) - at)
            if most <= 0 or connection.is_full:
                if head:
                    connection.send(head)
                    head = b""
                self._blocked = True
                await connection.changed()
                continue
            self.window -= most
            connection.window -= most
            connection.send(head + _frame(_DATA, 0, self._number, data[at : at + most]))
            head, at, self._blocked, self._beats = b"", at + most, False, 0

    # For its connection

    def start(self, handler: Handler) -> None:
        self._connection.running += 1
        self._connection.server.open += 1
        self._running = True
        self._task = background(self._run(handler), "a call of a gateway")

    def beat(self) -> None:
        """End a call that makes no progress. Called once per interval of silence."""
        if self._blocked or not self._heard:
            self._beats += 1
            most, why = (_BLOCKED_BEATS, "its answers are not read") if self._blocked else (_SILENT_BEATS, "no message")
            if self._beats > most:
                self._fail(_LATE, why)

    def take(self, data: bytes, *, counted: int, last: bool) -> None:
        """The next bytes of the client's messages, of a frame with `counted` bytes."""
        if self._ended:
            self._connection.reset(self._number, _CLOSED)
            self.cancel()
            return
        self._room -= counted
        if self._room < 0:
            raise _ConnectionFault(_FLOW_ERROR, "more bytes than the window of the stream")
        self._owed += counted
        self._heard = True
        self._part += data
        if not self._hold(len(data)):
            return
        at = 0
        while len(self._part) - at >= _PREFIX.size:
            packed, size = _PREFIX.unpack_from(self._part, at)
            if packed or size > _MESSAGE_BYTES:
                status, why = (_UNIMPLEMENTED, "compressed") if packed else (_EXHAUSTED, f"of {size} bytes")
                self._fail(status, f"a message that is {why}")
                return
            end = at + _PREFIX.size + size
            if len(self._part) < end:
                break
            self._messages.append(bytes(self._part[at + _PREFIX.size : end]))
            at = end
            if not self._hold(_WAITING_BYTES - _PREFIX.size):
                return
        del self._part[:at]
        if last:
            self.half_closed()
        else:
            self._grant()
        self._wake()

    def half_closed(self) -> None:
        """The client sends no more."""
        self._ended = True
        if self._part:
            self._fail(_INTERNAL, "a message that does not come to its end")
        self._wake()

    def cancel(self) -> None:
        """The client has cancelled the call, or the connection is lost."""
        self._close()
        self._stop()

    # Internals

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done() and (self._messages or self._ended):
            self._waiting.set_result(None)

    def _hold(self, more: int) -> bool:
        """Count these bytes. False if the call has ended for them."""
        self._unread += more
        self._connection.server.held += more
        if more > 0 and self._connection.server.held > _HELD_BYTES:
            self._fail(_EXHAUSTED, "too many bytes of messages are held")
            return False
        return True

    def _grant(self) -> None:
        """Let the client send more, if what it has sent was read, or is a part of one message."""
        if (
            self._owed >= _STREAM_WINDOW // 2
            and (not self._messages or self._unread < _STREAM_WINDOW)
            and not self._ended
        ):
            self._connection.grant(self._number, self._owed)
            self._room += self._owed
            self._owed = 0

    def _fail(self, status: int, why: str) -> None:
        """End a call whose client has done what it must not."""
        self._end(status, why)
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            # A task that has not begun never comes to the end of `_run`.
            self._task.add_done_callback(self._over)
            self._task.cancel()

    def _over(self, _: object = None) -> None:
        """Let another call take the place of this one, whose handler has ended: until then it takes memory."""
        if self._running:
            self._running = False
            self._connection.running -= 1
            self._connection.server.open -= 1

    def _close(self) -> None:
        """Nothing comes any more, and nothing is sent."""
        if not self._closed:
            self._closed = True
            self._connection.server.held -= self._unread
            self._unread = 0
            self._messages.clear()
            self._part.clear()
            self._connection.left(self._number)

    def _end(self, status: int, why: str = "") -> None:
        """Send the status."""
        if self._closed:
            return
        block = b"" if self._begun else _BEGIN
        block += _field(b"grpc-status", b"%d" % status)
        if why:
            block += _field(b"grpc-message", quote(why[:200], safe=" ,;:/()'").encode())
        self._connection.send(_frame(_HEADERS, _WHOLE | _LAST, self._number, block))
        if not self._ended:
            self._connection.reset(self._number, _NO_ERROR)
        self._close()

    async def _run(self, handler: Handler) -> None:
        try:
            await handler(self)
        except GrpcError as error:
            self._end(error.status, str(error))
        except asyncio.CancelledError:
            if not self._closed:
                self._connection.reset(self._number, _CANCEL)
                self._close()
        except Exception:  # the edge of one call
            logger.exception("a call failed")
            self._end(_UNKNOWN, "internal error")
        else:
            self._end(_OK)
        finally:
            self._task = None  # its frames have this call: a reference cycle
            self._over()


Handler = Callable[[GrpcCall], Coroutine[Any, Any, None]]


class GrpcConnection(asyncio.Protocol):
    """A connection of a client.

    Attributes:
        window: bytes of answers that the client takes now, of all calls. frame_bytes: of one frame.
        is_full: the system takes no more bytes now.
        running: handlers of calls that have not ended, also of calls that the client has cancelled.
    """

    transport: asyncio.Transport

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.window, self.frame_bytes, self.is_full = _FIRST_WINDOW, _FRAME_BYTES, False
        self.calls: dict[int, GrpcCall] = {}
        self.running = 0
        self._kept = bytearray()
        self._begun = self._leaving = self._lost = False
        self._decoder = Decoder(_HEADER_BYTES)
        self._newest = 0
        self._stream_window = _FIRST_WINDOW
        # The headers of a stream whose block goes on in the next frame.
        self._block, self._block_of, self._block_flags, self._parts = bytearray(), 0, 0, 0
        self._room, self._owed = _CONNECTION_WINDOW, 0
        self._waiting = set[asyncio.Future[None]]()
        self._heard = self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        settings = {_MOST_STREAMS: _CALLS, _WINDOW_OF_STREAMS: _STREAM_WINDOW, _SIZE_OF_HEADERS: _HEADER_BYTES}
        self.send(_frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings.items())))
        if not self.server.admit(self):
            self._fail(_ConnectionFault(_TOO_MUCH, "too many connections"))
            return
        self.grant(0, _CONNECTION_WINDOW - _FIRST_WINDOW)
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._beat)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.server.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        for call in list(self.calls.values()):
            call.cancel()
        self._notify()

    def pause_writing(self) -> None:
        # A client that reads no answers asks for no more of them.
        self.is_full = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_full = False
        if not self.transport.is_closing():
            self.transport.resume_reading()
        self._notify()

    def data_received(self, data: bytes) -> None:
        if self._lost:
            return
        self._heard, self._asked = True, False
        kept = self._kept
        kept += data
        at = 0
        try:
            if not self._begun:
                if not kept.startswith(_PREFACE[: len(kept)]):
                    raise _ConnectionFault(_PROTOCOL_ERROR, "this is not HTTP/2")
                if len(kept) < len(_PREFACE):
                    return
                self._begun, at = True, len(_PREFACE)
            while len(kept) - at >= _HEAD_BYTES:
                high, low, kind, flags, number = _HEAD.unpack_from(kept, at)
                start = at + _HEAD_BYTES
                at = start + (high << 16 | low)
                if at - start > _FRAME_BYTES:
                    raise _ConnectionFault(_SIZE_ERROR, "a frame is too large")
                if len(kept) < at:
                    at = start - _HEAD_BYTES
                    break
                self._take(kind, flags, number & _MOST_WINDOW, bytes(kept[start:at]))
        except _ConnectionFault as fault:
            self._fail(fault)
            return
        del kept[:at]

    # For its calls

    def send(self, data: bytes) -> None:
        if not self._lost:
            self.transport.write(data)

    def grant(self, number: int, more: int) -> None:
        """Let the client send more of a stream; 0 for all."""
        self.send(_frame(_WINDOW, 0, number, more.to_bytes(4, "big")))

    def reset(self, number: int, code: int) -> None:
        self.send(_frame(_RESET, 0, number, code.to_bytes(4, "big")))

    async def changed(self) -> None:
        """Wait until the client may take more."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def left(self, number: int) -> None:
        """A call has ended."""
        self.calls.pop(number, None)
        if self._leaving and not self.calls:
            self._ask()

    def give_way(self) -> None:
        """End for another connection, without a call. A frame says that nothing of what its client may have sent was done."""
        unread = self.transport.get_write_buffer_size()
        self._fail(_ConnectionFault(_NO_ERROR, "another connection takes its place"))
        if unread:  # it would keep its place until the client reads
            self.transport.abort()

    def leave(self) -> None:
        """Tell the client to open its next calls elsewhere; those that are open go to their end."""
        if not self._leaving:
            self._leaving = True
            self._away(_MOST_WINDOW, _NO_ERROR)
            if not self.calls:
                self._ask()

    # Internals

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _away(self, last: int, code: int) -> None:
        self.send(_frame(_AWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big")))

    def _ask(self) -> None:
        self.send(_frame(_PING, 0, 0, bytes(8)))

    def _fail(self, fault: _ConnectionFault) -> None:
        logger.debug("a client of the picker: %s", fault)
        self._away(self._newest, fault.code)
        self._lost = True
        self._kept.clear()
        self.transport.close()

    def _beat(self) -> None:
        """Ask a client of which nothing was heard, and end one that does not answer."""
        if self._asked:
            self.transport.abort()
            return
        if not self._heard:
            self._asked = True
            self._ask()
        self._heard = False
        for call in list(self.calls.values()):
            call.beat()
        pause = _ANSWER_SECONDS if self._asked else _QUIET_SECONDS
        self._timer = asyncio.get_running_loop().call_later(pause, self._beat)

    def _take(self, kind: int, flags: int, number: int, data: bytes) -> None:
        if self._block_of and (kind != _MORE or number != self._block_of):
            raise _ConnectionFault(_PROTOCOL_ERROR, "a frame within a block of headers")
        if kind == _DATA:
            self._take_data(flags, number, data)
        elif kind == _HEADERS:
            if not number % 2:
                raise _ConnectionFault(_PROTOCOL_ERROR, "headers of a stream that no client may open")
            data = _unpadded(flags, data)
            self._block_of, self._block_flags, self._block = number, flags, bytearray()
            self._take_block(flags, data[5:] if flags & _RANKED else data)
        elif kind == _MORE:
            if not self._block_of:
                raise _ConnectionFault(_PROTOCOL_ERROR, "a block of headers that has not begun")
            self._take_block(flags, data)
        elif kind == _WINDOW:
            self._take_window(number, data)
        elif kind == _RESET:
            if len(data) != 4 or not number or number > self._newest:
                raise _ConnectionFault(_PROTOCOL_ERROR, "a reset of nothing")
            if (call := self.calls.get(number)) is not None:
                call.cancel()
        elif kind == _SETTINGS:
            self._take_settings(flags, number, data)
        elif kind == _PING:
            self._take_ping(flags, number, data)
        elif kind == _PUSH:
            raise _ConnectionFault(_PROTOCOL_ERROR, "a push of a client")

    def _take_data(self, flags: int, number: int, data: bytes) -> None:
        self._room -= len(data)
        self._owed += len(data)
        if self._room < 0:
            raise _ConnectionFault(_FLOW_ERROR, "more bytes than the window of the connection")
        if self._owed >= _CONNECTION_WINDOW // 2:
            self.grant(0, self._owed)
            self._room, self._owed = self._room + self._owed, 0
        call = self.calls.get(number)
        if call is not None:
            call.take(_unpadded(flags, data), counted=len(data), last=bool(flags & _LAST))
        elif not number % 2 or number > self._newest:
            raise _ConnectionFault(_PROTOCOL_ERROR, "data of a stream that is not open")

    def _take_block(self, flags: int, data: bytes) -> None:
        block = self._block
        self._parts += 1
        if len(block) + len(data) > _HEADER_BYTES or self._parts > _MOST_PARTS:
            raise _ConnectionFault(_TOO_MUCH, "the headers are too large")
        block += data
        if not flags & _WHOLE:
            return
        number, self._block_of, self._parts = self._block_of, 0, 0
        try:
            headers = self._decoder.decode(bytes(block), raw=True)
        except HPACKError as fault:
            raise _ConnectionFault(_TABLE_ERROR, str(fault)) from None
        self._open(number, dict(headers), last=bool(self._block_flags & _LAST))

    def _open(self, number: int, headers: Mapping[bytes, bytes], *, last: bool) -> None:
        if number <= self._newest:
            # Trailers, which gRPC's clients do not send; of a call that was ended here they may be under way.
            if last and (known := self.calls.get(number)) is not None:
                known.half_closed()
            return
        self._newest = number
        server = self.server
        if self.running >= _CALLS or server.open >= _ALL_CALLS:
            self.reset(number, _REFUSED)
            return
        decode, handler = server.methods.get(headers.get(b":path", b""), (bytes, _no_method))
        call = self.calls[number] = GrpcCall(self, number, self._stream_window, decode)
        call.start(handler)
        if last:
            call.half_closed()

    def _take_window(self, number: int, data: bytes) -> None:
        more = int.from_bytes(data, "big") & _MOST_WINDOW
        if len(data) != 4 or not more or number > self._newest:
            raise _ConnectionFault(_PROTOCOL_ERROR, "a window that grows by nothing")
        grows = self.calls.get(number) if number else self
        if grows is not None:
            grows.window += more
            if grows.window > _MOST_WINDOW:
                raise _ConnectionFault(_FLOW_ERROR, "a window is too large")
        self._notify()

    def _take_settings(self, flags: int, number: int, data: bytes) -> None:
        if number or len(data) % 6 or (flags & _ACK and data):
            raise _ConnectionFault(_SIZE_ERROR, "settings that are none")
        if flags & _ACK:
            return
        given = dict(_SETTING.iter_unpack(data))
        window, size = given.get(_WINDOW_OF_STREAMS, self._stream_window), given.get(_SIZE_OF_FRAMES, self.frame_bytes)
        if window > _MOST_WINDOW:
            raise _ConnectionFault(_FLOW_ERROR, "a window is too large")
        if not _FRAME_BYTES <= size < 1 << 24:
            raise _ConnectionFault(_PROTOCOL_ERROR, "frames of a size that is not allowed")
        if window != self._stream_window:
            for call in self.calls.values():
                call.window += window - self._stream_window
                if call.window > _MOST_WINDOW:
                    raise _ConnectionFault(_FLOW_ERROR, "a window is too large")
        self._stream_window, self.frame_bytes = window, size
        self.send(_frame(_SETTINGS, _ACK, 0, b""))
        self._notify()

    def _take_ping(self, flags: int, number: int, data: bytes) -> None:
        if number or len(data) != 8:
            raise _ConnectionFault(_SIZE_ERROR, "a ping that is none")
        if not flags & _ACK:
            self.send(_frame(_PING, _ACK, 0, data))
        elif self._leaving and not self.calls:
            # It has heard that it is to leave, and what it had sent before has arrived.
            self._away(self._newest, _NO_ERROR)
            self.transport.close()


class GrpcServer:
    """Serves these methods, by path: what decodes their messages, and what handles a call.

    Attributes:
        held: bytes of messages that are not read yet. open: calls whose handlers have not ended.
        connections: those that count, the oldest first.
    """

    def __init__(self, methods: Mapping[str, tuple[Callable[[bytes], Any], Handler]]) -> None:
        self.methods = {path.encode(): method for path, method in methods.items()}
        self.held = self.open = 0
        self.connections = dict[GrpcConnection, None]()
        self._servers: list[asyncio.Server] = []

    async def start(self, sock: Any, context: ssl.SSLContext | None) -> None:
        """Serve on a listening socket."""
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(
                lambda: GrpcConnection(self),
                sock=sock,
                ssl=context,
                backlog=_BACKLOG,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS if context is not None else None,
            )
        )

    def admit(self, connection: GrpcConnection) -> bool:
        """Count a connection. At the limit the oldest one without a call ends for it; False if all have calls."""
        if len(self.connections) >= _CONNECTIONS:
            idle = next((one for one in self.connections if not one.running), None)
            if idle is None:
                return False
            del self.connections[idle]
            idle.give_way()
        self.connections[connection] = None
        return True

    async def stop(self, seconds: float) -> None:
        """Take no connections, tell clients to leave, and end what runs after this time."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.leave()
        limit = asyncio.get_running_loop().time() + seconds
        while self.connections and asyncio.get_running_loop().time() < limit:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.connections):
            connection.transport.abort()


async def _no_method(call: GrpcCall) -> None:
    raise GrpcError(_UNIMPLEMENTED, "there is no such method")


def _frame(kind: int, flags: int, number: int, data: bytes) -> bytes:
    size = len(data)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + data


def _field(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps."""
    return b"\0" + _text(name) + _text(value)


def _text(value: bytes) -> bytes:
    size, length = len(value), bytearray()
    if size < 127:
        return bytes([size]) + value
    size -= 127
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([127, *length, size]) + value


def _unpadded(flags: int, data: bytes) -> bytes:
    if not flags & _PADDED:
        return data
    if not data or data[0] >= len(data):
        raise _ConnectionFault(_PROTOCOL_ERROR, "more padding than bytes")
    return data[1 : len(data) - data[0]]
