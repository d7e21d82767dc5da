"""The names of the blocks in a memory store, in memory that other processes of the host read: the scheduler of an engine looks
up what is in the memory of its workers without a call.

A table of buckets, each of a few cells. A cell has the id of a name or nothing, and is written at once. Ids stay in place,
so a reader needs no lock:

    a name is entered before its block is found in the store, and cleared after the block is no longer found

A bucket that once had no free cell says nothing any more. With four blocks to a bucket of sixteen that is about one bucket in a
million.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import xxhash

from foreword.store.base import Name

_CELL: Final = 8
_CELLS: Final = 16  # of a bucket
_BLOCKS_PER_BUCKET: Final = 4
_FULL: Final = (1 << 64) - 1  # in the last cell of a bucket: it has had more names than cells
_HEADER: Final = mmap.PAGESIZE
_MAGIC: Final = int.from_bytes(b"FWNAMES1", "little")
_CLOSED: Final = _FULL  # in place of the number of buckets


def _id_of(name: Name) -> int:
    """Not 0, and not `_FULL`."""
    return (xxhash.xxh3_64_intdigest(name) >> 1) + 1


class NameTable:
    """The table of a store that this process has (`memory_store.SharedNames`).

    Raises OSError where the system has no memory that processes share by a file descriptor.

    Attributes:
        path: where other processes of the same user open it, for as long as this process has it.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("foreword-names")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _HEADER)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._cells = _map(self._file, _HEADER)
        self._cells[0] = _MAGIC
        self._buckets = 0

    def start(self, slots: int, names: Sequence[Name] = ()) -> None:
        """Make room for so many blocks, once: until now the store could have none."""
        buckets = -(-slots // _BLOCKS_PER_BUCKET)
        size = _HEADER + buckets * _CELLS * _CELL
        os.ftruncate(self._file, size)
        self._cells, self._buckets = _map(self._file, size), buckets
        for name in names:
            self.add(name)
        self._cells[1] = buckets  # from here on readers look into them

    def add(self, name: Name) -> None:
        """A block is about to be found."""
        if not self._buckets:
            return
        one = _id_of(name)
        first = _first_cell(one, self._buckets)
        bucket = self._cells[first : first + _CELLS].tolist()
        free = bucket.index(0) if 0 in bucket else -1
        if free < 0:
            self._cells[first + _CELLS - 1] = _FULL
        else:
            self._cells[first + free] = one

    def discard(self, name: Name) -> None:
        """A block is no longer found."""
        if not self._buckets:
            return
        one = _id_of(name)
        first = _first_cell(one, self._buckets)
        bucket = self._cells[first : first + _CELLS].tolist()
        if one in bucket:
            self._cells[first + bucket.index(one)] = 0

    def close(self) -> None:
        """Nothing is known any more."""
        self._buckets = 0
        self._cells[1] = _CLOSED


class NamesElsewhere:
    """The table of a store that another process has, opened at its path when it is first asked. Calls never raise or wait."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._cells: memoryview | None = None
        self._buckets = 0

    def known(self, names: Sequence[Name]) -> list[bool | None]:
        """Whether the store has each name; None: not known."""
        cells, buckets = self._open()
        if cells is None or buckets == _CLOSED:
            return [None] * len(names)
        if not buckets:
            return [False] * len(names)
        told: list[bool | None] = []
        for name in names:
            one = _id_of(name)
            first = _first_cell(one, buckets)
            bucket = cells[first : first + _CELLS].tolist()
            told.append(True if one in bucket else None if bucket[-1] == _FULL else False)
        return told

    def _open(self) -> tuple[memoryview | None, int]:
        """The cells, and the number of buckets now."""
        try:
            if self._cells is None:
                self._cells = self._mapped(_HEADER)
            buckets = int(self._cells[1])
            if buckets not in (self._buckets, _CLOSED):
                self._cells, self._buckets = self._mapped(_HEADER + buckets * _CELLS * _CELL), buckets
        except (OSError, ValueError):
            return None, 0
        return self._cells, buckets

    def _mapped(self, size: int) -> memoryview:
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            cells = _map(file, size, mmap.PROT_READ)
        finally:
            os.close(file)
        if cells[0] != _MAGIC:
            raise ValueError(f"{self._path}: not a table of names")
        return cells


def _map(file: int, size: int, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> memoryview:
    return memoryview(mmap.mmap(file, size, prot=access)).cast("Q")


def _first_cell(one: int, buckets: int) -> int:
    return _HEADER // _CELL + one % buckets * _CELLS
