"""The names in a memory store, as other processes see them: exactly its blocks, and no present block counts as absent."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import in_child

from foreword.conformance import soon
from foreword.conformance.frames import make_frames, names_of, present
from foreword.store.frame import Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.transfer.name_table import NamesElsewhere, NameTable

CHAINS = 12


def chain(number: int) -> list[Frame]:
    return make_frames(number, 6, 1000)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore(sum(len(one.data) for one in chain(1)) * 4)
    yield made
    made.close()


def shared(store: MemoryStore) -> NamesElsewhere:
    table = NameTable()
    store.share_names(table)
    return NamesElsewhere(table.path)


@pytest.mark.parametrize("shared_first", [True, False])
def test_the_table_has_the_blocks_of_the_store(store: MemoryStore, shared_first: bool) -> None:
    """Whether the names are shared before the first block or later: of what a store takes, evicts and deletes, another process
    knows each block that is there, and none besides. After the end it knows nothing."""
    if not shared_first:
        store.put(chain(0), deadline=soon())
    names = shared(store)
    assert names.known(names_of(chain(0))) == [not shared_first] * 6
    draw = random.Random(5)
    for step in range(200):
        frames = chain(draw.randrange(CHAINS))
        if draw.random() < 0.8:
            store.put(frames, deadline=soon())
        else:
            store.delete(names_of(frames)[draw.randrange(6) :], deadline=soon())
        for number in range(CHAINS):
            assert names.known(names_of(chain(number))) == present(store, chain(number)), step
    store.close()
    assert names.known(names_of(chain(0))) == [None] * 6


def test_a_child_reads_it(store: MemoryStore) -> None:
    """Another process reads the table of this one while it changes."""
    table = NameTable()
    store.share_names(table)
    store.put(chain(1), deadline=soon())

    def look() -> None:
        names = NamesElsewhere(table.path)
        assert names.known(names_of(chain(1))) == [True] * 6 and names.known(names_of(chain(2))) == [False] * 6

    assert in_child(look) == 0


def test_more_names_than_cells() -> None:
    """A bucket that has had more names than cells says nothing of a name that it lacks, also when some are gone."""
    table = NameTable()
    table.start(4)
    blocks = names_of(make_frames(1, 40, 10))
    names = NamesElsewhere(table.path)
    for one in blocks:
        table.add(one)
    assert False not in names.known(blocks)
    for one in blocks[:30]:
        table.discard(one)
    assert False not in names.known(blocks)


def test_no_table(tmp_path: Path) -> None:
    """Where there is no table, or something else in its place, nothing is known."""
    (tmp_path / "other").write_bytes(bytes(8192))
    for path in (tmp_path / "none", tmp_path / "other", tmp_path):
        assert NamesElsewhere(str(path)).known(names_of(chain(0))) == [None] * 6


def test_names_while_threads_write() -> None:
    """While threads put blocks, each is known from when its put returns."""
    store = MemoryStore(1 << 24)
    names, done = shared(store), list[int]()
    writers = [
        threading.Thread(
            target=lambda part=part: [  # type: ignore[misc]
                (store.put(chain(number), deadline=soon()), done.append(number)) for number in range(part, 90, 3)
            ]
        )
        for part in range(3)
    ]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        for number in list(done):
            assert names.known(names_of(chain(number))) == [True] * 6
    for thread in writers:
        thread.join()
    assert len(done) == 90
    store.close()
