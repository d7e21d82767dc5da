"""Clocks and machines: a wall clock that is wrong changes nothing, and what killed processes left is found."""

from __future__ import annotations

import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from processes import in_child
from servers import wait_until

from foreword.conformance import make_frames, put_all, read, soon
from foreword.prefixes import quarantine as quarantine_module
from foreword.prefixes.mismatch import Mismatch
from foreword.prefixes.quarantine import QUARANTINE_SECONDS, ChainQuarantine
from foreword.router_extras.router_prefixes import NewPrefix, PrefixRegistry
from foreword.store import machine, shared_records
from foreword.store.disk import index_rows
from foreword.store.disk.disk_store import DiskStore
from foreword.store.tiered import TieredStore

DAY, HOUR, YEAR = 86_400.0, 3_600.0, 365 * 86_400.0
SKEWS = {"behind": -DAY, "ahead": 2 * HOUR, "far-ahead": YEAR}
IDLE = HOUR + 60


@contextmanager
def shifted(monkeypatch: pytest.MonkeyPatch, *, wall: float = 0.0, machine_clock: float = 0.0) -> Iterator[None]:
    """Shift the wall clock of this process, or let time pass on the machine."""
    real_wall, real_monotonic = time.time, time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real_wall() + wall)
        patch.setattr(time, "monotonic", lambda: real_monotonic() + machine_clock)
        yield


def roots(number: int) -> bytes:
    return bytes([number]) * 32


def fill(store: DiskStore, tenant: int, chains: int, first: int = 0) -> None:
    for number in range(first, first + chains):
        put_all(store, make_frames(1000 * tenant + number, 10, 1000, root=roots(tenant)))


def kept(store: DiskStore, tenant: int, chains: int) -> int:
    """How many blocks of a tenant's chains are there."""
    return sum(
        sum(one is not None for one in read(store, make_frames(1000 * tenant + number, 10, 1000, root=roots(tenant))))
        for number in range(chains)
    )


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("when", ["before", "while others evict", "evicts"])
def test_wall_clocks_move_no_shares(skew: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions take the tenant's blocks that right clocks would: whether the clock was wrong when others used the store, is
    wrong in a process that uses it now, or in the process that evicts."""
    found = []
    for wall in (0.0, SKEWS[skew]):
        with (
            closing(DiskStore(tmp_path / str(wall), 100 * 1200)) as store,
            closing(DiskStore(tmp_path / str(wall), 100 * 1200)) as other,
        ):
            with shifted(monkeypatch, wall=wall if when == "before" else 0.0):
                for tenant in range(1, 5):
                    fill(store, tenant, 2)  # 80 blocks; each has a fifth at most from now on
            with shifted(monkeypatch, wall=wall if when == "while others evict" else 0.0):
                fill(other, 1, 1)
            with shifted(monkeypatch, wall=wall if when == "evicts" else 0.0):
                fill(store, 9, 20)
            active = [kept(store, tenant, 20) for tenant in (1, 2, 3, 4, 9)]
            with shifted(monkeypatch, wall=wall if when == "evicts" else 0.0, machine_clock=IDLE):
                fill(store, 9, 20, 20)
            found.append((active, [kept(store, tenant, 20) for tenant in (1, 2, 3, 4)]))
    assert found[0] == found[1]
    assert found[0] == ([20, 20, 20, 20, 20], [0, 0, 0, 0]), "an hour without a use ends the protection"


def test_the_clock_of_an_index_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has one clock for all machines: it continues in a new boot where it was, and a machine that was away is set to
    what others have noted."""

    def now(store: DiskStore) -> float:
        with store._writer.transaction(soon()) as transaction:
            return transaction.now()

    def on(clock: str) -> None:
        monkeypatch.setattr(index_rows, "clock_id", lambda: clock)

    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        on("first boot")
        began = now(store)
        with shifted(monkeypatch, machine_clock=1000.0):
            late = now(store)
            assert 1000.0 <= late - began < 1060.0
        on("second boot")  # whose monotonic clock begins anew
        with shifted(monkeypatch, machine_clock=-500.0):
            assert late <= now(store) < late + 60.0
        with shifted(monkeypatch, machine_clock=-400.0):
            later = now(store)
            assert late + 100.0 <= later < late + 160.0
        on("first boot")
        assert later <= now(store) < later + 60.0


def test_times_in_the_future_of_an_earlier_build(tmp_path: Path) -> None:
    """Times of tenants that an earlier build noted while its clock was a year ahead count as the time of the upgrade."""
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        fill(store, 1, 1)
        with store._writer.transaction(soon()) as transaction:
            transaction.connection.execute("UPDATE tenants SET used_at = used_at + ?", (YEAR,))
            transaction.connection.execute("DROP TABLE clocks")
    with closing(DiskStore(tmp_path, 1 << 20)) as store, store._writer.transaction(soon()) as transaction:
        [(used_at,)] = transaction.connection.execute("SELECT used_at FROM tenants").fetchall()
        assert used_at <= transaction.now() < used_at + 600.0


def test_a_machine_that_cannot_tell_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the id of a boot, the clock of a process is its own."""
    monkeypatch.setattr(machine, "_BOOT", Path("/nowhere"))
    assert machine.boot_id() == ""
    machine._clock_id.cache_clear()
    first = machine.clock_id()
    assert first == machine.clock_id() != ""
    machine._clock_id.cache_clear()
    assert machine.clock_id() != first
    machine._clock_id.cache_clear()


def quarantine(stack: ExitStack, folder: Path) -> ChainQuarantine:
    """The quarantine of a server."""
    store = TieredStore([stack.enter_context(closing(DiskStore(folder, 1 << 20)))], [0])
    found = ChainQuarantine(store, "ab" * 32)
    stack.callback(found.close)
    return found


def test_a_chain_that_the_queue_refuses_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that are found while too many wait are removed from the stores all the same."""
    monkeypatch.setattr(quarantine_module, "MAX_CHAINS", 1)
    monkeypatch.setattr(quarantine_module, "_SCAN_SECONDS", 0.01)
    begun, gate = threading.Event(), threading.Event()

    @contextmanager
    def held(prefixes: Sequence[bytes]) -> Iterator[None]:
        begun.set()
        assert gate.wait(60)
        yield

    with closing(DiskStore(tmp_path, 1 << 20)) as disk:
        chains = [make_frames(number, 2, 1000, root=roots(number)) for number in range(1, 4)]
        for frames in chains:
            put_all(disk, frames)
        found = ChainQuarantine(TieredStore([disk], [0]), "ab" * 32, held)
        for number, frames in enumerate(chains, start=1):
            keys = [one.header.key for one in frames[:1]]
            found.add(Mismatch(array("I"), roots(number), keys, 0, "disk", (0,), [], [], 0.0, b""))
            assert begun.wait(60)
        gate.set()
        wait_until(lambda: not any(one for frames in chains for one in read(disk, frames)), "all are removed")
        found.close()


@pytest.mark.parametrize("skew", SKEWS)
def test_wall_clocks_end_no_quarantine(skew: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain in quarantine stays there, in all servers, for the hour of the server that found it, whatever the clock of
    another server says that joins, and whatever that of the finder says."""
    machines = [""]  # the machine of the server that is called now
    monkeypatch.setattr(shared_records, "clock_id", lambda: machines[-1])
    monkeypatch.setattr(quarantine_module, "clock_id", lambda: machines[-1])
    frames = make_frames(1, 2, 100)
    root, keys = frames[0].header.root, [one.header.key for one in frames]
    with ExitStack() as stack:
        machines.append("a")
        first = quarantine(stack, tmp_path)
        with shifted(monkeypatch, wall=SKEWS[skew]):
            first.add(Mismatch(array("I"), root, keys, 0, "disk", (0,), [], [], 0.0, b""))
            assert first.flush(60)
        for name, wall in (("b", 0.0), ("c", SKEWS[skew])):
            machines.append(name)
            with shifted(monkeypatch, wall=wall):
                second = quarantine(stack, tmp_path)
                assert [len(one.chains) for one in (first, second)] == [1, 1]
                with shifted(monkeypatch, wall=wall, machine_clock=QUARANTINE_SECONDS - 60):
                    second.scan()
                    machines.append("a")
                    first.scan()
                    assert [len(one.chains) for one in (first, second)] == [1, 1]
        with shifted(monkeypatch, machine_clock=QUARANTINE_SECONDS + 60):
            first.scan()
            second.scan()
            assert [len(one.chains) for one in (first, second)] == [0, 0]


def test_a_router_whose_clock_goes_back() -> None:
    """A prefix that is registered behind an erasure of the tenant is registered, and one that was being registered before it is
    not, whatever the clock did meanwhile."""
    registry = PrefixRegistry()
    new = NewPrefix(name="rules", content="Answer briefly.")
    with pytest.MonkeyPatch.context() as patch, shifted(patch, wall=HOUR):
        before = registry.make("ann", new)
        registry.forget("ann")
    registry.put("ann", before)
    assert registry.find("ann", "rules") is None
    registry.put("ann", registry.make("ann", new))
    assert registry.find("ann", "rules") is not None


def write_record(store: DiskStore) -> None:
    store.put_record("a/b", b"x", deadline=soon())


def write_block(store: DiskStore) -> None:
    write_record(store)
    store.put(make_frames(1, 1, 100), deadline=soon())


def die_in_a_record(store: DiskStore) -> None:
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    write_record(store)


@pytest.mark.parametrize("work", [write_record, write_block, die_in_a_record])
def test_killed_writers_leave_no_files(work: Callable[[DiskStore], None], tmp_path: Path) -> None:
    """Files that killed processes leave in a folder are removed when it is opened the next time: their liveness locks, and the
    records that they had begun. What a living process needs stays."""

    def child() -> None:
        work(DiskStore(tmp_path, 1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)

    with closing(DiskStore(tmp_path, 1 << 20)) as living:
        write_record(living)
        for _ in range(3):
            assert in_child(child) == -signal.SIGKILL
        with closing(DiskStore(tmp_path, 1 << 20)):
            # On a busy machine a thread opens the index, and removes them behind that.
            wait_until(
                lambda: os.listdir(tmp_path / "writers") == [living._writer.token()], "the removal of dead locks"
            )
            assert [one.name for one in (tmp_path / "records").rglob("*") if one.is_file()] == ["b~"]
        assert living.get_record("a/b", deadline=soon()) == b"x"
