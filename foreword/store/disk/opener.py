"""Opens the index of a disk store on a thread, rebuilds it if it is lost or broken, and compares it with the files.

Blocks are read by the names of their files until the index is complete.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from foreword.errors import StoreError
from foreword.store.background import background_thread
from foreword.store.base import time_left
from foreword.store.disk.files import (
    BlockFile,
    BlockFiles,
    DiskFull,
    make_folder,
    read_block_header,
    remove_file,
    skip,
    store_error,
)
from foreword.store.disk.index import DiskIndex, translate
from foreword.store.disk.index_rows import BlockRow, BrokenIndex, OldIndex, PendingRow, block_id, pending_row, read_pins
from foreword.store.disk.locks import folder_lock, is_alive, scan_lock
from foreword.store.disk.pieces import BlockPlace
from foreword.store.disk.recovery import OLD, boot_of_index, open_index, quarantine_index, remove_oldest_files

log = logging.getLogger("foreword.store")

_SCHEMA: Final = (
    "CREATE TABLE files (modified INTEGER, name BLOB, size INTEGER, piece INTEGER, at INTEGER,"
    " PRIMARY KEY (modified, name)) WITHOUT ROWID"
)
_CACHE_KIB: Final = 32 << 10
_ROWS: Final = 512
_STEP_SECONDS: Final = 30.0  # limit of one transaction, mostly of waiting for other processes
# Seconds in which a scan makes no pauses. If it takes longer and is not small, calls do not wait for it.
_PATIENCE: Final = 1.0
_FEW_STEPS: Final = 16
_LARGE_INDEX: Final = 16 << 20
_LONGEST_WAIT: Final = 30.0
_OPEN_TIMEOUT: Final = 60.0
_QUERY_TIMEOUT: Final = 0.02
_RETRY: Final = 5.0
_RETRY_SOON: Final = 0.05
_LONGEST_PAUSE: Final = 0.05
_FILES_FOR_ROOM: Final = 4


class UnlistedFiles:
    """Complete block files in a scratch database, which sorts any number of them in constant memory.

    The order is that of writing, so parents come before children, the blocks of a chain are adjacent, and their headers
    lie near each other on the disk.

    Attributes:
        bytes: the sizes of all files.
    """

    def __init__(self, files: BlockFiles, database: sqlite3.Connection) -> None:
        self.bytes = 0
        self._files = files
        self._database = database

    def add(self, found: Sequence[BlockFile]) -> None:
        """Add files. Raises sqlite3.Error."""
        rows = [(int(file.modified * 1e6), file.name, file.size, *file.place) for file in found]
        self._database.executemany("INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?)", rows)
        self.bytes += sum(file.size for file in found)

    def batches(self, count: int) -> Iterator[list[BlockFile]]:
        """All files, the oldest first. Raises sqlite3.Error."""
        sql = "SELECT modified, name, size, piece, at FROM files ORDER BY modified, piece, at, name"
        with contextlib.closing(self._database.execute(sql)) as cursor:
            while rows := cursor.fetchmany(count):
                yield [
                    BlockFile(name, self._path(name, piece), None, size, modified / 1e6, BlockPlace(piece, at))
                    for modified, name, size, piece, at in rows
                ]

    def _path(self, name: bytes, piece: int) -> str:
        return self._files.piece_path(name, piece) if piece else self._files.path(name)


@contextlib.contextmanager
def _unlisted_files(files: BlockFiles) -> Iterator[UnlistedFiles]:
    """An empty scratch database, without a name in the folder: it vanishes with the process. Raises StoreError."""
    path = f"{files.folder}/unlisted.sqlite"
    make_folder(files.folder)
    remove_file(path)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
                database.execute(f"PRAGMA {pragma}").fetchone()
            database.execute(_SCHEMA)
            database.execute("BEGIN")
            remove_file(path)
            yield UnlistedFiles(files, database)
    except sqlite3.Error as error:
        raise translate(error, path) from error
    finally:
        remove_file(path)


class FolderScan:
    """Compares the index with the files, in small steps, while this and other processes use the store.

    It removes rows whose file is missing or has another length, adds rows for sound blocks, and removes other files.

    Files that the index lacks are listed first, which takes seconds for a million. From then on their bytes count
    against the budget, so blocks can be written and evicted. They are added to the index in the order of their last
    change: the blocks that would be evicted first are known first.

    Args:
        stopped: when it is set, `run` ends early.
        pause: called after each step with the seconds that it took.
        listed: called when all files are listed.
    """

    def __init__(
        self,
        index: DiskIndex,
        files: BlockFiles,
        notes: Counter[str],
        stopped: threading.Event,
        pause: Callable[[float], None],
        listed: Callable[[], None],
    ) -> None:
        self._index = index
        self._files = files
        self._notes = notes
        self._stopped = stopped
        self._pause = pause
        self._listed = listed

    def run(self, fresh: bool) -> bool:
        """Compare everything, unless another process did. False if it was stopped before the end. Raises StoreError."""
        if (boot := boot_of_index(self._index.file)) and self._index.compared(_soon(), boot):
            return True
        if fresh and self._files.remove_format_1():
            log.warning("%s had blocks of format 1, which cannot be read: they were removed", self._files.folder)
        if not fresh and self._index.journal == "wal":  # with other journals a long read would block writers
            self._index.check(_soon())
        self._check_rows()
        with _unlisted_files(self._files) as unlisted:
            self._list(unlisted)
            if self._stopped.is_set():
                return False
            with self._index.write(_soon()) as transaction:
                transaction.set_unlisted(unlisted.bytes)
            self._listed()
            for batch in unlisted.batches(_ROWS):
                if self._stopped.is_set():
                    return False
                started = time.monotonic()
                self._add(batch)
                self._pause(time.monotonic() - started)
        if self._stopped.is_set():
            return False
        with self._index.write(_soon()) as transaction:
            transaction.set_unlisted(None)
            transaction.note_boot(boot)
            transaction.take_pins()
        remove_file(self._index.file + OLD)
        return True

    def _check_rows(self) -> None:
        last = 0
        while not self._stopped.is_set():
            started = time.monotonic()
            rows = self._index.rows_after(last, _ROWS, _soon())
            if not rows:
                return
            wrong = [id_ for _, id_, name, size, place in rows if self._files.size(name, place) != size]
            if wrong:
                self._discard(wrong)
            last = rows[-1][0]
            self._pause(time.monotonic() - started)

    def _discard(self, ids: Sequence[int]) -> None:
        with self._index.write(_soon()) as transaction:
            rows = transaction.find(ids).values()
            wrong = [row for row in rows if self._files.size(row.name, row.place) != row.size]
            self._files.remove([(row.name, row.place) for row in wrong], on_error=skip)
            transaction.remove(wrong)
            self._notes["missing"] += len(wrong)

    def _list(self, unlisted: UnlistedFiles) -> None:
        """Find the files that the index lacks, and remove those that dead processes did not complete."""
        walk = self._files.walk(on_error=skip)
        while batch := list(itertools.islice(walk, _ROWS)):
            if self._stopped.is_set():
                return
            for file in batch:
                if file.broken or (file.token is not None and not is_alive(self._files.folder, file.token)):
                    _try_to_remove(file.path)
            started = time.monotonic()
            complete = [file for file in batch if file.token is None and not file.broken]
            known = self._index.places_of([block_id(file.name) for file in complete], _soon())
            unlisted.add([file for file in complete if block_id(file.name) not in known])
            twice = [file for file in complete if known.get(block_id(file.name), file.place) != file.place]
            if twice:
                unlisted.add(self._remove_copies(twice))
            self._pause(time.monotonic() - started)

    def _remove_copies(self, found: Sequence[BlockFile]) -> list[BlockFile]:
        """Remove copies of blocks that the index has in another place: two processes have written them, each for an index of
        its own. Where a loss of power has damaged the one that the index has, that is removed, and the other one returned."""
        ids, better, gone = [block_id(file.name) for file in found], list[BlockFile](), list[BlockRow]()
        with self._index.write(_soon()) as transaction:
            rows, pending = transaction.find(ids), transaction.find_pending(ids)
            for id_, file in zip(ids, found, strict=True):
                same = id_ in pending and pending[id_].is_at(file.place)
                if same or id_ not in rows or rows[id_].place == file.place:
                    continue
                row = rows[id_]
                path = self._files.piece_path(row.name, row.piece) if row.piece else self._files.path(row.name)
                kept = BlockFile(row.name, path, None, row.size, 0.0, row.place)
                if read_block_header(file) is None or read_block_header(kept) is not None:
                    self._files.remove([(file.name, file.place)], on_error=skip)
                elif self._files.remove([(row.name, row.place)], on_error=skip) != [None]:
                    gone.append(rows.pop(id_))
                    better.append(file)
            transaction.remove(gone)  # at once: a removal changes how many children the others have
        return better

    def _add(self, batch: Sequence[BlockFile]) -> None:
        headers = [read_block_header(file) for file in batch]
        ids = [block_id(file.name) for file in batch]
        with self._index.write(_soon()) as transaction:
            known = {id_: row.place for id_, row in transaction.find(ids).items()}
            pending = transaction.find_pending(ids)
            found: list[PendingRow] = []
            for id_, file, header in zip(ids, batch, headers, strict=True):
                if self._files.size(file.name, file.place) != file.size:  # removed in the meantime
                    continue
                if known.get(id_) == file.place or (id_ in pending and pending[id_].is_at(file.place)):
                    continue
                if header is None or id_ in known or id_ in pending:  # damaged, or a second copy
                    self._files.remove([(file.name, file.place)], on_error=skip)
                    continue
                known[id_] = file.place
                used = min(max(int(file.modified * 1e6), 1), transaction.clock)
                found.append(pending_row(id_, header, file.size, used, file.modified, place=file.place))
            transaction.set_unlisted(transaction.unlisted() - sum(file.size for file in batch))
            transaction.add_found(found)
            self._notes["found"] += len(found)


def _soon() -> float:
    return time.monotonic() + _STEP_SECONDS


def _try_to_remove(path: str) -> None:
    with contextlib.suppress(StoreError):
        remove_file(path)


class IndexOpener:
    """Keeps the index of one folder open.

    Args:
        notes: counters `recovered`, `rebuilt`, `found` and `missing` to increment.
        opened: called each time the index was opened.

    Attributes:
        openings: how often an index was opened and known to list all blocks.
    """

    def __init__(self, index: DiskIndex, files: BlockFiles, notes: Counter[str], opened: Callable[[], None]) -> None:
        self._index = index
        self._files = files
        self._notes = notes
        self._opened = opened
        self._reported = False
        self.openings = 0
        self.after_fork()

    def after_fork(self) -> None:
        """In the child: the thread belongs to the parent."""
        self._complete = False
        self._listed = False
        self._fresh = True
        self._began = 0.0
        self._steps = 0
        self._long = False
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: StoreError | None = None  # why the index could not be opened last

    def complete(self) -> bool:
        """Whether the index is open and lists all blocks. If not, a thread works on that."""
        done = self._index.usable() and self._complete
        if not done:
            self._start()
        return done

    @property
    def was_complete(self) -> bool:
        """Whether it was complete when that was last found out, without a look at the files."""
        return self._complete and not self._index.broken

    def writable(self) -> bool:
        """Whether blocks may be written: the index knows nearly all blocks or their bytes, so the budget can be kept."""
        return self.complete() or (self._index.usable() and (self._listed or self._listed_by_another()))

    def _listed_by_another(self) -> bool:
        """Whether another process has listed the files since it made the index."""
        with contextlib.suppress(StoreError):
            self._listed = self._index.listed(time.monotonic() + _QUERY_TIMEOUT)
        return self._listed

    def _note_listed(self) -> None:
        with self._changed:
            self._listed = True
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait for a state, unless there are many blocks: a rebuild may take minutes. Returns whether it is reached."""
        if ready():
            return True
        limit = min(deadline, self._began + _LONGEST_WAIT)
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self._long or ready(), max(0.0, limit - time.monotonic())
            )
        return ready()

    def _do_not_wait(self) -> None:
        """Let calls that wait continue without the index."""
        with self._changed:
            self._long = True
            self._changed.notify_all()

    def stop(self, seconds: float) -> None:
        self._stopped.set()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None or self._stopped.is_set():
                return
            self._began = time.monotonic()
            self._steps = 0
            self._long = False
            self._thread = background_thread(self._run, "index", bound=False)

    def _run(self) -> None:
        while not self._stopped.is_set():
            error = self._step()
            done = error is None
            with self._changed:
                self.failure = None if isinstance(error, BrokenIndex) else error
                if done:
                    self._thread = None
                self._changed.notify_all()
            if done:
                return
            self._stopped.wait(self._delay(error))
        with self._changed:
            self._thread = None

    def _step(self) -> StoreError | None:
        """Open the index and compare it with the files. Returns what failed."""
        try:
            if not self._index.usable():
                self._complete = self._listed = False
                self._open()
            if not self._complete:
                self._complete = self._scan()
        except OSError as error:
            return self._report(store_error(error))
        except StoreError as error:
            return self._report(error)
        self._reported = False
        self.openings += self._complete
        return None

    def _delay(self, error: StoreError | None) -> float:
        """Seconds until the next attempt. Makes room on a full disk."""
        # Rebuilds that there may have been by now without a pause.
        few = self._notes["rebuilt"] < 3 + (time.monotonic() - self._began) / _RETRY
        if isinstance(error, BrokenIndex) and few:
            return 0.0
        if isinstance(error, DiskFull) and remove_oldest_files(self._files, _FILES_FOR_ROOM):
            return _RETRY_SOON
        return _RETRY

    def _report(self, error: StoreError) -> StoreError:
        if not self._reported:
            self._reported = True
            log.warning(
                "the index of %s cannot be used now; blocks are read by the names of their files: %s",
                self._files.folder,
                error.message,
            )
        return error

    def _open(self) -> None:
        make_folder(self._files.folder)
        deadline = time.monotonic() + _OPEN_TIMEOUT
        with folder_lock(self._files.folder, deadline):
            try:
                if self._index.known_broken():
                    raise BrokenIndex("the index was found to be broken")
                opened = open_index(self._index, self._files, deadline)
            except BrokenIndex as error:
                self._notes["rebuilt"] += 1
                # No pin of a broken index is believed: the records of leases are (`prefixes/pins.py`).
                quarantine_index(self._index.file, OLD if isinstance(error, OldIndex) else ".broken")
                opened = open_index(self._index, self._files, deadline)
            # The process that replaced the index may have died since.
            if opened.fresh and (pins := read_pins(self._index.file + OLD, time_left(deadline))):
                with self._index.write(deadline) as transaction:
                    transaction.keep_pins(pins)
        self._notes["recovered"] += opened.recovered
        self._fresh = opened.fresh
        self._listed = not opened.fresh
        self._complete = opened.complete
        self._opened()
        with self._changed:
            self._changed.notify_all()

    def _scan(self) -> bool:
        """Compare the index with the files, unless another process does. False if the store was closed before the end."""
        if os.path.getsize(self._index.file) > _LARGE_INDEX:
            self._do_not_wait()
        with scan_lock(self._files.folder, self._stopped, self._do_not_wait) as locked:
            if not locked:
                return False
            scan = FolderScan(self._index, self._files, self._notes, self._stopped, self._pause, self._note_listed)
            return scan.run(self._fresh)

    def _pause(self, seconds: float) -> None:
        """After a step of a long scan: let others have the interpreter and the index for half as long as the step took.

        (With a lower priority instead, this thread would keep others from the interpreter while it waits for a core.)
        """
        self._steps += 1
        if self._steps > _FEW_STEPS and time.monotonic() - self._began > _PATIENCE:
            self._do_not_wait()
            self._stopped.wait(min(seconds / 2, _LONGEST_PAUSE))
