"""Chunks: the objects of an object store, with several consecutive blocks of one chain each.

A chunk is found through its *head*, the key of the first block of a section of its chain. A block begins a section if it
is the first of its chain, or if the key of the block before it ends with a byte below 2: on average every 128th block. So
writers and readers agree on sections without a count of blocks. One listing of a head returns the chunks of its section.
`Heads` remembers which section each block belongs to, `Search` what listings of sections have shown.

Path, below the store's prefix: `<layout>/<root>/<head>/<first 8 bytes of the first key>/<tags>`, in hex. The tags are
Base64 of the first 8 bytes of the last key and of 5 bytes of every key, so that a listing tells which blocks a chunk has. What
is left of a chunk whose other blocks were deleted has 8 random bytes in place of the first 8, so that no two instances write it
under one path.

Content, integers little-endian: for each block key (32 bytes), parent key (32), depth (4) and length of the frame (8);
then for each block a slot: length of the frame (8), frame, zeros. All slots have the same length.
"""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES, is_public
from foreword.blocks.layout import PREFIX_BYTES, key_of
from foreword.newest import Newest
from foreword.store.base import Name
from foreword.store.frame import Frame

MAX_BLOCKS: Final = 32  # so that a path fits into a file name
MAX_BYTES: Final = 256 << 20
_SECTION_END: Final = 2  # of 256: a section has 128 blocks on average
_LAST_BYTES: Final = 8
_TAG_BYTES: Final = 5
_FIRST_DIGITS: Final = 16
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sIQ")
_LENGTH = struct.Struct("<Q")
KNOWN: Final = 100_000  # blocks that are remembered
_HEADS: Final = 4  # heads remembered per block: writers that do not know a block's section begin a new one
_PATH = re.compile(r"([0-9a-f]{32}/[0-9a-f]{32})/([0-9a-f]{64})/([0-9a-f]{16})/([A-Za-z0-9_-]{8,255}={0,2})")

Section = tuple[bytes, bytes]  # the bytes before the key in the names of its blocks, and its head


def prefix_of(name: Name) -> bytes:
    """The bytes of a name before the key."""
    return name[:PREFIX_BYTES]


def tag_of(name: Name) -> bytes:
    return key_of(name)[:_TAG_BYTES]


def ends_section(key: bytes) -> bool:
    """Whether the block behind the one with this key begins a section."""
    return key[-1] < _SECTION_END


def section_path(prefix: bytes, head: bytes, first: bytes = b"") -> str:
    """The path below which the chunks of a section lie; with `first`, only those that begin with this key."""
    layout, root = prefix[:FINGERPRINT_BYTES].hex(), prefix[FINGERPRINT_BYTES:].hex()
    parts = [layout, root, head.hex(), first.hex()[:_FIRST_DIGITS]]
    return "/".join(part for part in parts if part)


def chunk_path(prefix: bytes, head: bytes, keys: Sequence[bytes], *, own: bool = False) -> str:
    """The path of a chunk with these blocks. `own`: another one than that of any other chunk with them."""
    begin = os.urandom(_LAST_BYTES) if own else keys[-1][:_LAST_BYTES]
    tags = base64.urlsafe_b64encode(begin + b"".join(key[:_TAG_BYTES] for key in keys)).decode()
    return f"{section_path(prefix, head, keys[0])}/{tags}"


@dataclass(frozen=True, slots=True)
class ObjectChunk:
    """A chunk as a listing shows it.

    Attributes:
        path: below the store's prefix.
        prefix: the bytes before the key in the names of its blocks.
        tags: of its blocks, in order.
        size: bytes of the object.
        written: when, in seconds since the epoch; 0.0 if unknown.
    """

    path: str
    prefix: bytes
    head: bytes
    tags: tuple[bytes, ...]
    size: int
    written: float = field(default=0.0, compare=False)

    @property
    def index_bytes(self) -> int:
        return _ENTRY.size * len(self.tags)

    @property
    def slot(self) -> int:
        """Bytes per slot; 0 if the object's size is wrong."""
        slot, rest = divmod(self.size - self.index_bytes, len(self.tags))
        return 0 if rest or slot <= _LENGTH.size else slot

    def fits(self, frames: Sequence[Frame]) -> bool:
        """Whether the slots can be those of these frames, all or some of the chunk's. The longest one fills its slot."""
        room, longest = self.slot - _LENGTH.size, max(len(frame.data) for frame in frames)
        return room == longest or (room > longest and len(frames) < len(self.tags))

    def range_of(self, first: int, count: int) -> tuple[int, int]:
        """Offset and length of consecutive slots."""
        return self.index_bytes + first * self.slot, count * self.slot


def read_path(path: str, size: int, written: float = 0.0) -> ObjectChunk | None:
    """The chunk with this path, None if it is not the path of one."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    try:
        data = base64.b64decode(match[4], altchars=b"-_", validate=True)[_LAST_BYTES:]
    except ValueError:
        return None
    tags = tuple(data[at : at + _TAG_BYTES] for at in range(0, len(data), _TAG_BYTES))
    if not tags or len(tags[-1]) != _TAG_BYTES or len(tags) > MAX_BLOCKS:
        return None
    return ObjectChunk(path, bytes.fromhex(match[1].replace("/", "")), bytes.fromhex(match[2]), tags, size, written)


def read_slot(data: memoryview) -> memoryview | None:
    """The frame in a slot, None if its length is wrong."""
    [length] = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length] if 0 < length <= len(data) - _LENGTH.size else None


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Entry of a chunk's index for one block."""

    key: bytes
    parent: bytes
    depth: int
    length: int


def read_index(chunk: ObjectChunk, data: bytes) -> Iterator[tuple[int, IndexEntry]]:
    """The entries of an index that agree with the chunk's tags, with their places."""
    for place, tag in enumerate(chunk.tags[: len(data) // _ENTRY.size]):
        entry = IndexEntry(*_ENTRY.unpack_from(data, place * _ENTRY.size))
        if entry.key[:_TAG_BYTES] == tag:
            yield place, entry


def pack(blocks: Sequence[tuple[IndexEntry, memoryview]]) -> bytes:
    """The content of a chunk."""
    slot = _LENGTH.size + max(entry.length for entry, _ in blocks)
    data = bytearray(len(blocks) * (_ENTRY.size + slot))
    at = len(blocks) * _ENTRY.size
    for place, (entry, frame) in enumerate(blocks):
        _ENTRY.pack_into(data, place * _ENTRY.size, entry.key, entry.parent, entry.depth, entry.length)
        _LENGTH.pack_into(data, at, entry.length)
        data[at + _LENGTH.size : at + _LENGTH.size + entry.length] = frame
        at += slot
    return bytes(data)


def entry_of(frame: Frame) -> IndexEntry:
    header = frame.header
    return IndexEntry(header.key, header.parent, header.depth, len(frame.data))


def divide(
    frames: Sequence[Frame], head_of: Callable[[Frame], bytes], most: int
) -> Iterator[tuple[bytes, bytes, list[Frame]]]:
    """Divide frames among chunks of at most `most` blocks: prefix, head and frames of each."""
    chunk: list[Frame] = []
    place: tuple[bytes, bytes] = (b"", b"")
    for frame in frames:
        here = (prefix_of(frame.name), head_of(frame))
        follows = chunk and here == place and frame.header.parent == chunk[-1].header.key and len(chunk) < most
        if chunk and not (follows and (len(chunk) + 1) * len(frame.data) <= MAX_BYTES):
            yield *place, chunk
            chunk = []
        place = here
        chunk.append(frame)
    if chunk:
        yield *place, chunk


Location = tuple[ObjectChunk, int]  # a chunk and the place of a block in it


class Heads:
    """The heads of the sections of recently used blocks."""

    def __init__(self) -> None:
        self._heads: Newest[bytes, tuple[bytes, ...]] = Newest(KNOWN)
        self._expected: Newest[Name, bytes] = Newest(KNOWN)

    def expect(self, before: Sequence[Name], names: Sequence[Name]) -> None:
        """Note the sections of the first blocks of a lookup, given the blocks before them in the chain."""
        firsts: dict[bytes, Name] = {}
        for name in names:
            firsts.setdefault(prefix_of(name), name)
        for prefix, name in firsts.items():
            head = key_of(name)
            for previous in reversed(before):
                if prefix_of(previous) == prefix:
                    if ends_section(key_of(previous)):
                        break
                    head = key_of(previous)
            self._expected[name] = head

    def note(self, key: bytes, head: bytes) -> None:
        known = self._heads.get(key) or ()
        if head not in known:
            self._heads[key] = (*known, head)[-_HEADS:]

    def of_key(self, key: bytes) -> tuple[bytes, ...]:
        """The heads under which a block was found or stored."""
        return self._heads.get(key) or ()

    def of_frame(self, frame: Frame) -> bytes:
        """The head of the section in which to store a frame. A block whose section is not known begins one."""
        header = frame.header
        if header.depth == 0 or ends_section(header.parent) or is_public(header.parent) != is_public(header.key):
            return header.key
        known = self._heads.get(header.parent) or self._heads.get(header.key)
        return known[0] if known else header.key

    def sections(self, names: Sequence[Name]) -> list[Section]:
        """The sections in which the blocks of a chain may be, without repetition."""
        found: dict[Section, None] = {}
        last: dict[bytes, tuple[bytes, bytes]] = {}  # by prefix: the previous key and its head
        for name in names:
            prefix, key = prefix_of(name), key_of(name)
            previous = last.get(prefix)
            guess = key if previous is None or ends_section(previous[0]) else previous[1]
            expected = self._expected.get(name)
            heads = self._heads.get(key) or (expected or guess,)
            if expected is not None and expected not in heads:
                heads = (expected, *heads)
            last[prefix] = (key, heads[0])
            found.update(((prefix, head), None) for head in heads)
        return list(found)


class Search:
    """Blocks that are searched for, and what the listings of sections have shown of them.

    Attributes:
        found: where the blocks are.
        chunks: every chunk that has one of the blocks, by path.
        listed: sections that were listed.
        incomplete: those of which a listing has shown only a part.
    """

    def __init__(self, names: Sequence[Name]) -> None:
        self.names = names
        self.found: dict[Name, Location] = {}
        self.chunks: dict[str, ObjectChunk] = {}
        self.listed: set[Section] = set()
        self.incomplete: set[Section] = set()
        self._by_tag: dict[tuple[bytes, bytes], Name] = {(prefix_of(name), tag_of(name)): name for name in names}

    def add(self, chunk: ObjectChunk) -> list[Name]:
        """Note a chunk of a listing. Returns those of the blocks that it has."""
        present = []
        for place, tag in enumerate(chunk.tags):
            name = self._by_tag.get((chunk.prefix, tag))
            if name is None:
                continue
            present.append(name)
            known = self.found.get(name)
            if known is None or not known[0].slot:
                self.found[name] = (chunk, place)
        if present:
            self.chunks[chunk.path] = chunk
        return present

    @property
    def gap(self) -> int:
        """The index of the first block that was not found."""
        return next((index for index, name in enumerate(self.names) if name not in self.found), len(self.names))
