"""Compares the index of a disk store with the files of its folder, and rebuilds an index that was lost."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Final, Self

from foreword.errors import StoreError
from foreword.store.disk.files import (
    BlockFile,
    BlockFiles,
    make_folder,
    read_block_header,
    readable_size,
    remove_file,
    skip,
)
from foreword.store.disk.index import DiskIndex, translate
from foreword.store.disk.index_rows import PendingRow, block_id, pending_row
from foreword.store.disk.locks import is_alive
from foreword.store.disk.recovery import boot_of_host

_SCHEMA: Final = (
    "CREATE TABLE files (modified INTEGER, name BLOB, size INTEGER, PRIMARY KEY (modified, name)) WITHOUT ROWID"
)
_CACHE_KIB: Final = 32 << 10


class UnlistedFiles:
    """A scratch database of complete block files: sorts any number of them in constant memory.

    The order is that of writing, so parents come before children, the blocks of a chain are adjacent, and their headers
    lie near each other on the disk. The database has no name in the folder and vanishes with the process.

    Attributes:
        bytes: the sizes of all files.
    """

    def __init__(self, files: BlockFiles) -> None:
        self.bytes = 0
        self._files = files
        self._path = f"{files.folder}/unlisted.sqlite"

    def __enter__(self) -> Self:
        make_folder(self._files.folder)
        remove_file(self._path)
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
            for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
                self._database.execute(f"PRAGMA {pragma}").fetchone()
            self._database.execute(_SCHEMA)
            self._database.execute("BEGIN")
        except sqlite3.Error as error:
            raise translate(error, self._path) from error
        finally:
            remove_file(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def add(self, found: Sequence[BlockFile]) -> None:
        """Add files. Raises StoreError."""
        rows = [(int(file.modified * 1e6), file.name, file.size) for file in found]
        try:
            self._database.executemany("INSERT OR IGNORE INTO files VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise translate(error, self._path) from error
        self.bytes += sum(file.size for file in found)

    def batches(self, count: int) -> Iterator[list[BlockFile]]:
        """All files, the oldest first. Raises StoreError."""
        sql = "SELECT modified, name, size FROM files ORDER BY modified, name"
        with closing(self._database.execute(sql)) as cursor:
            try:
                while rows := cursor.fetchmany(count):
                    yield [
                        BlockFile(name, self._files.path(name), None, size, modified / 1e6)
                        for modified, name, size in rows
                    ]
            except sqlite3.Error as error:
                raise translate(error, self._path) from error


log = logging.getLogger("foreword.store")

_ROWS: Final = 512
_STEP_SECONDS: Final = 30.0  # limit of one transaction, mostly of waiting for other processes


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
        if self._index.compared(_soon(), *boot_of_host()):
            return True
        if fresh and self._files.remove_format_1():
            log.warning(
                "%s had blocks of format 1, which this program cannot read: they were removed", self._files.folder
            )
        if not fresh and self._index.journal == "wal":  # with other journals a long read would block writers
            self._index.check(_soon())
        self._check_rows()
        with UnlistedFiles(self._files) as unlisted:
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
            transaction.note_boot(*boot_of_host())
        return True

    def _check_rows(self) -> None:
        last = 0
        while not self._stopped.is_set():
            started = time.monotonic()
            rows = self._index.rows_after(last, _ROWS, _soon())
            if not rows:
                return
            wrong = [id_ for _, id_, name, size in rows if self._files.size(name) != size]
            if wrong:
                self._discard(wrong)
            last = rows[-1][0]
            self._pause(time.monotonic() - started)

    def _discard(self, ids: Sequence[int]) -> None:
        with self._index.write(_soon()) as transaction:
            for row in transaction.find(ids).values():
                if self._files.size(row.name) != row.size:
                    with contextlib.suppress(StoreError):
                        self._files.remove(row.name)
                    transaction.remove(row)
                    self._notes["missing"] += 1

    def _list(self, unlisted: UnlistedFiles) -> None:
        """Find the files that the index lacks, and remove those that dead processes did not complete."""
        walk = self._files.walk(on_error=skip)
        while batch := list(itertools.islice(walk, _ROWS)):
            if self._stopped.is_set():
                return
            for file in batch:
                if file.token is not None and not is_alive(self._files.folder, file.token):
                    _try_to_remove(file.path)
            started = time.monotonic()
            complete = {block_id(file.name): file for file in batch if file.token is None}
            known = self._index.present(list(complete), _soon())
            unlisted.add([file for id_, file in complete.items() if id_ not in known])
            self._pause(time.monotonic() - started)

    def _add(self, batch: Sequence[BlockFile]) -> None:
        headers = [read_block_header(file) for file in batch]
        ids = [block_id(file.name) for file in batch]
        with self._index.write(_soon()) as transaction:
            known = transaction.find(ids).keys() | transaction.find_pending(ids).keys()
            found: list[PendingRow] = []
            for id_, file, header in zip(ids, batch, headers, strict=True):
                if id_ in known or readable_size(file.path) != file.size:  # written or removed in the meantime
                    continue
                if header is None:
                    _try_to_remove(file.path)
                    continue
                used = min(max(int(file.modified * 1e6), 1), transaction.clock)
                found.append(pending_row(id_, header, file.size, used, file.modified))
            transaction.set_unlisted(transaction.unlisted() - sum(file.size for file in batch))
            transaction.add_found(found)
            self._notes["found"] += len(found)


def _soon() -> float:
    return time.monotonic() + _STEP_SECONDS


def _try_to_remove(path: str) -> None:
    with contextlib.suppress(StoreError):
        remove_file(path)
