"""The tables of a disk store's index, and the changes that one transaction can make.

A block about to be written gets a row in `writing`, which moves to `blocks` when its file is complete. A row is removed
after its file. The sizes in both tables are therefore never less than the bytes on disk, even if a process is killed.
Blocks in `writing` are neither visible nor evicted until their writer has finished or is dead.

`used` counts transactions and is not a time, since clocks may jump. Children are counted as they are added and removed.
The children of a block that is not in the index are counted in `waiting`, so a parent may be added after its child.

The column `above` is the id of the parent. Rows are in the order of writing, so the rows of a chain are adjacent or
nearly so. The ids, which are random, have a separate index.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Final, NamedTuple

import xxhash

from foreword.errors import StoreUnavailable
from foreword.store.base import Name
from foreword.store.frame import Frame, Header

VERSION: Final = 1
SCHEMA: Final = f"""
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
IN_LIST: Final = "id IN (SELECT value FROM json_each(?))"
RECOUNT: Final = """SELECT count(*), coalesce(sum(size), 0) + (SELECT coalesce(sum(size), 0) FROM writing),
    coalesce(sum(pinned * size), 0) FROM blocks"""
_ROW: Final = "id, name, above, size, used, children, pinned"  # the fields of BlockRow
_PENDING: Final = "id, writer, used, size, above, depth, stored_at, name, parent"  # the fields of PendingRow
_INTO_BLOCKS: Final = """
    INTO blocks (id, children, pinned, used, size, above, depth, hits, stored_at, used_at, name, parent)
    VALUES (:id, :children, 0, :used, :size, :parent_id, :depth, 0, :stored_at, :stored_at, :name, :parent)"""


class BrokenIndex(StoreUnavailable):
    """The database cannot be read or is not an index. It can be rebuilt from the blocks."""


class BlockRow(NamedTuple):
    """What decides about the eviction of a block."""

    id: int
    name: Name
    parent_id: int
    size: int
    used: int
    children: int
    pinned: int


class PendingRow(NamedTuple):
    """A block whose file is being written."""

    id: int
    writer: int
    used: int
    size: int
    parent_id: int
    depth: int
    stored_at: float
    name: Name
    parent: bytes


def block_id(name: Name) -> int:
    """The id of a block: 63 bits of a hash of its name. If two names have the same id, only one of them can be stored."""
    return xxhash.xxh3_64_intdigest(name) >> 1


def parent_id(header: Header) -> int:
    """The id of a block's parent, 0 for the first block of a chain."""
    return block_id(header.layout + header.parent) if header.depth and header.parent != header.key else 0


def pending_row(id_: int, head: Header, size: int, used: int, stored_at: float, writer: int = 0) -> PendingRow:
    """The row of a block of `size` bytes with this header."""
    return PendingRow(id_, writer, used, size, parent_id(head), head.depth, stored_at, head.name, head.parent)


class IndexTransaction:
    """One write transaction of the index.

    The caller is responsible for the files: remove a file before `remove` and `drop`; write it after the transaction
    that did `add`, and then call `finish` in another transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._execute_many = connection.executemany
        self.blocks, self.bytes, self.pinned_bytes, self.clock = self._execute("SELECT * FROM totals").fetchone()

    def save(self) -> None:
        """Write the totals. The last step before the commit."""
        self._execute(
            "UPDATE totals SET blocks = ?, bytes = ?, pinned_bytes = ?, clock = ?",
            (self.blocks, self.bytes, self.pinned_bytes, self.clock),
        )

    def tick(self) -> int:
        """Advance the clock and return the time of the next use."""
        self.clock += 1
        return int(self.clock)

    def find(self, ids: Iterable[int]) -> dict[int, BlockRow]:
        """The complete blocks with these ids."""
        found = self._execute(f"SELECT {_ROW} FROM blocks WHERE {IN_LIST}", (json.dumps(list(ids)),))
        return {row.id: row for row in map(BlockRow._make, found)}

    def find_pending(self, ids: Iterable[int]) -> dict[int, PendingRow]:
        """The blocks with these ids that a process is writing."""
        if self._execute("SELECT 1 FROM writing LIMIT 1").fetchone() is None:
            return {}
        found = self._execute(f"SELECT {_PENDING} FROM writing WHERE {IN_LIST}", (json.dumps(list(ids)),))
        return {row.id: row for row in map(PendingRow._make, found)}

    def add(self, frames: dict[int, Frame], used: int, writer: int, clock: float) -> list[PendingRow]:
        """Note the blocks that `writer` is going to write, by id. None of them is in the index."""
        rows = [pending_row(id_, one.header, len(one.data), used, clock, writer) for id_, one in frames.items()]
        self._execute_many(f"INSERT INTO writing ({_PENDING}) VALUES (?,?,?,?,?,?,?,?,?)", rows)
        self.bytes += sum(row.size for row in rows)
        return rows

    def finish(self, done: Iterable[PendingRow]) -> None:
        """Make blocks visible: their files are complete."""
        rows = {row.id: row for row in done}
        if self._remove_pending(rows) != len(rows):
            raise BrokenIndex("the index has lost blocks that are being written")
        children = self._take_waiting(rows)
        elsewhere: dict[int, tuple[int, int]] = {}  # parents outside of this batch: number of children, last use
        for row in rows.values():
            if row.parent_id in rows:
                children[row.parent_id] = children.get(row.parent_id, 0) + 1
            elif row.parent_id:
                elsewhere[row.parent_id] = elsewhere.get(row.parent_id, (0, 0))[0] + 1, row.used
        self._execute_many(
            "INSERT" + _INTO_BLOCKS,
            [{**row._asdict(), "children": children.get(id_, 0)} for id_, row in rows.items()],
        )
        for parent, (count, used) in elsewhere.items():
            self._count_children(parent, count, used)
        self.blocks += len(rows)

    def drop(self, given_up: Iterable[PendingRow]) -> None:
        """Forget blocks that will not be written. No file of them is left."""
        rows = list(given_up)
        if self._remove_pending(row.id for row in rows) != len(rows):
            raise BrokenIndex("the index has lost blocks that are being written")
        self.bytes -= sum(row.size for row in rows)

    def _remove_pending(self, ids: Iterable[int]) -> int:
        return self._execute(f"DELETE FROM writing WHERE {IN_LIST}", (json.dumps(list(ids)),)).rowcount

    def _take_waiting(self, ids: Iterable[int]) -> dict[int, int]:
        """Remove and return the counts of children that were added before these blocks."""
        if self._execute("SELECT 1 FROM waiting LIMIT 1").fetchone() is None:
            return {}
        listed = json.dumps(list(ids))
        found = self._execute(f"SELECT * FROM waiting WHERE {IN_LIST}", (listed,)).fetchall()
        self._execute(f"DELETE FROM waiting WHERE {IN_LIST}", (listed,))
        return dict(found)

    def _count_children(self, parent: int, more: int, used: int) -> None:
        """Add `more` (or fewer, if negative) children to a block, which was used when they were."""
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

    def remove(self, row: BlockRow) -> None:
        """Remove a block whose file has been removed."""
        # Read the row again: this transaction may have changed the children of the block since.
        children, used = self._execute("SELECT children, used FROM blocks WHERE id = ?", (row.id,)).fetchone()
        self._execute("DELETE FROM blocks WHERE id = ?", (row.id,))
        if children:
            self._execute("INSERT OR REPLACE INTO waiting VALUES (?, ?)", (row.id, children))
        if row.parent_id:
            self._count_children(row.parent_id, -1, used)
        self.blocks -= 1
        self.bytes -= row.size
        self.pinned_bytes -= row.size if row.pinned else 0

    def victim(self, before: int) -> BlockRow | None:
        """The least recently used leaf that is not pinned and was last used before the time `before`; the deepest of equals."""
        found = self._execute(
            f"SELECT {_ROW} FROM blocks WHERE children = 0 AND pinned = 0 AND used < ?"
            " ORDER BY used, depth DESC LIMIT 1",
            (before,),
        ).fetchone()
        return None if found is None else BlockRow._make(found)

    def touch(self, ids: Iterable[int], used: int) -> None:
        """Note a use of these blocks at the time `used`."""
        self._execute(f"UPDATE blocks SET used = max(used, ?) WHERE {IN_LIST}", (used, json.dumps(list(ids))))

    def note_uses(self, uses: Iterable[tuple[int, int, float, int]]) -> None:
        """Note uses by `get`: (time, number of uses, seconds since the epoch, block id)."""
        self._execute_many("UPDATE blocks SET used = max(used, ?), hits = hits + ?, used_at = ? WHERE id = ?", uses)

    def pin(self, row: BlockRow, pinned: bool) -> None:
        self._execute("UPDATE blocks SET pinned = ? WHERE id = ?", (int(pinned), row.id))
        self.pinned_bytes += row.size if pinned else -row.size

    # Writers

    def register(self, token: str) -> int:
        """Assign an id to a writer."""
        writer = self._execute("INSERT INTO writers (token) VALUES (?)", (token,)).lastrowid
        assert writer is not None
        return writer

    def is_registered(self, writer: int, token: str) -> bool:
        return bool(self._execute("SELECT token FROM writers WHERE id = ?", (writer,)).fetchone() == (token,))

    def writers(self) -> dict[int, str]:
        """The tokens of all writers by id."""
        return dict(self._execute("SELECT id, token FROM writers").fetchall())

    def unfinished(self, writer: int) -> list[PendingRow]:
        """The blocks that a process is writing."""
        found = self._execute(f"SELECT {_PENDING} FROM writing WHERE writer = ?", (writer,)).fetchall()
        return [PendingRow._make(row) for row in found]

    def unregister(self, writer: int) -> None:
        self._execute("DELETE FROM writers WHERE id = ?", (writer,))

    # Recovery

    def boots(self) -> dict[str, str]:
        """The boot in which each host last used the index."""
        return dict(self._execute("SELECT host, boot FROM hosts").fetchall())

    def note_boot(self, host: str, boot: str) -> None:
        self._execute("INSERT OR REPLACE INTO hosts VALUES (?, ?)", (host, boot))

    def all_rows(self) -> dict[Name, BlockRow]:
        return {row.name: row for row in map(BlockRow._make, self._execute(f"SELECT {_ROW} FROM blocks"))}

    def add_found(self, header: Header, size: int, used: int, stored_at: float) -> bool:
        """Add a row for a file that has none. False if another block has its id. `recount` must follow."""
        row = pending_row(block_id(header.name), header, size, used, stored_at)
        return bool(self._execute("INSERT OR IGNORE" + _INTO_BLOCKS, {**row._asdict(), "children": 0}).rowcount)

    def recount(self) -> None:
        """Compute the numbers of children and the totals again from the rows."""
        counts: dict[int, int] = {}
        rows = self._execute("SELECT id, above, children FROM blocks").fetchall()
        for _, parent, _ in rows:
            counts[parent] = counts.get(parent, 0) + 1
        counts.pop(0, None)
        wrong = [(counts.get(id_, 0), id_) for id_, _, children in rows if counts.get(id_, 0) != children]
        self._execute_many("UPDATE blocks SET children = ? WHERE id = ?", wrong)
        present = {id_ for id_, _, _ in rows}
        self._execute("DELETE FROM waiting")
        waiting = [(id_, count) for id_, count in counts.items() if id_ not in present]
        self._execute_many("INSERT INTO waiting VALUES (?, ?)", waiting)
        self.blocks, self.bytes, self.pinned_bytes = self._execute(RECOUNT).fetchone()


def check(connection: sqlite3.Connection) -> None:
    """Raises BrokenIndex if SQLite finds damage in the file."""
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise BrokenIndex("the index does not pass SQLite's check")
