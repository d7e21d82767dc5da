"""Blocks as files, on any file system, shared by all processes that open the same folder.

A put is: one transaction of the index that chooses what goes, unlinks it and notes what comes; then the files, each under its
own name once it is whole; then a second transaction that makes them visible. So at no moment, whoever is killed, do the
files of blocks take more bytes than the index has noted, and that is never more than the budget of the process that wrote
last. A read is open, read, close; a file that another process evicts meanwhile stays readable.

Not counted: the index (about 250 bytes per block), folders, records, and what the file system adds to a file's length.
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
from foreword.store.disk.eviction import Group, Room, in_groups
from foreword.store.disk.files import (
    Files,
    Presence,
    Records,
    folder_lock,
    header_of,
    is_alive,
    is_name,
    make_folder,
    make_or_leave,
)
from foreword.store.disk.index import Index, held
from foreword.store.disk.index_rows import BrokenIndex, Transaction, block_id
from foreword.store.disk.pending_updates import Untold
from foreword.store.disk.recovery import set_aside, take_over
from foreword.store.frame import Frame

_FLUSH_SECONDS: Final = 5.0
_FLUSH_WAIT_SECONDS: Final = 0.02
_OPEN_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 0.05  # beyond the caller's deadline, to take back what was noted
_CLOSE_SECONDS: Final = 1.0
_SCAN_ROWS: Final = 1024

_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


class DiskStore(Store):
    """A store of `size` bytes of blocks below the folder `path`.

    Args:
        size: bytes, each file's length counted. Processes with different sizes each keep to their own when they write.
        pin_share: how much of `size` may be pinned.
        read_only: never write, not even what was used; also so where the folder cannot be written.
        journal: "delete" on network file systems, where SQLite's write-ahead log does not work across hosts.

    A call to a file system that hangs (a network mount whose server is gone) cannot be ended by a deadline.

    Raises:
        StoreConfigError: a size or share that makes no sense.
        StoreUnavailable: the folder cannot be made or used.
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
            raise StoreConfigError(f"no disk store of {size} bytes with a share of {pin_share} and journal {journal!r}")
        self.label = label
        self.readers = 2
        self.size = size
        self.path = os.path.abspath(path)
        if not read_only:
            make_or_leave(self.path)
        self.read_only = read_only or not os.access(self.path, os.W_OK | os.X_OK)
        self._pin_limit = int(size * pin_share)
        self._files = Files(self.path)
        self._records = Records(f"{self.path}/records")
        self._index = Index(f"{self.path}/index.sqlite", journal=journal, read_only=self.read_only)
        self._closed = False
        self._notes: Counter[str] = Counter(missing=0, buried=0, rebuilt=0)
        self._room = Room(self._files, size, self._notes)
        self._last = StoreStatus(budget=size)
        self._presence: Presence | None = None
        self._clear()
        self._open(time.monotonic() + _OPEN_SECONDS)
        _stores.add(self)

    def _clear(self) -> None:
        """What belongs to this process alone."""
        self._opening = threading.Lock()
        self._opener: threading.Thread | None = None
        self._failure: StoreError | None = None
        self._lock = threading.Lock()
        self._writer = 0  # our number in the index as it is now, 0 before the first write
        self._untold = Untold()
        self._flushed = time.monotonic()

    @property
    def on_evicted(self) -> Callable[[Name], None] | None:
        """Called with each block that this process removes to make room, in a transaction: it must be quick."""
        return self._room.on_evicted

    @on_evicted.setter
    def on_evicted(self, call: Callable[[Name], None] | None) -> None:
        self._room.on_evicted = call

    def after_fork(self) -> None:
        """In the child: the connections, the presence and everything under way are the parent's."""
        self._index.after_fork()
        if self._presence is not None:
            self._presence.forget()
            self._presence = None
        self._clear()

    # Blocks

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        if not self._ready(deadline):
            return next((n for n, name in enumerate(names) if self._files.size(name) < 0), len(names))
        return self._index.lookup(names, deadline)

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
            self._untold.note([name for name, length in zip(names, lengths, strict=True) if length])
            if missing or time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._flush(missing, min(deadline, time.monotonic() + _FLUSH_WAIT_SECONDS))
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """As the contract says. A block that another process or thread is writing at this moment is not counted."""
        self._ready_to_write(deadline)
        kept, full, now = 0, False, 0
        for part in in_groups(frames):
            if full:  # what is new would only make a gap
                there = self._index.ready([block_id(one.name) for one in part], deadline)
                kept += sum(block_id(one.name) in there for one in part)
                continue
            group, now = self._admit(part, now, deadline)
            kept += group.kept + self._write(group, deadline)
            full = group.full
        if full and not kept:
            raise StoreFull("all that could be evicted is pinned or in use")
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self._ready_to_write(deadline)
        wanted = [name for name in dict.fromkeys(names) if is_name(name)]
        count = 0
        with self._transaction(deadline) as transaction:
            numbers = [block_id(name) for name in wanted]
            rows, pending = transaction.find(numbers), transaction.find_pending(numbers)
            for number, name in zip(numbers, wanted, strict=True):
                if number in pending:  # not there yet; whoever writes it would not know that it is no longer counted
                    continue
                count += self._files.remove(name)
                if number in rows and rows[number].name == name:
                    transaction.remove(rows[number])
        return count

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self._ready_to_write(deadline)
        wanted = [name for name in dict.fromkeys(names) if is_name(name)]
        count = 0
        with self._transaction(deadline) as transaction:
            rows = transaction.find(block_id(name) for name in wanted)
            for name in wanted:
                row = rows.get(block_id(name))
                if row is None or row.name != name:
                    continue
                if bool(row.pinned) != pinned:
                    if pinned and transaction.pinned_bytes + row.size > self._pin_limit:
                        continue
                    transaction.pin(row, pinned)
                count += 1
        return count

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        return self._scan(self._ready(deadline), deadline)

    def _scan(self, indexed: bool, deadline: float) -> Iterator[StoredBlock]:
        if not indexed:
            for found in self._files.walk():
                time_left(deadline)
                header = None if found.token else header_of(found)
                if header is not None:
                    yield StoredBlock(found.name, header.parent, header.depth, found.size, found.modified)
            return
        after, entries = self._page(-1, deadline)
        while entries:
            yield from entries
            after, entries = self._page(after, deadline)

    def _page(self, after: int, deadline: float) -> tuple[int, list[StoredBlock]]:
        self._ready(deadline)
        entries, last = self._index.entries(after, _SCAN_ROWS, deadline)
        return last, entries

    # Records

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._ready_to_write(deadline)
        self._records.put(word, data, self._token())

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        self._check_open(deadline)
        return self._records.get(word)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        self._ready_to_write(deadline)
        return self._records.delete(word)

    def records(self, start: str, *, deadline: float) -> list[str]:
        self._check_open(deadline)
        return self._records.words(start)

    # The store itself

    def status(self) -> StoreStatus:
        """`notes`: missing (blocks whose file was gone), buried (blocks that a dead process was writing), rebuilt (how often
        the index was made anew). Evictions are this process's."""
        soon = time.monotonic() + _FLUSH_WAIT_SECONDS
        try:
            if not self._closed and self._index.usable():
                blocks, size, pinned = self._index.totals(soon)
                self._last = StoreStatus(blocks, size, self.size, pinned, self._room.evictions, dict(self._notes))
        except StoreError:
            return self._last
        return self._last

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        soon = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(
            StoreError
        ):  # calls under way hold what they need; what is left unfinished others bury
            if not self.read_only and self._index.usable():
                self._say_goodbye(soon)
        with contextlib.suppress(StoreError):
            self._index.close(soon)
        with self._lock:
            if self._presence is not None:
                self._presence.leave()
                self._presence = None

    def _say_goodbye(self, deadline: float) -> None:
        with self._transaction(deadline) as transaction:
            if self._writer and not transaction.unfinished(self._writer):
                transaction.unregister(self._writer)

    def _check_open(self, deadline: float) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")
        time_left(deadline)

    def _ready(self, deadline: float) -> bool:
        """Whether there is an index to ask; only a folder that cannot be written may do without."""
        self._check_open(deadline)
        if self._index.usable():
            return True
        if self.read_only:
            self._open_for_reading(deadline)
        else:
            self._open_again(deadline)
        return self._index.usable()

    def _ready_to_write(self, deadline: float) -> None:
        self._check_open(deadline)
        if self.read_only:
            raise StoreReadOnly(f"the store {self.label!r} takes no writes")
        self._ready(deadline)

    # Opening

    def _open(self, deadline: float) -> None:
        if self.read_only:
            self._open_for_reading(deadline)
            return
        make_folder(self.path)
        with held(self._opening, deadline), folder_lock(self.path, deadline):
            if self._index.usable() or self._closed:
                return
            self._writer = 0
            try:
                self._notes["buried"] += take_over(self._index, self._files, deadline)
            except BrokenIndex:
                self._notes["rebuilt"] += 1
                set_aside(self._index.file)
                self._notes["buried"] += take_over(self._index, self._files, deadline)
        with self._lock:
            if self._presence is not None and not self._presence.is_there():
                self._presence.leave()
                self._presence = None
        self._records.sweep(lambda token: not is_alive(self.path, token))

    def _open_again(self, deadline: float) -> None:
        """The index was lost under us. Making it again may take longer than this call has, so a thread does it."""
        with self._lock:
            opener = self._opener
            if opener is None or not opener.is_alive():
                opener = self._opener = threading.Thread(target=self._open_aside, name="foreword-index", daemon=True)
                opener.start()
        opener.join(min(time_left(deadline), _OPEN_SECONDS))
        if opener.is_alive():
            raise StoreTimeout("the index is being made again")
        if self._failure is not None:
            raise StoreUnavailable(f"the index cannot be opened again: {self._failure}")

    def _open_aside(self) -> None:
        try:
            self._open(time.monotonic() + _OPEN_SECONDS)
            self._failure = None
        except StoreError as error:
            self._failure = error

    def _open_for_reading(self, deadline: float) -> None:
        if not os.path.isdir(self.path):
            raise StoreUnavailable(f"there is no folder {self.path}")
        with contextlib.suppress(StoreUnavailable):  # without an index the files speak for themselves
            self._index.open(deadline)

    # Writing

    @contextlib.contextmanager
    def _transaction(self, deadline: float) -> Iterator[Transaction]:
        """A transaction that begins with what the index does not know yet; if it fails, the next one begins with that."""
        told = self._untold.take()
        try:
            with self._index.write(deadline) as transaction:
                told.tell(transaction, self._files, lambda: transaction.is_registered(self._writer, self._token()))
                yield transaction
        except BaseException:
            self._untold.ended(told.written, told.dropped)
            raise
        self._flushed = time.monotonic()

    def _token(self) -> str:
        with self._lock:
            if self._presence is None:
                self._presence = Presence(self.path)
            return self._presence.token

    def _register(self, token: str, deadline: float) -> int:
        """Our number in the index, before anything is noted under it."""
        with held(self._opening, deadline):
            if not self._writer:
                with self._index.write(deadline) as transaction:
                    number = transaction.register(token)
                self._writer = number
            return self._writer

    def _admit(self, frames: Sequence[Frame], now: int, deadline: float) -> tuple[Group, int]:
        """Choose what of `frames` is to be written, and make room for it. `now` is the time of the whole put, 0 if it has none
        yet: nothing that was used since then is evicted."""
        token = self._token()
        writer = self._register(token, deadline)
        with self._transaction(deadline) as transaction:
            if not transaction.is_registered(writer, token):
                raise StoreUnavailable("the index was made anew at this moment")
            now = now or transaction.tick()
            group = self._room.choose(transaction, frames, now, writer)
            if group.frames:
                group.rows = transaction.add(group.frames, now, writer, time.time())
        return group, now

    def _write(self, group: Group, deadline: float) -> int:
        """Write files and make them visible. Returns how many."""
        if not group.rows:
            return 0
        token = self._token()
        written = 0
        try:
            for row, one in zip(group.rows, group.frames.values(), strict=True):
                time_left(deadline)
                self._files.write(row.name, one.data, token)
                written += 1
        finally:
            self._untold.ended(group.rows[:written], group.rows[written:])
            with self._transaction(max(deadline, time.monotonic() + _SETTLE_SECONDS)):
                pass
        return written

    # Reading

    def _flush(self, missing: Sequence[Name], deadline: float) -> None:
        """Forget blocks whose file was found missing, and tell the index of uses if that was long ago. Nobody waits for it: it
        can be done later."""
        due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        with contextlib.suppress(StoreError):
            listed = self._index.ready([block_id(name) for name in missing], deadline) if missing else set()
            if not listed and not due:
                return
            self._flushed = time.monotonic()
            with self._transaction(deadline) as transaction:
                for row in transaction.find(listed).values():
                    if self._files.size(row.name) < 0:
                        self._room.discard(transaction, row)


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)
