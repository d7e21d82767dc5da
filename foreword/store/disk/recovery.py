"""Recovery of a disk store: after a crash of a process or of the machine, and when the index is lost or broken."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from foreword.errors import StoreUnavailable
from foreword.store.base import Name
from foreword.store.disk.files import BlockFile, BlockFiles, read_block_header, remove_file
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import IndexTransaction, check
from foreword.store.disk.locks import is_alive, remove_dead_lock


def open_index(index: DiskIndex, files: BlockFiles, deadline: float) -> int:
    """Open the index and reconcile it with the files if necessary. Returns the number of recovered blocks.

    The caller holds the folder lock and has no write in progress. Raises StoreError.
    """
    index.open(deadline)
    host, boot = boot_of_host()
    with index.write(deadline) as transaction:
        boots = transaction.boots()
        if boots.get(host, boot) != boot:  # the machine may have crashed and lost SQLite's last transactions
            check(transaction.connection)
            reconcile(transaction, files)
        elif not boots:  # the index is new, or its creator died before it reconciled
            reconcile(transaction, files)
        transaction.note_boot(host, boot)
        return recover_dead_writers(transaction, files, ours=0)


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
    for suffix in ("-wal", "-shm", "-journal"):
        remove_file(file + suffix)
    try:
        os.replace(file, file + ".broken")
    except OSError as error:
        raise StoreUnavailable(f"the index is broken and cannot be renamed: {error}") from error


def reconcile(transaction: IndexTransaction, files: BlockFiles) -> None:
    """Compare all files with the index: add rows for sound blocks, remove other files, remove rows without a file."""
    rows = transaction.all_rows()
    pending = {row.name for writer in transaction.writers() for row in transaction.unfinished(writer)}
    sound: set[Name] = set()
    unknown: list[BlockFile] = []
    for file in files.walk():
        row = rows.get(file.name)
        if file.token is not None:
            if not is_alive(files.folder, file.token):
                remove_file(file.path)
        elif row is None and file.name not in pending:
            unknown.append(file)
        elif row is None or row.size == file.size:
            sound.add(file.name)
        else:
            remove_file(file.path)
    for row in rows.values():
        if row.name not in sound:
            transaction.remove(row)
    for file in sorted(unknown, key=lambda file: file.modified):  # the one written last counts as used last
        header = read_block_header(file)
        if header is None or not transaction.add_found(header, file.size, transaction.tick(), file.modified):
            remove_file(file.path)
    transaction.recount()


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
