"""Loads beside a device that is busy with the steps of other requests (busy_device.py): they wait for the model once, nothing
waits for them but a thread of theirs, and blocks are used again when nothing writes into them any more."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import whole_loads
from busy_device import WITHIN, BusyDevice
from example_counts import represented

import foreword.offload.manager
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.engine.external_kv import EngineStores
from foreword.offload.device import Stream
from foreword.offload.load import StoreLoad
from foreword.offload.staging import StagingArena
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytest.importorskip("triton")
GROUPS = 32  # of 32 MiB in 1 GiB; here a group is one block
LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 1, 1),), "uint8")
BYTES = LAYOUT.block_bytes
ROOT = b"r" * 32
BLOCKS = 40
SEEDS = 24


def keys_of(chain: int, blocks: int) -> list[bytes]:
    return chain_keys(ROOT, [chain] * 16 * blocks, 16)


class Engine:
    """A device's blocks under the offload manager. A chain's blocks have the number of the chain as bytes."""

    def __init__(self, slots: int, seed: int = 0, tiers: int = 1) -> None:
        self.device = BusyDevice(seed)
        self.blocks = torch.zeros(BLOCKS, BYTES, dtype=torch.uint8)
        self.stores = [MemoryStore(1 << 20, label=f"tier {number}") for number in range(tiers)]
        arena = StagingArena([[self.blocks]], slots, self.device)
        self.offload = EngineStores(TieredStore(self.stores), arena, [LAYOUT], lookup_timeout=WITHIN)

    def store(self, chain: int, blocks: int) -> None:
        """Put a chain into the stores, on an idle device."""
        self.blocks[:blocks] = chain
        done = 0
        while done < blocks:
            done += self.offload.save(ROOT, keys_of(chain, blocks)[done:], ROOT, done, range(done, blocks))
            assert self.offload.flush(WITHIN)

    def hand_over(self, chain: int, blocks: Sequence[int]) -> StoreLoad:
        """A load of a chain, which has not begun."""
        return whole_loads.hand_over(self.offload, ROOT, keys_of(chain, len(blocks)), blocks)

    def load(self, chain: int, blocks: Sequence[int]) -> StoreLoad:
        return whole_loads.load(self.offload, ROOT, keys_of(chain, len(blocks)), blocks)

    def holds(self, blocks: Sequence[int], chain: int) -> bool:
        return bool((self.blocks[list(blocks)] == chain).all())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines, whose loads come in groups of one block, and closes them in the end."""
    engines: list[Engine] = []
    for name in ("_GROUP_BYTES", "_PROBE_BYTES"):
        monkeypatch.setattr(foreword.offload.manager, name, HEADER_BYTES + BYTES)

    def make(slots: int, **options: Any) -> Engine:
        engines.append(Engine(slots, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.device.stall(stalled=False)
        engine.device.end_step()
        engine.offload.close(1.0)


@pytest.mark.parametrize("ahead", [0, 1], ids=["sync scheduling", "async scheduling"])
@pytest.mark.parametrize("slots", [16, 4 * GROUPS])
def test_a_load_waits_for_the_model_once(made: Callable[..., Engine], slots: int, ahead: int) -> None:
    """32 groups take one event of the stream that computes and one wait for it, and are there when the steps that were queued
    at the hand-over have ended, however many follow; with few slots too, each of which is used again."""
    engine = made(slots)
    engine.store(7, GROUPS)
    engine.blocks.zero_()
    device = engine.device
    for _ in range(1 + ahead):
        device.begin_step()
    marks, waits = device.marks, device.waits_for_marks
    found = engine.load(7, range(GROUPS))
    steps = 0
    while True:
        device.settle(lambda: found.done)
        if found.done:
            break
        device.begin_step()
        device.end_step()
        steps += 1
        assert steps <= 2 + ahead, "a load waits for steps that began after it"
    assert (device.marks - marks, device.waits_for_marks - waits) == (1, 1)
    assert found.close() == [0] * GROUPS and found.loaded == GROUPS
    assert engine.holds(range(GROUPS), 7)
    assert not device.waits[threading.get_ident()], "the engine's thread waited for the device"


@pytest.mark.parametrize("slots", [16, 4 * GROUPS])
def test_an_abort_waits_for_nothing(made: Callable[..., Engine], slots: int) -> None:
    """A client leaves while copies are queued behind a step: the engine's thread returns at once, the blocks are the load's
    until the copies are done, and what has come counts."""
    engine = made(slots)
    engine.store(7, GROUPS)
    device = engine.device
    device.begin_step()
    found = engine.load(7, range(GROUPS))
    device.settle(lambda: found.done)
    closing = threading.Thread(target=found.close, daemon=True)
    closing.start()
    closing.join(WITHIN)
    assert not closing.is_alive() and not device.waits[closing.ident or 0], "it waited for the device"
    assert not found.done and found.copying and not found.loaded
    device.end_step()
    while not found.done:
        device.settle(lambda: found.done)
    assert 0 < found.loaded == len(found.close()) <= GROUPS
    assert engine.holds(range(found.loaded), 7)
    other = engine.load(7, range(GROUPS))  # no slot was lost
    device.settle(lambda: other.done)
    assert other.loaded == GROUPS


def test_a_load_waits_for_no_other(made: Callable[..., Engine]) -> None:
    """A load whose blocks were handed over before a step is there, while one that was handed over behind that step waits."""
    engine = made(4 * GROUPS)
    for chain in (7, 8):
        engine.store(chain, 4)
    device = engine.device
    first = engine.hand_over(7, range(4))
    device.begin_step()
    second = engine.load(8, range(10, 14))
    device.settle(lambda: second.done)
    assert device.blocked and not second.done
    engine.offload.start(first)
    while not first.done:
        engine.offload.wait(engine.offload.changes, 0.01)
    assert first.loaded == 4 and not second.done
    device.end_step()
    device.settle(lambda: second.done)


def test_blocks_are_ordered_where_they_are_handed_over(made: Callable[..., Engine]) -> None:
    """A load that starts long after its blocks were handed over, as one from another instance does, waits for no later step."""
    engine = made(4 * GROUPS)
    engine.store(7, 4)
    device = engine.device
    device.begin_step()
    found = engine.hand_over(7, range(4))
    device.end_step()
    device.begin_step()
    starting = threading.Thread(target=engine.offload.start, args=(found,))
    starting.start()
    starting.join()
    while not found.done:
        device.settle(lambda: found.done)
        assert not device.blocked, "it waits for a step that began after its blocks were handed over"
    assert found.loaded == 4


def test_a_load_is_late_by_its_own_time_only(made: Callable[..., Engine]) -> None:
    """A load whose slots are all taken waits for a step that computing its blocks would have waited for too: its deadline
    passes meanwhile, and it is not given up."""
    engine = made(16)
    engine.store(7, GROUPS)
    device = engine.device
    device.begin_step()
    found = engine.load(7, range(GROUPS))
    device.settle(lambda: found.done)
    before, began = found.deadline, time.monotonic()
    found.deadline = began
    assert found.held_up and not found.done and not found.finished
    found.deadline = before
    device.end_step()
    while not found.done:
        device.settle(lambda: found.done)
    assert found.loaded == GROUPS and found.waited > 0.0 and found.deadline > before


@pytest.mark.parametrize("where", ["copy", "launch", "first launch"])
def test_a_copy_that_fails(made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A group that cannot be copied, and what comes behind it, counts as not loaded, even where it is; the blocks before it
    count. The load ends when nothing is queued any more."""
    engine = made(4 * GROUPS)
    engine.store(7, 8)
    device, staging = engine.device, engine.offload._staging
    device.begin_step()
    numbers = iter(range(8))
    failing = (
        0 if where == "first launch" else 3
    )  # before the first one nothing else is queued, for which it would wait
    started, scattered = staging.start_scatter, staging.scattered

    def start(slots: Sequence[int], blocks: Sequence[int], *rest: Any, **more: Any) -> None:
        started(slots, blocks, *rest, **more)
        if where != "copy" and blocks == [failing]:
            raise RuntimeError("the device is lost")

    def end() -> Any:
        copied = scattered()
        if where == "copy" and next(numbers) == 3:
            copied = Broken(copied)
        return copied

    monkeypatch.setattr(staging, "start_scatter", start)
    monkeypatch.setattr(staging, "scattered", end)
    found = engine.load(7, range(8))
    device.settle(lambda: found.done)
    assert not found.done
    device.end_step()
    while not found.done:
        device.settle(lambda: found.done)
    assert found.close() == [0] * failing
    assert not found.copying and engine.holds(range(failing), 7)


def test_a_load_that_is_closed_while_it_reads(made: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a load that was closed before its first copy began are free at once: no copy into them begins."""
    engine = made(4 * GROUPS)
    engine.store(7, 8)
    engine.blocks.zero_()
    read, reading, go = engine.offload._reader.read, threading.Event(), threading.Event()

    def held(*given: Any, **more: Any) -> Any:
        reading.set()
        assert go.wait(WITHIN)
        return read(*given, **more)

    monkeypatch.setattr(engine.offload._reader, "read", held)
    engine.device.begin_step()
    found = engine.load(7, range(8))
    assert reading.wait(WITHIN)
    assert found.close() == [] and found.done
    go.set()
    assert found.task is not None
    found.task.result(WITHIN)
    engine.device.end_step()
    engine.device.record(Stream.COMPUTE).synchronize()
    assert found.done and not found.copying and engine.holds(range(8), 0)


class Broken:
    """The end of a copy that has failed."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def synchronize(self) -> None:
        self._event.synchronize()
        raise RuntimeError("the device is lost")


@dataclass(eq=False)
class Running:
    """A load in a run of the races, and the blocks that it has."""

    load: StoreLoad
    chain: int
    blocks: list[int]
    aborted: bool = False


@dataclass(eq=False)
class Run:
    """An engine that computes, loads, aborts loads and uses blocks again, in random order, on a device that is late."""

    engine: Engine
    seed: int
    content: dict[int, int] = field(default_factory=dict)
    loads: list[Running] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.free = list(range(12))

    def act(self) -> None:
        self.step += 1
        actions = (
            self.start,
            self.start,
            self.compute,
            self.compute,
            self.end_step,
            self.abort,
            self.collect,
            self.stall,
        )
        self.chance.choice(actions)()

    def start(self) -> None:
        """A step writes into blocks that are then free, and are handed over to a load."""
        count = self.chance.randint(1, 6)
        if len(self.free) < count or len(self.loads) >= 3:
            return
        blocks = self.chance.sample(self.free, count)
        chain = self.chance.choice((1, 2, 3))
        for block in blocks:
            self.free.remove(block)
            self.content.pop(block, None)
            self.engine.device.submit(Stream.COMPUTE, partial(self.engine.blocks[block].fill_, 77))
        self.engine.device.begin_step()
        found = self.engine.load(chain, blocks)
        self.loads.append(Running(found, chain, blocks))

    def compute(self) -> None:
        """A step reads blocks that have known contents, and writes others."""
        for block in self.chance.sample(self.free, min(4, len(self.free))):
            if block in self.content:
                self.engine.device.submit(Stream.COMPUTE, partial(self.check, block, self.content[block]))
            value = self.content[block] = 100 + self.step % 100
            self.engine.device.submit(Stream.COMPUTE, partial(self.engine.blocks[block].fill_, value))
        self.engine.device.begin_step()

    def check(self, block: int, value: int) -> None:
        found = self.engine.blocks[block].tolist()
        if found != [value] * BYTES:
            self.wrong.append(f"block {block} has {found[0]}, not {value}")

    def end_step(self) -> None:
        self.engine.device.end_step()

    def stall(self) -> None:
        self.engine.device.stall(stalled=self.chance.random() < 0.6)

    def abort(self) -> None:
        if self.loads:
            one = self.chance.choice(self.loads)
            one.load.close()
            one.aborted = True

    def collect(self) -> None:
        """Blocks of loads that are done are free; those that came have their contents."""
        for one in [one for one in self.loads if one.load.done]:
            self.loads.remove(one)
            came = len(one.load.close())
            if not one.aborted and came < len(one.blocks):
                self.wrong.append(f"{came} of {len(one.blocks)} blocks came")
            for block in one.blocks[:came]:
                self.content[block] = one.chain
                self.engine.device.submit(Stream.COMPUTE, partial(self.check, block, one.chain))
            self.free += one.blocks

    def finish(self) -> None:
        device = self.engine.device
        device.stall(stalled=False)
        while self.loads:
            device.end_step()
            device.settle(lambda: any(one.load.done for one in self.loads))
            self.collect()
        for block, value in self.content.items():
            device.submit(Stream.COMPUTE, partial(self.check, block, value))
        for _ in range(2 * self.step + 2):
            device.end_step()


@pytest.mark.parametrize("seed", represented(range(SEEDS), *range(6)))
def test_blocks_have_what_was_put_there_last(made: Callable[..., Engine], seed: int) -> None:
    """Loads that come, end and are aborted beside steps, on a device whose streams run as late as they may: a block has what
    its load brought or what a step computed last, its neighbours have theirs, and nothing is lost."""
    engine = made(16, seed=seed, tiers=2 if seed % 2 else 1)
    for chain in (1, 2, 3):
        engine.store(chain, 6)
    if seed % 2:  # what is loaded comes from the second tier, and its slots are promoted
        names = [name for chain in (1, 2, 3) for name in engine.hand_over(chain, range(6)).names]
        engine.offload.store.tiers[0].delete(names, time.monotonic() + WITHIN)
    run = Run(engine, seed)
    for _ in range(60):
        run.act()
    run.finish()
    assert not run.wrong
