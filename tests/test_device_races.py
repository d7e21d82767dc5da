"""Races in the copies between a device and the staging arena: planted ones are found, and there is none in the copies as they
are. The device's streams run as late, and in as odd an order, as CUDA allows (lazy_queues.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from example_counts import represented
from lazy_queues import LazyQueues

from foreword.offload import staging
from foreword.offload.device import DeviceCopies, Stream, _Copy
from foreword.offload.staging import StagingArena

pytest.importorskip("triton")
COMPUTE, SAVE, LOAD = Stream.COMPUTE, Stream.SAVE, Stream.LOAD
BLOCKS, SLOTS, BYTES = 6, 5, 64
SEEDS = 30


def wrong_bytes(seed: int, steps: int = 16) -> bool:
    """Whether random saves, loads, computations and reads of slots and blocks find other bytes than in the order in which they
    were called."""
    chance, queues = random.Random(seed), LazyQueues(seed)
    blocks = torch.arange(BLOCKS).repeat_interleave(BYTES).view(BLOCKS, BYTES).to(torch.uint8)
    arena = StagingArena([[blocks]], SLOTS, queues)
    content, wrong = list(range(BLOCKS)), list[bool]()
    in_slots: dict[int, int] = {}

    def some(most: Sequence[int]) -> list[int]:
        return chance.sample(most, chance.randint(1, min(3, len(most))))

    def shown(block: int, value: int) -> None:
        wrong.append(blocks[block].tolist() != [value] * BYTES)

    def read(slot: int) -> None:
        wrong.append(bytes(arena.buffer(slot)[:BYTES]) != bytes([in_slots[slot]]) * BYTES)

    for step in range(steps):
        action = chance.choice(("save", "save", "load", "compute", "show", "read", "fill"))
        if action == "save":
            units = some(range(BLOCKS))
            slots = chance.sample(range(SLOTS), len(units))
            arena.gather(units, slots)
            in_slots.update(zip(slots, [content[one] for one in units], strict=True))
        elif action == "compute":
            for one in some(range(BLOCKS)):
                content[one] = 100 + step
                queues.submit(COMPUTE, partial(blocks[one].fill_, content[one]))
        elif action == "show":  # a later step of the model reads what it has
            one = chance.randrange(BLOCKS)
            queues.submit(COMPUTE, partial(shown, one, content[one]))
        elif action == "fill":  # a store has read a block into a slot
            slot = chance.randrange(SLOTS)
            arena.buffer(slot)[:BYTES] = bytes([200 + step]) * BYTES
            in_slots[slot] = 200 + step
        elif in_slots and action == "load":
            slots = some(sorted(in_slots))
            units = chance.sample(range(BLOCKS), len(slots))
            arena.scatter(slots, units)
            for slot, one in zip(slots, units, strict=True):
                content[one] = in_slots[slot]
                shown(one, content[one])
        elif in_slots:
            read(chance.choice(sorted(in_slots)))
    for slot in in_slots:
        read(slot)
    queues.record(COMPUTE).synchronize()
    for one, value in enumerate(content):
        shown(one, value)
    return any(wrong)


class Planted(DeviceCopies):
    """The copies step by step, so that a race can be planted in each."""

    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        self.gather(COMPUTE, group, units, slots)
        self._queues.wait(SAVE, self._queues.record(COMPUTE))
        self.to_host(SAVE, slots)
        self.note(slots, self._queues.record(SAVE))

    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        for slot in slots:
            self.wait(slot)
        self.to_device(LOAD, slots)
        self._queues.wait(LOAD, self._queues.record(COMPUTE))
        self.scatter(LOAD, group, units, slots)
        self._queues.record(LOAD).synchronize()

    def gather(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._launch(group, units, slots, gather=True))

    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._launch(group, units, slots, gather=False))

    def to_host(self, stream: Stream, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._move(self._arena, self._mirror, slots))

    def to_device(self, stream: Stream, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._move(self._mirror, self._arena, slots))

    def note(self, slots: Sequence[int], event: Any, **more: Any) -> None:
        self._saves.update(dict.fromkeys(slots, _Copy(event, **more)))


class GatherBesideTheModel(Planted):
    def gather(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        super().gather(SAVE, group, units, slots)


class CopyBeforeGather(Planted):
    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        self.gather(COMPUTE, group, units, slots)
        self.to_host(SAVE, slots)
        self.note(slots, self._queues.record(SAVE))


class WaitsForTheStepBefore(Planted):
    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        self._queues.wait(SAVE, self._queues.record(COMPUTE))
        self.gather(COMPUTE, group, units, slots)
        self.to_host(SAVE, slots)
        self.note(slots, self._queues.record(SAVE))


class EventOfTheModel(Planted):
    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        super().save(group, units, slots)
        self.note(slots, self._queues.record(COMPUTE))


class EventBeforeTheCopy(Planted):
    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        self.gather(COMPUTE, group, units, slots)
        self._queues.wait(SAVE, self._queues.record(COMPUTE))
        self.note(slots, self._queues.record(SAVE))
        self.to_host(SAVE, slots)


class EventOfLoads(Planted):
    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        super().save(group, units, slots)
        self.note(slots, self._queues.record(LOAD))


class OnlyTheFirstSlot(Planted):
    def note(self, slots: Sequence[int], event: Any, **more: Any) -> None:
        super().note(slots[:1], event, **more)


class OnlyTheLastSlot(Planted):
    def note(self, slots: Sequence[int], event: Any, **more: Any) -> None:
        super().note(slots[-1:], event, **more)


class KeepsTheFirstEvent(Planted):
    def note(self, slots: Sequence[int], event: Any, **more: Any) -> None:
        super().note([slot for slot in slots if slot not in self._saves], event, **more)


class DoneWhenQueued(Planted):
    def note(self, slots: Sequence[int], event: Any, **more: Any) -> None:
        super().note(slots, event, done=True)


class CopyOnTheStreamOfLoads(Planted):
    def to_host(self, stream: Stream, slots: Sequence[int]) -> None:
        super().to_host(LOAD, slots)


class NeverWaits(Planted):
    def wait(self, slot: int) -> None: ...


class WaitsOnceForAll(Planted):
    def wait(self, slot: int) -> None:
        super().wait(slot)
        for copy in self._saves.values():
            copy.done = True


class LoadsWhatIsBeingSaved(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        self.to_device(LOAD, slots)
        self._queues.wait(LOAD, self._queues.record(COMPUTE))
        self.scatter(LOAD, group, units, slots)
        self._queues.record(LOAD).synchronize()


class LoadWaitsForOneSlot(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        self.wait(slots[0])
        LoadsWhatIsBeingSaved.load(self, group, slots, units)  # type: ignore[arg-type]


class LoadBesideTheModel(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        for slot in slots:
            self.wait(slot)
        self.to_device(LOAD, slots)
        self.scatter(LOAD, group, units, slots)
        self._queues.record(LOAD).synchronize()


class LoadReturnsEarly(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        for slot in slots:
            self.wait(slot)
        self.to_device(LOAD, slots)
        self._queues.wait(LOAD, self._queues.record(COMPUTE))
        self.scatter(LOAD, group, units, slots)


class LoadWaitsForTheModel(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        LoadReturnsEarly.load(self, group, slots, units)  # type: ignore[arg-type]
        self._queues.record(COMPUTE).synchronize()


class LoadEndsBeforeTheScatter(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        for slot in slots:
            self.wait(slot)
        self.to_device(LOAD, slots)
        self._queues.wait(LOAD, self._queues.record(COMPUTE))
        copied = self._queues.record(LOAD)
        self.scatter(LOAD, group, units, slots)
        copied.synchronize()


class ScatterOnTheStreamOfSaves(Planted):
    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        super().scatter(SAVE, group, units, slots)


class ScatterBeforeTheCopy(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any) -> None:
        for slot in slots:
            self.wait(slot)
        self._queues.wait(LOAD, self._queues.record(COMPUTE))
        self.scatter(LOAD, group, units, slots)
        self.to_device(LOAD, slots)
        self._queues.record(LOAD).synchronize()


RACES: list[type[Planted]] = Planted.__subclasses__()


@pytest.mark.parametrize("race", represented(RACES, RACES[1], RACES[4], RACES[15]), ids=lambda race: race.__name__)
def test_a_planted_race_is_found(race: type[Planted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that lack one order between streams give wrong bytes in some of the runs."""
    monkeypatch.setattr(staging, "DeviceCopies", race)
    assert any(wrong_bytes(seed) for seed in range(SEEDS))


@pytest.mark.parametrize("seed", represented(range(SEEDS), *range(5)))
def test_copies_keep_their_order(seed: int) -> None:
    """Whatever the order in which a device's streams run: a save has the blocks of its time, though they are overwritten by
    later work and the slots are used again; a load comes after the work queued before it, and before what follows."""
    assert not wrong_bytes(seed)


@pytest.mark.extended
def test_the_steps_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planted races change is right without them."""
    monkeypatch.setattr(staging, "DeviceCopies", Planted)
    assert not any(wrong_bytes(seed) for seed in range(SEEDS))
