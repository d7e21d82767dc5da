"""The memory and disk stores against simple models, and tests of the conformance suites themselves."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from foreword.conformance import (
    SMALL_BYTES,
    Fault,
    FlakyStore,
    StoreContract,
    StoreMachine,
    make_frames,
    names_of,
    put_all,
    read,
    soon,
    whole,
)
from foreword.conformance.store_contract import fill
from foreword.errors import BadFrame, StoreError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES, Frame, check
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LARGE = 4 << 20
quick = settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class MemoryMachine(StoreMachine):
    reserves = True

    def make_store(self) -> Store:
        return MemoryStore(LARGE, pin_share=1.0)


class SmallMemoryMachine(StoreMachine):
    bounded = reserves = True

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


class TieredMachine(StoreMachine):
    spoils = True

    def make_store(self) -> Store:
        self.flaky = FlakyStore(MemoryStore(LARGE, pin_share=1.0))
        return TieredStore([self.flaky])

    def spoil(self, names: Sequence[bytes]) -> None:
        self.flaky.spoil(names)


TestTieredMachine = TieredMachine.TestCase
TestMemoryMachine = MemoryMachine.TestCase
TestSmallMemoryMachine = SmallMemoryMachine.TestCase
TestDiskMachine = DiskMachine.TestCase
TestSmallDiskMachine = SmallDiskMachine.TestCase
TestTieredMachine.settings = TestMemoryMachine.settings = TestSmallMemoryMachine.settings = quick
TestDiskMachine.settings = TestSmallDiskMachine.settings = quick


class Model:
    """A simple reference implementation of LRU over chains, with linear searches."""

    def __init__(self, frames: list[Frame], room: int) -> None:
        self.parent = {one.name: one.header.parent_name for one in frames}
        self.depth = {one.name: one.header.depth for one in frames}
        self.room = room
        self.now = 0
        self.used: dict[bytes, int] = {}
        self.pinned: set[bytes] = set()

    def put(self, names: list[bytes]) -> None:
        self.now += 1
        parents = [self.parent[name] for name in names]
        self.used.update({name: self.now for name in [*names, *parents] if name in self.used})
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
    """A store with room for 12 blocks with a payload of 16 bytes."""
    size = 12 * (HEADER_BYTES + 16)
    store = MemoryStore(size) if request.param == "memory" else DiskStore(tmp_path / "store", size)
    yield store
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_eviction(small: Store, seed: int) -> None:
    """After any calls the store has exactly the blocks that the reference implementation has."""
    draw = random.Random(seed)
    trunk = make_frames(300, 3, 16)
    chains = [[*trunk, *make_frames(301 + number, 5, 16, after=trunk[-1])] for number in range(3)]
    chains += [make_frames(310 + number, 6, 16) for number in range(3)]
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


# The contract itself


SABOTAGE: list[tuple[dict[Fault, float], str]] = [
    ({"corrupt": 1.0}, "test_frames_come_back"),
    ({"truncate": 1.0}, "test_frames_come_back"),
    ({"swap": 1.0}, "test_frames_come_back"),
    ({"lose": 1.0}, "test_frames_come_back"),
    ({"corrupt": 0.01}, "test_threads_at_once"),
    ({"swap": 0.01}, "test_threads_at_once"),
    ({"fail": 0.1}, "test_threads_at_once"),
    ({"lose": 1.0}, "test_the_budget_is_kept"),
]


def run_test(test: str, store: Store) -> None:
    """Run one test of the contract with an empty store."""
    getattr(StoreContract(), test)(partial(fill, store) if test == "test_frames_come_back" else store)


@pytest.mark.parametrize(("plan", "test"), SABOTAGE)
def test_the_contract_notices(plan: dict[Fault, float], test: str) -> None:
    """A store that alters, loses or fails does not pass the contract."""
    size = SMALL_BYTES if test == "test_the_budget_is_kept" else LARGE
    run_test(test, MemoryStore(size))
    store = FlakyStore(MemoryStore(size), plan=plan)
    with pytest.raises((AssertionError, BadFrame, StoreError)):
        run_test(test, store)
    assert sum(store.injected.values()) > 0


class Forgetful(MemoryStore):
    """A store that evicts all blocks before a put, against the contract."""

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        names = [entry.name for entry in self.scan(deadline=deadline)]
        if len(names) + len(frames) > 8:
            self.delete(names, deadline=deadline)
        return super().put(frames, deadline=deadline)


@pytest.mark.parametrize(
    "test",
    [
        "test_eviction_is_leaf_first",
        "test_a_growing_chain_is_one_chain",
        "test_a_child_before_its_parent",
        "test_pinned_blocks_stay",
    ],
)
def test_the_contract_notices_another_policy(test: str) -> None:
    """A store that evicts in another order does not pass the contract."""
    getattr(StoreContract(), test)(MemoryStore(SMALL_BYTES))
    with pytest.raises(AssertionError):
        getattr(StoreContract(), test)(Forgetful(SMALL_BYTES))


# FlakyStore


@pytest.fixture
def flaky() -> FlakyStore:
    return FlakyStore(MemoryStore(LARGE), seed=1)


def test_injected_failures(flaky: FlakyStore) -> None:
    """fail_next makes the given number of calls raise the given error; later calls work."""
    frames = make_frames(320, 3, 100)
    flaky.fail_next(2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            flaky.put(frames, deadline=soon())
    assert flaky.put(frames, deadline=soon()) == 3
    flaky.fail_next(1, lambda: StoreFull("injected"))
    with pytest.raises(StoreFull):
        flaky.lookup(names_of(frames), deadline=soon())
    assert flaky.lookup(names_of(frames), deadline=soon()) == 3
    flaky.inject("fail")
    with pytest.raises(StoreError):
        flaky.scan(deadline=soon())
    flaky.inject("fail", 0.0)
    assert flaky.injected["fail"] == 4


def test_injected_delays(flaky: FlakyStore) -> None:
    """A delay beyond the deadline, and a hang, raise StoreTimeout at the deadline. A shorter delay only waits."""
    frames = make_frames(321, 3, 100)
    flaky.delay(0.001)
    assert flaky.put(frames, deadline=soon()) == 3
    flaky.delay(1000)
    with pytest.raises(StoreTimeout):
        flaky.lookup(names_of(frames), deadline=soon(0.01))
    flaky.delay(0)
    flaky.inject("hang")
    with pytest.raises(StoreTimeout):
        flaky.get_record("key", deadline=soon(0.01))
    flaky.inject("hang", 0.0)
    assert flaky.lookup(names_of(frames), deadline=soon()) == 3
    assert flaky.injected == {"delay": 2, "hang": 1}


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "swap"])
def test_injected_damage(flaky: FlakyStore, fault: Fault) -> None:
    """Altered frames never pass verification, and the stored frames stay intact."""
    frames = make_frames(322, 4, 100)
    flaky.put(frames, deadline=soon())
    flaky.inject(fault)
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    for _ in range(10):
        for one, buffer, length in zip(
            frames, buffers, flaky.get(names_of(frames), buffers, deadline=soon()), strict=True
        ):
            with pytest.raises(BadFrame):
                check(buffer[:length], one.name)
    assert flaky.injected[fault] == 40
    flaky.inject(fault, 0.0)
    assert read(flaky, frames) == whole(frames)


def test_lost_puts(flaky: FlakyStore) -> None:
    """A lost put reports success and stores nothing."""
    frames = make_frames(323, 2, 100)
    flaky.inject("lose")
    assert flaky.put(frames, deadline=soon()) == 2
    assert flaky.lookup(names_of(frames), deadline=soon()) == 0


def test_a_plan_is_deterministic() -> None:
    """Equal seeds and plans fail the same calls."""

    def failures(seed: int) -> list[bool]:
        store = FlakyStore(MemoryStore(LARGE), seed=seed, plan={"fail": 0.5})
        found = []
        for _ in range(40):
            try:
                store.records("", deadline=soon())
                found.append(False)
            except StoreError:
                found.append(True)
        return found

    assert failures(1) == failures(1) != failures(2)
    assert 5 < sum(failures(1)) < 35
