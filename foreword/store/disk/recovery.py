"""Recovery of a disk store: after a crash of a process or of the machine, and when the index is lost or broken."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.errors import StoreError, StoreUnavailable
from foreword.store.disk.files import BlockFile, BlockFiles, read_block_header, remove_file
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import IndexTransaction, PendingRow, block_id, pending_row
from foreword.store.disk.locks import is_alive, remove_dead_lock

log = logging.getLogger("foreword.store")

_ROWS: Final = 512
_FILES: Final = 128  # of one transaction
_STEP_SECONDS: Final = 30.0  # limit of one transaction, mostly of waiting for other processes
_OLDEST_OF: Final = 4096


@dataclass(frozen=True, slots=True)
class OpenedIndex:
    """What is known of an index that was opened.

    Attributes:
        recovered: number of blocks that dead processes were writing.
        complete: whether it lists all blocks. If not, a `FolderScan` must compare it with the files.
        fresh: whether it was made just now, or its maker has not ended the scan: then most blocks may be unknown to it.
    """

    recovered: int
    complete: bool
    fresh: bool


def open_index(index: DiskIndex, files: BlockFiles, deadline: float) -> OpenedIndex:
    """Open the index. The caller holds the folder lock. Raises StoreError."""
    index.open(deadline)
    host, boot = boot_of_host()
    with index.write(deadline) as transaction:
        boots = transaction.boots()
        # After a crash of the machine, SQLite's last transactions may be lost.
        complete = bool(boots) and boots.get(host, boot) == boot
        if complete:
            transaction.note_boot(host, boot)
        return OpenedIndex(recover_dead_writers(transaction, files, ours=0), complete, not boots)


def boot_of_host() -> tuple[str, str]:
    """The name of the host and the id of its current boot ("" if the system has none)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


def quarantine_index(file: str) -> None:
    """Rename a broken index to `*.broken` for inspection; it is rebuilt from the blocks. Raises StoreUnavailable.

    Its log is removed first: SQLite would apply an old log to the new index.
    """
    for suffix in ("-wal", "-shm", "-journal", ".broken"):
        remove_file(file + suffix)
    try:
        os.replace(file, file + ".broken")
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailable(f"the index is broken and cannot be renamed: {error}") from error


def remove_oldest_files(files: BlockFiles, count: int) -> int:
    """Remove the oldest of the first few thousand files, without the index. Returns how many were removed.

    For a disk that is so full that the index cannot be opened.
    """
    found = list(itertools.islice(files.walk(skip_damaged=True), _OLDEST_OF))
    oldest = sorted(found, key=lambda file: file.modified)[:count]
    return sum(remove_file(file.path) for file in oldest)


class FolderScan:
    """Compares the index with the files, in small steps, while this and other processes use the store.

    It removes rows whose file is missing or has another length, adds rows for sound blocks, and removes other files.

    Args:
        stopped: when it is set, `run` ends early.
        pause: called after each step with the seconds that it took.
    """

    def __init__(
        self,
        index: DiskIndex,
        files: BlockFiles,
        notes: Counter[str],
        stopped: threading.Event,
        pause: Callable[[float], None],
    ) -> None:
        self._index = index
        self._files = files
        self._notes = notes
        self._stopped = stopped
        self._pause = pause

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
        self._check_files()
        if self._stopped.is_set():
            return False
        with self._index.write(_soon()) as transaction:
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

    def _check_files(self) -> None:
        walk = self._files.walk(skip_damaged=True)
        while batch := list(itertools.islice(walk, _ROWS)):
            if self._stopped.is_set():
                return
            for file in batch:
                if file.token is not None and not is_alive(self._files.folder, file.token):
                    _try_to_remove(file.path)
            started = time.monotonic()
            complete = {block_id(file.name): file for file in batch if file.token is None}
            known = self._index.present(list(complete), _soon())
            unknown = [file for id_, file in complete.items() if id_ not in known]
            self._pause(time.monotonic() - started)
            for first in range(0, len(unknown), _FILES):
                started = time.monotonic()
                self._add(unknown[first : first + _FILES])
                self._pause(time.monotonic() - started)

    def _add(self, unknown: Sequence[BlockFile]) -> None:
        headers = [read_block_header(file) for file in unknown]
        ids = [block_id(file.name) for file in unknown]
        with self._index.write(_soon()) as transaction:
            known = transaction.find(ids).keys() | transaction.find_pending(ids).keys()
            found: list[PendingRow] = []
            for id_, file, header in zip(ids, unknown, headers, strict=True):
                if id_ in known or self._files.size(file.name) != file.size:  # written or removed in the meantime
                    continue
                if header is None:
                    _try_to_remove(file.path)
                    continue
                used = min(max(int(file.modified * 1e6), 1), transaction.clock)
                found.append(pending_row(id_, header, file.size, used, file.modified))
            transaction.add_found(found)
            self._notes["found"] += len(found)


def _soon() -> float:
    return time.monotonic() + _STEP_SECONDS


def _try_to_remove(path: str) -> None:
    with contextlib.suppress(StoreError):
        remove_file(path)


def recover_dead_writers(transaction: IndexTransaction, files: BlockFiles, ours: int) -> int:
    """Finish or roll back the writes of dead processes. Returns the number of their blocks. `ours` is our writer id."""
    count = 0
    for writer, token in transaction.writers().items():
        if writer == ours or is_alive(files.folder, token):
            continue
        rows = transaction.unfinished(writer)
        for row in rows:
            files.remove(row.name, token)
            if files.size(row.name) != row.size:
                files.remove(row.name)
        transaction.finish(row for row in rows if files.size(row.name) == row.size)
        transaction.drop(row for row in rows if files.size(row.name) != row.size)
        count += len(rows)
        transaction.unregister(writer)
        remove_dead_lock(files.folder, token)
    return count
