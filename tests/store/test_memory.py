"""The memory store: the contract, its slots, and a million blocks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

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
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES, Frame, Header
from foreword.store.memory.store import MemoryStore


class TestContract(StoreContract):
    bounded = True

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = MemoryStore(64 << 20, slot_bytes=(64 << 10) + HEADER_BYTES)
        yield store
        store.check()
        store.close()

    @pytest.fixture
    def small(self) -> Iterator[Store]:
        store = MemoryStore(SMALL_BYTES)
        yield store
        store.check()
        store.close()


@pytest.mark.parametrize(("size", "share", "slot"), [(0, 0.5, None), (100, 1.5, None), (100, 0.5, 101), (100, 0.5, 0)])
def test_sizes_that_make_no_sense(size: int, share: float, slot: int | None) -> None:
    """A store that could never hold anything is refused when it is made."""
    with pytest.raises(StoreConfigError):
        MemoryStore(size, pin_share=share, slot_bytes=slot)


def test_more_memory_than_there_is() -> None:
    """An arena that the system does not give is an error of a store, at once."""
    with pytest.raises(StoreUnavailable):
        MemoryStore(1 << 62)


def test_the_first_put_decides_the_slots() -> None:
    """Slots are as long as the longest frame of the first put; longer ones are refused later, shorter ones take a slot."""
    store = MemoryStore(SMALL_BYTES)
    assert store.status().notes["slot_bytes"] == 0
    first = [*make_frames(1, 2, 100), *make_frames(2, 1, SMALL_PAYLOAD)]
    assert store.put(first, deadline=soon()) == 3
    assert store.status().notes == {"slots": 8, "slot_bytes": HEADER_BYTES + SMALL_PAYLOAD, "refused": 0}
    longer = make_frames(3, 1, SMALL_PAYLOAD + 1)
    assert store.put(longer, deadline=soon()) == 0
    assert store.status().notes["refused"] == 1
    assert store.put(make_frames(4, 5, 1), deadline=soon()) == 5
    assert read(store, first) == whole(first)
    store.put(make_frames(5, 1, 1), deadline=soon())
    assert store.status().evictions == 1 and store.status().blocks == 8


def test_what_is_pinned_leaves_no_room() -> None:
    """A put into a store whose every slot is pinned says so, and changes nothing."""
    store = MemoryStore(SMALL_BYTES, pin_share=1.0)
    chain = make_frames(6, 8, SMALL_PAYLOAD)
    store.put(chain, deadline=soon())
    assert store.pin(names_of(chain), deadline=soon()) == 8
    with pytest.raises(StoreFull):
        store.put(make_frames(7, 2, SMALL_PAYLOAD), deadline=soon())
    assert store.put([*make_frames(8, 1, SMALL_PAYLOAD), *chain[:3]], deadline=soon()) == 3
    assert read(store, chain) == whole(chain)


def test_words_that_are_none() -> None:
    """A record's word of other characters, or a record that is too long, is an error of a store."""
    store = MemoryStore(1000)
    for word in ("", "/", "a/", "/a", "a//b", "ä", "a b", "a\n"):
        with pytest.raises(StoreError):
            store.put_record(word, b"", deadline=soon())
    with pytest.raises(StoreError):
        store.put_record("long", bytes((8 << 20) + 1), deadline=soon())
    store.put_record("long", bytes(8 << 20), deadline=soon())


def test_reading_while_others_delete_and_evict() -> None:
    """A slot that is being read is not written before the reader is done: large frames that come back are whole."""
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
    store.check()


def test_closing_under_a_reader() -> None:
    """close does not pull the memory away from who is reading; that call ends well or says that the store is closed."""
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
        Frame(Header(bytes(16), key, parent if number % 64 else b"r" * 32, number % 64, 0, 8, 8), data)
        for number, (parent, key) in enumerate(pairwise(keys), first)
    ]


def test_a_million_blocks() -> None:
    """A million small blocks fit, are found, and make room for others one by one."""
    count = 1 << 20
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
