"""The files that the index of a disk store lacks, in the order of their last change."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Final, Self

from foreword.store.disk.files import BlockFile, BlockFiles, make_folder, remove_file
from foreword.store.disk.index import translate

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
