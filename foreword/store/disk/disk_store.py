"""A store in a folder, on any file system, shared by all processes that open it.

A put has three steps: a transaction of the index that evicts blocks and notes what will be written; the writing of the
files, each renamed to its final name when it is complete; and a second transaction that makes the blocks visible. At
every moment, even if a process is killed, the block files take no more bytes than the index has noted, and that is at
most the budget of the process that wrote last. A read is open, read, close; a file that another process evicts in the
meantime stays readable.

The budget does not include the index (about 250 bytes per block), folders, records, and the overhead of the file
system: what it rounds up; in a piece the table, a page, the gaps between frames, and pages that a removed block had
together with one that stays. If the file system is full before the budget is used up, a put evicts too.

Reads need no index. While it is opened, rebuilt or broken, blocks are found by the names of their files. Writes wait
until the files are listed, which takes seconds for a million: before that, the bytes of the blocks are not known.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final, Literal

from foreword.errors import (
    StoreConfigError,
    StoreError,
    StoreFull,
    StoreOpenedReadOnly,
    StoreReadOnly,
    StoreUnavailable,
)
from foreword.store.background import renew_in_child
from foreword.store.base import (
    FAILED,
    MISSING,
    UNREADABLE,
    Erased,
    Name,
    Store,
    StoredBlock,
    StoreStatus,
    copy_error,
    has_prefix,
    quota_of,
    step_deadline,
    time_left,
)
from foreword.store.disk import synced
from foreword.store.disk.files import (
    BlockFile,
    BlockFiles,
    DiskFull,
    RecordFiles,
    is_name,
    make_folder,
    read_block_header,
    remove_file,
    skip,
)
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import block_id
from foreword.store.disk.locks import folder_lock, is_alive, remove_dead_locks
from foreword.store.disk.opener import IndexOpener
from foreword.store.disk.pieces import ALONE, BlockPlace
from foreword.store.disk.writer import FLUSH_TIMEOUT, BlockBudget, BlockWriter, in_groups
from foreword.store.frame import Frame
from foreword.store.opened_folder import OpenedFolder

_OPEN_TIMEOUT: Final = 10.0
_CLOSE_TIMEOUT: Final = 1.0
_SCAN_ROWS: Final = 1024
_MAX_UNREADABLE: Final = 4096
_FOUND_STEP: Final = 8192
_KNOWN_SECONDS: Final = 0.005  # of a lookup, for what other processes have added since the last one
_LARGEST_PIECE: Final = 64 << 20
_LOAD_SECONDS: Final = 0.5  # of opening a folder, for what it has; the rest is read on a thread

log = logging.getLogger("foreword.store")


class DiskStore(Store):
    """A store of `size` bytes of blocks in the folder `path`.

    Args:
        size: sum of the lengths of the block files. Processes with different sizes each keep their own when they write.
        pin_share: share of `size` that may be pinned.
        tenant_quota: share of `size`, or bytes, that the blocks of one tenant may take; None: all.
        read_only: never write, not even uses. Implied if the folder cannot be written.
        sync_records: a call that puts or deletes a record returns when the device has that.
        pieces: blocks that are written together become files of about this many bytes, where the file system can free parts of
            files; 0: a file for each block. What is read may have both.
        journal: "delete" on network file systems, where SQLite's write-ahead log does not work across hosts.

    A deadline cannot end a call to a file system that hangs, such as a network mount whose server is down.

    Raises:
        StoreConfigError: an impossible size or share.
        StoreUnavailable: the folder cannot be created, or does not exist and cannot be written.
    """

    local = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int,
        *,
        label: str = "disk",
        pin_share: float = 0.5,
        read_only: bool = False,
        journal: Literal["wal", "delete"] = "wal",
        tenant_quota: float | None = None,
        sync_records: bool = False,
        pieces: int = 0,
    ) -> None:
        self.check_options(size, pin_share=pin_share, journal=journal, tenant_quota=tenant_quota, pieces=pieces)
        self.label = label
        self.readers = 2
        self.path = os.path.abspath(path)
        if not read_only:
            self._create_folder()
        self.read_only = read_only or (os.path.isdir(self.path) and not os.access(self.path, os.W_OK | os.X_OK))
        if self.read_only and not read_only:
            log.warning("the folder %s cannot be written: its blocks are only read", self.path)
        self._pin_limit = int(size * pin_share)
        self._files = BlockFiles(self.path)
        self._records = RecordFiles(f"{self.path}/records", sync=sync_records)
        self._index = DiskIndex(f"{self.path}/index.sqlite", journal=journal, read_only=self.read_only)
        self._closed = False
        self._unreadable: set[Name] = set()  # blocks whose files a put writes again
        self._notes: Counter[str] = Counter(missing=0, recovered=0, rebuilt=0, found=0, stuck=0)
        self._opener = IndexOpener(self._index, self._files, self._notes, self._index_opened)
        self._budget = BlockBudget(self._files, size, self._notes, quota_of(tenant_quota, size))
        self._pieces = bool(pieces)
        self._writer = BlockWriter(self._files, self._index, self._budget, pieces)
        self._opened = OpenedFolder(self.path)
        renew_in_child(self)
        if self.read_only:
            self._open_read_only(time.monotonic() + _OPEN_TIMEOUT)
        else:
            self._opener.wait(self._opener.complete, math.inf)

    @staticmethod
    def check_options(
        size: int,
        *,
        pin_share: float = 0.5,
        read_only: bool = False,
        journal: str = "wal",
        tenant_quota: float | None = None,
        sync_records: bool = False,
        pieces: int = 0,
    ) -> None:
        """Raises StoreConfigError for what the constructor would refuse."""
        if not 0 <= pieces <= _LARGEST_PIECE:
            raise StoreConfigError(f"pieces of a disk store have at most {_LARGEST_PIECE:,} bytes, not {pieces:,}")
        if size < 1 or not 0.0 <= pin_share <= 1.0:
            what = f"no disk store of {size} bytes" if size < 1 else f"pin_share is from 0 to 1, not {pin_share}"
            raise StoreConfigError(what)
        if journal not in ("wal", "delete"):
            raise StoreConfigError(f"the journal of a disk store is wal or delete, not {journal!r}")
        quota_of(tenant_quota, size)

    def _create_folder(self) -> None:
        try:
            make_folder(self.path)
        except DiskFull as error:
            log.warning("the folder %s cannot be created yet: %s", self.path, error.message)
        except StoreError as error:
            raise StoreUnavailable(f"the folder {self.path} cannot be created: {error.message}") from error

    @property
    def on_evicted(self) -> Callable[[Name], None] | None:
        return self._budget.on_evicted

    @on_evicted.setter
    def on_evicted(self, call: Callable[[Name], None] | None) -> None:
        self._budget.on_evicted = call

    @property
    def refusal(self) -> StoreError | None:
        if self.read_only:
            return StoreReadOnly(f"the folder {self.path} is only read")
        failure = self._opener.failure
        if isinstance(failure, StoreFull | StoreReadOnly):
            return copy_error(failure)
        if self._writer.disk_full:
            return StoreFull(f"the file system of {self.path} has no room, although the store may grow")
        return None

    @property
    def pin_epoch(self) -> int:
        """Pins lie in the index. It changes when this process has opened an index, which may be a new one, and while one is
        rebuilt, as more and more blocks are in it."""
        if self.read_only or self._closed:
            return 0
        return self._opener.openings if self._opener.complete() else -1 - self._notes["found"] // _FOUND_STEP

    def after_fork(self) -> None:
        """In the child: connections, locks and running operations belong to the parent."""
        self._index.after_fork()
        self._opener.after_fork()
        self._writer.after_fork()

    # Blocks

    def known(self, names: Sequence[Name]) -> Sequence[bool | None]:
        """Tell from memory, as in the contract. What other processes have added to the folder is looked up in the index once,
        and what is there after they have removed blocks is not known for up to half a minute."""
        if self._closed or not self._opener.was_complete:
            return [None] * len(names)
        return self._index.known.told([block_id(name) for name in names])

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        complete = self._ready(deadline)
        known = 0
        if self._index.usable():
            with contextlib.suppress(StoreUnavailable):
                known = self._index.lookup(names, deadline)
                if complete:
                    self._read_known(deadline)
                    return known
        for count in range(known, len(names)):
            if self._files.size(names[count]) < 0:
                rest = itertools.takewhile(lambda length: length >= 0, self._files.lengths(names[count:]))
                return count + sum(1 for _ in rest)
            if time.monotonic() >= deadline:
                return count
        return len(names)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        if self._ready(deadline):
            with contextlib.suppress(StoreUnavailable):
                ids = [block_id(name) for name in names]
                found = self._index.present(ids, deadline)
                self._read_known(deadline)
                return [one in found for one in ids]
        return [length >= 0 for length in self._files.lengths(names)]

    def _read_known(self, deadline: float) -> None:
        self._index.read_known(min(deadline, time.monotonic() + _KNOWN_SECONDS))

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self._ready(deadline)
        lengths = self._read(names, buffers, deadline)
        if not self.read_only and self._index.usable():
            read = [name for name, length in zip(names, lengths, strict=True) if length > 0]
            missing = [name for name, length in zip(names, lengths, strict=True) if length == MISSING]
            self._writer.note_reads(read, missing, deadline)
        return lengths

    def _read(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[int]:
        """Read as `get`: a block with a file of its own by its name, one in pieces by the index, or by the tables of the pieces
        where it cannot be asked."""
        lengths = [MISSING] * len(names)
        places = self._places(names, deadline) if self._pieces else {}
        for i, name in enumerate(names):
            late = time.monotonic() >= deadline
            if name not in places and (late or is_name(name)):
                lengths[i] = FAILED if late else self._files.read(name, buffers[i])
        if not self._pieces and MISSING in lengths:
            places = self._places([name for name, one in zip(names, lengths, strict=True) if one == MISSING], deadline)
        inside = [(i, *places[name]) for i, name in enumerate(names) if lengths[i] == MISSING and name in places]
        for piece, members in itertools.groupby(inside, key=lambda one: one[1].piece):
            some = list(members)
            if time.monotonic() >= deadline:
                found = [FAILED] * len(some)
            else:
                found = self._files.read_piece(piece, [(names[i], at.at, size, buffers[i]) for i, at, size in some])
            for (i, _, _), length in zip(some, found, strict=True):
                lengths[i] = length
        for name, length in zip(names, lengths, strict=True):
            if length == UNREADABLE and len(self._unreadable) < _MAX_UNREADABLE:
                self._unreadable.add(name)
        if FAILED in lengths and max(lengths) < MISSING:
            time_left(deadline)
            raise StoreUnavailable(f"no block in {self.path} can be read")
        return lengths

    def _places(self, names: Sequence[Name], deadline: float) -> dict[Name, tuple[BlockPlace, int]]:
        """Places and sizes of blocks in pieces."""
        places: dict[Name, tuple[BlockPlace, int]] = {}
        complete = False
        with contextlib.suppress(StoreError):
            if self._index.usable():
                places = self._index.places(names, deadline)
                complete = self._opener.was_complete or (self.read_only and self._index.compared(deadline))
        if not complete and len(places) < len(names):
            places |= self._files.find([name for name in names if name not in places], skip)
        return places

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames. Blocks that another process or thread is writing at this moment are not counted.

        Nothing is written while the files are listed for a new index. A file that could not be read is written again.
        """
        if not self._ready_to_write(deadline):
            lengths = self._files.lengths([one.name for one in frames])
            return sum(length == len(one.data) for one, length in zip(frames, lengths, strict=True))
        for frame in frames if self._unreadable else ():
            if frame.name in self._unreadable:
                self._unreadable.discard(frame.name)
                with contextlib.suppress(StoreError):  # it stays as it is, and is found out again
                    if not self._files.replace(frame.name, frame.data, self._writer.token()):
                        self._writer.remove_files(list(self._files.find([frame.name])))
        kept, full, now = 0, False, 0
        for part in in_groups(frames):
            if full:  # do not write the rest of the chain: it would lie behind a gap
                present = self._index.present([block_id(one.name) for one in part], deadline)
                kept += sum(block_id(one.name) in present for one in part)
                continue
            admitted, written, now = self._writer.put(part, now, deadline)
            kept += admitted.present + written
            full = admitted.full or written < len(admitted.rows)
        if full and not kept:
            raise StoreFull("there is no room, and no block that could be evicted")
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        wanted = {block_id(name): name for name in names if is_name(name)}
        if not self._ready_to_write(deadline):
            return self._writer.remove_files(list(wanted.values()))
        return self._writer.with_room(partial(self._delete, wanted, deadline), deadline)

    def _delete(self, wanted: dict[int, Name], deadline: float) -> int:
        gone, stuck, problems = set[Name](), set[Name](), list[StoreError]()

        def note(error: StoreError) -> None:
            if isinstance(error, DiskFull):
                raise error
            problems.append(error)

        def remove(blocks: Sequence[tuple[Name, BlockPlace]]) -> None:
            for (name, _), removed in zip(blocks, self._files.remove(blocks, prune=True, on_error=note), strict=True):
                if removed is None:
                    stuck.add(name)
                elif removed:
                    gone.add(name)

        with self._writer.transaction(deadline) as transaction:
            found, pending = transaction.find(wanted), transaction.find_pending(wanted)
            # A pending block is not present yet, and its writer could not tell that it was deleted. Ends of chains first.
            names = [name for id_, name in reversed(wanted.items()) if id_ not in pending]
            rows = [row for name in names if (row := found.get(block_id(name))) is not None and row.name == name]
            # A copy in a file of its own would be found afterwards.
            remove([(row.name, row.place) for row in rows if row.piece] + [(name, ALONE) for name in names])
            transaction.remove(
                [row for row in rows if row.name not in stuck]
            )  # the index learns of those that are gone
            absent = set(names) - gone - stuck - {row.name for row in rows}
            if absent and not self._opener.was_complete:
                remove([(name, place) for name, (place, _) in self._files.find(absent, note).items()])
        if problems:
            raise copy_error(problems[-1])
        return len(gone - stuck)

    def _remove_copies(self, found: Sequence[BlockFile], deadline: float) -> None:
        """Remove blocks from pieces in which they were found: the index may have had them in another place."""
        if not self._ready_to_write(deadline):
            self._writer.remove_files([file.name for file in found])
            return
        ids = [block_id(file.name) for file in found]
        with self._writer.transaction(deadline) as transaction:
            pending = transaction.find_pending(ids)
            copies = [(file.name, file.place) for id_, file in zip(ids, found, strict=True) if id_ not in pending]
            self._files.remove(copies, prune=True)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        if not self._ready_to_write(deadline):
            raise StoreUnavailable("the index is being rebuilt")
        wanted = {block_id(name): name for name in names if is_name(name)}
        count = 0
        with self._writer.transaction(deadline) as transaction:
            rows = transaction.find(wanted)
            if not pinned:
                transaction.take_pins(wanted)
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
                header = None if file.token or file.broken else read_block_header(file)
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

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        """List the files, so a block that the index lacks is found."""
        self._check_open(deadline)
        names = (file.name for file in self._files.walk(layout, root) if file.token is None and not file.broken)
        while batch := list(itertools.islice(names, _SCAN_ROWS)):
            self._check_open(deadline)
            yield batch

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        """Erase as in the contract. A folder that cannot be read is a place. Incomplete files of killed writers are removed."""
        problems: list[StoreError] = []
        try:
            self._check_open(deadline)
            files = self._files.walk(layout, root, problems.append)
            whole = (one for one in files if self._is_whole(one, problems))
            wanted = (one for one in whole if chosen is None or one.name in chosen)
            hidden = {*chosen} if chosen is not None else set()
            while batch := list(itertools.islice(wanted, _SCAN_ROWS)):
                yield Erased(self.delete([one.name for one in batch], deadline=step_deadline(deadline)))
                hidden.difference_update(one.name for one in batch)
                if copies := [one for one in batch if one.place.piece]:
                    self._remove_copies(copies, step_deadline(deadline))
            # Blocks that a killed process has half removed from a piece are in no table: the index knows where they may be.
            left = (one for one in hidden if has_prefix(one, layout, root))
            while names := list(itertools.islice(left, _SCAN_ROWS)):
                yield Erased(self.delete(names, deadline=step_deadline(deadline)))
            if chosen is None:
                self._files.prune(layout, root)
                self._records.remove_incomplete(self._is_dead)
            self._opened.check()  # what was written into another folder in its place is erased all the same
        except StoreError as error:
            yield Erased.failed(error)
        yield from map(Erased.failed, problems)

    def sync_deletions(
        self, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool = False, deadline: float
    ) -> Iterator[None]:
        for step in synced.steps(self.path, prefixes, records=records):
            self._check_open(deadline)
            yield step

    def _is_whole(self, file: BlockFile, problems: list[StoreError]) -> bool:
        """Whether a file is complete. Removes it if it is not and its writer is dead, or it is a broken piece."""
        if file.broken or (file.token is not None and self._is_dead(file.token)):
            try:
                remove_file(file.path)
            except StoreError as error:
                problems.append(error)
        return file.token is None and not file.broken

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._check_writable(deadline)
        self._records.put(key, data, self._writer.token())

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        self._check_open(deadline)
        return self._records.get(key)

    def add_record(self, key: str, data: bytes, *, deadline: float) -> bytes:
        found = self.get_record(key, deadline=deadline)
        if found is not None:
            return found
        self._check_writable(deadline)
        with folder_lock(self.path, deadline, "records.lock"):
            return super().add_record(key, data, deadline=deadline)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        self._check_writable(deadline)
        return self._records.delete(key)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        self._check_open(deadline)
        return self._records.keys(prefix)

    # Status

    def status(self) -> StoreStatus:
        """`notes`: missing (blocks whose file was missing), recovered (blocks that a dead process was writing), rebuilt (how
        often the index was rebuilt), found (blocks that were not in the index), stuck (blocks that could not be evicted since
        their file cannot be removed), scanning (1 while the index does not list all blocks yet), no_index (1 while it cannot
        be opened), read_only. Evictions are those of this process."""
        with contextlib.suppress(StoreError):
            if not self._closed and self._index.usable():
                self._writer.totals = self._index.totals(time.monotonic() + FLUSH_TIMEOUT)
        budget = self._budget
        blocks, size, pinned = self._writer.totals
        scanning = not self.read_only and not self._closed and not self._opener.complete()
        no_index = self._opener.failure is not None or (self.read_only and not self._index.usable())
        notes = {**self._notes, "scanning": int(scanning), "no_index": int(no_index), "read_only": int(self.read_only)}
        limit = 0 if self.read_only else budget.size  # that of the processes that write is not known here
        return StoreStatus(blocks, size, limit, pinned, budget.evictions, notes, self._pin_limit)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True  # of two threads at once both may go on: each step may be made twice
        self._opener.stop(_CLOSE_TIMEOUT)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        with contextlib.suppress(StoreError):  # other processes recover what stays unfinished
            if not self.read_only and self._index.usable():
                self._writer.unregister(deadline)
        with contextlib.suppress(StoreError):
            self._index.close(deadline)
        self._writer.release_liveness()

    def _check_open(self, deadline: float) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        time_left(deadline)

    def _ready(self, deadline: float) -> bool:
        """Whether the index lists all blocks. If not, calls look at the files."""
        self._check_open(deadline)
        if self.read_only:
            return self._open_read_only(deadline)
        return self._opener.complete()

    def _check_writable(self, deadline: float) -> None:
        self._check_open(deadline)
        if self.read_only:
            raise StoreOpenedReadOnly(f"the store {self.label!r} is read-only")

    def _ready_to_write(self, deadline: float) -> bool:
        """Whether the index can take changes. Waits a moment if it is being opened. Raises StoreError."""
        self._check_writable(deadline)
        return self._opener.wait(self._opener.writable, deadline)

    def _open_read_only(self, deadline: float) -> bool:
        """Open the index if there is one. Returns whether it lists all blocks."""
        if not os.path.isdir(self.path):
            raise StoreUnavailable(f"there is no folder {self.path}")
        with contextlib.suppress(StoreUnavailable):  # without an index, calls look at the files
            if not self._index.usable():
                self._index.open(deadline)
            return self._index.compared(deadline)
        return False

    def _index_opened(self) -> None:
        self._index.read_known(time.monotonic() + _LOAD_SECONDS)
        self._writer.release_liveness(if_missing=True)
        self._records.remove_incomplete(self._is_dead)
        self._files.remove_probes(self._is_dead)
        remove_dead_locks(self.path)

    def _is_dead(self, token: str) -> bool:
        return not is_alive(self.path, token)
