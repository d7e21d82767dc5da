"""The rows of a disk store's index, and what one transaction may do to them.

What is going to be written is noted in `writing` first and moves to `blocks` once its file is whole; a row goes after its
file. So the sizes in both tables are never less than the bytes on disk, whoever is killed when. Nobody sees or evicts what is
in `writing` until its writer is done, or dead.

`used` is a count of transactions, not a time: clocks may jump. Children are counted as they come and go; those of a block that
is not here are counted in `waiting`, so a parent may come after its child.

Rows lie in the order in which they were written, so a chain's lie side by side, or nearly. The numbers, which are random, are
in an index of their own.
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
ROW: Final = "id, name, above, size, used, children, pinned"
THESE: Final = "id IN (SELECT value FROM json_each(?))"
COUNTED: Final = """SELECT count(*), coalesce(sum(size), 0) + (SELECT coalesce(sum(size), 0) FROM writing),
    coalesce(sum(pinned * size), 0) FROM blocks"""


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


def parent_id(one: Frame) -> int:
    """The number of a frame's parent, 0 for the first of a chain."""
    return _above(one.header)


def _above(header: Header) -> int:
    return block_id(header.layout + header.parent) if header.depth and header.parent != header.key else 0


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
        found = self._execute(f"SELECT {ROW} FROM blocks WHERE {THESE}", (json.dumps(list(numbers)),))
        return {row.id: row for row in map(Row._make, found)}

    def find_pending(self, numbers: Iterable[int]) -> dict[int, Pending]:
        """Those of these that somebody is writing."""
        if self._execute("SELECT 1 FROM writing LIMIT 1").fetchone() is None:
            return {}
        found = self._execute(f"SELECT * FROM writing WHERE {THESE}", (json.dumps(list(numbers)),))
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
        return self._execute(f"DELETE FROM writing WHERE {THESE}", (json.dumps(list(numbers)),)).rowcount

    def _claim(self, numbers: Iterable[int]) -> dict[int, int]:
        """Children that came before these blocks."""
        if self._execute("SELECT 1 FROM waiting LIMIT 1").fetchone() is None:
            return {}
        ids = json.dumps(list(numbers))
        found = self._execute(f"SELECT * FROM waiting WHERE {THESE}", (ids,)).fetchall()
        self._execute(f"DELETE FROM waiting WHERE {THESE}", (ids,))
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
            f"SELECT {ROW} FROM blocks WHERE children = 0 AND pinned = 0 AND used < ?"
            " ORDER BY used, depth DESC LIMIT 1",
            (before,),
        ).fetchone()
        return None if found is None else Row._make(found)

    def touch(self, numbers: Iterable[int], used: int) -> None:
        """These blocks are in use at the time `used`."""
        self._execute(
            f"UPDATE blocks SET used = max(used, ?) WHERE {THESE}",
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
        check(self._connection)

    def note_boot(self, host: str, boot: str) -> None:
        self._execute("INSERT OR REPLACE INTO hosts VALUES (?, ?)", (host, boot))

    def all(self) -> dict[Name, Row]:
        return {row.name: row for row in map(Row._make, self._execute(f"SELECT {ROW} FROM blocks"))}

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
        self.blocks, self.bytes, self.pinned_bytes = self._execute(COUNTED).fetchone()


def check(connection: sqlite3.Connection) -> None:
    """Raises BrokenIndex if SQLite finds anything wrong with its file."""
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise BrokenIndex("the index does not pass SQLite's check")
