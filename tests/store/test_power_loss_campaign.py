"""Short campaigns of losses of power, and tests of the campaign itself."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_states import Recorded, record, recorder
from power_loss_campaign import Check, replay, run

from foreword.conformance.frames import LAYOUT, make_frames
from foreword.prefixes.open_erasures import ERASURES
from foreword.store.layout_records import LAYOUTS

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorder(tmp_path_factory.mktemp("recorder"))


def recorded(folder: Path, library: Path, program: str) -> Recorded:
    """Record what a program does in a folder `FOLDER`."""
    made = folder / "recorded"
    made.mkdir()
    found = record(made, ["-c", f"FOLDER = {str(made)!r}\n{program}"], library, folder / "log")
    return Recorded(str(made), found)


def states(found: Recorded, folder: Path, count: int = 60) -> Iterator[dict[str, bytes]]:
    """Files that may be there after the last change, by their paths."""
    for number in range(count):
        state = folder / f"state {number}"
        found.write_state(found.count, state, random.Random(number))
        files = [Path(root) / name for root, _, names in os.walk(state) for name in names]
        yield {str(path.relative_to(state)): path.read_bytes() for path in files}


def test_a_second_loss(library: Path, tmp_path: Path) -> None:
    """Files that a first loss has left stay as they are, whole, until they are changed; a change that is not synced may be
    there or not after a second loss, and so may a removal."""
    folder = tmp_path / "recorded"
    (folder / "inner").mkdir(parents=True)
    for name in ("inner/still", "changed", "removed"):
        (folder / name).write_bytes(b"old " * 100)
    before = Recorded.files(folder)
    program = f"""
import os
with open({str(folder / "changed")!r}, "r+b", buffering=0) as file:
    file.write(b"new ")
os.unlink({str(folder / "removed")!r})
"""
    found = Recorded(str(folder), record(folder, ["-c", program], library, tmp_path / "log"), before)
    seen = list(states(found, tmp_path))
    assert all(files["inner/still"] == b"old " * 100 for files in seen)
    assert {files["changed"] for files in seen} >= {b"old " * 100, b"new " + b"old " * 99}
    assert {"removed" in files for files in seen} == {False, True}


@pytest.mark.slow
def test_a_state_with_a_fault_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that has a fault stays as it was before the stores were opened, and can be checked once more."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Check, "_settle", lambda *_: 1 / 0)
        [row] = run(1, seed=21, only=["pieces"])
    [kept] = row.kept
    assert row.crash == 1 and str(kept) in str(row.notes) and kept.parent == tmp_path
    assert replay(kept).good and replay(kept).served


@pytest.mark.slow
@pytest.mark.parametrize("blocks_in", ["files", "pieces"])
def test_a_short_campaign(blocks_in: str) -> None:
    """8 states: no wrong byte, no whole block missed, nothing over the budget, nothing back after an erasure, nothing left."""
    [row] = run(8, seed=20, only=[blocks_in])
    assert row.states == 8 and row.good, row
    assert row.notes["second losses"] == 4
    assert row.served > 100 and row.notes["known"] and row.notes["erased, complete"], row


def test_what_is_synced_stays(library: Path, tmp_path: Path) -> None:
    """A file that was synced, whose folder was synced after its rename, is there in every state, with all its bytes. One
    that was not is there, is not, or is a part of itself."""
    found = recorded(
        tmp_path,
        library,
        """
import os
def made(name, sync):
    handle = os.open(f"{FOLDER}/{name}.new", os.O_WRONLY | os.O_CREAT)
    os.write(handle, bytes(range(256)) * 64)
    if sync:
        os.fsync(handle)
    os.close(handle)
    os.rename(f"{FOLDER}/{name}.new", f"{FOLDER}/{name}")
    if sync:
        folder = os.open(FOLDER, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
made("kept", True)
made("not kept", False)
""",
    )
    whole, other = bytes(range(256)) * 64, set[bytes | None]()
    for files in states(found, tmp_path):
        assert files["kept"] == whole
        other.add(files.get("not kept"))
    assert {whole, b"", None} < other, "it may also be whole, empty, or not there"


def test_what_is_removed_may_come_back(library: Path, tmp_path: Path) -> None:
    """A file that was removed is there again in some states, until its folder is synced."""
    program = """
import os
open(f"{FOLDER}/one", "w").close()
open(f"{FOLDER}/other", "w").close()
folder = os.open(FOLDER, os.O_RDONLY)
os.fsync(folder)
os.unlink(f"{FOLDER}/one")
os.fsync(folder)
os.unlink(f"{FOLDER}/other")
"""
    found = [set(files) for files in states(recorded(tmp_path, library, program), tmp_path)]
    assert all("one" not in files for files in found)
    assert any("other" in files for files in found) and any("other" not in files for files in found)


def after_an_erasure(folder: Path, library: Path, pieces: int, first: str = "") -> list[list[str]]:
    """The files of blocks and records in states after the erasure of a tenant, of whose blocks one was deleted just before."""
    program = f"""
import os
from foreword.conformance import make_frames, put_all, soon
from foreword.prefixes.erasure import erase_prefixes
from foreword.store.disk.disk_store import DiskStore
from foreword.store.tiered import TieredStore
{first}
store = TieredStore([DiskStore(FOLDER, 1 << 20, pieces={pieces})])
frames = make_frames(1, 8, 1000)
root = frames[0].header.root
put_all(store, frames)
store.put_record(f"retained/{"0" * 32}/{{root.hex()}}/one", b"private", deadline=soon())
store.delete([frames[-1].name], deadline=soon())
receipt = erase_prefixes(store, [root[:12]], "all")
assert receipt.complete, receipt
os._exit(0)
"""
    places = f"{LAYOUT.hex()}/", "records/"
    return [
        [name for name in files if name.startswith(places)]
        for files in states(recorded(folder, library, program), folder)
    ]


@pytest.mark.parametrize("pieces", [0, 8 << 10])
def test_an_erasure_outlives_a_loss_of_power(library: Path, tmp_path: Path, pieces: int) -> None:
    """No block and no record of a tenant is there in any state after a receipt has said that its erasure is complete."""
    assert not [left for left in after_an_erasure(tmp_path, library, pieces) if left]


def test_blocks_erased_from_a_piece_outlive_a_loss_of_power(library: Path, tmp_path: Path) -> None:
    """A block that was erased from a piece whose others stay is in no state. One that was only deleted is in some."""
    program = """
import os
from foreword.conformance import make_frames, put_all, soon
from foreword.store.disk.disk_store import DiskStore
store = DiskStore(FOLDER, 1 << 20, pieces=8 << 10)
frames = make_frames(1, 4, 1000)
put_all(store, frames)
header, chosen = frames[1].header, {frames[1].name}
assert sum(step.removed for step in store.erase_steps(header.layout, header.root, chosen=chosen, deadline=soon())) == 1
list(store.sync_deletions([(header.layout, header.root)], deadline=soon()))
store.delete([frames[2].name], deadline=soon())
os._exit(0)
"""
    frames, seen = make_frames(1, 4, 1000), set[int]()
    for files in states(recorded(tmp_path, library, program), tmp_path):
        stored = [data for name, data in files.items() if "/pieces/" in name]
        seen |= {number for number, one in enumerate(frames) if any(bytes(one.payload) in data for data in stored)}
    assert seen == {0, 2, 3}


def test_the_campaign_notices_deletions_that_are_not_synced(library: Path, tmp_path: Path) -> None:
    """Blocks and records of a store that syncs no deletion are there again in some states."""
    found = after_an_erasure(tmp_path, library, 8 << 10, "DiskStore.sync_deletions = lambda *_, **__: iter(())")
    assert any(name.startswith("records/") for left in found for name in left)
    assert any("/pieces/" in name for left in found for name in left)


@pytest.mark.parametrize(
    ("kind", "lasting"),
    [
        (ERASURES.key(""), True),
        ("namespaces/", True),
        (LAYOUTS.key(""), True),
        ("prefixes/a/b/", True),
        ("retained/a/b/", False),
    ],
)
def test_records_that_outlive_a_loss_of_power(library: Path, tmp_path: Path, kind: str, lasting: bool) -> None:
    """The record of an open erasure, of a namespace, of a layout, and of a named prefix is there, whole, in every state, and so
    is none that was deleted. Other records need not be: a lease that is lost is a miss."""
    kept, gone = (kind + name for name in ("kept", "gone"))
    program = f"""
from foreword.store.disk.files import RecordFiles
records = RecordFiles(FOLDER + "/records")
records.put({gone!r}, b"gone", "token")
records.put({kept!r}, b"kept", "token")
records.delete({gone!r})
"""
    found = set()
    for files in states(recorded(tmp_path, library, program), tmp_path):
        found.add(tuple(sorted((name.rpartition("/")[2], data) for name, data in files.items())))
    assert (found == {(("kept~", b"kept"),)}) == lasting
