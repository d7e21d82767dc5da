"""A link between processes on one host: messages go over a socket, payloads through memory that both have mapped.

Each side has a segment of its own, which only it writes: a page of control, then a ring. A payload is copied once, into the
sender's ring; the receiver reads it there and releases it. How far a side has read the *other's* ring stands in its own
control page, so releasing is one store and nobody can block on it.

    offset 0    32 bytes  token: random, proves that what was opened is what the peer made
    offset 64    8 bytes  everything of the peer's ring before this place has been released
    offset 4096           the ring

Places count bytes since the beginning and never wrap; a payload lies at `place % size`, in one piece.

A segment is a memfd, sealed against a change of its size, where the peer is reached over a Unix socket; else a file in /dev/shm
with a random name that is removed as soon as the peer has opened it. Both belong to the user alone (0600).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.errors import BadMessage, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import Capabilities, Payload, Received
from foreword.transfer.messages import MAX_PAYLOAD, Head
from foreword.transfer.ring import Order, RingLink
from foreword.transfer.sockets import Stream
from foreword.transfer.tcp import SocketReader

FOLDER: Final = Path("/dev/shm")
TOKEN_BYTES: Final = 32
CONTROL_BYTES: Final = 4096
_READ_AT: Final = 64
_NAME: Final = re.compile(r"foreword-[0-9a-f]{32}")
_STALE: Final = 300.0
_FIRST_NAP: Final = 50e-6
_LONGEST_NAP: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Segment:
    """A mapped segment. Read-only by agreement on the side that did not make it: its mapping is private to the process."""

    memory: mmap.mmap
    size: int

    @property
    def view(self) -> memoryview:
        """The ring."""
        return memoryview(self.memory)[CONTROL_BYTES : CONTROL_BYTES + self.size]

    @property
    def read_place(self) -> memoryview:
        """One uint64, written and read as a whole."""
        return memoryview(self.memory)[_READ_AT : _READ_AT + 8].cast("Q")


class OwnSegment:
    """A segment that this process makes for its peer.

    Args:
        size: bytes of the ring. They are reserved at once: running out of memory later would be a SIGBUS.
        named: a file that can be opened by its name, for peers that no file descriptor can be passed to.

    Raises TransferError where the system has no room for it or no shared memory.
    """

    def __init__(self, size: int, *, named: bool) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.place = f"foreword-{secrets.token_hex(16)}" if named else ""
        try:
            self.fd = self._open()
            try:
                self._memory = self._reserve()
            except BaseException:
                self.forget()
                raise
        except OSError as error:
            raise TransferError(f"no shared memory of {size} bytes: {error.strerror or error}") from error
        self._memory[:TOKEN_BYTES] = self.token

    def _open(self) -> int:
        if self.place:
            return os.open(FOLDER / self.place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return os.memfd_create("foreword", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def _reserve(self) -> mmap.mmap:
        length = CONTROL_BYTES + self.size
        os.posix_fallocate(self.fd, 0, length)
        if not self.place:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return mmap.mmap(self.fd, length)

    @property
    def segment(self) -> Segment:
        return Segment(self._memory, self.size)

    def forget(self) -> None:
        """Remove its name and close its descriptor; what is mapped stays. May be called twice."""
        if self.place:
            with contextlib.suppress(OSError):
                os.unlink(FOLDER / self.place)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_peers(place: str, fd: int | None, size: int, token: bytes) -> Segment:
    """Map the segment that a peer made, by name or descriptor. Raises TransferError if it is not here, or not what it said."""
    if fd is None and not _NAME.fullmatch(place):
        raise TransferError(f"{place!r} is no name of a shared segment")
    try:
        opened = os.open(FOLDER / place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW) if fd is None else fd
        try:
            length = os.fstat(opened).st_size
            if size <= 0 or length != CONTROL_BYTES + size:
                raise TransferError(f"the shared segment has {length} bytes, not {CONTROL_BYTES + size}")
            # A private mapping sees what the peer writes, and an accidental write here does not reach the peer.
            memory = mmap.mmap(opened, length, access=mmap.ACCESS_COPY)
        finally:
            if fd is None:
                os.close(opened)
    except OSError as error:
        raise TransferError(f"cannot open the peer's shared segment: {error.strerror or error}") from error
    if not secrets.compare_digest(memory[:TOKEN_BYTES], token):
        raise TransferError("the shared segment is not the peer's")
    return Segment(memory, size)


def remove_stale() -> None:
    """Remove files that processes left behind which were killed while they connected; nobody opens one that is so old."""
    with contextlib.suppress(OSError):
        for path in FOLDER.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    about = path.stat()
                    if about.st_uid == os.getuid() and time.time() - about.st_mtime > _STALE:
                        path.unlink()


class ShmLink(RingLink):
    """See `link.Link`. The rings bound what is unreleased: a sender waits until its ring has room."""

    def __init__(self, stream: Stream, own: Segment, peers: Segment) -> None:
        # Half of the ring, so that one payload can be written while another one is read.
        super().__init__(Capabilities("shm", True, min(own.size // 2, MAX_PAYLOAD), 1), stream, own.view)
        self._in = peers.view
        self._we_read, self._peer_read = own.read_place, peers.read_place
        self._order = Order()
        self._lock = threading.Lock()
        self._expected = 0
        self._closed = False
        self._reader = SocketReader(stream, self._payload)

    def _room(self, size: int, deadline: float) -> int:
        nap = _FIRST_NAP
        while True:
            before = self._ring.released
            self._ring.release(self._peer_read[0])
            if (place := self._ring.take(size)) is not None:
                return place
            self._say(deadline)
            if self._ring.released != before:
                continue
            if self._closed:
                raise TransferUnavailable("the connection is closed")
            if time.monotonic() >= deadline:
                raise TransferTimeout("the peer releases nothing")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _filled(self, place: int, size: int) -> None:
        """Nothing to note: the peer's control page says how far it has released."""

    def receive(self, *, deadline: float) -> Received:
        return self._reader.receive(deadline)

    def _payload(self, head: Head) -> Generator[None, None, Payload]:
        yield from ()
        size = len(self._in)
        start = head.place % size
        if head.place < self._expected or start + head.payload > size or head.payload > size // 2:
            raise BadMessage(f"{head.payload} bytes at {head.place} are not in the shared ring")
        self._expected = head.place + head.payload
        with self._lock:
            item = self._order.add(head.place, head.payload)
        return Payload(self._in[start : start + head.payload], lambda: self._release(item))

    def _release(self, item: list[int]) -> None:
        with self._lock:
            upto = self._order.release(item)
            if upto is not None:
                self._we_read[0] = upto

    def close(self) -> None:
        self._closed = True
        self._stream.close()
