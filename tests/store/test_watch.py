"""Who watches the tiers of a store is told what they took and what they lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import FlakyStore, make_frames, names_of, put_all, read, soon, whole
from foreword.errors import StoreUnavailable
from foreword.store.base import Name, Store
from foreword.store.codecs.base import codec_named
from foreword.store.codecs.coded_store import CodedStore
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
PAYLOAD = 1000
FRAME = HEADER_BYTES + PAYLOAD


class Watched:
    """Tiers, and the blocks that each of them has by what is told."""

    def __init__(self, *stores: Store, writable: Sequence[int] | None = None) -> None:
        self.store = TieredStore(stores, writable=writable)
        self.held: list[set[Name]] = [set() for _ in stores]
        self.told: set[int] = set()
        self.store.subscribe(self._note)

    def _note(self, tier: int, stored: bool, names: Sequence[Name]) -> None:
        assert names
        self.told.add(tier)
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
def test_what_makes_room_is_told(kind: str, tmp_path: Path) -> None:
    """Blocks that a store evicts by itself are told of, behind a codec too: what is told is what is there."""
    watched = Watched(bounded(kind, tmp_path))
    chains = [make_frames(seed, 3, PAYLOAD) for seed in (1, 2, 3)]
    for chain in chains:
        put_all(watched.store, chain)
    every = [name for chain in chains for name in names_of(chain)]
    there = {entry.name for entry in watched.store.scan(deadline=soon())}
    assert watched.held == [there] and len(there) == 4 and there < set(every)
    assert read(watched.store, chains[2]) == whole(chains[2])
    watched.store.close()


def test_a_put_that_is_kept_in_part() -> None:
    """Of a chain that is longer than the store, only what was kept is told."""
    watched = Watched(MemoryStore(4 * FRAME))
    frames = make_frames(1, 7, PAYLOAD)
    assert watched.store.put(frames, deadline=soon()) == 4
    assert watched.held == [set(names_of(frames[:4]))]


class Silent(FlakyStore):
    """A store that does not say what it has."""

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        raise StoreUnavailable("it does not say")


def test_of_what_a_store_does_not_say_nothing_is_told() -> None:
    """A put that fails, or whose store then does not answer which part it kept, tells of no block; how many were kept is said
    all the same."""
    inner = Silent(MemoryStore(4 * FRAME))
    watched = Watched(inner)
    assert watched.store.put(make_frames(1, 7, PAYLOAD), deadline=soon()) == 4
    inner.inject("fail")
    assert watched.store.put(make_frames(1, 2, PAYLOAD), deadline=soon()) == 0
    assert watched.held == [set()]


def test_each_tier_is_told_of_apart() -> None:
    """A block that two tiers took and that is deleted from one is still in the other; a tier that takes no writes is silent."""
    lent = MemoryStore(1 << 20, label="lent")
    watched = Watched(MemoryStore(1 << 20), MemoryStore(1 << 20), lent, writable=[0, 1])
    frames = make_frames(1, 3, PAYLOAD)
    names = set(names_of(frames))
    put_all(lent, frames)
    put_all(watched.store, frames)
    assert watched.held == [names, names, set()]
    watched.store.tiers[1].delete(names_of(frames[1:]), soon())
    assert watched.held == [names, {frames[0].name}, set()]
    watched.store.delete_by_tier(names_of(frames), deadline=soon())
    assert watched.held == [set(), set(), set()] and watched.told == {0, 1}
