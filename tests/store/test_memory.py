"""The memory store: the contract, its slots, concurrency, and a million blocks."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from invariants import check_memory_store
from processes import in_child
from servers import wait_until

from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
from foreword.conformance import (
    SMALL_BYTES,
    SMALL_PAYLOAD,
    StoreContract,
    make_frames,
    names_of,
    put_all,
    read,
    soon,
    whole,
)
from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreUnavailable
from foreword.store import background
from foreword.store.background import PagePopulator
from foreword.store.frame import HEADER_BYTES, Frame, Header, UnreadBlock
from foreword.store.memory.memory_store import MemoryArena, MemoryStore
from foreword.store.tiered import TieredStore


class TestContract(StoreContract):
    bounded = reserves = True

    @pytest.fixture
    def store(self) -> Iterator[MemoryStore]:
        store = MemoryStore(64 << 20, slot_bytes=(64 << 10) + HEADER_BYTES)
        yield store
        check_memory_store(store)
        store.close()

    @pytest.fixture
    def small(self) -> Iterator[MemoryStore]:
        store = MemoryStore(SMALL_BYTES)
        yield store
        check_memory_store(store)
        store.close()


@pytest.mark.parametrize(("size", "share", "slot"), [(0, 0.5, None), (100, 1.5, None), (100, 0.5, 101), (100, 0.5, 0)])
def test_impossible_sizes(size: int, share: float, slot: int | None) -> None:
    """An impossible size, share or slot length is refused by the constructor."""
    with pytest.raises(StoreConfigError):
        MemoryStore(size, pin_share=share, slot_bytes=slot)


@pytest.mark.parametrize("seed", range(6))
def test_frames_that_lie_together(seed: int) -> None:
    """Frames that lie behind each other in memory, in any order, with gaps, of other lengths, or in memory that cannot be
    written, are stored each with its own bytes."""
    chance = random.Random(seed)
    payload = chance.choice((64, 1000, 40_000, 70_000))
    frames = []
    memory = memoryview(bytearray(40 * (payload + HEADER_BYTES + 64)))
    at = 0
    for one in make_frames(seed, 32, payload):
        length = len(one.data)
        at += chance.choice((0, 0, 0, 64))
        memory[at : at + length] = one.data
        place = memory[at : at + length]
        frames.append(Frame(one.header, place if chance.random() < 0.9 else place.toreadonly()))
        at += length
    if chance.random() < 0.5:
        chance.shuffle(frames)
    with closing(MemoryStore(20 * (payload + HEADER_BYTES) if chance.random() < 0.3 else 8 << 20)) as store:
        stored = put_all(store, frames)
        assert stored
        found = read(store, frames)
        kept = [one for one in found if one is not None]
        assert len(kept) == stored
        assert all(one is None or one == bytes(frame.data) for one, frame in zip(found, frames, strict=True))
        check_memory_store(store)


def test_a_read_on_two_threads() -> None:
    """A large read is made in parts, on several threads: each block comes into its own buffer, one that is missing costs none
    of another part, and the bytes are those that were stored."""
    frames = make_frames(1, 16, 512 << 10)
    names, inner = names_of(frames), MemoryStore(32 << 20)
    inner.readers = 2
    with closing(TieredStore([inner])) as store:
        put_all(store, frames)
        inner.delete(names[9:10], deadline=soon())
        buffers = [memoryview(bytearray(HEADER_BYTES + frame.header.length)) for frame in frames]
        found = store.fetch(names, buffers, deadline=soon())
        assert [one is not None for one in found] == [number != 9 for number in range(16)]
        for frame, buffer, one in zip(frames, buffers, found, strict=True):
            assert one is None or bytes(buffer) == bytes(one.frame.data) == bytes(frame.data)


def test_more_memory_than_the_system_has() -> None:
    """If the system refuses the memory, the constructor raises StoreUnavailable."""
    with pytest.raises(StoreUnavailable):
        MemoryStore(1 << 62)


def test_slots_grow_with_the_frames() -> None:
    """Slots are as long as the longest frame so far. A longer frame empties the store, and each block of it is
    told as evicted, unless a block is pinned or read: then the frame is refused, and counted."""
    store, gone = MemoryStore(SMALL_BYTES), list[bytes]()
    store.on_evicted = gone.append
    assert store.status().notes["slot_bytes"] == 0
    short, first = make_frames(1, 2, 100), [*make_frames(2, 2, 100), *make_frames(3, 1, SMALL_PAYLOAD)]
    assert store.put(short, deadline=soon()) == 2
    assert store.put(first, deadline=soon()) == 3
    notes = {"slots": 8, "slot_bytes": HEADER_BYTES + SMALL_PAYLOAD, "refused": 0, "emptied": 1}
    assert store.status().notes == notes and sorted(gone) == sorted(names_of(short))
    assert store.put(make_frames(4, 5, 1), deadline=soon()) == 5
    assert read(store, first) == whole(first)
    store.put(make_frames(5, 1, 1), deadline=soon())
    assert store.status().evictions == 3 and store.status().blocks == 8

    longer = make_frames(6, 1, SMALL_PAYLOAD + 1)
    with store.lend(names_of(first), deadline=soon()):
        assert store.put(longer, deadline=soon()) == 0
    assert store.pin(names_of(first), deadline=soon()) == 3
    assert store.put(longer, deadline=soon()) == 0
    assert store.status().notes == notes | {"refused": 2} and read(store, first) == whole(first)
    store.pin(names_of(first), pinned=False, deadline=soon())
    assert store.put(longer, deadline=soon()) == 1 and read(store, longer) == whole(longer)
    assert store.status().blocks == 1 and len(gone) == store.status().evictions == 11

    # By a quarter at least: frames that grow by a byte each do not empty the store each time.
    for more in range(2, 50):
        store.put(make_frames(100 + more, 1, SMALL_PAYLOAD + more), deadline=soon())
    assert store.status().notes["emptied"] == 2


def test_slots_that_have_grown_are_whole_words() -> None:
    """Frames of whole words have slots of whole words, also where slots have grown by a quarter: a device reads words there."""
    store = MemoryStore(SMALL_BYTES)
    for number, size in enumerate((88, 96, 1_000, 1_008)):
        assert store.put(make_frames(number, 1, size), deadline=soon()) == 1
        assert store.status().notes["slot_bytes"] % 8 == 0


def test_the_longest_frame_is_known() -> None:
    """A tier that knows the layouts of a model's blocks keeps those of all groups, in whatever order they come."""
    store = MemoryStore(SMALL_BYTES, longest=HEADER_BYTES + SMALL_PAYLOAD)
    short, long = make_frames(1, 2, 100), make_frames(2, 2, SMALL_PAYLOAD)
    assert store.put(short, deadline=soon()) + store.put(long, deadline=soon()) == 4
    assert read(store, [*short, *long]) == whole([*short, *long]) and store.status().evictions == 0


def test_a_store_full_of_pins() -> None:
    """A put into a store whose slots are all pinned raises StoreFull and changes nothing."""
    store = MemoryStore(SMALL_BYTES, pin_share=1.0)
    chain = make_frames(6, 8, SMALL_PAYLOAD)
    store.put(chain, deadline=soon())
    assert store.pin(names_of(chain), deadline=soon()) == 8
    with pytest.raises(StoreFull):
        store.put(make_frames(7, 2, SMALL_PAYLOAD), deadline=soon())
    assert store.put([*make_frames(8, 1, SMALL_PAYLOAD), *chain[:3]], deadline=soon()) == 3
    assert read(store, chain) == whole(chain)


def test_reserved_slots_are_in_the_quota_of_their_tenant() -> None:
    """A tenant at its quota reserves no slot but those of its own blocks, and none of another tenant's."""
    store = MemoryStore(SMALL_BYTES, tenant_quota=0.5, slot_bytes=SMALL_PAYLOAD + HEADER_BYTES)
    mine, more, theirs = (
        make_frames(n, 4, SMALL_PAYLOAD, root=root * 8) for n, root in ((1, b"mine"), (2, b"mine"), (3, b"them"))
    )
    first = store.reserve([one.header for one in mine], deadline=soon())
    assert len(first.slots) == 4 and put_all(store, theirs) == 4
    second = store.reserve([one.header for one in more], deadline=soon())
    assert second.full and not second.slots
    assert store.publish(first) == 4
    second = store.reserve([one.header for one in more], deadline=soon())
    assert len(second.slots) == 4 and store.lookup(names_of(theirs), deadline=soon()) == 4
    store.abandon(second)
    check_memory_store(store)


def test_reservations_on_several_threads() -> None:
    """Slots of reservations that threads fill, publish, give back or lose, beside deletions and evictions: no block has wrong
    bytes, and in the end all slots are there."""
    chains = [make_frames(420 + number, 4, SMALL_PAYLOAD) for number in range(5)]
    store = MemoryStore(SMALL_BYTES, slot_bytes=SMALL_PAYLOAD + HEADER_BYTES)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            chain = draw.choice(chains)
            reserved = store.reserve([one.header for one in chain], deadline=soon())
            for at, place in zip(reserved.positions, reserved.frames(), strict=True):
                place[:] = chain[at].data
            end = draw.random()
            if end < 0.6:
                store.publish(reserved)
            elif end < 0.8:
                store.abandon(reserved)
            del reserved
            if draw.random() < 0.3:
                store.delete(names_of(chain[draw.randrange(4) :]), deadline=soon())
            for one, data in zip(chain, read(store, chain), strict=True):
                assert data in (None, one.data)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    check_memory_store(store)
    last = make_frames(430, 8, SMALL_PAYLOAD)
    assert put_all(store, last) == 8 and read(store, last) == whole(last)


def test_invalid_records() -> None:
    """An invalid record key or a record that is too long raises StoreError."""
    store = MemoryStore(1000)
    for key in ("", "/", "a/", "/a", "a//b", "ä", "a b", "a\n"):
        with pytest.raises(StoreError):
            store.put_record(key, b"", deadline=soon())
    with pytest.raises(StoreError):
        store.put_record("long", bytes((8 << 20) + 1), deadline=soon())
    store.put_record("long", bytes(8 << 20), deadline=soon())


def test_reads_beside_deletions_and_evictions() -> None:
    """A slot is not reused while a thread reads it: large frames are intact beside deletions and evictions."""
    chains = [make_frames(400 + number, 3, 200_000) for number in range(4)]
    store = MemoryStore(7 * (200_000 + HEADER_BYTES))
    stop = threading.Event()

    def disturb() -> None:
        draw = random.Random(1)
        while not stop.is_set():
            chain = draw.choice(chains)
            put_all(store, chain)
            store.delete(names_of(chain[draw.randrange(3) :]), deadline=soon())

    other = threading.Thread(target=disturb)
    other.start()
    try:
        draw = random.Random(2)
        found = 0
        while found < 200:
            chain = draw.choice(chains)
            for one, data in zip(chain, read(store, chain), strict=True):
                assert data in (None, one.data)
                found += data is not None
    finally:
        stop.set()
        other.join()
    check_memory_store(store)


def test_close_beside_a_reader() -> None:
    """close does not release the memory under a reader: its call succeeds or raises StoreUnavailable."""
    chain = make_frames(410, 8, 200_000)

    def keep_reading(store: MemoryStore, results: list[list[bytes | None]], started: threading.Event) -> None:
        with contextlib.suppress(StoreUnavailable):
            while True:
                results.append(read(store, chain))
                started.set()

    for _ in range(10):
        store = MemoryStore(8 * (200_000 + HEADER_BYTES))
        store.put(chain, deadline=soon())
        started = threading.Event()
        results: list[list[bytes | None]] = []
        reader = threading.Thread(target=keep_reading, args=(store, results, started))
        reader.start()
        assert started.wait(30)
        store.close()
        reader.join()
        assert results and all(result == whole(chain) for result in results)


def small_frames(first: int, count: int) -> list[Frame]:
    """Frames of 8 bytes of payload in chains of 64, unsealed."""
    data = memoryview(bytes(HEADER_BYTES + 8))
    keys = [(number % (1 << 64)).to_bytes(32, "little") for number in range(first - 1, first + count)]
    return [
        Frame(Header(bytes(16), bytes(16), key, parent if number % 64 else b"r" * 32, number % 64, 0, 8, 8), data)
        for number, (parent, key) in enumerate(pairwise(keys), first)
    ]


@pytest.mark.parametrize("count", [1 << 15, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_many_blocks(count: int) -> None:
    """Many small blocks fit, are found, and are evicted one by one to make room for others."""
    store = MemoryStore(count * (HEADER_BYTES + 8))
    for start in range(0, count, 4096):
        store.put(small_frames(start, 4096), deadline=soon())
    assert store.status().blocks == count
    last, more = small_frames(count - 2048, 2048), small_frames(count, 64)
    assert store.lookup(names_of([*last, *more]), deadline=soon()) == 2048
    assert store.put(more, deadline=soon()) == 64
    assert store.status().evictions == 64 and store.status().blocks == count
    assert store.lookup(names_of([*last, *more]), deadline=soon()) == 2112
    assert store.lookup(names_of(small_frames(0, 64)), deadline=soon()) == 63


def test_a_forked_child_is_not_held_up() -> None:
    """A child that is forked while a thread of its parent has the store's lock, in the middle of a change, has an empty store
    that works. The parent's keeps its blocks, and the names that others read."""
    held, go_on, chain = threading.Event(), threading.Event(), make_frames(1, 4, SMALL_PAYLOAD)

    def in_mid_change(name: bytes) -> None:
        held.set()
        assert go_on.wait(60)

    calls = list[object]()

    class Names:
        def start(self, *given: object) -> None:
            calls.append(given)

        def close(self) -> None:
            calls.append("close")

        add = discard = start

    with closing(MemoryStore(4 * len(chain[0].data))) as store:
        store.share_names(Names())
        store.put(chain, deadline=soon())
        store.on_evicted = in_mid_change
        other = make_frames(2, 1, SMALL_PAYLOAD)
        writing = threading.Thread(target=store.put, args=(other,), kwargs={"deadline": soon()})
        writing.start()
        assert held.wait(60)

        def child() -> None:
            signal.alarm(30)  # ends the child: a call waits for the lock
            assert store.present(names_of(chain), deadline=soon()) == [False] * 4
            assert store.put(chain, deadline=soon()) == 4 and read(store, chain) == whole(chain)
            check_memory_store(store)
            store.close()
            assert calls == before

        before = [*calls]
        assert in_child(child) == 0 and len(before) > 4
        go_on.set()
        writing.join(60)
        assert sum(store.present(names_of([*chain, *other]), deadline=soon())) == 4
        check_memory_store(store)


def test_a_child_does_not_wait_for_the_thread_that_populates() -> None:
    """A child that is forked while a thread of its parent has the lock of the thread that populates pages writes and closes."""
    held, go_on, frames = threading.Event(), threading.Event(), make_frames(1, 4, SMALL_PAYLOAD)
    with closing(MemoryStore(1 << 20)) as store:

        def hold() -> None:
            with store._populator._changed:
                held.set()
                assert go_on.wait(60)

        def child() -> None:
            signal.alarm(30)  # ends the child: a call waits for the lock
            assert store.put(frames, deadline=soon()) == 4
            store.close()

        holding = threading.Thread(target=hold)
        holding.start()
        assert held.wait(60)
        assert in_child(child) == 0
        go_on.set()
        holding.join(60)


def test_other_memory() -> None:
    """A store that is moved has its budget and no block, which its listeners hear of, and writes into the new memory. It is not
    moved while a block is pinned, lent or being written, nor to memory of another size, nor when it is closed."""
    store, evicted = MemoryStore(SMALL_BYTES), list[bytes]()
    store.on_evicted = evicted.append
    made = make_frames(1, 3, SMALL_PAYLOAD)
    assert store.put(made[:2], deadline=soon()) == 2
    other = MemoryArena(SMALL_BYTES)
    assert not store.move_to(MemoryArena(SMALL_BYTES - 1))
    assert store.pin(names_of(made[:1]), deadline=soon()) == 1 and not store.move_to(other)
    store.pin(names_of(made[:1]), pinned=False, deadline=soon())
    with store.lend(names_of(made[:1]), deadline=soon()):
        assert not store.move_to(other)
    reserved = store.reserve([made[2].header], deadline=soon())
    assert not store.move_to(other)
    del reserved
    gc.collect()  # a lost reservation holds nothing
    assert store.move_to(other) and sorted(evicted) == sorted(names_of(made[:2]))
    assert store.status().blocks == 0 and store.status().budget == SMALL_BYTES
    assert store.put(made, deadline=soon()) == 3 and read(store, made) == whole(made)
    assert bytes(made[0].payload) in bytes(other.view)
    store.close()
    assert not store.move_to(other)


def test_reads_do_not_wait_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are reserved for reads only in memory that has its pages, or is the first that gets them: a read would wait for the
    others. What was asked for is populated next, and writes get all slots."""
    gate = threading.Event()
    populate = PagePopulator._run

    def wait(self: PagePopulator, *given: Any) -> None:
        gate.wait()
        populate(self, *given)

    monkeypatch.setattr(PagePopulator, "_run", wait)
    monkeypatch.setattr(background, "_AHEAD_BYTES", 0)
    size, length = 128 << 20, (1 << 20) - HEADER_BYTES
    blocks = [UnreadBlock(name, name, length) for name in (number.to_bytes(64) for number in range(96))]
    with closing(MemoryStore(size, slot_bytes=1 << 20)) as store:
        early = store.reserve(blocks, unread=True, deadline=soon())
        assert (early.positions, early.full) == ([*range(64)], False)
        store.abandon(early)
        half = store.reserve(blocks[:50], unread=True, deadline=soon())
        rest = store.reserve(blocks[50:], unread=True, deadline=soon())
        assert (len(half.slots), rest.slots, rest.full) == (50, [], False), "less than a half is read at once"
        store.abandon(half)
        written = store.reserve(blocks, deadline=soon())
        assert len(written.positions) == 96
        store.abandon(written)
        gate.set()
        wait_until(lambda: store._populator.ready >= 96 << 20, "pages")
        late = store.reserve(blocks, unread=True, deadline=soon())
        assert late.positions == [*range(96)]
        store.abandon(late)


def test_evictions_look_at_few_tenants() -> None:
    """A put that evicts runs about as many lines of code with 1,000 tenants as with 50."""
    counts = list[int]()
    for tenants in (50, 1000):
        roots = [Scope(b"model", 16, Salt.of(number.to_bytes(2, "big"), None)).root() for number in range(tenants)]
        with closing(MemoryStore(2000 * (HEADER_BYTES + 64), slot_bytes=HEADER_BYTES + 64)) as store:
            for number, root in enumerate(roots):
                put_all(store, make_frames(number, 2000 // tenants, 64, root=root))
            frames = [make_frames(2000 + number, 8, 64, root=roots[number]) for number in range(48)]
            lines = 0

            def count(frame: FrameType, event: str, _: object) -> Any:
                nonlocal lines
                lines += event == "line"
                return count

            before = sys.gettrace()
            sys.settrace(count)
            try:
                for chain in frames:
                    put_all(store, chain)
            finally:
                sys.settrace(before)
            assert store.status().evictions >= 47 * 8
        counts.append(lines)
    assert counts[1] < 2 * counts[0], counts
