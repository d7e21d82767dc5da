"""Bringing a disk store's index and its files together, as far as somebody may have left them apart.

After a crash of the machine, or where the index is new, every file is looked at (`compare`). What a process was writing when it
died is finished or taken back by the next one that comes by (`bury`). A broken index is put beside a new one (`set_aside`).
"""

from __future__ import annotations

import os

from foreword.errors import StoreUnavailable
from foreword.store.base import Name
from foreword.store.disk.files import Files, Found, boot_of_host, header_of, is_alive, remove_file, remove_presence
from foreword.store.disk.index import Index
from foreword.store.disk.index_rows import Transaction


def take_over(index: Index, files: Files, deadline: float) -> int:
    """Open the index, and bring it and the files together; returns how many blocks dead processes had in hand. The caller
    writes nothing yet, and keeps others from opening the folder meanwhile. Raises StoreError."""
    index.open(deadline)
    host, boot = boot_of_host()
    with index.write(deadline) as transaction:
        boots = transaction.boots()
        if boots.get(host, boot) != boot:  # the machine crashed, perhaps, and SQLite's last transactions are lost
            transaction.check()
            compare(transaction, files)
        elif not boots:  # it is new, or whoever made it did not live to do this
            compare(transaction, files)
        transaction.note_boot(host, boot)
        return bury(transaction, files, ours=0)


def set_aside(file: str) -> None:
    """A broken index, for who wants to know why; the blocks tell what was in it. Its log goes first: a new index beside an
    old log would be given what that says. Raises StoreUnavailable."""
    for end in ("-wal", "-shm", "-journal"):
        remove_file(file + end)
    try:
        os.replace(file, file + ".broken")
    except OSError as error:
        raise StoreUnavailable(f"the index is broken and cannot be set aside: {error}") from error


def compare(transaction: Transaction, files: Files) -> None:
    """Look at every file: adopt sound blocks that have no row, remove other files, forget rows without a file."""
    rows = transaction.all()
    pending = {row.name for writer in transaction.writers() for row in transaction.unfinished(writer)}
    whole: set[Name] = set()
    adopted: list[Found] = []
    for found in files.walk():
        row = rows.get(found.name)
        if found.token is not None:
            if not is_alive(files.folder, found.token):
                remove_file(found.path)
        elif row is None and found.name not in pending:
            adopted.append(found)
        elif row is None or row.size == found.size:
            whole.add(found.name)
        else:
            remove_file(found.path)
    for row in rows.values():
        if row.name not in whole:
            transaction.remove(row)
    _adopt(transaction, adopted)
    transaction.recount()


def _adopt(transaction: Transaction, files: list[Found]) -> None:
    """Rows for files, the latest written used last."""
    for found in sorted(files, key=lambda found: found.modified):
        header = header_of(found)
        if header is None or not transaction.adopt(header, found.size, transaction.tick(), found.modified):
            remove_file(found.path)


def bury(transaction: Transaction, files: Files, ours: int) -> int:
    """Finish or take back what dead processes were writing; returns how many blocks. `ours` is this process's number."""
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
        remove_presence(files.folder, token)
    return count
