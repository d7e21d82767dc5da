"""The offload manager between a device and its stores: write-behind, promotion, counts, and load decisions."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
import whole_loads
import xxhash
from example_counts import represented
from lazy_queues import LazyQueues
from processes import in_child

import foreword.offload.manager
import foreword.offload.writer
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout, chain_prefix
from foreword.blocks.salt import TENANT_BYTES
from foreword.conformance import FlakyStore, make_frames, names_of, put_all, read, soon, whole
from foreword.engine.external_kv import EngineStores
from foreword.offload.device import Stream
from foreword.offload.load import StoreLoad
from foreword.offload.policy import FixedCosts, LoadCosts, search_seconds
from foreword.offload.search import Found
from foreword.offload.slot_reads import SlotRead, read_into
from foreword.offload.slots import StagingSlots
from foreword.offload.staging import StagingArena
from foreword.offload.writer import WriteBatch, WriteBehind
from foreword.prefixes.erasure import erase_prefixes
from foreword.store import background
from foreword.store.background import PagePopulator
from foreword.store.base import Loan, Name, Store
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, UnreadBlock, seal
from foreword.store.memory import memory_store
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
ROOT = b"r" * 32
BLOCKS = 64
FRAME = HEADER_BYTES + LAYOUT.block_bytes
PATIENCE = 60.0


class Gated(FlakyStore):
    """A store whose `put` waits until its gate is open."""

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


class Spoiled(FlakyStore):
    """A store that loses one block of each read, or reads it damaged."""

    def __init__(self, store: Store, number: int, damaged: bool) -> None:
        super().__init__(store)
        self._number, self._damaged = number, damaged

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        sizes = super().get(names, buffers, deadline=deadline)
        if self._damaged:
            buffers[self._number][sizes[self._number] - 1] ^= 1
        else:
            sizes[self._number] = 0
        return sizes


class Device:
    """Blocks of one layer, and an offload manager over stores."""

    def __init__(self, *stores: Store, slots: int = 32) -> None:
        store = stores[0] if isinstance(stores[0], TieredStore) else TieredStore(stores)
        draw = torch.Generator().manual_seed(1)
        self.blocks = torch.randn(BLOCKS, LAYOUT.block_bytes // 4, generator=draw)
        self.computed = self.blocks.clone()
        arena = StagingArena([[self.blocks]], slots)
        self.offload = EngineStores(store, arena, [LAYOUT], lookup_timeout=PATIENCE)

    def keys(self, chain: int, count: int) -> list[bytes]:
        return chain_keys(ROOT, [chain] * 16 * count, 16)

    def save(self, chain: int, first: int, count: int) -> None:
        """Save device blocks from number `first` on as a new chain."""
        self.offload.save(ROOT, self.keys(chain, count), ROOT, 0, range(first, first + count))

    def load(self, chain: int, first: int, count: int) -> StoreLoad:
        """Load a chain into the device blocks from number `first` on, and wait for the end of it."""
        self.blocks[first : first + count] = 0.0
        store_load = whole_loads.load(self.offload, ROOT, self.keys(chain, count), range(first, first + count))
        self.wait(lambda: store_load.finished)
        return store_load

    def wait(self, done: Callable[[], bool]) -> None:
        until = soon(PATIENCE)
        while not done():
            assert soon(0.0) < until, "timeout"
            self.offload.wait(self.offload.changes, 0.01)

    def names(self, chain: int, count: int) -> list[Name]:
        return [chain_prefix(LAYOUT.fingerprint, ROOT) + key for key in self.keys(chain, count)]


@pytest.fixture
def made() -> Iterator[Callable[..., Device]]:
    """Makes devices, and closes them in the end."""
    with ExitStack() as stack:

        def make(*stores: Store, slots: int = 32) -> Device:
            device = Device(*stores, slots=slots)
            stack.callback(device.offload.close)
            return device

        yield make


def with_slow_tier(
    made: Callable[..., Device], chains: int, count: int, slots: int = 32
) -> tuple[Device, Gated, MemoryStore]:
    """A device with chains in its slow tier. Its fast tier is empty, and its gate is closed."""
    slow = MemoryStore(1 << 20, label="slow")
    other = Device(slow, slots=max(32, 2 * count))
    for chain in range(chains):
        other.save(chain, chain * count, count)
        assert other.offload.flush(PATIENCE)
    fast = Gated(MemoryStore(1 << 20, label="fast"))
    return made(fast, slow, slots=slots), fast, slow


def _erase_queued(offload: EngineStores, roots: Sequence[bytes], timeout: float = 5.0) -> int:
    """Drop what waits to be written, as before a sweep that finds nothing."""
    with offload.erasing(roots, timeout) as queued:
        return queued


def test_a_load_does_not_wait_for_promotion(made: Callable[..., Device]) -> None:
    """A load from a slower tier ends while the faster one still blocks; the faster one gets the blocks later."""
    device, fast, _ = with_slow_tier(made, 1, 6)
    try:
        store_load = device.load(0, 0, 6)
        assert store_load.loaded == 6 and torch.equal(device.blocks[:6], device.computed[:6])
        assert fast.waiting.wait(PATIENCE)
        assert fast.inner.lookup(device.names(0, 6), deadline=soon()) == 0
    finally:
        fast.gate.set()
    assert device.offload.flush(PATIENCE)
    assert fast.inner.lookup(device.names(0, 6), deadline=soon()) == 6
    assert device.load(0, 0, 6).tiers == [0] * 6
    status = device.offload.status()
    assert (status.dropped_promotions, status.saved, status.failed, status.queued) == (0, 0, 0, 0)
    assert torch.equal(device.blocks[:6], device.computed[:6])


def test_a_promotion_waits_until_nothing_is_loaded(
    made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that were loaded are not written into a faster tier while more may be loaded, and delay no save; a flush ends the
    wait."""
    monkeypatch.setattr("foreword.offload.writer._PROMOTION_PAUSE", 1e6)
    monkeypatch.setattr("foreword.offload.writer._LONGEST_PAUSE", 1e6)
    device, fast, _ = with_slow_tier(made, 1, 4)
    fast.gate.set()
    assert device.load(0, 0, 4).loaded == 4
    device.save(1, 4, 4)
    device.wait(lambda: device.offload.status().saved == 4)
    assert fast.inner.lookup(device.names(0, 4), deadline=soon()) == 0
    assert device.offload.flush(PATIENCE)
    assert fast.inner.lookup(device.names(0, 4), deadline=soon()) == 4


def test_a_promotion_waits_no_longer_than_its_limit(
    made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loads never pause, what was loaded is written into the faster tier all the same."""
    monkeypatch.setattr("foreword.offload.writer._PROMOTION_PAUSE", 1e6)
    monkeypatch.setattr("foreword.offload.writer._LONGEST_PAUSE", 0.01)
    device, fast, _ = with_slow_tier(made, 1, 4)
    fast.gate.set()
    assert device.load(0, 0, 4).loaded == 4
    device.wait(lambda: fast.inner.lookup(device.names(0, 4), deadline=soon()) == 4)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_load_ends_before_a_bad_block(made: Callable[..., Device], damaged: bool) -> None:
    """Blocks before a lost or damaged one in the middle of a load count as loaded, and none behind it."""
    store = MemoryStore(1 << 20)
    device = made(Spoiled(store, 5, damaged))
    device.save(0, 0, 8)
    assert device.offload.flush(PATIENCE)
    assert device.load(0, 0, 8).loaded == 5
    assert torch.equal(device.blocks[:5], device.computed[:5]) and not device.blocks[5:8].any()


def test_a_load_from_lent_memory_ends_before_a_bad_block(made: Callable[..., Device]) -> None:
    """A store in memory lends its frames to a load. Those before a damaged one are loaded, and the damaged one is deleted."""
    store = MemoryStore(1 << 20)
    device = made(store)
    device.save(0, 0, 8)
    assert device.offload.flush(PATIENCE)
    names = device.names(0, 8)
    with store.lend(names, deadline=soon()) as lent:
        assert len(lent.frames) == 8
        lent.frames[5][1000] ^= 1
    assert device.load(0, 0, 8).loaded == 5
    assert torch.equal(device.blocks[:5], device.computed[:5]) and not device.blocks[5:8].any()
    assert store.present(names, deadline=soon()) == [number != 5 for number in range(8)]
    [tier] = device.offload.store.tiers
    assert tier.counters.bad["checksum"] == 1


def filled(chain: int, count: int) -> MemoryStore:
    """A store with a chain."""
    store = MemoryStore(1 << 20, label="slow")
    device = Device(store, slots=2 * count)
    device.save(chain, 0, count)
    assert device.offload.flush(PATIENCE)
    return store


def test_a_load_is_read_into_the_faster_tier(made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from a slower tier are read into the memory of the faster one, verified there once and copied once, from there
    into the device. They are found there when the load has ended, and nothing waits to be written."""
    slow, fast = FlakyStore(filled(0, 64)), MemoryStore(1 << 20)
    device = made(fast, slow, slots=16)
    hashed = list[int]()

    def counted(data: Any) -> Any:
        hashed.append(len(data))
        return xxh3_128(data)

    def refused(*given: Any) -> None:
        raise AssertionError("a copy")

    xxh3_128 = xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", counted)
    monkeypatch.setattr(memory_store.MemoryArena, "write", refused)
    monkeypatch.setattr(StagingArena, "buffer", refused)
    load = device.load(0, 0, 64)
    assert (load.loaded, load.tiers, device.offload.status().queued) == (64, [1] * 64, 0)
    assert torch.equal(device.blocks, device.computed) and hashed == [LAYOUT.block_bytes] * 64
    assert fast.lookup(device.names(0, 64), deadline=soon()) == 64
    tiers = device.offload.store.tiers
    assert [tier.counters.hit_blocks for tier in tiers] == [0, 64] and tiers[0].counters.written_blocks == 64
    assert device.load(0, 0, 64).tiers == [0] * 64 and torch.equal(device.blocks, device.computed)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_bad_block_is_not_kept_by_the_faster_tier(made: Callable[..., Device], damaged: bool) -> None:
    """A block that is lost or damaged when it is read into a faster tier ends the load, and is not found there."""
    fast = MemoryStore(1 << 20)
    device = made(fast, Spoiled(filled(0, 8), 5, damaged))
    assert device.load(0, 0, 8).loaded == 5
    assert torch.equal(device.blocks[:5], device.computed[:5]) and not device.blocks[5:8].any()
    assert fast.present(device.names(0, 8), deadline=soon()) == [number != 5 for number in range(8)]


def test_the_first_loads_wait_for_no_page(made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine starts, and loads what a slower tier has, while no page of its memory tier is populated: the blocks go through
    the staging arena, and are written to the tier behind the load."""
    gate, reserved = threading.Event(), list[int]()

    def wait(self: PagePopulator, *given: Any) -> None:
        gate.wait(PATIENCE)

    monkeypatch.setattr(PagePopulator, "_run", wait)
    monkeypatch.setattr(background, "_FIRST_BYTES", 0)
    slow, fast = filled(0, 8), MemoryStore(1 << 20)
    device, reserve = made(fast, slow), fast.reserve

    def counted(headers: Any, **more: Any) -> Any:
        found = reserve(headers, **more)
        reserved.append(len(found.slots))
        return found

    monkeypatch.setattr(fast, "reserve", counted)
    try:
        assert device.load(0, 0, 8).loaded == 8 and torch.equal(device.blocks[:8], device.computed[:8])
        assert reserved and not any(reserved)
        assert device.offload.flush(PATIENCE) and fast.lookup(device.names(0, 8), deadline=soon()) == 8
    finally:
        gate.set()


def test_slots_are_reserved_for_two_groups_at_once(
    made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load reads twice as many blocks into slots of the faster tier as the staging arena takes at once: each reservation has
    a cost of its own. Its first group, for which it has little time, is no larger than others."""
    slow, fast, taken = filled(0, 32), MemoryStore(1 << 20), list[int]()
    device, reserve = made(fast, slow), fast.reserve

    def counted(headers: Any, **more: Any) -> Any:
        taken.append(len(headers))
        return reserve(headers, **more)

    monkeypatch.setattr(fast, "reserve", counted)
    assert device.load(0, 0, 32).loaded == 32 and torch.equal(device.blocks[:32], device.computed[:32])
    assert [count for count in taken if count > 1] == [8, 16, 8]


def test_what_is_erased_is_not_read_into_a_faster_tier(made: Callable[..., Device]) -> None:
    """Blocks that a load has read before an erasure, into slots of the faster tier, are not found there behind it."""
    slow, fast = filled(0, 4), MemoryStore(1 << 20)
    device = made(fast, slow)
    reading, go_on, get = threading.Event(), threading.Event(), slow.get

    def held(*arguments: Any, **more: Any) -> list[int]:
        found = get(*arguments, **more)
        reading.set()
        assert go_on.wait(PATIENCE)
        return found

    slow.get = held  # type: ignore[method-assign]
    keys = device.keys(0, 4)
    load = device.offload.load(whole_loads.plan_of(device.offload, ROOT, keys), ROOT, keys, range(4))
    assert reading.wait(PATIENCE)
    assert _erase_queued(device.offload, [ROOT[:8]]) == 0
    go_on.set()
    device.wait(lambda: load.done)
    assert not any(fast.present(device.names(0, 4), deadline=soon()))
    assert device.load(0, 0, 4).loaded == 4
    assert all(fast.present(device.names(0, 4), deadline=soon()))


def test_a_load_that_begins_during_an_erasure() -> None:
    """Blocks that a load reads from a tier that is not swept yet do not get into one that is, with and without a copy between;
    after the erasure the same load's rest does not either, and a later load does."""
    for size in (1 << 20, 2 * FRAME):  # the second has no room for reads into its slots of the whole chain
        slow, fast = filled(0, 4), MemoryStore(size, label="fast")
        device = Device(fast, slow)
        with device.offload.erasing([ROOT[:8]]) as queued:
            fast.erase(b"", ROOT[:8], deadline=soon())
            assert queued == 0 and device.load(0, 0, 4).loaded == 4
            assert device.offload.flush(PATIENCE)
            assert not any(fast.present(device.names(0, 4), deadline=soon()))
        assert device.load(0, 0, 4).loaded == 4
        assert device.offload.flush(PATIENCE)
        assert any(fast.present(device.names(0, 4), deadline=soon()))


def late_read(store: TieredStore, names: Sequence[Name]) -> SlotRead:
    """A read from the second tier, which hangs, that is late. On a busy machine the thread of one may not begin in time: then
    nothing is under way."""
    until = soon()
    while True:
        assert soon(0.0) < until
        read = read_into(store, 1, names, [1000] * len(names), deadline=soon(0.1), before=())
        if read is not None and any(call.started for call in read._late):
            return read
        if read is not None:
            read.end(lambda *_: False)
        store.tiers[1].breaker.succeeded()  # that was no failure


def test_slots_of_a_read_that_hangs() -> None:
    """Slots that a read which does not return may still write into are not given back before it does, and nothing of it is
    found; then they take other blocks, which it does not change."""
    gate, reading = threading.Event(), threading.Event()

    class Late(MemoryStore):
        blocking = True

        def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
            reading.set()
            assert gate.wait(60)
            return super().get(names, buffers, deadline=soon())

    frames, others = make_frames(8, 4, 1000), make_frames(9, 16, 1000)
    fast, slow = MemoryStore(16 * len(frames[0].data)), Late(1 << 20, label="slow")
    slow.put(frames, deadline=soon())
    published = list[object]()

    def keep(headers: Sequence[Header], publish: Callable[[], object]) -> bool:
        published.append(headers)
        publish()
        return True

    with contextlib.closing(TieredStore([fast, slow])) as store:
        part = late_read(store, names_of(frames))
        assert reading.wait(60) and [*part.frames] == [None] * 4
        part.end(keep)
        del part
        gc.collect()
        assert put_all(fast, others) == 12, "a read may write into the others"
        gate.set()
        until = soon()
        while put_all(fast, others) < 16:
            assert soon(0.0) < until, "the slots are free"
            time.sleep(0.01)
        assert read(fast, others) == whole(others) and not published


def test_reads_that_would_read_nothing() -> None:
    """No slot is read into, and nothing evicted for it, from a slower tier that is off, or of a chain whose first block another
    load is reading."""
    slow, fast = filled(0, 8), MemoryStore(8 * FRAME, label="fast")
    device = Device(fast, slow)
    device.save(1, 0, 7)
    assert device.offload.flush(PATIENCE)
    store, names, sizes = device.offload.store, device.names(0, 8), [LAYOUT.block_bytes] * 8
    other = fast.reserve([UnreadBlock(names[0], names[0], LAYOUT.block_bytes)], unread=True, deadline=soon())
    read = read_into(store, 1, names, sizes, deadline=soon(), before=())
    assert len(other.slots) == 1 and read is not None and not read.frames
    read.end(lambda headers, publish: bool(publish()))
    fast.abandon(other)
    assert store.tiers[1].breaker.failed(certain=True)
    assert read_into(store, 1, names, sizes, deadline=soon(), before=()) is None
    assert fast.lookup(device.names(1, 7), deadline=soon()) == 7 and fast.status().evictions == 0


@pytest.mark.parametrize(("slots", "longer", "taken"), [(32, 1, 8), (32, 3, 8), (3, 1, 1)])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_large_read_that_hangs_takes_few_slots(slots: int, longer: int, taken: int, fixed: bool) -> None:
    """A read, also the first, has at most a quarter of a faster tier's slots, or one, however long they are or become: the
    others take other blocks while it hangs."""
    frames, others = make_frames(14, 32, 1000), make_frames(15, slots, 1000)
    size = longer * len(frames[0].data)
    given: dict[str, int] = {"slot_bytes": size} if fixed else {"longest": size}
    fast, slow = MemoryStore(slots * size, **given), FlakyStore(MemoryStore(1 << 20))
    put_all(slow, frames)
    with contextlib.closing(TieredStore([fast, slow])) as store:
        slow.stick()
        read = late_read(store, names_of(frames))
        assert len(read.reserved.slots) == taken
        read.end(lambda *_: False)
        assert put_all(fast, others) == slots - taken
        slow.release()


def test_a_forked_child_reads_into_a_faster_tier() -> None:
    """A child that is forked while a read of its parent into a faster tier is late reads into that tier: the late read's
    thread, which would end it, does not exist there."""
    frames = make_frames(16, 4, 1000)
    fast, slow = MemoryStore(1 << 20, longest=FRAME), FlakyStore(MemoryStore(1 << 20))
    put_all(slow, frames)
    with contextlib.closing(TieredStore([fast, slow])) as store:
        slow.stick()
        late = late_read(store, names_of(frames))
        assert store.tiers[0].filling.late == 1
        late.end(lambda *_: False)

        def child() -> None:
            other = MemoryStore(1 << 20)
            put_all(other, frames)
            slow.inner = other
            slow.release()
            read = read_into(store, 1, names_of(frames), [1000] * 4, deadline=soon(), before=())
            assert read is not None and all(read.frames)
            read.end(lambda headers, publish: bool(publish()))
            assert (store.tiers[0].filling.late, store.tiers[0].filling.bytes) == (0, 0)

        assert in_child(child) == 0
        slow.release()


def test_a_tier_that_says_less_than_it_reserves() -> None:
    """Nothing is read into the slots of a tier that are longer than it says each time: the reads go another way."""

    class Less(MemoryStore):
        @property
        def slot_bytes(self) -> int:
            return super().slot_bytes // 3

    frames = make_frames(19, 4, 1000)
    slow = MemoryStore(1 << 20)
    put_all(slow, frames)
    with contextlib.closing(TieredStore([Less(1 << 20, slot_bytes=3 * len(frames[0].data)), slow])) as store:
        assert read_into(store, 1, names_of(frames), [1000] * 4, deadline=soon(), before=()) is None
        assert store.tiers[0].filling.bytes == 0


def test_slots_that_became_longer_between_two_reads() -> None:
    """A read has at most a quarter of a faster tier's memory, also after a write of longer blocks has made its slots longer
    since the read before. It evicts nothing for slots that it may not have, and it gives back what it has counted."""
    few, many, large = make_frames(16, 4, 16 << 10), make_frames(17, 200, 16 << 10), make_frames(18, 20, 512 << 10)
    fast, slow = MemoryStore(16 << 20), MemoryStore(64 << 20, label="slow")
    put_all(slow, [*few, *many])
    with contextlib.closing(TieredStore([fast, slow])) as store:

        def taken(frames: Sequence[Frame]) -> tuple[int, int]:
            one = read_into(store, 1, names_of(frames), [16 << 10] * len(frames), deadline=soon(), before=())
            assert one is not None and len(one.loan.frames) == len(one.reserved.slots)
            counted = store.tiers[0].filling.bytes
            one.end(lambda headers, publish: bool(publish()))
            return len(one.reserved.slots) * one.reserved.stride, counted

        taken(few)
        assert put_all(fast, large) == 20
        held, counted = taken(many)
        assert fast.lookup(names_of(large), deadline=soon()) == 20
        assert 0 < held <= counted <= 4 << 20 and store.tiers[0].filling.bytes == 0
        assert fast.lookup(names_of(many), deadline=soon()) == held // fast.status().notes["slot_bytes"]


def test_a_tier_that_hangs_takes_few_slots() -> None:
    """Reads at once fill a quarter of a faster tier. While one is late no other begins."""
    gate, reading = threading.Event(), threading.Event()

    class Late(MemoryStore):
        blocking = True

        def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
            reading.set()
            assert gate.wait(60)
            return super().get(names, buffers, deadline=soon())

    chains = [make_frames(seed, 4, 1000) for seed in range(10, 14)]
    fast, slow = MemoryStore(40 * len(chains[0][0].data), label="fast"), Late(1 << 20, label="slow")
    for frames in chains:
        slow.put(frames, deadline=soon())
    with contextlib.closing(TieredStore([fast, slow])) as store:
        begun = list[Any]()

        def begin(chain: int) -> None:
            begun.append(read_into(store, 1, names_of(chains[chain]), [1000] * 4, deadline=soon(), before=()))

        threads = [threading.Thread(target=begin, args=(chain,)) for chain in range(2)]
        for thread in threads:
            thread.start()
            assert reading.wait(PATIENCE)
        until = soon()
        while store.tiers[0].filling.bytes < 8 * len(chains[0][0].data):
            assert soon(0.0) < until
            time.sleep(0.001)
        assert read_into(store, 1, names_of(chains[2]), [1000] * 4, deadline=soon(), before=()) is None
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)
        for one in begun:
            one.end(lambda headers, publish: bool(publish()))
        assert sum(fast.lookup(names_of(frames), deadline=soon()) for frames in chains) == 8
        gate.clear()
        late_read(store, names_of(chains[2])).end(lambda headers, publish: bool(publish()))
        assert read_into(store, 1, names_of(chains[3]), [1000] * 4, deadline=soon(), before=()) is None
        gate.set()
        until = soon()
        while store.tiers[0].filling.bytes:
            assert soon(0.0) < until
            time.sleep(0.001)


def test_a_faster_tier_that_is_full_for_a_moment() -> None:
    """A load goes on to promote its blocks if others have slots of the faster tier and give them back."""
    slow, fast = filled(0, 32), MemoryStore(40 * FRAME, label="fast")
    device = Device(fast, slow, slots=32)
    held = fast.reserve([frame.header for frame in make_frames(3, 36, LAYOUT.block_bytes)], deadline=soon())
    get, reads = slow.get, list[int]()

    def freed(*arguments: Any, **more: Any) -> list[int]:
        reads.append(1)
        if len(reads) == 2:
            fast.abandon(held)
        return get(*arguments, **more)

    slow.get = freed  # type: ignore[method-assign]
    assert len(held.slots) == 36 and device.load(0, 0, 32).loaded == 32
    assert device.offload.flush(PATIENCE)
    assert fast.lookup(device.names(0, 32), deadline=soon()) == 32


def test_promotions_make_room_for_loads(made: Callable[..., Device]) -> None:
    """While the faster tier blocks, loads continue: promotions give their slots to them. When it works again, it gets all
    blocks of all loads. Afterwards every slot is free again."""
    device, fast, _ = with_slow_tier(made, 8, 8, slots=16)
    try:
        for chain in range(8):
            first = chain * 8
            assert device.load(chain, first, 8).loaded == 8
            assert torch.equal(device.blocks[first : first + 8], device.computed[first : first + 8])
        assert device.offload.status().queued == 64
    finally:
        fast.gate.set()
    assert device.offload.flush(PATIENCE)
    assert (device.offload.status().dropped_promotions, fast.inner.status().blocks) == (0, 64)
    assert device.load(0, 0, 8).tiers == [0] * 8
    assert torch.equal(device.blocks, device.computed)


def test_a_promotion_without_slots_delays_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are written while a postponed promotion waits for slots that loads have; it is written when they are free."""
    monkeypatch.setattr(foreword.offload.writer, "_PROMOTION_PAUSE", 0.0)
    monkeypatch.setattr(foreword.offload.writer, "_LONGEST_PAUSE", 0.0)
    fast = Gated(MemoryStore(1 << 20, label="fast"))
    store, blocks = TieredStore([fast]), torch.zeros(8, LAYOUT.block_bytes // 4)
    staging = StagingArena([[blocks]], 12)
    saving, loading = StagingSlots(range(4)), StagingSlots(range(4, 12))
    writer = WriteBehind(store, staging, lambda names, slots, deadline: ([None] * len(slots), set()))
    size = LAYOUT.block_bytes

    def headers(chain: int) -> list[Header]:
        keys = chain_keys(ROOT, [chain] * 64, 16)
        return [
            Header(LAYOUT.fingerprint, ROOT[:16], key, before, depth, RAW, size, size)
            for depth, (key, before) in enumerate(zip(keys, (ROOT, *keys), strict=False))
        ]

    def batch(chain: int) -> WriteBatch:
        taken = saving.take(4)
        assert taken is not None
        return WriteBatch(headers(chain), taken, saving, {0})

    writer.add([batch(1)])  # the thread waits in the store
    assert fast.waiting.wait(PATIENCE)
    taken = loading.take(8)
    assert taken is not None
    writer.promote(headers(2), taken[:4], loading, [0], writer.began())
    assert writer.drop_stored(loading)  # postponed
    loads = loading.take(4)
    assert loads is not None and loading.take(1) is None
    fast.gate.set()
    saving.wait_for_room(4, soon(PATIENCE))
    writer.add([batch(3)])
    saving.wait_for_room(4, soon(2.0))
    assert (writer.saved, writer.queued) == (8, 4)
    loading.give(loads)
    assert writer.flush(PATIENCE)
    writer.close()


def test_a_postponed_promotion_gets_slots_of_later_blocks() -> None:
    """Later blocks of a load wait for a promotion that was postponed. It gets their slots, and does not wait for them."""
    blocks, read = torch.zeros(8, LAYOUT.block_bytes // 4), list[int]()
    staging, store = StagingArena([[blocks]], 8), TieredStore([MemoryStore(1 << 20)])
    pool = StagingSlots(range(8))

    def read_nothing(names: Sequence[Name], slots: Sequence[int], deadline: float) -> tuple[list[None], set[int]]:
        read.append(len(names))
        return [None] * len(slots), set()

    writer = WriteBehind(store, staging, read_nothing)
    keys = chain_keys(ROOT, [1] * 16 * 10, 16)
    chain = [
        Header(LAYOUT.fingerprint, ROOT[:16], key, before, depth, RAW, LAYOUT.block_bytes, LAYOUT.block_bytes)
        for depth, (key, before) in enumerate(zip(keys, (ROOT, *keys), strict=False))
    ]
    load = writer.began()
    for low, high, postponed in [(0, 4, True), (4, 8, False), (8, 10, False)]:
        taken = pool.take(high - low)
        assert taken is not None
        writer.promote(chain[low:high], taken, pool, [0], load)
        assert not postponed or writer.drop_stored(pool)
    assert pool.take(4) is None
    assert writer.flush(10.0)
    writer.close()
    assert sorted(read) == [2, 4] and pool.take(8) is not None


@pytest.mark.parametrize(("erasures", "promoted"), [(100, 4), (3000, 0)])
def test_a_load_beside_very_many_erasures(erasures: int, promoted: int) -> None:
    """A load remembers few erasures one by one, and promotes what is of no erased root. Beside more of them it promotes
    nothing, and an erasure costs no more with each one before it."""
    blocks, size = torch.zeros(8, LAYOUT.block_bytes // 4), LAYOUT.block_bytes
    fast = MemoryStore(1 << 20)
    with contextlib.closing(TieredStore([fast])) as store:
        staging, pool = StagingArena([[blocks]], 8), StagingSlots(range(8))
        writer = WriteBehind(store, staging, lambda names, slots, deadline: ([None] * len(slots), set()))
        load = writer.began()
        for number in range(erasures):
            with writer.erasing([b"e" + number.to_bytes(15, "big")], 0.0) as left:
                assert left == 0
        assert len(load.erased) <= 1024
        keys, taken = chain_keys(ROOT, [1] * 64, 16), pool.take(4)
        assert taken is not None
        fields = enumerate(zip(keys, (ROOT, *keys), strict=False))
        chain = [Header(LAYOUT.fingerprint, ROOT[:16], key, prior, at, RAW, size, size) for at, (key, prior) in fields]
        for header, slot in zip(chain, taken, strict=True):
            seal(header, staging.buffer(slot))
        writer.promote(chain, taken, pool, [0], load)
        assert writer.flush(PATIENCE)
        writer.close()
        assert fast.lookup([header.name for header in chain], deadline=soon()) == promoted
        assert pool.take(8) is not None


def test_a_promotion_that_lost_its_slots_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a promotion gives its slots to an earlier one of its load, and too many are postponed already, it is dropped and
    counted; what is written together with it, such as blocks of a request, is stored."""
    monkeypatch.setattr(foreword.offload.writer, "_PROMOTION_PAUSE", 0.0)
    monkeypatch.setattr(foreword.offload.writer, "_MOST_POSTPONED", 6)
    blocks, size = torch.zeros(8, LAYOUT.block_bytes // 4), LAYOUT.block_bytes
    fast = Gated(MemoryStore(1 << 20))
    staging, store = StagingArena([[blocks]], 128), TieredStore([fast])
    loading, saving = StagingSlots(range(8)), StagingSlots(range(8, 16))
    writer = WriteBehind(store, staging, lambda names, slots, deadline: ([None] * len(slots), set()))

    def headers(chain: int, count: int) -> list[Header]:
        keys = chain_keys(ROOT, [chain] * 16 * count, 16)
        pairs = enumerate(zip(keys, (ROOT, *keys), strict=False))
        return [Header(LAYOUT.fingerprint, ROOT[:16], key, prior, at, RAW, size, size) for at, (key, prior) in pairs]

    def save(chain: int) -> None:
        taken = saving.take(4)
        assert taken is not None
        writer.add([WriteBatch(headers(chain, 4), taken, saving, {0})])

    save(2)
    assert fast.waiting.wait(PATIENCE)
    chain, load = headers(1, 12), writer.began()
    for low, high, postponed in [(0, 4, True), (4, 8, False), (8, 12, False)]:
        taken = loading.take(high - low)
        assert taken is not None
        writer.promote(chain[low:high], taken, loading, [0], load)
        assert not postponed or writer.drop_stored(loading)
    save(3)
    fast.gate.set()
    assert writer.flush(PATIENCE)
    assert (writer.saved, writer.failed, writer.dropped_promotions) == (8, 0, 4)
    assert loading.take(8) is not None and saving.take(8) is not None
    writer.close()


@pytest.mark.parametrize("slots", [4, 16, 256])
def test_all_of_a_load_is_promoted(made: Callable[..., Device], slots: int) -> None:
    """After a load of many blocks from a slower tier all of them are in the faster one, however few slots there are."""
    device, fast, _ = with_slow_tier(made, 1, 64, slots=slots)
    fast.gate.set()
    assert device.load(0, 0, 64).loaded == 64
    assert device.offload.flush(PATIENCE)
    assert fast.inner.lookup(device.names(0, 64), deadline=soon()) == 64
    assert device.load(0, 0, 64).tiers == [0] * 64 and torch.equal(device.blocks[:64], device.computed[:64])
    assert device.offload.status().dropped_promotions == 0


def test_what_waits_for_a_promotion_is_erased(made: Callable[..., Device]) -> None:
    """Blocks that would be read again for a promotion are not read after an erasure."""
    device, fast, slow = with_slow_tier(made, 4, 8, slots=16)
    reads: list[Name] = []
    try:
        for chain in range(4):
            assert device.load(chain, 8 * chain, 8).loaded == 8
        slow.get = lambda names, *_, **__: reads.extend(names) or [0] * len(names)  # type: ignore[method-assign]
        assert fast.waiting.wait(PATIENCE)
        writing = _erase_queued(device.offload, [ROOT[:8]], 0.0)
        assert 0 < writing <= 4 and device.offload.status().queued == writing
    finally:
        fast.gate.set()
    assert device.offload.flush(PATIENCE) and not reads
    assert fast.inner.status().blocks <= writing


def test_a_small_tier_keeps_the_first_blocks_of_a_load(made: Callable[..., Device]) -> None:
    """A faster tier without room for a load gets its first blocks, and loads after it push none of them out."""
    slow, fast = MemoryStore(1 << 20, label="slow"), MemoryStore(10 * (LAYOUT.block_bytes + 192), label="fast")
    other = Device(slow, slots=128)
    other.save(0, 0, 64)
    assert other.offload.flush(PATIENCE)
    device = made(fast, slow, slots=16)
    for _ in range(3):
        assert device.load(0, 0, 64).loaded == 64
        assert device.offload.flush(PATIENCE)
        assert torch.equal(device.blocks[:64], device.computed[:64])
    assert fast.lookup(device.names(0, 64), deadline=soon()) >= 8
    assert fast.status().evictions == 0


def test_closing_writes_promotions(made: Callable[..., Device]) -> None:
    """Closing the manager writes queued promotions, like everything else in the queue."""
    device, fast, _ = with_slow_tier(made, 1, 4)
    there: list[int] = []
    fast.at_close = lambda: there.append(fast.inner.lookup(device.names(0, 4), deadline=soon()))
    assert device.load(0, 0, 4).loaded == 4
    fast.gate.set()
    device.offload.close()
    assert there == [4]


def test_what_is_erased_is_not_written_afterwards(made: Callable[..., Device]) -> None:
    """Blocks that wait to be written are dropped, those being written are waited for, and what is saved later is written. The
    slots of all are free again."""
    store = Gated(MemoryStore(1 << 20))
    device = made(store)
    device.save(0, 0, 4)
    assert store.waiting.wait(PATIENCE)
    for chain in range(1, 4):
        device.save(chain, 4 * chain, 4)
    assert _erase_queued(device.offload, [b"another"], 0.0) == 0 and device.offload.status().queued == 16
    assert _erase_queued(device.offload, [ROOT[:8]], 0.0) == 4, "these are being written"
    assert device.offload.status().queued == 4
    store.gate.set()
    assert _erase_queued(device.offload, [ROOT[:8]], PATIENCE) == 0
    store.erase(deadline=soon())
    device.save(5, 20, 4)
    assert device.offload.flush(PATIENCE)
    assert store.inner.status().blocks == 4
    assert device.load(5, 20, 4).loaded == 4
    for chain in range(4):
        device.save(chain, 4 * chain, 4)
    assert device.offload.flush(PATIENCE) and device.offload.status().dropped == 0


def test_what_is_erased_is_not_promoted_afterwards(made: Callable[..., Device]) -> None:
    """A load that began before an erasure brings nothing of it back into a faster tier; one that begins later may."""
    device, fast, slow = with_slow_tier(made, 2, 4)
    fast.gate.set()
    keys = device.keys(0, 4)
    plan = whole_loads.plan_of(device.offload, ROOT, keys)
    reading, go_on = threading.Event(), threading.Event()
    get = slow.get

    def held(*arguments: Any, **more: Any) -> list[int]:
        found = get(*arguments, **more)
        reading.set()
        assert go_on.wait(PATIENCE)
        return found

    slow.get = held  # type: ignore[method-assign]
    store_load = device.offload.load(plan, ROOT, keys, range(4))
    assert reading.wait(PATIENCE)
    assert _erase_queued(device.offload, [ROOT[:8]]) == 0
    go_on.set()
    device.wait(lambda: store_load.finished)
    assert device.offload.flush(PATIENCE)
    assert fast.inner.lookup(device.names(0, 4), deadline=soon()) == 0
    assert device.load(1, 4, 4).loaded == 4
    assert device.offload.flush(PATIENCE)
    assert fast.inner.lookup(device.names(1, 4), deadline=soon()) == 4


@pytest.mark.parametrize("size", [1 << 20, 2 * FRAME])
def test_an_erasure_outlasts_a_read_that_hangs(
    made: Callable[..., Device], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A load that hangs for an hour, in which others are erased, does not bring back what was erased after it had begun, with
    and without a copy between. When it is gone, nothing remembers it."""
    slow, fast = filled(0, 4), MemoryStore(size)
    device = made(fast, slow)
    reading, go_on, get, now = threading.Event(), threading.Event(), slow.get, time.monotonic

    def held(*arguments: Any, **more: Any) -> list[int]:
        found = get(*arguments, **more)
        reading.set()
        assert go_on.wait(PATIENCE)
        return found

    slow.get = held  # type: ignore[method-assign]
    keys = device.keys(0, 4)
    plan = whole_loads.plan_of(device.offload, ROOT, keys)
    load: StoreLoad | None = device.offload.load(plan, ROOT, keys, range(4), patient=True)
    assert load is not None and reading.wait(PATIENCE)
    assert _erase_queued(device.offload, [ROOT[:8]]) == 0
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: now() + 3600.0)
        assert _erase_queued(device.offload, [b"another"]) == 0
    go_on.set()
    task = load.task
    assert task is not None
    task.result(PATIENCE)
    assert device.offload.flush(PATIENCE) and load.loaded == 4
    assert not any(fast.present(device.names(0, 4), deadline=soon()))
    erasures, load, task = weakref.ref(load.read), None, None
    device.wait(lambda: gc.collect() >= 0 and erasures() is None)


class Deferring(TieredStore):
    """A store with a tier that gets blocks late, which notes what is dropped of them."""

    def __init__(self, store: Store) -> None:
        super().__init__([store])
        self.defers, self.dropped = True, list[Name]()

    def drop_deferred(self, names: Sequence[Name]) -> None:
        self.dropped += names


def test_blocks_that_nothing_continues() -> None:
    """Blocks that nothing continues are not written where they wait, and stay where they are written. Those that a client has
    dropped are deleted."""
    device = Device(store := Deferring(MemoryStore(1 << 20)))
    for chain in range(3):
        device.save(chain, 4 * chain, 4)
    assert device.offload.flush(PATIENCE)
    device.offload.retire(device.keys(0, 4), lambda: device.names(0, 4), drop=False)
    device.offload.retire(device.keys(1, 4), lambda: device.names(1, 4), drop=True)
    device.offload.later(lambda: None).result(PATIENCE)
    assert store.dropped == device.names(0, 4)
    assert [store.lookup(device.names(chain, 4), deadline=soon()) for chain in range(3)] == [4, 0, 4]
    device.offload.close()


@pytest.mark.parametrize("erased", [False, True])
def test_blocks_that_are_saved_while_their_deletion_waits(erased: bool) -> None:
    """A deletion, and what drops deferred blocks, leaves those that were computed and saved again while it waited for its turn,
    unless it is asked for once more after that. An erasure removes them, whenever it comes."""
    device, go_on = Device(store := Deferring(MemoryStore(1 << 20))), threading.Event()
    for chain in range(3):
        device.save(chain, 4 * chain, 4)
    assert device.offload.flush(PATIENCE)
    device.offload.later(lambda: go_on.wait(PATIENCE))
    asked = [device.keys(chain, 4) for chain in range(3)]
    kept = device.offload.delete(asked[0], lambda: device.names(0, 4))
    device.offload.retire(asked[1], lambda: device.names(1, 4), drop=False)
    device.offload.retire(asked[2], lambda: device.names(2, 4), drop=True)
    for chain in range(3):
        device.save(chain, 4 * chain, 3)
    again = device.offload.delete(asked[2], lambda: device.names(2, 4))
    if erased:
        assert device.offload.flush_writes(PATIENCE)
        with device.offload.erasing([ROOT[:TENANT_BYTES]], PATIENCE):
            assert erase_prefixes(store, [ROOT[:TENANT_BYTES]], "all").complete
    go_on.set()
    assert (kept.result(PATIENCE), again.result(PATIENCE)) == ({"memory": 1 - erased}, {"memory": 0})
    assert store.dropped == device.names(1, 4)[3:]
    there = [store.lookup(device.names(chain, 4), deadline=soon()) for chain in range(3)]
    assert there == ([0, 0, 0] if erased else [3, 4, 0])
    # Nothing is remembered of what is done.
    assert device.offload.delete(asked[0], lambda: device.names(0, 4)).result(PATIENCE) == {"memory": 3 * (not erased)}
    device.offload.close()


class SlowToDelete(FlakyStore):
    """A store whose deletions wait until a block has come meanwhile, or for a moment."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.meanwhile: Callable[[], None] | None = None
        self.came = threading.Event()

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        kept = super().put(frames, deadline=deadline)
        self.came.set()
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        if self.meanwhile is not None:
            self.came.clear()
            self.meanwhile()
            self.came.wait(0.3)
        return super().delete(names, deadline=deadline)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("erased", [False, True])
def test_blocks_that_are_saved_while_they_are_deleted(blocking: bool, erased: bool) -> None:
    """A block that is saved while the call of a tier runs that deletes it is there afterwards: its write waits for the call.
    Others do not wait. An erasure that begins meanwhile removes it all the same."""
    memory = MemoryStore(1 << 20)
    slow = SlowToDelete(memory)
    slow.blocking = blocking  # type: ignore[misc]
    device = Device(store := TieredStore([slow]))
    device.save(0, 0, 4)
    assert device.offload.flush(PATIENCE)
    saved = threading.Event()

    def meanwhile() -> None:
        device.save(1, 8, 4)
        assert slow.came.wait(PATIENCE)  # another one
        slow.came.clear()
        device.save(0, 0, 3)
        saved.set()

    slow.meanwhile = meanwhile
    deletion = device.offload.delete(device.keys(0, 4), lambda: device.names(0, 4))
    if erased:
        assert saved.wait(PATIENCE)
        with device.offload.erasing([ROOT[:TENANT_BYTES]], PATIENCE) as queued:
            assert not queued
            assert erase_prefixes(store, [ROOT[:TENANT_BYTES]], "all").complete
    assert deletion.result(PATIENCE) == {"memory": 4} or erased
    assert device.offload.flush(PATIENCE)
    assert memory.lookup(device.names(1, 4), deadline=soon()) == (0 if erased else 4)
    assert memory.lookup(device.names(0, 4), deadline=soon()) == (0 if erased else 3)
    device.offload.close()


def test_blocks_that_no_tier_stores_count_as_failed(made: Callable[..., Device]) -> None:
    """A block that no tier stored counts as failed; a block that at least one tier stored counts as saved, once."""
    first, second = (FlakyStore(MemoryStore(1 << 20, label=label)) for label in ("first", "second"))
    device = made(first, second)
    first.inject("fail")
    device.save(0, 0, 5)
    assert device.offload.flush(PATIENCE)
    assert (device.offload.status().saved, device.offload.status().failed) == (5, 0)
    second.inject("fail")
    device.save(1, 5, 3)
    assert device.offload.flush(PATIENCE)
    status = device.offload.status()
    assert (status.saved, status.failed, status.dropped) == (5, 3, 0)


def test_blocks_that_do_not_fit_count_as_failed(made: Callable[..., Device]) -> None:
    """The stored blocks of a chain longer than the store count as saved, and the rest as failed."""
    device = made(MemoryStore(4 * FRAME))
    device.save(0, 0, 7)
    assert device.offload.flush(PATIENCE)
    status = device.offload.status()
    assert (status.saved, status.failed, status.dropped) == (4, 3, 0)


@contextmanager
def interleaved(file: str | None) -> Iterator[None]:
    """Threads that start from now on yield to others between any two instructions of the code in `file`."""

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        os.sched_yield()  # releases the interpreter lock
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
    """Every loaded block is counted, however the threads of several loads interleave."""
    loaded = 0
    with interleaved(foreword.offload.manager.__file__):
        device = made(MemoryStore(1 << 20))
        device.save(0, 0, 1)
        assert device.offload.flush(PATIENCE)
        keys = device.keys(0, 1)
        for _ in range(10):
            changes = device.offload.changes  # one more for each search and for each load
            plans = [whole_loads.plan_of(device.offload, ROOT, keys) for _ in range(4)]
            device.wait(lambda changes=changes: device.offload.changes == changes + 4)
            store_loads = [device.offload.load(plan, ROOT, keys, [block]) for block, plan in enumerate(plans)]
            device.wait(lambda changes=changes: device.offload.changes == changes + 8)
            loaded += sum(store_load.loaded for store_load in store_loads)
    status = device.offload.status()
    assert (loaded, loaded + status.cut) == (status.loaded, 40), "a busy machine may be late, and cut a load"


@pytest.mark.parametrize(
    ("load_seconds", "blocks"),
    [
        ([], 0),
        ([0.5, 0.5, 0.5], 3),
        ([2.0, 2.0, 2.0], 0),
        ([0.5, 0.5, 2.0], 2),  # the last block is in a slow tier
        ([1.5, 0.1, 0.1], 3),  # the fast blocks make up for the slow first one
    ],
)
def test_load_as_many_blocks_as_saves_the_most_time(load_seconds: list[float], blocks: int) -> None:
    """The number of leading blocks to load is the one that saves the most time. Computing a block takes a second."""
    costs = LoadCosts([100], [10], lambda: [100 / seconds for seconds in load_seconds], lambda: 10.0)
    count = len(load_seconds)
    plan = costs.best(Found(10 * count, 10 * count, {(0, n): n for n in range(count)}, step=10), 0)
    assert (0 if plan is None else plan.position) == 10 * blocks


def test_the_position_that_saves_the_most() -> None:
    """A model with windows loads up to the position whose load saves the most time: without the slow tier's part if that takes
    longer than computing it, and nothing if a load saves none. An unknown speed is no reason against a load."""
    near = Found(200, 400, {(0, 0): 0, (0, 1): 0, (1, 1): 0})
    far = Found(400, 400, {(0, n): n // 2 for n in range(4)} | {(1, 3): 1}, (near,))
    rates, prefill = [1000.0, 1000.0], 1000.0
    costs = LoadCosts([100, 50], [100, 100], lambda: rates, lambda: prefill)

    def best(held: int) -> Found | None:
        plan = costs.best(far, held)
        return None if plan is None else {200: near, 400: far}[plan.position]

    # A block of 100 tokens is computed in 0.1 s. All of `far` takes 0.4 + 0.05 s, the part behind `near` 0.25 s.
    assert best(0) is None and costs.declined == 1
    rates = [10_000.0, 1000.0]
    assert best(0) is near
    rates = [10_000.0, 10_000.0]
    assert best(0) is far
    assert best(300) is far and best(400) is None
    rates = [10.0, 0.0]
    assert best(200) is far  # the second tier's speed is unknown, and the first has what is held
    assert best(0) is None
    prefill = 0.0
    assert best(0) is far and costs.declined == 2


@pytest.mark.parametrize(
    ("compute_seconds", "seconds"),
    [
        (None, (10.0, 1.0)),  # nothing is computed yet
        (0.1, (2.0, 0.25)),
        (5.0, (5.0, 0.5)),
        (50.0, (50.0, 5.0)),
    ],
)
def test_a_lookup_may_take_as_long_as_it_can_pay(compute_seconds: float | None, seconds: tuple[float, float]) -> None:
    """Local tiers may take the whole time of computing, remote ones a tenth; both have a least limit, which is longer while the
    prefill speed is unknown."""
    assert search_seconds(0.25, compute_seconds) == seconds


def paged(storage: torch.Tensor, start: int, row_bytes: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """`[blocks, row_bytes]` of a storage of bytes, with rows `stride` bytes apart, as elements of another type."""
    blocks = len(storage) // stride
    return storage.as_strided((blocks, row_bytes), (stride, 1), start).view(dtype)


@pytest.mark.parametrize(
    "groups",
    [
        [[(0, 96, torch.bfloat16), (96, 160, torch.float32)]],  # two layers, interleaved, no padding
        [[(0, 64, torch.float32)], [(0, 48, torch.bfloat16), (64, 120, torch.float32)]],  # one allocation, two groups
        [
            [(0, 7, torch.uint8), (8, 30, torch.int16), (51, 101, torch.int8)],
            [(3, 1, torch.uint8)],
        ],  # odd sizes and places
        [[], [(16, 128, torch.float64)]],  # a group without tensors
        [
            [
                (0, 8192, torch.float32),
                (8224, 4100, torch.bfloat16),
                (12330, 6000, torch.int16),
                (20001, 9001, torch.uint8),
            ]
        ],  # long rows, at even and odd places
    ],
)
@pytest.mark.parametrize("on_device", represented([False, True], True))
def test_blocks_of_several_groups_move_through_frames(
    groups: list[list[tuple[int, int, torch.dtype]]], on_device: bool
) -> None:
    """Blocks whose rows lie apart, of several groups in one allocation, arrive in other blocks. Nothing else changes."""
    stride, blocks, draw = 32 << 10, 12, torch.Generator().manual_seed(5)
    # An odd start makes layers that begin at odd bytes possible for one-byte types only.
    storage = torch.randint(0, 256, (stride * blocks,), dtype=torch.uint8, generator=draw)
    if on_device:
        pytest.importorskip("triton")
    queues = LazyQueues(stride) if on_device else None
    arena = StagingArena([[paged(storage, *spec[:2], stride, spec[2]) for spec in one] for one in groups], 9, queues)
    assert arena.block_bytes == tuple(sum(size for _, size, _ in one) for one in groups)
    assert arena.frame_bytes == HEADER_BYTES + max(arena.block_bytes) == len(arena.buffer(0))
    sources, slots, targets = [1, 2, 3, 7, 5], [0, 1, 4, 8, 2], [9, 10, 11, 4, 0]
    for number, one in enumerate(groups):
        expected = storage.view(blocks, stride).clone()
        arena.gather(sources, slots, number)
        for source, slot, target in zip(sources, slots, targets, strict=True):
            content = b"".join(expected[source, start : start + size].numpy().tobytes() for start, size, _ in one)
            assert bytes(arena.buffer(slot)[: len(content)]) == content
            for start, size, _ in one:
                expected[target, start : start + size] = expected[source, start : start + size]
        arena.scatter(slots, targets, number)
        assert torch.equal(storage.view(blocks, stride), expected)
        if arena.copies_lent:  # of other memory, with the frames in other slots and at odd places
            payloads = [bytes(arena.buffer(slot)[: arena.block_bytes[number]]) for slot in slots]
            lent = Loan(
                memoryview(bytearray(b"".join(one + b"\n" for one in payloads[::-1]))), arena.block_bytes[number] + 1
            )
            storage.view(blocks, stride)[targets] = expected[targets[::-1]]
            arena.scatter(range(4, -1, -1), targets, number, lent)
            held = storage.view(blocks, stride)
            for start, size, _ in one:
                assert torch.equal(held[targets, start : start + size], expected[targets, start : start + size])
            storage.view(blocks, stride).copy_(expected)


def test_saves_of_a_step_are_one_copy() -> None:
    """Blocks that are saved within `saving` are gathered by one kernel for each group, and later work does not change them."""
    pytest.importorskip("triton")

    class Counted(LazyQueues):
        computed = 0

        def submit(self, stream: Stream, work: Callable[[], object]) -> None:
            self.computed += stream is Stream.COMPUTE
            super().submit(stream, work)

    queues = Counted(3)
    groups = [torch.randn(BLOCKS, LAYOUT.block_bytes // 4) for _ in range(2)]
    before = [one.clone() for one in groups]
    store = MemoryStore(1 << 20)
    offload = EngineStores(TieredStore([store]), StagingArena([[one] for one in groups], 64, queues), [LAYOUT] * 2)
    chains = [(number, chain_keys(ROOT, [chain] * 80, 16)) for chain, number in enumerate((0, 1, 0, 1))]
    with offload.saving():
        for at, (number, keys) in enumerate(chains):
            assert offload.save(ROOT, keys, ROOT, 0, range(10 * at, 10 * at + 5), number) == 5
        assert not queues.computed and not offload.status().queued
    assert queues.computed == len(groups)
    for one in groups:
        queues.submit(Stream.COMPUTE, one.zero_)
    assert offload.flush(PATIENCE)
    for at, (number, keys) in enumerate(chains):
        names = [chain_prefix(LAYOUT.fingerprint, ROOT) + key for key in keys]
        buffers = [memoryview(bytearray(FRAME)) for _ in names]
        assert store.get(names, buffers, deadline=soon(PATIENCE)) == [FRAME] * 5
        rows = before[number][10 * at : 10 * at + 5].numpy()
        assert [bytes(one[: LAYOUT.block_bytes]) for one in buffers] == [row.tobytes() for row in rows]
    offload.close()


def test_rows_that_are_not_contiguous_are_refused() -> None:
    """An arena never works on a copy of the tensors: it refuses those whose rows are not contiguous."""
    tensor = torch.zeros(8, 4, 6)
    for wrong in (tensor.transpose(1, 2), tensor[:, :, ::2], tensor[:, :, :3]):
        with pytest.raises(ValueError, match="not contiguous"):
            StagingArena([[wrong]], 4)


def test_no_load_behind_a_part_of_a_block() -> None:
    """A model that holds a part of a block loads nothing: between that part and the next block there would be a gap."""
    costs = LoadCosts([100], [16], lambda: [1e9], lambda: 1.0)
    found = Found(64, 64, {(0, number): 0 for number in range(1, 4)}, step=16)
    for held in range(16, 64):
        for patient in (False, True):
            plan = costs.best(found, held, patient=patient)
            assert (plan is None) == bool(held % 16) and (plan is None or plan.held == held)


def test_slots_without_a_deadline() -> None:
    """Who may wait for ever gets the slots when there are enough."""
    slots = StagingSlots([])
    giver = threading.Thread(target=lambda: slots.give([3, 1, 2]))
    giver.start()
    slots.wait_for_room(1, float("inf"))
    assert slots.wait_for(3, float("inf")) == [1, 2, 3]
    giver.join()


def test_a_load_below_its_fixed_cost() -> None:
    """A load pays only if computing takes longer than its bytes and what any load of its tier takes. That is measured: what
    loads take longer than their bytes, as a moving average that expires. Whole chains and parts of them follow the same
    rule."""
    now = 0.0
    costs = LoadCosts(
        [100], [100], lambda: [1000.0, 1000.0], lambda: 500.0
    )  # 0.2 s to compute a block, 0.1 s to load it
    costs.fixed = FixedCosts(0.25, lambda: now)

    def decide(blocks: int, tier: int = 0) -> tuple[int, int]:
        found = Found(100 * blocks, 100 * blocks, {(0, number): tier for number in range(blocks)})
        plans = costs.best(replace(found, step=100), 0), costs.best(found, 0)
        whole, positions = (0 if plan is None else plan.position // 100 for plan in plans)
        return whole, positions

    assert [decide(blocks) for blocks in (1, 2, 3, 4)] == [(0, 0), (0, 0), (3, 3), (4, 4)]
    assert costs.declined == costs.too_small == 4
    for _ in range(60):
        costs.note_load([(0, 0)] * 4, 0.45)  # 0.05 s more than its bytes take
    assert costs.fixed.value(0) == pytest.approx(0.05) and decide(1) == (1, 1)
    assert decide(2, tier=1) == (0, 0), "each tier has a cost of its own"
    plan = costs.best(Found(200, 200, {(0, 0): 0, (0, 1): 1}, step=100), 0)
    assert plan is not None and plan.position == 100, "the slowest tier of a load decides"
    costs.note_load([(0, 0), (0, 9)], 9.0)
    assert costs.fixed.value(0) == pytest.approx(0.05), "the speed of the other place is unknown"
    costs.note_load([(0, 0)], 0.11, whole=False)
    assert costs.fixed.value(0) == pytest.approx(0.05), "a load that ended early says only what a load takes at least"
    costs.note_load([(0, 0)], 1.15, whole=False)
    assert costs.fixed.value(0) == pytest.approx(0.35)
    now = 100.0
    assert decide(2) == (0, 0), "a measurement expires"
    costs.fixed.first_tokens = 350
    assert [decide(blocks) for blocks in (3, 6, 8)] == [(0, 0), (0, 0), (8, 8)], "0.7 s to compute 350 tokens"
