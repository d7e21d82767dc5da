"""Erasure of tenants, models and prefixes: complete with gaps and without an index, and true about what it could not do."""

import ctypes
import errno
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import die_in_python, in_child

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import LayerLayout, Layout, key_of
from foreword.blocks.salt import TENANT_BYTES, Salt, tenant_digest
from foreword.conformance import FlakyStore, make_frames, present, put_all, soon
from foreword.errors import NotFound, StoreError
from foreword.prefixes.erasure import erase_prefixes, forget_chain, forget_model, forget_prefix, forget_tenant, sign
from foreword.prefixes.lease_records import PREFIXES, PrefixRecord
from foreword.store.base import Store
from foreword.store.disk import synced as disk_synced
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import Frame, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.object.object_store import ObjectStore
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore

ANN, BOB, SESSION = Salt(b"ann"), Salt(b"bob"), Salt.of(b"ann", "session")
MODEL = b"m" * 32
LAYOUT = Layout(MODEL, 16, (LayerLayout(1, 8, 8),), "bfloat16")
RECORD = f"layouts/{LAYOUT.fingerprint.hex()}"


def chain(salt: Salt, seed: int, count: int = 10, shared: int = 0) -> list[Frame]:
    """A chain of small blocks of a tenant; the first `shared` blocks are those of seed 0."""
    root = Scope(MODEL, 16, salt).root()
    tokens = [number // 16 if number < 16 * shared else seed * 1000 + number for number in range(16 * count)]
    keys = chain_keys(root, tokens, 16)
    return [
        frame(Header(LAYOUT.fingerprint, root[:16], key, before, depth, 0, 8, 8), bytes(8))
        for depth, (key, before) in enumerate(zip(keys, (root, *keys), strict=False))
    ]


def filled(folder: Path, tier: Store | None = None) -> tuple[TieredStore, list[Frame], list[Frame]]:
    """A folder, or this tier, behind memory, with two chains of ann, one of them with a salt, one of bob, and the record of the
    layout."""
    store = TieredStore([MemoryStore(1 << 20), tier or DiskStore(folder, 1 << 20)], [1])
    mine, theirs = [*chain(ANN, 1), *chain(SESSION, 2)], chain(BOB, 3)
    store.put(mine, deadline=soon())
    store.put(theirs, deadline=soon())
    store.put_record(RECORD, json.dumps({"model": "x", "layout": LAYOUT.describe()}).encode(), deadline=soon())
    return store, mine, theirs


def gap(store: TieredStore, mine: Sequence[Frame], *numbers: int) -> None:
    store.delete([mine[number].name for number in numbers], deadline=soon())


DAMAGE: dict[str, Callable[[TieredStore, Sequence[Frame]], object]] = {
    "whole": lambda store, mine: None,
    "no first block": lambda store, mine: gap(store, mine, 0),
    "gaps": lambda store, mine: gap(store, mine, 3, 5, 6, 10),
    "no records": lambda store, mine: store.delete_record(RECORD, deadline=soon()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_tenant_is_erased_completely(
    tmp_path: Path, damage: Callable[[TieredStore, Sequence[Frame]], object]
) -> None:
    """Nothing of a tenant is left in any tier, with gaps in its chains and without records, nor a folder that names it; other
    tenants keep everything."""
    store, mine, theirs = filled(tmp_path)
    for salt in (ANN, BOB):
        store.put_record(PREFIXES.key("0" * 32, salt.digest.hex(), "p"), b"private", deadline=soon())
    damage(store, mine)
    there = sum(present(store, mine))
    receipt = forget_tenant(store, ANN)
    assert (receipt.left, receipt.unreachable, receipt.complete) == (0, {}, True)
    assert receipt.removed == {"memory": there, "disk": there}
    assert not any(any(present(tier.store, mine)) for tier in store.tiers)
    assert all(all(present(tier.store, theirs)) for tier in store.tiers)
    names = " ".join(str(path) for path in tmp_path.rglob("*"))
    assert ANN.prefix.hex() not in names and BOB.prefix.hex() in names
    again = forget_tenant(store, ANN)
    assert (again.blocks, again.complete) == (0, True)
    store.close()


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_an_erasure_that_was_killed_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """A process that is killed with SIGKILL while it erases leaves blocks. The same call again removes the rest, the records,
    and nothing of others."""
    monkeypatch.setattr("foreword.store.disk.disk_store._SCAN_ROWS", 4)

    class Killed(DiskStore):
        def delete(self, names: Sequence[bytes], *, deadline: float) -> int:
            nonlocal batches
            batches -= 1
            return super().delete(names, deadline=deadline) if batches else os.kill(os.getpid(), signal.SIGKILL) or 0

    store, mine, theirs = filled(tmp_path)
    store.close()
    killed = in_child(lambda: forget_tenant(TieredStore([Killed(tmp_path, 1 << 20)]), ANN))
    assert killed == -signal.SIGKILL
    again = TieredStore([DiskStore(tmp_path, 1 << 20)])
    left = sum(present(again, mine))
    assert left >= 4
    receipt = forget_tenant(again, ANN)
    assert receipt.complete and receipt.removed == {"disk": left}
    assert not any(present(again, mine)) and all(present(again, theirs))
    assert forget_tenant(again, ANN).blocks == 0
    again.close()


def test_what_killed_writers_left_is_erased(tmp_path: Path) -> None:
    """A process is killed when a record and a block are not yet under their names, and evictions have left an empty folder. An
    erasure by a process that was open before leaves no path with the tenant's name."""
    store, _, theirs = filled(tmp_path)

    def killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            disk = DiskStore(tmp_path, 1 << 20)
            patch.setattr(os, "rename", lambda *_: None)
            disk.put_record(PREFIXES.key("0" * 32, ANN.digest.hex(), "p"), b"private", deadline=soon())
            die_in_python("rename", 0, after=False)
            disk.put(chain(ANN, 5), deadline=soon())

    assert in_child(killed) == -signal.SIGKILL
    (tmp_path / LAYOUT.fingerprint.hex() / Scope(MODEL, 16, ANN).root()[:16].hex() / "zz").mkdir()

    def incomplete() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if re.search(r"-\d+-[0-9a-f]{12}", path.name)]

    assert len([path for path in incomplete() if path.parent.name != "writers"]) == 2
    assert forget_tenant(store, ANN).complete
    assert not [path for path in incomplete() if path.parent.name != "writers"]
    assert not any(ANN.prefix.hex() in str(path) or ANN.digest.hex() in str(path) for path in tmp_path.rglob("*"))
    assert all(all(present(tier.store, theirs)) for tier in store.tiers)
    store.close()


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_an_erasure_of_a_folder_that_is_not_there(tmp_path: Path, kind: str) -> None:
    """While another folder stands in the place of a store's, or none, as where its disk is not mounted, an erasure says that it
    could not reach it; what it has is erased when it is back."""
    folder = tmp_path / "kv"
    store, mine, theirs = filled(folder, None if kind == "disk" else ObjectStore(f"file://{folder}"))
    for stand_in in (False, True):
        (tmp_path / "kv").rename(tmp_path / "away")
        if stand_in:
            (tmp_path / "kv").mkdir()
        receipt = forget_tenant(store, ANN)
        assert not receipt.complete and kind in receipt.unreachable
        if stand_in:
            shutil.rmtree(tmp_path / "kv")
        (tmp_path / "away").rename(tmp_path / "kv")
    receipt = forget_tenant(store, ANN)
    assert receipt.complete and receipt.removed == {"memory": 0, kind: len(mine)}
    assert all(all(present(tier.store, theirs)) for tier in store.tiers)
    store.close()


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_an_erasure_of_a_folder_that_was_made_anew(tmp_path: Path, kind: str) -> None:
    """A folder is moved away, and a write makes it again: what is there is erased, and the receipt says that it is another
    one."""
    folder = tmp_path / "kv"
    store, mine, theirs = filled(folder, None if kind == "disk" else ObjectStore(f"file://{folder}"))
    folder.rename(tmp_path / "away")
    for _ in range(2):  # the first one may find out that the folder is gone
        store.put([*mine, *theirs], deadline=soon())
    receipt = forget_tenant(store, ANN)
    assert not receipt.complete and "not the folder" in receipt.unreachable[kind]
    assert receipt.removed[kind] == len(mine) and not any(present(store.tiers[1].store, mine))
    assert all(present(store.tiers[1].store, theirs))
    store.close()


def test_an_erasure_needs_no_index(tmp_path: Path) -> None:
    """Blocks whose rows the index of a folder has lost are erased."""
    store, mine, theirs = filled(tmp_path / "one")
    empty = DiskStore(tmp_path / "two", 1 << 20)
    empty.close()
    shutil.copytree(tmp_path / "one" / LAYOUT.fingerprint.hex(), tmp_path / "two" / LAYOUT.fingerprint.hex())
    store.close()
    lost = TieredStore([DiskStore(tmp_path / "two", 1 << 20)])
    assert sum(present(lost, mine)) == 0, "the index does not know them"
    assert forget_tenant(lost, ANN).removed == {"disk": len(mine)}
    files = [path for path in (tmp_path / "two").rglob("*") if path.is_file() and len(path.name) == 64]
    assert sorted(path.name for path in files) == sorted(one.header.key.hex() for one in theirs)
    lost.close()


def test_a_tier_that_fails_is_in_the_receipt(tmp_path: Path) -> None:
    """A tier that fails is named in the receipt, which is then not complete; the other tiers are erased; a repetition after
    the failure completes the erasure."""
    disk, memory = FlakyStore(DiskStore(tmp_path, 1 << 20)), MemoryStore(1 << 20)
    store, mine = TieredStore([memory, disk], [1]), chain(ANN, 1)
    store.put(mine, deadline=soon())
    disk.inject("fail")
    receipt = forget_tenant(store, ANN)
    assert not receipt.complete and "disk" in receipt.unreachable
    assert not any(present(memory, mine))
    disk.inject("fail", 0.0)
    assert forget_tenant(store, ANN).removed == {"memory": 0, "disk": 10}
    store.close()


def test_a_model_without_a_description_is_unknown(tmp_path: Path) -> None:
    """Erasing a model counts the blocks whose model the store does not know: the receipt is not complete."""
    store, mine, theirs = filled(tmp_path)
    other = Layout(b"n" * 32, 16, LAYOUT.layers, "bfloat16")
    root = Scope(b"n" * 32, 16).root()
    unknown = frame(Header(other.fingerprint, root[:16], bytes(32), root, 0, 0, 8, 8), bytes(8))
    store.put([unknown], deadline=soon())
    receipt = forget_model(store, "x")
    assert receipt.removed["disk"] == len([*mine, *theirs]) and receipt.unknown_blocks == 2 and not receipt.complete
    assert present(store, [unknown]) == [True]
    with pytest.raises(NotFound):
        forget_model(store, "y")
    store.close()


def named(store: TieredStore, last: Frame, salt: bytes) -> None:
    facts: dict[str, Any] = {"name": "p", "version": 1, "kind": "text", "content": "some text", "model": "x"}
    record = PrefixRecord(0, 16, **facts, created=time.time(), last_key=last.header.key.hex())
    SharedRecords(store, PREFIXES).put(PREFIXES.key(MODEL.hex()[:32], tenant_digest(salt), "p"), record)


def test_a_prefix_is_erased_with_what_continues_it(tmp_path: Path) -> None:
    """A whole chain: the prefix, what continues it and what may continue it behind a gap are erased; what other chains share
    or have, stays."""
    store = TieredStore([DiskStore(tmp_path, 1 << 20)])
    mine, other, bobs = chain(ANN, 1, 12, shared=2), chain(ANN, 2, 5, shared=2), chain(BOB, 1, 6)
    for frames in (mine, other, bobs):
        store.put(frames, deadline=soon())
    named(store, mine[5], b"ann")
    store.delete([mine[8].name], deadline=soon())
    receipt = forget_prefix(store, "p")
    assert receipt.complete and not receipt.widened and len(receipt.records) == 1
    assert not any(present(store, mine[2:]))
    assert all(present(store, other)) and all(present(store, bobs))
    store.close()


@pytest.mark.parametrize("lost", [0, 3, 5])
def test_a_prefix_whose_chain_has_a_gap(tmp_path: Path, lost: int) -> None:
    """If it cannot be told which blocks belong to the prefix, all of its tenant are erased, and the receipt says so."""
    store, mine, theirs = filled(tmp_path)
    named(store, mine[5], b"ann")
    store.delete([mine[lost].name], deadline=soon())
    receipt = forget_prefix(store, "p", b"ann")
    assert receipt.complete and receipt.widened
    assert not any(present(store, mine)) and all(present(store, theirs))
    store.close()


def test_a_receipt_is_signed(tmp_path: Path) -> None:
    """A receipt has the signature of the secret, and no other content or secret has the same."""
    store, _, _ = filled(tmp_path)
    plain = forget_tenant(store, ANN).plain("a long random text")
    store.close()
    assert plain["signature"] == sign(plain, "a long random text")
    assert plain["signature"] != sign({**plain, "left": 1}, "a long random text")
    assert plain["signature"] != sign(plain, "another")
    assert plain["what"] == f"tenant {tenant_digest(b'ann')}" and json.loads(json.dumps(plain)) == plain


def test_a_damaged_record_costs_only_its_prefix(tmp_path: Path) -> None:
    """A record that is damaged, of another name, or has absurd numbers is skipped; the others of the tenant are found."""
    store, mine, _ = filled(tmp_path)
    named(store, mine[5], b"ann")
    records = SharedRecords(store, PREFIXES)
    [key] = store.records("prefixes/", deadline=soon())
    intact = store.get_record(key, deadline=soon()) or b""
    good = json.loads(intact)
    other = key.removesuffix("/p") + "/other"
    assert [one.name for one in records.scan().values.values()] == ["p"]
    changes: list[dict[str, object]] = [
        {"name": 7}, {"version": 10**30}, {"version": True}, {"version": 0}, {"created": "x"}, {"created": 1e300},
        {"created": math.nan}, {"last_key": "zz"}, {"num_tokens": -1}, {"content": None}, {"kind": "messages"}, {"model": 3},
    ]  # fmt: skip
    good = {field: value for field, value in good.items() if field != "checksum"} | {"format": 1}  # of version 0.1
    bad = [json.dumps(good | {"name": "other"} | change).encode() for change in changes]
    for data in (json.dumps(good).encode(), b"[" * 100_000, b"", b"[]", b"\xff", *bad):
        store.put_record(other, data, deadline=soon())
        assert [one.name for one in records.scan().values.values()] == ["p"], data[:300]
    store.put_record(other, json.dumps(good | {"name": "other"}).encode(), deadline=soon())
    assert sorted(one.name for one in records.scan().values.values()) == ["other", "p"]
    before = records.get(key)
    for bit in range(0, 8 * len(intact), 5):
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        store.put_record(key, bytes(flipped), deadline=soon())
        assert records.get(key) in (None, before), flipped
    store.close()


def test_blocks_of_format_1_are_dropped(tmp_path: Path) -> None:
    """A folder of format 1 is opened as an empty one: its files are removed and its records stay."""
    old = tmp_path / LAYOUT.fingerprint.hex() / "ab" / ("ab" * 32)
    old.parent.mkdir(parents=True)
    old.write_bytes((Path(__file__).parent / "golden" / "frame.bin").read_bytes())
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.executescript("CREATE TABLE blocks (id INTEGER); PRAGMA user_version = 1;")
    index.close()
    store = DiskStore(tmp_path, 1 << 20)
    deadline = time.monotonic() + 60
    while old.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not old.exists() and store.put(chain(ANN, 1), deadline=soon()) == 10
    store.close()


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the files and folders that are synced from now on."""
    paths = list[str]()
    monkeypatch.setattr(os, "fsync", lambda handle: paths.append(os.readlink(f"/proc/self/fd/{handle}")))
    return paths


def test_all_pieces_of_a_root_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides which pieces are synced: one whose change has an old time, since a clock was set forward between the
    deletion and the sync, or was behind when it was made, stays without its block, too. Another root's pieces are left."""
    store = DiskStore(str(tmp_path), 1 << 20, pieces=8 << 10)
    frames = make_frames(1, 12, 1000)
    others = make_frames(2, 4, 1000, root=bytes(range(16)))
    for batch in (frames[:4], frames[4:8], frames[8:], others):
        put_all(store, batch)
    header = frames[0].header
    pieces = {str(one) for one in (tmp_path / header.layout.hex() / header.root.hex() / "pieces").iterdir()}
    assert len(pieces) == 3
    store.delete([frames[0].name], deadline=soon())
    for one in pieces:
        os.utime(one, (1, 1))
    paths = synced(monkeypatch)
    list(store.sync_deletions([(header.layout, header.root)], deadline=soon()))
    assert {path for path in paths if "/pieces/" in path} == pieces
    assert {str(Path(one).parent) for one in pieces} | {str(tmp_path)} <= set(paths)
    store.close()


@pytest.mark.parametrize("answer", [0, -1, None])
def test_many_pieces_are_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int | None) -> None:
    """The sync of many pieces of a root is one of their file system, where that succeeds; else each is synced."""
    asked, library = list[str](), SimpleNamespace()
    if answer is not None:  # else the system has no such call
        library.syncfs = lambda handle: asked.append(os.readlink(f"/proc/self/fd/{handle}")) or answer
    store = DiskStore(str(tmp_path), 1 << 20, pieces=8 << 10)
    frames = make_frames(1, 12, 1000)
    for batch in (frames[:4], frames[4:8], frames[8:]):
        put_all(store, batch)
    monkeypatch.setattr(disk_synced, "_MOST_PIECES", 2)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    header, paths = frames[0].header, synced(monkeypatch)
    list(store.sync_deletions([(header.layout, header.root)], deadline=soon()))
    folder = str(tmp_path / header.layout.hex() / header.root.hex() / "pieces")
    assert asked == [folder] * (answer is not None)
    assert sum("/pieces/" in path for path in paths) == (0 if answer == 0 else 3) and folder in paths
    store.close()


def test_records_are_synced_where_an_erasure_removes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The erasure of several tenants syncs each folder of records once; that of a chain, which has no records, none."""
    store = TieredStore([DiskStore(str(tmp_path), 1 << 20)])
    frames = make_frames(1, 2, 1000)
    put_all(store.tiers[0].store, frames)
    roots = [frames[0].header.root, bytes(range(16))]
    for root in roots:
        store.put_record(f"retained/{'0' * 32}/{root.hex()}/one", b"private", deadline=soon())
    paths = synced(monkeypatch)
    assert forget_chain(store, roots[0], key_of(frames[0].name), 0).complete
    assert paths and not [path for path in paths if "/records" in path]
    paths.clear()
    assert erase_prefixes(store, [root[:TENANT_BYTES] for root in roots], "all").complete
    found = Counter(path for path in paths if "/records" in path)
    assert found and set(found.values()) == {1}
    store.close()


def test_all_tiers_sync_what_they_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a tier that keeps no records stay deleted after a loss of power, too."""
    store = TieredStore([DiskStore(str(tmp_path / name), 1 << 20) for name in "ab"], persistent=[1])
    assert store.record_tiers == store.tiers[1:]
    frames = make_frames(1, 2, 1000)
    for tier in store.tiers:
        put_all(tier.store, frames)
    paths = synced(monkeypatch)
    assert erase_prefixes(store, [frames[0].header.root[:TENANT_BYTES]], "all").complete
    assert {str(tmp_path / name) for name in "ab"} <= set(paths)
    store.close()


@pytest.mark.parametrize("wrong", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_key_store_does_without_no_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Where folders cannot be synced, a store that promises each record refuses to put one. Other stores put it."""
    fsync = os.fsync

    def only_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(wrong, "folders are not synced")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    keys, other = (DiskStore(str(tmp_path / name), 1 << 20, sync_records=name == "keys") for name in ("keys", "other"))
    with pytest.raises(StoreError):
        keys.put_record("keys/a", b"key", deadline=soon())
    other.put_record("erasures/a", b"note", deadline=soon())
    assert other.get_record("erasures/a", deadline=soon()) == b"note"
    keys.close()
    other.close()
