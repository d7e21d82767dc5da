"""Pins of a disk store's index of an earlier format, which lie beside the index until the one that replaces it has them: a
process may die between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3

from foreword.blocks.layout import NAME_BYTES
from foreword.store.disk.files import remove_file, write_atomically, write_back
from foreword.store.disk.index import DiskIndex
from foreword.store.disk.index_rows import block_id
from foreword.store.disk.recovery import PINS


def note_pins(file: str, seconds: float) -> None:
    """Write the pins of an index that is about to be replaced beside it, if it can be read. Raises StoreError."""
    if pins := read_pins(file, seconds):
        noted, folder = file + PINS, os.path.dirname(file)
        write_atomically(noted, noted + ".part", json.dumps(pins).encode(), sync=True)
        write_back(folder, folder)


def read_pins(file: str, seconds: float) -> list[int]:
    """Ids of the pinned blocks of a sound index of an earlier format, none if it cannot be read."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(file, timeout=seconds, isolation_level=None)) as connection,
    ):
        if connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
            found = connection.execute("SELECT name FROM blocks WHERE pinned = 1").fetchall()
            return [block_id(name) for (name,) in found if isinstance(name, bytes) and len(name) == NAME_BYTES]
    return []


def take_noted_pins(index: DiskIndex, deadline: float) -> None:
    """Give the new index the pins that lie beside it. The caller holds the folder lock. Raises StoreError."""
    noted = index.file + PINS
    ids: list[int] = []
    with contextlib.suppress(OSError, ValueError, TypeError), open(noted, "rb") as file:  # else it keeps nothing
        ids = [int(id_) for id_ in json.load(file)]
    if ids:
        with index.write(deadline) as transaction:
            transaction.keep_pins(ids)
    remove_file(noted)
