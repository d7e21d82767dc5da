"""Knowledge of a disk store about its blocks without a call that may wait. It never takes a present block for absent."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest
from example_counts import represented
from processes import in_child

from foreword.conformance import soon
from foreword.conformance.frames import make_frames, names_of, present
from foreword.store.disk import disk_store, known_blocks
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.known_blocks import ChangeBoard, KnownBlocks
from foreword.store.frame import Frame
from foreword.store.tiered import TieredStore, TierSearch

CHAINS = 12


def chain(number: int) -> list[Frame]:
    return make_frames(number, 6, 1000)


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough time for reading what others have written, when a folder is opened and behind a lookup: a busy machine takes
    longer than both have, and the rest stays unknown until the next lookup."""
    monkeypatch.setattr(disk_store, "_LOAD_SECONDS", 60.0)
    monkeypatch.setattr(disk_store, "_KNOWN_SECONDS", 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def opened(stack: ExitStack, folder: Path, size: int = 1 << 20, **options: object) -> DiskStore:
    store = DiskStore(folder / "kv", size, **options)  # type: ignore[arg-type]
    stack.callback(store.close)
    return store


def undecided(store: DiskStore, frames: list[Frame]) -> bool:
    return None in store.known(names_of(frames))


def test_a_store_alone_knows_everything(stack: ExitStack, tmp_path: Path) -> None:
    """A store that has its folder to itself knows whether blocks are there: those that were there when it was opened, and those
    that it stores, evicts and deletes. It makes no call of the index or of the file system for that, except for one read of a
    page."""
    first = opened(stack, tmp_path)
    first.put(chain(0), deadline=soon())
    first.close()
    store = opened(stack, tmp_path, sum(len(one.data) for one in chain(1)) * 2)
    assert store.known(names_of(chain(0))) == [True] * 6 and store.known(names_of(chain(1))) == [False] * 6
    draw = random.Random(3)
    for step in range(200):
        frames = chain(draw.randrange(CHAINS))
        if draw.random() < 0.8:
            store.put(frames, deadline=soon())
        else:
            store.delete(names_of(frames)[draw.randrange(6) :], deadline=soon())
        for number in range(CHAINS):
            assert store.known(names_of(chain(number))) == present(store, chain(number)), step
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            calls.append(getattr(called, "__qualname__", ""))

    sys.setprofile(note)
    store.known(names_of(chain(0)))
    sys.setprofile(None)
    assert calls.count("pread") == 1
    assert not {"stat", "open", "Connection.execute", "lock.acquire", "Cursor.fetchall"} & set(calls)


@pytest.mark.parametrize("seed", range(6))
def test_what_others_write_is_never_absent(stack: ExitStack, tmp_path: Path, seed: int) -> None:
    """Several stores share a folder, store, evict and delete blocks, and look blocks up in random order. A block that one has
    put is at no moment known to be absent by another one, and a lookup of it in a tiered store, which asks only what is not
    known, finds it."""
    draw = random.Random(seed)
    size = sum(len(one.data) for one in chain(1)) * draw.choice((3, 100))
    stores = [opened(stack, tmp_path, size) for _ in range(3)]
    decided = 0
    for _ in range(150):
        writer, frames = draw.choice(stores), chain(draw.randrange(CHAINS))
        if draw.random() < 0.25:
            writer.delete(names_of(frames)[draw.randrange(6) :], deadline=soon())
        else:
            writer.put(frames, deadline=soon())
        for store in draw.sample(stores, 2):
            looked = chain(draw.randrange(CHAINS)) if draw.random() < 0.5 else frames
            told = store.known(names_of(looked))
            truth = present(store, looked) if draw.random() < 0.5 else present(writer, looked)
            assert not any(known is False and there for known, there in zip(told, truth, strict=True))
            decided += None not in told
    assert decided, "they know something, all the same"


def test_what_another_process_writes(stack: ExitStack, tmp_path: Path) -> None:
    """Blocks that another process adds are known from its log, if no earlier process has had its place on the board. Else they
    are not known, until a lookup has asked the index. Then all absent ones are known again."""
    store = opened(stack, tmp_path)
    store.put(chain(0), deadline=soon())
    assert not undecided(store, chain(1))

    def add(number: int) -> None:
        other = DiskStore(tmp_path / "kv", 1 << 20)
        other.put(chain(number), deadline=soon())
        other.close()

    assert in_child(lambda: add(1)) == 0
    assert store.known(names_of(chain(1))) == [True] * 6 and store.known(names_of(chain(2))) == [False] * 6
    assert in_child(lambda: add(2)) == 0
    assert store.known(names_of(chain(2))) == [None] * 6 == store.known(names_of(chain(3)))
    assert store.known(names_of(chain(0))) == [True] * 6, "none was removed"
    assert store.lookup(names_of(chain(2)), deadline=soon()) == 6
    assert store.known(names_of(chain(2))) == [True] * 6 and store.known(names_of(chain(3))) == [False] * 6


def test_a_process_that_is_read_once_is_followed(stack: ExitStack, tmp_path: Path) -> None:
    """Once a store has read the index behind another process's first change, it knows all that this process stores, evicts and
    deletes, within its log, without another look at the index: as the scheduler of an engine does, whose worker is
    another process. More than the log holds is looked up in the index once."""
    size = sum(len(one.data) for one in chain(1)) * 3
    writer, reader = opened(stack, tmp_path, size), opened(stack, tmp_path, size)
    writer.put(chain(0), deadline=soon())
    assert reader.lookup(names_of(chain(0)), deadline=soon()) == 6
    draw = random.Random(7)
    for step in range(150):
        frames = chain(draw.randrange(CHAINS))
        if draw.random() < 0.8:
            writer.put(frames, deadline=soon())
        else:
            writer.delete(names_of(frames)[draw.randrange(6) :], deadline=soon())
        if draw.random() < 0.5:
            for number in range(CHAINS):
                assert reader.known(names_of(chain(number))) == present(writer, chain(number)), step


class WatchedBoard(ChangeBoard):
    """A board whose every look lets other processes do something first."""

    def __init__(self, path: str, others_act: Callable[[], None]) -> None:
        super().__init__(path)
        self._others_act = others_act

    def others(self) -> tuple[bytes, bytes] | None:
        self._others_act()
        return super().others()

    def changes_of(self, entry: int, before: int, now: int) -> list[int] | None:
        self._others_act()
        return super().changes_of(entry, before, now)


class SharedIndex:
    """An index that processes change one after the other, each in the steps of a transaction, and what each knows of it. Like
    SQLite it gives a new row the number behind the largest one."""

    def __init__(self, path: Path, draw: random.Random, processes: int) -> None:
        self.draw = draw
        self.rows: dict[int, int] = {}
        self.there: set[int] = set()  # ids whose put has returned
        self.gone: list[int] = []
        self.running: list[Iterator[None]] = []
        self.locked = False
        self.writing: list[KnownBlocks] = []  # a process has one transaction at a time
        self.boards = [WatchedBoard(str(path), self.act) for _ in range(processes)]
        self.known = [KnownBlocks(board) for board in self.boards]
        for one in self.known:
            one.forget(opened=True)
        if draw.random() < 0.5:
            for one in self.known:
                one.committed([], [100], 0)

    def act(self) -> None:
        """Some processes take a step."""
        for _ in range(self.draw.choice((0, 0, 1, 2, 5))):
            if len(self.running) < 4:
                self.running.append(self.write(self.draw.choice(self.known)))
            one = self.running.pop(self.draw.randrange(len(self.running)))
            if next(one, self) is None:
                self.running.append(one)

    def write(self, known: KnownBlocks) -> Iterator[None]:
        """A transaction that removes some blocks and adds others."""
        while self.locked or any(writer is known for writer in self.writing):
            yield
        self.locked = True
        self.writing.append(known)
        wanted = {self.draw.randrange(8) for _ in range(self.draw.randrange(3))}
        gone = set(self.draw.sample(sorted(self.rows.values()), min(len(self.rows), self.draw.randrange(3))))
        new = wanted - set(self.rows.values())
        if gone:
            yield
            known.removing()
            yield
        self.rows = {row: one for row, one in self.rows.items() if one not in gone}
        self.there -= gone
        self.gone += gone
        for one in new:
            self.rows[max(self.rows, default=0) + 1] = one
        last = max(self.rows, default=0) if gone else 0
        self.locked = False
        yield
        if new or gone:
            known.committed(new, gone, last)
            self.there |= new & set(self.rows.values())
        self.writing.remove(known)

    def rows_after(self, last: int, count: int) -> list[tuple[int, int]]:
        found = sorted((row, one) for row, one in self.rows.items() if row > last)[:count]
        self.act()
        return found


def test_what_another_process_removes(stack: ExitStack, tmp_path: Path) -> None:
    """A block that another process removes is known to be gone, or not known in a process that has written meanwhile, perhaps
    the same blocks. After one has removed blocks that cannot be followed, none is known to be there: a load of what is gone
    would cost its request more than a lookup."""
    writer = opened(stack, tmp_path)
    writer.put(chain(0) + chain(1) + chain(2), deadline=soon())
    store = opened(stack, tmp_path)
    assert not undecided(store, chain(0))

    def remove(number: int) -> None:
        other = DiskStore(tmp_path / "kv", 1 << 20)
        other.delete(names_of(chain(number)), deadline=soon())
        other.close()

    assert in_child(lambda: remove(1)) == 0
    assert store.known(names_of(chain(0))) == [True] * 6 and store.known(names_of(chain(1))) == [False] * 6
    assert writer.known(names_of(chain(0))) == [True] * 6 and writer.known(names_of(chain(1))) == [None] * 6
    assert in_child(lambda: remove(2)) == 0
    assert store.known(names_of(chain(0))) == store.known(names_of(chain(2))) == [None] * 6
    assert present(store, chain(0)) == [True] * 6 and present(store, chain(2)) == [False] * 6


def test_nothing_is_known_where_that_cannot_work(stack: ExitStack, tmp_path: Path) -> None:
    """A store knows nothing with the journal for network file systems, read-only, without a board, with too many blocks and
    after the end; a closed one neither."""
    one = opened(stack, tmp_path / "a", journal="delete")
    one.put(chain(0), deadline=soon())
    other = opened(stack, tmp_path / "a", read_only=True)
    (tmp_path / "b" / "kv" / "changes").mkdir(parents=True)
    third = opened(stack, tmp_path / "b")
    third.put(chain(0), deadline=soon())
    fourth = opened(stack, tmp_path / "c")
    fourth.close()
    for store in (one, other, third, fourth):
        assert store.known(names_of(chain(0) + chain(1))) == [None] * 12
    board = ChangeBoard(str(tmp_path / "changes"))
    few = KnownBlocks(board, most=3)
    few.forget(opened=True)
    few.read(lambda last, count: [(1, 10), (2, 20)] if not last else [], soon())
    assert few.told([10, 30]) == [True, False]
    few.committed([30, 40], [], 4)
    assert few.told([10, 30, 50]) == [None] * 3
    board.close()


@pytest.mark.parametrize("seed", represented(range(120), *range(6)))
def test_order_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Processes change an index, in steps that mix in any order with what others do, also while they read the index, the board
    and the logs. No block whose put has returned counts as absent, in any of them, and most is known."""
    monkeypatch.setattr(known_blocks, "_RELOAD_SECONDS", 0.0)
    index = SharedIndex(tmp_path / "changes", random.Random(seed), 3)
    decided = asked = 0
    for _ in range(300):
        index.act()
        known = index.draw.choice(index.known)
        if index.draw.random() < 0.2:
            known.read(index.rows_after, soon())
        before, removals = set(index.there), len(index.gone)
        told = known.told(range(8))
        there = before.difference(index.gone[removals:])
        assert not [one for one in there if told[one] is False], "there, and not known to be"
        decided += sum(one is not None for one in told)
        asked += len(told)
    assert decided > asked / 10
    for board in index.boards:
        board.close()


def test_more_processes_than_entries(tmp_path: Path) -> None:
    """A process that finds no entry on the board knows nothing itself, and the others learn of its changes."""
    boards = [ChangeBoard(str(tmp_path / "changes")) for _ in range(129)]
    assert [board.open() for board in boards] == [True] * 127 + [False] * 2
    for last in boards[127:]:
        before = boards[0].others()
        last.announce([7])
        after = boards[0].others()
        assert before is not None and after is not None and before[0] != after[0] and before[1] == after[1]
    before = boards[5].others()
    boards[5].announce([7], [8])
    assert boards[5].others() == before, "its own changes are not those of others"
    for board in boards:
        board.close()


def test_lookups_of_a_tiered_store_ask_only_what_is_not_known(stack: ExitStack, tmp_path: Path) -> None:
    """An inline lookup in a tiered store is decided by what the disk knows, finds what is there, and leaves open what is not
    known, or what a suspended tier, or one whose calls fail, would have to count."""
    store = opened(stack, tmp_path)
    tiered = TieredStore([store])
    store.put(chain(0), deadline=soon())

    def inline(number: int) -> tuple[list[int], bool]:
        search = TierSearch(soon())
        places = tiered.locate(names_of(chain(number)), search=search, inline=True)
        each = tiered.find(names_of(chain(number)), search=search, inline=True)
        assert search.undecided or places == [place for place in each if place >= 0]
        return places, search.undecided

    assert inline(0) == ([0] * 6, False) and inline(1) == ([], False)
    tiered.tiers[0].suspended = True
    assert inline(0) == ([], True)
    tiered.tiers[0].suspended = False
    assert tiered.tiers[0].breaker.failed(certain=True)
    assert inline(0) == ([], True) and not tiered.tiers[0].breaker.closed, "no trial call was used up"


def test_blocks_are_known_while_threads_write(stack: ExitStack, tmp_path: Path) -> None:
    """While threads put blocks, a block is known to be absent only until its put returns."""
    store = opened(stack, tmp_path, 1 << 24)
    done: list[int] = []
    writers = [
        threading.Thread(
            target=lambda part=part: [  # type: ignore[misc]
                (store.put(chain(number), deadline=soon()), done.append(number)) for number in range(part, 60, 3)
            ]
        )
        for part in range(3)
    ]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        for number in list(done):
            assert store.known(names_of(chain(number))) == [True] * 6
    for thread in writers:
        thread.join()
    assert len(done) == 60
