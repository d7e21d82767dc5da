"""Disk stores that earlier versions of Foreword wrote (`golden/write_store.py`), opened by this one."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from foreword.conformance import make_frames, names_of, read, soon
from foreword.store.disk.disk_store import DiskStore

_GOLDEN = Path(__file__).parent / "golden"
# Room for 60 blocks of 292 bytes.
_SIZE = 60 * 292
each_format = pytest.mark.parametrize("form", [3, 4])


def unpack(form: int, folder: Path) -> Path:
    with tarfile.open(_GOLDEN / f"store-format-{form}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "store"


@each_format
def test_pins_of_an_earlier_version(form: int, tmp_path: Path) -> None:
    """All blocks and records are found with their bytes. The index is made anew, also from format 4, whose programs would go on
    to write to one that was changed in place. What was pinned is pinned and outlasts traffic of several times the budget; all
    else is evicted. A pin ends as any other, and does not come back."""
    folder = unpack(form, tmp_path)
    pinned, others, unpinned = make_frames(1, 10, 100), make_frames(2, 10, 100), make_frames(3, 5, 100)
    with closing(DiskStore(str(folder), _SIZE)) as store:
        for frames in (pinned, others, unpinned):
            assert store.lookup(names_of(frames), deadline=soon()) == len(frames)
            assert read(store, frames) == [bytes(one.data) for one in frames]
        assert store.get_record("prefixes/model/tenant/name", deadline=soon()) == b"a record"
        assert store.status().pinned_bytes == 10 * 292
        assert store.status().notes["rebuilt"] == 1
        for seed in range(10, 30):
            store.put(make_frames(seed, 10, 100), deadline=soon())
        assert store.status().evictions >= 150
        assert store.lookup(names_of(pinned), deadline=soon()) == 10
        assert [store.lookup(names_of(frames), deadline=soon()) for frames in (others, unpinned)] == [0, 0]
        assert store.pin(names_of(pinned), pinned=False, deadline=soon()) == 10
    with closing(DiskStore(str(folder), _SIZE)) as store:
        assert store.status().pinned_bytes == 0
        with closing(sqlite3.connect(folder / "index.sqlite")) as index:
            assert index.execute("SELECT count(*) FROM sqlite_master WHERE name = 'pinned_before'").fetchone() == (0,)


_CRASH = """
import os, sys
from foreword.store.disk import opener
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.index_rows import IndexTransaction

def crash_before(owner, name, calls):
    function = getattr(owner, name)
    left = [calls]

    def call(*args, **more):
        left[0] -= 1
        if not left[0]:
            os._exit(9)
        return function(*args, **more)

    setattr(owner, name, call)

name, calls = sys.argv[2], int(sys.argv[3])
crash_before(IndexTransaction if hasattr(IndexTransaction, name) else opener, name, calls)
store = DiskStore(sys.argv[1], 60 * 292)
store.status()
store.close()
"""


@pytest.mark.parametrize(
    ("step", "calls"),
    [("quarantine_index", 1), ("open_index", 2), ("read_pins", 1), ("keep_pins", 1), ("add_found", 1), ("note_boot", 1)],
)  # fmt: skip
def test_a_crash_while_an_index_is_replaced(step: str, calls: int, tmp_path: Path) -> None:
    """Wherever a process dies that replaces an index of an earlier format, the next one has its pins."""
    folder = unpack(3, tmp_path)
    done = subprocess.run([sys.executable, "-c", _CRASH, str(folder), step, str(calls)], check=False)
    assert done.returncode == 9
    with closing(DiskStore(str(folder), _SIZE)) as store:
        assert store.status().pinned_bytes == 10 * 292
        assert store.lookup(names_of(make_frames(1, 10, 100)), deadline=soon()) == 10
    assert not [path.name for path in folder.glob("*.old*")]


def test_a_damaged_index_of_an_earlier_version(tmp_path: Path) -> None:
    """Where the earlier index cannot be read, its blocks are found, and no pin is believed."""
    folder = unpack(3, tmp_path)
    with (folder / "index.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))
    with closing(DiskStore(str(folder), _SIZE)) as store:
        assert store.lookup(names_of(make_frames(1, 10, 100)), deadline=soon()) == 10
        assert store.status().pinned_bytes == 0
