"""The memory and the disk store against plain models: a dictionary, and LRU over chains written down without any cleverness."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from foreword.store.base import Store
from foreword.store.disk import DiskStore
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.memory import MemoryStore
from foreword.testing import SMALL_BYTES, StoreMachine, make_frames, names_of, put_all, read, soon

LARGE = 1 << 20
quick = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class MemoryMachine(StoreMachine):
    def make_store(self) -> Store:
        return MemoryStore(LARGE, pin_share=1.0)


class SmallMemoryMachine(StoreMachine):
    bounded = True

    def make_store(self) -> Store:
        return MemoryStore(SMALL_BYTES)


class DiskMachine(StoreMachine):
    size = LARGE

    def make_store(self) -> Store:
        self.folder = tempfile.mkdtemp()
        return DiskStore(self.folder, self.size, pin_share=0.5 if self.bounded else 1.0)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class SmallDiskMachine(DiskMachine):
    bounded = True
    size = SMALL_BYTES


TestMemoryMachine = MemoryMachine.TestCase
TestSmallMemoryMachine = SmallMemoryMachine.TestCase
TestDiskMachine = DiskMachine.TestCase
TestSmallDiskMachine = SmallDiskMachine.TestCase
TestMemoryMachine.settings = TestSmallMemoryMachine.settings = quick
TestDiskMachine.settings = TestSmallDiskMachine.settings = quick


class Model:
    """LRU over chains in the obvious way: lists, a search for everything."""

    def __init__(self, frames: list[Frame], room: int) -> None:
        self.parent = {one.name: one.header.layout + one.header.parent for one in frames}
        self.depth = {one.name: one.header.depth for one in frames}
        self.room = room
        self.now = 0
        self.used: dict[bytes, int] = {}
        self.pinned: set[bytes] = set()

    def put(self, names: list[bytes]) -> None:
        self.now += 1
        hang_on = [self.parent[name] for name in names]
        self.used.update({name: self.now for name in [*names, *hang_on] if name in self.used})
        for name in names:
            if name not in self.used and len(self.used) == self.room and not self._evict():
                return
            self.used[name] = self.now

    def get(self, names: list[bytes]) -> None:
        self.now += 1
        self.used.update({name: self.now for name in names if name in self.used})

    def delete(self, names: list[bytes]) -> None:
        for name in names:
            if name in self.used:
                self._remove(name)

    def _evict(self) -> bool:
        parents = {self.parent[name] for name in self.used}
        leaves = [name for name in self.used if name not in parents and name not in self.pinned]
        leaf = min(leaves, key=lambda name: (self.used[name], -self.depth[name]), default=None)
        if leaf is None or self.used[leaf] == self.now:
            return False
        self._remove(leaf)
        return True

    def _remove(self, name: bytes) -> None:
        used = self.used.pop(name)
        self.pinned.discard(name)
        if self.parent[name] in self.used:
            self.used[self.parent[name]] = max(used, self.used[self.parent[name]])


@pytest.fixture(params=["memory", "disk"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store with room for 12 blocks of 10 bytes of payload."""
    size = 12 * (HEADER_BYTES + 10)
    store = MemoryStore(size) if request.param == "memory" else DiskStore(tmp_path / "store", size)
    yield store
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_eviction(small: Store, seed: int) -> None:
    """After any calls exactly those blocks are there that the obvious LRU over chains has."""
    draw = random.Random(seed)
    trunk = make_frames(300, 3, 10)
    chains = [[*trunk, *make_frames(301 + number, 5, 10, after=trunk[-1])] for number in range(3)]
    chains += [make_frames(310 + number, 6, 10) for number in range(3)]
    frames = list({one.name: one for chain in chains for one in chain}.values())
    model = Model(frames, 12)
    for _ in range(250):
        chain = draw.choice(chains)
        first = draw.choice([0, 0, draw.randrange(len(chain))])
        part = chain[first : first + draw.randint(1, 4)]
        names = names_of(part)
        what = draw.random()
        if what < 0.5:
            put_all(small, part)
            model.put(names)
        elif what < 0.8:
            read(small, part)
            model.get(names)
        elif what < 0.9:
            small.delete(names, deadline=soon())
            model.delete(names)
        else:
            small.pin(names, pinned=what < 0.93, deadline=soon())
            model.pinned = {entry.name for entry in small.scan(deadline=soon()) if entry.pinned}
        assert {entry.name for entry in small.scan(deadline=soon())} == model.used.keys()
