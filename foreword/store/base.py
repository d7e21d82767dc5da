"""The contract of every place where blocks rest.

A store keeps *frames* (store/frame.py) under *names* (layout fingerprint and key, 48 bytes) and small *records* (named
prefixes, descriptions of layouts) under words. A frame never changes once it is there: writing it again is nothing, losing
it is a miss. `foreword.conformance.StoreContract` says in tests what is said here in words.

Stores do not check what they give back; `TieredStore` does, for every one of them, before anybody else sees a byte.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from foreword.errors import StoreConfigError, StoreError, StoreTimeout
from foreword.store.frame import Frame

Name = bytes
RECORD_BYTES: Final = 8 << 20
_WORD: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One block in a store.

    Attributes:
        parent: the key of the block before it (the root for the first of a chain); b"" where the store does not know.
        depth: its number in the chain, 0 first.
        size: bytes of the frame.
        stored_at, used_at: seconds since the epoch, 0.0 where the store does not know.
    """

    name: Name
    parent: bytes = b""
    depth: int = 0
    size: int = 0
    stored_at: float = 0.0
    used_at: float = 0.0
    hits: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How full a store is. `budget` is 0 where the store itself sets no bound; -1 blocks: not known without a scan."""

    blocks: int = -1
    bytes: int = 0
    budget: int = 0
    pinned_bytes: int = 0
    evictions: int = 0
    notes: dict[str, int] = field(default_factory=dict)


class Store(Protocol):
    """Threads may call at once. `deadline` is a time of `time.monotonic()`; whoever passes it raises `StoreTimeout`.

    Every method may raise `StoreError`, and nothing else.

    Attributes:
        label: its name in metrics and reports.
        readers: how many threads reading parts of a batch at once are sooner done than one.
    """

    label: str
    readers: int

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        """How many of `names`, from the first on, are there without a gap. Changes nothing."""
        ...

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read the frame of each name into the buffer beside it (writable, contiguous bytes, as long as a frame at least).

        Returns the length of each frame, 0 for one that is missing or does not fit. The bytes are not checked here.
        """
        ...

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Keep frames, in chain order; one that is there already is left as it is. Returns how many are there now.

        Buffers may be reused once this returns. In a bounded store the least recently used chains make room, tails first.
        """
        ...

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        """Remove blocks, pinned ones too; returns how many were there."""
        ...

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Keep blocks from eviction, or no longer, within the store's budget for pins; returns how many of them are so now."""
        ...

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        """All blocks, in no order. Blocks that come or go meanwhile may be missed."""
        ...

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        """Keep a small record (up to 8 MiB) in place of what was there. Words are `/`-separated parts of `[A-Za-z0-9._-]`."""
        ...

    def get_record(self, word: str, *, deadline: float) -> bytes | None: ...

    def delete_record(self, word: str, *, deadline: float) -> bool: ...

    def records(self, start: str, *, deadline: float) -> list[str]:
        """Words that begin with `start`, sorted."""
        ...

    def status(self) -> StoreStatus:
        """Never blocks for long and never raises."""
        ...

    def close(self) -> None:
        """Flush and let go of everything. Calls after it raise `StoreUnavailable`."""
        ...


def time_left(deadline: float) -> float:
    """Seconds until the deadline, more than 0. Raises StoreTimeout."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreTimeout("the deadline passed")
    return left


def check_word(word: str) -> str:
    """The word, if it may name a record. Raises StoreConfigError."""
    if not _WORD.fullmatch(word):
        raise StoreConfigError(f"a record's word has parts of letters, digits and ._- between slashes, unlike {word!r}")
    return word


def check_record(data: bytes) -> bytes:
    """The record, if it is small enough. Raises StoreError."""
    if len(data) > RECORD_BYTES:
        raise StoreError(f"a record has at most {RECORD_BYTES} bytes, not {len(data)}")
    return data
