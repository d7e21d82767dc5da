"""The index of a disk store: an SQLite database next to the blocks, shared by all processes that use the folder.

This module has the connections, the queries and the translation of SQLite's errors. The tables and the transactions
that change them are in `index_rows.py`.
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

from foreword.errors import StoreError, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, StoredBlock, time_left
from foreword.store.disk.files import DiskFull
from foreword.store.disk.index_rows import (
    CLOCKS,
    IN_LIST,
    SCHEMA,
    VERSION,
    BrokenIndex,
    IndexTransaction,
    OldIndex,
    block_id,
    check,
    check_sample,
    read_totals,
)
from foreword.store.disk.known_blocks import ChangeBoard, KnownBlocks
from foreword.store.disk.pieces import BlockPlace

_MAX_VERSION: Final = 1000  # a larger number is not a version but damage
_FIRST_BATCH: Final = 64
_BATCH: Final = 1024
_SCATTERED: Final = 8  # if fewer than 1 of 8 adjacent rows belong to the chain, its rows are elsewhere
_CHECKED_BYTES: Final = 16 << 20  # an index up to this size is checked completely when it is opened
_ALMOST_FULL: Final = 256 << 10  # with less room than this, errors of SQLite's files mean a full disk
_CACHE_KIB: Final = 32 << 10
_LONGEST_WAIT: Final = 1e6
_BROKEN: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
}
# Errors that wrong values in an index lead to, wherever they are used.
_WRONG_VALUE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class DiskIndex:
    """The database in `file`. Thread-safe: one connection reads, one writes.

    Args:
        journal: SQLite's journal mode: "wal", or "delete" for network file systems.
    """

    def __init__(self, file: str, *, journal: str, read_only: bool) -> None:
        self.file = file
        self.read_only = read_only
        self.journal = journal
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._board = ChangeBoard(f"{os.path.dirname(file)}/changes")
        self.known = KnownBlocks(self._board)
        self._version = -1  # of the data, as the writing connection saw it last
        self._reset()

    def _reset(self) -> None:
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._inode = -1
        self._timeouts: dict[sqlite3.Connection, int] = {}  # milliseconds
        self.broken = False

    def after_fork(self) -> None:
        """Drop the connections of the parent process without closing them: their locks are the parent's."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                # It is never closed, even at exit.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        self._reader = self._writer = None
        self._reset()
        self._board.close()
        self.known = KnownBlocks(self._board)

    def usable(self) -> bool:
        """Whether the index is open, not known to be broken, and still the file at its path."""
        return self._reader is not None and not self.broken and _inode(self.file) == self._inode

    def known_broken(self) -> bool:
        """Whether the file at the path is the one that was found to be broken."""
        return self.broken and self._inode > 0 and _inode(self.file) == self._inode

    def open(self, deadline: float) -> None:
        """Connect, and create the database if there is none. Raises BrokenIndex, StoreUnavailable, StoreTimeout.

        Two processes must not call this at the same time.
        """
        self.close(deadline)
        with _translated(self):
            if os.path.isdir(self.file):
                raise BrokenIndex("there is a folder in the place of the index")
            if not self.read_only and not os.path.exists(self.file):
                # SQLite would apply the log of a removed index to the new one.
                for suffix in ("-wal", "-shm", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.file + suffix)
            reader = self._connect(deadline)
            try:
                self._prepare(reader)
                writer = self._connect(deadline)
            except BaseException:
                reader.close()
                raise
            self._inode = os.stat(self.file).st_ino
            self.broken = False
            self._version = -1
            if not self.read_only:  # before the first transaction, which others must learn of
                self._board.open()
                self.known.forget(opened=self.journal == "wal")
            self._reader, self._writer = reader, writer

    def close(self, deadline: float) -> None:
        """Disconnect after the running calls have ended."""
        with held(self._write_lock, deadline), held(self._read_lock, deadline):
            reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
            self._timeouts.clear()
            self.known.forget()
            self._board.close()
            for connection in (reader, writer):
                if connection is not None:
                    with contextlib.suppress(sqlite3.Error):  # SQLite leaves the log alone if the database was moved
                        connection.close()

    def _connect(self, deadline: float) -> sqlite3.Connection:
        if self.read_only:
            return self._connect_read_only()
        connection = sqlite3.connect(
            self.file, timeout=time_left(deadline), isolation_level=None, check_same_thread=False
        )
        os.chmod(self.file, 0o600)  # SQLite gives its other files the same mode
        for pragma in (f"journal_mode={self.journal}", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}").fetchone()
        return connection

    def _connect_read_only(self) -> sqlite3.Connection:
        """Connect beside a living writer, or, if the folder cannot be written, to the database as an immutable file."""
        address = "file:" + quote(os.fsencode(os.path.abspath(self.file)))
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
        """Create the tables, or check them."""
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not self.read_only:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise BrokenIndex("the database is not an index of Foreword")
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
            self._begin_clock(connection)
            return
        if not 0 < version < _MAX_VERSION:
            raise BrokenIndex("the index has no valid version")
        if version < VERSION:
            raise OldIndex(f"the index has the old format {version}")
        if version != VERSION:
            raise StoreUnavailable(f"the index {self.file} has format {version}, this program reads {VERSION}")
        (check if os.path.getsize(self.file) <= _CHECKED_BYTES else check_sample)(connection)
        if not self.read_only:
            self._begin_clock(connection)

    def _begin_clock(self, connection: sqlite3.Connection) -> None:
        """Begin the index's clock if it has none: at the time of the index's file, which is the file system's and not this
        process's. Times of tenants that are later become that time."""
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'clocks'").fetchone() is None:
            files = (self.file + suffix for suffix in ("", "-wal"))
            began = max(os.stat(file).st_mtime for file in files if os.path.exists(file))
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute(CLOCKS)
                connection.execute("INSERT INTO clocks VALUES ('', 0.0, ?)", (began,))
                connection.execute("UPDATE tenants SET used_at = min(used_at, ?)", (began,))
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    def check(self, deadline: float) -> None:
        """Check the whole index while others use it. Raises BrokenIndex."""
        with _translated(self), contextlib.closing(self._connect(deadline)) as connection:
            check(connection)

    @contextlib.contextmanager
    def write(self, deadline: float) -> Iterator[IndexTransaction]:
        """A write transaction, exclusive among all processes. It is rolled back if the block raises."""
        with _translated(self), held(self._write_lock, deadline):
            connection = self._writer
            if connection is None:
                raise StoreUnavailable("the index is not open")
            self._set_timeout(connection, deadline)
            connection.execute("BEGIN IMMEDIATE")
            removing = False
            try:
                if not self.usable():
                    raise StoreUnavailable("another process has rebuilt the index")
                self._note_version(connection)
                transaction = IndexTransaction(connection)
                yield transaction
                transaction.save()
                last = transaction.last_row() if transaction.removed else 0
                if transaction.removed:
                    removing = True
                    self.known.removing()
                connection.execute("COMMIT")
                removing = False
                if transaction.added or transaction.removed:
                    self.known.committed(transaction.added, transaction.removed, last)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if removing:
                    self.known.removing(False)
                raise

    def _note_version(self, connection: sqlite3.Connection) -> None:
        """Find out whether other connections have changed the data since this one last did."""
        [version] = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version and self._version >= 0:
            self.known.suspect()
        self._version = version

    def read_known(self, until: float) -> None:
        """Read into `known` what other processes have added, for as long as that may take. Never raises."""
        if self.known.behind:
            self.known.read(lambda last, count: self._ids_after(last, count, until), until)

    def _ids_after(self, after: int, count: int, deadline: float) -> list[tuple[int, int]]:
        """The next rows: row id, block id."""
        sql = "SELECT rowid, id FROM blocks WHERE rowid > ? ORDER BY rowid LIMIT ?"
        return self._read(sql, (after, count), deadline)

    def _set_timeout(self, connection: sqlite3.Connection, deadline: float) -> None:
        """Set SQLite's timeout to about the time left. Skipped if it is close enough: each new value compiles a statement."""
        left = int(min(time_left(deadline), _LONGEST_WAIT) * 1000)
        if not left // 2 <= self._timeouts.get(connection, -1) <= left:
            self._timeouts[connection] = max(1, left * 7 // 8)
            connection.execute(f"PRAGMA busy_timeout={self._timeouts[connection]}")

    def _read(self, sql: str, values: Sequence[object], deadline: float) -> list[Any]:
        """All rows of a query.

        Uses the writing connection if it is free: a connection's page cache survives its own writes but not those of
        others.
        """
        with _translated(self), self._connection(deadline) as connection:
            return connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[sqlite3.Connection]:
        """A connection for reading."""
        if self._write_lock.acquire(blocking=False):
            try:
                yield self._usable(self._writer, deadline)
            finally:
                self._write_lock.release()
        else:
            with held(self._read_lock, deadline):
                yield self._usable(self._reader, deadline)

    def _usable(self, connection: sqlite3.Connection | None, deadline: float) -> sqlite3.Connection:
        if connection is None:
            raise StoreUnavailable("the index is not open")
        self._set_timeout(connection, deadline)
        return connection

    def lookup(self, names: Sequence[Name], deadline: float) -> int:
        """Count how many of `names` are complete blocks, from the first up to the first that is missing.

        A chain is usually written at once, so its rows are adjacent: find the row of the first block and look for the
        others among the rows that follow. Where that finds few of them, query each id. Batches grow, since most lookups
        end early.
        """
        ids = [block_id(name) for name in names]
        present: set[int] = set()
        done, size = 0, _FIRST_BATCH
        while done < len(ids):
            before = done
            present |= self._ids_from(ids[done], size, deadline)
            while done < len(ids) and ids[done] in present:
                done += 1
            if done == before:
                return done
            if done - before < size // _SCATTERED:
                return done + self._count_present(ids[done:], deadline)
            size = min(_BATCH, size * 4)
        return done

    def _ids_from(self, id_: int, count: int, deadline: float) -> set[int]:
        """The ids of a block and of those in the rows after it. Empty if it is missing."""
        sql = "SELECT id FROM blocks WHERE rowid >= (SELECT rowid FROM blocks WHERE id = ?) ORDER BY rowid LIMIT ?"
        return {one for (one,) in self._read(sql, (id_, count), deadline)}

    def _count_present(self, ids: Sequence[int], deadline: float) -> int:
        """Count how many of these ids are present, up to the first that is missing."""
        sql = "SELECT key FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE id = value) LIMIT 1"
        missing = self._read(sql, (json.dumps(ids),), deadline)
        return int(missing[0][0]) if missing else len(ids)

    def present(self, ids: Sequence[int], deadline: float) -> set[int]:
        """The ids of those blocks that are complete."""
        return {one for (one,) in self._read(f"SELECT id FROM blocks WHERE {IN_LIST}", (json.dumps(ids),), deadline)}

    def places(self, names: Sequence[Name], deadline: float) -> dict[Name, tuple[BlockPlace, int]]:
        """Place and size of each of these blocks that lies in a piece."""
        sql = f"SELECT name, piece, at, size FROM blocks WHERE {IN_LIST} AND piece != 0"
        rows = self._read(sql, (json.dumps([block_id(name) for name in names]),), deadline)
        return {name: (BlockPlace(piece, at), size) for name, piece, at, size in rows}

    def places_of(self, ids: Sequence[int], deadline: float) -> dict[int, BlockPlace]:
        """The places of those of these blocks that are complete, by id."""
        rows = self._read(f"SELECT id, piece, at FROM blocks WHERE {IN_LIST}", (json.dumps(ids),), deadline)
        return {id_: BlockPlace(piece, at) for id_, piece, at in rows}

    def page(self, after: int, count: int, deadline: float) -> tuple[list[StoredBlock], int]:
        """The next blocks in the order of their rows, and the last row id."""
        rows = self._read(
            "SELECT rowid, name, parent, depth, size, stored_at, used_at, hits, pinned FROM blocks"
            " WHERE rowid > ? ORDER BY rowid LIMIT ?",
            (after, count),
            deadline,
        )
        blocks = [StoredBlock(*fields) for _, *fields in rows]  # SQLite has no booleans: `pinned` is 0 or 1
        return blocks, rows[-1][0] if rows else after

    def shrink_log(self, deadline: float) -> None:
        """Write the log to the database and empty it, if no other process reads it at this moment."""
        with contextlib.suppress(StoreError), _translated(self), held(self._write_lock, deadline):
            if self._writer is not None:
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def compared(self, deadline: float, boot: str = "") -> bool:
        """Whether the index was compared with the files: since it was made, or in this boot if one is named."""
        boots = {boot for (boot,) in self._read("SELECT boot FROM hosts", (), deadline)}
        return boot in boots if boot else bool(boots)

    def listed(self, deadline: float) -> bool:
        """Whether all blocks are in the index, or at least their bytes."""
        sql = "SELECT EXISTS (SELECT 1 FROM hosts) OR EXISTS (SELECT 1 FROM writing WHERE id = 0)"
        return bool(self._read(sql, (), deadline)[0][0])

    def rows_after(self, after: int, count: int, deadline: float) -> list[tuple[int, int, Name, int, BlockPlace]]:
        """The next rows: row id, block id, name, size, place."""
        sql = "SELECT rowid, id, name, size, piece, at FROM blocks WHERE rowid > ? ORDER BY rowid LIMIT ?"
        rows = self._read(sql, (after, count), deadline)
        return [(row, id_, name, size, BlockPlace(piece, at)) for row, id_, name, size, piece, at in rows]

    def oldest_leaves(self, count: int, deadline: float) -> list[Name]:
        """The names of the least recently used blocks of the largest tenant."""
        tenant = "SELECT id FROM tenants ORDER BY bytes DESC LIMIT 1"
        leaves = f"SELECT name FROM blocks WHERE children = 0 AND pinned = 0 AND tenant = ({tenant})"
        found = self._read(f"{leaves} ORDER BY used, depth DESC LIMIT ?", (count,), deadline)
        return [name for (name,) in found]

    def totals(self, deadline: float) -> tuple[int, int, int]:
        """The number of blocks, their bytes, and the bytes of pinned blocks."""
        with _translated(self), self._connection(deadline) as connection:
            return read_totals(connection)[:3]


def _inode(file: str) -> int:
    """0 if there is no such file."""
    try:
        return os.stat(file).st_ino
    except OSError:
        return 0


def _almost_full(file: str) -> bool:
    """Whether the file system has hardly any room or files left."""
    try:
        room = os.statvfs(os.path.dirname(file))
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < _ALMOST_FULL or (room.f_files > 0 and room.f_favail < 4)


@contextlib.contextmanager
def held(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """Hold a lock. Raises StoreTimeout if it is not free before the deadline."""
    if not lock.acquire(timeout=min(time_left(deadline), _LONGEST_WAIT)):
        raise StoreTimeout("another thread holds the index")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _translated(index: DiskIndex) -> Iterator[None]:
    """Convert errors of SQLite and the system to StoreError, and note whether the index is broken."""
    try:
        yield
    except BrokenIndex:
        index.broken = True
        raise
    except _WRONG_VALUE as error:
        index.broken = True
        raise BrokenIndex(f"the index has wrong values: {error!r}") from error
    except sqlite3.Error as error:
        translated = translate(error, index.file)
        index.broken |= isinstance(translated, BrokenIndex)
        raise translated from error
    except OSError as error:
        raise StoreUnavailable(f"the index cannot be used: {error}") from error


def translate(error: sqlite3.Error, file: str) -> StoreError:
    """Convert an error of SQLite, for the database `file`."""
    code = getattr(error, "sqlite_errorcode", 0)
    kind = code & 0xFF
    if not code and not isinstance(error, sqlite3.ProgrammingError):  # text that is not UTF-8
        return BrokenIndex(f"the index has wrong values: {error}")
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreTimeout("another process holds the index")
    if kind == sqlite3.SQLITE_FULL or (kind in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _almost_full(file)):
        return DiskFull("the disk has no room for the index")
    if kind in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnly(f"the index cannot be written: {error}")
    if kind in _BROKEN or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return BrokenIndex(f"the index is broken: {error}")
    return StoreUnavailable(f"the index cannot be used: {error}")
