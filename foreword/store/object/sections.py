"""Which section each block belongs to, and what listings of sections have shown."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

from foreword.blocks.layout import key_of
from foreword.blocks.public import is_public
from foreword.newest import Newest
from foreword.store.base import Name
from foreword.store.frame import Frame
from foreword.store.object.chunks import ObjectChunk, ends_section, prefix_of, tag_of

Section = tuple[bytes, bytes]  # the bytes before the key in the names of its blocks, and its head
Location = tuple[ObjectChunk, int]  # a chunk and the place of a block in it

_KNOWN: Final = 100_000  # blocks that are remembered
_HEADS: Final = 4  # heads remembered per block: writers that do not know a block's section begin a new one
V = TypeVar("V")


class RecentlyUsed(Generic[V]):
    """A dictionary that drops its oldest entries. Thread-safe."""

    def __init__(self) -> None:
        self._values: Newest[bytes, V] = Newest(_KNOWN)
        self._lock = threading.Lock()

    def get(self, key: bytes) -> V | None:
        return self._values.get(key)

    def set(self, key: bytes, value: V) -> None:
        with self._lock:
            self._values[key] = value

    def drop(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)


class Heads:
    """The heads of the sections of recently used blocks."""

    def __init__(self) -> None:
        self._heads: RecentlyUsed[tuple[bytes, ...]] = RecentlyUsed()
        self._expected: RecentlyUsed[bytes] = RecentlyUsed()  # by name

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
            self._expected.set(name, head)

    def note(self, key: bytes, head: bytes) -> None:
        known = self._heads.get(key) or ()
        if head not in known:
            self._heads.set(key, (*known, head)[-_HEADS:])

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
