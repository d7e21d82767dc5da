"""What a store that is only read must pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from foreword.conformance.calls import calls_of, rush
from foreword.conformance.frames import make_frames, names_of, read, soon, whole
from foreword.errors import StoreTimeout, StoreUnavailable
from foreword.store.base import Store
from foreword.store.frame import Frame, check, frame


class ReadOnlyStoreContract:
    """The tests of a store that is only read: a tier that `TieredStore` never writes to. Subclass it as `Test...` and give the
    fixture `over`."""

    @pytest.fixture
    def over(self) -> Iterator[Callable[[Sequence[Frame]], Store]]:
        """A function that gives a store in whose place exactly these frames lie, of up to 64 KiB each."""
        raise NotImplementedError("give a fixture `over`")

    def test_what_is_there_comes_back(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """Every byte of every frame of a batch comes back, and passes the check."""
        frames = make_frames(1, 50, 60_000)
        store = over(frames)
        assert store.lookup(names_of(frames), deadline=soon()) == 50
        assert read(store, frames) == whole(frames)
        for one, data in zip(frames, read(store, frames), strict=True):
            assert data is not None and check(memoryview(data), one.name).header == one.header

    def test_gaps(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """get answers name by name, in any order and more than once; lookup counts to the first gap; empty batches are fine."""
        frames = make_frames(2, 300, 64)
        there = [*frames[:200], *frames[201:]]
        store = over(there)
        wanted = [*frames[210:190:-1], frames[4], frames[4], frames[200]]
        assert read(store, wanted) == [None if one is frames[200] else bytes(one.data) for one in wanted]
        assert store.lookup(names_of(frames), deadline=soon()) == 200
        assert store.lookup(names_of(frames[150:]), deadline=soon()) == 50
        assert store.lookup(names_of(frames[200:]), deadline=soon()) == 0
        assert store.lookup([], deadline=soon()) == 0 and store.get([], [], deadline=soon()) == []

    def test_buffers_of_other_sizes(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """A frame goes into any buffer as long as it is; one that is too short is a miss, and nothing is written beside."""
        frames = make_frames(3, 4, 3000)
        store = over(frames)
        size = len(frames[0].data)
        arena = memoryview(bytearray(b"\xaa" * (size + 100)))
        large, short, tiny = (memoryview(bytearray(length)) for length in (size + 500, size - 1, 1))
        lengths = store.get(names_of(frames), [large, arena[50 : 50 + size], short, tiny], deadline=soon())
        assert lengths == [size, size, 0, 0]
        assert large[:size] == frames[0].data and arena[50 : 50 + size] == frames[1].data
        assert bytes(arena[:50]) + bytes(arena[50 + size :]) == b"\xaa" * 100

    def test_nothing_is_changed(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """put keeps nothing and is no error; delete and pin do nothing; what is there stays as it is."""
        frames = make_frames(4, 6, 500)
        store = over(frames[:4])
        other = [frame(one.header, bytes(500)) for one in frames]
        for batch in (other, frames, []):
            assert store.put(batch, deadline=soon()) == 0
        assert store.pin(names_of(frames), deadline=soon()) == 0
        assert store.pin(names_of(frames), pinned=False, deadline=soon()) == 0
        assert store.delete(names_of(frames), deadline=soon()) == 0
        assert read(store, frames) == [*whole(frames[:4]), None, None]
        assert {entry.name for entry in store.scan(deadline=soon())} <= set(names_of(frames[:4]))

    def test_deadlines_and_the_end(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """A call whose deadline has passed raises StoreTimeout; after close, which may come twice, every call raises
        StoreUnavailable, and status still answers."""
        frames = make_frames(5, 2, 100)
        store = over(frames)
        assert read(store, frames) == whole(frames)
        for call in calls_of(store, frames, time.monotonic() - 1.0).values():
            with pytest.raises(StoreTimeout):
                call()
        assert read(store, frames) == whole(frames)
        store.close()
        store.close()
        store.status()
        for call in calls_of(store, frames, soon()).values():
            with pytest.raises(StoreUnavailable):
                call()

    def test_threads_at_once(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """Whatever threads do at once, a block that comes back is the right one, whole."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        store = over([one for chain in chains for one in chain])
        rush(store, chains, 0, threads=4, steps=40)
        for chain in chains:
            assert read(store, chain) == whole(chain)
