"""A client for the Redis protocol (RESP2) on one socket, with pipelining, deadlines and no copies of large values.

A payload is sent from the caller's memory with `sendmsg` and received into the caller's memory with `recv_into`. This
module does not know what the commands mean. dev/decisions/0008-store-clients.md compares it with redis-py.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from foreword.errors import (
    StoreConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTimeout,
    StoreUnavailable,
)
from foreword.store.base import RECORD_BYTES, time_left

_RECEIVE_BYTES: Final = 1 << 14  # receive buffer for lines; at most this much of a value is copied once more
_WINDOW: Final = (
    1 << 22
)  # bytes of answers asked for in advance; the server keeps them in memory that is fresh if it is more
_SMALL_REPLY: Final = 64  # assumed bytes of a reply without a value
_PARTS: Final = 512  # buffers per sendmsg, below IOV_MAX
_LARGEST_BLOCK: Final = 1 << 29  # bytes of a value that is read into a buffer or skipped, the limit of Redis itself
_LARGEST: Final = RECORD_BYTES + (1 << 20)  # bytes of any other value: a record in its envelope, a report of the server
_GROWTH: Final = 1 << 16  # at least this much of a value is allocated at once, otherwise what was received already
# Elements of one array, and bytes of one reply, in which each element counts for more than its own: it takes memory, too.
_MAX_ELEMENTS: Final = 1 << 20
_LARGEST_REPLY: Final = 1 << 27
_ELEMENT_BYTES: Final = 48
_MAX_DEPTH: Final = 4
_TIME = struct.Struct("@ll")


class ConnectionLost(StoreUnavailable):
    """The server closed the connection, or it broke. The same commands may succeed on a new connection."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply. The connection stays usable. `code` is the first word of the text."""

    code: str
    text: str

    def error(self) -> StoreError:
        """The exception that a store raises for it."""
        return _ERRORS.get(self.code, StoreUnavailable)(f"Redis returned an error: {self.text}")


_ERRORS: Final[dict[str, type[StoreError]]] = {
    "OOM": StoreFull,
    "READONLY": StoreReadOnly,
    "NOAUTH": StoreConfigError,
    "WRONGPASS": StoreConfigError,
    "NOPERM": StoreConfigError,
}

Kind = TypeVar("Kind", int, bytes, list[Any])
# A StoreError stands for a command whose reply did not come: its server failed, or the deadline passed.
Reply: TypeAlias = "bytes | int | ErrorReply | StoreError | list[Reply] | None"


@dataclass(frozen=True, slots=True)
class Command:
    """An encoded command.

    Attributes:
        key: selects the node of a cluster.
        parts: buffers to send in sequence.
        into: buffer for the value of the reply. The reply is then the value's length, None if there is no value. A value
            that is longer than the buffer is skipped.
    """

    key: bytes
    parts: tuple[bytes | memoryview, ...] = field(repr=False)  # those of AUTH contain a password
    into: memoryview | None = None

    @property
    def reply_bytes(self) -> int:
        """Estimated length of the reply."""
        return _SMALL_REPLY if self.into is None else _SMALL_REPLY + len(self.into)


def encode(*arguments: bytes) -> bytes:
    """Encode the arguments of a command."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in arguments)


def make_command(key: bytes, *arguments: bytes) -> Command:
    """A command with small arguments, for the node that has `key`."""
    return Command(key, (encode(*arguments),))


def expect(reply: Reply, kind: type[Kind]) -> Kind:
    """Return the reply if it has this type. Raises StoreError if it is an error or has another type."""
    if (error := error_of(reply)) is not None:
        raise error
    if not isinstance(reply, kind):
        raise StoreUnavailable(f"Redis did not reply with {kind.__name__}")
    return reply


def error_of(reply: Reply) -> StoreError | None:
    """The exception for a reply that is an error, or that did not come."""
    return reply.error() if isinstance(reply, ErrorReply) else reply if isinstance(reply, StoreError) else None


class RespConnection:
    """A connection, used by one thread at a time. It must be closed after any exception.

    Args:
        sock: a connected socket. Its timeouts are set here.
        close: called by `close`.
    """

    __slots__ = ("_close", "_end", "_left", "_received", "_sock", "_start", "_tls", "_view")

    def __init__(self, sock: socket.socket, close: Callable[[], None]) -> None:
        self._sock = sock
        self._close = close
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._received = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._received)
        self._start = self._end = 0
        self._left = 0  # bytes that the rest of a reply may take
        if not self._tls:
            sock.settimeout(
                None
            )  # SO_RCVTIMEO and SO_SNDTIMEO bound each call instead, so a value needs one system call

    def close(self) -> None:
        self._close()

    @property
    def idle(self) -> bool:
        """Whether nothing was received since the last reply, not even the end of the connection."""
        if self._start != self._end:
            return False
        if self._tls:
            return (
                True  # the socket may hold a session ticket; a closed connection is noticed when the reply is missing
            )
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def exchange(self, commands: Sequence[Command], replies: list[Reply], deadline: float) -> None:
        """Send the commands behind the first `len(replies)` and append their replies, in the same order.

        Raises StoreTimeout, StoreUnavailable. `replies` has then what was received until then.
        """
        sent = len(replies)
        outstanding = 0  # estimated bytes of replies not read yet
        while len(replies) < len(commands):
            if sent < len(commands) and outstanding <= _WINDOW // 2:
                parts: list[bytes | memoryview] = []
                while sent < len(commands) and (outstanding < _WINDOW or not parts):
                    parts += commands[sent].parts
                    outstanding += commands[sent].reply_bytes
                    sent += 1
                self._send(parts, deadline)
            command = commands[len(replies)]
            self._left = _LARGEST_REPLY
            replies.append(self._read(deadline) if command.into is None else self._read_into(command.into, deadline))
            outstanding -= command.reply_bytes
        if self._start != self._end:
            replies.clear()  # they may belong to other commands
            raise StoreUnavailable("Redis sent more replies than there were commands")

    def _read(self, deadline: float, depth: int = 0) -> Reply:
        self._take_up(_ELEMENT_BYTES)
        line = self._line(deadline)
        kind = line[:1]
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _error_reply(line)
        if kind == b"$":
            length = _number(line)
            if length == -1:
                return None
            return self._value(_checked(length, _LARGEST), deadline)
        if kind == b"*" and depth < _MAX_DEPTH:
            count = _number(line)
            return (
                None
                if count == -1
                else [self._read(deadline, depth + 1) for _ in range(_checked(count, _MAX_ELEMENTS))]
            )
        raise StoreUnavailable("the server does not speak the Redis protocol")

    def _value(self, length: int, deadline: float) -> bytes:
        """Receive a value. Its memory grows with what was received, not with what was announced."""
        self._take_up(length)
        value = bytearray()
        while len(value) < length:
            part = bytearray(min(length - len(value), max(len(value), _GROWTH)))
            self._fill(memoryview(part), deadline)
            value += part
        self._end_value(deadline)
        return bytes(value)

    def _take_up(self, size: int) -> None:
        """Count bytes of a reply. Raises StoreUnavailable where they are too many."""
        self._left -= size
        if self._left < 0:
            raise StoreUnavailable(f"Redis answers with more than {_LARGEST_REPLY >> 20} MiB at once")

    def _read_into(self, into: memoryview, deadline: float) -> int | ErrorReply | None:
        line = self._line(deadline)
        if line[:1] == b"-":
            return _error_reply(line)
        if line[:1] != b"$":
            raise StoreUnavailable("Redis did not reply with a value")
        length = _number(line)
        if length == -1:
            return None
        if _checked(length, _LARGEST_BLOCK) > len(into):
            self._skip(length, deadline)
        else:
            self._fill(into[:length], deadline)
        self._end_value(deadline)
        return length

    def _fill(self, view: memoryview, deadline: float) -> None:
        """Receive the next bytes of a value."""
        have = min(len(view), self._end - self._start)
        view[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(view):
            have += self._receive(view[have:], deadline, whole=True)

    def _skip(self, length: int, deadline: float) -> None:
        """Receive and discard a value of known length."""
        scratch = memoryview(bytearray(min(length, 1 << 16)))
        have = min(length, self._end - self._start)
        self._start += have
        while have < length:
            have += self._receive(scratch[: length - have], deadline)

    def _end_value(self, deadline: float) -> None:
        """Receive the line end after a value."""
        if self._line(deadline):
            raise StoreUnavailable("a value from Redis is longer than announced")

    def _line(self, deadline: float) -> bytes:
        """Receive the next line, without its end."""
        while True:
            found = self._received.find(b"\r\n", self._start, self._end)
            if found >= 0:
                line = bytes(self._view[self._start : found])
                self._start = found + 2
                return line
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
            if rest == _RECEIVE_BYTES:
                raise StoreUnavailable("the server does not speak the Redis protocol")
            self._end += self._receive(self._view[rest:], deadline)

    def _receive(self, view: memoryview, deadline: float, *, whole: bool = False) -> int:
        """Receive at least one byte. With `whole`, receive the entire view in one call if possible."""
        left = time_left(deadline)
        try:
            if self._tls:
                self._sock.settimeout(left)
                count = self._sock.recv_into(view)
            else:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
        except (TimeoutError, BlockingIOError):
            raise StoreTimeout("Redis did not reply in time") from None
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from None
        if not count:
            raise ConnectionLost("Redis closed the connection")
        return count

    def _send(self, parts: list[bytes | memoryview], deadline: float) -> None:
        try:
            if self._tls:
                for part in parts:
                    self._sock.settimeout(time_left(deadline))
                    self._sock.sendall(part)
                return
            first = 0
            while first < len(parts):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(time_left(deadline)))
                sent = self._sock.sendmsg(parts[first : first + _PARTS])
                while first < len(parts) and sent >= len(parts[first]):
                    sent -= len(parts[first])
                    first += 1
                if sent:
                    parts[first] = memoryview(parts[first])[sent:]
        except (TimeoutError, BlockingIOError):
            raise StoreTimeout("Redis did not accept the data in time") from None
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from None


def _timeval(seconds: float) -> bytes:
    """Encode a timeout for SO_RCVTIMEO. At least 1 ms, since 0 would mean no timeout."""
    micros = max(1000, int(seconds * 1e6))
    return _TIME.pack(micros // 1_000_000, micros % 1_000_000)


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise StoreUnavailable("the server does not speak the Redis protocol") from None


def _checked(length: int, most: int) -> int:
    if not 0 <= length <= most:
        raise StoreUnavailable("the server does not speak the Redis protocol")
    return length


def _error_reply(line: bytes) -> ErrorReply:
    text = line[1:].decode("utf-8", "replace")
    return ErrorReply(text.partition(" ")[0], text)
