"""Recovery of a disk store: after a crash of a process or of the machine, and when the index is lost or broken."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from dataclasses import dataclass
from typing import Final

from foreword.errors import StoreUnavailable
from foreword.store.disk.files import BlockFiles, read_block_header, remove_file, skip
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import IndexTransaction, PendingRow, block_id, pending_row
from foreword.store.disk.locks import is_alive, remove_dead_lock
from foreword.store.machine import boot_id

OLD: Final = ".old"  # suffix of an index of an earlier format
_OLDEST_OF: Final = 4096


@dataclass(frozen=True, slots=True)
class OpenedIndex:
    """The state of an index that was opened.

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
    boot = boot_of_index(index.file)
    with index.write(deadline) as transaction:
        boots = transaction.boots()
        # After a crash of the machine, SQLite's last transactions may be lost. Names of hosts say nothing of that: a container
        # has a new one after each start, also in the same boot. A copy of an index, as from a backup, is another file.
        complete = bool(boot) and boot in boots
        return OpenedIndex(recover_dead_writers(transaction, files, ours=0), complete, not boots)


def boot_of_index(file: str) -> str:
    """The boot and the file in which an index is used; "" if the system does not tell."""
    with contextlib.suppress(OSError):  # removed
        return (boot := boot_id()) and f"{boot} {os.stat(file).st_ino}"
    return ""


def quarantine_index(file: str, suffix: str) -> None:
    """Rename an index, which is rebuilt from the blocks: a broken one for inspection, an OLD one until a scan has its pins.
    Its log is removed first: SQLite would apply an old log to the new index. Raises StoreUnavailable."""
    if suffix == OLD:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for other in ("-wal", "-shm", "-journal", ".broken", OLD):
        remove_file(file + other)
    try:
        os.replace(file, file + suffix)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailable(f"the index is broken and cannot be renamed: {error}") from error


def remove_oldest_files(files: BlockFiles, count: int) -> int:
    """Remove the oldest of the first few thousand files, without the index. Returns how many were removed.

    For a disk that is so full that the index cannot be opened.
    """
    found = list(itertools.islice(files.walk(on_error=skip), _OLDEST_OF))
    oldest = sorted(found, key=lambda file: file.modified)[:count]
    return sum(remove_file(file.path) for file in oldest)


def recover_dead_writers(transaction: IndexTransaction, files: BlockFiles, ours: int) -> int:
    """Finish or roll back the writes of dead processes. Returns the number of their blocks. `ours` is our writer id."""
    count = 0
    for writer, token in transaction.writers().items():
        if writer == ours or is_alive(files.folder, token):
            continue
        unfinished = transaction.unfinished(writer)
        rows = [row for row in unfinished if not row.is_piece]
        for piece in (row for row in unfinished if row.is_piece):
            count += _recover_piece(transaction, files, piece, token)
        for row in rows:
            files.remove_whole(row.name, 0, token)
            if files.size(row.name) != row.size:
                files.remove_whole(row.name, 0)
        transaction.finish(row for row in rows if files.size(row.name) == row.size)
        transaction.drop(row for row in rows if files.size(row.name) != row.size)
        count += len(rows)
        transaction.unregister(writer)
        remove_dead_lock(files.folder, token)
    return count


def _recover_piece(transaction: IndexTransaction, files: BlockFiles, piece: PendingRow, token: str) -> int:
    """Finish the write of a piece that is complete, roll back that of one that is not. Returns the number of its blocks."""
    files.remove_whole(piece.name, piece.id, token)
    blocks = list[PendingRow]()
    for file in files.in_piece(piece.name, piece.id):
        header = read_block_header(file)
        if header is None:
            files.remove([(file.name, file.place)])
        else:
            row = pending_row(block_id(file.name), header, file.size, piece.used, piece.stored_at, place=file.place)
            blocks.append(row)
    if blocks:
        transaction.finish_piece(piece, blocks)
    else:
        files.remove_whole(piece.name, piece.id)
        transaction.drop([piece])
    return len(piece.parent) // 8
