"""Deletions of a disk store that a loss of power does not undo."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from foreword.store.disk import pieces
from foreword.store.disk.files import digit_folders, entries_of, raise_error, sync_path

# Within this the system has written to the device what a file got, however busy it is. A clock that is set forward by more
# between a deletion and its erasure's sync hides a piece from it.
_WRITTEN_BACK_SECONDS: Final = 3600.0


def steps(folder: str, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool) -> Iterator[None]:
    """Write what was deleted to the device, as `Store.sync_deletions` says, a file or folder a step. Raises StoreError."""
    for layout, root in prefixes:
        yield from map(sync_path, _with_blocks(folder, layout, root))
    if records:
        yield from map(sync_path, _with_records(f"{folder}/records", [root for _, root in prefixes]))


def _with_blocks(folder: str, layout: bytes, root: bytes) -> Iterator[str]:
    """The folders of these layouts and roots, and their pieces that were changed lately, by any process. Raises StoreError."""
    since = time.time() - _WRITTEN_BACK_SECONDS
    for outer in digit_folders(folder, layout, raise_error):
        for inner in digit_folders(outer, root, raise_error):
            for part in entries_of(inner, raise_error):
                for piece in entries_of(part.path, raise_error) if part.name == pieces.FOLDER else ():
                    if _modified(piece) > since:
                        yield piece.path
                yield part.path
            yield inner
        yield outer
    yield folder


def _with_records(folder: str, roots: Sequence[bytes]) -> Iterator[str]:
    """The folders of records of tenants with these first bytes of digests, and those above. Raises StoreError."""
    wanted = tuple(root.hex() for root in roots)
    for kind in _folders(folder):
        for scope in _folders(kind.path):
            yield from (one.path for one in _folders(scope.path) if one.name.startswith(wanted))
            yield scope.path
        yield kind.path
    yield folder


def _folders(path: str) -> Iterator[os.DirEntry[str]]:
    for entry in entries_of(path, raise_error):
        with contextlib.suppress(OSError):  # it was removed
            if entry.is_dir():
                yield entry


def _modified(entry: os.DirEntry[str]) -> float:
    """When a file was written last; 0 if it was removed."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
