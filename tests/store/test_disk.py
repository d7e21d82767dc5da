"""The disk store: the contract, its files, and several processes on one folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import in_child

from foreword.conformance import (
    SMALL_BYTES,
    SMALL_PAYLOAD,
    Damage,
    StoreContract,
    make_frames,
    names_of,
    present,
    read,
    soon,
    whole,
)
from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.files import BlockFiles
from foreword.store.frame import Frame


class TestContract(StoreContract):
    bounded = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20)
        yield store
        store.close()

    @pytest.fixture
    def second(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20)
        yield store
        store.close()

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "small", SMALL_BYTES)
        yield store
        store.close()

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        return lambda _, one, data: file_of(tmp_path / "store", one).write_bytes(data) and None


def on_disk(folder: Path) -> dict[str, int]:
    """Block files, complete or not, and their lengths. Only while no process writes."""
    return {str(path): path.stat().st_size for path in folder.glob("?" * 32 + "/" + "?" * 32 + "/??/*")}


def file_of(folder: Path, one: Frame) -> Path:
    key = one.header.key.hex()
    return folder / one.header.layout.hex() / one.header.root.hex() / key[:2] / key


def test_a_block_is_a_file(tmp_path: Path) -> None:
    """A block is a file named by layout, root and key, and its content is the frame."""
    frames = make_frames(1, 3, 3000)
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        store.put(frames, deadline=soon())
        assert [file_of(tmp_path, one).read_bytes() for one in frames] == whole(frames)
        assert len(on_disk(tmp_path)) == 3


def test_file_modes(tmp_path: Path) -> None:
    """Files have mode 0600 and folders 0700, whatever the umask."""
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "deep" / "store", 1 << 20)
        store.put(make_frames(2, 5, 100), deadline=soon())
        store.put_record("a/b/c", b"data", deadline=soon())
    finally:
        os.umask(before)
    paths = [tmp_path / "deep" / "store", *(tmp_path / "deep" / "store").rglob("*")]
    assert len(paths) > 15
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    store.close()


def test_blocks_persist(tmp_path: Path) -> None:
    """Blocks, pins, uses and records persist when the folder is opened again."""
    first, second = make_frames(3, 4, SMALL_PAYLOAD), make_frames(4, 4, SMALL_PAYLOAD)
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        store.put(first, deadline=soon())
        store.put(second, deadline=soon())
        store.pin(names_of(second[:1]), deadline=soon())
        store.put_record("key", b"data", deadline=soon())
        assert read(store, first) == whole(first)
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        assert read(store, second) == whole(second)
        entries = {entry.name: entry for entry in store.scan(deadline=soon())}
        assert [entries[one.name].hits for one in first] == [1] * 4
        assert [entries[one.name].parent for one in first] == [one.header.parent for one in first]
        assert [entries[one.name].pinned for one in second] == [True, False, False, False]
        assert store.get_record("key", deadline=soon()) == b"data"


def test_the_order_of_eviction_persists(tmp_path: Path) -> None:
    """The order of eviction persists when the folder is opened again."""
    first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (5, 6, 7))
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        store.put(first, deadline=soon())
        store.put(second, deadline=soon())
        read(store, first)
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        store.put(third, deadline=soon())
        assert present(store, first) == [True] * 4 and present(store, second) == [False] * 4


def test_stores_of_different_sizes(tmp_path: Path) -> None:
    """Two stores on one folder each evict down to their own size when they write."""
    small, large = DiskStore(tmp_path, SMALL_BYTES // 2), DiskStore(tmp_path, SMALL_BYTES)
    chain, other = make_frames(8, 8, SMALL_PAYLOAD), make_frames(9, 1, SMALL_PAYLOAD)
    assert large.put(chain, deadline=soon()) == 8
    assert small.put(other, deadline=soon()) == 1
    assert sum(on_disk(tmp_path).values()) == SMALL_BYTES // 2
    assert present(large, chain) == [True] * 3 + [False] * 5
    assert large.put(chain, deadline=soon()) == 8
    assert sum(on_disk(tmp_path).values()) == SMALL_BYTES
    small.close()
    large.close()


def test_the_clock_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction depends on the order of uses, not on the clock, which may stand still or run backwards."""
    first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (10, 11, 12))
    times = itertools.count(2e9, -1e6)
    monkeypatch.setattr(time, "time", lambda: next(times))
    with closing(DiskStore(tmp_path, SMALL_BYTES)) as store:
        store.put(first, deadline=soon())
        store.put(second, deadline=soon())
        read(store, first)
        store.put(third, deadline=soon())
        assert present(store, first) == present(store, third) == [True] * 4


def test_a_put_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put without frames makes no transaction, for which other processes would wait."""
    with closing(DiskStore(tmp_path, 1 << 20)) as store:
        store.put(make_frames(1, 1, 1000), deadline=soon())
        with monkeypatch.context() as patched:
            patched.setattr(store._index, "write", lambda deadline: 1 // 0)
            assert store.put([], deadline=soon()) == 0


def test_after_a_fork(tmp_path: Path) -> None:
    """Parent and child both continue with the store that the parent opened, on separate connections."""
    chains = [make_frames(seed, 4, 1000) for seed in (13, 14, 15)]
    store = DiskStore(tmp_path, 1 << 20)
    store.put(chains[0], deadline=soon())
    read(store, chains[0])

    def child() -> None:
        assert read(store, chains[0]) == whole(chains[0])
        assert store.put(chains[1], deadline=soon()) == 4
        store.close()

    assert in_child(child) == 0
    assert store.lookup(names_of(chains[1]), deadline=soon()) == 4
    assert store.put(chains[2], deadline=soon()) == 4
    assert read(store, chains[1]) == whole(chains[1])
    store.close()
    with closing(DiskStore(tmp_path, 1 << 20)) as again:
        assert [again.lookup(names_of(chain), deadline=soon()) for chain in chains] == [4] * 3


def test_an_index_locked_by_another_process(tmp_path: Path) -> None:
    """While another process holds the index, writes raise StoreTimeout at their deadline and reads work."""
    chain = make_frames(16, 3, 1000)
    store = DiskStore(tmp_path, 1 << 20)
    store.put(chain[:2], deadline=soon())
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for call in (
            lambda: store.put(chain, deadline=soon(0.1)),
            lambda: store.delete(names_of(chain), deadline=soon(0.1)),
            lambda: store.pin(names_of(chain), deadline=soon(0.1)),
        ):
            with pytest.raises(StoreTimeout):
                call()
        assert store.lookup(names_of(chain), deadline=soon()) == 2
        assert read(store, chain[:2]) == whole(chain[:2])
        assert store.status().blocks == 2
    assert store.put(chain, deadline=soon()) == 3
    store.close()


def test_a_journal_for_network_file_systems(tmp_path: Path) -> None:
    """Two stores with journal="delete" share a folder without SQLite's shared memory."""
    chain = make_frames(17, 4, 1000)
    first, second = (DiskStore(tmp_path, 1 << 20, journal="delete") for _ in range(2))
    first.put(chain[:2], deadline=soon())
    second.put(chain[2:], deadline=soon())
    assert first.lookup(names_of(chain), deadline=soon()) == second.lookup(names_of(chain), deadline=soon()) == 4
    assert not list(tmp_path.glob("index.sqlite-*"))
    first.close()
    second.close()


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 1, "pin_share": -0.1}, {"size": 1, "journal": "off"}])
def test_impossible_settings(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Impossible settings are refused by the constructor."""
    with pytest.raises(StoreConfigError):
        DiskStore(tmp_path, **arguments)


def test_impossible_folders(tmp_path: Path) -> None:
    """A path below a file, and a missing folder opened read-only, raise StoreUnavailable in the constructor."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "file" / "store", 1 << 20)
    with pytest.raises(StoreUnavailable):
        DiskStore(tmp_path / "nowhere", 1 << 20, read_only=True)


def test_invalid_records(tmp_path: Path) -> None:
    """An invalid record key or a record that is too long raises StoreError. Dots in keys do not leave the folder."""
    with closing(DiskStore(tmp_path / "store", 1 << 20)) as store:
        for key in ("", "/", "a/", "/a", "a//b", "ä", "a b", "a\n"):
            with pytest.raises(StoreError):
                store.put_record(key, b"", deadline=soon())
        with pytest.raises(StoreError):
            store.put_record("long", bytes((8 << 20) + 1), deadline=soon())
        for key in ("..", "../../a", ".", "a/../b"):
            store.put_record(key, key.encode(), deadline=soon())
            assert store.get_record(key, deadline=soon()) == key.encode()
        assert store.records("", deadline=soon()) == [".", "..", "../../a", "a/../b"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("seed", range(4))
def test_files_of_compiled_code_are_those_of_python(tmp_path: Path, seed: int) -> None:
    """Compiled code and Python write the same files with the same modes, through missing folders, and leave nothing of what
    cannot be written: where a folder that is not empty, or a file in the place of a folder, stands in the way."""
    draw = random.Random(seed)
    frames = [one for number in range(6) for one in make_frames(10 * seed + number, 3, draw.choice((1, 100, 70_000)))]
    found = []
    for way in ("compiled", "python"):
        files = BlockFiles(str(tmp_path / way))
        blocked = {frames[draw_at].name for draw_at in (4, 9)}
        file, folder = (Path(files.path(name)) for name in sorted(blocked))
        (folder / "inside").mkdir(parents=True)
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.write_bytes(b"a file in the place of a folder")
        left = list(frames)
        while left:
            if way == "compiled":
                left = left[files.write_many([(one.name, one.data) for one in left], "token", 60.0) :]
            for one in left[:1]:
                with contextlib.suppress(StoreError):
                    files.write(one.name, one.data, "token")
            left = left[1:]
        found.append(
            {
                str(path.relative_to(files.folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
                for path in Path(files.folder).rglob("*")
            }
        )
        assert files.write_many([(frames[0].name, frames[0].data)], "late", 0.0) == 0
    assert found[0] == found[1]
    assert sum(b"token" in name.encode() for name in found[0]) == 0
