"""Tests of stores in whose memory someone else writes: slots that are reserved, published and given back."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import ClassVar

import pytest

from foreword.conformance.frames import (
    SMALL_BLOCKS,
    SMALL_BYTES,
    SMALL_PAYLOAD,
    make_frames,
    names_of,
    present,
    put_all,
    read,
    soon,
    whole,
)
from foreword.errors import StoreUnavailable
from foreword.store.base import ReservedSlots, Store
from foreword.store.frame import Frame, UnreadBlock


def reserve(store: Store, frames: Sequence[Frame]) -> ReservedSlots:
    return store.reserve([one.header for one in frames], deadline=soon())


def write(reserved: ReservedSlots, frames: Sequence[Frame]) -> None:
    """Write frames, which a reservation was made for, into its slots."""
    for at, place in zip(reserved.positions, reserved.frames(), strict=True):
        place[:] = frames[at].data


class ReserveContract:
    """The part of `StoreContract` about `reserve`. A store that reserves nothing passes the first test only.

    Attributes:
        reserves: whether the store keeps frames in the memory of this process, and lends and reserves it.
    """

    reserves: ClassVar[bool] = False

    @pytest.fixture
    def reserving(self, store: Store) -> Store:
        """The store, if it reserves slots."""
        if not self.reserves:
            pytest.skip("the store reserves no slots")
        return store

    @pytest.fixture
    def small_reserving(self, small: Store) -> Store:
        """The small store, if it reserves slots."""
        if not self.reserves:
            pytest.skip("the store reserves no slots")
        return small

    def test_reserved_slots(self, store: Store) -> None:
        """A store reserves a slot for each block, or none at all. Blocks that are written into slots and published are those
        that get returns. The store tells how long its slots are."""
        frames = make_frames(120, 6, 900)
        reserved = reserve(store, frames)
        assert len(reserved.slots) == (len(frames) if self.reserves else 0)
        write(reserved, frames)
        assert store.publish(reserved) == len(reserved.slots)
        assert store.slot_bytes == (reserved.stride if self.reserves else 0)
        there = [*whole(frames)] if self.reserves else [None] * len(frames)
        assert read(store, frames) == there

    def test_reserved_blocks_are_not_found(self, reserving: Store) -> None:
        """Before it is published no call finds a block, nor lends, lists, pins or counts it; put does not store it again."""
        frames = make_frames(121, 4, 900)
        names = names_of(frames)
        assert reserving.put(frames[:1], deadline=soon()) == 1
        reserved = reserve(reserving, frames)
        assert (list(reserved.positions), reserved.present, reserved.full) == ([1, 2, 3], 1, False)
        assert reserving.lookup(names, deadline=soon()) == 1 and present(reserving, frames) == [
            True,
            False,
            False,
            False,
        ]
        assert reserving.present(names, deadline=soon()) == [True, False, False, False]
        assert True not in reserving.known(names[1:])
        assert read(reserving, frames[1:]) == [None] * 3
        with reserving.lend(names, deadline=soon()) as lent:
            assert [bool(one) for one in lent.frames] == [True, False, False, False]
        assert [entry.name for entry in reserving.scan(deadline=soon())] == names[:1]
        assert [name for batch in reserving.list_names(deadline=soon()) for name in batch] == names[:1]
        assert reserving.pin(names, deadline=soon()) <= 1
        assert reserving.put(frames, deadline=soon()) == 1
        assert not reserve(reserving, frames).slots
        assert reserving.status().blocks in (-1, 1)
        write(reserved, frames)
        assert reserving.publish(reserved) == 3
        assert read(reserving, frames) == whole(frames)

    def test_reservations_end_once(self, reserving: Store) -> None:
        """A reservation that was abandoned or published is not published again: its slots are free for other blocks."""
        frames, others = make_frames(122, 3, 900), make_frames(123, 3, 900)
        reserved = reserve(reserving, frames)
        reserving.abandon(reserved)
        again = reserve(reserving, others)
        write(again, others)
        reserving.abandon(reserved)
        assert reserving.publish(reserved) == 0
        assert reserving.publish(again) == 3 and reserving.publish(again) == 0
        reserving.abandon(again)
        assert read(reserving, frames) == [None] * 3 and read(reserving, others) == whole(others)

    def test_some_reserved_blocks_are_published(self, reserving: Store) -> None:
        """Chosen blocks can be read, and the slots of the other blocks are free."""
        frames = make_frames(124, 5, 900)
        reserved = reserve(reserving, frames)
        write(reserved, frames)
        assert reserving.publish(reserved, [0, 1, 3]) == 3
        assert present(reserving, frames) == [True, True, False, True, False]
        assert len(reserve(reserving, frames).slots) == 2

    def test_slots_of_a_lost_reservation(self, small_reserving: Store) -> None:
        """The slots of a reservation that was lost on the way, as by an error, are free: nothing leaks."""
        for seed in range(3):
            lost: list[object] = [reserve(small_reserving, make_frames(125 + seed, SMALL_BLOCKS, SMALL_PAYLOAD))]
            lost.append(lost)  # a cycle, as a traceback makes one
            del lost
            gc.collect()
        frames = make_frames(128, SMALL_BLOCKS, SMALL_PAYLOAD)
        assert put_all(small_reserving, frames) == SMALL_BLOCKS and read(small_reserving, frames) == whole(frames)

    @pytest.mark.parametrize("how", ["delete", "erase all", "erase the root", "erase chosen"])
    def test_an_erasure_beside_a_reservation(self, reserving: Store, how: str) -> None:
        """Blocks that are deleted or erased while they are written do not appear, others do. They can be stored again, with
        other bytes at once, and the late writer changes nothing of these."""
        frames, others = make_frames(129, 4, 900), make_frames(130, 2, 900, root=b"another root" * 3)
        mine, theirs = reserve(reserving, frames), reserve(reserving, others)
        gone = frames if how != "erase chosen" else frames[:2]
        if how == "delete":
            assert reserving.delete(names_of(frames), deadline=soon()) == 0
        elif how == "erase all":
            gone = [*frames, *others]
            reserving.erase(deadline=soon())
        elif how == "erase the root":
            reserving.erase(b"", frames[0].header.root, deadline=soon())
        else:
            steps = reserving.erase_steps(chosen=set(names_of(gone)), deadline=soon())
            assert not any(step.problem for step in steps)
        assert reserving.put(gone, deadline=soon()) == len(gone)
        before = read(reserving, gone)
        write(mine, frames)
        for place in mine.frames():
            place[:8] = b"too late"
        write(theirs, others)
        published = reserving.publish(mine) + reserving.publish(theirs)
        assert published == len(frames) + len(others) - len(gone)
        assert read(reserving, gone) == before == whole(gone)
        reserving.delete(names_of([*frames, *others]), deadline=soon())
        again = reserve(reserving, [*frames, *others])
        assert len(again.slots) == 6
        reserving.abandon(again)

    def test_reserved_slots_are_in_the_budget(self, small_reserving: Store) -> None:
        """A slot in flight is not evicted, and nothing takes more than the budget together with it. Given back, it is used."""
        first, second = (make_frames(seed, SMALL_BLOCKS, SMALL_PAYLOAD) for seed in (131, 132))
        reserved = reserve(small_reserving, first[:5])
        write(reserved, first)
        put_all(small_reserving, second)
        assert present(small_reserving, second) == [True] * 3 + [False] * 5
        more = reserve(small_reserving, second)
        assert more.full and more.present == 3 and not more.slots
        assert small_reserving.status().bytes <= SMALL_BYTES
        assert small_reserving.publish(reserved) == 5
        assert read(small_reserving, first[:5]) == whole(first[:5])
        assert put_all(small_reserving, second) == SMALL_BLOCKS
        assert not any(present(small_reserving, first))

    def test_reserving_evicts_as_put_does(self, small_reserving: Store) -> None:
        """The least recently used blocks, from the ends of their chains; neither its own nor its parents, nor pinned ones."""
        old, new = make_frames(133, 6, SMALL_PAYLOAD), make_frames(134, 5, SMALL_PAYLOAD)
        put_all(small_reserving, old)
        reserved = reserve(small_reserving, new)
        assert list(reserved.positions) == [0, 1, 2, 3, 4]
        assert present(small_reserving, old) == [True] * 3 + [False] * 3
        write(reserved, new)
        assert small_reserving.publish(reserved) == 5
        assert read(small_reserving, new) == whole(new)

    def test_parents_are_taken_from_the_frames(self, small_reserving: Store) -> None:
        """Blocks whose parents were not known, or guessed wrongly, when their slots were reserved are evicted from the end of
        their chain, and blocks behind a published one do not evict it."""
        chain, draw = make_frames(138, SMALL_BLOCKS, SMALL_PAYLOAD), random.Random(1)
        names = names_of(chain)
        for low in (0, 4):
            part = chain[low : low + 4]
            guesses = [b"", draw.choice(names), names[low - 1], draw.choice(names)]
            headers = [
                UnreadBlock(one.name, guess or one.name, SMALL_PAYLOAD)
                for one, guess in zip(part, guesses, strict=True)
            ]
            reserved = small_reserving.reserve(headers, unread=True, deadline=soon())
            write(reserved, part)
            assert small_reserving.publish(reserved) == 4
        for count in range(1, 5):
            assert put_all(small_reserving, make_frames(139, count, SMALL_PAYLOAD)) == count
            assert present(small_reserving, chain) == [number < SMALL_BLOCKS - count for number in range(SMALL_BLOCKS)]

    def test_blocks_that_are_not_read_evict_nothing(self, small_reserving: Store) -> None:
        """Slots for blocks that are read from another store end at the first that gets none: nothing is evicted for others."""
        old, new = make_frames(140, 6, SMALL_PAYLOAD), make_frames(141, 4, SMALL_PAYLOAD)
        put_all(small_reserving, old)
        headers = [UnreadBlock(name, name, SMALL_PAYLOAD) for name in names_of(new)]
        first = small_reserving.reserve(headers[1:2], unread=True, deadline=soon())
        reserved = small_reserving.reserve(headers, unread=True, deadline=soon())
        assert (list(first.positions), list(reserved.positions), reserved.full) == ([0], [0], False)
        assert present(small_reserving, old) == [True] * 6
        small_reserving.abandon(first)
        small_reserving.abandon(reserved)

    def test_a_frame_that_is_reserved_and_too_long(self, small_reserving: Store) -> None:
        """A frame that is longer than its reservation gets no slot, and nothing is evicted for it."""
        chain = make_frames(135, 4, SMALL_PAYLOAD)
        put_all(small_reserving, chain)
        reserved = reserve(small_reserving, make_frames(136, 1, SMALL_BYTES))
        assert not reserved.slots and not reserved.full
        assert present(small_reserving, chain) == [True] * 4

    def test_reservations_and_the_end_of_a_store(self, reserving: Store) -> None:
        """The memory stays while a reservation has slots in it; publish raises StoreUnavailable, and abandon does nothing."""
        frames = make_frames(137, 3, 900)
        reserved, other = reserve(reserving, frames[:2]), reserve(reserving, frames[2:])
        reserving.close()
        write(reserved, frames)
        assert [bytes(place) for place in reserved.frames()] == whole(frames[:2])
        with pytest.raises(StoreUnavailable):
            reserving.publish(reserved)
        reserving.abandon(reserved)
        reserving.abandon(other)
        with pytest.raises(StoreUnavailable):
            reserve(reserving, frames)
