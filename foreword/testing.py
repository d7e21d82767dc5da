"""What any backend must pass, and stores that misbehave on purpose. For tests: needs pytest and hypothesis.

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self): ...

        bounded = True            # only with a budget: then also

        @pytest.fixture
        def small(self): ...      # an empty store with room for exactly SMALL_BLOCKS frames of SMALL_PAYLOAD bytes

    class MyMachine(StoreMachine):
        def make_store(self): ...

    TestMyMachine = MyMachine.TestCase

    class TestMyView(ReadOnlyStoreContract):      # a store that is only read
        @pytest.fixture
        def over(self): ...

`FlakyStore` wraps a store and fails, waits, and alters what is read, when told to or by a seeded plan.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import ClassVar, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.base import Entry, Name, Store, StoreStatus, time_left
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, check, frame

LAYOUT = bytes(range(16))
ROOT = sha256(b"foreword/testing").digest()
SMALL_BLOCKS = 8
SMALL_PAYLOAD = 1000
SMALL_BYTES = SMALL_BLOCKS * (HEADER_BYTES + SMALL_PAYLOAD)
Fault = Literal["fail", "corrupt", "truncate", "swap", "lose"]


def make_frames(
    seed: int,
    count: int,
    payload_bytes: int,
    *,
    layout: bytes = LAYOUT,
    root: bytes = ROOT,
    after: Frame | None = None,
) -> list[Frame]:
    """A chain of `count` sealed frames with random payloads, the same for the same arguments.

    Args:
        after: the frame that the chain goes on from, instead of `root`: two seeds after one frame make a branch.
    """
    draw = random.Random(f"{seed}/{payload_bytes}")
    parent, depth = (root, 0) if after is None else (after.header.key, after.header.depth + 1)
    frames = []
    for number in range(depth, depth + count):
        key = sha256(parent + f"{seed}/{payload_bytes}/{number}".encode()).digest()
        header = Header(layout, key, parent, number, RAW, payload_bytes, payload_bytes)
        frames.append(frame(header, draw.randbytes(payload_bytes)))
        parent = key
    return frames


def soon(seconds: float = 60.0) -> float:
    """A deadline that no sound store passes in a test."""
    return time.monotonic() + seconds


def names_of(frames: Sequence[Frame]) -> list[Name]:
    return [one.name for one in frames]


def read(store: Store, frames: Sequence[Frame], *, deadline: float | None = None) -> list[bytes | None]:
    """What the store gives for the names of these frames: whole frames, None for what it does not have."""
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    lengths = store.get(names_of(frames), buffers, deadline=soon() if deadline is None else deadline)
    assert len(lengths) == len(frames), "get answers for each name"
    return [bytes(buffer[:length]) if length else None for buffer, length in zip(buffers, lengths, strict=True)]


def present(store: Store, frames: Sequence[Frame]) -> list[bool]:
    """Which of the frames the store has, one `lookup` each."""
    return [store.lookup([one.name], deadline=soon()) == 1 for one in frames]


def put_all(store: Store, frames: Sequence[Frame]) -> int:
    """`put`, where a full store counts as nothing kept."""
    try:
        return store.put(frames, deadline=soon())
    except StoreFull:
        return sum(present(store, frames))


def whole(frames: Sequence[Frame]) -> list[bytes | None]:
    """The bytes of frames, as `read` gives them."""
    return [bytes(one.data) for one in frames]


class StoreContract:
    """The tests of `foreword.store.base.Store`. Subclass it as `Test...` and give the fixture `store`.

    Attributes:
        bounded: the store keeps to a budget of bytes by eviction; the fixture `small` is needed then.
        pins: `pin` does something here.
        small_pins: of SMALL_BLOCKS blocks, how many may be pinned in `small`.
    """

    bounded: ClassVar[bool] = False
    pins: ClassVar[bool] = True
    small_pins: ClassVar[int] = SMALL_BLOCKS // 2

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
        for call in _calls(store, frames, time.monotonic() - 1.0).values():
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
        for call in _calls(store, frames, soon()).values():
            with pytest.raises(StoreUnavailable):
                call()

    def test_threads_at_once(self, store: Store) -> None:
        """Whatever threads do at once, a block that comes back is the right one, whole, and what is put afterwards is there."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        for seed in range(2):
            _rush(store, chains, seed, threads=4, steps=40)
        for chain in chains:
            store.delete(names_of(chain), deadline=soon())
            assert store.put(chain, deadline=soon()) == len(chain)
        for chain in chains:
            assert store.lookup(names_of(chain), deadline=soon()) == len(chain)
            assert read(store, chain) == whole(chain)
        assert len(list(store.scan(deadline=soon()))) == sum(map(len, chains))

    def test_threads_at_once_in_a_small_store(self, small: Store) -> None:
        """The same while every put evicts: never a wrong block, and never more than the budget."""
        chains = [make_frames(110 + number, 5, SMALL_PAYLOAD) for number in range(4)]
        for seed in range(2):
            _rush(small, chains, seed, threads=4, steps=40)
            assert sum(entry.size for entry in small.scan(deadline=soon())) <= SMALL_BYTES
        for chain in chains:
            small.pin(names_of(chain), pinned=False, deadline=soon())
        for chain in chains:
            assert small.put(chain, deadline=soon()) == len(chain)
            assert read(small, chain) == whole(chain)

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

    # Stores with a budget

    def test_tails_go_before_heads(self, small: Store) -> None:
        """When a chain must make room, its last blocks go first, and only as many as are needed."""
        old, new = make_frames(30, 6, SMALL_PAYLOAD), make_frames(31, 5, SMALL_PAYLOAD)
        put_all(small, old)
        assert put_all(small, new) == 5
        assert present(small, new) == [True] * 5
        assert present(small, old) == [True] * 3 + [False] * 3

    def test_the_chain_used_last_stays(self, small: Store) -> None:
        """Reading a chain keeps it: the other one goes, its tail first, although it was put later."""
        first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (32, 33, 34))
        put_all(small, first)
        put_all(small, second)
        assert read(small, first) == whole(first)
        put_all(small, third)
        assert present(small, first) == present(small, third) == [True] * 4
        assert present(small, second) == [False] * 4

    def test_putting_a_chain_again_keeps_it(self, small: Store) -> None:
        """A put of what is there counts as a use of it."""
        first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (35, 36, 37))
        put_all(small, first)
        put_all(small, second)
        put_all(small, first)
        put_all(small, third)
        assert present(small, first) == [True] * 4 and present(small, second) == [False] * 4

    def test_lookup_and_scan_are_no_uses(self, small: Store) -> None:
        """lookup and scan change nothing, not even what goes next."""
        first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (38, 39, 40))
        put_all(small, first)
        put_all(small, second)
        assert small.lookup(names_of(first), deadline=soon()) == 4
        assert len(list(small.scan(deadline=soon()))) == 8
        put_all(small, third)
        assert present(small, first) == [False] * 4 and present(small, second) == [True] * 4

    def test_a_chain_that_grows_is_one_chain(self, small: Store) -> None:
        """A chain's last use is that of any of its blocks: an old head under a new tail is not older than another chain."""
        chain, other, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (41, 42, 43))
        put_all(small, chain[:3])
        put_all(small, other)
        put_all(small, chain[3:])
        put_all(small, third)
        assert present(small, chain) == [True] * 4 and present(small, other) == [False] * 4

    def test_a_shared_head_outlives_a_branch(self, small: Store) -> None:
        """Of two chains with one head the older branch goes, and the head stays with the younger one."""
        head = make_frames(44, 2, SMALL_PAYLOAD)
        old, new = (make_frames(seed, 3, SMALL_PAYLOAD, after=head[-1]) for seed in (45, 46))
        put_all(small, [*head, *old])
        put_all(small, [*head, *new])
        put_all(small, make_frames(47, 3, SMALL_PAYLOAD))
        assert present(small, [*head, *new]) == [True] * 5 and present(small, old) == [False] * 3

    def test_a_child_before_its_parent(self, small: Store) -> None:
        """Blocks may come in any order; a parent that came last still goes after its child."""
        chain = make_frames(48, 4, SMALL_PAYLOAD)
        for one in (chain[2], chain[1], chain[3], chain[0]):
            put_all(small, [one])
        for count, seed in ((4, 49), (2, 50)):
            put_all(small, make_frames(seed, count, SMALL_PAYLOAD))
        assert present(small, chain) == [True, True, False, False]

    def test_a_parent_deleted_and_put_again(self, small: Store) -> None:
        """A parent that was away for a while still goes after its child."""
        chain = make_frames(51, 4, SMALL_PAYLOAD)
        put_all(small, chain)
        small.delete([chain[1].name], deadline=soon())
        put_all(small, [chain[1]])
        put_all(small, make_frames(52, 6, SMALL_PAYLOAD))
        assert present(small, chain) == [True, True, False, False]

    def test_a_chain_longer_than_the_store(self, small: Store) -> None:
        """Of a chain that does not fit, the head is kept: no put evicts what it brought, or what that hangs on."""
        chain = make_frames(53, SMALL_BLOCKS + 4, SMALL_PAYLOAD)
        put_all(small, make_frames(54, 3, SMALL_PAYLOAD))
        assert put_all(small, chain) == SMALL_BLOCKS
        assert small.lookup(names_of(chain), deadline=soon()) == SMALL_BLOCKS
        assert put_all(small, chain[SMALL_BLOCKS:]) == 0
        assert present(small, chain) == [True] * SMALL_BLOCKS + [False] * 4

    def test_a_tail_does_not_push_its_own_parent_out(self, small: Store) -> None:
        """A block whose parent would be next to go takes another chain's place, not its parent's."""
        chain, other = make_frames(55, 5, SMALL_PAYLOAD), make_frames(56, 4, SMALL_PAYLOAD)
        put_all(small, chain[:4])
        put_all(small, other)
        assert put_all(small, chain[4:]) == 1
        assert present(small, chain) == [True] * 5 and present(small, other) == [True] * 3 + [False]

    def test_a_frame_larger_than_the_store(self, small: Store) -> None:
        """A frame that can never fit is not kept, and nothing is evicted for it."""
        chain = make_frames(57, 4, SMALL_PAYLOAD)
        put_all(small, chain)
        assert put_all(small, make_frames(58, 1, SMALL_BYTES)) == 0
        assert present(small, chain) == [True] * 4

    def test_pinned_blocks_stay(self, small: Store) -> None:
        """Pinned blocks and what they hang on are never evicted; once unpinned they are like others."""
        if not self.pins:
            pytest.skip("the store does not pin")
        kept = make_frames(59, 3, SMALL_PAYLOAD)
        put_all(small, kept)
        assert small.pin(names_of(kept), deadline=soon()) == 3
        for seed in range(60, 64):
            put_all(small, make_frames(seed, 6, SMALL_PAYLOAD))
            assert present(small, kept) == [True] * 3
        assert small.pin(names_of(kept), pinned=False, deadline=soon()) == 3
        put_all(small, make_frames(64, SMALL_BLOCKS, SMALL_PAYLOAD))
        assert present(small, kept) == [False] * 3

    def test_pins_have_a_budget(self, small: Store) -> None:
        """No more is pinned than the share for pins, from the head on, and deleting or unpinning gives it back."""
        if not self.pins:
            pytest.skip("the store does not pin")
        chain = make_frames(65, SMALL_BLOCKS, SMALL_PAYLOAD)
        names = names_of(chain)
        put_all(small, chain)
        limit = self.small_pins
        assert small.pin(names, deadline=soon()) == limit
        assert small.status().pinned_bytes <= limit * len(chain[0].data)
        assert {entry.name for entry in small.scan(deadline=soon()) if entry.pinned} == set(names[:limit])
        assert small.pin(names[limit:], deadline=soon()) == 0
        small.delete(names[:1], deadline=soon())
        assert small.pin(names[limit:], deadline=soon()) == 1
        small.pin(names, pinned=False, deadline=soon())
        assert small.pin(names[limit:], deadline=soon()) == min(limit, SMALL_BLOCKS - limit)

    def test_the_budget_is_kept(self, small: Store) -> None:
        """After any put, blocks take no more than the budget, and the room that there is is used."""
        draw = random.Random(66)
        chains = [make_frames(seed, 5, SMALL_PAYLOAD) for seed in range(70, 76)]
        for _ in range(60):
            put_all(small, draw.choice(chains)[: draw.randint(1, 5)])
            size = sum(entry.size for entry in small.scan(deadline=soon()))
            assert size <= SMALL_BYTES
            assert small.status().bytes <= SMALL_BYTES
        assert size == SMALL_BYTES

    def test_no_child_without_its_parent(self, small: Store) -> None:
        """Whatever is used in whatever order, eviction never leaves a block whose parent it took."""
        draw = random.Random(67)
        trunk = make_frames(80, 2, SMALL_PAYLOAD)
        branches = [[*trunk, *make_frames(81 + number, 4, SMALL_PAYLOAD, after=trunk[-1])] for number in range(3)]
        chains = [*branches, make_frames(90, 5, SMALL_PAYLOAD)]
        for _ in range(80):
            chain = draw.choice(chains)
            if draw.random() < 0.5:
                put_all(small, chain[: draw.randint(1, len(chain))])
            else:
                read(small, chain[: draw.randint(1, len(chain))])
            for other in chains:
                held = present(small, other)
                assert held == sorted(held, reverse=True)


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
        for call in _calls(store, frames, time.monotonic() - 1.0).values():
            with pytest.raises(StoreTimeout):
                call()
        assert read(store, frames) == whole(frames)
        store.close()
        store.close()
        store.status()
        for call in _calls(store, frames, soon()).values():
            with pytest.raises(StoreUnavailable):
                call()

    def test_threads_at_once(self, over: Callable[[Sequence[Frame]], Store]) -> None:
        """Whatever threads do at once, a block that comes back is the right one, whole."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        store = over([one for chain in chains for one in chain])
        _rush(store, chains, 0, threads=4, steps=40)
        for chain in chains:
            assert read(store, chain) == whole(chain)


def _rest(header: Header) -> tuple[bytes, bytes, int, int, int, int]:
    return header.key, header.parent, header.depth, header.codec, header.raw_length, header.length


def _calls(store: Store, frames: Sequence[Frame], deadline: float) -> dict[str, Callable[[], object]]:
    """Every call that takes a deadline."""
    names = names_of(frames)
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    return {
        "lookup": lambda: store.lookup(names, deadline=deadline),
        "get": lambda: store.get(names, buffers, deadline=deadline),
        "put": lambda: store.put(frames, deadline=deadline),
        "delete": lambda: store.delete(names, deadline=deadline),
        "pin": lambda: store.pin(names, deadline=deadline),
        "unpin": lambda: store.pin(names, pinned=False, deadline=deadline),
        "scan": lambda: list(store.scan(deadline=deadline)),
        "put_record": lambda: store.put_record("word", b"other", deadline=deadline),
        "get_record": lambda: store.get_record("word", deadline=deadline),
        "delete_record": lambda: store.delete_record("word", deadline=deadline),
        "records": lambda: store.records("", deadline=deadline),
    }


def _rush(store: Store, chains: Sequence[Sequence[Frame]], seed: int, *, threads: int, steps: int) -> None:
    """Threads that put, get, look up, delete, pin and scan at random; the first thing that is wrong is raised."""
    known = {one.name for chain in chains for one in chain}

    def work(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        for _ in range(steps):
            _step(store, draw, draw.choice(chains), known)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, number) for number in range(threads)]:
            done.result()


def _step(store: Store, draw: random.Random, chain: Sequence[Frame], known: set[Name]) -> None:
    first = draw.randrange(len(chain))
    part = chain[first : draw.randint(first + 1, len(chain))]
    what = draw.random()
    if what < 0.35:
        assert 0 <= put_all(store, part) <= len(part)
    elif what < 0.7:
        for one, data in zip(part, read(store, part), strict=True):
            assert data in (None, one.data), "a block came back that is not the one"
    elif what < 0.8:
        assert 0 <= store.lookup(names_of(part), deadline=soon()) <= len(part)
    elif what < 0.9:
        assert 0 <= store.delete(names_of(part), deadline=soon()) <= len(part)
    elif what < 0.97:
        assert 0 <= store.pin(names_of(part), pinned=draw.random() < 0.5, deadline=soon()) <= len(part)
    else:
        assert {entry.name for entry in store.scan(deadline=soon())} <= known


_TRUNK = make_frames(200, 2, SMALL_PAYLOAD)
_CHAINS: tuple[tuple[Frame, ...], ...] = (
    (*_TRUNK, *make_frames(201, 4, SMALL_PAYLOAD, after=_TRUNK[-1])),
    (*_TRUNK, *make_frames(202, 3, SMALL_PAYLOAD, after=_TRUNK[-1])),
    tuple(make_frames(203, 5, SMALL_PAYLOAD)),
    tuple(make_frames(204, 3, SMALL_PAYLOAD, layout=b"another layout!!")),
)
_FRAMES = {one.name: one for chain in _CHAINS for one in chain}
_PARENTS = {
    one.name: parent for one in _FRAMES.values() if (parent := one.header.layout + one.header.parent) in _FRAMES
}
_parts = st.builds(
    lambda chain, first, length: _CHAINS[chain][first : first + length],
    st.integers(0, len(_CHAINS) - 1),
    st.integers(0, 4),
    st.integers(1, 6),
)
_words = st.sampled_from(["a", "a/b", "a/b.c", "b-1", "b_2/x"])


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls against a dictionary of what must be there.

    A store without a budget holds exactly what the dictionary says. One with room for SMALL_BLOCKS blocks (`bounded`) may hold
    less, once: never a wrong byte, never a pinned block less, never a child whose parent it evicted.
    """

    bounded: ClassVar[bool] = False
    pins: ClassVar[bool] = True

    def make_store(self) -> Store:
        """An empty store; if `bounded`, as the fixture `small` of StoreContract."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.store = self.make_store()
        self.blocks: dict[Name, bytes] = {}
        self.pinned: set[Name] = set()
        self.words: dict[str, bytes] = {}
        self.held: set[Name] = set()

    def teardown(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.close()

    @rule(part=_parts)
    def put(self, part: Sequence[Frame]) -> None:
        kept = put_all(self.store, part)
        for one in part:
            self.blocks[one.name] = bytes(one.data)
        assert kept == len(part) if not self.bounded else kept <= len(part)

    @rule(part=_parts)
    def get(self, part: Sequence[Frame]) -> None:
        for one, data in zip(part, read(self.store, part), strict=True):
            assert data == self.blocks.get(one.name)

    @rule(part=_parts)
    def lookup(self, part: Sequence[Frame]) -> None:
        count = self.store.lookup(names_of(part), deadline=soon())
        expected = next((n for n, one in enumerate(part) if one.name not in self.blocks), len(part))
        assert count == expected

    @rule(part=_parts)
    def delete(self, part: Sequence[Frame]) -> None:
        names = set(names_of(part))
        assert self.store.delete(names_of(part), deadline=soon()) == len(names & self.blocks.keys())
        for name in names:
            self.blocks.pop(name, None)
        self.pinned -= names

    @precondition(lambda self: self.pins)
    @rule(part=_parts, pinned=st.booleans())
    def pin(self, part: Sequence[Frame], pinned: bool) -> None:
        there = {name for name in names_of(part) if name in self.blocks}
        count = self.store.pin(names_of(part), pinned=pinned, deadline=soon())
        if not pinned:
            assert count == len(there)
            self.pinned -= there
            return
        now = {entry.name for entry in self.store.scan(deadline=soon()) if entry.pinned}
        assert count == len(now & there) and now <= self.pinned | there
        assert self.bounded or count == len(there)
        self.pinned = now

    @rule(word=_words, data=st.binary(max_size=20))
    def put_record(self, word: str, data: bytes) -> None:
        self.store.put_record(word, data, deadline=soon())
        self.words[word] = data

    @rule(word=_words)
    def delete_record(self, word: str) -> None:
        assert self.store.delete_record(word, deadline=soon()) == (self.words.pop(word, None) is not None)

    @rule(word=_words, start=st.sampled_from(["", "a", "a/", "b"]))
    def look_at_records(self, word: str, start: str) -> None:
        assert self.store.get_record(word, deadline=soon()) == self.words.get(word)
        assert self.store.records(start, deadline=soon()) == sorted(one for one in self.words if one.startswith(start))

    @invariant()
    def scan_agrees(self) -> None:
        entries = {entry.name: entry for entry in self.store.scan(deadline=soon())}
        assert all(entry.size in (0, len(_FRAMES[name].data)) for name, entry in entries.items())
        if not self.bounded:
            assert entries.keys() == self.blocks.keys()
            return
        assert entries.keys() <= self.blocks.keys() and self.pinned <= entries.keys()
        assert {name for name, entry in entries.items() if entry.pinned} == self.pinned
        assert sum(len(_FRAMES[name].data) for name in entries) <= SMALL_BYTES
        evicted = self.held & (self.blocks.keys() - entries.keys())
        assert not {_PARENTS[name] for name in entries if name in _PARENTS} & evicted
        self.blocks = {name: data for name, data in self.blocks.items() if name in entries}
        self.held = set(entries)


class FlakyStore:
    """A store that misbehaves when it is told to, or by a seeded plan. Otherwise it is the store it wraps.

    Args:
        plan: how often, 0.0 to 1.0, a call fails (`fail`) or a put is lost (`lose`), and how often a frame that is read is
            altered: one bit (`corrupt`), cut short (`truncate`), or another block's bytes under this name (`swap`).
        seed: of the plan's dice.

    `injected` counts what was done, by name of the fault.
    """

    def __init__(self, store: Store, *, seed: int = 0, plan: Mapping[Fault, float] | None = None) -> None:
        self.inner = store
        self.label = store.label
        self.readers = store.readers
        self.injected: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._rates: dict[Fault, float] = dict(plan or {})
        self._failures = 0
        self._error: Callable[[], StoreError] = lambda: StoreUnavailable("fails on purpose")
        self._seconds = 0.0
        self._hangs = False
        self._other: bytes = b""
        self._lock = threading.Lock()

    def fail_next(self, count: int = 1, error: Callable[[], StoreError] | None = None) -> None:
        """The next `count` calls raise StoreUnavailable, or what `error` makes."""
        with self._lock:
            self._failures = count
            if error is not None:
                self._error = error

    def fail(self, on: bool = True) -> None:
        """Every call fails."""
        self._rates["fail"] = float(on)

    def corrupt_reads(self, on: bool = True) -> None:
        """Every frame that is read has one bit flipped."""
        self._rates["corrupt"] = float(on)

    def truncate_reads(self, on: bool = True) -> None:
        """Every frame that is read is cut short, somewhere."""
        self._rates["truncate"] = float(on)

    def swap_reads(self, on: bool = True) -> None:
        """Every frame that is read is another block's, in itself sound: the one put or read before."""
        self._rates["swap"] = float(on)

    def lose_puts(self, on: bool = True) -> None:
        """Puts say that all went well and keep nothing."""
        self._rates["lose"] = float(on)

    def delay(self, seconds: float) -> None:
        """Every call takes this long first, or until its deadline, where it raises StoreTimeout."""
        self._seconds = seconds

    def hang(self, on: bool = True) -> None:
        """Every call waits for its deadline and raises StoreTimeout."""
        self._hangs = on

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        self._before(deadline)
        return self.inner.lookup(names, deadline=deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self._before(deadline)
        lengths = self.inner.get(names, buffers, deadline=deadline)
        return [self._alter(buffer, length) for buffer, length in zip(buffers, lengths, strict=True)]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self._before(deadline)
        if self._now("lose"):
            return len(frames)
        if frames:
            self._other = bytes(frames[-1].data)
        return self.inner.put(frames, deadline=deadline)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self._before(deadline)
        return self.inner.delete(names, deadline=deadline)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self._before(deadline)
        return self.inner.pin(names, pinned=pinned, deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        self._before(deadline)
        return self.inner.scan(deadline=deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._before(deadline)
        self.inner.put_record(word, data, deadline=deadline)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        self._before(deadline)
        return self.inner.get_record(word, deadline=deadline)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        self._before(deadline)
        return self.inner.delete_record(word, deadline=deadline)

    def records(self, start: str, *, deadline: float) -> list[str]:
        self._before(deadline)
        return self.inner.records(start, deadline=deadline)

    def status(self) -> StoreStatus:
        return self.inner.status()

    def close(self) -> None:
        self.inner.close()

    def _before(self, deadline: float) -> None:
        left = time_left(deadline)
        if self._hangs or self._seconds:
            late = self._hangs or self._seconds >= left
            self.injected["hang" if self._hangs else "delay"] += 1
            time.sleep(left if late else self._seconds)
            if late:
                raise StoreTimeout("waited on purpose until the deadline")
        with self._lock:
            told = self._failures > 0
            self._failures -= told
        if told or self._now("fail"):
            if told:
                self.injected["fail"] += 1
            raise self._error()

    def _now(self, fault: Fault) -> bool:
        """Whether the plan says so at this moment; counts it."""
        rate = self._rates.get(fault, 0.0)
        with self._lock:
            hit = rate > 0.0 and self._draw.random() < rate
        if hit:
            self.injected[fault] += 1
        return hit

    def _alter(self, buffer: memoryview, length: int) -> int:
        """What the caller gets to see of a frame of `length` bytes in `buffer`."""
        if not length:
            return 0
        mine = bytes(buffer[:length])
        other = self._other
        self._other = mine
        if other and other != mine and len(other) <= len(buffer) and self._now("swap"):
            buffer[: len(other)] = other
            length = len(other)
        if self._now("corrupt"):
            bit = self._draw.randrange(length * 8)
            buffer[bit // 8] ^= 1 << bit % 8
        if self._now("truncate"):
            length = self._draw.randrange(length)
        return length
