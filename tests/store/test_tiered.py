"""TieredStore: the fastest tier first, and faults of one tier do not affect the others."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from processes import in_child

from foreword.conformance import Fault, FlakyStore, StoreContract, make_frames, names_of, put_all, read, soon, whole
from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, Store
from foreword.store.disk.files import RecordFiles
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tier import Outcome
from foreword.store.tier_admission import AdmissionRule
from foreword.store.tier_counters import Rate
from foreword.store.tier_threads import CircuitBreaker, StoreGuard, TierCall
from foreword.store.tiered import TieredStore
from foreword.store.urls import loss_of, open_store, parse
from foreword.store.wrappers import StoreWrapper

PAYLOAD = 1000


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tiers:
    """Two memory stores behind stores that inject faults, and a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fast = FlakyStore(MemoryStore(1 << 20, label="fast"))
        self.slow = FlakyStore(MemoryStore(4 << 20, label="slow"))
        self.store = TieredStore([self.fast, self.slow], clock=self.clock)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers()
    yield made
    made.store.close()


class TestContract(StoreContract):
    """A tiered store with one tier fulfills the contract, except that it does not raise for failures of the tier."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = TieredStore([MemoryStore(8 << 20)])
        yield store
        store.close()

    def test_a_passed_deadline(self, store: Store) -> None:
        """A deadline that has passed is a miss, and no failure of a tier that was not asked."""
        frames = make_frames(1, 3, PAYLOAD)
        put_all(store, frames)
        assert store.lookup(names_of(frames), deadline=0.0) == 0
        assert read(store, frames, deadline=0.0) == [None] * 3
        assert isinstance(store, TieredStore) and not store.tiers[0].counters.errors

    def test_a_closed_store(self, store: Store) -> None:
        """A closed tier is a miss."""
        frames = make_frames(1, 3, PAYLOAD)
        put_all(store, frames)
        store.close()
        assert store.lookup(names_of(frames), deadline=soon()) == 0
        assert read(store, frames) == [None] * 3


def blocking(size: int = 64 << 20) -> Store:
    """A store in memory whose calls are made on threads, as those of a disk are."""
    store = MemoryStore(size)
    store.blocking = True
    return store


class TestContractOnThreads(TestContract):
    """So does one whose tier makes its calls on threads."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = TieredStore([blocking()])
        yield store
        store.close()


class TestContractWithARule(TestContract):
    """So does one whose tier has a rule, as long as that takes every block at once."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = TieredStore([blocking()], rules=[AdmissionRule("every")])
        yield store
        store.close()


class Guarded(StoreWrapper):
    """A store whose calls a guard makes, and which does nothing else."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.guard = StoreGuard(inner)

    def _made(self, name: str, *args: Any, deadline: float, **more: Any) -> Any:
        return self.guard.ask(lambda: getattr(self.inner, name)(*args, deadline=deadline, **more), deadline)

    def close(self) -> None:
        self.guard.close()


BLOCKS, RECORDS = (
    ("lookup", "present", "get", "put", "delete", "pin"),
    ("put_record", "get_record", "delete_record", "records"),
)
for each in (*BLOCKS, *RECORDS):
    setattr(Guarded, each, partialmethod(Guarded._made, each))


class TestContractOfAGuard(StoreContract):
    """A store whose calls are made by a guard alone fulfills the contract, except that calls are not made for a while after
    several that failed."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = Guarded(blocking())
        yield store
        store.close()

    def test_a_passed_deadline(self, store: Store) -> None:
        """A call after its deadline raises StoreTimeout and changes nothing."""
        frames = make_frames(1, 3, PAYLOAD)
        put_all(store, frames)
        with pytest.raises(StoreTimeout):
            store.delete(names_of(frames), deadline=time.monotonic() - 1.0)
        assert isinstance(store, Guarded) and store.inner.lookup(names_of(frames), deadline=soon()) == 3

    def test_a_closed_store(self, store: Store) -> None:
        """After close (which may be called twice) a call raises StoreUnavailable."""
        store.close()
        store.close()
        with pytest.raises(StoreUnavailable):
            store.records("", deadline=soon())


def test_each_block_from_the_fastest_tier(tiers: Tiers) -> None:
    """A chain whose parts are in two tiers is found, and each block is read from the fastest tier that has it."""
    frames = make_frames(1, 9, PAYLOAD)
    tiers.slow.inner.put(frames[2:7], deadline=soon())
    tiers.fast.inner.put(frames[:4], deadline=soon())
    tiers.fast.inner.put(frames[7:8], deadline=soon())
    names = names_of(frames)
    assert tiers.store.locate(names, deadline=soon()) == [0, 0, 0, 0, 1, 1, 1, 0]
    buffers = [memoryview(bytearray(2000)) for _ in frames]
    found = tiers.store.fetch(names, buffers, deadline=soon())
    assert [None if one is None else one.tier for one in found] == [0, 0, 0, 0, 1, 1, 1, 0, None]
    assert [tiers.store.promotion_targets(number) for number in (0, 1)] == [(), (0,)]


def test_a_suspended_tier_lends_nothing() -> None:
    """A tier that an audit has suspended neither reads blocks nor lends them, and does both again afterwards."""
    frames = make_frames(1, 3, PAYLOAD)
    store = TieredStore([MemoryStore(1 << 20)])
    put_all(store, frames)

    def lent() -> int:
        with store.tiers[0].lend(names_of(frames), soon()) as (_, sound):
            return len(sound)

    assert lent() == 3
    store.tiers[0].suspended = True
    assert lent() == 0 and read(store, frames) == [None] * 3
    store.tiers[0].suspended = False
    assert lent() == 3 and None not in read(store, frames)
    store.close()


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "swap"])
def test_a_bad_block_comes_from_the_next_tier(tiers: Tiers, fault: Fault) -> None:
    """A block that one tier returns damaged is deleted there, counted, and read from the next tier."""
    frames = make_frames(2, 6, PAYLOAD)
    put_all(tiers.store, frames)
    read(tiers.fast, frames)
    tiers.fast.inject(fault)
    assert read(tiers.store, frames) == whole(frames)
    counters = tiers.store.tiers[0].counters
    assert sum(counters.bad.values()) == counters.missed_blocks >= 5
    tiers.fast.inject(fault, 0.0)
    assert sum(one is not None for one in read(tiers.fast, frames)) == 6 - sum(counters.bad.values())


def test_the_circuit_breaker_skips_a_failing_tier(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    """After three failures the circuit breaker skips the tier. After a pause one trial call closes it again. The log has one
    line for each of the two changes."""
    caplog.set_level("INFO", "foreword.store")
    frames = make_frames(3, 4, PAYLOAD)
    put_all(tiers.store, frames)
    tiers.clock.now += 1
    tiers.fast.inject("fail")
    for _ in range(5):
        assert read(tiers.store, frames) == whole(frames)
    tier = tiers.store.tiers[0]
    assert tier.counters.errors == {"store_unavailable": 3} and tier.counters.skipped == 2
    assert tier.breaker.is_open
    tiers.clock.now += 1.5
    assert read(tiers.store, frames) == whole(frames)
    assert tier.counters.errors == {"store_unavailable": 4}
    tiers.fast.inject("fail", 0.0)
    tiers.clock.now += 2.5
    read(tiers.store, frames)
    assert not tier.breaker.is_open and tier.counters.hit_blocks >= 4
    opened, closed = caplog.records
    assert opened.levelname == "WARNING" and tier.label in opened.message and "repeated errors" in opened.message
    assert closed.levelname == "INFO" and closed.message == f"tier {tier.label} works again"


@pytest.mark.parametrize("error", [StoreFull, StoreReadOnly, StoreUnavailable])
def test_pins_that_fail_open_no_circuit(tiers: Tiers, error: type[StoreError]) -> None:
    """A tier that is full, read-only or making its index fails to pin again and again, and is read as before. Each failure is
    told, and counted as an error."""
    frames = make_frames(3, 4, PAYLOAD)
    put_all(tiers.store, frames)
    tiers.clock.now += 1
    failures: list[None] = []
    tiers.slow.fail_next(5, lambda: error("it takes no pins"))
    for _ in range(5):
        assert tiers.store.pin(names_of(frames), deadline=soon(), failed=lambda: failures.append(None)) == 4
    tier = tiers.store.tiers[1]
    assert len(failures) == sum(tier.counters.errors.values()) == 5
    assert tier.breaker.closed and tier.answers
    assert tier.lookup(names_of(frames), soon())[0] == 4


def test_a_child_does_not_wait_for_deletions_of_its_parent() -> None:
    """A child that is forked while a tier of its parent deletes a block stores it: that deletion ends in the parent only."""
    deleting, go_on, frames = threading.Event(), threading.Event(), make_frames(1, 2, PAYLOAD)

    class Slow(MemoryStore):
        def delete(self, names: Sequence[Name], *, deadline: float) -> int:
            deleting.set()
            assert go_on.wait(60)
            return super().delete(names, deadline=deadline)

    store = TieredStore([Slow(1 << 20)])
    tier = store.tiers[0]
    deletion = threading.Thread(target=tier.delete_unneeded, args=(names_of(frames), lambda name: True, math.inf))
    deletion.start()
    assert deleting.wait(60) and tier.deletes(names_of(frames))

    def child() -> None:
        signal.alarm(30)  # ends it: the put would wait for a thread that there is not
        assert not tier.deletes(names_of(frames))
        assert tier.put(frames, soon(1000)) == 2

    code = in_child(child)
    go_on.set()
    deletion.join(60)
    assert code == 0
    store.close()


def test_the_pause_grows() -> None:
    """The pause of a failing tier doubles, up to 30 seconds."""
    clock = Clock()
    breaker, pauses = CircuitBreaker(clock), []
    for _ in range(3):
        breaker.failed()
    for _ in range(10):
        began = clock.now
        while not breaker.allows():
            clock.now += 0.25
        pauses.append(clock.now - began)
        breaker.failed()
    assert pauses == sorted(pauses) and pauses[0] <= 1.25 and 29 <= pauses[-1] <= 30.25


def test_a_rate_expires() -> None:
    """A measured rate follows new measurements and expires."""
    clock = Clock()
    rate = Rate(clock)
    assert rate.value == 0.0
    rate.note(100, 1.0)
    assert rate.value == 100.0
    for _ in range(30):
        rate.note(50, 1.0)
    assert 49.9 < rate.value < 51
    clock.now += 61
    assert rate.value == 0.0


def test_writes_go_to_every_tier(tiers: Tiers) -> None:
    """If one tier fails a write, the others still take it."""
    frames = make_frames(4, 4, PAYLOAD)
    tiers.fast.inject("fail")
    assert tiers.store.put(frames, deadline=soon()) == 4
    assert tiers.slow.inner.lookup(names_of(frames), deadline=soon()) == 4


def test_delete_is_not_best_effort(tiers: Tiers) -> None:
    """A deletion deletes from every tier or raises."""
    frames = make_frames(5, 4, PAYLOAD)
    put_all(tiers.store, frames)
    assert tiers.store.delete(names_of(frames[2:]), deadline=soon()) == 2
    assert tiers.fast.inner.status().blocks == tiers.slow.inner.status().blocks == 2
    tiers.slow.fail_next(1, lambda: StoreReadOnly("takes no writes"))
    with pytest.raises(StoreReadOnly):
        tiers.store.delete(names_of(frames[:2]), deadline=soon())


def test_records_go_to_persistent_tiers() -> None:
    """Records are written to persistent tiers and read from the last one first."""
    memory, near, far = (MemoryStore(1 << 16, label=label) for label in ("memory", "near", "far"))
    store = TieredStore([memory, near, far], persistent=[1, 2])
    store.put_record("a/b", b"one", deadline=soon())
    assert memory.get_record("a/b", deadline=soon()) is None
    far.put_record("a/b", b"two", deadline=soon())
    assert store.get_record("a/b", deadline=soon()) == b"two"
    near.put_record("a/c", b"three", deadline=soon())
    assert store.records("a/", deadline=soon()) == ["a/b", "a/c"]
    assert store.delete_record("a/b", deadline=soon())
    assert store.get_record("a/b", deadline=soon()) is None
    far.close()
    with pytest.raises(StoreError):
        store.records("a/", deadline=soon())
    store.put_record("a/d", b"four", deadline=soon())
    assert store.get_record("a/d", deadline=soon()) == b"four"
    store.close()


def test_threads_and_a_plan_of_faults(tiers: Tiers) -> None:
    """Threads that use tiers with random faults never see a wrong byte."""
    flaky = FlakyStore(
        MemoryStore(1 << 16, label="wild"),
        seed=7,
        plan={"fail": 0.1, "lose": 0.1, "corrupt": 0.2, "truncate": 0.1, "swap": 0.1},
    )
    store = TieredStore([flaky, tiers.slow])
    chains = [make_frames(seed, 12, PAYLOAD) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(40):
            frames = chains[(seed + turn) % 4]
            store.put(frames, deadline=soon())
            for frame, data in zip(frames, read(store, frames), strict=True):
                if data is not None and data != bytes(frame.data):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(store.tiers[0].counters.bad.values()) > 0


def test_a_call_that_does_not_return(tiers: Tiers) -> None:
    """While calls of one tier do not return, the other tier serves every request, the hung tier's circuit opens and no
    other, and it is used again when its calls have returned."""
    frames, fresh = make_frames(6, 6, PAYLOAD), make_frames(7, 2, PAYLOAD)
    put_all(tiers.store, frames)
    tiers.fast.stick()
    hung, sound = tiers.store.tiers
    assert tiers.store.lookup(names_of([*frames, *fresh]), deadline=soon(2.0)) == 6
    until = soon()
    while not hung.breaker.is_open:
        # A call that comes while the tier's first has not returned does not wait, whatever its deadline is.
        assert read(tiers.store, frames, deadline=soon()) == whole(frames)
        assert soon(0.0) < until, "the hung tier's circuit opens"
        time.sleep(0.01)
    assert tiers.store.lookup(names_of([*frames, *fresh]), deadline=soon()) == 6
    assert hung.counters.errors["store_hung"] >= 1 and hung.counters.skipped >= 1
    before = hung.counters.errors["store_hung"]
    tiers.clock.now += 100  # a trial call, which no request waits for
    assert tiers.store.lookup(names_of([*frames, *fresh]), deadline=soon()) == 6
    assert not sound.counters.errors and not sound.breaker.is_open and hung.counters.errors["store_hung"] == before
    tiers.fast.release()
    until = soon()
    while tiers.store.locate(names_of(frames), deadline=soon())[0] != 0:
        assert soon(0.0) < until, "the tier is used again"
        tiers.clock.now += 10
        time.sleep(0.01)


def test_a_hang_costs_one_deadline(tiers: Tiers) -> None:
    """A tier that hangs costs one of the requests that follow each other a wait. A tier that answers late is used again when it
    has answered."""
    frames = make_frames(6, 2, PAYLOAD)
    put_all(tiers.store, frames)
    tiers.fast.stick()
    hung = tiers.store.tiers[0]
    for number in range(5):
        assert tiers.store.lookup(names_of(frames), deadline=soon() if number else soon(2.0)) == 2
        assert read(tiers.store, frames, deadline=soon()) == whole(frames)
    assert hung.counters.errors == {"store_hung": 1} and hung.counters.skipped == 9
    tiers.fast.release()
    until = soon()
    while tiers.store.locate(names_of(frames), deadline=soon())[0] != 0:
        assert soon(0.0) < until, "the tier is used again"
        tiers.clock.now += 10
        time.sleep(0.01)


def test_a_late_read_writes_nothing_that_is_used(tiers: Tiers) -> None:
    """A read that returns after its caller stopped waiting changes no buffer of the caller, or names those it may change."""
    gate = threading.Event()

    class Late(MemoryStore):
        def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
            assert gate.wait(60)
            return super().get(names, buffers, deadline=soon())  # it reads though its caller has stopped waiting

    frames = make_frames(8, 4, PAYLOAD)
    tiers.slow.inner = Late(4 << 20, label="slow")
    tiers.slow.inner.put(frames, deadline=soon())
    buffers = [memoryview(bytearray(2000)) for _ in frames]
    told: list[tuple[Sequence[int], TierCall[list[Outcome]]]] = []
    returned = threading.Event()

    def late(positions: Sequence[int], call: TierCall[list[Outcome]]) -> None:
        told.append((positions, call))

    names = names_of(frames)
    assert tiers.store.fetch(names, buffers, deadline=soon(0.2)) == [None] * 4
    assert not any(bytes(one).strip(b"\0") for one in buffers)
    gate.set()
    until = soon()
    while None in tiers.store.fetch(names, [memoryview(bytearray(2000)) for _ in frames], deadline=soon()):
        assert soon(0.0) < until, "the tier is used again"
        tiers.clock.now += 10
    assert not any(bytes(one).strip(b"\0") for one in buffers), "the late read has returned, elsewhere"
    gate.clear()
    until = soon()
    while not (
        told and told[-1][1].started
    ):  # on a busy machine its thread may not begin in time: it writes nothing then
        assert soon(0.0) < until
        assert tiers.store.fetch(names, buffers, deadline=soon(0.2), on_late=late) == [None] * 4
        tiers.clock.now += 10
    assert list(told[-1][0]) == [0, 1, 2, 3]
    told[-1][1].when_returned(returned.set)
    assert not returned.is_set()
    gate.set()
    assert returned.wait(60)


def test_one_bad_block_costs_one_block(tiers: Tiers) -> None:
    """A block that cannot be what its name says is counted and deleted; the others of the batch are served, the tier is not
    skipped, and the next put heals the block."""
    frames = make_frames(9, 20, PAYLOAD)
    tiers.slow.put(frames, deadline=soon())
    tier = tiers.store.tiers[1]
    for bad in (19, 0, 7):
        tiers.slow.spoil([frames[bad].name])
        found = read(tiers.store, frames)
        assert [i for i in range(20) if found[i] != bytes(frames[i].data)] == [bad]
        assert tiers.store.lookup(names_of(frames[bad : bad + 1]), deadline=soon()) == 0
        tiers.slow.put(frames, deadline=soon())
        assert read(tiers.store, frames) == whole(frames)
    assert tier.counters.bad == {"no_frame": 3} and not tier.counters.errors and not tier.breaker.is_open


def test_a_block_heals_while_it_is_deleted(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad block whose deletion is slow is stored by the next put: it is not taken for present and deleted afterwards."""
    monkeypatch.setattr("foreword.store.tier._DELETE_SECONDS", 60.0)
    gate = threading.Event()

    class Slow(FlakyStore):
        def delete(self, names: Sequence[Name], *, deadline: float) -> int:
            assert gate.wait(60)
            return super().delete(names, deadline=deadline)

    frames, slow = make_frames(12, 3, PAYLOAD), Slow(MemoryStore(1 << 20))
    store = TieredStore([slow])
    store.put(frames, deadline=soon())
    slow.spoil([frames[1].name])
    assert read(store, frames, deadline=soon(0.2))[1] is None
    threading.Timer(0.2, gate.set).start()
    assert store.put(frames, deadline=soon()) == 3
    assert read(store, frames) == whole(frames)
    store.close()


def test_dead_nodes_cost_their_blocks(tiers: Tiers) -> None:
    """Where a third of the names fails, the others are served by every request, and the failed ones by the next tier."""
    frames = make_frames(10, 30, PAYLOAD)
    tiers.fast.inner.put(frames, deadline=soon())
    tiers.slow.inner.put(frames[::2], deadline=soon())
    tiers.fast.lose_nodes(1 / 3)
    tier = tiers.store.tiers[0]
    failed = 0
    for number in range(20):
        part = frames if number % 2 else frames[number : number + 1]
        found = read(tiers.store, part)
        assert all(data == bytes(frame.data) for frame, data in zip(part, found, strict=True) if data is not None)
        failed = max(failed, found.count(None))
    assert 0 < failed < 15 and tier.counters.errors["block_failed"] > 0 and not tier.breaker.is_open


def test_urls() -> None:
    """URLs set backend, path, options, codec and label. Equal labels are numbered."""
    one = parse("disk:///a/b%20c?size=1GiB&codec=lossless&label=ssd")
    assert (one.scheme, one.path, one.codec, one.label, one.options) == (
        "disk", "/a/b c", "lossless", "ssd", {"size": "1GiB"}
    )  # fmt: skip
    store = open_store(["memory://?size=1MiB", "memory://?size=2MiB"])
    assert [tier.label for tier in store.tiers] == ["memory", "memory-2"]
    assert [tier.store.status().budget for tier in store.tiers] == [1 << 20, 2 << 20]
    store.close()
    assert loss_of(["memory://", "disk:///x?codec=lossless"]) == ""
    assert loss_of(["memory://?codec=int8", "disk:///x?codec=int4"]) == "int4+int8"


def test_a_memory_tier_has_no_codec() -> None:
    """A codec saves nothing in slots of one length, so its combination with memory is refused."""
    with pytest.raises(StoreConfigError, match="codec=lossless"):
        open_store(["memory://?size=1MiB&codec=lossless"])


def test_a_new_folder_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that open a new folder at once call it the same, and so does one that opens it later: never do both find no name and
    write their own."""
    both, put = threading.Barrier(2), RecordFiles.put

    def together(self: RecordFiles, key: str, data: bytes, token: str) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # the other one cannot come if it waits for this one
        put(self, key, data, token)

    url = f"disk://{tmp_path}/new?size=1GiB"
    with monkeypatch.context() as patch:
        patch.setattr(RecordFiles, "put", together)
        with ThreadPoolExecutor(2) as pool:
            opened = list(pool.map(lambda _: open_store([url]), range(2)))
    opened.append(open_store([url]))
    names = {one.tiers[0].location for one in opened}
    for one in opened:
        one.close()
    assert len(names) == 1 and names.pop().startswith("folder ")
