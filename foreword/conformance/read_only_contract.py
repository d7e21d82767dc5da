"""Tests of what a store has: for every store, and the rest of the contract of stores that are never written to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest

from foreword.conformance.calls import call_from_threads, calls_of
from foreword.conformance.frames import make_frames, names_of, read, soon, whole
from foreword.errors import StoreTimeout, StoreUnavailable
from foreword.store.base import MISSING, Store
from foreword.store.frame import Frame, UnreadBlock, check, frame
from foreword.store.memory.memory_store import MemoryStore

Holding = Callable[[Sequence[Frame]], Store]


def _unread(one: Frame) -> UnreadBlock:
    return UnreadBlock(one.name, one.name, one.header.length)


class ReadContract:
    """The tests of reading, for stores of every kind. Subclasses provide the fixture `holding`."""

    @pytest.fixture
    def holding(self) -> Holding:
        """A function that returns a store which holds exactly the given frames, of up to 64 KiB each."""
        raise NotImplementedError("provide the fixture `holding`")

    def test_frames_come_back(self, holding: Holding) -> None:
        """get returns every byte of every frame of a batch."""
        frames = make_frames(1, 50, 60_000)
        store = holding(frames)
        assert store.lookup(names_of(frames), deadline=soon()) == 50
        assert read(store, frames) == whole(frames)
        for one, data in zip(frames, read(store, frames), strict=True):
            assert data is not None and check(memoryview(data), one.name).header == one.header

    def test_gaps(self, holding: Holding) -> None:
        """get handles missing and repeated names in any order; lookup counts up to the first gap; batches may be empty."""
        frames = make_frames(2, 300, 64)
        present = [*frames[:200], *frames[201:]]
        store = holding(present)
        wanted = [*frames[210:190:-1], frames[4], frames[4], frames[200]]
        assert read(store, wanted) == [None if one is frames[200] else bytes(one.data) for one in wanted]
        assert store.lookup(names_of(frames), deadline=soon()) == 200
        assert store.lookup(names_of(frames[150:]), deadline=soon()) == 50
        assert store.lookup(names_of(frames[200:]), deadline=soon()) == 0
        assert store.lookup(names_of([frames[4]] * 3), deadline=soon()) == 3
        assert store.lookup([], deadline=soon()) == 0 and store.get([], [], deadline=soon()) == []

    def test_buffers_of_other_sizes(self, holding: Holding) -> None:
        """A buffer may be longer than its frame. If it is shorter the frame is a miss. Nothing is written outside of it."""
        frames = make_frames(3, 4, 3000)
        store = holding(frames)
        size = len(frames[0].data)
        arena = memoryview(bytearray(b"\xaa" * (size + 100)))
        large, short, tiny = (memoryview(bytearray(length)) for length in (size + 500, size - 1, 1))
        lengths = store.get(names_of(frames), [large, arena[50 : 50 + size], short, tiny], deadline=soon())
        assert lengths[:2] == [size, size] and max(lengths[2:]) <= MISSING
        assert large[:size] == frames[0].data and arena[50 : 50 + size] == frames[1].data
        assert bytes(arena[:50]) + bytes(arena[50 + size :]) == b"\xaa" * 100

    def test_frames_are_read_into_reserved_slots(self, holding: Holding) -> None:
        """A store reads straight into slots that another one has reserved, and writes nothing beside them. Published there, the
        blocks are those that were put, with their places in the chain."""
        frames, between = make_frames(7, 8, 9000), make_frames(8, 8, 9000)
        store, other = holding(frames), MemoryStore(1 << 20)
        with closing(store), closing(other):
            wanted = [header for pair in zip(frames, between, strict=True) for header in map(_unread, pair)]
            reserved = other.reserve(wanted, unread=True, deadline=soon())
            places = reserved.frames()
            for place in places[1::2]:
                place[:] = b"\xaa" * len(place)
            lengths = store.get(names_of(frames), places[::2], deadline=soon())
            assert lengths == [len(one.data) for one in frames]
            assert {bytes(place) for place in places[1::2]} == {b"\xaa" * len(places[1])}
            assert other.publish(reserved, range(0, 16, 2)) == 8
            assert read(other, frames) == whole(frames) and read(other, between) == [None] * 8
            found = {one.name: (one.parent, one.depth) for one in other.scan(deadline=soon())}
            assert found == {one.name: (one.header.parent, one.header.depth) for one in frames}

    def test_a_passed_deadline(self, holding: Holding) -> None:
        """A call after its deadline raises StoreTimeout and changes nothing."""
        frames = make_frames(5, 2, 100)
        store = holding(frames)
        store.put_record("key", b"data", deadline=soon())
        assert read(store, frames) == whole(frames)
        found = {name: _outcome(call) for name, call in calls_of(store, frames, time.monotonic() - 1.0).items()}
        assert found == dict.fromkeys(found, "StoreTimeout")
        assert read(store, frames) == whole(frames)
        assert store.get_record("key", deadline=soon()) == b"data"

    def test_a_closed_store(self, holding: Holding) -> None:
        """After close (which may be called twice) every call raises StoreUnavailable, but status still works."""
        frames = make_frames(6, 2, 100)
        store = holding(frames)
        store.close()
        store.close()
        store.status()
        found = {name: _outcome(call) for name, call in calls_of(store, frames, soon()).items()}
        assert found == dict.fromkeys(found, "StoreUnavailable")


def _outcome(call: Callable[[], object]) -> str:
    """The name of the error that a call raises, or what it returns, so that a failure names the calls that were wrong."""
    try:
        return f"returned {call()!r}"
    except StoreTimeout:
        return "StoreTimeout"
    except StoreUnavailable:
        return "StoreUnavailable"


class ReadOnlyStoreContract(ReadContract):
    """Tests of a store that `TieredStore` never writes to, such as the memory of a peer.

    Subclass it as `Test...` and provide the fixture `holding`.
    """

    def test_nothing_is_changed(self, holding: Holding) -> None:
        """put, delete and pin have no effect and do not raise."""
        frames = make_frames(4, 6, 500)
        store = holding(frames[:4])
        other = [frame(one.header, bytes(500)) for one in frames]
        for batch in (other, frames, []):
            assert store.put(batch, deadline=soon()) == 0
        assert store.pin(names_of(frames), deadline=soon()) == 0
        assert store.pin(names_of(frames), pinned=False, deadline=soon()) == 0
        assert store.delete(names_of(frames), deadline=soon()) == 0
        assert read(store, frames) == [*whole(frames[:4]), None, None]
        assert {entry.name for entry in store.scan(deadline=soon())} <= set(names_of(frames[:4]))

    def test_threads_at_once(self, holding: Holding) -> None:
        """Concurrent calls never return a wrong or incomplete frame."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        store = holding([one for chain in chains for one in chain])
        call_from_threads(store, chains, 0, threads=4, steps=40)
        for chain in chains:
            assert read(store, chain) == whole(chain)
