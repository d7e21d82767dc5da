"""Races in the copies between a device and the staging arena: planted ones are found, and there is none in the copies as they
are. The device's streams run as late, and in as odd an order, as CUDA allows (lazy_queues.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from example_counts import represented
from lazy_queues import LazyQueues

from foreword.offload import staging
from foreword.offload.device import DeviceCopies, Event, Stream, _Copy
from foreword.offload.staging import StagingArena

pytest.importorskip("triton")
COMPUTE, SAVE, LOAD = Stream.COMPUTE, Stream.SAVE, Stream.LOAD
BLOCKS, SLOTS, BYTES = 6, 5, 64
SEEDS = 30


@dataclass
class GroupLoad:
    """A load of some blocks from some slots, one group of them after the other."""

    mark: Event | None
    slots: list[int]
    units: list[int]
    values: list[int]
    copied: list[Event] = field(default_factory=list)


class Copies:
    """Random saves, loads, computations and reads of slots and blocks, as an engine and its stores call them. `wrong` has
    whether they found other bytes than in that order."""

    def __init__(self, seed: int) -> None:
        self.chance, self.queues = random.Random(seed), LazyQueues(seed)
        self.blocks = torch.arange(BLOCKS).repeat_interleave(BYTES).view(BLOCKS, BYTES).to(torch.uint8)
        self.arena = StagingArena([[self.blocks]], SLOTS, queues=self.queues)
        self.content = list(range(BLOCKS))
        self.in_slots: dict[int, int] = {}
        self.saved: list[int] = []
        self.wrong: list[bool] = []
        self.load: GroupLoad | None = None
        self.step = 0

    def some(self, most: Sequence[int]) -> list[int]:
        return self.chance.sample(most, self.chance.randint(1, min(3, len(most))))

    @property
    def slots(self) -> list[int]:
        """Slots that no load reads."""
        return [slot for slot in range(SLOTS) if self.load is None or slot not in self.load.slots]

    @property
    def units(self) -> list[int]:
        """Blocks that no load has."""
        return [one for one in range(BLOCKS) if self.load is None or one not in self.load.units]

    def shown(self, block: int, value: int) -> None:
        self.wrong.append(self.blocks[block].tolist() != [value] * BYTES)

    def read(self, slot: int) -> None:
        self.wrong.append(bytes(self.arena.buffer(slot)[:BYTES]) != bytes([self.in_slots[slot]]) * BYTES)

    def act(self) -> None:
        self.step += 1
        actions = ("save", "save", "load", "load", "compute", "show", "read", "fill")
        getattr(self, f"_{self.chance.choice(actions)}")()

    def _save(self) -> None:
        units = self.some(self.units)[: len(self.slots)]
        slots = self.chance.sample(self.slots, len(units))
        self.arena.gather(units, slots)
        self.in_slots.update(zip(slots, [self.content[one] for one in units], strict=True))
        self.saved = slots

    def _compute(self) -> None:
        for one in self.some(self.units):
            self.content[one] = 100 + self.step
            self.queues.submit(COMPUTE, partial(self.blocks[one].fill_, self.content[one]))

    def _show(self) -> None:
        """A later step of the model reads what it has."""
        one = self.chance.choice(self.units)
        self.queues.submit(COMPUTE, partial(self.shown, one, self.content[one]))

    def _fill(self) -> None:
        """A store has read a block into a slot."""
        slot = self.chance.choice(self.slots)
        self.arena.buffer(slot)[:BYTES] = bytes([200 + self.step]) * BYTES
        self.in_slots[slot] = 200 + self.step

    def _read(self) -> None:
        if self.in_slots:
            self.read(self.chance.choice(sorted(self.in_slots)))

    def _load(self) -> None:
        """Begin a load, queue its next copy, or wait for its oldest one: then its slots and blocks are free."""
        if self.load is None:
            if self.in_slots:
                # Often those that were saved last: their copies are still queued.
                slots = self.some(self.saved if self.saved and self.chance.random() < 0.5 else sorted(self.in_slots))
                units = self.chance.sample(range(BLOCKS), len(slots))
                self.load = GroupLoad(self.arena.mark(), slots, units, [self.in_slots[slot] for slot in slots])
            return
        load, number = self.load, len(self.load.copied)
        if number < len(load.slots) and self.chance.random() < 0.7:
            self.arena.start_scatter([load.slots[number]], [load.units[number]], mark=None if number else load.mark)
            copied = self.arena.scattered()
            assert copied is not None
            load.copied.append(copied)
        elif number == len(load.slots):
            for slot, one, value, copied in zip(load.slots, load.units, load.values, load.copied, strict=True):
                copied.synchronize()
                self.content[one] = value
                self.shown(one, value)
                self.arena.buffer(slot)[:BYTES] = bytes([250]) * BYTES  # the next block is read into it at once
                self.in_slots[slot] = 250
            self.load = None


def wrong_bytes(seed: int, steps: int = 30) -> bool:
    """Whether random saves, loads, computations and reads of slots and blocks find other bytes than in the order in which they
    were called."""
    copies = Copies(seed)
    for _ in range(steps):
        copies.act()
    while copies.load is not None:
        copies._load()
    for slot in copies.in_slots:
        copies.read(slot)
    copies.queues.record(COMPUTE).synchronize()
    for one, value in enumerate(copies.content):
        copies.shown(one, value)
    return any(copies.wrong)


class Planted(DeviceCopies):
    """The copies step by step, so that a race can be planted in each."""

    def save(self, group: int, units: Any, slots: Sequence[int]) -> None:
        self.gather(COMPUTE, group, units, slots)
        self._queues.wait(SAVE, self._queues.record(COMPUTE))
        self.to_host(SAVE, slots)
        self.note(slots, self._queues.record(SAVE))

    def load(self, group: int, slots: Sequence[int], units: Any, mark: Event | None, until: float = math.inf) -> None:
        for slot in slots:
            self.wait(slot)
        self.to_device(LOAD, slots)
        self.after(LOAD, mark)
        self.scatter(LOAD, group, units, slots)

    def after(self, stream: Stream, mark: Event | None) -> None:
        if mark is not None:
            self._queues.wait(stream, mark)

    def gather(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._launch(group, units, slots, gather=True))

    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._launch(group, units, slots, gather=False))

    def to_host(self, stream: Stream, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._move(self._arena, self.mirror(), slots))

    def to_device(self, stream: Stream, slots: Sequence[int]) -> None:
        self._queues.submit(stream, lambda: self._move(self.mirror(), self._arena, slots))

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
    def load(self, group: int, slots: Sequence[int], units: Any, mark: Event | None, until: float = math.inf) -> None:
        self.to_device(LOAD, slots)
        self.after(LOAD, mark)
        self.scatter(LOAD, group, units, slots)


class LoadWaitsForAnotherSlot(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any, mark: Event | None, until: float = math.inf) -> None:
        self.wait((slots[0] + 1) % SLOTS)
        LoadsWhatIsBeingSaved.load(self, group, slots, units, mark)  # type: ignore[arg-type]


class LoadBesideTheModel(Planted):
    def after(self, stream: Stream, mark: Event | None) -> None: ...


class OtherStreamWaitsForTheMark(Planted):
    def after(self, stream: Stream, mark: Event | None) -> None:
        super().after(SAVE, mark)


class MarkOfTheSaves(Planted):
    def mark(self) -> Event:
        return self._queues.record(SAVE)


class MarkOfTheLoads(Planted):
    def mark(self) -> Event:
        return self._queues.record(LOAD)


class MarkOfTheFirstLoad(Planted):
    first: Event | None = None

    def mark(self) -> Event:
        self.first = self.first or super().mark()
        return self.first


class MarkAfterTheScatter(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any, mark: Event | None, until: float = math.inf) -> None:
        super().load(group, slots, units, None, until)
        self.after(LOAD, mark)


class LoadIsDoneWhenItsMarkIs(Planted):
    def loaded(self) -> Event:
        return self._queues.record(COMPUTE)


class LoadIsDoneWhenSavesAre(Planted):
    def loaded(self) -> Event:
        return self._queues.record(SAVE)


class LoadEndsBeforeTheScatter(Planted):
    copied: Event | None = None

    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        self.copied = self._queues.record(LOAD)
        super().scatter(stream, group, units, slots)

    def loaded(self) -> Event:
        assert self.copied is not None
        return self.copied


class LoadEndsWithTheLoadBefore(Planted):
    before: Event | None = None

    def loaded(self) -> Event:
        ended, self.before = self.before, super().loaded()
        return ended or self.before


class ScatterOnTheStreamOfSaves(Planted):
    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        super().scatter(SAVE, group, units, slots)


class ScatterOnTheStreamOfTheModel(Planted):
    def scatter(self, stream: Stream, group: int, units: Any, slots: Sequence[int]) -> None:
        super().scatter(COMPUTE, group, units, slots)


class ScatterBeforeTheCopy(Planted):
    def load(self, group: int, slots: Sequence[int], units: Any, mark: Event | None, until: float = math.inf) -> None:
        for slot in slots:
            self.wait(slot)
        self.after(LOAD, mark)
        self.scatter(LOAD, group, units, slots)
        self.to_device(LOAD, slots)


class CopyToTheDeviceOnTheStreamOfSaves(Planted):
    def to_device(self, stream: Stream, slots: Sequence[int]) -> None:
        super().to_device(SAVE, slots)


RACES: list[type[Planted]] = Planted.__subclasses__()
QUICKLY_FOUND = (CopyBeforeGather, OnlyTheFirstSlot, LoadIsDoneWhenItsMarkIs, LoadEndsBeforeTheScatter)


@pytest.mark.parametrize("race", represented(RACES, *QUICKLY_FOUND), ids=lambda race: race.__name__)
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
    """The steps that the planted races change are right without the races."""
    monkeypatch.setattr(staging, "DeviceCopies", Planted)
    assert not any(wrong_bytes(seed) for seed in range(SEEDS))
