"""Which blocks the index of a disk store has, in memory: a lookup that this can answer waits for no file and no lock of the
index.

Several processes change the index. Each says so on a board, a small file in the folder, after the transaction and before its
caller learns of it. So a process knows whether its memory of the index is complete: no other one has added blocks since it last
read the index. Otherwise a block that it does not know is *not known*, and the index is asked. In the same way a block that it
knows is not known to be there once another process has removed any.

The board works among the processes of a host. So does the index in the mode that this is for: SQLite's write-ahead log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from foreword.errors import StoreError

# A page of the board says who has added blocks, and one who has removed some. Each process has its own entry in both. What the
# entries contain has no meaning: they change. The last entry is that of all processes that have none.
_ENTRY: Final = 8
_ENTRIES: Final = 128
_PAGE: Final = _ENTRY * _ENTRIES
# An id takes about 90 bytes with its place in a set: 64 MiB.
MAX_IDS: Final = 700_000
_SHARDS: Final = 256  # a set that grows is copied while no other thread runs: small ones take a moment
_ROWS: Final = 1024
_RELOAD_SECONDS: Final = 30.0
# File systems of this host, where reading a page that was read before does not wait.
_LOCAL: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"))

# Row id and block id of the rows behind one, in the order of their row ids.
RowsAfter = Callable[[int, int], Sequence[tuple[int, int]]]


class ChangeBoard:
    """The file in which the processes that share an index say that they have changed it. Calls never raise."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = -1
        self._entry = _ENTRIES - 1

    def open(self) -> bool:
        """Open the file, and take an entry. Returns whether `others` can tell."""
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                if os.fstat(self._file).st_size < 2 * _PAGE:
                    os.ftruncate(self._file, 2 * _PAGE)
                self._entry = self._take_entry()
            except OSError:
                self.close()
        return self._file >= 0 and self._entry < _ENTRIES - 1 and _is_local(self._path)

    def _take_entry(self) -> int:
        """An entry that no other open board has. The lock on its byte ends with the process."""
        for entry in range(_ENTRIES - 1):
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, entry, 1, 0)
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
                return entry
        return _ENTRIES - 1

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

    def announce(self, *, added: bool = False, removed: bool = False) -> None:
        """Say that this process has changed the index. On a full disk that may be lost: then others miss some blocks."""
        for page, changed in enumerate((added, removed)):
            if changed and self._file >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(self._file, os.urandom(_ENTRY), page * _PAGE + self._entry * _ENTRY)

    def others(self) -> tuple[bytes, bytes] | None:
        """The entries of the other processes now: of those that have added blocks, and of those that have removed some."""
        try:
            found = os.pread(self._file, 2 * _PAGE, 0)
        except OSError:
            return None
        if len(found) < 2 * _PAGE:
            return None
        low, high = self._entry * _ENTRY, (self._entry + 1) * _ENTRY
        return found[:low] + found[high:_PAGE], found[_PAGE : _PAGE + low] + found[_PAGE + high :]


class KnownBlocks:
    """The ids of the blocks in the index that this process knows. Thread-safe.

    Invariant: while the board is as it was at `_seen`, each block that others have put into the index has its id here. What
    this process puts there has its id here before the put returns.
    """

    def __init__(self, board: ChangeBoard, most: int = MAX_IDS) -> None:
        self._board = board
        self._most = most
        self._lock = threading.Lock()
        self._start_over(usable=False)

    def _start_over(self, *, usable: bool) -> None:
        self._ids: list[set[int]] = [set() for _ in range(_SHARDS)] if usable else []
        self._count = 0
        self._last = 0  # all rows up to this row id have been read
        self._began: tuple[bytes, bytes] | None = None  # the board when the reading began
        self._seen: tuple[bytes, bytes] | None = None  # the board when all of the index had been read
        self._loaded_at = 0.0

    def forget(self, *, opened: bool = False) -> None:
        """Know nothing. `opened`: the index has just been opened, and may be read."""
        usable = opened and self._board.open()
        with self._lock:
            self._start_over(usable=usable)

    def told(self, ids: Sequence[int]) -> list[bool | None]:
        """Whether each block is in the index; None: not known. Reads two pages of the board and waits for nothing."""
        shards, seen = self._ids, self._seen
        now = self._board.others() if seen is not None and shards else None
        if now is None or seen is None:
            return [None] * len(ids)
        there = True if now[1] == seen[1] else None
        absent = False if now == seen else None
        return [there if one in shards[one % _SHARDS] else absent for one in ids]

    def removing(self) -> None:
        """This process is about to commit a transaction that removes blocks. Others must not find a row id that is used again
        before they know of that."""
        self._board.announce(removed=True)

    def committed(self, added: Iterable[int], removed: Iterable[int], last: int) -> None:
        """This process has committed a transaction; `last`: the largest row id. Called in the order of the transactions."""
        new, gone = list(added), list(removed)
        with self._lock:
            if self._ids:
                for one in gone:
                    self._ids[one % _SHARDS].discard(one)
                self._add(new)
            if gone and last < self._last:  # another process may use these row ids again
                self._last, self._seen = last, None
        self._board.announce(added=bool(new), removed=bool(gone))

    def _add(self, ids: Iterable[int]) -> None:
        for one in ids:
            self._ids[one % _SHARDS].add(one)
            self._count += 1
        if self._count > self._most:  # some were counted twice, or are gone
            self._count = sum(map(len, self._ids))
        if self._count > self._most:
            self._start_over(usable=False)

    def suspect(self) -> None:
        """Suspect that another process has changed the index without a word on the board, as versions before it do."""
        self._seen = None

    @property
    def behind(self) -> bool:
        """Whether the index has to be read (again) before it is known which blocks are absent."""
        return bool(self._ids) and (self._seen is None or self._board.others() != self._seen)

    def read(self, rows_after: RowsAfter, until: float) -> None:
        """Read what others have added, for as long as that may take: the whole index the first time and, twice a minute at
        most, after others have removed blocks. Never raises."""
        now = self._board.others()
        if now is None or not self._ids:
            return
        if self._began is not None and now[1] != self._began[1]:
            if time.monotonic() - self._loaded_at < _RELOAD_SECONDS:
                return
            self.forget(opened=True)
        with self._lock:
            self._began = self._began or now
            self._loaded_at = self._loaded_at or time.monotonic()
        with contextlib.suppress(StoreError):
            while self._read_some(rows_after):
                if time.monotonic() >= until:
                    return
            with self._lock:
                self._seen = now if self._ids else None

    def _read_some(self, rows_after: RowsAfter) -> bool:
        """Read some rows. False after the last ones."""
        last = self._last
        rows = rows_after(last, _ROWS)
        with self._lock:
            if not self._ids:
                return False
            self._add(one for _, one in rows)
            if rows and self._last == last:
                self._last = rows[-1][0]
        return len(rows) == _ROWS and bool(self._ids)


def _is_local(path: str) -> bool:
    """Whether a file is on a file system of this host, so that a page of it that is in memory is read without a wait."""
    try:
        device = os.stat(path).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = [line.split(" - ", 1) for line in mounts]
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return any(len(line) == 2 and line[0].split()[2] == wanted and line[1].split()[0] in _LOCAL for line in lines)
