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
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from foreword.errors import BadMessage, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import TOGETHER, Capabilities, Payload, Received
from foreword.transfer.messages import (
    MAX_PAYLOAD,
    NO_TRANSFER,
    Buffer,
    Head,
    Message,
    encode,
)
from foreword.transfer.sockets import Stream
from foreword.transfer.tcp import SocketReader

FOLDER: Final = Path("/dev/shm")
TOKEN_BYTES: Final = 32
CONTROL_BYTES: Final = 4096
_READ_AT: Final = 64
_ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"foreword-[0-9a-f]{32}")
_STALE: Final = 300.0
_WARM: Final = 2 << 20
_PIECE: Final = 512 << 10
_FIRST_NAP: Final = 50e-6
_LONGEST_NAP: Final = 2e-3


class Ring:
    """Which bytes of a ring are taken: in order on one side, released up to a place on the other. No I/O.

    It goes round as soon as its beginning is free, not when its end is reached: while the other side keeps up, only the first
    megabytes are used, which stay in the processor's cache. What is taken are a few runs, oldest first; a new
    piece goes behind the newest one, to the beginning, or behind all of them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.released = 0
        self._runs: deque[list[int]] = deque()  # [begin, end], disjoint
        self._pieces: deque[tuple[int, int]] = deque()  # (place of the end, length), in the order of taking

    def take(self, length: int) -> int | None:
        """The place of `length` bytes in one piece, at `place % size`; None while there is no room."""
        need = -(-length // _ALIGNMENT) * _ALIGNMENT
        runs = self._runs
        newest = runs[-1][1] if runs else 0
        if newest + need <= _WARM and self._free(newest, need):
            at = newest
        else:
            places = (0, newest, max((end for _, end in runs), default=0))
            found = next((place for place in places if self._free(place, need)), None)
            if found is None:
                return None
            at = found
        if runs and at == newest:
            runs[-1][1] += need
        else:
            runs.append([at, at + need])
        last = self.taken % self.size or (self.size if self.taken else 0)
        place = self.taken - last + at + (0 if at >= last else self.size)
        self.taken = place + need
        self._pieces.append((self.taken, need))
        return place

    def _free(self, begin: int, need: int) -> bool:
        end = begin + need
        if end > self.size:
            return False
        for low, high in self._runs:  # noqa: SIM110 - on the path of every payload
            if low < end and begin < high:
                return False
        return True

    def release(self, upto: int) -> None:
        """The other side says so. Raises BadMessage if that cannot be."""
        if not self.released <= upto <= self.taken:
            raise BadMessage(f"the peer has released up to {upto} of {self.taken} bytes, after {self.released}")
        self.released = upto
        while self._pieces and self._pieces[0][0] <= upto:
            run = self._runs[0]
            run[0] += self._pieces.popleft()[1]
            if run[0] == run[1]:
                self._runs.popleft()


class Order:
    """Payloads are released in any order, but a ring is freed in the order in which it was filled. No I/O."""

    def __init__(self) -> None:
        self._open: deque[list[int]] = deque()  # [end, released]

    def add(self, place: int, length: int) -> list[int]:
        item = [place + -(-length // _ALIGNMENT) * _ALIGNMENT, 0]
        self._open.append(item)
        return item

    def release(self, item: list[int]) -> int | None:
        """The place before which everything is released now, if that changed."""
        item[1] = 1
        upto = None
        while self._open and self._open[0][1]:
            upto = self._open.popleft()[0]
        return upto


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


def copy_in(ring: memoryview, at: int, buffers: Sequence[Buffer], *, summed: bool) -> int | None:
    """Copy the bytes of the buffers in a row to `at`; returns the checksum of the copy if it is wanted, made piece by piece
    while the piece is in the processor's cache."""
    state = xxhash.xxh3_64()
    for buffer in buffers:
        for low in range(0, len(buffer), _PIECE):
            piece = buffer if len(buffer) <= _PIECE else memoryview(buffer)[low : low + _PIECE]
            end = at + len(piece)
            ring[at:end] = piece
            if summed:
                state.update(ring[at:end])
            at = end
    return state.intdigest() if summed else None


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


class ShmLink:
    """See `link.Link`. The rings bound what is unreleased: a sender waits until its ring has room."""

    def __init__(self, stream: Stream, own: Segment, peers: Segment) -> None:
        # Half of the ring, so that one payload can be written while another one is read.
        self.capabilities = Capabilities("shm", True, min(own.size // 2, MAX_PAYLOAD), 1)
        self._stream = stream
        self._ring = Ring(own.size)
        self._out, self._in = own.view, peers.view
        self._we_read, self._peer_read = own.read_place, peers.read_place
        self._order = Order()
        self._lock = threading.Lock()
        self._expected = 0
        self._heads: list[bytes] = []
        self._unsaid = 0
        self._closed = False
        self._reader = SocketReader(stream, self._payload)

    @property
    def heard(self) -> float:
        return self._stream.heard

    def send(
        self,
        message: Message,
        transfer: bytes = NO_TRANSFER,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: float,
        checksum: bool = True,
        more: bool = False,
    ) -> None:
        size = sum(map(len, buffers))
        place, summed = 0, None
        if size:
            place = self._room(size, deadline)
            summed = copy_in(self._out, place % self._ring.size, buffers, summed=checksum)
        self._heads.append(encode(message, transfer, payload=size, payload_sum=summed, place=place))
        self._unsaid += size
        if not more or self._unsaid >= TOGETHER:
            self._say(deadline)

    def _say(self, deadline: float) -> None:
        """Send the messages whose payloads are in the ring: the peer is woken once for all of them."""
        heads, self._heads, self._unsaid = self._heads, [], 0
        if heads:
            self._stream.send([b"".join(heads)], deadline)

    def _room(self, size: int, deadline: float) -> int:
        if size > self.capabilities.largest:
            raise TransferError(f"a payload of {size} bytes is longer than this link carries")
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
