"""Writes to a disk store: which blocks of a batch are written and which are evicted for them, transactions of the index, files,
and room for both on a full disk.

Every transaction of the index begins by applying the updates that this process has not yet written to it: uses of blocks and
finished writes. If it fails, finished writes are kept for the next transaction. Uses may be lost: they only affect the order
of eviction."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from foreword.blocks.layout import PREFIX_BYTES
from foreword.errors import StoreError, StoreFull
from foreword.store.background import at_once, divide
from foreword.store.base import Name, time_left
from foreword.store.chain_lru import FairShare
from foreword.store.disk.files import BlockFiles, DiskFull, is_name
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import (
    BlockRow,
    BrokenIndex,
    IndexTransaction,
    PendingRow,
    block_id,
    parent_ids,
    tenant_id,
)
from foreword.store.disk.locks import LivenessLock
from foreword.store.disk.pieces import ALONE, MOST_WRITTEN, BlockPlace, layout_of
from foreword.store.disk.recovery import recover_dead_writers
from foreword.store.frame import Frame

_GROUP_FRAMES: Final = MOST_WRITTEN  # limits of one transaction: other processes wait while it removes files
_GROUP_BYTES: Final = 64 << 20
_UNUSUAL: Final = 8  # more than this part of the budget over it: the index's totals may be wrong
_FEW: Final = 4  # a file system may have no room for further files rather than bytes
_STUCK: Final = 16  # at most this number of files that cannot be removed are skipped in a search


@dataclass(slots=True)
class AdmittedBlocks:
    """The result of admitting a group of frames.

    Attributes:
        frames: frames to write, by block id, and their rows in the index.
        names, parents: names of these and perhaps more, and the ids of their parents.
        present: number of frames that were present.
        full: whether there was no room for a frame.
    """

    frames: dict[int, Frame] = field(default_factory=dict)
    names: dict[int, Name] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    rows: list[PendingRow] = field(default_factory=list)
    present: int = 0
    full: bool = False


def in_groups(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """Divide a batch into groups that are small enough for one transaction."""
    if frames and len(frames) <= _GROUP_FRAMES and sum([len(one.data) for one in frames]) <= _GROUP_BYTES:
        yield [*frames]
        return
    group: list[Frame] = []
    size = 0
    for one in frames:
        if group and (len(group) == _GROUP_FRAMES or size + len(one.data) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one.data)
    if group:
        yield group


class BlockBudget:
    """Keeps the blocks of a disk store within `size` bytes by evicting the least recently used leaves.

    Args:
        size: bytes of blocks.
        notes: counters `missing` and `recovered` to increment.
        quota: bytes of blocks of one tenant.

    Attributes:
        evictions: number of blocks that this process has evicted.
        on_evicted: if set, called with the name of each of them.
    """

    def __init__(self, files: BlockFiles, size: int, notes: Counter[str], quota: int) -> None:
        self.size = size
        self._quota = quota
        self._fair = FairShare(size)
        self.evictions = 0
        self.on_evicted: Callable[[Name], None] | None = None
        self._files = files
        self._notes = notes

    def admit(self, transaction: IndexTransaction, frames: Sequence[Frame], now: int, writer: int) -> AdmittedBlocks:
        """Choose the frames to write, in order while there is room, and evict blocks for them.

        Blocks used at the time `now` or later are not evicted.
        """
        admitted = AdmittedBlocks()
        admitted.frames = new = self._new_frames(transaction, frames, admitted, now, writer)
        if new and transaction.bytes - self.size > self.size // _UNUSUAL:
            transaction.check_totals()
        sizes: dict[bytes, int] = {}
        for id_, one in new.items():
            prefix = admitted.names[id_][:PREFIX_BYTES]
            sizes[prefix] = sizes.get(prefix, 0) + len(one.data)
        tenants = {transaction.reserve(prefix, size) for prefix, size in sizes.items()}
        self._make_room(transaction, admitted, tenants, now, writer)
        return admitted

    def note_evicted(self, names: Sequence[Name]) -> None:
        """Count blocks that were evicted, and report them."""
        self.evictions += len(names)
        if self.on_evicted is not None:
            for name in names:
                self.on_evicted(name)

    def discard(self, transaction: IndexTransaction, rows: Sequence[BlockRow]) -> None:
        """Remove blocks whose files are missing or have the wrong length."""
        # Else its copy in a piece would stay, and not be counted.
        if any(row.piece and block_id(row.name) != row.id for row in rows):
            raise BrokenIndex("a row of the index has no valid name")
        self._files.remove([(row.name, row.place) for row in rows])
        transaction.remove(rows)
        self._notes["missing"] += len(rows)

    def _recover(self, transaction: IndexTransaction, writer: int) -> None:
        self._notes["recovered"] += recover_dead_writers(transaction, self._files, writer)

    def _new_frames(
        self, transaction: IndexTransaction, frames: Sequence[Frame], admitted: AdmittedBlocks, now: int, writer: int
    ) -> dict[int, Frame]:
        """The frames that have to be written, by id. Counts those present, and notes a use of them and of all parents."""
        names = [one.name for one in frames]
        ids = [block_id(name) for name in names]
        pending = transaction.find_pending(ids)
        if any(row.writer != writer for row in pending.values()):
            self._recover(transaction, writer)
            pending = transaction.find_pending(ids)
        rows = transaction.find(ids)
        new, wrong = dict[int, Frame](), list[BlockRow]()
        found = dict(zip(names, self._files.lengths(names), strict=True)) if transaction.unlisted() > 0 else {}
        for id_, name, one in zip(ids, names, frames, strict=True):
            row = rows.get(id_)
            if row is not None and self._files.size(row.name, row.place) == row.size:
                admitted.present += row.name == name
                continue
            if row is not None:
                wrong.append(rows.pop(id_))
            if id_ in new:
                admitted.present += new[id_].name == name
            elif row is None and found.get(name) == len(one.data):
                admitted.present += 1
            elif id_ not in pending and len(one.data) <= self.size and is_name(name):
                new[id_], admitted.names[id_] = one, name
        if wrong:
            self.discard(transaction, wrong)
        admitted.parents = parent_ids(new)
        transaction.touch(rows.keys() | set(admitted.parents.values()) - new.keys(), now)
        return new

    def _make_room(
        self, transaction: IndexTransaction, admitted: AdmittedBlocks, tenants: Collection[int], now: int, writer: int
    ) -> None:
        """Evict until what is to be written fits into the budget, and that of each tenant into its quota. Gives up the last
        frames for which that is impossible."""
        recovered, tried = False, None  # the tenants over their quotas that had nothing left to evict
        while admitted.frames:
            over = transaction.larger(tenants, self._quota) if self._quota < self.size else []
            if not over and transaction.bytes <= self.size:
                return
            need = self.size if over else transaction.bytes - self.size
            if over != tried and self._evict(transaction, now, need, over):
                continue
            if not recovered:
                self._recover(transaction, writer)
                recovered = True
                continue
            if tried is None:
                transaction.check_leaves()
            id_, one = admitted.frames.popitem()
            transaction.reserve(admitted.names[id_], -len(one.data))
            admitted.full, tried = True, over

    def evict(self, transaction: IndexTransaction, need: int, now: int) -> int:
        """Evict blocks of at least `need` bytes and not fewer than a few, last used before `now`. Returns how many."""
        goal, count, gone = transaction.bytes - need, 0, 1
        while gone and (transaction.bytes > goal or count < _FEW):
            gone = self._evict(transaction, now, transaction.bytes - goal, prune=True)
            count += gone
        return count

    def _evict(
        self, transaction: IndexTransaction, now: int, need: int, over: Sequence[int] = (), *, prune: bool = False
    ) -> int:
        """Evict some blocks that were least recently used before `now`, at most until `need` bytes have gone. Returns how many,
        0 if there is none.

        `over`: the tenants to evict from, which are over their quotas; (): any. With `prune`, folders are removed too if they
        are empty.
        """
        for _ in range(_STUCK):
            rows, gone = transaction.victims(now, need, self._fair, over, self._quota), 0
            for _, members in itertools.groupby(rows, key=lambda row: row.piece or row.id):
                some = [(row.name, row.place) for row in members]
                try:
                    gone += len(self._files.remove(some, prune=prune))
                except StoreError:  # the blocks above stay, too
                    self._notes["stuck"] += 1
                    transaction.touch([rows[gone].id], now)
                    break
            if gone:
                transaction.remove(rows[:gone])
                self.note_evicted([row.name for row in rows[:gone]])
            if gone or not rows:
                return gone
        return 0


@dataclass(slots=True)
class UpdateBatch:
    """The updates that one transaction applies.

    Attributes:
        uses: by block id: the order of the last use in this batch, the number of uses, and the time of the last use.
        written, dropped: rows whose files are complete, or were given up.
        removed: blocks whose files were removed without the index.
        tenants: when each tenant used the store last, on this machine's monotonic clock.
        order: the order of the latest use.
    """

    uses: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    written: list[PendingRow] = field(default_factory=list)
    dropped: list[PendingRow] = field(default_factory=list)
    removed: list[Name] = field(default_factory=list)
    tenants: dict[int, float] = field(default_factory=dict)
    order: int = 0

    def apply(self, transaction: IndexTransaction, files: BlockFiles, registered: Callable[[], bool]) -> None:
        """Write the updates to the index. `registered` returns whether the index still knows this process as a writer."""
        if self.uses:
            clock = transaction.clock
            transaction.note_uses((clock + order, hits, at, id_) for id_, (order, hits, at) in self.uses.items())
            transaction.clock += self.order
            now, here = transaction.now(), time.monotonic()
            for tenant, used_at in self.tenants.items():
                transaction.note_tenant(tenant, now - (here - used_at))
        if self.removed:
            gone = transaction.find(block_id(name) for name in self.removed).values()
            transaction.remove([row for row in gone if files.size(row.name, row.place) < 0])
        if not self.written and not self.dropped:
            return
        if registered():
            if self.written:
                transaction.finish(self.written)
            if self.dropped:
                transaction.drop(self.dropped)
            return
        # The index was rebuilt in the meantime from the files that were complete then. Remove files that it does not count.
        ids = [row.id for row in self.written]
        known, pending = transaction.find(ids), transaction.find_pending(ids)
        for row in self.written:
            counted = row.id in known and known[row.id].place == row.place
            if not counted and not (row.id in pending and pending[row.id].is_at(row.place)):
                files.remove([(row.name, row.place)])


class PendingUpdates:
    """Collects updates for the next transaction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch = UpdateBatch()

    def note_reads(self, names: Sequence[Name]) -> None:
        """Note that these blocks were read in one call."""
        if not names:
            return
        clock = time.time()
        with self._lock:
            batch = self._batch
            batch.order += 1
            batch.tenants[tenant_id(names[0])] = time.monotonic()
            for name in names:
                id_ = block_id(name)
                _, hits, _ = batch.uses.get(id_, (0, 0, 0.0))
                batch.uses[id_] = (batch.order, hits + 1, clock)

    def note_writes(self, written: Sequence[PendingRow], dropped: Sequence[PendingRow]) -> None:
        """Note that the files of these rows are complete, or were given up."""
        with self._lock:
            self._batch.written += written
            self._batch.dropped += dropped

    def note_removed(self, name: Name) -> None:
        """Note that the file of a block was removed without the index."""
        with self._lock:
            self._batch.removed.append(name)

    def give_up(self, rows: Sequence[PendingRow]) -> None:
        """Note that files of complete blocks were removed again before the index learned of them."""
        with self._lock:
            batch = self._batch
            ids = {row.id for row in rows}
            batch.dropped += [row for row in batch.written if row.id in ids]
            batch.written = [row for row in batch.written if row.id not in ids]

    def put_back(self, batch: UpdateBatch) -> None:
        """Keep the updates of a transaction that failed, apart from uses."""
        with self._lock:
            self._batch.written += batch.written
            self._batch.dropped += batch.dropped
            self._batch.removed += batch.removed

    def take(self) -> UpdateBatch:
        """Return all updates and start with none."""
        with self._lock:
            batch, self._batch = self._batch, UpdateBatch()
        return batch


_FLUSH_SECONDS: Final = 5.0  # how often uses are written to the index
FLUSH_TIMEOUT: Final = 0.02
_SETTLE_SECONDS: Final = 0.05  # allowed beyond the caller's deadline to settle a write in the index
_ROOM_ATTEMPTS: Final = 4
_WRITERS: Final = 2  # threads that write the files of a large group
_ROOM_SHARE: Final = 256  # on a full disk a put evicts at least this part of the blocks
_LEAVES_FOR_INDEX: Final = 16
# A file system that was full counts as full until it has this many times the room of what did not fit, and this share of the
# blocks: eviction makes a little room all the time.
_FULL_SECONDS: Final = 30.0
_ENOUGH_ROOM: Final = 4
_ENOUGH_SHARE: Final = 16
_INDEX_BYTES: Final = 64 << 10

Result = TypeVar("Result")


class BlockWriter:
    """The writing half of a disk store. Thread-safe.

    Attributes:
        totals: blocks, bytes and pinned bytes when they were last known.
    """

    def __init__(self, files: BlockFiles, index: DiskIndex, budget: BlockBudget, piece_bytes: int = 0) -> None:
        self.totals = (-1, 0, 0)
        self._piece_bytes = piece_bytes
        self._makes_holes: bool | None = None  # not known yet
        self._files = files
        self._index = index
        self._budget = budget
        self._liveness: LivenessLock | None = None
        self._lacked = 0  # bytes for which the file system had no room; 0 if it has enough
        self._lacked_at = 0.0
        self._reset()

    def _reset(self) -> None:
        """Set the state that belongs to one process."""
        self._lock = threading.Lock()
        self._writer = 0  # our id as a writer when we last wrote, 0 before; the index may have been rebuilt since
        self._updates = PendingUpdates()
        self._flushed = time.monotonic()

    def after_fork(self) -> None:
        """In the child: the liveness lock and running operations belong to the parent."""
        if self._liveness is not None:
            self._liveness.abandon()
            self._liveness = None
        self._reset()

    @property
    def disk_full(self) -> bool:
        """Whether the file system had no room lately, and has little now."""
        enough = max(_ENOUGH_ROOM * self._lacked, self.totals[1] // _ENOUGH_SHARE)
        settled = time.monotonic() - self._lacked_at >= _FULL_SECONDS
        if self._lacked and settled and self._files.free_bytes() >= enough:
            self._lacked = 0
        return self._lacked > 0

    def _note_full(self, lacked: int) -> None:
        self._lacked, self._lacked_at = lacked, time.monotonic()

    # Transactions

    @contextlib.contextmanager
    def transaction(self, deadline: float) -> Iterator[IndexTransaction]:
        """A transaction that first applies the pending updates. If it fails, finished writes stay pending."""
        updates = self._updates.take()
        try:
            with self._index.write(deadline) as transaction:
                updates.apply(transaction, self._files, lambda: transaction.is_registered(self._writer, self.token()))
                self.totals = (transaction.blocks, transaction.bytes, transaction.pinned_bytes)
                yield transaction
        except BaseException:
            self._updates.put_back(updates)
            raise
        self._flushed = time.monotonic()

    def token(self) -> str:
        with self._lock:
            if self._liveness is None:
                self._liveness = LivenessLock(self._files.folder)
            return self._liveness.token

    def release_liveness(self, *, if_missing: bool = False) -> None:
        """Give up the liveness lock, or only if its file is gone."""
        with self._lock:
            if self._liveness is not None and not (if_missing and self._liveness.exists()):
                self._liveness.release()
                self._liveness = None

    def unregister(self, deadline: float) -> None:
        """End as a writer, unless writes are unfinished: other processes recover them."""
        with self.transaction(deadline) as transaction:
            writer = self._writer
            ours = writer and transaction.is_registered(writer, self.token())
            if ours and not transaction.unfinished(writer):
                transaction.unregister(writer)

    def note_reads(self, names: Sequence[Name], missing: Sequence[Name], deadline: float) -> None:
        """Note that blocks were read, and remove those whose file is missing. May be skipped on an error."""
        self._updates.note_reads(names)
        if missing or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush(missing, min(deadline, time.monotonic() + FLUSH_TIMEOUT))

    # Blocks

    # A block is written in two transactions: one lists it as pending, and evicts for it; then comes its file; the other shows
    # it. If the process dies between them, its liveness lock is free: others remove the files, which may be parts
    # (recovery.py). If the index is rebuilt meanwhile, `UpdateBatch.apply` removes files that it does not count.
    def put(self, frames: Sequence[Frame], now: int, deadline: float) -> tuple[AdmittedBlocks, int, int]:
        """Write the frames of a group that there is room for. Returns those admitted, how many were written, and the time.

        `now` is the time of the put, 0 in its first group. Blocks used since then are not evicted.
        """
        admitted, now = self.with_room(partial(self._admit, frames, now, deadline), deadline, frames)
        return admitted, self._write(admitted, now, deadline), now

    def _admit(self, frames: Sequence[Frame], now: int, deadline: float) -> tuple[AdmittedBlocks, int]:
        """Choose the frames to write and evict blocks for them. Returns them, and the time of the put."""
        token = self.token()
        with self.transaction(deadline) as transaction:
            writer = self._writer
            if not transaction.is_registered(writer, token):  # the first put, or the index was rebuilt
                writer = transaction.register(token)
            now = now or transaction.tick()
            admitted = self._budget.admit(transaction, frames, now, writer)
            if admitted.frames:
                places = self._places(admitted.frames, admitted.names)
                new = admitted.frames, admitted.names, admitted.parents
                admitted.rows = transaction.add(*new, now, writer, time.time(), places)
        self._writer = writer
        return admitted, now

    def _places(self, frames: Mapping[int, Frame], names: Mapping[int, Name]) -> dict[int, BlockPlace]:
        """Where the blocks will lie that are written as pieces: those in succession with the same layout and root, some MiB in
        each. A block that is alone has a file of its own."""
        places: dict[int, BlockPlace] = {}
        if not self._piece_bytes or len(frames) < 2 or not self._can_make_holes():
            return places
        for _, members in itertools.groupby(frames, key=lambda id_: names[id_][:PREFIX_BYTES]):
            run = list(members)
            lengths = [len(frames[id_].data) for id_ in run]
            low = 0
            while low < len(run):
                sizes = itertools.accumulate(lengths[low:])
                high = min(low + 1 + sum(size < self._piece_bytes for size in sizes), low + MOST_WRITTEN, len(run))
                if high - low > 1:
                    piece = secrets.randbits(62) + 1
                    _, offsets = layout_of(lengths[low:high])
                    made = map(BlockPlace._make, zip(itertools.repeat(piece), offsets, strict=False))
                    places.update(zip(run[low:high], made, strict=True))
                low = high
        return places

    def _can_make_holes(self) -> bool:
        """Whether the file system frees parts of files. Else evicted blocks of a piece would take room until all have gone."""
        if self._makes_holes is None:
            with contextlib.suppress(StoreError):
                self._makes_holes = self._files.makes_holes(self.token())
        return bool(self._makes_holes)

    def _write(self, admitted: AdmittedBlocks, now: int, deadline: float) -> int:
        """Write files and make the blocks visible. Returns how many: fewer if the disk is full."""
        if not admitted.rows:
            return 0
        token = self.token()
        everything = list(zip(admitted.rows, admitted.frames.values(), strict=True))
        pairs = [pair for pair in everything if not pair[0].piece]
        grouped = itertools.groupby((pair for pair in everything if pair[0].piece), key=lambda pair: pair[0].piece)
        in_pieces = [list(members) for _, members in grouped]
        written: list[PendingRow] = []

        def write_pieces(part: slice) -> None:
            for members in in_pieces[part]:
                time_left(deadline)
                if not self._write_piece(members, token, now, deadline):
                    return
                written.extend(row for row, _ in members)

        def write(part: slice) -> None:
            left = pairs[part]
            while left:
                files = ((row.name, one.data) for row, one in left)
                done = self._files.write_many(files, token, deadline - time.monotonic())
                written.extend(row for row, _ in left[:done])
                for row, one in left[done : done + 1]:
                    time_left(deadline)
                    if not self._write_file(row.name, one, token, now, deadline):
                        return
                    written.append(row)
                left = left[done + 1 :]

        try:
            sizes = [sum(row.size for row, _ in members) for members in in_pieces]
            calls = [partial(write_pieces, part) for part in divide(sizes, _WRITERS) if in_pieces]
            calls += [partial(write, part) for part in divide([row.size for row, _ in pairs], _WRITERS) if pairs]
            at_once(calls)
        finally:
            complete = {row.id for row in written}
            self._updates.note_writes(written, [row for row in admitted.rows if row.id not in complete])
            settled = max(deadline, time.monotonic() + _SETTLE_SECONDS)
            try:
                self.with_room(partial(self._settle, settled), settled, list(admitted.frames.values()))
            except DiskFull:  # not even for the index: keep nothing that it does not know
                self._files.remove([(row.name, row.place) for row in written])
                self._updates.give_up(written)
                written = []
                with contextlib.suppress(DiskFull):
                    self._settle(settled)
        return len(written)

    def _write_file(self, name: Name, one: Frame, token: str, now: int, deadline: float) -> bool:
        """Write a file. On a full disk, evict blocks last used before `now` for it. False if that does not help."""
        return self._write_with_room(partial(self._files.write, name, one.data, token), [one], now, deadline)

    def _write_piece(self, members: Sequence[tuple[PendingRow, Frame]], token: str, now: int, deadline: float) -> bool:
        """Write a piece, as `_write_file` does."""
        files, frames = [(row.name, one.data) for row, one in members], [one for _, one in members]
        call = partial(self._files.write_piece, members[0][0].piece, files, token)
        return self._write_with_room(call, frames, now, deadline)

    def _write_with_room(self, write: Callable[[], None], frames: Sequence[Frame], now: int, deadline: float) -> bool:
        size = sum(len(one.data) for one in frames)
        for attempt in range(_ROOM_ATTEMPTS):
            try:
                write()
            except DiskFull:
                self._note_full(size)
                need = max(size, self.totals[1] // _ROOM_SHARE) << attempt
                last = attempt == _ROOM_ATTEMPTS - 1
                if last or not self.with_room(partial(self._evict, need, now, deadline), deadline, frames):
                    return False
            except StoreFull:
                return False
            else:
                return True
        return False

    def _evict(self, need: int, now: int, deadline: float) -> int:
        """Evict blocks of at least `need` bytes. Returns how many."""
        with self.transaction(deadline) as transaction:
            return self._budget.evict(transaction, need, now)

    def _settle(self, deadline: float) -> None:
        """Write the pending updates to the index."""
        with self.transaction(deadline):
            pass

    def with_room(self, call: Callable[[], Result], deadline: float, keep: Sequence[Frame] = ()) -> Result:
        """Make a call that changes the index. If the disk has no room for that, remove a few other blocks and repeat it.
        `keep`: neither these nor their parents."""
        for attempt in range(_ROOM_ATTEMPTS):
            try:
                return call()
            except DiskFull:
                self._note_full(_INDEX_BYTES)
                leaves = self._index.oldest_leaves(_LEAVES_FOR_INDEX << attempt, deadline)
                needed = {name for one in keep for name in (one.name, one.header.parent_name)}
                oldest = [name for name in leaves if name not in needed]
                self.remove_files(oldest)
                self._budget.note_evicted(oldest)
                self._index.shrink_log(deadline)
        return call()

    def remove_files(self, names: Sequence[Name]) -> int:
        """Remove the files of blocks. The index learns of it in its next transaction. Returns how many there were."""
        alone = self._files.remove([(name, ALONE) for name in names], prune=True)
        # A place that a broken index names is not believed: pieces say themselves what they have.
        in_pieces = self._files.find([name for name, removed in zip(names, alone, strict=True) if not removed])
        inside = self._files.remove([(name, place) for name, (place, _) in in_pieces.items()], prune=True)
        for name in names:
            self._updates.note_removed(name)
        return alone.count(True) + inside.count(True)

    def _flush(self, missing: Sequence[Name], deadline: float) -> None:
        """Remove blocks whose file is missing, and write uses to the index if they are due. May be skipped on an error."""
        due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        with contextlib.suppress(StoreError):
            listed = self._index.present([block_id(name) for name in missing], deadline) if missing else set()
            if not listed and not due:
                return
            self._flushed = time.monotonic()
            with self.transaction(deadline) as transaction:
                rows = transaction.find(listed).values()
                self._budget.discard(transaction, [row for row in rows if self._files.size(row.name, row.place) < 0])
