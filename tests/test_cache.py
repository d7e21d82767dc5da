"""OffloadManager between a device and its stores: what is written behind, what is promoted, and what the counts say."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

import foreword.offload.manager
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import FlakyStore, soon
from foreword.offload.copies import Staging
from foreword.offload.manager import OffloadManager, StoreLoad
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
ROOT = b"r" * 32
BLOCKS = 64
FRAME = HEADER_BYTES + LAYOUT.block_bytes
PATIENCE = 60.0


class Gated(FlakyStore):
    """A store that takes nothing until its gate is open."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.at_close: Callable[[], None] = lambda: None

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.waiting.set()
        assert self.gate.wait(PATIENCE)
        return super().put(frames, deadline=deadline)

    def close(self) -> None:
        self.at_close()
        super().close()


class Device:
    """Blocks of one layer, and a cache over stores."""

    def __init__(self, *stores: Store, slots: int = 32) -> None:
        draw = torch.Generator().manual_seed(1)
        self.blocks = torch.randn(BLOCKS, LAYOUT.block_bytes // 4, generator=draw)
        self.computed = self.blocks.clone()
        self.cache = OffloadManager(TieredStore(stores), Staging([self.blocks], slots), LAYOUT, lookup_timeout=PATIENCE)

    def keys(self, chain: int, count: int) -> list[bytes]:
        return chain_keys(ROOT, [chain] * 16 * count, 16)

    def save(self, chain: int, first: int, count: int) -> None:
        """Device blocks from number `first` on as a chain of their own."""
        self.cache.save(self.keys(chain, count), ROOT, 0, range(first, first + count))

    def load(self, chain: int, first: int, count: int) -> StoreLoad:
        """Load a chain into the device blocks from number `first` on, and wait for the end of it."""
        self.blocks[first : first + count] = 0.0
        store_load = self.cache.find(self.keys(chain, count))
        self.wait(lambda: store_load.places is not None)
        self.cache.load(store_load, 0, range(first, first + count))
        self.wait(lambda: store_load.finished)
        return store_load

    def wait(self, done: Callable[[], bool]) -> None:
        until = soon(PATIENCE)
        while not done():
            assert soon(0.0) < until, "it takes too long"
            self.cache.wait(self.cache.changes, 0.01)

    def names(self, chain: int, count: int) -> list[Name]:
        return [LAYOUT.fingerprint + key for key in self.keys(chain, count)]


@pytest.fixture
def made() -> Iterator[Callable[..., Device]]:
    """Makes devices, and closes them in the end."""
    with ExitStack() as stack:

        def make(*stores: Store, slots: int = 32) -> Device:
            device = Device(*stores, slots=slots)
            stack.callback(device.cache.close)
            return device

        yield make


def below(made: Callable[..., Device], chains: int, count: int, slots: int = 32) -> tuple[Device, Gated, MemoryStore]:
    """A device whose slow tier has chains that the fast tier, which takes nothing yet, has not."""
    slow = MemoryStore(1 << 20, label="slow")
    other = Device(slow)
    for chain in range(chains):
        other.save(chain, chain * count, count)
        assert other.cache.flush(PATIENCE)
    fast = Gated(MemoryStore(1 << 20, label="fast"))
    return made(fast, slow, slots=slots), fast, slow


def test_who_waits_for_a_block_does_not_wait_for_its_promotion(made: Callable[..., Device]) -> None:
    """A load from a slower tier ends while the faster one still takes nothing; later the blocks are there."""
    device, fast, _ = below(made, 1, 6)
    try:
        store_load = device.load(0, 0, 6)
        assert store_load.loaded == 6 and torch.equal(device.blocks[:6], device.computed[:6])
        assert fast.waiting.wait(PATIENCE)
        assert fast.inner.lookup(device.names(0, 6), deadline=soon()) == 0
    finally:
        fast.gate.set()
    assert device.cache.flush(PATIENCE)
    assert fast.inner.lookup(device.names(0, 6), deadline=soon()) == 6
    assert device.load(0, 0, 6).tiers == [0] * 6
    status = device.cache.status()
    assert (status.dropped_promotions, status.saved, status.failed, status.queued) == (0, 0, 0, 0)
    assert torch.equal(device.blocks[:6], device.computed[:6])


def test_promotions_make_room_for_loads(made: Callable[..., Device]) -> None:
    """While the faster tier takes nothing, loads go on: promotions hold a bounded part of the slots, and what is dropped is
    counted; afterwards every slot is free again."""
    device, fast, _ = below(made, 8, 8, slots=16)
    try:
        for chain in range(8):
            first = chain * 8
            assert device.load(chain, first, 8).loaded == 8
            assert torch.equal(device.blocks[first : first + 8], device.computed[first : first + 8])
        dropped = device.cache.status().dropped_promotions
        assert dropped > 0
    finally:
        fast.gate.set()
    assert device.cache.flush(PATIENCE)
    assert fast.inner.status().blocks == 64 - dropped
    assert device.load(0, 0, 8).loaded == 8
    assert torch.equal(device.blocks, device.computed)


def test_promotions_are_written_before_the_end(made: Callable[..., Device]) -> None:
    """Closing the cache writes what was to be promoted, like everything else that waits."""
    device, fast, _ = below(made, 1, 4)
    there: list[int] = []
    fast.at_close = lambda: there.append(fast.inner.lookup(device.names(0, 4), deadline=soon()))
    assert device.load(0, 0, 4).loaded == 4
    fast.gate.set()
    device.cache.close()
    assert there == [4]


def test_only_what_a_tier_keeps_counts_as_saved(made: Callable[..., Device]) -> None:
    """A block that no tier kept is counted as failed; one that at least one tier kept as saved, once."""
    first, second = (FlakyStore(MemoryStore(1 << 20, label=label)) for label in ("first", "second"))
    device = made(first, second)
    first.fail()
    device.save(0, 0, 5)
    assert device.cache.flush(PATIENCE)
    assert (device.cache.status().saved, device.cache.status().failed) == (5, 0)
    second.fail()
    device.save(1, 5, 3)
    assert device.cache.flush(PATIENCE)
    status = device.cache.status()
    assert (status.saved, status.failed, status.dropped) == (5, 3, 0)


def test_what_does_not_fit_counts_as_failed(made: Callable[..., Device]) -> None:
    """Of a chain longer than the store what was kept is saved, and the rest failed."""
    device = made(MemoryStore(4 * FRAME))
    device.save(0, 0, 7)
    assert device.cache.flush(PATIENCE)
    status = device.cache.status()
    assert (status.saved, status.failed, status.dropped) == (4, 3, 0)


@contextmanager
def interleaved(file: str | None) -> Iterator[None]:
    """Threads that start from now on let others go on between any two instructions of the code in `file`."""

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        os.sched_yield()  # which hands the interpreter on
        return step

    threading.settrace(step)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        threading.settrace(None)  # type: ignore[arg-type]


def test_no_count_of_several_loads_is_lost(made: Callable[..., Device]) -> None:
    """However the threads of several loads take turns, every block that was loaded is counted."""
    brought = 0
    with interleaved(foreword.offload.manager.__file__):
        device = made(MemoryStore(1 << 20))
        device.save(0, 0, 1)
        assert device.cache.flush(PATIENCE)
        for _ in range(10):
            told = device.cache.changes  # one more for each search and for each load
            store_loads = [device.cache.find(device.keys(0, 1)) for _ in range(4)]
            device.wait(lambda told=told: device.cache.changes == told + 4)
            for block, store_load in enumerate(store_loads):
                device.cache.load(store_load, 0, [block])
            device.wait(lambda told=told: device.cache.changes == told + 8)
            brought += sum(store_load.loaded for store_load in store_loads)
    assert brought == device.cache.status().loaded == 40
