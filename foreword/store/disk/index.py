"""The index of a disk store: one SQLite database beside the blocks, shared by all processes that use the folder.

Here are its connections, the questions to it, and what its errors mean; what it holds and how that changes is in
`disk_rows.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from foreword.errors import StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, StoredBlock, time_left
from foreword.store.disk.index_rows import COUNTED, SCHEMA, THESE, VERSION, BrokenIndex, Transaction, block_id, check

_NO_VERSION: Final = 1000  # a larger number is no version but damage
_FIRST_BATCH: Final = 64
_BATCH: Final = 1024
_SCATTERED: Final = 8  # fewer than one of so many rows that follow belong to the chain: they lie elsewhere
_CHECKED_BYTES: Final = 64 << 20  # an index up to this size is read through when it is opened
_CACHE_KIB: Final = 32 << 10
_LONGEST_WAIT: Final = 1e6
_BROKEN: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}


class Index:
    """The database in `file`. Threads may call at once: one connection reads, one writes.

    Args:
        journal: SQLite's journal mode, "wal" or, for network file systems, "delete".
    """

    def __init__(self, file: str, *, journal: str, read_only: bool) -> None:
        self.file = file
        self.read_only = read_only
        self._journal = journal
        self.after_fork()

    def after_fork(self) -> None:
        """Let go of what belongs to the parent process."""
        for connection in (getattr(self, "_reader", None), getattr(self, "_writer", None)):
            if connection is not None:
                _abandon(connection)  # its locks are the parent's
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._inode = -1
        self._timeouts: dict[sqlite3.Connection, int] = {}  # milliseconds
        self.broken = False

    def usable(self) -> bool:
        """Whether it is open, sound as far as is known, and still the file that lies there."""
        return self._reader is not None and not self.broken and _inode(self.file) == self._inode

    def open(self, deadline: float) -> None:
        """Connect, and make the database if there is none. Raises BrokenIndex, StoreUnavailable, StoreTimeout.

        Must not be called by two processes at once.
        """
        self.close(deadline)
        with _translated(self):
            if not self.read_only and not os.path.exists(self.file):
                for end in (
                    "-wal",
                    "-shm",
                    "-journal",
                ):  # of one that was removed: SQLite would work it into the new one
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.file + end)
            reader = self._connect(deadline)
            try:
                self._prepare(reader)
                writer = self._connect(deadline)
            except BaseException:
                reader.close()
                raise
            self._inode = os.stat(self.file).st_ino
            self.broken = False
            self._reader, self._writer = reader, writer

    def close(self, deadline: float) -> None:
        """Disconnect, once the calls under way are done."""
        with held(self._write_lock, deadline), held(self._read_lock, deadline):
            reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
            self._timeouts.clear()
            ours = _inode(self.file) == self._inode
            for connection in (reader, writer):
                if connection is None:
                    continue
                if not ours:
                    _abandon(connection)  # closing would remove the log by its name, which is another database's now
                    continue
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def _connect(self, deadline: float) -> sqlite3.Connection:
        if self.read_only:
            return self._connect_for_reading()
        connection = sqlite3.connect(
            self.file, timeout=time_left(deadline), isolation_level=None, check_same_thread=False
        )
        os.chmod(self.file, 0o600)  # SQLite gives its other files the same mode
        for pragma in (f"journal_mode={self._journal}", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}").fetchone()
        return connection

    def _connect_for_reading(self) -> sqlite3.Connection:
        """Beside a living writer if there is one; where the folder cannot be written the database is taken as it lies."""
        address = "file:" + quote(os.path.abspath(self.file))
        for mode in ("?mode=ro", "?immutable=1"):
            connection = sqlite3.connect(address + mode, uri=True, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("SELECT clock FROM totals").fetchone()
            except sqlite3.OperationalError:
                connection.close()
                continue
            return connection
        raise BrokenIndex("the index cannot be read")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or see that they are sound."""
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not self.read_only:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise BrokenIndex("the index is not Foreword's")
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
            return
        if not 0 < version < _NO_VERSION:
            raise BrokenIndex("the index is of no version")
        if version != VERSION:
            raise StoreUnavailable(f"the index {self.file} has format {version}, this program reads {VERSION}")
        if os.path.getsize(self.file) <= _CHECKED_BYTES:
            check(connection)
            noted = "SELECT blocks, bytes, pinned_bytes FROM totals"
            if connection.execute(f"{COUNTED} EXCEPT {noted}").fetchone() is not None:
                raise BrokenIndex("the index has lost count")

    @contextlib.contextmanager
    def write(self, deadline: float) -> Iterator[Transaction]:
        """A transaction that no other process's writes come between; undone if the block raises."""
        with _translated(self), held(self._write_lock, deadline):
            connection = self._writer
            if connection is None:
                raise StoreUnavailable("the index is not open")
            self._set_timeout(connection, deadline)
            connection.execute("BEGIN IMMEDIATE")
            try:
                if not self.usable():
                    raise StoreUnavailable("another process has made the index anew")
                transaction = Transaction(connection)
                yield transaction
                transaction.save()
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _set_timeout(self, connection: sqlite3.Connection, deadline: float) -> None:
        """SQLite waits as long as is left, or a little less: a statement for each millisecond would be one to compile."""
        left = int(min(time_left(deadline), _LONGEST_WAIT) * 1000)
        if not left // 2 <= self._timeouts.get(connection, -1) <= left:
            self._timeouts[connection] = max(1, left * 7 // 8)
            connection.execute(f"PRAGMA busy_timeout={self._timeouts[connection]}")

    def _read(self, sql: str, values: Sequence[object], deadline: float) -> list[Any]:
        """All rows. By the writing connection if it is free, since others' writes alone make that forget what it has read."""
        with _translated(self):
            if self._write_lock.acquire(blocking=False):
                try:
                    return self._fetch(self._writer, sql, values, deadline)
                finally:
                    self._write_lock.release()
            with held(self._read_lock, deadline):
                return self._fetch(self._reader, sql, values, deadline)

    def _fetch(
        self, connection: sqlite3.Connection | None, sql: str, values: Sequence[object], deadline: float
    ) -> list[Any]:
        if connection is None:
            raise StoreUnavailable("the index is not open")
        self._set_timeout(connection, deadline)
        return connection.execute(sql, values).fetchall()

    def lookup(self, names: Sequence[Name], deadline: float) -> int:
        """How many of `names`, from the first on, are whole.

        Finds the first one's row and looks for the others among those that follow it, since they were probably written
        together; where that does not get far, asks for each. In growing batches: most lookups end early.
        """
        ids = [block_id(name) for name in names]
        there: set[int] = set()
        done, size = 0, _FIRST_BATCH
        while done < len(ids):
            before = done
            there |= self._following(ids[done], size, deadline)
            done = _first_missing(ids, there, done)
            in_a_row = done - before >= size // _SCATTERED
            if done == before:
                return done
            if not in_a_row:
                return done + self._one_by_one(ids[done:], deadline)
            size = min(_BATCH, size * 4)
        return done

    def _one_by_one(self, ids: Sequence[int], deadline: float) -> int:
        """How many of these, from the first on, are whole."""
        sql = "SELECT key FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE id = value) LIMIT 1"
        missing = self._read(sql, (json.dumps(ids),), deadline)
        return int(missing[0][0]) if missing else len(ids)

    def _following(self, number: int, count: int, deadline: float) -> set[int]:
        """The numbers of a block and of those written after it; nothing if it is not there."""
        sql = "SELECT id FROM blocks WHERE rowid >= (SELECT rowid FROM blocks WHERE id = ?) ORDER BY rowid LIMIT ?"
        return {one for (one,) in self._read(sql, (number, count), deadline)}

    def ready(self, ids: Sequence[int], deadline: float) -> set[int]:
        """Which of the blocks are whole, as far as the index knows."""
        return {one for (one,) in self._read(f"SELECT id FROM blocks WHERE {THESE}", (json.dumps(ids),), deadline)}

    def entries(self, after: int, count: int, deadline: float) -> tuple[list[StoredBlock], int]:
        """The next blocks in the order of their rows, and the last one's row."""
        rows = self._read(
            "SELECT rowid, name, parent, depth, size, stored_at, used_at, hits, pinned FROM blocks"
            " WHERE rowid > ? ORDER BY rowid LIMIT ?",
            (after, count),
            deadline,
        )
        return [_entry(*row[1:]) for row in rows], rows[-1][0] if rows else after

    def totals(self, deadline: float) -> tuple[int, int, int]:
        """Blocks, their bytes, and the bytes of the pinned ones."""
        [row] = self._read("SELECT blocks, bytes, pinned_bytes FROM totals", (), deadline)
        return row[0], row[1], row[2]


def _inode(file: str) -> int:
    """0 if there is no such file."""
    try:
        return os.stat(file).st_ino
    except OSError:
        return 0


def _abandon(connection: sqlite3.Connection) -> None:
    """Keep a connection from ever being closed, at the end of the process too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _first_missing(ids: Sequence[int], there: set[int], start: int) -> int:
    """The first position from `start` on whose number is not there."""
    for position in range(start, len(ids)):
        if ids[position] not in there:
            return position
    return len(ids)


def _entry(
    name: Name, parent: bytes, depth: int, size: int, stored_at: float, used_at: float, hits: int, pinned: int
) -> StoredBlock:
    return StoredBlock(name, parent, depth, size, stored_at, used_at, hits, bool(pinned))


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """A lock, in time. Raises StoreTimeout."""
    if not lock.acquire(timeout=min(time_left(deadline), _LONGEST_WAIT)):
        raise StoreTimeout("another thread holds the index")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _translated(index: Index) -> Iterator[None]:
    """SQLite's errors as Foreword's."""
    try:
        yield
    except BrokenIndex:
        index.broken = True
        raise
    except sqlite3.Error as error:
        translated = _translate(error)
        index.broken |= isinstance(translated, BrokenIndex)
        raise translated from error
    except OSError as error:
        raise StoreUnavailable(f"the index cannot be used: {error}") from error


def _translate(error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0)
    kind = code & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreTimeout("another process holds the index")
    if kind == sqlite3.SQLITE_FULL:
        return StoreFull("there is no room for the index")
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnly(f"the index cannot be written: {error}")
    if kind in _BROKEN or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return BrokenIndex(f"the index is broken: {error}")
    return StoreUnavailable(f"the index cannot be used: {error}")
