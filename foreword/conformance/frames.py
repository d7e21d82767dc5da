"""Deterministic chains of frames for tests, and short calls of a store."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from hashlib import sha256

from foreword.blocks.layout import ROOT_BYTES
from foreword.errors import StoreFull
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, frame

LAYOUT = bytes(range(16))
ROOT = sha256(b"foreword/testing").digest()
SMALL_BLOCKS = 8
SMALL_PAYLOAD = 1000
SMALL_BYTES = SMALL_BLOCKS * (HEADER_BYTES + SMALL_PAYLOAD)


def make_frames(
    seed: int,
    count: int,
    payload_bytes: int,
    *,
    layout: bytes = LAYOUT,
    root: bytes = ROOT,
    after: Frame | None = None,
) -> list[Frame]:
    """Create a chain of `count` valid frames with random payloads. Equal arguments give equal frames.

    Args:
        after: the frame that the chain continues, instead of `root`. Two seeds after one frame make two branches.
    """
    draw = random.Random(f"{seed}/{payload_bytes}")
    parent, depth = (root, 0) if after is None else (after.header.key, after.header.depth + 1)
    frames = []
    for number in range(depth, depth + count):
        key = sha256(parent + f"{seed}/{payload_bytes}/{number}".encode()).digest()
        header = Header(layout, root[:ROOT_BYTES], key, parent, number, RAW, payload_bytes, payload_bytes)
        frames.append(frame(header, draw.randbytes(payload_bytes)))
        parent = key
    return frames


def soon(seconds: float = 60.0) -> float:
    """A deadline that a correct store never reaches in a test."""
    return time.monotonic() + seconds


def names_of(frames: Sequence[Frame]) -> list[Name]:
    return [one.name for one in frames]


def read(store: Store, frames: Sequence[Frame], *, deadline: float | None = None) -> list[bytes | None]:
    """Get frames by name: their bytes, None for those that the store does not have."""
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    lengths = store.get(names_of(frames), buffers, deadline=soon() if deadline is None else deadline)
    assert len(lengths) == len(frames), "get returns a length for each name"
    return [bytes(buffer[:length]) if length > 0 else None for buffer, length in zip(buffers, lengths, strict=True)]


def present(store: Store, frames: Sequence[Frame]) -> list[bool]:
    """Whether the store has each of the frames, with one `lookup` each."""
    return [store.lookup([one.name], deadline=soon()) == 1 for one in frames]


def put_all(store: Store, frames: Sequence[Frame]) -> int:
    """`put` that returns the number of frames present even if the store is full."""
    try:
        return store.put(frames, deadline=soon())
    except StoreFull:
        return sum(present(store, frames))


def whole(frames: Sequence[Frame]) -> list[bytes | None]:
    """The bytes of frames, as `read` returns them."""
    return [bytes(one.data) for one in frames]
