"""A Foreword store in one SQLite file: `sqlite:///var/cache/kv.db?size=20GiB`.

    block: one row per block; `parent` is the name of the block before it, `used` a counter of puts and gets
    record: one row per record
    total: the bytes of all blocks, and of the pinned ones, kept by triggers

A put and the evictions that make room for it are one transaction. Processes on one host may share the file; SQLite's
write-ahead log does not work over a network.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from foreword.blocks.layout import PREFIX_BYTES, Layout
from foreword.config import check_folder, parse_bytes
from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.base import (
    BAD,
    MISSING,
    Name,
    Store,
    StoredBlock,
    StoreStatus,
    check_record,
    check_record_key,
    has_prefix,
    time_left,
)
from foreword.store.frame import Frame
from foreword.store.types import Reach, StoreType, StoreUrl, read_options

_SCHEMA = """
CREATE TABLE IF NOT EXISTS block (
    name BLOB UNIQUE NOT NULL, parent BLOB NOT NULL, depth INTEGER NOT NULL, size INTEGER NOT NULL,
    stored REAL NOT NULL, used INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS block_parent ON block (parent);
CREATE INDEX IF NOT EXISTS block_used ON block (used, depth DESC);
CREATE TABLE IF NOT EXISTS record (key TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL, pinned INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON block BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON block BEGIN
    UPDATE total SET bytes = bytes - old.size, pinned = pinned - old.pinned * old.size;
END;
CREATE TRIGGER IF NOT EXISTS repinned AFTER UPDATE OF pinned ON block BEGIN
    UPDATE total SET pinned = pinned + (new.pinned - old.pinned) * new.size;
END;
"""
# The least recently used block that no other block continues, except those of the running put.
_VICTIM = """
SELECT rowid, name FROM block WHERE NOT pinned AND used < ?
AND NOT EXISTS (SELECT 1 FROM block AS child WHERE child.parent = block.name) ORDER BY used, depth DESC LIMIT 1
"""
_OPEN_SECONDS = 10.0
_STATUS_SECONDS = 0.25
_STEPS = 10_000  # of SQLite's machine between two looks at the deadline
_ROWS = 1024


class SqliteStore(Store):
    """Blocks and records in an SQLite file.

    Args:
        size: bytes of the frames of all blocks.
        pin_share: share of `size` that may be pinned.

    Raises StoreConfigError for an impossible size, StoreError for a file that cannot be opened.
    """

    local = True

    def __init__(self, path: str, size: int, *, pin_share: float = 0.5, label: str = "sqlite") -> None:
        check_options(size, pin_share=pin_share)
        self.label = label
        self._size, self._pin_budget = size, int(size * pin_share)
        self._evictions = 0
        self._status = StoreStatus()
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        with self._errors(time.monotonic() + _OPEN_SECONDS):
            self._db = sqlite3.connect(path, _OPEN_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a block that a power cut takes is a miss
            self._db.executescript(_SCHEMA)

    # Blocks

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        found = 0
        with self._call(deadline) as db:
            for found, name in enumerate(names):
                if found and time.monotonic() > deadline:
                    return found
                if db.execute("SELECT 1 FROM block WHERE name = ?", (name,)).fetchone() is None:
                    return found
        return len(names)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = []
        with self._call(deadline, write=True) as db:
            used = _next_use(db)
            for name, buffer in zip(names, buffers, strict=True):
                row = db.execute("SELECT rowid, data FROM block WHERE name = ?", (name,)).fetchone()
                length = MISSING if row is None else len(row[1])
                if row is not None and not 0 < length <= buffer.nbytes:
                    length = BAD
                if length > 0:
                    buffer.cast("B")[:length] = row[1]
                    db.execute("UPDATE block SET used = ? WHERE rowid = ?", (used, row[0]))
                lengths.append(length)
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        kept = 0
        evicted: list[Name] = []
        with self._call(deadline, write=True) as db:
            used, now = _next_use(db), time.time()
            for one in frames:
                header, size = one.header, len(one.data)
                row = (one.name, header.parent_name, header.depth, size, now, used, one.data)
                known = db.execute("UPDATE block SET used = ? WHERE name = ?", (used, one.name)).rowcount
                if not known:
                    if size > self._size:
                        break  # what follows it in the chain could not be found
                    db.execute("INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, 0, ?)", row)
                    if not self._make_room(db, used, evicted):
                        db.execute("DELETE FROM block WHERE name = ?", (one.name,))
                        break
                kept += 1
        self._evictions += len(evicted)
        if self.on_evicted is not None:
            for name in evicted:
                self.on_evicted(name)
        if frames and not kept:
            raise StoreFull(f"{self.label}: there is no room, and no block that could be evicted")
        return kept

    def _make_room(self, db: sqlite3.Connection, used: int, evicted: list[Name]) -> bool:
        """Evict until the blocks fit into the budget. False if no further block can be evicted."""
        while db.execute("SELECT bytes FROM total").fetchone()[0] > self._size:
            victim = db.execute(_VICTIM, (used,)).fetchone()
            if victim is None:
                return False
            db.execute("DELETE FROM block WHERE rowid = ?", victim[:1])
            evicted.append(victim[1])
        return True

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        with self._call(deadline, write=True) as db:
            return sum(db.execute("DELETE FROM block WHERE name = ?", (name,)).rowcount for name in names)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        count = 0
        with self._call(deadline, write=True) as db:
            for name in names:
                row = db.execute("SELECT size, pinned FROM block WHERE name = ?", (name,)).fetchone()
                [total] = db.execute("SELECT pinned FROM total").fetchone()
                if row is None or (pinned and not row[1] and total + row[0] > self._pin_budget):
                    continue
                db.execute("UPDATE block SET pinned = ? WHERE name = ?", (pinned, name))
                count += 1
        return count

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        with self._call(deadline):
            pass  # a closed store says so before the first block is asked for
        return self._scan(deadline)

    def _scan(self, deadline: float) -> Iterator[StoredBlock]:
        query = (
            "SELECT rowid, name, parent, depth, size, stored, pinned FROM block WHERE rowid > ? ORDER BY rowid LIMIT ?"
        )
        last = 0
        while True:
            with self._call(deadline) as db:
                rows = db.execute(query, (last, _ROWS)).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            for _, name, parent, depth, size, stored, pinned in rows:
                yield StoredBlock(name, parent[PREFIX_BYTES:], depth, size, stored, pinned=bool(pinned))

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        last = 0
        while True:
            with self._call(deadline) as db:
                rows = db.execute(
                    "SELECT rowid, name FROM block WHERE rowid > ? ORDER BY rowid LIMIT ?", (last, _ROWS)
                ).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            if names := [name for _, name in rows if has_prefix(name, layout, root)]:
                yield names

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        row = (check_record_key(key), bytes(check_record(data)))
        with self._call(deadline, write=True) as db:
            db.execute("INSERT OR REPLACE INTO record VALUES (?, ?)", row)

    def add_record(self, key: str, data: bytes, *, deadline: float) -> bytes:
        row = (check_record_key(key), bytes(check_record(data)))
        with self._call(deadline, write=True) as db:
            db.execute("INSERT OR IGNORE INTO record VALUES (?, ?)", row)
            [there] = db.execute("SELECT data FROM record WHERE key = ?", (key,)).fetchone()
        return bytes(there)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        with self._call(deadline) as db:
            row = db.execute("SELECT data FROM record WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def delete_record(self, key: str, *, deadline: float) -> bool:
        with self._call(deadline, write=True) as db:
            return db.execute("DELETE FROM record WHERE key = ?", (key,)).rowcount > 0

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        with self._call(deadline) as db:
            keys = db.execute("SELECT key FROM record WHERE substr(key, 1, ?) = ?", (len(prefix), prefix)).fetchall()
        return sorted(key for (key,) in keys)

    # Status and end

    def status(self) -> StoreStatus:
        """The last known status if the file is busy or closed."""
        with contextlib.suppress(StoreError), self._call(time.monotonic() + _STATUS_SECONDS) as db:
            [blocks] = db.execute("SELECT count(*) FROM block").fetchone()
            size, pinned = db.execute("SELECT bytes, pinned FROM total").fetchone()
            self._status = StoreStatus(blocks, size, self._size, pinned, self._evictions, pin_budget=self._pin_budget)
        return self._status

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    # Every call

    @contextlib.contextmanager
    def _call(self, deadline: float, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread until the deadline; with `write` in a transaction."""
        if not self._lock.acquire(timeout=time_left(deadline)):
            raise StoreTimeout(f"{self.label}: another call took all the time")
        try:
            db = self._db
            if db is None:
                raise StoreUnavailable(f"the store {self.label!r} is closed")
            with self._errors(deadline):
                db.execute(f"PRAGMA busy_timeout = {int(time_left(deadline) * 1000) + 1}")
                db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
                if write:
                    db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    if write:
                        db.execute("COMMIT")
                except BaseException:
                    db.set_progress_handler(None, 0)
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _errors(self, deadline: float) -> Iterator[None]:
        """Errors of SQLite as errors of stores."""
        try:
            yield
        except sqlite3.Error as error:
            if time.monotonic() > deadline:
                raise StoreTimeout(f"{self.label}: the deadline passed") from None
            full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            raise (StoreFull if full else StoreUnavailable)(f"{self.label}: {error}") from None


def _next_use(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(used), 0) + 1 FROM block").fetchone()[0])


def check_options(size: int, *, pin_share: float = 0.5) -> None:
    """Raises StoreConfigError."""
    if size < 1 or not 0 <= pin_share <= 1:
        raise StoreConfigError(f"no SQLite store of {size} bytes with a pin share of {pin_share}")


class SqliteType(StoreType):
    """`sqlite:///folder/file.db`, with the options `size` and `pin_share`."""

    label = "sqlite"
    reach = Reach.HOST
    pins = True
    options = {"size": parse_bytes, "pin_share": float}  # noqa: RUF012 - an attribute of the base class

    def check(self, url: StoreUrl) -> None:
        check_options(**self._settings(url))
        check_folder(os.path.dirname(url.path))

    def exists(self, url: StoreUrl) -> bool:
        return os.path.isfile(url.path)

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        settings = self._settings(url)
        os.makedirs(os.path.dirname(url.path), exist_ok=True)
        return SqliteStore(url.path, label=url.label, **settings)

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        return replace(url, url=f"{url.url}.{name}", path=f"{url.path}.{name}")

    def remove_part(self, part: StoreUrl) -> None:
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(part.path + end)

    def _settings(self, url: StoreUrl) -> dict[str, Any]:
        if not url.path.strip("/") or url.path.endswith("/"):
            raise StoreConfigError(
                f"{url.shown}: a file is missing; write for example sqlite:///var/cache/kv.db?size=20GiB"
            )
        return {"size": 64 << 30, **read_options(url, self.options)}


SQLITE = SqliteType()
