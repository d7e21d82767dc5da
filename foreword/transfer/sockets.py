"""Sockets: addresses, options, and a stream that sends from and receives into the caller's memory.

Every system call returns after a quarter of a second at most, and the caller then checks its deadline. So no call hangs, and
no timeout has to be set for a single call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.errors import ConfigError
from foreword.host_addresses import is_loopback
from foreword.transfer.errors import PeerGone, TransferTimeout, TransferUnavailable
from foreword.transfer.wire_format import Buffer

POLL_SECONDS: Final = 0.25
_TIMEVAL: Final = struct.pack("ll", 0, int(POLL_SECONDS * 1e6))
_MAX_BUFFERS: Final = 256
_READ_AHEAD: Final = 4096
_LARGE: Final = 256 << 10
_CHUNK: Final = 64 << 10
# A peer that takes fewer bytes per second than this counts as stalled.
_SLOWEST: Final = 1 << 20
_BACKLOG: Final = 64
_UNIX: Final = "unix:"
_GONE: Final = frozenset({errno.ECONNREFUSED, errno.ENOENT})


@dataclass(frozen=True, slots=True)
class Address:
    """`host:port`, `[v6 host]:port`, or `unix:/path`."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return _UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """A Unix socket, or a name or address of the loopback interface."""
        return bool(self.path) or is_loopback(self.host)


def parse_address(text: str) -> Address:
    """Raises ConfigError."""
    if not _encodable(text):
        raise ConfigError(f"{text!r} is not an address: it has characters that no address has")
    if text.startswith(_UNIX):
        path = text[len(_UNIX) :]
        if not path or len(os.fsencode(path)) > 100:
            raise ConfigError(f"{text!r} is not the address of a Unix socket: a path of 1 to 100 bytes follows unix:")
        return Address(path=path)
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address; write host:port, [v6 host]:port or unix:/path")
    return Address(host, int(port))


def _encodable(text: str) -> bool:
    """Whether the system can be given this text: no NUL, no lone surrogates, no labels longer than DNS allows."""
    try:
        os.fsencode(text)
        if not text.startswith(_UNIX):
            text.rpartition(":")[0].encode("idna")
    except UnicodeError:
        return False
    return "\0" not in text


def connect(address: Address, *, deadline: float) -> socket.socket:
    """A connected, tuned socket. Raises PeerGone if no process listens there, TransferUnavailable, TransferTimeout."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeout(f"no time left to connect to {address}")
    try:
        if address.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _closed_on_error(sock):
                sock.settimeout(left)
                sock.connect(address.path)
        else:
            sock = socket.create_connection((address.host, address.port), timeout=left)
    except TimeoutError as error:
        raise TransferTimeout(f"{address} did not answer") from error
    except OSError as error:
        kind = PeerGone if error.errno in _GONE else TransferUnavailable
        raise kind(f"cannot connect to {address}: {error.strerror or error}") from error
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        # TCP may connect an ephemeral port to itself if no process listens there.
        sock.close()
        raise PeerGone(f"cannot connect to {address}: no process listens there")
    return tune(sock)


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket, and its address with the port that the system chose. Raises ConfigError."""
    try:
        if address.path:
            return _listen_unix(address), address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    return sock, Address(address.host, int(sock.getsockname()[1]))


def _listen_unix(address: Address) -> socket.socket:
    """A killed process leaves its socket file behind: replace a file at which no process listens."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(address.path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(address.path) in _GONE:
                    os.unlink(address.path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        before = os.umask(0o177)
        try:
            sock.bind(address.path)
        finally:
            os.umask(before)
        sock.listen(_BACKLOG)
    return sock


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


def peer_is_local(sock: socket.socket) -> bool:
    """Whether the address of the peer says that it is on this host."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        host = sock.getpeername()[0]
    except OSError:
        return False
    return is_loopback(host.partition("%")[0])


def tune(sock: socket.socket) -> socket.socket:
    """Set no delay, keep-alive, and system calls that return within a quarter of a second."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


class SocketStream:
    """A connected, tuned socket. One thread sends, one receives, any thread may close.

    Attributes:
        last_received: when the last byte arrived.
        greeted: whether a handshake has received anything.
        binding: identifies the encrypted channel, equal on both sides; b"" for one that is not encrypted.
    """

    binding = b""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.last_received = time.monotonic()
        self.greeted = False
        self._closed = False
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._spare = self._ahead[:0]

    def begin(self, deadline: float) -> None:
        """Bytes that precede the handshake of the transfer protocol."""

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all bytes of all buffers. Raises TransferTimeout, TransferUnavailable.

        The deadline is for the next progress; all together may take longer by a second per MiB.
        """
        patience = deadline - time.monotonic()
        for piece in self._pieces(buffers):
            total = sum(map(len, piece))
            deadline = time.monotonic() + patience
            self._send_until(piece, total, deadline, patience, deadline + total / _SLOWEST)

    def write(self, data: bytes, deadline: float) -> None:
        """Send a message of the handshake: the deadline is for all of it. Raises TransferTimeout, TransferUnavailable."""
        for piece in self._pieces([data]):
            self._send_until(piece, sum(map(len, piece)), deadline, 0.0, deadline)

    def _pieces(self, buffers: Sequence[Buffer]) -> Iterable[Sequence[Buffer]]:
        """Buffers that go over the wire."""
        return (buffers,)

    def _send_until(
        self, buffers: Sequence[Buffer], total: int, deadline: float, patience: float, limit: float
    ) -> None:
        sent = self._send(buffers)
        if sent == total:  # the common case
            return
        left = [memoryview(buffer) for buffer in buffers]
        while _advance(left, sent):
            now = time.monotonic()
            if sent:
                deadline = min(max(deadline, now + patience), limit)
            if now >= deadline:
                raise TransferTimeout("the peer takes no bytes, or too few")
            sent = self._send(left)

    def _send(self, buffers: Sequence[Buffer]) -> int:
        """Send as many bytes as possible within a quarter of a second."""
        try:
            return self.sock.sendmsg(buffers[:_MAX_BUFFERS])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._unavailable(error) from error

    def fill(self, view: memoryview) -> Iterator[None]:
        """Receive until the view is full; yields when no byte came for a quarter of a second. Raises TransferUnavailable.

        A call also reads ahead into the next message, so a small message costs one system call and not three.
        """
        size = len(view)
        done = min(size, len(self._spare))
        if done:
            view[:done] = self._spare[:done]
            self._spare = self._spare[done:]
        while done < size:
            try:
                count = self._receive(view[done:])
            except (BlockingIOError, InterruptedError):
                yield
                continue
            except OSError as error:
                raise self._unavailable(error) from error
            if not count:
                raise TransferUnavailable("the peer has closed the connection")
            if count > size - done:
                self._spare = self._ahead[: count - (size - done)]
            done += count
            self.last_received = time.monotonic()

    def _receive(self, view: memoryview) -> int:
        if len(view) > _LARGE:
            return self.sock.recv_into(view, 0, socket.MSG_WAITALL)
        return self.sock.recvmsg_into([view, self._ahead])[0]

    def read(self, size: int, deadline: float) -> bytes:
        """Receive exactly `size` bytes of the handshake, without reading ahead; the deadline is for all of them.

        Raises TransferTimeout, TransferUnavailable.
        """
        data = bytearray()
        while len(data) < size:
            if time.monotonic() >= deadline:
                raise TransferTimeout("the peer is silent, or too slow")
            try:
                more = self._receive_some(min(size - len(data), _CHUNK))
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise self._unavailable(error) from error
            if not more:
                raise TransferUnavailable("the peer has closed the connection")
            data += more
            self.greeted = True
        return bytes(data)

    def _receive_some(self, most: int) -> bytes:
        return self.sock.recv(most)

    def interrupt(self) -> None:
        """End the connection and wake its threads; the descriptor stays open until `close`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()  # wakes a thread that is inside a system call on the socket; closing alone does not
        self.sock.close()

    def _unavailable(self, error: OSError) -> TransferUnavailable:
        if self._closed:
            return TransferUnavailable("the connection is closed")
        return TransferUnavailable(f"the connection broke: {error.strerror or error}")


def _advance(left: list[memoryview], sent: int) -> bool:
    """Remove the sent bytes from the front; returns whether any are left."""
    while left and sent >= len(left[0]):
        sent -= len(left.pop(0))
    if left:
        left[0] = left[0][sent:]
    return bool(left)
