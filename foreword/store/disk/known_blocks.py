"""Which blocks the index of a disk store has, in memory: a lookup that this can answer waits for no file and no lock of the
index.

Several processes change the index. Each says so on a board, a small file in the folder, after the transaction and before its
caller learns of it. So a process knows whether its memory of the index is complete: no other one has added blocks since it last
read the index. The board has a log of each process's last changes, with which the others follow it: the scheduler of an engine
knows what its worker, in another process, has written, and reads no index for that. What it cannot follow so it reads in the
index. Until then a block that it does not know is *not known*, and the index is asked; in the same way a block that it knows is
not known to be there once another process has removed any that it has not followed.

The board works among the processes of a host. So does the index in the mode that this is for: SQLite's write-ahead log.

Two processes may change the index between two looks of a third, which sees their logs, and not in which order they committed.
Each says on the board that it is about to remove blocks before it commits that, so

    removal announced < removal committed < removal in the log,     addition committed < addition in the log

and a reader that saw no announcement when it last looked knows that what it had added by then is older than the removal. All
else counts as present if it was added since, or as not known. So a block that is present never counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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

    def removing(self) -> None:
        """Say that this process is about to commit a transaction that removes blocks."""
        if self._entry == _ENTRIES - 1:
            self._write(_PAGE + self._entry * _ENTRY, os.urandom(_ENTRY))
            return
        self._begin()
        self._set(1, self._value | _ABOUT_TO_REMOVE)

    def removed_nothing(self) -> None:
        """Take back what `removing` has said."""
        if self._entry < _ENTRIES - 1 and self._value:
            self._set(1, self._value)

    def _begin(self) -> None:
        """Take a number for the entry, before the first change."""
        if not self._value or self._value & _COUNT > _COUNT // 2:
            self._value = int.from_bytes(os.urandom(3), "little") << _OWNER_SHIFT | _LOGGED
            self._set(0, self._value)

    def _append(self, changes: Sequence[int]) -> bool:
        """Put changes into the log. False if that has failed."""
        records = b"".join(_RECORD.pack(change, self._value + 1 + i) for i, change in enumerate(changes))
        start = (self._value + 1) % _LOGGED
        split = (_LOGGED - start) * _RECORD.size
        return self._write(self._log_at(self._entry, start), records[:split]) and (
            len(records) <= split or self._write(self._log_at(self._entry, 0), records[split:])
        )

    def changes_of(self, entry: int, before: int, now: int) -> list[int] | None:
        """The changes of another process between two values of its entry; None if its log does not have them all."""
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
        """What the other processes' entries are now: of those that have added blocks, and of those that have removed some.
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


@dataclass(slots=True)
class _Followed:
    """What the logs of other processes say of the time between two looks at the board.

    Attributes:
        pages: the board as far as the logs say all that has changed on it. `complete`: that is all of it.
        added, removed: ids, each by the last change in the log of a process.
        unsure: ids that were removed, perhaps before others have added them again.
    """

    pages: _Pages
    complete: bool = True
    added: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)


def _is_settled(pages: _Pages) -> bool:
    """Whether no process is about to remove blocks, of those that say so."""
    return not any(_is_about_to_remove(*entry) for entry in zip(*map(_PAGES.unpack, pages), strict=True))


def _is_about_to_remove(added: int, removed: int) -> bool:
    return added >> _OWNER_SHIFT == removed >> _OWNER_SHIFT and bool(removed & _ABOUT_TO_REMOVE)


def _follow(board: ChangeBoard, before: _Pages, now: _Pages) -> _Followed:
    """Read the logs of the processes whose entries have changed."""
    old, new = [[list(_PAGES.unpack(page)) for page in pages] for pages in (before, now)]
    found = _Followed(before)
    for entry in range(_ENTRIES):
        added, removed = new[0][entry], new[1][entry]
        same_owner = removed >> _OWNER_SHIFT == added >> _OWNER_SHIFT
        removes = _is_about_to_remove(added, removed)
        if (old[0][entry], old[1][entry]) == (added, removed):
            continue
        logged = None if entry == _ENTRIES - 1 else board.changes_of(entry, old[0][entry], added)
        if logged is None:
            found.complete = False
            continue
        announced = _is_about_to_remove(added, old[1][entry])
        last = {change & ~_REMOVED: change >= _REMOVED for change in logged}
        gone = {one for one, is_gone in last.items() if is_gone}
        (found.unsure if announced else found.removed).update(gone)
        found.added.update(last.keys() - gone)
        old[0][entry] = added
        if removes or (same_owner and removed & _COUNT <= added & _COUNT):
            old[1][entry] = removed
        found.complete &= old[1][entry] == removed
    found.pages = _PAGES.pack(*old[0]), _PAGES.pack(*old[1])
    return found


class KnownBlocks:
    """The ids of the blocks in the index that this process knows. Thread-safe.

    Invariant: while the board is as it was at `_seen`, each block that others have put into the index has its id here, or in
    `_unsure`. What this process puts there has its id here before the put returns.
    """

    def __init__(self, board: ChangeBoard, most: int = MAX_IDS) -> None:
        self._board = board
        self._most = most
        self._lock = threading.Lock()
        # What others have added while this process commits a removal, which may be older; None: it does not.
        self._meanwhile: set[int] | None = None
        self._removals = 0  # that this process has begun
        self._start_over(usable=False)

    def _start_over(self, *, usable: bool) -> None:
        self._ids: list[set[int]] = [set() for _ in range(_SHARDS)] if usable else []
        self._count = 0
        self._last = 0  # all rows up to this row id have been read
        self._began: tuple[bytes, bytes] | None = None  # the board when the reading began
        self._seen: tuple[bytes, bytes] | None = (
            None  # the board when all of the index had been read, or was followed to
        )
        self._loaded_at = 0.0
        self._unsure: set[int] = set()  # removed by another process, perhaps before it was added again
        # What this process has added since it last followed the others; None: more than are noted.
        self._own: set[int] | None = set()

    def forget(self, *, opened: bool = False) -> None:
        """Know nothing. `opened`: the index has just been opened, and may be read."""
        usable = opened and self._board.open()
        with self._lock:
            self._start_over(usable=usable)

    def told(self, ids: Sequence[int]) -> list[bool | None]:
        """Of each block whether it is in the index; None: not known. Reads two pages of the board, and what others have put
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
        """Follow the other processes by their logs. Returns the board now, and to which one they were followed."""
        with self._lock:
            seen, own = self._seen, self._own
            self._own = set()  # what is added from here on may be newer than what the next call follows, too
        now = self._board.others()
        found = _follow(self._board, seen, now) if seen is not None and now is not None else None
        with self._lock:
            if found is None or not found.complete or self._seen is not seen or not self._ids:
                self._note_own(own)
            if found is None or self._seen is not seen or not self._ids:
                return now, self._seen
            own_since = set[int]() if own is None or self._own is None else own | self._own
            kept = found.added | own_since
            removed, unsure = found.removed - kept, found.unsure - kept
            if own is None or self._own is None:
                removed, unsure = set(), unsure | removed
            for one in removed | unsure:
                shard = self._ids[one % _SHARDS]
                if one in unsure and one in shard:
                    self._unsure.add(one)
                shard.discard(one)
            self._unsure -= removed
            self._note_added(found.added)
            if self._ids:
                self._seen = found.pages
            return now, self._seen

    def removing(self) -> None:
        """This process is about to commit a transaction that removes blocks. Others must not find a row id that is used again
        before they know of that."""
        with self._lock:
            self._meanwhile = set()
            self._removals += 1
        self._board.removing()

    def removed_nothing(self) -> None:
        """The transaction has failed."""
        with self._lock:
            self._meanwhile = None
        self._board.removed_nothing()

    def committed(self, added: Iterable[int], removed: Iterable[int], last: int) -> None:
        """This process has committed a transaction; `last`: the largest row id. Called in the order of the transactions."""
        new, gone = list(added), list(removed)
        with self._lock:
            newer, self._meanwhile = self._meanwhile or set(), None
            if self._ids:
                for one in gone:
                    if one not in newer:
                        self._ids[one % _SHARDS].discard(one)
                        self._unsure.discard(one)
                self._note_added(new)
                self._note_own(new)
            if gone and last < self._last:  # another process may use these row ids again
                self._last, self._seen = last, None
        self._board.announce(new, gone)

    def _note_own(self, added: Iterable[int] | None) -> None:
        if self._own is not None and added is not None:
            self._own.update(added)
        if added is None or (self._own is not None and len(self._own) > _LOGGED):
            self._own = None

    def _note_added(self, ids: Iterable[int]) -> None:
        """Blocks that another process or this one has added."""
        new = set(ids)
        self._unsure -= new
        if self._meanwhile is not None:
            self._meanwhile |= new
        self._add(new)

    def _add(self, ids: Iterable[int]) -> None:
        for one in ids:
            self._ids[one % _SHARDS].add(one)
            self._count += 1
        if self._count > self._most:  # some were counted twice, or are gone
            self._count = sum(map(len, self._ids))
        if self._count > self._most:
            self._start_over(usable=False)

    def suspect(self) -> None:
        """Another process may have changed the index without a word on the board, as versions before it do."""
        self._seen = None

    @property
    def behind(self) -> bool:
        """Whether the index has to be read (again) before it is known which blocks are absent."""
        return bool(self._ids) and (self._seen is None or self._board.others() != self._seen)

    def read(self, rows_after: RowsAfter, until: float) -> None:
        """Read what others have added, for as long as that may take: the whole index the first time and, twice a minute at
        most, after others have removed blocks, or were about to when the reading began: then rows that were read may have been
        used again. Nothing where the logs say it all. Never raises."""
        now, before = self._catch_up()
        removals = self._removals
        if now is None or now == before or not self._ids or self._meanwhile is not None:
            return
        if self._began is not None and (now[1] != self._began[1] or not _is_settled(self._began)):
            if time.monotonic() - self._loaded_at < _RELOAD_SECONDS:
                return
            self.forget(opened=True)
            before = None
        with self._lock:
            self._began = self._began or now
            self._loaded_at = self._loaded_at or time.monotonic()
        with contextlib.suppress(StoreError):
            while self._read_some(rows_after):
                if time.monotonic() >= until:
                    return
            with self._lock:
                # Else they were followed meanwhile, or row ids that were read may have been used again.
                if self._seen is before and self._removals == removals:
                    self._seen = now if self._ids else None

    def _read_some(self, rows_after: RowsAfter) -> bool:
        """Read some rows. False after the last ones."""
        last = self._last
        rows = rows_after(last, _ROWS)
        with self._lock:
            if not self._ids:
                return False
            self._note_added(one for _, one in rows)
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
