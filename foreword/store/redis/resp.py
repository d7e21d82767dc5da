"""The bare Redis protocol (RESP2) on one socket: commands go out in a row, answers come back in the same order.

Values are neither joined with anything nor split: a payload leaves from the caller's memory with `sendmsg` and arrives in
the caller's memory with `recv_into`. Nothing here knows what a command means.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from foreword.errors import (
    StoreConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTimeout,
    StoreUnavailable,
)
from foreword.store.base import time_left

_HELD: Final = 1 << 14  # what is received beyond a line waits here; at most so much of a value is copied once more
_WINDOW: Final = (
    1 << 22
)  # bytes of answers asked for in advance; the server keeps them in memory that is fresh if it is more
_LEAST: Final = 64  # what any answer counts for
_PARTS: Final = 512  # buffers per sendmsg, below IOV_MAX
_LARGEST: Final = 1 << 29  # of one value, Redis's own bound
_MOST: Final = 1 << 20  # elements of one array
_DEEPEST: Final = 4
_TIME = struct.Struct("@ll")


class ConnectionLost(StoreUnavailable):
    """The peer closed the connection, or it broke: the same commands may succeed on another one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the server sent in place of an answer; the connection is fine. `code` is its first word."""

    code: str
    text: str

    def error(self) -> StoreError:
        """What a store raises for it."""
        return _ERRORS.get(self.code, StoreUnavailable)(f"Redis refuses: {self.text}")


_ERRORS: Final[dict[str, type[StoreError]]] = {
    "OOM": StoreFull,
    "READONLY": StoreReadOnly,
    "NOAUTH": StoreConfigError,
    "WRONGPASS": StoreConfigError,
    "NOPERM": StoreConfigError,
}

Reply: TypeAlias = "bytes | int | Refusal | list[Reply] | None"


@dataclass(frozen=True, slots=True)
class Command:
    """One command in the form in which it is sent.

    Attributes:
        key: what decides which node of a cluster gets it.
        parts: buffers that are sent one after the other.
        into: where the value of the answer goes; the answer is then its length, 0 where there is none or it does not fit.
    """

    key: bytes
    parts: tuple[bytes | memoryview, ...] = field(repr=False)  # AUTH's hold a password
    into: memoryview | None = None

    @property
    def awaits(self) -> int:
        """Bytes of the answer, about."""
        return _LEAST if self.into is None else _LEAST + len(self.into)


def encode(*words: bytes) -> bytes:
    """Words in the form in which they are sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def words(key: bytes, *each: bytes) -> Command:
    """A command of small words, for the node that has `key`."""
    return Command(key, (encode(*each),))


def as_number(reply: Reply) -> int:
    """The number that was answered. Raises StoreError for a refusal or anything else."""
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, int):
        raise StoreUnavailable("Redis answered something else than a number")
    return reply


def as_value(reply: Reply) -> bytes:
    """The value that was answered. Raises StoreError."""
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, bytes):
        raise StoreUnavailable("Redis answered something else than a value")
    return reply


def as_values(reply: Reply) -> list[bytes]:
    """The list of values that was answered. Raises StoreError."""
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, list):
        raise StoreUnavailable("Redis answered something else than a list")
    return [as_value(element) for element in reply]


class Wire:
    """One connection. For one thread at a time; after any error but a refusal it must be closed.

    Args:
        sock: connected; its timeouts are set here.
        close: called once by `close`.
    """

    __slots__ = ("_close", "_end", "_held", "_sock", "_start", "_tls", "_view")

    def __init__(self, sock: socket.socket, close: Callable[[], None]) -> None:
        self._sock = sock
        self._close = close
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._held = bytearray(_HELD)
        self._view = memoryview(self._held)
        self._start = self._end = 0
        if not self._tls:
            sock.settimeout(
                None
            )  # SO_RCVTIMEO and SO_SNDTIMEO bound each call in its place: a value in one system call

    def close(self) -> None:
        self._close()

    @property
    def quiet(self) -> bool:
        """Whether nothing has come in since the last answer: not even the peer's goodbye."""
        if self._start != self._end:
            return False
        if self._tls:
            return True  # a ticket may be in the socket; a goodbye is noticed when the answer is missing
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def exchange(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Send all commands and read all answers. Raises StoreTimeout, StoreUnavailable."""
        replies: list[Reply] = []
        sent = awaited = 0
        while len(replies) < len(commands):
            if sent < len(commands) and awaited <= _WINDOW // 2:
                parts: list[bytes | memoryview] = []
                while sent < len(commands) and (awaited < _WINDOW or not parts):
                    parts += commands[sent].parts
                    awaited += commands[sent].awaits
                    sent += 1
                self._send(parts, deadline)
            command = commands[len(replies)]
            replies.append(self._read(deadline) if command.into is None else self._read_into(command.into, deadline))
            awaited -= command.awaits
        if self._start != self._end:
            raise StoreUnavailable("Redis answered more than it was asked")
        return replies

    def _read(self, deadline: float, depth: int = 0) -> Reply:
        line = self._line(deadline)
        kind = line[:1]
        if kind == b":":
            return _number(line)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _refusal(line)
        if kind == b"$":
            length = _number(line)
            if length == -1:
                return None
            value = bytearray(_checked(length, _LARGEST))
            self._fill(memoryview(value), deadline)
            return bytes(value)
        if kind == b"*" and depth < _DEEPEST:
            count = _number(line)
            return None if count == -1 else [self._read(deadline, depth + 1) for _ in range(_checked(count, _MOST))]
        raise StoreUnavailable("what answers is not Redis")

    def _read_into(self, into: memoryview, deadline: float) -> int | Refusal:
        line = self._line(deadline)
        if line[:1] == b"-":
            return _refusal(line)
        if line[:1] != b"$":
            raise StoreUnavailable("Redis answered something that is not a value")
        length = _number(line)
        if length == -1:
            return 0
        if _checked(length, _LARGEST) > len(into):
            self._skip(length, deadline)
            return 0
        self._fill(into[:length], deadline)
        return length

    def _fill(self, view: memoryview, deadline: float) -> None:
        """A value of known length and the end of line after it."""
        have = min(len(view), self._end - self._start)
        view[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(view):
            have += self._receive(view[have:], deadline, whole=True)
        if self._line(deadline):
            raise StoreUnavailable("a value from Redis is longer than it was said to be")

    def _skip(self, length: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(length, 1 << 16)))
        have = min(length, self._end - self._start)
        self._start += have
        while have < length:
            have += self._receive(scratch[: length - have], deadline)
        if self._line(deadline):
            raise StoreUnavailable("a value from Redis is longer than it was said to be")

    def _line(self, deadline: float) -> bytes:
        """The next line without its end."""
        while True:
            found = self._held.find(b"\r\n", self._start, self._end)
            if found >= 0:
                line = bytes(self._view[self._start : found])
                self._start = found + 2
                return line
            rest = self._end - self._start
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
            if rest == _HELD:
                raise StoreUnavailable("what answers is not Redis")
            self._end += self._receive(self._view[rest:], deadline)

    def _receive(self, view: memoryview, deadline: float, *, whole: bool = False) -> int:
        """At least one byte; with `whole` all of the view in one call where the system can."""
        left = time_left(deadline)
        try:
            if self._tls:
                self._sock.settimeout(left)
                count = self._sock.recv_into(view)
            else:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
        except (TimeoutError, BlockingIOError):
            raise StoreTimeout("Redis did not answer in time") from None
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
            raise StoreTimeout("Redis did not take what was sent in time") from None
        except OSError as error:
            raise ConnectionLost(f"the connection to Redis broke: {error}") from None


def _timeval(seconds: float) -> bytes:
    """For SO_RCVTIMEO; 0 would mean without end."""
    micros = max(1000, int(seconds * 1e6))
    return _TIME.pack(micros // 1_000_000, micros % 1_000_000)


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise StoreUnavailable("what answers is not Redis") from None


def _checked(length: int, most: int) -> int:
    if not 0 <= length <= most:
        raise StoreUnavailable("what answers is not Redis")
    return length


def _refusal(line: bytes) -> Refusal:
    text = line[1:].decode("utf-8", "replace")
    return Refusal(text.partition(" ")[0], text)
