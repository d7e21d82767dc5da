"""Disk stores that put blocks which are written together into files of some MiB (`pieces=`)."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foreword.conformance import SMALL_BYTES, Damage, StoreContract, make_frames, names_of, read, soon, whole
from foreword.errors import StoreError
from foreword.store.base import Store
from foreword.store.disk import pieces
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.files import BlockFiles
from foreword.store.disk.index_rows import IndexTransaction
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.urls import open_store

PIECE = 1 << 20


class TestContract(StoreContract):
    bounded = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20, pieces=PIECE)
        yield store
        store.close()

    @pytest.fixture
    def second(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20)
        yield store
        store.close()

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "small", SMALL_BYTES, pieces=PIECE)
        yield store
        store.close()

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        return lambda _, one, data: replaced(tmp_path / "store", one, data)


def pieces_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("?" * 32 + "/" + "?" * 32 + "/pieces/*"))


def alone(folder: Path, one: Frame) -> Path:
    """Where a block lies that has a file of its own."""
    return folder / one.header.layout.hex() / one.header.root.hex() / one.header.key.hex()[:2] / one.header.key.hex()


def forget_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def replaced(folder: Path, one: Frame, data: bytes) -> None:
    """Write other bytes where a block lies: in a piece, as many as there is room for."""
    key = one.header.key
    if (own := alone(folder, one)).exists():
        own.write_bytes(data)
        return
    for path in pieces_of(folder):
        whole_piece = bytearray(path.read_bytes())
        entry = whole_piece.find(key)
        if 0 <= entry < 4096:
            at, length = (int.from_bytes(whole_piece[entry + low : entry + low + 8], "little") for low in (32, 40))
            changed = bytearray(data[:length].ljust(length, b"\xff"))
            changed[0] ^= bytes(whole_piece[at : at + length]) == bytes(changed)
            whole_piece[at : at + length] = changed
            path.write_bytes(whole_piece)


def held(folder: Path) -> int:
    """Bytes of blocks in pieces that file systems have not freed, without the tables."""
    return sum(path.stat().st_blocks * 512 for path in pieces_of(folder))


def test_blocks_of_a_chain_are_one_file(tmp_path: Path) -> None:
    """Blocks that are put together are in files of about the given length, aligned as file systems free room; a block that is
    put alone has a file of its own. A store without the option reads both."""
    frames = make_frames(1, 64, 65_536)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        assert store.put(frames, deadline=soon()) == 64
        assert len(pieces_of(tmp_path)) == 4
        assert store.put(make_frames(2, 1, 1000), deadline=soon()) == 1 and len(pieces_of(tmp_path)) == 4
        assert read(store, frames) == whole(frames)
    first = pieces_of(tmp_path)[0].read_bytes()
    assert any(first.find(bytes(one.payload)) % 4096 == 0 for one in frames)
    with closing(DiskStore(tmp_path, 64 << 20)) as store:
        assert read(store, frames) == whole(frames)
        assert store.lookup(names_of(frames), deadline=soon()) == 64


def test_probes_of_dead_processes_go(tmp_path: Path) -> None:
    """A file in which a process looked whether its file system makes holes, and which a loss of power has left, goes at the
    next opening. A living process leaves none."""
    left = tmp_path / "holes.vm-1-000000000000"
    with closing(DiskStore(tmp_path, 1 << 20, pieces=PIECE)) as store:
        store.put(make_frames(1, 4, 1000), deadline=soon())
    left.write_bytes(bytes(8192))
    with closing(DiskStore(tmp_path, 1 << 20, pieces=PIECE)) as store:
        store.put(make_frames(2, 4, 1000), deadline=soon())
        deadline = time.monotonic() + 60
        while left.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not list(tmp_path.glob("holes.*"))


def test_a_deleted_block_leaves_its_piece(tmp_path: Path) -> None:
    """A block that is deleted from a piece is gone from the file: its bytes and its room. The others stay as they are, and the
    file goes with the last."""
    frames = make_frames(3, 16, 16_384)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        before = held(tmp_path)
        assert store.delete(names_of(frames[3:9]), deadline=soon()) == 6
        left = b"".join(path.read_bytes() for path in pieces_of(tmp_path))
        assert not any(bytes(one.payload[:64]) in left for one in frames[3:9])
        assert held(tmp_path) <= before - 6 * 16_384
        assert read(store, frames[:3] + frames[9:]) == whole(frames[:3] + frames[9:])
        assert store.status().bytes == sum(len(one.data) for one in frames[:3] + frames[9:])
        assert store.put(frames[3:9], deadline=soon()) == 6 and read(store, frames) == whole(frames)
        assert store.delete(names_of(frames), deadline=soon()) == 16
        assert not pieces_of(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_the_budget_holds(tmp_path: Path, seed: int) -> None:
    """However chains of several lengths come and are used, the room that the file system has given to pieces stays within the
    budget and a page per block and piece, and what is listed can be read."""
    draw, size = random.Random(seed), 2 << 20
    with closing(DiskStore(tmp_path, size, pieces=draw.choice((60_000, PIECE)))) as store:
        chains = [
            make_frames(100 * seed + number, draw.randrange(1, 40), draw.choice((3000, 9000))) for number in range(40)
        ]
        for frames in chains:
            store.put(frames, deadline=soon())
            for again in draw.sample(chains, 3):
                read(store, again)
            blocks = store.status().blocks
            assert store.status().bytes <= size
            files = [*pieces_of(tmp_path), *tmp_path.glob("?" * 32 + "/*/??/*")]
            used = sum(path.stat().st_blocks * 512 for path in files)
            assert used <= store.status().bytes + 4096 * (blocks + 2 * len(files))
        listed = {one.name for one in store.scan(deadline=soon())}
        for frames in chains:
            for one, data in zip(frames, read(store, frames), strict=True):
                assert (data == bytes(one.data)) == (one.name in listed)
        assert {name for batch in store.list_names(deadline=soon()) for name in batch} == listed


@pytest.mark.parametrize("seed", range(3))
def test_the_budget_holds_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The room that files of blocks have, incomplete ones too, is at most `size` and a page for the table of each piece after
    every call of the system that changes one, while two stores on the folder put, delete and evict. Frames of whole pages
    are padded by nothing, so there is no other slack."""
    draw, page = random.Random(seed), 4096
    size, payload, steps = 40 * 16_384, 16_384 - HEADER_BYTES, itertools.count()
    most = -size

    def excess() -> int:
        used = 0
        for path in tmp_path.glob("?" * 32 + "/" + "?" * 32 + "/*/*"):
            with suppress(FileNotFoundError):
                used += path.stat().st_blocks * 512 - page * (path.parent.name == pieces.FOLDER)
        return used - size

    def watched(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*given: object, **more: object) -> object:
            nonlocal most
            done = real(*given, **more)
            most = max(most, excess())
            next(steps)
            return done

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr("foreword.store.disk.files.compiled_write", lambda: None)
    with (
        closing(DiskStore(tmp_path, size, pieces=draw.choice((100_000, PIECE)))) as one,
        closing(DiskStore(tmp_path, size, pieces=PIECE)) as two,
    ):
        for name in ("write", "writev", "pwrite", "rename", "unlink"):
            watched(os, name)
        watched(pieces, "_fallocate")
        for number in range(24):
            store, chain = draw.choice((one, two)), make_frames(1000 * seed + number, draw.randrange(1, 24), payload)
            assert store.put(chain, deadline=soon())
            if draw.random() < 0.4:
                draw.choice((one, two)).delete(names_of(draw.sample(chain, 1)), deadline=soon())
            read(draw.choice((one, two)), chain)
        monkeypatch.undo()
        assert next(steps) > 100 and one.status().evictions + two.status().evictions > 20
        assert -size // 4 < most <= 0 and excess() <= 0


def test_an_index_is_made_from_pieces(tmp_path: Path) -> None:
    """Without its index a store finds the blocks of pieces by their tables, also while it makes a new one, and has the same
    blocks and bytes then. A piece that nobody can read is removed, and so is one whose writer was killed."""
    frames = make_frames(4, 32, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=60_000)) as store:
        store.put(frames, deadline=soon())
        store.delete(names_of(frames[20:22]), deadline=soon())
        found = store.status().blocks, store.status().bytes
    forget_index(tmp_path)
    folder = pieces_of(tmp_path)[0].parent
    (folder / ("0" * 15 + "1")).write_bytes(b"no piece")
    (folder / ("0" * 15 + "2.host-1-aaaaaaaaaaaa")).write_bytes(b"half")
    left = frames[:20] + frames[22:]
    with closing(DiskStore(tmp_path, 64 << 20)) as store:
        assert read(store, left) == whole(left)
        assert (store.status().blocks, store.status().bytes) == found
        assert store.lookup(names_of(frames), deadline=soon()) == 20
        assert not [path for path in pieces_of(tmp_path) if path.name.startswith("0" * 15)]
        assert store.erase(frames[0].header.layout, frames[0].header.root, deadline=soon()) == 30
    assert not pieces_of(tmp_path)


def test_an_erasure_finds_what_no_index_has(tmp_path: Path) -> None:
    """Blocks in pieces are erased, and their bytes with them, where the index has lost them, or has them in another place."""
    frames = make_frames(5, 8, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        [piece] = pieces_of(tmp_path)
        copy = piece.with_name("00000000000000ff")
        copy.write_bytes(piece.read_bytes())
        assert store.erase(b"", frames[0].header.root[:8], deadline=soon()) >= 8
        assert not pieces_of(tmp_path)
        assert (store.status().blocks, store.status().bytes) == (0, 0)


_DYING = """
import os, sys
from foreword.conformance import make_frames, soon
from foreword.store.disk import pieces
from foreword.store.disk.disk_store import DiskStore

store = DiskStore(sys.argv[1], 64 << 20, pieces=1 << 20)
store.put(make_frames(6, 4, 5000), deadline=soon())
step = sys.argv[2]
if step == "table":
    pieces.write = lambda handle, keys, frames: (os.write(handle, b"FWPIECE1" + bytes(100)), os._exit(9))
elif step == "rename":
    os.rename = lambda *names: os._exit(9)
elif step == "settle":
    store._writer._settle = lambda deadline: os._exit(9)
elif step == "entry":
    pieces._punch = lambda *more: os._exit(9)
    store.delete([one.name for one in make_frames(6, 4, 5000)[1:2]], deadline=soon())
store.put(make_frames(7, 9, 5000), deadline=soon())
"""


@pytest.mark.parametrize("step", ["table", "rename", "settle", "entry"])
@pytest.mark.parametrize("index", [True, False])
def test_a_writer_dies(tmp_path: Path, step: str, index: bool) -> None:
    """Wherever a process dies that writes a piece or removes a block, the next one has all or none of the blocks of the piece,
    counts what is there, and an erasure leaves no file."""
    done = subprocess.run([sys.executable, "-c", _DYING, str(tmp_path), step], check=False)
    assert done.returncode == 9
    if not index:
        forget_index(tmp_path)
    before, after = make_frames(6, 4, 5000), make_frames(7, 9, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        assert store.lookup(names_of(after), deadline=soon()) == (9 if step == "settle" else 0)
        first = read(store, before)
        assert [one for one in first if one] == [
            bytes(one.data) for one, there in zip(before, first, strict=True) if there
        ]
        assert sum(map(bool, first)) == 4 - (step == "entry")
        read(store, after)
        assert store.put(after, deadline=soon()) == 9 and read(store, after) == whole(after)
        assert store.status().bytes == sum(len(one.data) for one in after) + sum(map(len, filter(None, first)))
        store.erase(deadline=soon())
        assert not pieces_of(tmp_path) and store.status().blocks == 0


def test_a_damaged_key_leaves_no_bytes(tmp_path: Path) -> None:
    """A block whose key in the table of its piece is damaged is missing, and what was at its place is freed: the next
    put writes the block again, and the piece goes with its last block."""
    frames = make_frames(12, 4, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        [path] = pieces_of(tmp_path)
        data = bytearray(path.read_bytes())
        data[16 + 48] ^= 1
        path.write_bytes(data)
        assert read(store, frames)[1] is None
        assert bytes(frames[1].payload) not in path.read_bytes()
        assert store.put(frames, deadline=soon()) == 4 and read(store, frames) == whole(frames)
        assert store.status().bytes == sum(len(one.data) for one in frames)
        assert store.delete(names_of(frames), deadline=soon()) == 4 and not pieces_of(tmp_path)


def test_a_reader_never_has_half_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is removed between two reads of it is missing, not damaged."""
    frames = make_frames(8, 4, 70_000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        real, reads = os.readv, itertools.count()

        def removed_meanwhile(handle: int, buffers: Sequence[memoryview]) -> int:
            whole_block = len(buffers[0]) == len(frames[0].data)
            first = real(handle, [buffers[0][:30_000] if whole_block else buffers[0]])
            if next(reads) == 2:  # the first half of the second block
                store.delete(names_of(frames[1:2]), deadline=soon())
            return first

        monkeypatch.setattr("os.readv", removed_meanwhile)
        found = read(store, frames)
        assert found[1] is None
        assert [found[0], *found[2:]] == [bytes(one.data) for one in (frames[0], *frames[2:])]


def test_several_tenants_are_in_several_pieces(tmp_path: Path) -> None:
    """Blocks of two tenants that are put together never share a file."""
    one, two = make_frames(9, 4, 5000), make_frames(10, 4, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        assert store.put([*one, *two], deadline=soon()) == 8
        assert read(store, [*one, *two]) == whole([*one, *two])
    for path in pieces_of(tmp_path):
        data = path.read_bytes()
        assert sum(any(frame.header.key in data for frame in frames) for frames in (one, two)) <= 1 or (
            one[0].header.root == two[0].header.root
        )


def test_a_device_has_pieces_by_default(tmp_path: Path) -> None:
    """An engine whose KV is on a device writes pieces unless the URL says otherwise, and one on processors does not."""
    frames = make_frames(11, 4, 5000)
    for number, (device, more, files) in enumerate(
        [("cpu", "", 0), ("cuda", "", 1), ("cuda", "&pieces=0", 0), ("cpu", "&pieces=1MiB", 1)]
    ):
        folder = tmp_path / str(number)
        with closing(open_store([f"disk://{folder}?size=16MiB{more}"], device=device)) as store:
            assert store.put(frames, deadline=soon()) == 4
        assert len(pieces_of(folder)) == files


@pytest.mark.parametrize("size", [4 << 10, 16 << 10, 64 << 10])
def test_files_per_gib(tmp_path: Path, size: int) -> None:
    """Blocks of 4 KiB and more that come together in writes of 8 MiB are at most 256 files per GiB, with tables of any length,
    and each block can be read and removed by itself, in any order."""
    count, draw = min((8 << 20) // size, 1024), random.Random(size)
    frames = make_frames(13, count, size - HEADER_BYTES)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=8 << 20)) as store:
        assert store.put(frames, deadline=soon()) == count and read(store, frames) == whole(frames)
        assert len(pieces_of(tmp_path)) * (1 << 30) <= 256 * count * size
        left = frames[:]
        for number in range(40):
            one = left.pop(draw.randrange(len(left)) if number % 2 else -1)
            assert store.delete([one.name], deadline=soon()) == 1
        assert read(store, left) == whole(left) and not any(read(store, [one for one in frames if one not in left]))
        assert held(tmp_path) <= len(left) * size + len(pieces_of(tmp_path)) * (64 << 10)
        assert store.delete(names_of(left), deadline=soon()) == len(left) and not pieces_of(tmp_path)


def test_a_file_beside_a_piece_is_deleted_with_it(tmp_path: Path) -> None:
    """A block that has a file of its own beside its copy in a piece is gone when it is deleted or erased, for all stores."""
    frames = make_frames(14, 4, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        for one in frames[1:3]:
            alone(tmp_path, one).parent.mkdir(exist_ok=True)
            alone(tmp_path, one).write_bytes(one.data)
        assert store.delete(names_of(frames[1:2]), deadline=soon()) == 1
        assert not alone(tmp_path, frames[1]).exists()
        chosen = {frames[2].name}
        steps = [*store.erase_steps(frames[0].header.layout, frames[0].header.root, chosen=chosen, deadline=soon())]
        assert sum(one.removed for one in steps) == 1 and not alone(tmp_path, frames[2]).exists()
    with closing(DiskStore(tmp_path, 64 << 20)) as other:
        assert [one is not None for one in read(other, frames)] == [True, False, False, True]


def test_a_late_file_beside_a_piece_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process writes files of blocks, the index is lost, and another one puts the same blocks into a piece: the files,
    which the new index does not count, are removed."""
    frames, real, others = make_frames(15, 4, 5000), BlockFiles.write_many, list[DiskStore]()

    def meanwhile(files: BlockFiles, *given: object) -> int:
        monkeypatch.setattr(BlockFiles, "write_many", real)
        forget_index(tmp_path)
        others.append(DiskStore(tmp_path, 64 << 20, pieces=PIECE))
        assert others[0].put(frames, deadline=soon()) == 4
        return real(files, *given)  # type: ignore[arg-type]

    with closing(DiskStore(tmp_path, 64 << 20)) as store:
        monkeypatch.setattr(BlockFiles, "write_many", meanwhile)
        with suppress(StoreError):
            store.put(frames, deadline=soon())
        store.put(make_frames(16, 1, 5000), deadline=soon())
        with closing(others[0]) as other:
            assert not [one for one in frames if alone(tmp_path, one).exists()]
            assert read(other, frames) == read(store, frames) == whole(frames)


def test_a_piece_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece whose table the device cannot read costs its own blocks: the others are found, also without an index, a put
    writes them again, and an erasure leaves nothing."""
    good, bad = make_frames(17, 8, 5000), make_frames(18, 8, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(good, deadline=soon())
        [first] = pieces_of(tmp_path)
        store.put(bad, deadline=soon())
    [lost] = {*pieces_of(tmp_path)} - {first}
    forget_index(tmp_path)
    real = os.open

    def failing(path: str, *given: int, **more: int) -> int:
        if os.fspath(path) == str(lost):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *given, **more)

    monkeypatch.setattr("os.open", failing)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        assert read(store, good) == whole(good)
        assert store.put(bad, deadline=soon()) == 8 and read(store, bad) == whole(bad)
        assert store.status().blocks == 16
        assert store.erase(deadline=soon()) == 16 and not pieces_of(tmp_path)


def test_tables_are_read_once_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put while a scan adds files, which looks for its blocks in tables, reads each of them once, and so does a deletion
    of blocks that are not there: other processes wait for it."""
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        for seed in range(8):
            store.put(make_frames(100 + seed, 2, 500), deadline=soon())
        real, reads = pieces.entries, itertools.count()

        def counted(handle: int) -> list[pieces.PieceEntry]:
            next(reads)
            return real(handle)

        monkeypatch.setattr(pieces, "entries", counted)
        monkeypatch.setattr(IndexTransaction, "unlisted", lambda transaction: 1)
        assert store.put(make_frames(19, 16, 500), deadline=soon()) == 16
        assert next(reads) <= 8
        assert store.delete(names_of(make_frames(20, 16, 500)), deadline=soon()) == 0
        assert next(reads) <= 9 + 9


@pytest.mark.skipif(not Path("/proc/thread-self/io").exists(), reason="the system does not count bytes by thread")
def test_a_put_writes_each_page_of_the_index_once(tmp_path: Path) -> None:
    """A put writes its blocks and a page of the log for each of them, also with a large index, whose pages random ids change
    all over: no copy of pages to undo a statement. One put of four may empty the log."""

    def written() -> int:
        """Bytes that this thread has given to calls of the system that write."""
        fields = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
        return int(fields["wchar"])

    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        for seed in range(8):
            store.put(make_frames(200 + seed, 1024, 64), deadline=soon())
        counts = list[int]()
        for seed in range(4):
            before = written()
            assert store.put(make_frames(300 + seed, 64, 64), deadline=soon()) == 64
            counts.append(written() - before)
        page = 4096 + 24  # with its header in the log
        assert sorted(counts)[2] <= 64 * (HEADER_BYTES + 64) + (64 + 16) * page


def test_a_put_does_not_look_at_all_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put takes as many steps of SQLite with thousands of tenants in the index as with one, while there is room. A put that
    evicts counts them."""
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    class Counted(sqlite3.Connection):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.set_progress_handler(step, 1)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Counted))
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(make_frames(1, 8, 64), deadline=soon())
        counts = list[int]()
        for tenants in (0, 5_000):
            with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as other:
                rows = [(1 + one, 1, 0.0) for one in range(tenants)]
                other.execute("BEGIN IMMEDIATE")
                other.executemany("INSERT INTO tenants VALUES (?, ?, ?)", rows)
                other.execute("UPDATE totals SET bytes = bytes + ?", (tenants,))
                other.execute("COMMIT")
            steps[0] = 0
            assert store.put(make_frames(2 + tenants, 8, 64), deadline=soon()) == 8
            counts.append(steps[0])
        assert 0 < counts[1] < counts[0] + 500, counts


def test_no_byte_stays_below_a_damaged_entry(tmp_path: Path) -> None:
    """A deleted block is gone from the file although the length of the block before it is damaged, and covers it."""
    frames = make_frames(21, 4, 20_000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        [path] = pieces_of(tmp_path)
        data = bytearray(path.read_bytes())
        data[16 + 40 : 16 + 48] = (60_000).to_bytes(8, "little")
        path.write_bytes(data)
        assert store.delete(names_of(frames[1:2]), deadline=soon()) == 1
        assert bytes(frames[1].payload[4096:8192]) not in path.read_bytes()
        assert read(store, frames[3:]) == whole(frames[3:])


def test_an_erasure_ends_what_was_half_removed(tmp_path: Path) -> None:
    """A process was killed when it had removed the entry of a block, and not yet its bytes: an erasure that chooses the block
    removes them, although no table has it."""
    frames = make_frames(22, 4, 5000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        [path] = pieces_of(tmp_path)
        data = bytearray(path.read_bytes())
        data[16 + 48 : 16 + 96] = bytes(48)
        path.write_bytes(data)
        steps = store.erase_steps(frames[0].header.layout, chosen={frames[1].name}, deadline=soon())
        assert all(one.problem is None for one in steps)
        assert bytes(frames[1].payload) not in path.read_bytes()
        assert store.status().bytes == 3 * (5000 + HEADER_BYTES)


@pytest.mark.parametrize(("kept", "damaged"), [(1, False), (1, True), (5, False), (5, True), (8, False)])
def test_a_piece_that_is_cut_goes_with_its_last_block(tmp_path: Path, kept: int, damaged: bool) -> None:
    """After a loss of power a piece may end in the middle, and the index is made anew. The piece is removed with the last block
    that is whole, however the blocks go: one after the other from either end, or by chance. A damaged last entry is none."""
    for order in (list, reversed, lambda names: random.Random(1).sample(names, len(names))):
        frames, folder = make_frames(61, 8, 1000), tmp_path / order.__name__
        with closing(DiskStore(folder, 64 << 20, pieces=PIECE)) as store:
            store.put(frames, deadline=soon())
        [path] = pieces_of(folder)
        with path.open("rb") as piece:
            ends = [one.at + one.length for one in pieces.entries(piece.fileno())]
        os.truncate(path, ends[kept - 1] + (10 if kept < 8 else 0))
        if damaged:  # its offset and length are 0
            with path.open("r+b") as piece:
                os.pwrite(piece.fileno(), bytes(16), 16 + 7 * 48 + 32)
        forget_index(folder)
        with closing(DiskStore(folder, 64 << 20, pieces=PIECE)) as store:
            assert read(store, frames) == whole(frames[:kept]) + [None] * (8 - kept)
            for name in order(names_of(frames[:kept])):
                assert pieces_of(folder) == [path]
                assert store.delete([name], deadline=soon()) == 1
            assert not pieces_of(folder)


@pytest.mark.parametrize("field", [32, 40])
def test_an_entry_of_an_offset_that_no_file_has(tmp_path: Path, field: int) -> None:
    """A damaged entry of one block, with an offset or a length beyond what files can have, keeps no other block from being
    removed or stored again, and the block itself is stored again."""
    frames = make_frames(62, 8, 1000)
    with closing(DiskStore(tmp_path, 64 << 20, pieces=PIECE)) as store:
        store.put(frames, deadline=soon())
        [path] = pieces_of(tmp_path)
        data = bytearray(path.read_bytes())
        at = data.index(frames[3].header.key) + field
        data[at : at + 8] = (1 << 63).to_bytes(8, "little")
        path.write_bytes(data)
        assert store.delete(names_of(frames[2:3]), deadline=soon()) == 1
        assert store.delete(names_of(frames[5:6]), deadline=soon()) == 1
        assert read(store, frames[3:4]) == [None]
        assert store.put(frames, deadline=soon()) == 8
        assert read(store, frames) == whole(frames)
