"""Deletions of a disk store that a loss of power does not undo."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Final

from foreword.store.disk import pieces
from foreword.store.disk.files import digit_folders, entries_of, raise_error, sync_path

# More are not synced one by one: each has the device empty its cache, for milliseconds, also a piece that was not changed.
_MOST_PIECES: Final = 64


def steps(folder: str, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool) -> Iterator[None]:
    """Write what was deleted to the device, as `Store.sync_deletions` says, a file or folder a step. Raises StoreError."""
    for layout, root in prefixes:
        yield from map(sync_path, _with_blocks(folder, layout, root))
    if records:
        yield from map(sync_path, _with_records(f"{folder}/records", [root for _, root in prefixes]))


def _with_blocks(folder: str, layout: bytes, root: bytes) -> Iterator[str]:
    """The folders of these layouts and roots, and all their pieces. Raises StoreError."""
    for outer in digit_folders(folder, layout, raise_error):
        for inner in digit_folders(outer, root, raise_error):
            for part in entries_of(inner, raise_error):
                # All: only a clock would say which were changed, by whatever process.
                found = entries_of(part.path, raise_error) if part.name == pieces.FOLDER else ()
                paths = [piece.path for piece in found]
                if len(paths) <= _MOST_PIECES or not _synced_at_once(part.path):
                    yield from paths
                yield part.path
            yield inner
        yield outer
    yield folder


def _synced_at_once(folder: str) -> bool:
    """Write all that waits in the file system of a folder to the device. False where the system cannot, or does not say so."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return not ctypes.CDLL(None).syncfs(handle)
        finally:
            os.close(handle)
    except (OSError, AttributeError):
        return False


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
