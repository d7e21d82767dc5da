"""Subscribers of a tiered store learn which blocks each tier stores and removes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import FlakyStore, make_frames, names_of, put_all, read, soon, whole
from foreword.errors import StoreUnavailable
from foreword.store.base import Name, Store
from foreword.store.codec import CodedStore, codec_named
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
PAYLOAD = 1000
FRAME = HEADER_BYTES + PAYLOAD


class EventLog:
    """A tiered store, and the blocks of each tier according to its events."""

    def __init__(self, *stores: Store, writable: Sequence[int] | None = None) -> None:
        self.store = TieredStore(stores, writable=writable)
        self.held: list[set[Name]] = [set() for _ in stores]
        self.notified: set[int] = set()
        self.store.subscribe(self._note)

    def _note(self, tier: int, stored: bool, names: Sequence[Name]) -> None:
        assert names
        self.notified.add(tier)
        if stored:
            self.held[tier].update(names)
        else:
            self.held[tier].difference_update(names)


def bounded(kind: str, folder: Path) -> Store:
    """A store with room for four blocks."""
    if kind == "disk":
        return DiskStore(folder, 4 * FRAME)
    memory = MemoryStore(4 * FRAME)
    return CodedStore(memory, codec_named("lossless"), LAYOUT) if kind == "coded" else memory


@pytest.mark.parametrize("kind", ["memory", "coded", "disk"])
def test_evictions_are_reported(kind: str, tmp_path: Path) -> None:
    """Evictions by the store are reported, also through a codec. The reported blocks are the stored ones."""
    log = EventLog(bounded(kind, tmp_path))
    chains = [make_frames(seed, 3, PAYLOAD) for seed in (1, 2, 3)]
    for chain in chains:
        put_all(log.store, chain)
    every = [name for chain in chains for name in names_of(chain)]
    there = {entry.name for entry in log.store.scan(deadline=soon())}
    assert log.held == [there] and len(there) == 4 and there < set(every)
    assert read(log.store, chains[2]) == whole(chains[2])
    log.store.close()


def test_a_partial_put() -> None:
    """The stored blocks of a chain longer than the store are reported, and no others."""
    log = EventLog(MemoryStore(4 * FRAME))
    frames = make_frames(1, 7, PAYLOAD)
    assert log.store.put(frames, deadline=soon()) == 4
    assert log.held == [set(names_of(frames[:4]))]


class FailingLookup(FlakyStore):
    """A store whose lookup of single blocks fails."""

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        raise StoreUnavailable("lookup fails")


def test_a_failing_store() -> None:
    """A failed put reports no blocks, and so does a partial one whose lookups fail. Its count is returned anyway."""
    inner = FailingLookup(MemoryStore(4 * FRAME))
    log = EventLog(inner)
    assert log.store.put(make_frames(1, 7, PAYLOAD), deadline=soon()) == 4
    inner.inject("fail")
    assert log.store.put(make_frames(1, 2, PAYLOAD), deadline=soon()) == 0
    assert log.held == [set()]


def test_events_of_several_tiers() -> None:
    """Events are separate for each tier. A tier that is not writable has none."""
    peer = MemoryStore(1 << 20, label="peer")
    log = EventLog(MemoryStore(1 << 20), MemoryStore(1 << 20), peer, writable=[0, 1])
    frames = make_frames(1, 3, PAYLOAD)
    names = set(names_of(frames))
    put_all(peer, frames)
    put_all(log.store, frames)
    assert log.held == [names, names, set()]
    log.store.tiers[1].delete(names_of(frames[1:]), soon())
    assert log.held == [names, {frames[0].name}, set()]
    log.store.delete(names_of(frames), deadline=soon())
    assert log.held == [set(), set(), set()] and log.notified == {0, 1}
