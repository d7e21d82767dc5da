"""Erasure while something is broken: what can be reached is erased, the receipt says what is open, and nothing comes back."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from servers import RedisCluster, RedisServer, wait_until
from test_erasure import named

import foreword.store.base
from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
from foreword.conformance import FlakyStore, make_frames, present, put_all, soon
from foreword.prefixes.erasure import PlaceOutcome, Receipt, forget_prefix, forget_tenant
from foreword.prefixes.open_erasures import OpenErasures
from foreword.store.base import Name, Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.redis.redis_store import RedisStore
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store

ANN, BOB = Salt(b"ann"), Salt(b"bob")
COUNT = 40
RECORD = f"prefixes/model/{ANN.digest.hex()}/manual"


def of(salt: Salt, seed: int) -> list[Frame]:
    return make_frames(seed, COUNT, 500, root=Scope(b"model", 16, salt).root())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that does not answer is given up after a second."""
    monkeypatch.setattr(foreword.store.base, "STEP_SECONDS", 1.0)
    monkeypatch.setattr("foreword.prefixes.tier_erasure.STEP_SECONDS", 1.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def filled(stack: ExitStack, *stores: Store) -> tuple[TieredStore, list[Frame], list[Frame]]:
    """Blocks of ann and bob in every store, and a record of ann."""
    store = stack.enter_context(closing(TieredStore(stores)))
    mine, theirs = of(ANN, 1), of(BOB, 2)
    for one in stores:
        put_all(one, mine)
        put_all(one, theirs)
        one.put_record(RECORD, b"a text of ann", deadline=soon())
    return store, mine, theirs


def outcomes(receipt: Receipt) -> dict[str, PlaceOutcome]:
    return {one.name: one.outcome for one in receipt.places}


def _nothing_queued(roots: Sequence[bytes]) -> AbstractContextManager[int]:
    return nullcontext(0)


def test_one_server_is_stopped(stack: ExitStack, tmp_path: Path) -> None:
    """The disk loses blocks and records of the tenant although a Redis hangs; the receipt names Redis; a repetition once it
    answers is complete."""
    server = RedisServer(tmp_path)
    stack.callback(server.kill)
    redis, disk = RedisStore(server.url), DiskStore(tmp_path / "kv", 8 << 20)
    store, mine, theirs = filled(stack, disk, redis)
    with server.stopped():
        receipt = forget_tenant(store, ANN)
        assert outcomes(receipt) == {"disk": PlaceOutcome.ERASED, "redis": PlaceOutcome.UNREACHABLE}
        assert not receipt.complete and receipt.removed == {"disk": COUNT, "redis": 0}
        assert list(receipt.plain())[:3] == ["what", "complete", "unreachable"]
    assert not any(present(disk, mine)) and disk.get_record(RECORD, deadline=soon()) is None
    assert all(present(redis, mine)) and all(present(store, theirs))
    again = forget_tenant(store, ANN)
    assert again.complete and again.removed == {"disk": 0, "redis": COUNT} and again.records == [RECORD]
    assert not any(present(redis, mine)) and all(present(redis, theirs))


@pytest.mark.extended
def test_a_named_prefix_while_a_server_is_stopped(stack: ExitStack, tmp_path: Path) -> None:
    """A prefix whose record is on the disk is removed there; the receipt names the Redis that hangs."""
    server = RedisServer(tmp_path)
    stack.callback(server.kill)
    redis, disk = RedisStore(server.url), DiskStore(tmp_path / "kv", 8 << 20)
    store, mine, theirs = filled(stack, disk, redis)
    named(store, mine[-1], b"ann")
    with server.stopped():
        receipt = forget_prefix(store, "p")
        assert not receipt.complete and "redis" in receipt.unreachable and receipt.removed["disk"] == COUNT
    assert all(present(disk, theirs)) and not any(present(disk, mine))


@pytest.mark.extended
def test_one_node_of_a_cluster_is_stopped(stack: ExitStack, tmp_path: Path) -> None:
    """The other nodes of a cluster with a stopped one are erased, and the receipt counts them and names the node."""
    cluster = RedisCluster(tmp_path)
    stack.callback(cluster.kill)
    redis = RedisStore(cluster.url)
    store, mine, theirs = filled(stack, redis)
    there = cluster.names_on(1, "foreword")
    kept = [one for one in mine if one.name in there]
    with cluster.nodes[1].stopped():
        receipt = forget_tenant(store, ANN)
    assert 0 < len(kept) < COUNT
    assert receipt.removed == {"redis": COUNT - len(kept)} and not receipt.complete
    [place] = receipt.open
    assert place.place and place.outcome is PlaceOutcome.UNREACHABLE
    assert sum(present(redis, mine)) == len(kept)
    again = forget_tenant(store, ANN)
    assert again.complete and again.removed == {"redis": len(kept)} and all(present(redis, theirs))


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Listing this folder fails, also for root."""
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if os.path.abspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)


def test_a_folder_of_blocks_cannot_be_read(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the other folders are erased; the receipt is not complete, and names the folder."""
    disk = DiskStore(tmp_path, 8 << 20)
    store, mine, theirs = filled(stack, disk)
    [path] = tmp_path.rglob(mine[3].header.key.hex())
    hidden = {one.name for one in path.parent.iterdir()}
    kept = [one for one in mine if one.header.key.hex() in hidden]
    with monkeypatch.context() as denied:
        deny(denied, path.parent)
        receipt = forget_tenant(store, ANN)
        assert receipt.removed == {"disk": COUNT - len(kept)}
        [place] = receipt.open
        assert place.outcome is PlaceOutcome.UNREADABLE and path.parent.name in place.reason
    assert sum(present(disk, mine)) == len(kept)
    assert forget_tenant(store, ANN).complete and not any(present(disk, mine)) and all(present(disk, theirs))


def test_a_folder_of_records_cannot_be_read(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and the other records are erased; a text that may be left is never called erased."""
    disk = DiskStore(tmp_path, 8 << 20)
    store, mine, _ = filled(stack, disk)
    other = RECORD.replace("model", "another")
    disk.put_record(other, b"another text of ann", deadline=soon())
    with monkeypatch.context() as denied:
        deny(denied, tmp_path / "records" / "prefixes=" / "model=")
        receipt = forget_tenant(store, ANN)
        assert not receipt.complete and outcomes(receipt) == {"disk": PlaceOutcome.UNREADABLE}
        assert "a folder of records cannot be read" in receipt.open[0].reason
        assert receipt.records == [other] and not any(present(disk, mine))
    assert disk.get_record(RECORD, deadline=soon()) is not None
    again = forget_tenant(store, ANN)
    assert again.complete and again.records == [RECORD]


def test_a_store_that_is_only_read(stack: ExitStack, tmp_path: Path) -> None:
    """A store that may only be read is named as that, and is not tried again; the other tiers are erased."""
    disk, memory = DiskStore(tmp_path, 8 << 20), MemoryStore(8 << 20)
    mine = of(ANN, 1)
    put_all(disk, mine)
    disk.close()
    store = stack.enter_context(closing(TieredStore([memory, DiskStore(tmp_path, 8 << 20, read_only=True)])))
    put_all(memory, mine)
    erasures = OpenErasures(store, _nothing_queued)
    stack.callback(erasures.close)
    name, receipt = erasures.erase([ANN])
    assert outcomes(receipt) == {"memory": PlaceOutcome.ERASED, "disk": PlaceOutcome.READ_ONLY} and not receipt.complete
    found = erasures.get(name)
    assert found is not None and not found.tiers
    assert not any(present(memory, mine)) and all(present(store.tiers[1].store, mine))


def test_a_store_that_hangs(stack: ExitStack, tmp_path: Path) -> None:
    """A store that never returns costs a few seconds, and no other tier its erasure."""
    stuck, disk = FlakyStore(MemoryStore(8 << 20, label="stuck")), DiskStore(tmp_path, 8 << 20)
    store, mine, theirs = filled(stack, stuck, disk)
    stuck.stick()
    stack.callback(stuck.release)
    receipt = forget_tenant(store, ANN)
    assert outcomes(receipt) == {"stuck": PlaceOutcome.UNREACHABLE, "disk": PlaceOutcome.ERASED}
    assert not any(present(disk, mine)) and all(present(disk, theirs))


def test_a_file_system_that_takes_no_changes_for_a_while(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that cannot be deleted because a file system is read-only are deleted once they can be: that may change, unlike
    how a process has opened a store."""
    disk = DiskStore(tmp_path, 8 << 20)
    store, mine, theirs = filled(stack, disk)
    erasures = OpenErasures(store, _nothing_queued, pause=0.01)
    stack.callback(erasures.close)

    def refuse(path: Any, **_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with monkeypatch.context() as refusing:
        refusing.setattr("os.unlink", refuse)
        name, receipt = erasures.erase([ANN])
        assert outcomes(receipt) == {"disk": PlaceOutcome.UNREACHABLE} and not receipt.complete
    wait_until(lambda: not (found := erasures.get(name)) or not found.tiers, "the erasure")
    found = erasures.get(name)
    assert found is not None and found.receipt.complete
    assert not any(present(disk, mine)) and all(present(disk, theirs))


def test_a_record_although_the_thread_is_busy(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of an erasure that is open comes behind its record, also while the thread repeats another one."""
    store, mine, _ = filled(stack, DiskStore(tmp_path, 8 << 20))
    busy, gate = threading.Event(), threading.Event()

    def erasing(roots: Sequence[bytes]) -> AbstractContextManager[int]:
        if threading.current_thread() is not threading.main_thread():
            busy.set()
            gate.wait(60)
        return nullcontext(0)

    erasures = OpenErasures(store, erasing, pause=0.01)
    stack.callback(erasures.close)
    stack.callback(gate.set)

    def refuse(path: Any, **_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with monkeypatch.context() as refusing:
        refusing.setattr("os.unlink", refuse)
        erasures.erase([ANN])
        assert busy.wait(60)
        name, receipt = erasures.erase([ANN])
        assert not receipt.complete and _recorded(tmp_path, name) and not gate.is_set()
    gate.set()
    wait_until(lambda: not any(present(store.tiers[0].store, mine)), "the erasures")


def _recorded(folder: Path, erasure: str) -> bool:
    """Whether a store has the record of an open erasure. (A walk does not mind folders that go away.)"""
    return any(f"{erasure}~" in files for _, _, files in os.walk(folder / "records"))


@pytest.mark.parametrize("order", [("mine", "shared"), ("shared", "mine")])
def test_another_instance_leaves_what_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Sequence[str]
) -> None:
    """Two servers share a folder, and each has another one with the same label. The first one's erasure is open in its own
    folder when it ends. The other server, which finds the record, does not call it complete; the first one's next start, also
    with its tiers in another order, completes it."""
    other = [f"disk://{tmp_path}/other?size=8MiB", f"disk://{tmp_path}/shared?size=8MiB&label=shared"]
    with closing(open_store([f"disk://{tmp_path}/{one}?size=8MiB" for one in ("mine", "shared")])) as store:
        mine = of(ANN, 1)
        for tier in store.tiers:
            put_all(tier.store, mine)
        erasures = OpenErasures(store, _nothing_queued, pause=60)
        [path] = (tmp_path / "mine").rglob(mine[3].header.key.hex())
        with monkeypatch.context() as denied:
            deny(denied, path.parent)
            name, receipt = erasures.erase([ANN])
        assert receipt.complete is False
        erasures.close()

    def records() -> bool:
        return _recorded(tmp_path / "shared", name)

    with closing(open_store(other)) as store:
        OpenErasures(store, _nothing_queued, pause=0.01).close()
        assert records()
    with closing(open_store([f"disk://{tmp_path}/{one}?size=8MiB" for one in order])) as store:
        erasures = OpenErasures(store, _nothing_queued, pause=0.01)
        wait_until(lambda: not records(), "the erasure")
        erasures.close()
        for tier in store.tiers:
            assert not any(present(tier.store, mine))


def test_an_answer_follows_the_record(stack: ExitStack, tmp_path: Path) -> None:
    """A process may end right after the answer that an erasure is open. Its record is in a store by then, although the thread
    that writes records still reads those of before."""
    memory, disk = FlakyStore(MemoryStore(8 << 20)), DiskStore(tmp_path, 8 << 20)
    store, _, _ = filled(stack, memory, disk)
    reached, opened = threading.Event(), threading.Event()
    listed = disk.records

    def wait(*given: Any, **more: Any) -> Any:
        reached.set()
        assert opened.wait(60)
        return listed(*given, **more)

    disk.records = wait  # type: ignore[method-assign]
    erasures = OpenErasures(store, _nothing_queued, pause=60)
    stack.callback(erasures.close)
    stack.callback(opened.set)
    assert reached.wait(60)
    disk.records = listed  # type: ignore[method-assign]
    memory.inject("fail", 1.0)
    name, receipt = erasures.erase([ANN])
    assert not receipt.complete
    assert _recorded(tmp_path, name)


def test_a_process_that_ends_in_an_erasure(tmp_path: Path) -> None:
    """The next one continues it, although the first has given no receipt. One that began to continue it, too, leaves what the
    tenant has stored since it was completed."""
    url, records, mine = f"disk://{tmp_path}/kv?size=8MiB", tmp_path / "kv" / "records" / "erasures=", of(ANN, 1)
    with closing(open_store([url])) as store:
        put_all(store.tiers[0].store, mine)

        def end(roots: Sequence[bytes]) -> AbstractContextManager[int]:
            wait_until(lambda: bool(list(records.glob("*~"))), "the record")
            raise SystemExit

        first = OpenErasures(store, end, pause=60)
        with pytest.raises(SystemExit):
            first.erase([ANN])
        first.close()
        assert all(present(store, mine))
    [name] = (one.name[:-1] for one in records.glob("*~"))
    with closing(open_store([url])) as store, closing(open_store([url])) as beside:
        late, erasures = (
            OpenErasures(one, _nothing_queued, pause=pause) for one, pause in ((beside, 2), (store, 0.01))
        )
        wait_until(lambda: not any(present(store, mine)), "the erasure")
        erasures.close()
        put_all(store.tiers[0].store, mine)
        wait_until(lambda: (found := late.get(name)) is not None and not found.tiers, "its look at the record")
        late.close()
        assert all(present(store, mine))


def test_an_erasure_that_is_open_in_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that has one of them erases it, says that another one is left, and keeps the record for who has it."""
    folders = ("mine", "shared")
    with closing(open_store([f"disk://{tmp_path}/{one}?size=8MiB" for one in folders])) as store:
        mine = of(ANN, 1)
        for tier in store.tiers:
            put_all(tier.store, mine)
        erasures = OpenErasures(store, _nothing_queued, pause=60)
        with monkeypatch.context() as denied:
            for folder in folders:
                [path] = (tmp_path / folder).rglob(mine[3].header.key.hex())
                deny(denied, path.parent)
            name, _ = erasures.erase([ANN])
        erasures.close()
    with closing(open_store([f"disk://{tmp_path}/shared?size=8MiB"])) as store:
        erasures = OpenErasures(store, _nothing_queued, pause=0.01)
        wait_until(lambda: (found := erasures.get(name)) is not None and not found.tiers, "its part")
        erasures.close()
        found = erasures.get(name)
        assert found is not None and not found.receipt.complete
        assert not any(present(store.tiers[0].store, mine))
    with closing(open_store([f"disk://{tmp_path}/{one}?size=8MiB" for one in folders])) as store:
        erasures = OpenErasures(store, _nothing_queued, pause=0.01)
        wait_until(lambda: not _recorded(tmp_path / "shared", name), "the rest")
        erasures.close()
        assert not any(present(store.tiers[0].store, mine))


class Slow(FlakyStore):
    """A store whose batches come in time, and together take longer than one step may."""

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        threading.Event().wait(0.3)
        return super().delete(names, deadline=deadline)

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        for names in super().list_names(layout, root, deadline=deadline):
            yield from ([name] for name in names[:9])
            yield names[9:]


def test_a_slow_store_is_waited_for_while_it_goes_on(stack: ExitStack) -> None:
    """An erasure may take longer than any step of it."""
    slow = Slow(MemoryStore(8 << 20))
    store, mine, _ = filled(stack, slow)
    receipt = forget_tenant(store, ANN)
    assert receipt.complete and receipt.removed == {"memory": COUNT} and not any(present(slow, mine))


class BusyDevice(FlakyStore):
    """A store whose device writes what was deleted when it is told so."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.begun = self.ended = 0
        self.go_on = threading.Event()

    def sync_deletions(
        self, prefixes: Sequence[tuple[bytes, bytes]], *, records: bool = False, deadline: float
    ) -> Iterator[None]:
        self.begun += 1
        assert self.go_on.wait(60)
        self.ended += 1
        yield from super().sync_deletions(prefixes, records=records, deadline=deadline)


def test_a_device_that_is_busy_for_long(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure whose deletions are not on the device after a minute is open, and says why and what to do. It is repeated, and
    then waits as long as the device needs: it is complete when the device has them, and not before."""
    monkeypatch.setattr("foreword.prefixes.tier_erasure.STEP_SECONDS", 0.05)
    monkeypatch.setattr("foreword.prefixes.open_erasures.SYNC_WITHIN", 0.1)
    busy = BusyDevice(MemoryStore(1 << 20))
    store, _, theirs = filled(stack, busy)
    erasures = OpenErasures(store, _nothing_queued, pause=0.01)
    stack.callback(erasures.close)
    name, receipt = erasures.erase([ANN])
    assert not receipt.complete and [one.outcome for one in receipt.open] == [PlaceOutcome.UNREACHABLE]
    assert (
        "has not written what was deleted within" in receipt.open[0].reason and "repeats it" in receipt.open[0].reason
    )
    wait_until(lambda: busy.begun == 2, "the repetition")
    time.sleep(0.5)  # more than the first one has waited
    known = erasures.get(name)
    assert known is not None and not known.receipt.complete and busy.begun == 2
    busy.go_on.set()
    wait_until(lambda: known.receipt.complete, "the end")
    assert busy.ended >= 1 and present(store, theirs)


@pytest.mark.parametrize("seed", represented(range(2), 0))
def test_no_receipt_is_false(stack: ExitStack, tmp_path: Path, seed: int) -> None:
    """Erasures under calls that fail at random: after a complete one nothing of the tenant is in any tier, and nothing of the
    other tenant is ever gone."""
    draw = random.Random(seed)
    complete = 0
    for number in range(16):
        flaky = [
            FlakyStore(MemoryStore(8 << 20, label="memory"), seed=draw.randrange(1 << 30)),
            FlakyStore(DiskStore(tmp_path / str(number), 8 << 20), seed=draw.randrange(1 << 30)),
        ]
        with ExitStack() as each:
            store, mine, theirs = filled(each, *flaky)
            for one in flaky:
                one.inject("fail", draw.choice([0.0, 0.0, 0.1, 0.3]))
            receipt = forget_tenant(store, ANN)
            for one in flaky:
                one.inject("fail", 0.0)
            for one in flaky:
                assert all(present(one, theirs))
                gone = not any(present(one, mine)) and one.get_record(RECORD, deadline=soon()) is None
                assert gone or not receipt.complete
            complete += receipt.complete
            assert receipt.complete == (not receipt.unreachable)
    assert 0 < complete < 16
