"""A store in a folder, on any file system, shared by all processes that open it.

A put has three steps: a transaction of the index that evicts blocks and notes what will be written; the writing of the
files, each renamed to its final name when it is complete; and a second transaction that makes the blocks visible. At
every moment, even if a process is killed, the block files take no more bytes than the index has noted, and that is at
most the budget of the process that wrote last. A read is open, read, close; a file that another process evicts in the
meantime stays readable.

The budget does not include the index (about 250 bytes per block), folders, records, and the overhead of the file
system.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, time_left
from foreword.store.disk.eviction import AdmittedBlocks, BlockBudget, in_groups
from foreword.store.disk.files import BlockFiles, is_name, make_folder, read_block_header
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import BrokenIndex, IndexTransaction, block_id
from foreword.store.disk.locks import LivenessLock, folder_lock, is_alive
from foreword.store.disk.pending_updates import PendingUpdates
from foreword.store.disk.records import RecordFiles
from foreword.store.disk.recovery import open_index, quarantine_index
from foreword.store.frame import Frame

_FLUSH_SECONDS: Final = 5.0  # how often uses are written to the index
_FLUSH_TIMEOUT: Final = 0.02
_OPEN_TIMEOUT: Final = 120.0
_SETTLE_SECONDS: Final = 0.05  # allowed beyond the caller's deadline to settle a write in the index
_CLOSE_TIMEOUT: Final = 1.0
_SCAN_ROWS: Final = 1024

_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


class DiskStore(Store):
    """A store of `size` bytes of blocks in the folder `path`.

    Args:
        size: sum of the lengths of the block files. Processes with different sizes each keep their own when they write.
        pin_share: share of `size` that may be pinned.
        read_only: never write, not even uses. Implied if the folder cannot be written.
        journal: "delete" on network file systems, where SQLite's write-ahead log does not work across hosts.

    A deadline cannot end a call to a file system that hangs, such as a network mount whose server is down.

    Raises:
        StoreConfigError: an impossible size or share.
        StoreUnavailable: the folder cannot be created or used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int,
        *,
        label: str = "disk",
        pin_share: float = 0.5,
        read_only: bool = False,
        journal: Literal["wal", "delete"] = "wal",
    ) -> None:
        if size < 1 or not 0.0 <= pin_share <= 1.0 or journal not in ("wal", "delete"):
            raise StoreConfigError(
                f"no disk store of {size} bytes with a pin share of {pin_share} and journal {journal!r}"
            )
        self.label = label
        self.readers = 2
        self.path = os.path.abspath(path)
        if not read_only:
            try:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            except OSError as error:
                raise StoreUnavailable(f"the folder {self.path} cannot be created: {error}") from error
        self.read_only = read_only or not os.access(self.path, os.W_OK | os.X_OK)
        self._pin_limit = int(size * pin_share)
        self._files = BlockFiles(self.path)
        self._records = RecordFiles(f"{self.path}/records")
        self._index = DiskIndex(f"{self.path}/index.sqlite", journal=journal, read_only=self.read_only)
        self._closed = False
        self._notes: Counter[str] = Counter(missing=0, recovered=0, rebuilt=0)
        self._budget = BlockBudget(self._files, size, self._notes)
        self._totals = (-1, 0, 0)  # blocks, bytes and pinned bytes when they were last known
        self._liveness: LivenessLock | None = None
        self._reset()
        self._open(time.monotonic() + _OPEN_TIMEOUT)
        _stores.add(self)

    def _reset(self) -> None:
        """Set the state that belongs to one process."""
        self._opener: threading.Thread | None = None
        self._failure: StoreError | None = None
        self._lock = threading.Lock()
        self._writer = 0  # our id as a writer when we last wrote, 0 before; the index may have been rebuilt since
        self._updates = PendingUpdates()
        self._flushed = time.monotonic()

    @property
    def on_evicted(self) -> Callable[[Name], None] | None:
        return self._budget.on_evicted

    @on_evicted.setter
    def on_evicted(self, call: Callable[[Name], None] | None) -> None:
        self._budget.on_evicted = call

    def after_fork(self) -> None:
        """In the child: connections, liveness lock and running operations belong to the parent."""
        self._index.after_fork()
        if self._liveness is not None:
            self._liveness.abandon()
            self._liveness = None
        self._reset()

    # Blocks

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        if not self._ready(deadline):
            return next((n for n, name in enumerate(names) if self._files.size(name) < 0), len(names))
        return self._index.lookup(names, deadline)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        if not self._ready(deadline):
            return [self._files.size(name) >= 0 for name in names]
        ids = [block_id(name) for name in names]
        found = self._index.present(ids, deadline)
        return [one in found for one in ids]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        indexed = self._ready(deadline)
        lengths = []
        missing = []
        for name, buffer in zip(names, buffers, strict=True):
            time_left(deadline)
            length = self._files.read(name, buffer) if is_name(name) else 0
            if length is None:
                missing.append(name)
            lengths.append(length or 0)
        if indexed and not self.read_only:
            self._updates.note_reads([name for name, length in zip(names, lengths, strict=True) if length])
            if missing or time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._flush(missing, min(deadline, time.monotonic() + _FLUSH_TIMEOUT))
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """As in the contract. Blocks that another process or thread is writing at this moment are not counted."""
        self._ready_to_write(deadline)
        kept, full, now = 0, False, 0
        for part in in_groups(frames):
            if full:  # do not write the rest of the chain: it would lie behind a gap
                present = self._index.present([block_id(one.name) for one in part], deadline)
                kept += sum(block_id(one.name) in present for one in part)
                continue
            admitted, now = self._admit(part, now, deadline)
            kept += admitted.present + self._write(admitted, deadline)
            full = admitted.full
        if full and not kept:
            raise StoreFull("all blocks that could be evicted are pinned or in use")
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self._ready_to_write(deadline)
        wanted = {block_id(name): name for name in names if is_name(name)}
        count = 0
        with self._transaction(deadline) as transaction:
            rows, pending = transaction.find(wanted), transaction.find_pending(wanted)
            for id_, name in wanted.items():
                if id_ in pending:  # not present yet, and its writer could not tell that it was deleted
                    continue
                count += self._files.remove(name)
                if id_ in rows and rows[id_].name == name:
                    transaction.remove(rows[id_])
        return count

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self._ready_to_write(deadline)
        wanted = {block_id(name): name for name in names if is_name(name)}
        count = 0
        with self._transaction(deadline) as transaction:
            rows = transaction.find(wanted)
            for id_, name in wanted.items():
                row = rows.get(id_)
                if row is None or row.name != name:
                    continue
                if bool(row.pinned) != pinned:
                    if pinned and transaction.pinned_bytes + row.size > self._pin_limit:
                        continue
                    transaction.pin(row, pinned)
                count += 1
        return count

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        if not self._ready(deadline):
            for file in self._files.walk():
                time_left(deadline)
                header = None if file.token else read_block_header(file)
                if header is not None:
                    yield StoredBlock(file.name, header.parent, header.depth, file.size, file.modified)
            return
        last = -1
        while True:
            self._ready(deadline)
            blocks, last = self._index.page(last, _SCAN_ROWS, deadline)
            if not blocks:
                return
            yield from blocks

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._ready_to_write(deadline)
        self._records.put(key, data, self._token())

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        self._check_open(deadline)
        return self._records.get(key)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        self._ready_to_write(deadline)
        return self._records.delete(key)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        self._check_open(deadline)
        return self._records.keys(prefix)

    # Status

    def status(self) -> StoreStatus:
        """`notes`: missing (blocks whose file was missing), recovered (blocks that a dead process was writing), rebuilt (how
        often the index was rebuilt). Evictions are those of this process."""
        with contextlib.suppress(StoreError):
            if not self._closed and self._index.usable():
                self._totals = self._index.totals(time.monotonic() + _FLUSH_TIMEOUT)
        budget = self._budget
        blocks, size, pinned = self._totals
        return StoreStatus(blocks, size, budget.size, pinned, budget.evictions, dict(self._notes))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        with contextlib.suppress(StoreError):  # other processes recover what stays unfinished
            if not self.read_only and self._index.usable():
                with self._transaction(deadline) as transaction:
                    writer = self._writer
                    ours = writer and transaction.is_registered(writer, self._token())
                    if ours and not transaction.unfinished(writer):
                        transaction.unregister(writer)
        with contextlib.suppress(StoreError):
            self._index.close(deadline)
        self._release_liveness()

    def _release_liveness(self) -> None:
        with self._lock:
            if self._liveness is not None:
                self._liveness.release()
                self._liveness = None

    def _check_open(self, deadline: float) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        time_left(deadline)

    def _ready(self, deadline: float) -> bool:
        """Open the index again if necessary. Returns False only for a read-only folder without an index."""
        self._check_open(deadline)
        if self._index.usable():
            return True
        if self.read_only:
            self._open_read_only(deadline)
        else:
            self._reopen(deadline)
        return self._index.usable()

    def _ready_to_write(self, deadline: float) -> None:
        self._check_open(deadline)
        if self.read_only:
            raise StoreReadOnly(f"the store {self.label!r} is read-only")
        self._ready(deadline)

    # Opening

    def _open(self, deadline: float) -> None:
        """Open the index. Called by the constructor and by one thread at a time (`_reopen`)."""
        if self.read_only:
            self._open_read_only(deadline)
            return
        make_folder(self.path)
        with folder_lock(self.path, deadline):
            if self._index.usable() or self._closed:
                return
            try:
                self._notes["recovered"] += open_index(self._index, self._files, deadline)
            except BrokenIndex:
                self._notes["rebuilt"] += 1
                quarantine_index(self._index.file)
                self._notes["recovered"] += open_index(self._index, self._files, deadline)
        if self._liveness is not None and not self._liveness.exists():
            self._release_liveness()
        self._records.remove_incomplete(lambda token: not is_alive(self.path, token))

    def _reopen(self, deadline: float) -> None:
        """Open the index after it was lost. A thread does it, since rebuilding may take longer than this call has."""
        with self._lock:
            opener = self._opener
            if opener is None or not opener.is_alive():
                opener = self._opener = threading.Thread(
                    target=self._reopen_in_thread, name="foreword-index", daemon=True
                )
                opener.start()
        opener.join(min(time_left(deadline), _OPEN_TIMEOUT))
        if opener.is_alive():
            raise StoreTimeout("the index is being rebuilt")
        if self._failure is not None:
            raise StoreUnavailable(f"the index cannot be opened again: {self._failure}")

    def _reopen_in_thread(self) -> None:
        try:
            self._open(time.monotonic() + _OPEN_TIMEOUT)
            self._failure = None
        except StoreError as error:
            self._failure = error

    def _open_read_only(self, deadline: float) -> None:
        if not os.path.isdir(self.path):
            raise StoreUnavailable(f"there is no folder {self.path}")
        with contextlib.suppress(StoreUnavailable):  # without an index, calls look at the files
            self._index.open(deadline)

    # Writing

    @contextlib.contextmanager
    def _transaction(self, deadline: float) -> Iterator[IndexTransaction]:
        """A transaction that first applies the pending updates. If it fails, finished writes stay pending."""
        updates = self._updates.take()
        try:
            with self._index.write(deadline) as transaction:
                updates.apply(transaction, self._files, lambda: transaction.is_registered(self._writer, self._token()))
                yield transaction
        except BaseException:
            self._updates.note_writes(updates.written, updates.dropped)
            raise
        self._flushed = time.monotonic()

    def _token(self) -> str:
        with self._lock:
            if self._liveness is None:
                self._liveness = LivenessLock(self.path)
            return self._liveness.token

    def _admit(self, frames: Sequence[Frame], now: int, deadline: float) -> tuple[AdmittedBlocks, int]:
        """Choose the frames to write and evict blocks for them. Returns them, and the time of the put.

        `now` is the time of the put, 0 in its first group. Blocks used since then are not evicted.
        """
        token = self._token()
        with self._transaction(deadline) as transaction:
            writer = self._writer
            if not transaction.is_registered(writer, token):  # the first put, or the index was rebuilt
                writer = transaction.register(token)
            now = now or transaction.tick()
            admitted = self._budget.admit(transaction, frames, now, writer)
            if admitted.frames:
                admitted.rows = transaction.add(admitted.frames, now, writer, time.time())
        self._writer = writer
        return admitted, now

    def _write(self, admitted: AdmittedBlocks, deadline: float) -> int:
        """Write files and make the blocks visible. Returns how many."""
        if not admitted.rows:
            return 0
        token = self._token()
        written = 0
        try:
            for row, one in zip(admitted.rows, admitted.frames.values(), strict=True):
                time_left(deadline)
                self._files.write(row.name, one.data, token)
                written += 1
        finally:
            self._updates.note_writes(admitted.rows[:written], admitted.rows[written:])
            with self._transaction(max(deadline, time.monotonic() + _SETTLE_SECONDS)):
                pass
        return written

    def _flush(self, missing: Sequence[Name], deadline: float) -> None:
        """Remove blocks whose file is missing, and write uses to the index if they are due. May be skipped on an error."""
        due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        with contextlib.suppress(StoreError):
            listed = self._index.present([block_id(name) for name in missing], deadline) if missing else set()
            if not listed and not due:
                return
            self._flushed = time.monotonic()
            with self._transaction(deadline) as transaction:
                for row in transaction.find(listed).values():
                    if self._files.size(row.name) < 0:
                        self._budget.discard(transaction, row)


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)
