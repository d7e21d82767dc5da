"""Faults of a disk store: killed processes, a full disk, a read-only folder, altered files, a lost index."""

from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from example_counts import represented
from processes import die_in_c, die_in_python, in_child, kill, pause, resume, start, wait, write_in_python

from foreword.conformance import (
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
from foreword.errors import BadFrame, StoreError, StoreFull, StoreReadOnly, StoreUnavailable, StoreUnreadable
from foreword.store.base import BAD
from foreword.store.disk import opener, recovery, writer
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.files import BlockFile, BlockFiles, DiskFull, read_block_header
from foreword.store.frame import HEADER_BYTES, Frame, Header, check
from foreword.store.tier_counters import TierState
from foreword.store.tiered import TieredStore

PAYLOAD = 20_000
BUDGET = 10 * (HEADER_BYTES + PAYLOAD)
NO_TENANT = 65534
Journal = Literal["wal", "delete"]
CALLS_OF_WRITES = 40_000  # of Python and C: opening a folder takes about 1,000, a put of some blocks a few thousand


def on_disk(folder: Path) -> dict[str, int]:
    """Block files, complete or not, and their lengths. Only while no process writes."""
    return {str(path): path.stat().st_size for path in folder.glob("?" * 32 + "/" + "?" * 32 + "/??/*")}


def file_of(folder: Path, one: Frame) -> Path:
    key = one.header.key.hex()
    return folder / one.header.layout.hex() / one.header.root.hex() / key[:2] / key


def branches(count: int, payload: int = PAYLOAD) -> list[list[Frame]]:
    """Chains of six blocks. All but the last begin with the same two blocks."""
    trunk = make_frames(500, 2, payload)
    return [[*trunk, *make_frames(501 + number, 4, payload, after=trunk[-1])] for number in range(count)] + [
        make_frames(600, 6, payload)
    ]


def die_at_call(number: int) -> None:
    """Make this process kill itself at the `number`th call or return, of Python or C, in any thread that it starts or in
    this one. So a busy machine does not change where it dies."""
    calls = itertools.count(1)

    def count(_frame: object, _event: str, _argument: object) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


_NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
_IN_C = ("open", "write", "close", "mkdir")
_IN_PYTHON = ("rename", "open", "write", "unlink", "stat")


def write_forever(
    folder: Path, chains: Sequence[Sequence[Frame]], seed: int, journal: Journal = "wal", dies_at: int = 0
) -> None:
    """Write, read and delete blocks until the process is killed, or kills itself at its call number `dies_at`."""
    draw = random.Random(seed)
    if dies_at:
        die_at_call(dies_at)
    store = DiskStore(folder, BUDGET, journal=journal)
    while True:
        chain = draw.choice(chains)
        put_all(store, chain[: draw.randint(1, len(chain))])
        if draw.random() < 0.3:
            read(store, draw.choice(chains))
        if draw.random() < 0.05:
            store.delete([draw.choice(chain).name], deadline=soon())


def intact(store: DiskStore, chains: Sequence[Sequence[Frame]]) -> set[bytes]:
    """Read all blocks, and return the names of those that are there. Their bytes are right."""
    found = set()
    for chain in chains:
        for one, data in zip(chain, read(store, chain), strict=True):
            if data is not None:
                assert check(memoryview(bytearray(data)), one.name).data == one.data
                found.add(one.name)
    return found


def set_boot(monkeypatch: pytest.MonkeyPatch, boot: str, host: str = "this host") -> None:
    monkeypatch.setattr(recovery, "boot_id", lambda: boot)
    monkeypatch.setattr(socket, "gethostname", lambda: host)


def settle(store: DiskStore) -> None:
    """Wait until the index lists all blocks."""
    limit = time.monotonic() + 60
    while store.status().notes["scanning"]:
        assert time.monotonic() < limit, "the index is not complete after a minute"
        time.sleep(0.01)


def assert_sound(store: DiskStore, folder: Path, chains: Sequence[Sequence[Frame]], size: int = BUDGET) -> int:
    """No incomplete file is left, the budget is kept, the index counts every byte, and every block is intact. Returns
    the number of blocks."""
    settle(store)
    files = on_disk(folder)
    assert sum(files.values()) <= store.status().bytes <= size
    assert not [path for path in files if "." in Path(path).name], "no incomplete file is left"
    limit = soon()
    while True:  # a read removes the rows of missing files, but not if that takes long on a busy machine
        found = intact(store, chains)
        scanned = {entry.name for entry in store.scan(deadline=soon())}
        if scanned == found:
            break
        assert soon(0.0) < limit, "the index lists blocks that cannot be read"
    assert len(files) == len(found) and sum(files.values()) == store.status().bytes
    return len(found)


# Killed processes


@pytest.mark.parametrize(
    ("journal", "kills"),
    [("wal", 15), pytest.param("wal", 200, marks=pytest.mark.slow), pytest.param("delete", 40, marks=pytest.mark.slow)],
)
@pytest.mark.extended
def test_killed_at_any_moment(tmp_path: Path, journal: Journal, kills: int) -> None:
    """A writing process is killed many times. Each time the folder opens, blocks are intact, and the budget is kept."""
    chains = branches(4)
    draw = random.Random(1)
    recovered = blocks = 0
    for number in range(kills):
        last = round(draw.uniform(1, CALLS_OF_WRITES**0.5) ** 2)
        child = start(lambda number=number, last=last: write_forever(tmp_path, chains, number, journal, last))
        assert wait(child) == -signal.SIGKILL
        assert sum(on_disk(tmp_path).values()) <= BUDGET
        with closing(DiskStore(tmp_path, BUDGET, journal=journal)) as store:
            recovered += store.status().notes["recovered"]
            blocks += assert_sound(store, tmp_path, chains)
    assert recovered and blocks > kills, "processes were killed before, while and after they wrote"


@pytest.mark.slow
def test_killed_beside_another_process(tmp_path: Path) -> None:
    """An open store recovers the writes of a killed process when it needs their room or their blocks."""
    chains = branches(4)
    draw = random.Random(2)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        for number in range(60):
            last = round(draw.uniform(1, CALLS_OF_WRITES**0.5) ** 2)
            child = start(lambda number=number, last=last: write_forever(tmp_path, chains, number, dies_at=last))
            assert wait(child) == -signal.SIGKILL
            assert sum(on_disk(tmp_path).values()) <= BUDGET
            # Blocks that the killed process was writing, if there are any: only who needs them or their room recovers them.
            with closing(sqlite3.connect(tmp_path / "index.sqlite")) as index:
                unfinished = {name for (name,) in index.execute("SELECT name FROM writing")}
            chain = next((one for one in chains if unfinished.intersection(names_of(one))), draw.choice(chains))
            assert store.put(chain, deadline=soon()) == len(chain)
            assert read(store, chain) == whole(chain)
        assert store.status().notes["recovered"] > 1
        assert store.put(make_frames(700, 10, PAYLOAD), deadline=soon()) == 10
        assert_sound(store, tmp_path, [*chains, make_frames(700, 10, PAYLOAD)])


@pytest.mark.parametrize(
    ("call", "die_at"),
    [
        pytest.param("rename", die_in_c, marks=_NEEDS_COMPILER, id="rename-in-c"),
        *(pytest.param(call, die_in_c, marks=[pytest.mark.slow, _NEEDS_COMPILER], id=f"{call}-in-c") for call in _IN_C),
        *(pytest.param(call, die_in_python, marks=pytest.mark.slow, id=call) for call in _IN_PYTHON),
    ],
)
def test_killed_before_and_after_each_step(tmp_path: Path, call: str, die_at: Callable[[str, int, bool], None]) -> None:
    """A put that evicts is killed before and after each system call in turn, of compiled code or of Python. Each time it is
    either rolled back or complete."""
    old, new = make_frames(1, 10, PAYLOAD), make_frames(2, 4, PAYLOAD)
    steps = 0
    for number, after in itertools.product(range(40), (False, True)):
        folder = tmp_path / f"{number}{after}"
        with closing(DiskStore(folder, BUDGET)) as store:
            store.put(old, deadline=soon())

        def child(folder: Path = folder, number: int = number, after: bool = after) -> None:
            store = DiskStore(folder, BUDGET)
            die_at(call, number, after)
            assert store.put(new, deadline=soon()) == 4

        code = in_child(child)
        assert sum(on_disk(folder).values()) <= BUDGET
        with closing(DiskStore(folder, BUDGET)) as store:
            assert_sound(store, folder, [old, new])
            assert store.put(new, deadline=soon()) == 4
            assert read(store, new) == whole(new)
            assert_sound(store, folder, [old, new])
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        steps += 1
    assert code == 0 and steps >= 4, "every step of the put was tested"


@pytest.mark.slow
def test_two_processes_and_one_budget(tmp_path: Path) -> None:
    """Two processes write to one small budget. Stopped at random moments, the folder never exceeds it."""
    chains = branches(6)
    draw = random.Random(3)
    children = [start(lambda seed=seed: write_forever(tmp_path, chains, seed)) for seed in range(2)]
    full = rounds = 0
    try:
        while rounds < 80 or not full:
            rounds += 1
            assert rounds < 3000, "the processes never came near the budget"
            time.sleep(draw.uniform(0.001, 0.02))
            assert all(pause(child) for child in children), "a writer has failed"
            size = sum(on_disk(tmp_path).values())
            assert size <= BUDGET
            full += size > BUDGET * 0.7
            for child in children:
                resume(child)
    finally:
        assert [kill(child) for child in children] == [-signal.SIGKILL] * 2
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        assert assert_sound(store, tmp_path, chains) > 0


def test_two_processes_write_the_same_blocks(tmp_path: Path) -> None:
    """Two processes that put the same chains concurrently store every block once and intact."""
    chains = [make_frames(seed, 8, PAYLOAD) for seed in range(10, 20)]
    size = 100 * (HEADER_BYTES + PAYLOAD)

    def child() -> None:
        with closing(DiskStore(tmp_path, size)) as store:
            for chain in chains:
                assert store.put(chain, deadline=soon()) <= 8

    children = [start(child), start(child)]
    assert [wait(child) for child in children] == [0, 0]
    with closing(DiskStore(tmp_path, size)) as store:
        assert assert_sound(store, tmp_path, chains, size) == 80


def test_a_block_that_a_dead_process_was_writing(tmp_path: Path) -> None:
    """A block that is being written is invisible. When its writer is dead, another process writes it."""
    [one] = make_frames(20, 1, PAYLOAD)

    def child() -> None:
        store = DiskStore(tmp_path, BUDGET)
        write_in_python()
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
        store.put([one], deadline=soon())

    writer = start(child)
    os.waitpid(writer, os.WUNTRACED)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        assert store.lookup([one.name], deadline=soon()) == 0
        assert read(store, [one]) == [None] and list(store.scan(deadline=soon())) == []
        assert store.delete([one.name], deadline=soon()) == store.pin([one.name], deadline=soon()) == 0
        assert store.put([one], deadline=soon()) == 0, "the other process is writing it"
        assert store.status().bytes == len(one.data)
        kill(writer)
        assert store.put([one], deadline=soon()) == 1
        assert read(store, [one]) == whole([one])
        assert_sound(store, tmp_path, [[one]])


# Full disk, missing permissions


@contextmanager
def small_disk(options: str) -> Iterator[Path]:
    """A small file system with these mount options. Skips the test if it cannot be mounted."""
    folder = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "foreword-test", str(folder)]
    try:
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no small file system can be mounted here")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    finally:
        folder.rmdir()


def fill(store: DiskStore, frames: Sequence[Frame]) -> int:
    """Put frames one by one until the store is full. Returns the number of frames stored."""
    for number, one in enumerate(frames):
        try:
            store.put([one], deadline=soon())
        except StoreFull:
            return number
    raise AssertionError("the disk was never full")


def test_a_full_disk() -> None:
    """On a full disk a put raises StoreFull and leaves nothing behind. Other blocks stay intact, and a delete makes
    room."""
    frames = make_frames(21, 60, 100_000)
    with small_disk("size=2m") as folder, closing(DiskStore(folder / "store", 1 << 30)) as store:
        count = fill(store, frames)
        assert 5 < count < 21
        assert_sound(store, folder / "store", [frames], 1 << 30)
        assert store.lookup(names_of(frames), deadline=soon()) == count
        with pytest.raises(StoreFull):
            store.put(frames[count : count + 3], deadline=soon())
        assert_sound(store, folder / "store", [frames], 1 << 30)
        assert store.delete(names_of(frames[:4]), deadline=soon()) == 4
        assert store.put(frames[count : count + 3], deadline=soon()) == 3
        assert read(store, frames[4 : count + 3]) == whole(frames[4 : count + 3])


def test_a_disk_that_becomes_full_in_a_large_batch() -> None:
    """A full disk keeps what it has room for of a batch that two threads write, and the index knows exactly that."""
    frames = make_frames(25, 12, 1 << 20)
    with small_disk("size=8m") as folder, closing(DiskStore(folder / "store", 1 << 30)) as store:
        kept = store.put(frames, deadline=soon())
        present = store.present(names_of(frames), deadline=soon())
        assert 4 <= kept == sum(present) < 8
        assert read(store, frames) == [
            data if there else None for data, there in zip(whole(frames), present, strict=True)
        ]
        assert_sound(store, folder / "store", [frames], 1 << 30)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """A write refused because of a file size limit counts as a full disk and leaves nothing behind."""
    small, large = make_frames(22, 2, 1000), make_frames(23, 3, 1 << 20)

    def child() -> None:
        store = DiskStore(tmp_path, 1 << 30)
        store.put(small, deadline=soon())
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, 512 << 10))
        for _ in range(3):
            with pytest.raises(StoreFull):
                store.put(large, deadline=soon())
        assert store.put([*small, *make_frames(24, 2, 1000)], deadline=soon()) == 4
        assert_sound(store, tmp_path, [small, large, make_frames(24, 2, 1000)], 1 << 30)
        store.close()

    assert in_child(child) == 0


def test_a_write_that_never_finds_room_evicts_for_its_repetitions_only(tmp_path: Path) -> None:
    """A block that a full disk never takes is written four times. Blocks of one, two and four times its size make way for the
    three repetitions, and none after the last."""
    older, large = make_frames(26, 200, 1 << 16), make_frames(27, 1, 1 << 20)
    full = mock.patch.object(BlockFiles, "write", side_effect=DiskFull("the disk is full"))
    with closing(DiskStore(tmp_path, 1 << 30)) as store:
        assert store.put(older, deadline=soon()) == 200
        with mock.patch.object(BlockFiles, "write_many", return_value=0), full as write, pytest.raises(StoreFull):
            store.put(large, deadline=soon())
        assert write.call_count == 4
        assert 110 < store.present(names_of(older), deadline=soon()).count(False) < 130


@pytest.mark.parametrize("index", ["there", "gone"])
def test_a_folder_that_cannot_be_written(index: str) -> None:
    """A folder without write permission serves reads, with or without its index, and refuses writes."""
    chain = make_frames(25, 5, 1000)
    folder = Path(tempfile.mkdtemp())
    try:
        with closing(DiskStore(folder, 1 << 20)) as store:
            store.put(chain[:4], deadline=soon())
            store.put_record("a/b", b"data", deadline=soon())
        if index == "gone":
            (folder / "index.sqlite").unlink()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o500 if path.is_dir() else 0o400)
            if os.getuid() == 0:
                os.chown(path, NO_TENANT, NO_TENANT)
        assert in_child(lambda: _read_only(folder, chain)) == 0
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o700)
        shutil.rmtree(folder)


def _drop_rights() -> None:
    """Become a user who may not write everywhere. Such a user may not be able to read Python's own files either, so that what a
    store imports when it is used is imported before."""
    if os.getuid() != 0:
        return
    with tempfile.TemporaryDirectory() as folder, closing(DiskStore(Path(folder) / "kv", 1 << 20)) as store:
        put_all(store, make_frames(1, 2, 100))
        store.put_record("a/b", b"data", deadline=soon())
    os.setgid(NO_TENANT)
    os.setuid(NO_TENANT)


def _read_only(folder: Path, chain: Sequence[Frame]) -> None:
    _drop_rights()
    store = DiskStore(folder, 1 << 20)
    assert store.read_only
    assert store.lookup(names_of(chain), deadline=soon()) == 4
    assert read(store, chain) == [*whole(chain[:4]), None]
    assert sorted(entry.name for entry in store.scan(deadline=soon())) == sorted(names_of(chain[:4]))
    assert store.get_record("a/b", deadline=soon()) == b"data"
    assert store.records("", deadline=soon()) == ["a/b"]
    for call in _writes(store, chain):
        with pytest.raises(StoreReadOnly):
            call()
    assert store.lookup(names_of(chain), deadline=soon()) == 4
    store.close()


def test_a_folder_that_is_read_only_for_a_while() -> None:
    """A folder that may not be written any more makes its tier read-only, not off: blocks are read, and the log says when it
    began and when it ended."""
    folder = Path(tempfile.mkdtemp())
    try:
        if os.getuid() == 0:
            os.chown(folder, NO_TENANT, NO_TENANT)
        assert in_child(lambda: _read_only_for_a_while(folder / "store")) == 0
    finally:
        shutil.rmtree(folder)


def _read_only_for_a_while(folder: Path) -> None:
    _drop_rights()
    chains, lines = [make_frames(seed, 3, 1000) for seed in range(30, 33)], _logged_lines()
    with closing(TieredStore([DiskStore(folder, 1 << 20)])) as store:
        [tier] = store.tiers
        assert store.put(chains[0], deadline=soon()) == 3 and tier.state is TierState.OK
        places = [path for path in folder.rglob("*") if path.is_dir() and len(path.name) in (2, 32)]
        for path in [folder, *places]:
            path.chmod(0o500)
        for _ in range(4):
            assert store.put(chains[1], deadline=soon()) == 0 and tier.state is TierState.READ_ONLY
        assert read(store, chains[0]) == whole(chains[0]) and not tier.breaker.is_open
        for path in [folder, *places]:
            path.chmod(0o700)
        assert store.put(chains[2], deadline=soon()) == 3 and tier.state is TierState.OK
    assert [line.partition(":")[0] for line in lines if line.startswith("tier")] == [
        "tier disk takes no blocks now",
        "tier disk takes blocks again",
    ]


def _logged_lines() -> list[str]:
    """Lines that the stores log from now on."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("foreword.store")
    logger.addHandler(Keep())
    logger.setLevel("INFO")
    return lines


def _writes(store: DiskStore, chain: Sequence[Frame]) -> list[Callable[[], object]]:
    return [
        lambda: store.put(chain, deadline=soon()),
        lambda: store.delete(names_of(chain), deadline=soon()),
        lambda: store.pin(names_of(chain), deadline=soon()),
        lambda: store.put_record("a", b"", deadline=soon()),
        lambda: store.delete_record("a/b", deadline=soon()),
    ]


def test_read_only_beside_a_writer(tmp_path: Path) -> None:
    """A read-only store writes nothing and sees the blocks that another process puts."""
    chain = make_frames(26, 4, 1000)
    with closing(DiskStore(tmp_path, 1 << 20)) as writer:
        writer.put(chain[:2], deadline=soon())
        with closing(DiskStore(tmp_path, 1 << 20, read_only=True)) as store:
            assert store.lookup(names_of(chain), deadline=soon()) == 2
            writer.put(chain[2:], deadline=soon())
            assert store.lookup(names_of(chain), deadline=soon()) == 4
            assert read(store, chain) == whole(chain)
            for call in _writes(store, chain):
                with pytest.raises(StoreReadOnly):
                    call()
        assert [entry.hits for entry in writer.scan(deadline=soon())] == [0] * 4


# Altered files


def get_one(store: DiskStore, one: Frame, room: int = 100) -> memoryview:
    """The bytes that the store returns for a name, unverified."""
    buffer = memoryview(bytearray(len(one.data) + room))
    [length] = store.get([one.name], [buffer], deadline=soon())
    return buffer[: max(length, 0)]


@pytest.mark.parametrize("what", ["bit", "truncated", "longer", "empty", "swapped", "zeros"])
def test_an_altered_file(tmp_path: Path, what: str) -> None:
    """An altered file is returned as it is and fails verification. After delete and put the block is correct."""
    one, other = make_frames(27, 2, PAYLOAD)
    draw = random.Random(4)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        for _ in range(10):
            store.put([one, other], deadline=soon())
            data = bytearray(one.data)
            position = draw.randrange(len(data))
            if what == "bit":
                data[position] ^= 1 << draw.randrange(8)
            altered = {
                "bit": data,
                "truncated": data[:position],
                "longer": data + bytes(1 + position % 90),
                "empty": b"",
                "swapped": bytes(other.data),
                "zeros": bytes(len(data)),
            }[what]
            file_of(tmp_path, one).write_bytes(altered)
            assert get_one(store, one) == altered
            with pytest.raises(BadFrame):
                check(get_one(store, one), one.name)
            assert read(store, [other]) == whole([other])
            store.delete([one.name], deadline=soon())
            assert store.put([one], deadline=soon()) == 1
            assert read(store, [one]) == whole([one])
        assert_sound(store, tmp_path, [[one, other]])


def test_a_file_of_wrong_length_is_written_again(tmp_path: Path) -> None:
    """A put writes a block again if its file is missing or has another length."""
    frames = make_frames(28, 3, PAYLOAD)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        store.put(frames, deadline=soon())
        os.truncate(file_of(tmp_path, frames[0]), 500)
        file_of(tmp_path, frames[1]).unlink()
        assert store.put(frames, deadline=soon()) == 3
        assert read(store, frames) == whole(frames)
        assert store.status().notes["missing"] == 2
        assert_sound(store, tmp_path, [frames])


def test_a_missing_file(tmp_path: Path) -> None:
    """A block whose file was removed is a miss, and lookup knows from then on."""
    frames = make_frames(29, 4, PAYLOAD)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        store.put(frames, deadline=soon())
        file_of(tmp_path, frames[2]).unlink()
        assert read(store, frames) == [*whole(frames[:2]), None, *whole(frames[3:])]
        assert store.lookup(names_of(frames), deadline=soon()) == 2
        assert_sound(store, tmp_path, [frames])


def test_other_kinds_of_files(tmp_path: Path) -> None:
    """A pipe, a folder, a symbolic link or a huge file in place of a block is a miss and does not block the call."""
    frames = make_frames(30, 4, 1000)
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        store.put(frames, deadline=soon())
        paths = [file_of(tmp_path, one) for one in frames]
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        for path in paths:
            path.unlink()
        os.mkfifo(paths[0])
        paths[1].mkdir()
        paths[2].symlink_to(secret)
        with paths[3].open("wb") as file:
            file.truncate(1 << 40)
        assert read(store, frames) == [None] * 4
        assert get_one(store, frames[2], 10_000) == b""


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: (path / "inside").mkdir(parents=True),
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "loop": lambda path: path.symlink_to(path),
    "socket": lambda path: _socket(path),
    "empty": Path.touch,
    "no permission": lambda path: path.touch(0),
}


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        home = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(home)


@pytest.mark.parametrize("what", OBSTACLES)
def test_a_bad_file_costs_only_its_block(tmp_path: Path, what: str) -> None:
    """Whatever lies in the place of a block, other blocks are read in the same call. A put or a delete replaces it."""
    frames = make_frames(40, 8, 1000)
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        for heal in (
            lambda: store.put(frames, deadline=soon()),
            lambda: store.delete(names_of(frames), deadline=soon()),
        ):
            store.put(frames, deadline=soon())
            path = file_of(tmp_path, frames[3])
            path.unlink()
            OBSTACLES[what](path)
            buffers = [memoryview(bytearray(len(one.data))) for one in frames]
            lengths = store.get(names_of(frames), buffers, deadline=soon())
            assert lengths.pop(3) == BAD
            assert lengths == [len(one.data) for one in frames if one is not frames[3]]
            assert heal() == 8
            store.put(frames, deadline=soon())
            assert read(store, frames) == whole(frames)
        assert_sound(store, tmp_path, [frames], 1 << 20)


# The index


def put_some(folder: Path) -> list[Frame]:
    """Create a store with 40 blocks and close it."""
    frames = make_frames(31, 40, 1000)
    with closing(DiskStore(folder, 1 << 20)) as store:
        store.put(frames, deadline=soon())
    return frames


def _overwrite(index: Path, first: float, last: float) -> None:
    size = index.stat().st_size
    start, stop = int(size * first), int(size * last)
    with index.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(5).randbytes(stop - start))


def _overwrite_at(index: Path, position: int, data: bytes) -> None:
    with index.open("r+b") as file:
        file.seek(position)
        file.write(data)


def _other_database(index: Path) -> None:
    index.unlink()
    with closing(sqlite3.connect(index)) as other:
        other.execute("CREATE TABLE something (else_ INTEGER)")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "header": lambda index: _overwrite(index, 0.0, 0.01),
    "middle": lambda index: _overwrite(index, 0.4, 0.9),
    "all": lambda index: _overwrite(index, 0.0, 1.0),
    "half": lambda index: os.truncate(index, index.stat().st_size // 2 // 4096 * 4096),
    "version": lambda index: _overwrite_at(index, 60, b"\x7f\x01\x02\x03"),
    "odd": lambda index: os.truncate(index, index.stat().st_size // 2 + 77),
    "empty": lambda index: os.truncate(index, 0),
    "gone": lambda index: index.unlink(),
    "another": _other_database,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_index(tmp_path: Path, damage: str) -> None:
    """A damaged index is rebuilt from the blocks, and no block is lost or left uncounted."""
    frames = put_some(tmp_path)
    DAMAGES[damage](tmp_path / "index.sqlite")
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        assert store.lookup(names_of(frames), deadline=soon()) == 40
        assert assert_sound(store, tmp_path, [frames], 1 << 20) == 40
        by_name = {entry.name: entry for entry in store.scan(deadline=soon())}
        assert [by_name[one.name].depth for one in frames] == list(range(40))
        store.put(make_frames(32, 1, 1000), deadline=soon())
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        assert store.status().blocks == 41 and store.status().notes["rebuilt"] == 0


@pytest.mark.parametrize("number", [0, 1, 20, 39])
def test_killed_during_a_rebuild(tmp_path: Path, number: int) -> None:
    """If a process is killed while it rebuilds the index, the next one rebuilds it."""
    frames = put_some(tmp_path)
    (tmp_path / "index.sqlite").unlink()

    def child() -> None:
        die_in_python("preadv", number, after=True)
        DiskStore(tmp_path, 1 << 20)

    assert in_child(child) == -signal.SIGKILL
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        assert store.lookup(names_of(frames), deadline=soon()) == 40
        assert_sound(store, tmp_path, [frames], 1 << 20)


def test_a_log_without_its_index(tmp_path: Path) -> None:
    """The log of a removed index is not applied to the new one."""
    frames = make_frames(39, 10, 1000)

    def child() -> None:
        store = DiskStore(tmp_path, 1 << 20)
        store.put(frames, deadline=soon())
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(child) == -signal.SIGKILL
    assert (tmp_path / "index.sqlite-wal").stat().st_size > 0
    (tmp_path / "index.sqlite").unlink()
    file_of(tmp_path, frames[9]).unlink()
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        assert store.lookup(names_of(frames), deadline=soon()) == 9
        assert_sound(store, tmp_path, [frames], 1 << 20)


def test_chains_of_a_rebuilt_index(tmp_path: Path) -> None:
    """After a rebuild eviction is still leaf first."""
    chain = make_frames(33, 8, SMALL_PAYLOAD)
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        for one in reversed(chain):
            store.put([one], deadline=soon())
    (tmp_path / "index.sqlite").unlink()
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        settle(store)
        store.put(make_frames(34, 3, SMALL_PAYLOAD), deadline=soon())
        assert present(store, chain) == [True] * 5 + [False] * 3


def test_an_index_lost_under_a_running_store(tmp_path: Path) -> None:
    """When the index is removed or damaged under an open store, calls may fail once and then find all blocks."""
    frames = put_some(tmp_path)
    names = names_of(frames)
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        for damage in ("gone", "all"):
            DAMAGES[damage](tmp_path / "index.sqlite")
            if damage == "all":
                shutil.copy(tmp_path / "index.sqlite", tmp_path / "copy")
                os.replace(tmp_path / "copy", tmp_path / "index.sqlite")
            failures = 0
            while failures < 3:
                try:
                    assert store.lookup(names, deadline=soon()) == 40
                    assert store.put(frames, deadline=soon()) == 40
                    break
                except StoreUnavailable:
                    failures += 1
            assert failures < 3
            assert read(store, frames) == whole(frames)
            assert_sound(store, tmp_path, [frames], 1 << 20)


def test_a_folder_removed_under_a_running_store(tmp_path: Path) -> None:
    """When the folder is removed, every block is a miss, and the next put creates it again."""
    chain = make_frames(35, 3, 1000)
    with closing(DiskStore(tmp_path / "store", 1 << 20)) as store:
        store.put(chain, deadline=soon())
        shutil.rmtree(tmp_path / "store")
        assert read(store, chain) == [None] * 3
        assert store.lookup(names_of(chain), deadline=soon()) == 0
        settle(store)
        assert store.put(chain, deadline=soon()) == 3
        assert read(store, chain) == whole(chain)


@pytest.mark.parametrize("host", ["this host", "another host"])
def test_after_a_crash_of_the_machine(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot all files are compared with the index, whatever the host is called then: lost rows are added again,
    damaged files are removed. In one boot they are not compared again, whatever the host is called."""
    set_boot(monkeypatch, "first")
    frames = put_some(tmp_path)
    lost = make_frames(36, 3, 1000)
    with closing(DiskStore(tmp_path / "elsewhere", 1 << 20)) as other:
        other.put(lost, deadline=soon())
    for one in lost:
        file_of(tmp_path, one).parent.mkdir(parents=True, exist_ok=True)
        os.rename(file_of(tmp_path / "elsewhere", one), file_of(tmp_path, one))
    shutil.rmtree(tmp_path / "elsewhere")
    os.truncate(file_of(tmp_path, lost[2]), 700)
    os.truncate(file_of(tmp_path, frames[7]), 0)
    file_of(tmp_path, frames[39]).unlink()
    half = file_of(tmp_path, frames[5]).with_name(frames[5].header.key.hex() + ".host-1-abc")
    half.write_bytes(b"half")
    set_boot(monkeypatch, "first", host)
    DiskStore(tmp_path, 1 << 20).close()
    assert half.exists(), "without a reboot the files are not compared"
    set_boot(monkeypatch, "second", host)
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        settle(store)
        assert present(store, lost) == [True, True, False]
        assert [number for number, held in enumerate(present(store, frames)) if not held] == [7, 39]
        assert_sound(store, tmp_path, [frames, lost], 1 << 20)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("own", ["zeros", "whole"])
def test_of_two_copies_a_whole_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, step: int) -> None:
    """A loss of power leaves the file of a block, which the index has, as zeros, and its copy in a piece whole: the block is
    found there, also if the piece has children before their parents, and the index counts children rightly. Where both are
    whole, one is removed."""
    set_boot(monkeypatch, "first")
    frames = make_frames(64, 3, 1000)
    for folder, size in ((tmp_path / "kv", 0), (tmp_path / "other", 1 << 20)):
        with closing(DiskStore(folder, 1 << 20, pieces=size)) as store:
            store.put(frames[::step], deadline=soon())
    for folder in (tmp_path / "other").glob("*/*/pieces"):
        folder.rename(tmp_path / "kv" / folder.relative_to(tmp_path / "other"))
    for path in [file_of(tmp_path / "kv", one) for one in frames] if own == "zeros" else []:
        path.write_bytes(bytes(path.stat().st_size))
    set_boot(monkeypatch, "second")
    with closing(DiskStore(tmp_path / "kv", 1 << 20)) as store:
        settle(store)
        assert read(store, frames) == whole(frames)
        assert store.status().bytes == sum(len(one.data) for one in frames)
    with closing(sqlite3.connect(tmp_path / "kv" / "index.sqlite")) as index:
        assert index.execute("SELECT children FROM blocks ORDER BY depth").fetchall() == [(1,), (1,), (0,)]
        assert not index.execute("SELECT * FROM waiting").fetchall()
    assert len(BlockFiles(str(tmp_path / "kv")).find(names_of(frames))) == (3 if own == "zeros" else 0)
    assert file_of(tmp_path / "kv", frames[0]).exists() == (own == "whole")


def test_an_index_from_a_backup(tmp_path: Path) -> None:
    """An old index in the place of a newer one, in the same boot, is compared with the files: what was stored since is found,
    counted and evicted, so the folder does not grow beyond its size; what was evicted since is not listed."""
    size, index = 40_000, tmp_path / "kv" / "index.sqlite"
    first, later, last = (make_frames(seed, 24, 1000) for seed in (61, 62, 63))
    with closing(DiskStore(tmp_path / "kv", size)) as store:
        store.put(first, deadline=soon())
    shutil.copy2(index, tmp_path / "backup")
    with closing(DiskStore(tmp_path / "kv", size)) as store:
        store.put(later, deadline=soon())
    for path in index.parent.glob("index.sqlite*"):
        path.unlink()
    os.rename(tmp_path / "backup", index)
    with closing(DiskStore(tmp_path / "kv", size)) as store:
        settle(store)
        assert present(store, later) == [True] * len(later)
        store.put(last, deadline=soon())
        assert_sound(store, tmp_path / "kv", [first, later, last], size)


@pytest.mark.extended
def test_a_sound_index_is_trusted(tmp_path: Path) -> None:
    """Opening a folder with a sound index reads no blocks. A damaged block is noticed when it is read."""
    frames = make_frames(37, 3000, 10)
    with closing(DiskStore(tmp_path, 1 << 24)) as store:
        store.put(frames, deadline=soon())
    for one in frames[::100]:
        file_of(tmp_path, one).write_bytes(b"destroyed")
    with closing(DiskStore(tmp_path, 1 << 24)) as store:
        assert store.lookup(names_of(frames), deadline=soon()) == 3000
    (tmp_path / "index.sqlite").unlink()
    with closing(DiskStore(tmp_path, 1 << 24)) as store:
        settle(store)
        assert store.status().blocks == 2970
        assert store.lookup(names_of(frames[1:]), deadline=soon()) == 99


def test_records_half_written(tmp_path: Path) -> None:
    """An incomplete record of a killed process is never visible and is removed when the folder is opened."""
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        store.put_record("a/b", b"data", deadline=soon())

    def child() -> None:
        store = DiskStore(tmp_path, BUDGET)
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        store.put_record("a/b", b"other", deadline=soon())

    assert in_child(child) == -signal.SIGKILL
    assert len([path for path in (tmp_path / "records").rglob("*") if path.is_file()]) == 2
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        assert store.records("", deadline=soon()) == ["a/b"]
        assert store.get_record("a/b", deadline=soon()) == b"data"
    assert len([path for path in (tmp_path / "records").rglob("*") if path.is_file()]) == 1


def test_system_errors(tmp_path: Path) -> None:
    """Any system error becomes a StoreError."""
    frames = put_some(tmp_path)
    layout = tmp_path / frames[0].header.layout.hex()
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        shutil.rmtree(layout)
        layout.write_bytes(b"a file in the place of a folder")
        new = make_frames(38, 2, 1000)
        with pytest.raises(StoreError):
            store.put(new, deadline=soon())
        with pytest.raises(StoreError):
            read(store, frames)
        layout.unlink()
        assert read(store, frames) == [None] * 40
        assert store.put(new, deadline=soon()) == 2


WRONG_VALUES = {
    "a clock that is text": "UPDATE totals SET clock = 'x'",
    "a clock at its end": "UPDATE totals SET clock = 9223372036854775807",
    "negative bytes": "UPDATE totals SET bytes = -1000000000",
    "too many bytes": "UPDATE totals SET bytes = 1000000000000000",
    "no totals": "DELETE FROM totals",
    "short names": "UPDATE blocks SET name = x'010203' WHERE children = 0",
    "sizes that are text": "UPDATE blocks SET size = 'abc'",
    "too many children": "UPDATE blocks SET children = 7",
    "a writer that is not UTF-8": "INSERT INTO writers VALUES (99, CAST(x'c328' AS TEXT))",
    "a host that is not UTF-8": "INSERT INTO hosts VALUES (CAST(x'c328' AS TEXT), 'a')",
}


@pytest.mark.parametrize("running", represented([True, False], True), ids=["running", "closed"])
@pytest.mark.parametrize("what", WRONG_VALUES)
def test_a_wrong_value_in_the_index(tmp_path: Path, what: str, running: bool) -> None:
    """A wrong value in a sound database is an error for few calls. Then the index is rebuilt, and the budget is kept."""
    chains = [make_frames(seed, 10, 1000) for seed in range(41, 51)]
    size = 80 * len(chains[0][0].data)
    store = DiskStore(tmp_path, size)
    for chain in chains[:7]:
        store.put(chain, deadline=soon())
    if not running:
        store.close()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as other:
        other.executescript(WRONG_VALUES[what])
    if not running:
        store = DiskStore(tmp_path, size)
    failures = 0
    for chain in [*chains, *chains]:
        failures += put_all_or_fail(store, chain)
    settle(store)
    assert failures <= 2
    assert store.put(chains[0], deadline=soon()) == 10
    assert read(store, chains[0]) == whole(chains[0])
    assert_sound(store, tmp_path, chains, size)
    store.close()
    with closing(DiskStore(tmp_path, size)) as store:
        assert_sound(store, tmp_path, chains, size)
        assert store.put(chains[0], deadline=soon()) == 10


def put_all_or_fail(store: DiskStore, chain: Sequence[Frame]) -> bool:
    try:
        put_all(store, chain)
    except StoreUnavailable:
        return True
    return False


def test_rebuilds_leave_no_descriptors(tmp_path: Path) -> None:
    """A store whose index is lost again and again keeps as many open files as one that never lost it."""
    chain = make_frames(52, 5, 1000)
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        counts = []
        for _ in range(6):
            store.put(chain, deadline=soon())
            counts.append(len(os.listdir("/proc/self/fd")))
            DAMAGES["gone"](tmp_path / "index.sqlite")
            assert store.lookup(names_of(chain), deadline=soon()) == 5
            settle(store)
        assert max(counts[1:]) <= counts[0] + 1 and store.put(chain, deadline=soon()) == 5


def test_reads_need_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the index of a large folder is rebuilt, a store opens, and its blocks are found and read by their names."""
    frames = put_some(tmp_path)
    names = names_of(frames)
    (tmp_path / "index.sqlite").unlink()
    go_on = threading.Event()
    monkeypatch.setattr(opener, "_LARGE_INDEX", 0)
    monkeypatch.setattr(opener, "read_block_header", lambda file: go_on.wait(60) and read_block_header(file))
    with closing(DiskStore(tmp_path, 1 << 20)) as store, closing(DiskStore(tmp_path, 1 << 20)) as other:
        for one in (store, other):
            assert one.status().notes["scanning"] == 1
            assert one.lookup(names, deadline=soon(20)) == 40 and all(one.present(names, deadline=soon(20)))
            assert read(one, frames) == whole(frames)
            assert one.put(frames, deadline=soon(20)) == 40, "they are present"
            assert len(list(one.scan(deadline=soon()))) == 40
        assert store.delete(names[39:], deadline=soon()) == 1
        assert other.lookup(names, deadline=soon()) == 39
        go_on.set()
        settle(store)
        settle(other)
        for one in (store, other):
            assert one.lookup(names, deadline=soon()) == 39
            assert_sound(one, tmp_path, [frames], 1 << 20)


def test_writes_go_on_during_a_rebuild(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an index is rebuilt, two processes write within the budget, and evict the oldest blocks for that."""
    old = make_frames(53, 10, PAYLOAD)
    new = [make_frames(54 + number, 2, PAYLOAD) for number in range(2)]
    with closing(DiskStore(tmp_path, BUDGET)) as store:
        put_all(store, old)
    for number, one in enumerate(old):
        os.utime(file_of(tmp_path, one), (1e9 + number, 1e9 + number))
    (tmp_path / "index.sqlite").unlink()
    go_on, added = threading.Event(), threading.Event()

    def slow(file: BlockFile) -> Header | None:
        if file.name == old[6].name:
            added.set()
            assert go_on.wait(60)
        return read_block_header(file)

    monkeypatch.setattr(opener, "_LARGE_INDEX", 0)
    monkeypatch.setattr(opener, "_ROWS", 1)
    monkeypatch.setattr(opener, "read_block_header", slow)
    with closing(DiskStore(tmp_path, BUDGET)) as store, closing(DiskStore(tmp_path, BUDGET)) as other:
        assert added.wait(60)
        assert store.put([old[9]], deadline=soon()) == 1, "it is present, though not in the index yet"
        for one, chain in zip((store, other), new, strict=True):
            assert one.put(chain, deadline=soon()) == 2
            assert sum(on_disk(tmp_path).values()) == BUDGET
        assert store.status().notes["scanning"] == other.status().notes["scanning"] == 1
        assert [read(store, [one])[0] is not None for one in old] == [True] * 2 + [False] * 4 + [True] * 4
        go_on.set()
        assert assert_sound(other, tmp_path, [old, *new]) == 10
        assert assert_sound(store, tmp_path, [old, *new]) == 10


# A full file system


@pytest.mark.parametrize("limit", ["size=3m", "size=64m,nr_inodes=60"])
def test_a_file_system_smaller_than_the_budget(limit: str) -> None:
    """If the file system is full before the budget is used, the oldest chains are evicted for new ones."""
    chains = [make_frames(seed, 10, 9000) for seed in range(60, 100)]
    with small_disk(limit) as folder:
        with closing(DiskStore(folder / "store", 1 << 30)) as store:
            for chain in [*chains, *chains]:
                assert store.put(chain, deadline=soon()) == 10
                assert read(store, chain) == whole(chain)
            assert store.status().evictions > 200
            assert_sound(store, folder / "store", chains, 1 << 30)
        for name in itertools.count():
            try:
                (folder / f"other{name}").write_bytes(bytes(4096))
            except OSError:
                break
        with closing(DiskStore(folder / "store", 1 << 30)) as store:
            assert store.lookup(names_of(chains[-1]), deadline=soon()) > 0
            settle(store)
            assert store.put(chains[0], deadline=soon()) > 0


def test_a_full_file_system_is_shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is full before the budget is used up: the tier evicts for new blocks and is full, not off. It is ok
    again when there is much more room than a block needs. The log says both, once, however many blocks are written."""
    monkeypatch.setattr(writer, "_FULL_SECONDS", 600.0)
    caplog.set_level("INFO", "foreword.store")
    chains = [make_frames(seed, 10, 9000) for seed in range(60, 100)]
    with small_disk("size=2m") as folder, closing(TieredStore([DiskStore(folder / "store", 1 << 30)])) as store:
        [tier] = store.tiers
        for chain in chains:
            assert store.put(chain, deadline=soon()) == 10
        assert tier.state is TierState.FULL and not tier.breaker.is_open
        assert read(store, chains[-1]) == whole(chains[-1])
        subprocess.run(["mount", "-o", "remount,size=32m", str(folder)], check=True)
        monkeypatch.setattr(writer, "_FULL_SECONDS", 0.0)
        assert store.put(chains[0], deadline=soon()) == 10
        assert tier.state is TierState.OK
    began, ended = (one.message for one in caplog.records if one.message.startswith("tier"))
    assert began.startswith("tier disk is full: the file system of ") and ended == "tier disk takes blocks again"


def test_a_folder_that_cannot_be_made_yet() -> None:
    """A store opens on a full file system although it cannot make its folder, and works when there is room."""
    chain = make_frames(53, 3, 1000)
    with small_disk("size=1m,nr_inodes=8") as folder:
        for name in itertools.count():
            try:
                (folder / f"other{name}").touch()
            except OSError:
                break
        with closing(DiskStore(folder / "store", 1 << 20)) as store:
            assert store.lookup(names_of(chain), deadline=soon()) == 0
            assert read(store, chain) == [None] * 3
            assert store.put(chain, deadline=soon()) == 0


@pytest.mark.parametrize("level", [1, 2, 3])
def test_linked_folders_are_erased(tmp_path: Path, level: int) -> None:
    """A folder of blocks or records that lies elsewhere, behind a link, is listed and erased as it is read. While the link
    leads nowhere, and where a file stands in its place, the erasure says so."""
    frames = make_frames(1, 1, 100)
    with closing(DiskStore(tmp_path / "kv", 1 << 20)) as store:
        store.put(frames, deadline=soon())
        store.put_record("kind/model/name", b"a record", deadline=soon())
        block = next(path for path in (tmp_path / "kv").rglob(frames[0].header.key.hex()))
        record = tmp_path / "kv/records/kind=/model=/name~"
        for number, place in enumerate((block.parents[3 - level], record.parents[3 - level])):
            away = tmp_path / f"away{number}"
            place.rename(away)
            for lost in (lambda place: place.symlink_to(tmp_path / "nowhere"), Path.touch):
                lost(place)
                with pytest.raises(StoreUnreadable):
                    store.erase(deadline=soon()) if not number else store.records("", deadline=soon())
                place.unlink()
            place.symlink_to(away)
        assert read(store, frames) == whole(frames) and store.records("", deadline=soon()) == ["kind/model/name"]
        assert store.erase(deadline=soon()) == 1 and read(store, frames) == [None]
