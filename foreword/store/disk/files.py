"""The files of a disk store.

    <folder>/index.sqlite                                  the index (index.py)
    <folder>/<layout, 32 hex>/<root, 32 hex>/<first 2 hex>/<key, 64 hex>  the frame of a block
    <folder>/<...>/<key>.<writer>                          the same while it is being written
    <folder>/<layout>/<root>/pieces/<id, 16 hex>           a piece: many blocks (pieces.py), <id>.<writer> while it is written
    <folder>/records/a=/b~                                 the record a/b
    <folder>/writers/<writer>                              locked while that process lives (locks.py)
    <folder>/lock                                          locked while a process opens the folder (locks.py)
    <folder>/scan                                          locked while a process compares index and files (locks.py)

A file is renamed to its final name when it is complete. Files have mode 0600, folders 0700. Errors of the system become
StoreError here.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import c_char_p, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

try:
    import numpy as np
except ModuleNotFoundError:  # the cache alone does not bring it: files are written one by one
    np = None  # type: ignore[assignment]

from foreword import compiled_code
from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES
from foreword.blocks.layout import NAME_BYTES, PREFIX_BYTES, key_of
from foreword.errors import BadFrame, StoreError, StoreFull, StoreReadOnly, StoreUnavailable, StoreUnreadable
from foreword.store.base import BAD, FAILED, MISSING, UNREADABLE, Name, PartialListing, check_record, check_record_key
from foreword.store.disk import pieces
from foreword.store.disk.pieces import ALONE, BadPiece, BlockPlace
from foreword.store.frame import HEADER_BYTES, Header, read_header

_HEX: Final = 2 * FINGERPRINT_BYTES  # digits of a layout or a root
_DIGITS: Final = re.compile(rf"[0-9a-f]{{{_HEX}}}")
_FIRST_DIGITS: Final = re.compile(r"[0-9a-f]{2}")
_PIECE: Final = re.compile(r"([0-9a-f]{16})(?:\.(.+))?")
_BLOCK: Final = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})(?:\.(.+))?")
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not block
_CHANGE: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.ENODEV}  # a link, a socket or a device lies in the place of the file
_UNREADABLE: Final = {errno.EACCES, errno.EPERM, errno.EIO, errno.EUCLEAN}
_CREATE_ATTEMPTS: Final = 5
_REMOVED: Final = frozenset({errno.ENOENT})
# It was removed, it is no folder or file, or the file system does not write single folders back.
_NOTHING_TO_SYNC: Final = _REMOVED | _NO_FILE | {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_FORBIDDEN: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
WRITE_ARGUMENTS: Final = (c_int64, *(c_void_p,) * 4, c_double)
# Records that outlive a loss of power. Without those of namespaces and layouts, blocks are of no use.
_LASTING: Final = ("erasures/", "namespaces/", "layouts/", "prefixes/")

OnError = Callable[[StoreError], None]


def raise_error(error: StoreError) -> None:
    raise error


def skip(error: StoreError) -> None:
    """Go on with the next folder."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file under the name of a block, or a block in a piece.

    Attributes:
        name: of the block; ends with zeros for a piece that is no block, incomplete or broken.
        token: that of its writer while the file is incomplete, else None.
        size: bytes of the frame.
        broken: it is a piece whose table cannot be used, so nothing in it can be found.
    """

    name: Name
    path: str
    token: str | None
    size: int
    modified: float
    place: BlockPlace = ALONE
    broken: bool = False


class DiskFull(StoreFull):
    """The file system has no room for a block or the index: other files must be removed first."""


def store_error(error: OSError) -> StoreError:
    """Convert an error of the system to a StoreError."""
    if error.errno in _FULL:
        return DiskFull(f"the disk is full: {error}")
    if error.errno == errno.EFBIG:
        return StoreFull(f"a file may not grow: {error}")
    if error.errno in _FORBIDDEN:
        return StoreReadOnly(f"the folder cannot be written: {error}")
    return StoreUnavailable(f"the folder cannot be used: {error}")


class BlockFiles:
    """The block files below `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, name: Name) -> str:
        layout, root = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:PREFIX_BYTES]
        parent = f"{self.folder}/{layout.hex()}/{root.hex()}/"
        key = key_of(name).hex()
        return f"{parent}{key[:2]}/{key}"

    def piece_path(self, name: Name, piece: int) -> str:
        """The path of a piece with the layout and root of a block."""
        layout, root = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:PREFIX_BYTES]
        return f"{self.folder}/{layout.hex()}/{root.hex()}/{pieces.FOLDER}/{piece:016x}"

    def find(self, names: Iterable[Name], on_error: OnError = raise_error) -> dict[Name, tuple[BlockPlace, int]]:
        """Place and length of those of these blocks that lie in pieces, by the tables of all pieces of their roots: where no
        index knows it."""
        wanted = {name for name in names if is_name(name)}
        found: dict[Name, tuple[BlockPlace, int]] = {}
        for prefix in {name[:PREFIX_BYTES] for name in wanted}:
            for file in self._walk_pieces(os.path.dirname(self.piece_path(prefix, 0)), prefix, on_error):
                if file.token is None and file.name in wanted:
                    found[file.name] = file.place, file.size
        return found

    def read_piece(self, piece: int, wanted: Sequence[tuple[Name, int, int, memoryview]]) -> list[int]:
        """Read blocks of one piece, given their names, offsets and lengths, into buffers. Returns lengths, as `read` does."""
        try:
            handle = os.open(self.piece_path(wanted[0][0], piece), _READ)
        except OSError as error:
            return [_failed_read(error)] * len(wanted)
        lengths = []
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return [BAD] * len(wanted)
            for _, at, size, buffer in wanted:
                try:
                    os.lseek(handle, at, os.SEEK_SET)
                    length = _read_all(handle, buffer, size) if size <= buffer.nbytes else 0
                    lengths.append(length or BAD)
                except OSError as error:
                    lengths.append(_failed_read(error))
            # Behind the reads: a block that is removed loses its entry first, and its bytes then.
            there = pieces.lengths_at(handle, [(key_of(name), at) for name, at, _, _ in wanted])
            return [length if here > 0 else MISSING for length, here in zip(lengths, there, strict=True)]
        except BadPiece:
            return [MISSING] * len(wanted)
        except OSError as error:
            return [_failed_read(error)] * len(wanted)
        finally:
            os.close(handle)

    def write_piece(self, piece: int, files: Sequence[tuple[Name, memoryview]], token: str) -> None:
        """Write blocks of one layout and root as a piece, completely or not at all. Raises StoreError."""
        names, frames = zip(*files, strict=True)
        path = self.piece_path(names[0], piece)
        with _new_file(path, f"{path}.{token}") as handle:
            pieces.write(handle, [key_of(name) for name in names], frames)

    def in_piece(self, name: Name, piece: int) -> list[BlockFile]:
        """The blocks of a complete piece with the layout and root of `name`; none if there is none. Raises StoreError."""
        path = self.piece_path(name, piece)
        try:
            modified = os.stat(path, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return []
        except OSError as error:
            raise store_error(error) from error
        found = _piece_blocks(path, name[:PREFIX_BYTES], piece, modified)
        return [] if found is None else found

    def makes_holes(self, token: str) -> bool:
        """Whether parts of a file can be freed here: if not, blocks are not put into pieces. Raises StoreError."""
        try:
            return pieces.makes_holes(self.folder, token)
        except OSError as error:
            raise store_error(error) from error

    def remove_probes(self, is_dead: Callable[[str], bool]) -> None:
        """Remove the files of `makes_holes` that dead processes, or a loss of power, have left."""
        for one in entries_of(self.folder, lambda _: None):
            if one.name.startswith(pieces.PROBE) and is_dead(one.name.removeprefix(pieces.PROBE)):
                remove_file(one.path)

    def read(self, name: Name, buffer: memoryview) -> int:
        """Read a file into `buffer`. Returns its length, or MISSING, BAD, FAILED or UNREADABLE as `Store.get` does."""
        try:
            handle = os.open(self.path(name), _READ)
        except OSError as error:
            return _failed_read(error)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= buffer.nbytes:
                return BAD
            return _read_all(handle, buffer, found.st_size) or BAD
        except OSError as error:
            return _failed_read(error)
        finally:
            os.close(handle)

    def write(self, name: Name, data: memoryview, token: str) -> None:
        """Write a file completely or not at all. Raises StoreError."""
        path = self.path(name)
        write_atomically(path, f"{path}.{token}", data)

    def write_many(self, files: Iterable[tuple[Name, memoryview]], token: str, seconds: float) -> int:
        """Write files in one call, in order, as `write` does. Returns how many: the next one is left to `write`, which tells
        what is wrong with it, or `seconds` have passed; 0 without compiled code or NumPy."""
        function = None if np is None else compiled_write()
        if function is None:
            return 0
        names, frames = zip(*files, strict=True)
        count, paths = len(names), [os.fsencode(self.path(name)) for name in names]
        arrays = [np.frombuffer(data, np.uint8) for data in frames]
        return int(
            function(
                count,
                (c_char_p * count)(*(path + b"." + token.encode() for path in paths)),
                (c_char_p * count)(*paths),
                (c_void_p * count)(*(array.ctypes.data for array in arrays)),
                (c_int64 * count)(*map(len, arrays)),
                seconds,
            )
        )

    def replace(self, name: Name, data: memoryview, token: str) -> bool:
        """Write a file of this length again, which cannot be read. False if it has another length. Raises StoreError."""
        with contextlib.suppress(OSError):
            if os.stat(self.path(name), follow_symlinks=False).st_size == len(data):
                self.write(name, data, token)
                return True
        return False

    def free_bytes(self) -> int:
        """Bytes that the file system has for further files; 0 if it has none or cannot tell."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize if found.f_favail or not found.f_files else 0

    def lengths(self, names: Sequence[Name]) -> list[int]:
        """Lengths of blocks wherever they lie, -1 for each that is missing: where no index can be asked."""
        alone = [self.size(name) for name in names]
        inside = self.find([name for name, length in zip(names, alone, strict=True) if length < 0], skip)
        return [inside[name][1] if name in inside else length for name, length in zip(names, alone, strict=True)]

    def size(self, name: Name, place: BlockPlace = ALONE) -> int:
        """Length of a block, in a file of its own or at this place, -1 if no regular file that its owner may read has it."""
        if not place.piece:
            return readable_size(self.path(name))
        path = self.piece_path(name, place.piece)
        if readable_size(path) < 0:
            return -1
        with contextlib.suppress(OSError, BadPiece), os.fdopen(os.open(path, _READ), "rb", 0) as file:
            return pieces.lengths_at(file.fileno(), [(key_of(name), place.at)])[0]
        return -1

    def remove(
        self, blocks: Iterable[tuple[Name, BlockPlace]], *, prune: bool = False, on_error: OnError = raise_error
    ) -> list[bool | None]:
        """Remove blocks from these places, those that follow one another in a piece at once. Returns for each whether it was
        there; None if it cannot be removed, for which `on_error` is called. With `prune`, the folders of keys and roots are
        removed as well if they are empty: who writes there creates them again. Evictions leave them: a file system may take a
        millisecond for each."""
        found: list[bool | None] = []
        grouped = itertools.groupby(blocks, key=lambda one: (one[0][:PREFIX_BYTES], one[1].piece))
        for (prefix, piece), members in grouped:
            for some in [[*members]] if piece else ([one] for one in members):
                path = self.piece_path(prefix, piece) if piece else self.path(some[0][0])
                try:
                    places = {key_of(name): place.at for name, place in some}
                    there = _remove_from_piece(path, places) if piece else places if remove_file(path) else ()
                    if prune:
                        _remove_empty(os.path.dirname(path), path.rsplit("/", 3)[0])
                except StoreError as error:
                    on_error(error)
                    found += [None] * len(some)
                else:
                    found += [key_of(name) in there for name, _ in some]
        return found

    def remove_whole(self, name: Name, piece: int, token: str = "") -> None:
        """Remove a piece with the layout and root of `name`, or, if that is 0, the file of this block alone; with `token`, the
        incomplete one of that writer. Raises StoreError."""
        path = self.piece_path(name, piece) if piece else self.path(name)
        remove_file(f"{path}.{token}" if token else path)

    def prune(self, layout: bytes, root: bytes) -> None:
        """Remove the empty folders of these layouts and roots, which evictions have left."""
        for outer in digit_folders(self.folder, layout, skip):
            for inner in digit_folders(outer, root, skip):
                for part in entries_of(inner, skip):
                    _remove_empty(part.path, outer)
                _remove_empty(inner, outer)

    def walk(self, layout: bytes = b"", root: bytes = b"", on_error: OnError = raise_error) -> Iterator[BlockFile]:
        """List all block files with this layout and roots that begin with these bytes (b"": any), complete or not, in no order.
        `on_error` is called for folders that cannot be read."""
        for outer in digit_folders(self.folder, layout, on_error):
            for inner in digit_folders(outer, root, on_error):
                prefix = bytes.fromhex(outer[-_HEX:] + inner[-_HEX:])
                for part in entries_of(inner, on_error):
                    if _FIRST_DIGITS.fullmatch(part.name):
                        yield from _block_files(part.path, prefix, on_error)
                    elif part.name == pieces.FOLDER:
                        yield from self._walk_pieces(part.path, prefix, on_error)

    def _walk_pieces(self, path: str, prefix: bytes, on_error: OnError) -> Iterator[BlockFile]:
        """The blocks of the pieces in a folder, and the pieces that are incomplete or broken."""
        for entry in entries_of(path, on_error):
            matched = _PIECE.fullmatch(entry.name)
            if matched is None:
                continue
            number, token = matched.groups()
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                piece, name = int(number, 16), prefix + bytes(KEY_BYTES)
                blocks = _piece_blocks(entry.path, prefix, piece, found.st_mtime) if token is None else None
                if blocks is None:
                    whole = BlockPlace(piece, 0)
                    yield BlockFile(name, entry.path, token, found.st_size, found.st_mtime, whole, token is None)
                else:
                    yield from blocks

    def remove_format_1(self) -> bool:
        """Remove the blocks of format 1, whose folders lie directly in those of their layouts. False if there are none."""
        found = False
        for layout in digit_folders(self.folder, b"", skip):
            for part in entries_of(layout, skip):
                if _FIRST_DIGITS.fullmatch(part.name) and part.is_dir(follow_symlinks=False):
                    found = True
                    shutil.rmtree(part.path, ignore_errors=True)
        return found


@cache
def compiled_write() -> Callable[..., Any] | None:
    """files.cpp; None where it cannot be compiled."""
    with contextlib.suppress(compiled_code.CannotBuild):
        return compiled_code.function(compiled_code.FILE_SOURCES, "fw_write_files", c_int64, WRITE_ARGUMENTS)
    return None


def readable_size(path: str) -> int:
    """Length of a file, -1 if there is no regular file that its owner may read."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IRUSR else -1


def is_name(name: Name) -> bool:
    """Whether `name` has the length of a block name."""
    return len(name) == NAME_BYTES


def read_block_header(file: BlockFile) -> Header | None:
    """The header of a complete file, or None if name or length do not agree with it."""
    data = bytearray(HEADER_BYTES)
    try:
        handle = os.open(file.path, _READ)
        try:
            length = os.preadv(handle, [data], file.place.at + max(file.size - HEADER_BYTES, 0))
        finally:
            os.close(handle)
        header = read_header(memoryview(data)[:length])
    except (OSError, BadFrame):
        return None
    return header if header.name == file.name and HEADER_BYTES + header.length == file.size else None


def remove_file(path: str) -> bool:
    """Remove a file, or a folder in its place. False if there is none. Raises StoreError."""
    try:
        try:
            os.unlink(path)
        except OSError:
            if not os.path.isdir(path) or os.path.islink(path):
                raise
            shutil.rmtree(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise store_error(error) from error
    return True


def _piece_blocks(path: str, prefix: bytes, piece: int, modified: float) -> list[BlockFile] | None:
    """The blocks of a piece; None if it is broken, which a piece without a block is, too. Raises StoreError."""
    try:
        handle = os.open(path, _READ)
        try:
            found = pieces.entries(handle)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return []
    except BadPiece:
        return None
    except OSError as error:
        if error.errno in _NO_FILE | _UNREADABLE:
            return None
        raise StoreUnreadable(f"a piece cannot be read: {error}") from error
    blocks = [BlockFile(prefix + one.key, path, None, one.length, modified, BlockPlace(piece, one.at)) for one in found]
    return blocks or None


def _remove_from_piece(path: str, places: Mapping[bytes, int]) -> Collection[bytes]:
    """Remove blocks from a piece, by key and offset, and the piece with the last one. Returns the keys that were there; all if
    nothing in it can be found. Raises StoreError."""
    try:
        handle = os.open(path, _CHANGE)
        try:
            removed, more = pieces.remove_blocks(handle, places)
        finally:
            os.close(handle)
        if not more:
            os.unlink(path)
    except FileNotFoundError:
        return ()
    except BadPiece:
        return places if remove_file(path) else ()
    except OSError as error:
        if error.errno in _NO_FILE | _UNREADABLE | {errno.EISDIR}:
            return places if remove_file(path) else ()
        raise store_error(error) from error
    return removed


def make_folder(path: str) -> None:
    """Create a folder and its parents. Raises StoreError."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise store_error(error) from error


def write_atomically(path: str, temporary: str, data: bytes | memoryview, *, sync: bool = False) -> None:
    """Write `temporary` and rename it to `path`. On an error neither is left. Raises StoreError.

    `sync`: the bytes are on the device before the file has its name. Some file systems keep a rename and not yet the data: a
    loss of power would leave an empty file in place of the old one. The name is not on the device yet (`write_back`).
    """
    view = memoryview(data)
    with _new_file(path, temporary) as handle:
        written = os.write(handle, view)
        while written < len(view):
            written += os.write(handle, view[written:])
        if sync:
            os.fsync(handle)


@contextlib.contextmanager
def _new_file(path: str, temporary: str) -> Iterator[int]:
    """A new file, which has its name when it was written; on an error of the system it is removed. Raises StoreError."""
    try:
        handle = _create(temporary)
        try:
            yield handle
        finally:
            os.close(handle)
        try:
            os.rename(temporary, path)
        except IsADirectoryError:
            remove_file(path)
            os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise store_error(error) from error


def write_back(path: str, last: str, passed: Collection[int] = _NOTHING_TO_SYNC) -> None:
    """Write the entries of a folder to the device, and of those above it up to the last one. `passed`: errors that are none.
    Raises StoreError."""
    sync_path(path, passed)
    while len(path) > len(last):
        path = os.path.dirname(path)
        sync_path(path, passed)


def sync_path(path: str, passed: Collection[int] = _NOTHING_TO_SYNC) -> None:
    """Write a file, or the entries of a folder, to the device. `passed`: errors that are none. Raises StoreError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in passed:
            raise store_error(error) from error


def write_back_above(folder: str) -> None:
    """Write the entry of a folder to the device, and those of the folders that it is in on this device, where this process may
    read them."""
    path = os.path.realpath(folder)
    with contextlib.suppress(OSError):
        device = os.stat(path).st_dev
        while path != "/" and os.stat(path := os.path.dirname(path)).st_dev == device:
            with contextlib.suppress(StoreError):
                sync_path(path)


def _create(path: str) -> int:
    """Open a new file. Missing folders are created with mode 0700 (os.makedirs uses its mode for the last one only)."""
    for _ in range(_CREATE_ATTEMPTS):  # another process may remove an empty folder in the meantime
        try:
            return os.open(path, WRITE, 0o600)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                _create_folders(os.path.dirname(path))
    return os.open(path, WRITE, 0o600)


def _create_folders(path: str) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _remove_empty(path: str, above: str) -> str:
    """Remove a folder and those that it is in, up to `above`, as long as they are empty. Returns the last one that stays."""
    with contextlib.suppress(OSError):
        while path != above:
            os.rmdir(path)
            path = os.path.dirname(path)
    return path


def _failed_read(error: OSError) -> int:
    """The result of a read that failed: UNREADABLE if it may be an error of this file alone."""
    if error.errno == errno.ENOENT:
        return MISSING
    if error.errno in _NO_FILE:
        return BAD
    return UNREADABLE if error.errno in _UNREADABLE else FAILED


def _read_all(handle: int, buffer: memoryview, size: int) -> int:
    """Read up to `size` bytes. The file may have become shorter since its size was read."""
    done = os.readv(handle, [buffer[:size]])
    while 0 < done < size:
        more = os.readv(handle, [buffer[done:size]])
        if not more:
            break
        done += more
    return done


def entries_of(path: str, on_error: OnError) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder, also of one that is linked, none if it does not exist. A link that leads nowhere may lead there
    again: it cannot be read, as what stands in the place of a folder."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except OSError as error:
        if not isinstance(error, FileNotFoundError) or os.path.islink(path):
            on_error(StoreUnreadable(f"a folder cannot be read: {error}"))


def digit_folders(path: str, wanted: bytes, on_error: OnError) -> Iterator[str]:
    """Paths of the folders of layouts or roots, or of those that begin with the wanted bytes."""
    start = wanted.hex()
    if len(start) == _HEX:
        yield f"{path}/{start}"
        return
    found = (entry for entry in entries_of(path, on_error) if _DIGITS.fullmatch(entry.name))
    yield from (entry.path for entry in found if entry.name.startswith(start))


def _block_files(path: str, prefix: bytes, on_error: OnError) -> Iterator[BlockFile]:
    for entry in entries_of(path, on_error):
        matched = _BLOCK.fullmatch(entry.name)
        if matched is None or not entry.is_file(follow_symlinks=False):
            continue
        key, token = matched.groups()
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            yield BlockFile(prefix + bytes.fromhex(key), entry.path, token, found.st_size, found.st_mtime)


class RecordFiles:
    """Records below `folder`. A part of a key ends in `=` as a folder and in `~` as a file, so `a` and `a/b` can coexist.

    Args:
        sync: a record that was put or deleted is so after a loss of power, too, or that is an error; else those of erasures,
            namespaces, layouts and named prefixes, where the file system can do it.
    """

    def __init__(self, folder: str, *, sync: bool = False) -> None:
        self._folder = folder
        self._sync = sync
        self._passed = _REMOVED if sync else _NOTHING_TO_SYNC
        self._above = False  # the folders above are on the device

    def _path(self, key: str) -> str:
        *parts, last = check_record_key(key).split("/")
        return "/".join([self._folder, *(part + "=" for part in parts), last + "~"])

    def put(self, key: str, data: bytes, token: str) -> None:
        path, sync = self._path(key), self._sync or key.startswith(_LASTING)
        write_atomically(path, f"{path}{token}.{secrets.token_hex(4)}", check_record(data), sync=sync)
        if sync:
            # Also folders that another process has made: it may not have come to this yet.
            write_back(os.path.dirname(path), self._folder, self._passed)
            if not self._above:
                write_back_above(self._folder)
                self._above = True

    def get(self, key: str) -> bytes | None:
        try:
            return Path(self._path(key)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"a record cannot be read: {error}") from error

    def delete(self, key: str) -> bool:
        path = self._path(key)
        removed = remove_file(path)
        last = _remove_empty(os.path.dirname(path), self._folder)
        if self._sync or key.startswith(_LASTING):
            write_back(last, last, self._passed)
        return removed

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted. Raises PartialListing if a folder cannot be read."""
        found, problems = list[str](), list[OSError]()
        start = "/".join([self._folder, *(part + "=" for part in prefix.split("/")[:-1])])
        for path, _, files in os.walk(start, onerror=problems.append, followlinks=True):
            problems += [NotADirectoryError(f"{path}/{name} is no folder") for name in files if name.endswith("=")]
            folder = os.path.relpath(path, self._folder)
            parts = [] if folder == "." else [part.removesuffix("=") for part in folder.split("/")]
            found += ["/".join([*parts, name.removesuffix("~")]) for name in files if name.endswith("~")]
        keys = sorted(key for key in found if key.startswith(prefix))
        lost = (one for one in problems if not isinstance(one, FileNotFoundError) or os.path.islink(one.filename))
        problem = next(lost, None)
        if problem is not None:
            raise PartialListing(f"a folder of records cannot be read: {problem}", keys)
        return keys

    def remove_incomplete(self, is_dead: Callable[[str], bool]) -> None:
        """Remove the incomplete files of dead writers, and folders that are empty then."""
        for path, _, files in os.walk(self._folder, followlinks=True):
            for name in files:
                token = name.partition("~")[2].rpartition(".")[0]
                if token and is_dead(token):
                    remove_file(f"{path}/{name}")
                    _remove_empty(path, self._folder)
