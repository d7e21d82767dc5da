"""What any store must pass: `foreword.store.base` in tests."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

from foreword.conformance.budget_contract import BudgetContract
from foreword.conformance.calls import calls_of, rush
from foreword.conformance.frames import make_frames, names_of, present, read, soon, whole
from foreword.errors import StoreTimeout, StoreUnavailable
from foreword.store.base import Store
from foreword.store.frame import Frame, Header, check, frame


class StoreContract(BudgetContract):
    """The tests of `foreword.store.base.Store`. Subclass it as `Test...` and give the fixture `store`.

    Attributes:
        bounded: the store keeps to a budget of bytes by eviction; the fixture `small` is needed then.
        pins: `pin` does something here.
        small_pins: of SMALL_BLOCKS blocks, how many may be pinned in `small`.
    """

    bounded: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """An empty store with room for at least 64 MiB of frames of up to 64 KiB."""
        raise NotImplementedError("give a fixture `store`")

    @pytest.fixture
    def small(self) -> Iterator[Store]:
        """An empty store with room for exactly SMALL_BLOCKS frames of SMALL_PAYLOAD bytes."""
        if self.bounded:
            raise NotImplementedError("a bounded store needs a fixture `small`")
        pytest.skip("the store has no budget of its own")

    @pytest.fixture
    def second(self) -> Iterator[Store]:
        """Another store on the same place as `store`, where several share it."""
        pytest.skip("the store is not shared")

    # Blocks

    def test_what_was_put_comes_back(self, store: Store) -> None:
        """Every byte of every frame of a batch comes back, and passes the check."""
        frames = make_frames(1, 20, 5000)
        assert store.put(frames, deadline=soon()) == 20
        assert read(store, frames) == whole(frames)
        for one, data in zip(frames, read(store, frames), strict=True):
            assert data is not None and check(memoryview(data), one.name).header == one.header

    def test_an_empty_store_has_nothing(self, store: Store) -> None:
        """Names that were never put are misses everywhere, and empty batches are fine."""
        frames = make_frames(2, 3, 100)
        assert read(store, frames) == [None] * 3
        assert store.lookup(names_of(frames), deadline=soon()) == 0
        assert store.delete(names_of(frames), deadline=soon()) == 0
        assert store.pin(names_of(frames), deadline=soon()) == 0
        assert list(store.scan(deadline=soon())) == []
        assert store.records("", deadline=soon()) == []
        assert store.get([], [], deadline=soon()) == []
        assert store.put([], deadline=soon()) == store.lookup([], deadline=soon()) == 0
        assert store.delete([], deadline=soon()) == store.pin([], deadline=soon()) == 0

    def test_a_batch_with_gaps(self, store: Store) -> None:
        """get answers name by name, whichever of them are there, in any order and more than once."""
        frames = make_frames(3, 9, 700)
        store.put(frames[::2], deadline=soon())
        wanted = [*frames[::-1], frames[4], frames[4], frames[5]]
        assert read(store, wanted) == [bytes(one.data) if one.header.depth % 2 == 0 else None for one in wanted]

    def test_buffers_of_other_sizes(self, store: Store) -> None:
        """A frame goes into any buffer as long as it is, a slice of another too; one that is too short makes it a miss."""
        frames = make_frames(4, 4, 3000)
        store.put(frames, deadline=soon())
        size = len(frames[0].data)
        large = memoryview(bytearray(b"\xaa" * (size + 500)))
        arena = memoryview(bytearray(b"\xaa" * (size + 100)))
        short, tiny = (memoryview(bytearray(length)) for length in (size - 1, 1))
        lengths = store.get(names_of(frames), [large, arena[50 : 50 + size], short, tiny], deadline=soon())
        assert lengths == [size, size, 0, 0]
        assert large[:size] == frames[0].data
        assert arena[50 : 50 + size] == frames[1].data
        assert bytes(arena[:50]) + bytes(arena[50 + size :]) == b"\xaa" * 100, "nothing is written beside the buffer"

    def test_frames_of_several_sizes(self, store: Store) -> None:
        """Frames need not be of one size; the first put has the largest."""
        frames = [make_frames(5, 1, size)[0] for size in (40_000, 1, 0, 4096, 39_999, 127)]
        assert store.put(frames, deadline=soon()) == len(frames)
        assert read(store, frames) == whole(frames)

    def test_putting_again_is_nothing(self, store: Store) -> None:
        """A frame that is there is counted and left as it is, even if somebody comes with other bytes under its name."""
        frames = make_frames(6, 4, 900)
        store.put(frames[:3], deadline=soon())
        other = [frame(one.header, bytes(900)) for one in frames]
        assert store.put(other, deadline=soon()) == 4
        assert read(store, frames) == [*whole(frames[:3]), bytes(other[3].data)]

    def test_a_name_twice_in_a_batch(self, store: Store) -> None:
        """The same frame twice in one put is the same block."""
        [one] = make_frames(7, 1, 900)
        assert store.put([one, one], deadline=soon()) == 2
        assert read(store, [one]) == whole([one])
        assert [entry.name for entry in store.scan(deadline=soon())] == [one.name]

    def test_buffers_may_be_reused_after_put(self, store: Store) -> None:
        """put keeps no reference to the caller's bytes."""
        frames = make_frames(8, 3, 2000)
        before = whole(frames)
        store.put(frames, deadline=soon())
        for one in frames:
            one.data[:] = bytes(len(one.data))
        assert read(store, frames) == before

    def test_frames_in_read_only_memory(self, store: Store) -> None:
        """put takes frames whose bytes cannot be written."""
        frames = [Frame(one.header, memoryview(bytes(one.data))) for one in make_frames(9, 3, 1 << 16)]
        store.put(frames, deadline=soon())
        assert read(store, frames) == whole(frames)

    def test_lookup_stops_at_the_first_gap(self, store: Store) -> None:
        """lookup counts from the first name to the first that is missing, over batches of any length."""
        frames = make_frames(10, 400, 64)
        names = names_of(frames)
        store.put(frames[:399], deadline=soon())
        assert store.lookup(names[:1], deadline=soon()) == 1
        assert store.lookup(names, deadline=soon()) == 399
        assert store.lookup(names[5:], deadline=soon()) == 394
        assert store.lookup(names[::-1], deadline=soon()) == 0
        for gap in (398, 300, 64, 63, 1, 0):
            assert store.delete([names[gap]], deadline=soon()) == 1
            assert store.lookup(names, deadline=soon()) == gap
        assert store.lookup(names[2:], deadline=soon()) == 61

    def test_lookup_of_a_name_that_comes_twice(self, store: Store) -> None:
        """lookup counts names, not blocks."""
        [one] = make_frames(11, 1, 64)
        store.put([one], deadline=soon())
        assert store.lookup([one.name] * 3, deadline=soon()) == 3

    def test_layouts_are_kept_apart(self, store: Store) -> None:
        """One key under two layouts is two blocks."""
        mine = make_frames(12, 3, 500)
        theirs = [frame(Header(b"another layout!!", *_rest(one.header)), bytes(500)) for one in mine]
        store.put(mine, deadline=soon())
        assert store.lookup(names_of(theirs), deadline=soon()) == 0
        store.put(theirs[:2], deadline=soon())
        assert read(store, mine) == whole(mine)
        assert read(store, theirs) == [*whole(theirs[:2]), None]
        assert store.delete(names_of(mine), deadline=soon()) == 3
        assert store.lookup(names_of(theirs), deadline=soon()) == 2

    def test_delete(self, store: Store) -> None:
        """delete says how many were there, pinned or not, and afterwards they are not; they can be put again."""
        frames = make_frames(13, 6, 500)
        names = names_of(frames)
        store.put(frames[:5], deadline=soon())
        store.pin(names[:2], deadline=soon())
        assert store.delete([names[1], names[3], names[5]], deadline=soon()) == 2
        assert store.delete([names[1], names[3], names[5]], deadline=soon()) == 0
        assert present(store, frames) == [True, False, True, False, True, False]
        assert read(store, frames)[1] is None
        store.put(frames, deadline=soon())
        assert read(store, frames) == whole(frames)
        assert store.delete(names, deadline=soon()) == 6
        assert list(store.scan(deadline=soon())) == []

    def test_pin_counts(self, store: Store) -> None:
        """pin says how many of the names are pinned now, or unpinned; what is not there is neither."""
        if not self.pins:
            pytest.skip("the store does not pin")
        frames = make_frames(14, 4, 500)
        names = names_of(frames)
        store.put(frames[:3], deadline=soon())
        assert store.pin(names, deadline=soon()) == 3
        assert store.pin(names[:2], deadline=soon()) == 2
        assert store.pin(names[:1], pinned=False, deadline=soon()) == 1
        assert {entry.name: entry.pinned for entry in store.scan(deadline=soon())} == {
            names[0]: False,
            names[1]: True,
            names[2]: True,
        }
        assert store.pin(names, pinned=False, deadline=soon()) == 3
        assert not any(entry.pinned for entry in store.scan(deadline=soon()))

    def test_scan(self, store: Store) -> None:
        """scan names every block once, with its size, and with what it knows of its place in a chain."""
        frames = [*make_frames(15, 30, 300), *make_frames(16, 5, 200, layout=b"another layout!!")]
        store.put(frames, deadline=soon())
        entries = list(store.scan(deadline=soon()))
        assert sorted(entry.name for entry in entries) == sorted(names_of(frames))
        by_name = {one.name: one for one in frames}
        for entry in entries:
            one = by_name[entry.name]
            assert entry.size in (0, len(one.data)) and entry.hits >= 0 and not entry.pinned
            assert entry.parent in (b"", one.header.parent)
            assert not entry.parent or entry.depth == one.header.depth

    def test_deleting_while_scanning(self, store: Store) -> None:
        """Blocks may go while a scan is under way; it ends, and names nothing that never was."""
        frames = make_frames(17, 40, 100)
        store.put(frames, deadline=soon())
        scanned = set()
        for entry in store.scan(deadline=soon()):
            scanned.add(entry.name)
            store.delete([entry.name], deadline=soon())
        assert scanned <= set(names_of(frames)) and scanned
        assert present(store, frames) == [one.name not in scanned for one in frames]

    def test_status(self, store: Store) -> None:
        """status counts blocks and bytes, where the store knows them, and stays silent about a closed store's troubles."""
        frames = make_frames(18, 10, 1000)
        store.put(frames, deadline=soon())
        status = store.status()
        assert status.blocks in (-1, 10)
        assert status.bytes >= (0 if status.blocks < 0 else sum(len(one.data) for one in frames))
        store.delete(names_of(frames), deadline=soon())
        assert store.status().blocks in (-1, 0)
        store.close()
        store.status()

    # Records

    def test_records(self, store: Store) -> None:
        """A record is kept, replaced, listed and deleted under its word; binary, empty and long ones too."""
        assert store.get_record("prefix/a", deadline=soon()) is None
        assert store.delete_record("prefix/a", deadline=soon()) is False
        store.put_record("prefix/a", b"one", deadline=soon())
        store.put_record("prefix/a", b"\x00two\xff", deadline=soon())
        store.put_record("prefix/b", b"", deadline=soon())
        assert store.get_record("prefix/a", deadline=soon()) == b"\x00two\xff"
        assert store.get_record("prefix/b", deadline=soon()) == b""
        long = random.Random(1).randbytes(1 << 20)
        store.put_record("x", long, deadline=soon())
        assert store.get_record("x", deadline=soon()) == long
        assert store.delete_record("prefix/a", deadline=soon()) is True
        assert store.get_record("prefix/a", deadline=soon()) is None
        assert store.delete_record("prefix/a", deadline=soon()) is False

    def test_records_by_their_start(self, store: Store) -> None:
        """records gives the words that begin with a string, sorted, whether it ends at a slash or not."""
        words = ["a", "a/b", "a/b/c", "ab", "b/a-1_2.x", "b/a", "A/b"]
        for word in words:
            store.put_record(word, word.encode(), deadline=soon())
        for start in ("", "a", "a/", "a/b", "a/b/", "b/a-", "c", "A"):
            assert store.records(start, deadline=soon()) == sorted(word for word in words if word.startswith(start))
        assert [store.get_record(word, deadline=soon()) for word in words] == [word.encode() for word in words]

    def test_blocks_and_records_do_not_meet(self, store: Store) -> None:
        """Records are no blocks: a scan does not show them, and deleting the one leaves the other."""
        frames = make_frames(19, 2, 100)
        store.put(frames, deadline=soon())
        store.put_record(frames[0].header.key.hex(), b"record", deadline=soon())
        assert len(list(store.scan(deadline=soon()))) == 2
        store.delete(names_of(frames), deadline=soon())
        assert store.get_record(frames[0].header.key.hex(), deadline=soon()) == b"record"

    # Ends

    def test_a_passed_deadline(self, store: Store) -> None:
        """A call whose deadline has passed raises StoreTimeout, and changes nothing."""
        frames = make_frames(20, 2, 100)
        store.put(frames, deadline=soon())
        store.put_record("word", b"data", deadline=soon())
        for call in calls_of(store, frames, time.monotonic() - 1.0).values():
            with pytest.raises(StoreTimeout):
                call()
        assert read(store, frames) == whole(frames)
        assert store.get_record("word", deadline=soon()) == b"data"

    def test_a_closed_store(self, store: Store) -> None:
        """After close every call raises StoreUnavailable; closing twice is fine."""
        frames = make_frames(21, 2, 100)
        store.put(frames, deadline=soon())
        store.close()
        store.close()
        for call in calls_of(store, frames, soon()).values():
            with pytest.raises(StoreUnavailable):
                call()

    def test_threads_at_once(self, store: Store) -> None:
        """Whatever threads do at once, a block that comes back is the right one, whole, and what is put afterwards is there."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        for seed in range(2):
            rush(store, chains, seed, threads=4, steps=40)
        for chain in chains:
            store.delete(names_of(chain), deadline=soon())
            assert store.put(chain, deadline=soon()) == len(chain)
        for chain in chains:
            assert store.lookup(names_of(chain), deadline=soon()) == len(chain)
            assert read(store, chain) == whole(chain)
        assert len(list(store.scan(deadline=soon()))) == sum(map(len, chains))

    # Several on one place

    def test_two_stores_on_one_place(self, store: Store, second: Store) -> None:
        """What one puts the other finds; what one deletes the other misses; records too."""
        frames = make_frames(22, 6, 4000)
        store.put(frames[:4], deadline=soon())
        assert second.lookup(names_of(frames), deadline=soon()) == 4
        assert read(second, frames) == [*whole(frames[:4]), None, None]
        assert second.put(frames, deadline=soon()) == 6
        assert store.lookup(names_of(frames), deadline=soon()) == 6
        assert store.delete(names_of(frames[2:3]), deadline=soon()) == 1
        assert second.lookup(names_of(frames), deadline=soon()) == 2
        store.put_record("word", b"data", deadline=soon())
        assert second.get_record("word", deadline=soon()) == b"data"
        store.close()
        assert read(second, frames[:2]) == whole(frames[:2])


def _rest(header: Header) -> tuple[bytes, bytes, int, int, int, int]:
    return header.key, header.parent, header.depth, header.codec, header.raw_length, header.length
