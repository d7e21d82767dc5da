"""A link between processes on one host: messages go over a socket, payloads through memory that both have mapped.

Each side has a segment that only it writes: a control page, then a ring. The sender copies a payload once, into its ring; the
receiver reads it there and releases it. The control page of a side says how far it has released the ring of the *other* side,
so a release is one store, and no process can block on it.

    offset 0    32 bytes  token: random, proves that the peer opened the segment that was announced
    offset 64    8 bytes  position up to which everything in the peer's ring has been released
    offset 4096           the ring

A position counts bytes since the start and never wraps; the payload lies at `position % size`, in one piece.

Over a Unix socket a segment is a memfd, sealed against a change of its size. Otherwise it is a file in /dev/shm with a random
name, removed as soon as the peer has opened it. Only the same user can open it (mode 0600).
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

from foreword.transfer.errors import BadMessage, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import BATCH_BYTES, Link, Payload
from foreword.transfer.sockets import SocketStream
from foreword.transfer.wire_format import MAX_PAYLOAD, Buffer, Head

_ALIGNMENT: Final = 64
_WARM: Final = 2 << 20
_PIECE: Final = 512 << 10


def aligned(length: int) -> int:
    """The bytes that a piece of this length occupies."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class RingAllocator:
    """The bytes of a ring that are allocated. Pieces are allocated here and released up to a position by the other side.

    The ring wraps as soon as its start is free, not only when its end is reached. While the receiver keeps up, only the first
    megabytes are used, and they stay in the processor's cache. Allocated bytes form a few runs, oldest first. A new piece is
    placed behind the newest run, at the start of the ring, or behind all runs.

    Attributes:
        allocated: position behind the newest piece.
        released: every piece that ends at or before this position has been released.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.allocated = 0
        self.released = 0
        self._runs: deque[list[int]] = deque()  # [start, end) offsets, disjoint
        self._pieces: deque[tuple[int, int]] = deque()  # (position of the end, length), in order of allocation

    def allocate(self, length: int) -> int | None:
        """The position of `length` contiguous bytes; None if they are not free."""
        need = aligned(length)
        offset = self._find_offset(need)
        if offset is None:
            return None
        if self._runs and offset == self._runs[-1][1]:
            self._runs[-1][1] += need
        else:
            self._runs.append([offset, offset + need])
        position = self._next_position(offset)
        self.allocated = position + need
        self._pieces.append((self.allocated, need))
        return position

    def _find_offset(self, need: int) -> int | None:
        """Where in the ring `need` free bytes begin: in the first megabytes if possible."""
        newest = self._runs[-1][1] if self._runs else 0
        if newest + need <= _WARM and self._is_free(newest, need):
            return newest
        highest = max((end for _, end in self._runs), default=0)
        return next((offset for offset in (0, newest, highest) if self._is_free(offset, need)), None)

    def _is_free(self, start: int, need: int) -> bool:
        end = start + need
        if end > self.size:
            return False
        for low, high in self._runs:  # noqa: SIM110 - on the path of every payload
            if low < end and start < high:
                return False
        return True

    def _next_position(self, offset: int) -> int:
        """The smallest position at or after `allocated` that lies at this offset: positions never decrease."""
        return self.allocated + (offset - self.allocated) % self.size

    def release(self, upto: int) -> None:
        """Free the pieces that end at or before `upto`. Raises BadMessage if the other side cannot have released them."""
        if not self.released <= upto <= self.allocated:
            raise BadMessage(f"the peer has released up to {upto} of {self.allocated} bytes, after {self.released}")
        self.released = upto
        while self._pieces and self._pieces[0][0] <= upto:
            run = self._runs[0]
            run[0] += self._pieces.popleft()[1]
            if run[0] == run[1]:
                self._runs.popleft()


class ReleaseOrder:
    """Turns releases in any order into one position up to which everything is released. No I/O."""

    def __init__(self) -> None:
        self._open: deque[list[int]] = deque()  # [position of the end, 1 if released]

    def add(self, position: int, length: int) -> list[int]:
        """Note a piece; returns the item to pass to `release`."""
        item = [position + aligned(length), 0]
        self._open.append(item)
        return item

    def release(self, item: list[int]) -> int | None:
        """The position before which everything is released now; None if that did not change."""
        item[1] = 1
        upto = None
        while self._open and self._open[0][1]:
            upto = self._open.popleft()[0]
        return upto


def copy_in(ring: memoryview, start: int, buffers: Sequence[Buffer], *, checksum: bool) -> int | None:
    """Copy the bytes of the buffers in a row to offset `start`; returns the checksum of the copy if asked for.

    The checksum is updated piece by piece, while the piece is in the processor's cache.
    """
    state = xxhash.xxh3_64()
    for buffer in buffers:
        for low in range(0, len(buffer), _PIECE):
            piece = buffer if len(buffer) <= _PIECE else memoryview(buffer)[low : low + _PIECE]
            end = start + len(piece)
            ring[start:end] = piece
            if checksum:
                state.update(ring[start:end])
            start = end
    return state.intdigest() if checksum else None


FOLDER: Final = Path("/dev/shm")
TOKEN_BYTES: Final = 32
CONTROL_BYTES: Final = 4096
_RELEASED_AT: Final = 64
_NAME: Final = re.compile(r"foreword-[0-9a-f]{32}")
_STALE_SECONDS: Final = 300.0
_FIRST_PAUSE: Final = 50e-6
_LONGEST_PAUSE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """A mapped segment. The mapping of the peer's segment is private: an accidental write stays in this process."""

    memory: mmap.mmap
    size: int

    @property
    def ring(self) -> memoryview:
        return memoryview(self.memory)[CONTROL_BYTES : CONTROL_BYTES + self.size]

    @property
    def released(self) -> memoryview:
        """A uint64, written and read as a whole: how far the segment's owner has released the peer's ring."""
        return memoryview(self.memory)[_RELEASED_AT : _RELEASED_AT + 8].cast("Q")


class OwnSegment:
    """A segment that this process makes for its peer.

    Args:
        size: bytes of the ring. They are reserved at once: running out of memory later would be a SIGBUS.
        named: make a file that can be opened by name, for a peer that no file descriptor can be passed to.

    Raises TransferError if there is not enough memory or no shared memory.
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
                self.unlink()
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
    def mapped(self) -> MappedSegment:
        return MappedSegment(self._memory, self.size)

    def unlink(self) -> None:
        """Remove the file and close the descriptor; mappings stay valid. May be called twice."""
        if self.place:
            with contextlib.suppress(OSError):
                os.unlink(FOLDER / self.place)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_peers(place: str, fd: int | None, size: int, token: bytes) -> MappedSegment:
    """Map the peer's segment, by name or descriptor. Raises TransferError if it is not visible here or not as announced."""
    if fd is None and not _NAME.fullmatch(place):
        raise TransferError(f"{place!r} is not the name of a shared segment")
    try:
        opened = os.open(FOLDER / place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW) if fd is None else fd
        try:
            length = os.fstat(opened).st_size
            if size <= 0 or length != CONTROL_BYTES + size:
                raise TransferError(f"the shared segment has {length} bytes, not {CONTROL_BYTES + size}")
            memory = mmap.mmap(opened, length, access=mmap.ACCESS_COPY)
        finally:
            if fd is None:
                os.close(opened)
    except OSError as error:
        raise TransferError(f"cannot open the peer's shared segment: {error.strerror or error}") from error
    if not secrets.compare_digest(memory[:TOKEN_BYTES], token):
        raise TransferError("the shared segment is not the peer's")
    return MappedSegment(memory, size)


def remove_stale() -> None:
    """Remove old segment files, which processes leave behind if they are killed while they connect."""
    with contextlib.suppress(OSError):
        for path in FOLDER.iterdir():
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _STALE_SECONDS:
                        path.unlink()


class ShmLink(Link):
    """See `link.Link`. The rings bound unreleased payloads: a sender waits until its ring has room.

    Messages of a batch are sent with one system call, which wakes the peer once.
    """

    def __init__(self, stream: SocketStream, own: OwnSegment, peers: MappedSegment) -> None:
        # Half of the ring, so that one payload can be written while another one is read.
        super().__init__("shm", min(own.size // 2, MAX_PAYLOAD), stream)
        self._out, self._allocator = own.mapped.ring, RingAllocator(own.size)
        self._in, self._order = peers.ring, ReleaseOrder()
        self._released_here, self._released_by_peer = own.mapped.released, peers.released
        self._lock = threading.Lock()
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._next_position = 0
        self._closed = False

    def _prepare(self, buffers: Sequence[Buffer], size: int, checksum: bool, deadline: float) -> tuple[int | None, int]:
        position = self._allocate(size, deadline)
        return copy_in(self._out, position % self._allocator.size, buffers, checksum=checksum), position

    def _allocate(self, size: int, deadline: float) -> int:
        """The position of `size` free bytes. Waits for them; the batch is sent first, so that the peer can release it."""
        pause = _FIRST_PAUSE
        while True:
            before = self._allocator.released
            self._allocator.release(self._released_by_peer[0])
            if (position := self._allocator.allocate(size)) is not None:
                return position
            self._flush(deadline)
            if self._allocator.released != before:
                continue
            if self._closed:
                raise TransferUnavailable("the connection is closed")
            if time.monotonic() >= deadline:
                raise TransferTimeout("the peer releases nothing")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _write(self, head: bytes, buffers: Sequence[Buffer], size: int, deadline: float, more: bool) -> None:
        self._batch.append(head)
        self._batch_bytes += size
        if not more or self._batch_bytes >= BATCH_BYTES:
            self._flush(deadline)

    def _flush(self, deadline: float) -> None:
        heads, self._batch, self._batch_bytes = self._batch, [], 0
        if heads:
            self._stream.send([b"".join(heads)], deadline)

    def _receive_payload(self, head: Head) -> Generator[None, None, Payload]:
        yield from ()
        size = len(self._in)
        start = head.position % size
        if head.position < self._next_position or start + head.payload > size or head.payload > size // 2:
            raise BadMessage(f"{head.payload} bytes at {head.position} are not in the shared ring")
        self._next_position = head.position + head.payload
        with self._lock:
            item = self._order.add(head.position, head.payload)
        return Payload(self._in[start : start + head.payload], lambda: self._release(item))

    def _release(self, item: list[int]) -> None:
        with self._lock:
            upto = self._order.release(item)
            if upto is not None:
                self._released_here[0] = upto

    def close(self) -> None:
        self._closed = True
        super().close()
