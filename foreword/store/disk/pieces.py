"""Pieces: files with many blocks of one layout and root, which were written together (files.py has their paths).

    0       8  magic "FWPIECE1"
    8       4  number of blocks
    12      4  alignment of their frames
    16     48  per block: key, 32 bytes; offset of its frame in the file, 8; length of the frame, 8. All 0: it was removed
    ...        from the next multiple of the alignment on: the frames, each at a multiple

A piece has its name when it is complete. Blocks are removed from it one by one: first the entry becomes 0, then the bytes a
hole of the file, and the file goes with its last block. So a reader that finds the entry *after* it has read the frame has
read all of it:

    reader:  frame read < entry found          writer:  entry removed < bytes removed

The table has no checksum: a frame that is found by a damaged entry is not the block of that name, and is refused like any
other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from foreword.blocks.keys import KEY_BYTES

FOLDER: Final = "pieces"
PROBE: Final = "holes."  # before the token of a process: a file in which it looks whether holes can be made
_MAGIC: Final = b"FWPIECE1"
_HEAD: Final = struct.Struct("<8sII")
_ENTRY: Final = struct.Struct(f"<{KEY_BYTES}sQQ")
_REMOVED: Final = bytes(_ENTRY.size)
_PAGE: Final = 4096  # what file systems can free
_LINE: Final = 64  # of frames that are shorter than a page
_MOST_BLOCKS: Final = 1 << 16
_FIRST_READ: Final = 4096
_VECTORS: Final = 1000  # of one call
_KEEP_SIZE_AND_PUNCH: Final = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NO_HOLES: Final = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ZEROS: Final = memoryview(bytes(1 << 20))
MOST_WRITTEN: Final = 1024  # blocks of a new piece


class BadPiece(Exception):
    """The table of a piece cannot be used."""


class BlockPlace(NamedTuple):
    """Where a block lies: the id of a piece, and the offset of the frame there. Piece 0: it has a file of its own."""

    piece: int
    at: int


ALONE: Final = BlockPlace(0, 0)


class PieceEntry(NamedTuple):
    """A block in a piece."""

    key: bytes
    at: int
    length: int


def layout_of(lengths: Sequence[int]) -> tuple[int, list[int]]:
    """The alignment of a piece with frames of these lengths, and their offsets."""
    align = _PAGE if min(lengths) >= _PAGE else _LINE
    at = _rounded(_HEAD.size + _ENTRY.size * len(lengths), align)
    offsets = []
    for length in lengths:
        offsets.append(at)
        at = _rounded(at + length, align)
    return align, offsets


def write(handle: int, keys: Sequence[bytes], frames: Sequence[memoryview]) -> None:
    """Write a whole piece into a new file. Raises OSError."""
    lengths = [len(frame) for frame in frames]
    align, offsets = layout_of(lengths)
    entries = (_ENTRY.pack(*fields) for fields in zip(keys, offsets, lengths, strict=True))
    head = b"".join((_HEAD.pack(_MAGIC, len(keys), align), *entries))
    parts: list[memoryview | bytes] = [head.ljust(offsets[0], b"\0")]
    for frame, length in zip(frames, lengths, strict=True):
        parts.append(frame)
        if length % align:
            parts.append(_ZEROS[: align - length % align])
    for low in range(0, len(parts), _VECTORS):
        _write_all(handle, parts[low : low + _VECTORS])


def _write_all(handle: int, parts: Sequence[memoryview | bytes]) -> None:
    left = sum(map(len, parts))
    done = os.writev(handle, parts)
    while done < left:  # a signal, or a file system that is nearly full
        left -= done
        rest: list[memoryview | bytes] = []
        for part in parts:
            if done < len(part):
                rest.append(memoryview(part)[done:])
            done = max(done - len(part), 0)
        parts = rest
        done = os.writev(handle, parts)


def _read_bytes(handle: int) -> tuple[int, bytes, int]:
    """The alignment of a piece, its entries as they lie there, and its size. Raises BadPiece, OSError."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise BadPiece
    data = os.pread(handle, _FIRST_READ, 0)
    if len(data) < _HEAD.size:
        raise BadPiece
    magic, count, align = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _ENTRY.size
    if magic != _MAGIC or not 0 < count <= _MOST_BLOCKS or align not in (_PAGE, _LINE):
        raise BadPiece
    if len(data) < end:
        data += os.pread(handle, end - len(data), len(data))
    if len(data) < end:
        raise BadPiece
    return align, data[_HEAD.size : end], found.st_size


def entries(handle: int) -> list[PieceEntry]:
    """The blocks of a piece. Raises BadPiece, OSError."""
    _, table, size = _read_bytes(handle)
    found = map(PieceEntry._make, _ENTRY.iter_unpack(table))
    return [one for one in found if one.length and one.at + one.length <= size]


def lengths_at(handle: int, wanted: Sequence[tuple[bytes, int]]) -> list[int]:
    """The length of each block, given its key and its offset, -1 for one that is not there. Raises BadPiece, OSError."""
    _, table, size = _read_bytes(handle)
    found = ((_entry_at(table, _find(table, key)), at) for key, at in wanted)
    return [one.length if one and one.at == at and 0 < one.length <= size - at else -1 for one, at in found]


def _find(table: bytes, key: bytes) -> int:
    """Where the entry of a block is in a table, -1 if there is none."""
    at = table.find(key)
    while at > 0 and at % _ENTRY.size:
        at = table.find(key, at + 1)
    return at


def _has_block(handle: int) -> bool:
    """Whether a block is there: none is behind the end of a file that a loss of power has cut. Raises BadPiece, OSError."""
    _, table, size = _read_bytes(handle)
    last = _entry_at(table, (len(table.rstrip(b"\0")) - 1) // _ENTRY.size * _ENTRY.size)
    return last is not None and (0 < last.length <= size - last.at or bool(entries(handle)))


def _entry_at(table: bytes, at: int) -> PieceEntry | None:
    return PieceEntry._make(_ENTRY.unpack_from(table, at)) if 0 <= at < len(table) else None


def _gap(table: bytes, at: int, align: int, size: int) -> tuple[int, int, int, int]:
    """The gap around an entry that is removed: start and end of the removed entries there, and start and end of the bytes
    between the blocks beside these. All 0 if the entries of those, or of the ones beside them, do not lie in order: some are
    damaged."""
    near = [at]
    for _ in range(2):  # those before it and behind it that were not removed
        before, behind = table[: max(near[0], 0)].rstrip(b"\0"), table[near[-1] + _ENTRY.size :]
        skipped = len(behind) - len(behind.lstrip(b"\0"))
        near.insert(0, (len(before) - 1) // _ENTRY.size * _ENTRY.size)
        near.append(near[-1] + _ENTRY.size + skipped - skipped % _ENTRY.size)
    low, lows = _rounded(_HEAD.size + len(table), align), list[int]()
    for one in (found := [None if one == at else _entry_at(table, one) for one in near]):
        lows.append(low)
        if one is not None:
            if one.at < low or not one.length or one.at + one.length > size:
                return 0, 0, 0, 0
            low = _rounded(one.at + one.length, align)
    return near[1] + _ENTRY.size, near[3], lows[2], size if found[3] is None else found[3].at


def remove_blocks(handle: int, places: Mapping[bytes, int]) -> tuple[set[bytes], bool]:
    """Remove blocks from a piece, given their offsets by key, or what is at their places where keys in the table are damaged.
    Returns the keys that were there, and whether another block is. Raises BadPiece, OSError.

    Also frees what a process that was killed in between has left beside them, or anywhere if one of them is not there.
    """
    align, data, size = _read_bytes(handle)
    found = sorted((_find(data, key), key) for key in places)
    there, left = {key for number, key in found if number >= 0}, bytearray(data)
    for number, _ in found[len(found) - len(there) :]:
        left[number : number + _ENTRY.size] = _REMOVED
    table = bytes(left)
    if there and not table.strip(b"\0"):
        return there, False  # the file goes at once, or not at all
    gap, gaps = (0, 0, 0, 0), list[tuple[int, int, int, int]]()
    for number, key in found:
        entry = _entry_at(data, number)
        if entry is not None and number >= gap[1]:
            gap = _gap(table, number, align, size)
            gaps.append(gap)
        if entry is None or entry.at != places[key] or not gap[2] <= entry.at < gap[3]:
            _remove_damaged(handle, places, align, data, size)
            return there, _has_block(handle)
    for low, high, start, end in gaps:
        os.pwrite(handle, bytes(high - low), _HEAD.size + low)
        _punch(handle, start, end - start)
    return there, _has_block(handle)


def _remove_damaged(handle: int, places: Mapping[bytes, int], align: int, data: bytes, size: int) -> None:
    """Remove blocks from a piece whose table, `data`, is damaged or lacks some of them."""
    table = list(map(PieceEntry._make, _ENTRY.iter_unpack(data)))
    left, gone, offsets = list[PieceEntry](), list[PieceEntry](), {*places.values()}
    for number, one in enumerate(table):
        if one.length and (one.key in places or one.at in offsets):
            os.pwrite(handle, _REMOVED, _HEAD.size + number * _ENTRY.size)
            gone.append(one)
        elif one.length:
            left.append(one)
    free_removed(handle, align, left, len(table))
    for one in gone:  # also where a damaged entry of another block covers it
        end = min([size, one.at + one.length, *(other.at for other in left if other.at > one.at)])
        if _HEAD.size + _ENTRY.size * len(table) <= one.at < end:
            _punch(handle, one.at, end - one.at)


def free_removed(handle: int, align: int, left: Sequence[PieceEntry], count: int) -> None:
    """Make holes of all bytes that belong to none of these blocks, in a piece that was made of `count`."""
    low, size = _rounded(_HEAD.size + _ENTRY.size * count, align), os.fstat(handle).st_size
    for start, end in sorted((min(one.at, size), _rounded(one.at + one.length, align)) for one in left):
        if low < start:  # a damaged entry may name an offset that no file has
            _punch(handle, low, start - low)
        low = max(low, end)
    if low < size:
        _punch(handle, low, size - low)


def makes_holes(folder: str, token: str) -> bool:
    """Whether the file system of a folder frees parts of files. Raises OSError."""
    path = f"{folder}/{PROBE}{token}"
    handle = os.open(path, _NEW, 0o600)
    try:
        os.unlink(path)  # first: if this process ends here, no file is left
        os.write(handle, bytes(2 * _PAGE))
        return _fallocate(handle, 0, _PAGE) == 0
    finally:
        os.close(handle)


def _punch(handle: int, at: int, length: int) -> None:
    """Make a hole. Where files have none, the bytes become 0: then they are gone, and the room is free with the file."""
    error = _fallocate(handle, at, length)
    if error in _NO_HOLES:
        for low in range(0, length, len(_ZEROS)):
            os.pwrite(handle, _ZEROS[: min(len(_ZEROS), length - low)], at + low)
    elif error:
        raise OSError(error, os.strerror(error))


def _fallocate(handle: int, at: int, length: int) -> int:
    """Make a hole. Returns the number of the error, 0 if there is none."""
    function = _fallocate_of_system()
    if function is None:
        return errno.ENOSYS
    return 0 if function(handle, _KEEP_SIZE_AND_PUNCH, at, length) == 0 else ctypes.get_errno()


@cache
def _fallocate_of_system() -> ctypes._FuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


def _rounded(size: int, align: int) -> int:
    return -(-size // align) * align
