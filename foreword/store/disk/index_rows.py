"""The tables of a disk store's index, and the changes that one transaction can make.

A block about to be written gets a row in `writing`, which moves to `blocks` when its file is complete. A row is removed
after its file. The sizes in both tables are therefore never less than the bytes on disk, even if a process is killed.
Blocks in `writing` are neither visible nor evicted until their writer has finished or is dead.

`used` counts transactions and is not a time, since clocks may jump. `tenants.used_at` is in seconds of the index's own clock:
it continues from process to process and from boot to boot, at the rate of the machines' monotonic clocks, and no wall clock
moves it (`IndexTransaction.now`).

`used` starts at the microseconds since the epoch when the index was created: blocks that are found in a folder without an index
are ordered by the times of their files.

A piece (pieces.py) that is being written has one row in `writing`: its id, the bytes of all its blocks, the depth -1, a name of
its layout and root with zeros in place of a key, and the ids of the blocks as `parent`.

A row 0 in `writing` stands for the files that a scan has listed and not yet added: for their bytes.

Children are counted as they are added and removed. The children of a block that is not in the index are counted in
`waiting`, so a parent may be added after its child.

The column `above` is the id of the parent. Rows are in the order of writing, so the rows of a chain are adjacent or
nearly so. The ids, which are random, have a separate index.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import sqlite3
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote

import xxhash

from foreword.blocks.fair_share import COMPARED, IDLE_SECONDS, TenantUse, choose
from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import NAME_BYTES, PREFIX_BYTES, tenant_of
from foreword.errors import StoreUnavailable
from foreword.store.base import Name
from foreword.store.chain_lru import FairShare
from foreword.store.disk.pieces import ALONE, BlockPlace
from foreword.store.frame import Frame, Header
from foreword.store.machine import clock_id

VERSION: Final = 5
SCHEMA: Final = f"""
CREATE TABLE blocks (
    id INTEGER NOT NULL UNIQUE, children INTEGER NOT NULL, pinned INTEGER NOT NULL, used INTEGER NOT NULL,
    size INTEGER NOT NULL, above INTEGER NOT NULL, depth INTEGER NOT NULL, hits INTEGER NOT NULL,
    stored_at REAL NOT NULL, used_at REAL NOT NULL, name BLOB NOT NULL, parent BLOB NOT NULL, tenant INTEGER NOT NULL,
    piece INTEGER NOT NULL DEFAULT 0, at INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX leaves ON blocks (tenant, used, depth DESC) WHERE children = 0 AND pinned = 0;
CREATE TABLE writing (
    id INTEGER PRIMARY KEY, writer INTEGER NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL,
    above INTEGER NOT NULL, depth INTEGER NOT NULL, stored_at REAL NOT NULL, name BLOB NOT NULL, parent BLOB NOT NULL
);
CREATE TABLE tenants (id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, used_at REAL NOT NULL);
CREATE TABLE waiting (id INTEGER PRIMARY KEY, children INTEGER NOT NULL);
CREATE TABLE writers (id INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL);
CREATE TABLE hosts (host TEXT PRIMARY KEY, boot TEXT NOT NULL);
CREATE TABLE totals (
    blocks INTEGER NOT NULL, bytes INTEGER NOT NULL, pinned_bytes INTEGER NOT NULL, clock INTEGER NOT NULL
);
INSERT INTO totals VALUES (0, 0, 0, CAST((julianday('now') - 2440587.5) * 86400e6 AS INTEGER));
PRAGMA user_version = {VERSION};
"""
# Indexes of earlier builds get this table when they are opened. Per monotonic clock (`store/machine.py`): what to add to it for
# the index's own, and when it was used last. The row without a name is where the index's clock began.
CLOCKS: Final = "CREATE TABLE clocks (clock TEXT PRIMARY KEY, ahead REAL NOT NULL, used_at REAL NOT NULL)"
# An index that takes the place of one of an earlier format has this table: what was pinned there, until its files are found.
_PINS: Final = "CREATE TABLE IF NOT EXISTS pinned_before (id INTEGER PRIMARY KEY)"
IN_LIST: Final = "id IN (SELECT value FROM json_each(?))"
RECOUNT: Final = """SELECT count(*), coalesce(sum(size), 0) + (SELECT coalesce(sum(size), 0) FROM writing),
    coalesce(sum(pinned * size), 0) FROM blocks"""
_LARGEST: Final = 1 << 62
_SAMPLES: Final = 16
_SAMPLE_ROWS: Final = 128
_KEPT: Final = 64  # boots and clocks that are remembered
_CLOCK_STEP: Final = 1.0  # seconds after which the index's clock is written again
_ROWS_AT_ONCE: Final = 64  # SQLite before 3.32 takes 999 values in a statement
_WRONG: Final = f"""typeof(id) != 'integer' OR typeof(children) != 'integer' OR children < 0 OR pinned NOT IN (0, 1)
    OR typeof(used) != 'integer' OR typeof(size) != 'integer' OR size < 0 OR typeof(above) != 'integer'
    OR typeof(depth) != 'integer' OR typeof(hits) != 'integer' OR typeof(stored_at) != 'real'
    OR typeof(used_at) != 'real' OR typeof(name) != 'blob' OR length(name) != {NAME_BYTES} OR typeof(parent) != 'blob'
    OR typeof(tenant) != 'integer' OR typeof(piece) != 'integer' OR piece < 0 OR typeof(at) != 'integer' OR at < 0"""
_WRONG_VALUES: Final = f"SELECT 1 FROM blocks WHERE {_WRONG} LIMIT 1"
_WRONG_ROW_SAMPLE: Final = f"SELECT id, name, {_WRONG} FROM blocks WHERE rowid >= ? ORDER BY rowid"
_WRONG_CHILDREN: Final = """
    WITH counted AS (SELECT above, count(*) AS children FROM blocks WHERE above != 0 GROUP BY above),
    present AS (SELECT counted.children AS found, blocks.children AS noted
        FROM counted JOIN blocks ON blocks.id = counted.above)
    SELECT 1 WHERE EXISTS (SELECT 1 FROM present WHERE found != noted)
        OR (SELECT coalesce(sum(children), 0) FROM blocks) != (SELECT coalesce(sum(found), 0) FROM present)"""
_WRONG_TENANTS: Final = """SELECT 1 WHERE (SELECT coalesce(sum(bytes), 0) FROM tenants) != (SELECT bytes FROM totals)
    OR EXISTS (SELECT 1 FROM tenants WHERE typeof(bytes) != 'integer' OR typeof(used_at) != 'real')"""
_ROW: Final = "id, name, above, size, used, children, pinned, piece, at"  # the fields of BlockRow
_LEAF: Final = "children = 0 AND pinned = 0 AND used < ?"
# Id, bytes and last use of tenants, that of their least recently used leaf, and the number of all tenants.
_TENANTS: Final = f"""SELECT id, bytes, used_at, (SELECT min(used) FROM blocks WHERE tenant = some.id AND {_LEAF}),
    (SELECT count(*) FROM tenants) FROM"""
_NAMED_TENANTS: Final = f"{_TENANTS} (SELECT * FROM tenants WHERE {IN_LIST}) AS some"
# Tenants from an id on, and the first ones behind the last: ids are hashes, so these are as good as drawn.
_DRAWN_TENANTS: Final = f"""{_TENANTS} (SELECT * FROM (SELECT * FROM tenants WHERE id >= ? ORDER BY id LIMIT ?)
    UNION ALL SELECT * FROM (SELECT * FROM tenants WHERE id < ? ORDER BY id LIMIT ?) LIMIT ?) AS some"""
_IDLE_TENANTS: Final = (
    "SELECT coalesce(sum(used_at <= ?1), 0), min(CASE WHEN used_at > ?1 THEN used_at END) FROM tenants"
)
# A leaf and the blocks above it without another child, none of which was used later, until so many bytes are found.
_CHAIN: Final = f"""WITH RECURSIVE chain AS (SELECT * FROM
    (SELECT {_ROW}, ? - size AS more FROM blocks WHERE tenant = ? AND {_LEAF} ORDER BY used, depth DESC LIMIT 1)
    UNION ALL SELECT one.id, one.name, one.above, one.size, chain.used, one.children, 0, one.piece, one.at, more - one.size
    FROM chain JOIN blocks AS one ON one.id = chain.above
    WHERE more > 0 AND one.children = 1 AND one.pinned = 0 AND one.used <= chain.used
) SELECT * FROM chain LIMIT ?"""
_MOST_OF_CHAIN: Final = 1024
_PENDING: Final = "id, writer, used, size, above, depth, stored_at, name, parent"  # of PendingRow, but its place
_PENDING_FIELDS: Final = 9
_OF_PIECE: Final = -1  # the depth of the row of a piece
# PendingRow's fields without the writer, and what else a complete block has.
_INSERTED: Final = (
    "blocks (id, used, size, above, depth, stored_at, name, parent, piece, at, used_at, children, tenant, pinned, hits)"
)


class BrokenIndex(StoreUnavailable):
    """The database cannot be read or is not an index. It can be rebuilt from the blocks."""


class OldIndex(BrokenIndex):
    """The database is an index of an earlier format."""


class BlockRow(NamedTuple):
    """Facts that decide about the eviction of a block."""

    id: int
    name: Name
    parent_id: int
    size: int
    used: int
    children: int
    pinned: int
    piece: int
    at: int

    @property
    def place(self) -> BlockPlace:
        return BlockPlace(self.piece, self.at)


class PendingRow(NamedTuple):
    """A block whose file is being written, or a piece. `piece` and `at`: where the block will lie."""

    id: int
    writer: int
    used: int
    size: int
    parent_id: int
    depth: int
    stored_at: float
    name: Name
    parent: bytes
    piece: int = 0
    at: int = 0

    @property
    def place(self) -> BlockPlace:
        return BlockPlace(self.piece, self.at)

    def is_at(self, place: BlockPlace) -> bool:
        """Whether this, as the table has it, is what is being written there."""
        return self.id == place.piece if self.is_piece else not place.piece

    @property
    def is_piece(self) -> bool:
        """Whether this is the row of a piece."""
        return self.depth == _OF_PIECE


_UNLISTED: Final = PendingRow(0, 0, 0, 0, 0, 0, 0.0, bytes(NAME_BYTES), b"")


def block_id(name: Name) -> int:
    """The id of a block: 63 bits of a hash of its name. If two names have the same id, only one of them can be stored."""
    return xxhash.xxh3_64_intdigest(name) >> 1


def tenant_id(name: Name) -> int:
    """The id of the tenant of a block."""
    return xxhash.xxh3_64_intdigest(tenant_of(name)) >> 1


def parent_id(header: Header) -> int:
    """The id of a block's parent, 0 for the first block of a chain."""
    return block_id(header.parent_name) if header.depth and header.parent != header.key else 0


def parent_ids(frames: Mapping[int, Frame]) -> dict[int, int]:
    """The ids of the parents of blocks, by the ids of the blocks."""
    parents, last = dict[int, int](), 0
    before: Header | None = None
    for id_, head in ((id_, one.header) for id_, one in frames.items()):
        # In a chain it is the block before: no name is made and hashed for it.
        if before is not None and (head.parent, head.root, head.layout) == (before.key, before.root, before.layout):
            parents[id_] = last if head.depth else 0
        else:
            parents[id_] = parent_id(head)
        last, before = id_, head
    return parents


def pending_row(
    id_: int, head: Header, size: int, used: int, stored_at: float, place: BlockPlace = ALONE
) -> PendingRow:
    """The row of a block of `size` bytes with this header, which is complete."""
    return PendingRow(id_, 0, used, size, parent_id(head), head.depth, stored_at, head.name, head.parent, *place)


class IndexTransaction:
    """A write transaction of the index.

    The caller is responsible for the files: remove a file before `remove` and `drop`; write it after the transaction
    that did `add`, and then call `finish` in another transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._execute_many = connection.executemany
        self.blocks, self.bytes, self.pinned_bytes, self.clock = read_totals(connection)
        # Ids of the blocks that this transaction makes visible, and of those that it removes.
        self.added, self.removed = list[int](), list[int]()
        self._more: dict[int, int] = {}  # bytes that this transaction adds to tenants
        self._uses: dict[int, float] = {}  # last uses by tenants
        self._now: float | None = None

    def now(self) -> float:
        """The time of this transaction on the index's own clock.

        No process has seen a later one: a clock that is behind, as that of a machine which was away, is set to what others have
        noted.
        """
        if self._now is None:
            found = self._execute("SELECT clock, ahead, used_at FROM clocks").fetchall()
            latest = max((used_at for _, _, used_at in found), default=0.0)
            here = time.monotonic()
            ahead = next((ahead for clock, ahead, _ in found if clock == clock_id()), None)
            self._now = now = latest if ahead is None else max(here + ahead, latest)
            if ahead is None:
                self._keep_newest("clocks", (clock_id(), now - here, now))
            elif now - latest > _CLOCK_STEP or now > here + ahead:
                self._execute("UPDATE clocks SET ahead = ?, used_at = ? WHERE clock = ?", (now - here, now, clock_id()))
        return self._now

    def _keep_newest(self, table: str, row: Sequence[object]) -> None:
        """Write a row, and forget those that were written long ago."""
        self._execute(f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * len(row))})", row)
        newest = f"SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT {_KEPT}"
        self._execute(f"DELETE FROM {table} WHERE rowid NOT IN ({newest})")

    def save(self) -> None:
        """Write the totals. The last step before the commit."""
        self._execute(
            "UPDATE totals SET blocks = ?, bytes = ?, pinned_bytes = ?, clock = ?",
            (self.blocks, self.bytes, self.pinned_bytes, self.clock),
        )
        self._save_tenants()

    def _save_tenants(self) -> None:
        if tenants := self._more.keys() | self._uses.keys():
            self._execute_many(
                "INSERT INTO tenants VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE"
                " SET bytes = bytes + excluded.bytes, used_at = max(used_at, excluded.used_at)",
                [(one, self._more.get(one, 0), self._uses.get(one, 0.0)) for one in tenants],
            )
            self._execute_many("DELETE FROM tenants WHERE id = ? AND bytes <= 0", [(one,) for one in tenants])
            self._more, self._uses = {}, {}

    def last_row(self) -> int:
        """The largest row id of a block."""
        return int(self._execute("SELECT coalesce(max(rowid), 0) FROM blocks").fetchone()[0])

    def tick(self) -> int:
        """Advance the clock and return the time of the next use."""
        self.clock += 1
        return int(self.clock)

    def find(self, ids: Iterable[int]) -> dict[int, BlockRow]:
        """The complete blocks with these ids."""
        found = self._execute(f"SELECT {_ROW} FROM blocks WHERE {IN_LIST}", (_listed(ids),))
        return {row.id: row for row in map(BlockRow._make, found)}

    def find_pending(self, ids: Iterable[int]) -> dict[int, PendingRow]:
        """The blocks with these ids that a process is writing."""
        if self._execute("SELECT 1 FROM writing LIMIT 1").fetchone() is None:
            return {}
        wanted = list(ids)
        found = self._execute(f"SELECT {_PENDING} FROM writing WHERE {IN_LIST}", (_listed(wanted),)).fetchall()
        rows = {row.id: row for row in (PendingRow(*fields) for fields in found)}
        of_pieces = self._execute(f"SELECT {_PENDING} FROM writing WHERE depth = {_OF_PIECE}").fetchall()
        for piece in (PendingRow(*fields) for fields in of_pieces):
            rows |= dict.fromkeys(set(wanted).intersection(_unpacked(piece.parent)), piece)
        return rows

    def add(
        self,
        frames: Mapping[int, Frame],
        names: Mapping[int, Name],
        parents: Mapping[int, int],
        used: int,
        writer: int,
        clock: float,
        places: Mapping[int, BlockPlace],
    ) -> list[PendingRow]:
        """Note the blocks that `writer` is going to write, by id, their names, the ids of their parents, and where those will
        lie that have no file of their own. None of them is in the index, and their bytes were counted (`reserve`)."""
        rows = []
        for id_, one in frames.items():
            head, place = one.header, places.get(id_, ALONE)
            known = id_, writer, used, len(one.data), parents[id_], head.depth, clock, names[id_], head.parent
            rows.append(PendingRow._make(known + place))
        noted = list[Sequence[object]]()
        for piece, members in itertools.groupby(rows, key=lambda row: row.piece):
            some = list(members)
            if not piece:
                noted += [row[:_PENDING_FIELDS] for row in some]
            else:
                size, prefix = sum([row.size for row in some]), some[0].name[:PREFIX_BYTES]
                ids = struct.pack(f"<{len(some)}q", *[row.id for row in some])
                noted.append((piece, writer, used, size, 0, _OF_PIECE, clock, prefix + bytes(KEY_BYTES), ids))
        self._insert_rows(f"writing ({_PENDING})", noted)
        return rows

    def reserve(self, name: Name, size: int) -> int:
        """Count bytes that will be written with the layout and root of a block, or fewer if negative. Returns their tenant."""
        self.note_tenant(tenant := self._add_bytes(name, size), self.now())
        return tenant

    def _add_bytes(self, name: Name, size: int) -> int:
        """Count bytes of a block, or of one less if negative. Returns its tenant."""
        tenant = tenant_id(name)
        self.bytes += size
        self._more[tenant] = self._more.get(tenant, 0) + size
        return tenant

    def note_tenant(self, tenant: int, used_at: float) -> None:
        """Note that a tenant used the store, at a time of the index's clock."""
        self._uses[tenant] = max(self._uses.get(tenant, 0.0), used_at)

    def finish(self, done: Iterable[PendingRow]) -> None:
        """Make blocks visible: their files are complete."""
        rows = {row.id: row for row in done}
        self._end_writing(rows.values())
        self._insert(rows)

    def finish_piece(self, piece: PendingRow, blocks: Iterable[PendingRow]) -> None:
        """Make the blocks of a piece visible that are there; the piece's row says what was to be there."""
        rows = {row.id: row for row in blocks}
        self._end_writing([piece])
        self._insert(rows)
        self._add_bytes(piece.name, sum(row.size for row in rows.values()) - piece.size)

    def _end_writing(self, rows: Iterable[PendingRow]) -> None:
        ids = {row.piece or row.id for row in rows}
        if self._remove_pending(ids) != len(ids):
            raise BrokenIndex("the index has lost blocks that are being written")

    def add_found(self, found: Iterable[PendingRow]) -> None:
        """Add blocks whose files were found in the folder. None of them is in the index."""
        rows = {row.id: row for row in found}
        self._insert(rows)
        for row in rows.values():
            self._add_bytes(row.name, row.size)
            self.note_tenant(tenant_id(row.name), min(row.stored_at, self.now()))
        pinned = self.take_pins(rows) if rows else []
        for id_ in pinned:
            self._execute("UPDATE blocks SET pinned = 1 WHERE id = ?", (id_,))
            self.pinned_bytes += rows[id_].size

    def keep_pins(self, ids: Iterable[int]) -> None:
        """Note blocks that the index before this one had pinned: they are pinned when their files are found."""
        self._execute(_PINS)
        self._execute("INSERT OR IGNORE INTO pinned_before SELECT value FROM json_each(?)", (_listed(ids),))

    def take_pins(self, ids: Iterable[int] | None = None) -> list[int]:
        """The blocks that `keep_pins` noted, all of them or those among `ids`: they are noted no longer."""
        if self._execute("SELECT 1 FROM sqlite_master WHERE name = 'pinned_before'").fetchone() is None:
            return []
        if ids is None:
            found = self._execute("SELECT id FROM pinned_before").fetchall()
            self._execute("DROP TABLE pinned_before")
            return [id_ for (id_,) in found]
        listed = _listed(ids)
        found = self._execute(f"SELECT id FROM pinned_before WHERE {IN_LIST}", (listed,)).fetchall()
        self._execute(f"DELETE FROM pinned_before WHERE {IN_LIST}", (listed,))
        return [id_ for (id_,) in found]

    def unlisted(self) -> int:
        """The bytes of files that a scan has listed and not added yet, 0 if none are known."""
        row = self._execute("SELECT size FROM writing WHERE id = 0").fetchone()
        return row[0] if row else 0

    def set_unlisted(self, size: int | None) -> None:
        """Count the bytes of such files against the budget. None: the scan has ended."""
        self._add_bytes(_UNLISTED.name, (size or 0) - self.unlisted())
        self._execute("DELETE FROM writing WHERE id = 0")
        if size is not None:
            row = _UNLISTED._replace(size=size)[:_PENDING_FIELDS]
            self._execute(f"INSERT INTO writing ({_PENDING}) VALUES (?,?,?,?,?,?,?,?,?)", row)

    def _insert(self, rows: dict[int, PendingRow]) -> None:
        children = self._take_waiting(rows)
        elsewhere: dict[int, tuple[int, int]] = {}  # parents outside of this batch: number of children, last use
        for row in rows.values():
            if row.parent_id in rows:
                children[row.parent_id] = children.get(row.parent_id, 0) + 1
            elif row.parent_id:
                elsewhere[row.parent_id] = elsewhere.get(row.parent_id, (0, 0))[0] + 1, row.used
        tenants = {prefix: tenant_id(prefix) for prefix in {row.name[:PREFIX_BYTES] for row in rows.values()}}
        self._insert_rows(
            _INSERTED,
            [
                (row.id, *row[2:], row.stored_at, children.get(row.id, 0), tenants[row.name[:PREFIX_BYTES]], 0, 0)
                for row in rows.values()
            ],
        )
        for parent, (count, used) in elsewhere.items():
            self._count_children(parent, count, used)
        self.blocks += len(rows)
        self.added += rows

    def _insert_rows(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Insert rows with a few statements: each step of SQLite's gives the interpreter lock away."""
        # OR FAIL, since an error ends the transaction anyway: to undo a statement alone, SQLite copies each page before it
        # changes it, which costs more than the insertion.
        for low in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[low : low + _ROWS_AT_ONCE]
            values = ",".join([f"({','.join('?' * len(some[0]))})"] * len(some))
            self._execute(f"INSERT OR FAIL INTO {table} VALUES {values}", [*itertools.chain.from_iterable(some)])

    def drop(self, given_up: Iterable[PendingRow]) -> None:
        """Forget blocks that will not be written. No file of them is left."""
        rows = list(given_up)
        self._end_writing(rows)
        for row in rows:
            self._add_bytes(row.name, -row.size)

    def _remove_pending(self, ids: Iterable[int]) -> int:
        return self._execute(f"DELETE FROM writing WHERE {IN_LIST}", (_listed(ids),)).rowcount

    def _take_waiting(self, ids: Iterable[int]) -> dict[int, int]:
        """Remove and return the counts of children that were added before these blocks."""
        if self._execute("SELECT 1 FROM waiting LIMIT 1").fetchone() is None:
            return {}
        listed = _listed(ids)
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

    def remove(self, rows: Sequence[BlockRow]) -> None:
        """Remove blocks whose files have been removed, given as they are in the index now."""
        if not rows:
            return
        removed, lost, sizes = [row.id for row in rows], dict[int, tuple[int, int]](), dict[bytes, int]()
        if self._execute(f"DELETE FROM blocks WHERE {IN_LIST}", (_listed(removed),)).rowcount != len(rows):
            raise BrokenIndex("the index has lost blocks that are removed")
        for row in rows:
            fewer, used = lost.pop(row.id, (0, 0))  # children that are removed too, and the last use of one
            if row.children > fewer:
                self._execute("INSERT OR REPLACE INTO waiting VALUES (?, ?)", (row.id, row.children - fewer))
            if row.parent_id:
                count, latest = lost.get(row.parent_id, (0, 0))
                lost[row.parent_id] = count + 1, max(latest, row.used, used)
            sizes[row.name[:PREFIX_BYTES]] = sizes.get(row.name[:PREFIX_BYTES], 0) - row.size
            self.pinned_bytes -= row.size if row.pinned else 0
        for parent, (count, used) in lost.items():
            self._count_children(parent, -count, used)
        for prefix, size in sizes.items():
            self._add_bytes(prefix, size)
        self.removed += removed
        self.blocks -= len(rows)

    def victims(
        self, before: int, need: int, fair: FairShare, only: Sequence[int] = (), quota: int = 0
    ) -> list[BlockRow]:
        """The blocks to evict next, at most until `need` bytes are found, each before its parent: a leaf that is not pinned and
        was last used before the time `before`, and those above it that are leaves then, and were used no later.

        The leaf is the least recently used one, the deepest of equals, of the tenant that `fair_share` chooses, and there are
        not more than until another one may have to give some. `only`: the tenants to evict from, down to `quota`; (): any.
        """
        self._save_tenants()
        start, now = random.getrandbits(63), self.now()
        drawn = [(_DRAWN_TENANTS, (start, most, start, most, most)) for most in (COMPARED, -1)]
        for sql, values in [(_NAMED_TENANTS, (_listed(only),))] if only else drawn:
            found = sorted(self._execute(sql, (before, *values)))  # by id, so that equals are chosen alike
            if leaves := {tenant: used for tenant, _, _, used, _ in found if used is not None}:
                break
        else:
            return []
        usage = {tenant: TenantUse(size, used_at) for tenant, size, used_at, _, _ in found}
        keep = quota if only else fair.among(found[0][-1], now, self._idle_since)
        tenant = choose(leaves, usage, keep, now)
        if only or (len(leaves) > 1 and now - usage[tenant].used_at < IDLE_SECONDS):
            need = min(need, int(usage[tenant].amount - keep))
        rows = [BlockRow._make(row[:-1]) for row in self._execute(_CHAIN, (need, tenant, before, _MOST_OF_CHAIN))]
        if any(len(row.name) != NAME_BYTES for row in rows):
            raise BrokenIndex("a row of the index has no valid name")
        return rows

    def _idle_since(self, used_at: float) -> tuple[int, float]:
        """Count tenants for `FairShare.among`."""
        count, active = self._execute(_IDLE_TENANTS, (used_at,)).fetchone()
        return int(count), math.inf if active is None else float(active)

    def larger(self, tenants: Iterable[int], quota: int) -> list[int]:
        """The tenants among these that have more bytes than `quota`."""
        self._save_tenants()
        found = self._execute(f"SELECT id FROM tenants WHERE {IN_LIST} AND bytes > ?", (_listed(tenants), quota))
        return [one for (one,) in found]

    def check_totals(self) -> None:
        """Raises BrokenIndex if the totals do not agree with the rows."""
        if self._execute(RECOUNT).fetchone() != (self.blocks, self.bytes, self.pinned_bytes):
            raise BrokenIndex("the totals of the index are wrong")

    def check_leaves(self) -> None:
        """Raises BrokenIndex if there are blocks, but none without a child: then the numbers of children are wrong."""
        if self.blocks and not self.pinned_bytes and not self.victims(_LARGEST, 1, FairShare(1)):
            raise BrokenIndex("no block of the index is the last of its chain")

    def touch(self, ids: Iterable[int], used: int) -> None:
        """Note a use of these blocks at the time `used`."""
        self._execute(f"UPDATE OR FAIL blocks SET used = max(used, ?) WHERE {IN_LIST}", (used, _listed(ids)))

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
        return [PendingRow(*row) for row in found]

    def unregister(self, writer: int) -> None:
        self._execute("DELETE FROM writers WHERE id = ?", (writer,))

    # Recovery

    def boots(self) -> set[str]:
        """The boots in which the index was used since it was made and compared with the files, the last few of them."""
        return {boot for (boot,) in self._execute("SELECT boot FROM hosts")}

    def note_boot(self, boot: str) -> None:
        self._keep_newest("hosts", (boot, boot))  # earlier builds had a row per name of a host


def _listed(ids: Iterable[int]) -> str:
    """A list of ids for `IN_LIST`."""
    return f"[{','.join(map(str, ids))}]"


def _unpacked(ids: bytes) -> tuple[int, ...]:
    """The ids of the blocks of a piece that is being written."""
    return struct.unpack(f"<{len(ids) // 8}q", ids[: len(ids) // 8 * 8])


def read_pins(file: str, seconds: float) -> list[int]:
    """Ids of the pinned blocks of a sound index of an earlier format, none if it cannot be read."""
    address = f"file:{quote(os.fsencode(file))}?mode=rw"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(address, timeout=seconds, isolation_level=None, uri=True)) as connection,
    ):
        if connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
            found = connection.execute("SELECT name FROM blocks WHERE pinned = 1").fetchall()
            return [block_id(name) for (name,) in found if isinstance(name, bytes) and len(name) == NAME_BYTES]
    return []


def read_totals(connection: sqlite3.Connection) -> tuple[int, int, int, int]:
    """Blocks, their bytes, the bytes of pinned blocks, and the clock. Raises BrokenIndex."""
    row = connection.execute("SELECT blocks, bytes, pinned_bytes, clock FROM totals").fetchone()
    if row is None or not all(isinstance(number, int) and 0 <= number < _LARGEST for number in row):
        raise BrokenIndex("the index has no valid totals")
    return row[0], row[1], row[2], row[3]


def check(connection: sqlite3.Connection) -> None:
    """Check the whole index, in one read transaction. Raises BrokenIndex."""
    connection.execute("BEGIN")
    try:
        if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise BrokenIndex("the index does not pass SQLite's check")
        if connection.execute(RECOUNT).fetchone() != read_totals(connection)[:3]:
            raise BrokenIndex("the totals of the index are wrong")
        for query in (_WRONG_VALUES, _WRONG_CHILDREN, _WRONG_TENANTS):
            if connection.execute(query).fetchone() is not None:
                raise BrokenIndex("rows of the index have wrong values")
    finally:
        connection.execute("ROLLBACK")


def check_sample(connection: sqlite3.Connection) -> None:
    """Check a small part of the index. Raises BrokenIndex."""
    read_totals(connection)
    [last] = connection.execute("SELECT coalesce(max(rowid), 0) FROM blocks").fetchone()
    for start in {last * part // _SAMPLES for part in range(_SAMPLES)}:
        rows = connection.execute(f"{_WRONG_ROW_SAMPLE} LIMIT {_SAMPLE_ROWS}", (start,)).fetchall()
        if any(wrong or id_ != block_id(name) for id_, name, wrong in rows):
            raise BrokenIndex("rows of the index have wrong values")
        ids = _listed(id_ for id_, _, _ in rows)
        if connection.execute(f"SELECT count(*) FROM blocks WHERE {IN_LIST}", (ids,)).fetchone() != (len(rows),):
            raise BrokenIndex("the index lacks ids of its rows")
