"""The files of a disk store.

    <folder>/index.sqlite                                  the index (index.py)
    <folder>/<layout, 32 hex>/<first 2 hex>/<key, 64 hex>  the frame of a block
    <folder>/<...>/<key>.<writer>                          the same while it is being written
    <folder>/records/a=/b~                                 the record a/b (records.py)
    <folder>/writers/<writer>                              locked while that process lives (locks.py)
    <folder>/lock                                          locked while a process opens the folder (locks.py)

A file is renamed to its final name when it is complete. Files have mode 0600, folders 0700. Errors of the system become
StoreError here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.layout import FINGERPRINT_BYTES, NAME_BYTES
from foreword.errors import BadFrame, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from foreword.store.base import Name
from foreword.store.frame import HEADER_BYTES, Header, read_header

_LAYOUT: Final = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_BLOCK: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})(?:\.(.+))?")
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not block
WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file under the name of a block. `token` is that of its writer while the file is incomplete, else None."""

    name: Name
    path: str
    token: str | None
    size: int
    modified: float


def store_error(error: OSError) -> StoreError:
    """Convert an error of the system to a StoreError."""
    if error.errno in _FULL:
        return StoreFull(f"the disk is full: {error}")
    if error.errno in _FORBIDDEN:
        return StoreReadOnly(f"the folder cannot be written: {error}")
    return StoreUnavailable(f"the folder cannot be used: {error}")


class BlockFiles:
    """The block files below `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._layouts: dict[bytes, str] = {}

    def path(self, name: Name) -> str:
        layout = name[:FINGERPRINT_BYTES]
        parent = self._layouts.get(layout)
        if parent is None:
            parent = self._layouts[layout] = f"{self.folder}/{layout.hex()}/"
        key = name[FINGERPRINT_BYTES:].hex()
        return f"{parent}{key[:2]}/{key}"

    def read(self, name: Name, buffer: memoryview) -> int | None:
        """Read a file into `buffer` and return its length.

        Returns None if there is no file, 0 if it does not fit or is not a regular file. Raises StoreError.
        """
        try:
            handle = os.open(self.path(name), _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                return 0
            raise StoreUnavailable(f"a block cannot be read: {error}") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > buffer.nbytes:
                return 0
            return _read_all(handle, buffer, found.st_size)
        except OSError as error:
            raise StoreUnavailable(f"a block cannot be read: {error}") from error
        finally:
            os.close(handle)

    def write(self, name: Name, data: memoryview, token: str) -> None:
        """Write a file completely or not at all. Raises StoreError."""
        path = self.path(name)
        write_atomically(path, f"{path}.{token}", data)

    def size(self, name: Name) -> int:
        """Length of a block's file, -1 if there is none."""
        try:
            return os.stat(self.path(name), follow_symlinks=False).st_size
        except OSError:
            return -1

    def remove(self, name: Name, token: str = "") -> bool:
        """Remove the file of a block, or the incomplete file of the writer `token`. False if there is none."""
        return remove_file(f"{self.path(name)}.{token}" if token else self.path(name))

    def walk(self) -> Iterator[BlockFile]:
        """List all block files, complete or not, in no order."""
        for layout in _folders(self.folder):
            if not _LAYOUT.fullmatch(layout.name):
                continue
            prefix = bytes.fromhex(layout.name)
            for part in _folders(layout.path):
                yield from _block_files(part.path, prefix)


def is_name(name: Name) -> bool:
    """Whether `name` has the length of a block name."""
    return len(name) == NAME_BYTES


def read_block_header(file: BlockFile) -> Header | None:
    """The header of a complete file, or None if name or length do not agree with it."""
    data = bytearray(HEADER_BYTES)
    try:
        handle = os.open(file.path, _READ)
        try:
            length = os.readv(handle, [data])
        finally:
            os.close(handle)
        header = read_header(memoryview(data)[:length])
    except (OSError, BadFrame):
        return None
    return header if header.name == file.name and HEADER_BYTES + header.length == file.size else None


def remove_file(path: str) -> bool:
    """Remove a file. False if there is none. Raises StoreError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(error) from error
    return True


def make_folder(path: str) -> None:
    """Create a folder and its parents. Raises StoreError."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise store_error(error) from error


def write_atomically(path: str, temporary: str, data: bytes | memoryview) -> None:
    """Write `temporary` and rename it to `path`. On an error neither is left. Raises StoreError."""
    view = memoryview(data)
    try:
        handle = _create(temporary)
        try:
            written = os.write(handle, view)
            while written < len(view):
                written += os.write(handle, view[written:])
        finally:
            os.close(handle)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise store_error(error) from error


def _create(path: str) -> int:
    """Open a new file. Missing folders are created with mode 0700 (os.makedirs uses its mode for the last one only)."""
    try:
        return os.open(path, WRITE, 0o600)
    except FileNotFoundError:
        missing = []
        parent = os.path.dirname(path)
        while not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        return os.open(path, WRITE, 0o600)


def _read_all(handle: int, buffer: memoryview, size: int) -> int:
    """Read up to `size` bytes. The file may have become shorter since its size was read."""
    done = os.readv(handle, [buffer[:size]])
    while 0 < done < size:
        more = os.readv(handle, [buffer[done:size]])
        if not more:
            break
        done += more
    return done


def _entries(path: str) -> list[os.DirEntry[str]]:
    """The entries of a folder, none if it does not exist. Raises StoreError."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnavailable(f"a folder cannot be read: {error}") from error


def _folders(path: str) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _block_files(path: str, layout: bytes) -> Iterator[BlockFile]:
    for entry in _entries(path):
        matched = _BLOCK.fullmatch(entry.name)
        if matched is None or not entry.is_file(follow_symlinks=False):
            continue
        key, token = matched.groups()
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat(follow_symlinks=False)
            yield BlockFile(layout + bytes.fromhex(key), entry.path, token, found.st_size, found.st_mtime)
