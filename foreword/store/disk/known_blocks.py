"""The blocks in the index of a disk store, known in memory: a lookup that this can answer waits for no file and no lock of the
index.

Several processes change the index. Each says so on a board, a small file in the folder, after the transaction and before its
caller learns of it, and keeps a log there of its last changes, by which the others follow it without reading the index. A block
that is not known to a process counts as *not known*, and not as absent, while others have added some that it has not followed,
and one that is known counts as there only while it has followed all removals.

Logs do not tell the order in which two processes have committed. Each announces that it is about to remove blocks:

    removal announced < removal committed < removal in the log,     addition committed < addition in the log

so what was known when nothing was announced is older than the removal. Else a block that was removed is *unsure*: not known.

The board works among the processes of a host. So does the index in the mode that this is for: SQLite's write-ahead log.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from foreword.errors import StoreError

# A page of the board says who has added blocks, and one who has removed some. Each process has its own entry in both: a number
# of its own, and how many changes it has put into its log. Before it removes blocks that entry has a mark. What entries of
# processes contain that keep no log has no meaning: they change. The last entry is that of all processes that have none.
_ENTRY: Final = 8
_ENTRIES: Final = 128
_PAGE: Final = _ENTRY * _ENTRIES
_OWNER_SHIFT: Final = 40
_ABOUT_TO_REMOVE: Final = 1 << 39
_COUNT: Final = _ABOUT_TO_REMOVE - 1
# Behind the pages: the last changes of each process, each with the entry's value after it. A removal has the highest bit.
_LOGGED: Final = 2048
_RECORD: Final = struct.Struct("<QQ")
_LOG: Final = _LOGGED * _RECORD.size
_REMOVED: Final = 1 << 63
_PAGES: Final = struct.Struct(f"<{_ENTRIES}Q")
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
        self._value = 0  # of the entry: owner and count. 0: it has announced nothing

    def open(self) -> bool:
        """Open the file, and take an entry. Returns whether `others` can tell."""
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                if os.fstat(self._file).st_size < 2 * _PAGE:
                    os.ftruncate(self._file, 2 * _PAGE)
                self._entry = self._take_entry()
                self._value = 0
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

    def announce(self, added: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
        """Say that this process has changed the index: ids of blocks that it has added, and of others that it has removed
        before. On a full disk that may be lost: then others miss some blocks."""
        if self._entry == _ENTRIES - 1:
            for page, changed in enumerate((added, removed)):
                if changed:
                    self._write(page * _PAGE + self._entry * _ENTRY, os.urandom(_ENTRY))
            return
        self._begin()
        changes = [*(one | _REMOVED for one in removed), *added]
        logged = len(changes) <= _LOGGED and self._append(changes)
        self._value += len(changes) if logged else _LOGGED + 1  # a gap that no reader can follow
        self._set(0, self._value)
        if removed:
            self._set(1, self._value)

    def removing(self, about: bool) -> None:
        """Say that this process is about to commit a transaction that removes blocks, or that it has failed."""
        if self._entry == _ENTRIES - 1:
            self._write(_PAGE + self._entry * _ENTRY, os.urandom(_ENTRY))
            return
        self._begin()
        self._set(1, self._value | _ABOUT_TO_REMOVE * about)

    def _begin(self) -> None:
        """Take a number for the entry, before the first change. From an entry without one the log can be followed."""
        if not self._value or self._value & _COUNT > _COUNT // 2:
            with contextlib.suppress(OSError):
                used = any(os.pread(self._file, _ENTRY, self._entry * _ENTRY))
                self._value = int.from_bytes(os.urandom(3), "little") << _OWNER_SHIFT | (_LOGGED << 2 * used)
                self._set(0, self._value)

    def _append(self, changes: Sequence[int]) -> bool:
        """Put changes into the log. False if that has failed."""
        numbers = range(self._value + 1, self._value + 1 + len(changes))
        pairs = itertools.chain.from_iterable(zip(changes, numbers, strict=True))
        records = struct.pack(f"<{2 * len(changes)}Q", *pairs)
        start = (self._value + 1) % _LOGGED
        split = (_LOGGED - start) * _RECORD.size
        return self._write(self._log_at(self._entry, start), records[:split]) and (
            len(records) <= split or self._write(self._log_at(self._entry, 0), records[split:])
        )

    def changes_of(self, entry: int, before: int, now: int) -> list[int] | None:
        """The changes of another process between two values of its entry; None if its log does not have them all."""
        before = before or now >> _OWNER_SHIFT << _OWNER_SHIFT | _LOGGED
        count = now - before
        if not 0 <= count <= _LOGGED or before >> _OWNER_SHIFT != now >> _OWNER_SHIFT:
            return None
        start = (before + 1) % _LOGGED
        first = min(count, _LOGGED - start)
        try:
            found = os.pread(self._file, first * _RECORD.size, self._log_at(entry, start))
            if first < count:
                found += os.pread(self._file, (count - first) * _RECORD.size, self._log_at(entry, 0))
        except OSError:
            return None
        if len(found) < count * _RECORD.size:
            return None
        records = list(_RECORD.iter_unpack(found))
        same = all(value == before + 1 + i for i, (_, value) in enumerate(records))
        return [change for change, _ in records] if same else None

    def _log_at(self, entry: int, record: int) -> int:
        return 2 * _PAGE + entry * _LOG + record * _RECORD.size

    def _set(self, page: int, value: int) -> None:
        self._write(page * _PAGE + self._entry * _ENTRY, value.to_bytes(_ENTRY, "little"))

    def _write(self, offset: int, data: bytes) -> bool:
        if self._file < 0:
            return False
        try:
            return os.pwrite(self._file, data, offset) == len(data)
        except OSError:
            return False

    def others(self) -> tuple[bytes, bytes] | None:
        """The entries of the other processes now: of those that have added blocks, and of those that have removed some.
        This process's own are empty."""
        try:
            found = os.pread(self._file, 2 * _PAGE, 0)
        except OSError:
            return None
        if len(found) < 2 * _PAGE:
            return None
        low, high, none = self._entry * _ENTRY, (self._entry + 1) * _ENTRY, bytes(_ENTRY)
        return found[:low] + none + found[high:_PAGE], found[_PAGE : _PAGE + low] + none + found[_PAGE + high :]


_Pages = tuple[bytes, bytes]  # of a board: who has added blocks, and who has removed some


def _is_about_to_remove(added: int, removed: int) -> bool:
    return added >> _OWNER_SHIFT == removed >> _OWNER_SHIFT and bool(removed & _ABOUT_TO_REMOVE)


class KnownBlocks:
    """The ids of the blocks in the index that this process knows. Thread-safe.

    Invariant: while the board is as it was at `_seen`, each block that others have put into the index has its id here, or in
    `_unsure`. What this process puts there has its id here before the put returns.
    """

    def __init__(self, board: ChangeBoard, most: int = MAX_IDS) -> None:
        self._board = board
        self._most = most
        self._lock = threading.Lock()
        self._removing = False  # a transaction of this process that removes blocks is about to be committed
        self._removals = 0
        self._wrote = False  # this process has added blocks since it last followed the others
        self._start_over(usable=False)

    def _start_over(self, *, usable: bool) -> None:
        self._ids: list[set[int]] = [set() for _ in range(_SHARDS)] if usable else []
        self._count = 0
        self._last = 0  # all rows up to this row id have been read
        self._began: tuple[bytes, bytes] | None = None  # the board when the reading began
        self._seen: tuple[bytes, bytes] | None = None  # the board when all was read, or to which it was followed
        self._loaded_at = 0.0
        self._unsure: set[int] = set()  # removed by another process, perhaps before it was added again

    def forget(self, *, opened: bool = False) -> None:
        """Know nothing. `opened`: the index has just been opened, and may be read."""
        usable = opened and self._board.open()
        with self._lock:
            self._start_over(usable=usable)

    def told(self, ids: Sequence[int]) -> list[bool | None]:
        """Whether each block is in the index; None: not known. Reads two pages of the board, and what others have put
        into their logs since the last call. It waits for nothing."""
        seen = self._seen
        now = self._board.others() if seen is not None and self._ids else None
        if now != seen:
            now, seen = self._catch_up()
        shards, unsure = self._ids, self._unsure
        if now is None or seen is None or not shards:
            return [None] * len(ids)
        there = True if now[1] == seen[1] else None
        absent = False if now == seen else None
        told = [there if one in shards[one % _SHARDS] else absent for one in ids]
        return [None if one in unsure else known for one, known in zip(ids, told, strict=True)] if unsure else told

    def _catch_up(self) -> tuple[_Pages | None, _Pages | None]:
        """Follow the other processes by their logs. Returns the board now, and the one to which they were followed."""
        with self._lock:
            seen, wrote, removals = self._seen, self._wrote, self._removals
            self._wrote = False
        now = self._board.others()
        if seen is None or now is None or self._removing:
            self._wrote |= wrote
            return now, self._seen
        (before, after), complete = ([list(map(_PAGES.unpack, pages)) for pages in (seen, now)]), True
        pages = [list(page) for page in before]
        came, gone, unsure = set[int](), set[int](), set[int]()
        for entry, (added, removed) in enumerate(zip(*after, strict=True)):
            old = before[0][entry], before[1][entry]
            logged = self._board.changes_of(entry, old[0], added) if old != (added, removed) else []
            if logged is None:
                complete = False
                continue
            last = {change & ~_REMOVED: change >= _REMOVED for change in logged}
            came.update(one for one, is_gone in last.items() if not is_gone)
            went = (one for one, is_gone in last.items() if is_gone)
            (unsure if _is_about_to_remove(added, old[1]) else gone).update(went)
            pages[0][entry] = added
            logs_all = added >> _OWNER_SHIFT == removed >> _OWNER_SHIFT and removed & _COUNT <= added & _COUNT
            pages[1][entry] = removed if logs_all else old[1]
            complete &= pages[1][entry] == removed
        with self._lock:
            wrote |= self._wrote
            applies = self._seen is seen and self._removals == removals and bool(self._ids)
            self._wrote |= wrote and not (complete and applies)
            if applies:
                removed = {one for one in gone - came if one in self._ids[one % _SHARDS]}
                self._remove(() if wrote else removed)
                self._note_added(came)
                self._unsure |= ((unsure | removed) if wrote else unsure) - came
                self._seen = (_PAGES.pack(*pages[0]), _PAGES.pack(*pages[1])) if self._ids else None
            return now, self._seen

    def removing(self, about: bool = True) -> None:
        """This process is about to commit a transaction that removes blocks, or that has failed. Others must not find a row id
        that is used again before they know of that."""
        with self._lock:
            self._removing = about
            self._removals += 1
        self._board.removing(about)

    def committed(self, added: Iterable[int], removed: Iterable[int], last: int) -> None:
        """This process has committed a transaction; `last`: the largest row id. Called in the order of the transactions."""
        new, gone = list(added), list(removed)
        with self._lock:
            self._removing = False
            self._wrote |= bool(new)
            if self._ids:
                self._remove(gone)
                self._note_added(new)
            if gone and last < self._last:  # another process may use these row ids again
                self._last, self._seen = last, None
        self._board.announce(new, gone)

    def _remove(self, ids: Collection[int]) -> None:
        for one in ids:
            self._ids[one % _SHARDS].discard(one)
        self._unsure.difference_update(ids)

    def _note_added(self, ids: Collection[int]) -> None:
        self._unsure.difference_update(ids)
        self._add(ids)

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
        most, after others have removed blocks, or were about to when the reading began: then rows that were read may have been
        used again. Nothing where the logs say it all. Never raises."""
        removals = self._removals
        now, before = self._catch_up()
        if now is None or now == before or not self._ids or self._removing:
            return
        about = self._began is not None and any(map(_is_about_to_remove, *map(_PAGES.unpack, self._began)))
        if self._began is not None and (now[1] != self._began[1] or about):
            if time.monotonic() - self._loaded_at < _RELOAD_SECONDS:
                return
            self.forget(opened=True)
            before = None
        with self._lock:
            self._began = self._began or now
            self._loaded_at = self._loaded_at or time.monotonic()
        with contextlib.suppress(StoreError):
            while self._read_some(rows_after, removals):
                if time.monotonic() >= until:
                    return
            with self._lock:
                # Else they were followed meanwhile, or see `_read_some`.
                if self._seen is before and self._removals == removals:
                    self._seen = now if self._ids else None

    def _read_some(self, rows_after: RowsAfter, removals: int) -> bool:
        """Read some rows. False after the last ones, or if this process has removed some meanwhile: others may have used their
        row ids again."""
        last = self._last
        rows = rows_after(last, _ROWS)
        with self._lock:
            if not self._ids or self._removals != removals:
                return False
            self._note_added([one for _, one in rows])
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
