"""The index of a disk store: one SQLite database beside the blocks, shared by all processes that use the folder.

What is going to be written is noted in `writing` first and moves to `blocks` once its file is whole; a row goes after its
file. So the sizes in both tables are never less than the bytes on disk, whoever is killed when. Nobody sees or evicts what is
in `writing` until its writer is done, or dead.

`used` is a count of transactions, not a time: clocks may jump. Children are counted as they come and go; those of a block that
is not here are counted in `waiting`, so a parent may come after its child.

Rows lie in the order in which they were written, so a chain's lie side by side, or nearly. The numbers, which are random, are
in an index of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import xxhash

from foreword.errors import StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Entry, Name, time_left
from foreword.store.frame import Frame, Header

VERSION: Final = 1
_SCHEMA: Final = f"""
CREATE TABLE blocks (
    id INTEGER NOT NULL UNIQUE, children INTEGER NOT NULL, pinned INTEGER NOT NULL, used INTEGER NOT NULL,
    size INTEGER NOT NULL, above INTEGER NOT NULL, depth INTEGER NOT NULL, hits INTEGER NOT NULL,
    stored_at REAL NOT NULL, used_at REAL NOT NULL, name BLOB NOT NULL, parent BLOB NOT NULL
);
CREATE INDEX leaves ON blocks (used, depth DESC) WHERE children = 0 AND pinned = 0;
CREATE TABLE writing (
    id INTEGER PRIMARY KEY, writer INTEGER NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL,
    above INTEGER NOT NULL, depth INTEGER NOT NULL, stored_at REAL NOT NULL, name BLOB NOT NULL, parent BLOB NOT NULL
);
CREATE TABLE waiting (id INTEGER PRIMARY KEY, children INTEGER NOT NULL);
CREATE TABLE writers (id INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL);
CREATE TABLE hosts (host TEXT PRIMARY KEY, boot TEXT NOT NULL);
CREATE TABLE totals (
    blocks INTEGER NOT NULL, bytes INTEGER NOT NULL, pinned_bytes INTEGER NOT NULL, clock INTEGER NOT NULL
);
INSERT INTO totals VALUES (0, 0, 0, 0);
PRAGMA user_version = {VERSION};
"""
_ROW: Final = "id, name, above, size, used, children, pinned"
_THESE: Final = "id IN (SELECT value FROM json_each(?))"
_COUNTED: Final = """SELECT count(*), coalesce(sum(size), 0) + (SELECT coalesce(sum(size), 0) FROM writing),
    coalesce(sum(pinned * size), 0) FROM blocks"""
_NO_VERSION: Final = 1000  # a larger number is no version but damage
_FIRST_BATCH: Final = 64
_BATCH: Final = 1024
_SCATTERED: Final = 8  # fewer than one of so many rows that follow belong to the chain: they lie elsewhere
_CHECKED_BYTES: Final = 64 << 20  # an index up to this size is read through when it is opened
_CACHE_KIB: Final = 32 << 10
_LONGEST_WAIT: Final = 1e6
_BROKEN: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}


class BrokenIndex(StoreUnavailable):
    """The database cannot be read, or is not one. It can be made again from the blocks."""


class Row(NamedTuple):
    """What decides a block's fate."""

    id: int
    name: Name
    above: int
    size: int
    used: int
    children: int
    pinned: int


class Pending(NamedTuple):
    """A block whose file is being written."""

    id: int
    writer: int
    used: int
    size: int
    above: int
    depth: int
    stored_at: float
    name: Name
    parent: bytes


def block_id(name: Name) -> int:
    """A block's number: 63 bits of a hash of its whole name. Two names with one number exclude each other: a miss."""
    return xxhash.xxh3_64_intdigest(name) >> 1


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
            connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
            return
        if not 0 < version < _NO_VERSION:
            raise BrokenIndex("the index is of no version")
        if version != VERSION:
            raise StoreUnavailable(f"the index {self.file} has format {version}, this program reads {VERSION}")
        if os.path.getsize(self.file) <= _CHECKED_BYTES:
            _check(connection)
            noted = "SELECT blocks, bytes, pinned_bytes FROM totals"
            if connection.execute(f"{_COUNTED} EXCEPT {noted}").fetchone() is not None:
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
        return {one for (one,) in self._read(f"SELECT id FROM blocks WHERE {_THESE}", (json.dumps(ids),), deadline)}

    def entries(self, after: int, count: int, deadline: float) -> tuple[list[Entry], int]:
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


class Transaction:
    """The index while nobody else may change it. Files are the caller's business: unlink before `remove` and `drop`, write
    after the transaction that did `add`, then `finish` in another one."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._execute_many = connection.executemany
        self.blocks, self.bytes, self.pinned_bytes, self.clock = self._execute("SELECT * FROM totals").fetchone()

    def save(self) -> None:
        self._execute(
            "UPDATE totals SET blocks = ?, bytes = ?, pinned_bytes = ?, clock = ?",
            (self.blocks, self.bytes, self.pinned_bytes, self.clock),
        )

    def tick(self) -> int:
        """The time of the next use."""
        self.clock += 1
        return int(self.clock)

    def find(self, numbers: Iterable[int]) -> dict[int, Row]:
        """The whole blocks that have these numbers (and, but for one case in 2**63, the names they were made of)."""
        found = self._execute(f"SELECT {_ROW} FROM blocks WHERE {_THESE}", (json.dumps(list(numbers)),))
        return {row.id: row for row in map(Row._make, found)}

    def find_pending(self, numbers: Iterable[int]) -> dict[int, Pending]:
        """Those of these that somebody is writing."""
        if self._execute("SELECT 1 FROM writing LIMIT 1").fetchone() is None:
            return {}
        found = self._execute(f"SELECT * FROM writing WHERE {_THESE}", (json.dumps(list(numbers)),))
        return {row.id: row for row in map(Pending._make, found)}

    def add(self, frames: dict[int, Frame], used: int, writer: int, clock: float) -> list[Pending]:
        """Note what `writer` is going to write, by number. None of it is there or being written."""
        rows = []
        for number, one in frames.items():
            head = one.header
            above, name = _above(head), head.layout + head.key
            rows.append(Pending(number, writer, used, len(one.data), above, head.depth, clock, name, head.parent))
        self._execute_many("INSERT INTO writing VALUES (?,?,?,?,?,?,?,?,?)", rows)
        self.bytes += sum(row.size for row in rows)
        return rows

    def finish(self, done: Iterable[Pending]) -> None:
        """The files of these are whole."""
        rows = {row.id: row for row in done}
        if self._unlist(rows) != len(rows):
            raise BrokenIndex("the index has forgotten what is being written")
        children = self._claim(rows)
        elsewhere: dict[int, tuple[int, int]] = {}
        for row in rows.values():
            if row.above in rows:
                children[row.above] = children.get(row.above, 0) + 1
            elif row.above:
                elsewhere[row.above] = elsewhere.get(row.above, (0, 0))[0] + 1, row.used
        self._execute_many(
            "INSERT INTO blocks VALUES (?,?,0,?,?,?,?,0,?,?,?,?)",
            [
                (
                    number,
                    children.get(number, 0),
                    row.used,
                    row.size,
                    row.above,
                    row.depth,
                    row.stored_at,
                    row.stored_at,
                    row.name,
                    row.parent,
                )
                for number, row in rows.items()
            ],
        )
        for above, (count, used) in elsewhere.items():
            self._count_children(above, count, used)
        self.blocks += len(rows)

    def drop(self, given_up: Iterable[Pending]) -> None:
        """These will not be written, and nothing is left of their files."""
        rows = list(given_up)
        if self._unlist(row.id for row in rows) != len(rows):
            raise BrokenIndex("the index has forgotten what is being written")
        self.bytes -= sum(row.size for row in rows)

    def _unlist(self, numbers: Iterable[int]) -> int:
        return self._execute(f"DELETE FROM writing WHERE {_THESE}", (json.dumps(list(numbers)),)).rowcount

    def _claim(self, numbers: Iterable[int]) -> dict[int, int]:
        """Children that came before these blocks."""
        if self._execute("SELECT 1 FROM waiting LIMIT 1").fetchone() is None:
            return {}
        ids = json.dumps(list(numbers))
        found = self._execute(f"SELECT * FROM waiting WHERE {_THESE}", (ids,)).fetchall()
        self._execute(f"DELETE FROM waiting WHERE {_THESE}", (ids,))
        return dict(found)

    def _count_children(self, parent: int, more: int, used: int) -> None:
        """A block has so many children more, or less; it was used when they were."""
        changed = self._execute(
            "UPDATE blocks SET children = children + ?, used = max(used, ?) WHERE id = ?", (more, used, parent)
        ).rowcount
        if changed:
            return
        self._execute(
            "INSERT INTO waiting VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET children = children + excluded.children",
            (parent, more),
        )
        self._execute("DELETE FROM waiting WHERE id = ? AND children <= 0", (parent,))

    def remove(self, row: Row) -> None:
        """Forget a block whose file is gone."""
        # The row may be older than what this transaction did to the block's children.
        children, used = self._execute("SELECT children, used FROM blocks WHERE id = ?", (row.id,)).fetchone()
        self._execute("DELETE FROM blocks WHERE id = ?", (row.id,))
        if children:
            self._execute("INSERT OR REPLACE INTO waiting VALUES (?, ?)", (row.id, children))
        if row.above:
            self._count_children(row.above, -1, used)
        self.blocks -= 1
        self.bytes -= row.size
        self.pinned_bytes -= row.size if row.pinned else 0

    def victim(self, before: int) -> Row | None:
        """The leaf used longest ago, and before the time `before`, that may be evicted; the deepest of equals."""
        found = self._execute(
            f"SELECT {_ROW} FROM blocks WHERE children = 0 AND pinned = 0 AND used < ?"
            " ORDER BY used, depth DESC LIMIT 1",
            (before,),
        ).fetchone()
        return None if found is None else Row._make(found)

    def touch(self, numbers: Iterable[int], used: int) -> None:
        """These blocks are in use at the time `used`."""
        self._execute(
            f"UPDATE blocks SET used = max(used, ?) WHERE {_THESE}",
            (used, json.dumps(list(numbers))),
        )

    def note(self, uses: Iterable[tuple[int, int, float, int]]) -> None:
        """Uses by `get`: (time, how many more, seconds since the epoch, number)."""
        self._execute_many("UPDATE blocks SET used = max(used, ?), hits = hits + ?, used_at = ? WHERE id = ?", uses)

    def pin(self, row: Row, pinned: bool) -> None:
        self._execute("UPDATE blocks SET pinned = ? WHERE id = ?", (int(pinned), row.id))
        self.pinned_bytes += row.size if pinned else -row.size

    # Writers

    def register(self, token: str) -> int:
        """A number for a writer."""
        number = self._execute("INSERT INTO writers (token) VALUES (?)", (token,)).lastrowid
        assert number is not None
        return number

    def is_registered(self, writer: int, token: str) -> bool:
        return bool(self._execute("SELECT token FROM writers WHERE id = ?", (writer,)).fetchone() == (token,))

    def writers(self) -> dict[int, str]:
        return dict(self._execute("SELECT id, token FROM writers").fetchall())

    def unfinished(self, writer: int) -> list[Pending]:
        """What a writer has in hand."""
        found = self._execute("SELECT * FROM writing WHERE writer = ?", (writer,)).fetchall()
        return [Pending._make(row) for row in found]

    def unregister(self, writer: int) -> None:
        self._execute("DELETE FROM writers WHERE id = ?", (writer,))

    # After a crash of the machine, or of the index

    def boots(self) -> dict[str, str]:
        """Which run of each host used the index last."""
        return dict(self._execute("SELECT host, boot FROM hosts").fetchall())

    def check(self) -> None:
        """Raises BrokenIndex if SQLite finds anything wrong with its file."""
        _check(self._connection)

    def note_boot(self, host: str, boot: str) -> None:
        self._execute("INSERT OR REPLACE INTO hosts VALUES (?, ?)", (host, boot))

    def all(self) -> dict[Name, Row]:
        return {row.name: row for row in map(Row._make, self._execute(f"SELECT {_ROW} FROM blocks"))}

    def adopt(self, header: Header, size: int, used: int, clock: float) -> bool:
        """A row for a file that has none; False if another block has its number. `recount` must follow."""
        values = (block_id(header.name), 0, 0, used, size, _above(header), header.depth, 0, clock, clock)
        sql = "INSERT OR IGNORE INTO blocks VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
        return bool(self._execute(sql, (*values, header.name, header.parent)).rowcount)

    def recount(self) -> None:
        """Children and totals, from the rows alone."""
        counts: dict[int, int] = {}
        rows = self._execute("SELECT id, above, children FROM blocks").fetchall()
        for _, above, _ in rows:
            counts[above] = counts.get(above, 0) + 1
        counts.pop(0, None)
        wrong = [(counts.get(number, 0), number) for number, _, children in rows if counts.get(number, 0) != children]
        self._execute_many("UPDATE blocks SET children = ? WHERE id = ?", wrong)
        there = {number for number, _, _ in rows}
        self._execute("DELETE FROM waiting")
        away = [(number, count) for number, count in counts.items() if number not in there]
        self._execute_many("INSERT INTO waiting VALUES (?, ?)", away)
        self.blocks, self.bytes, self.pinned_bytes = self._execute(_COUNTED).fetchone()


def _check(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise BrokenIndex("the index does not pass SQLite's check")


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
) -> Entry:
    return Entry(name, parent, depth, size, stored_at, used_at, hits, bool(pinned))


def parent_id(one: Frame) -> int:
    """The number of a frame's parent, 0 for the first of a chain."""
    return _above(one.header)


def _above(header: Header) -> int:
    return block_id(header.layout + header.parent) if header.depth and header.parent != header.key else 0


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
