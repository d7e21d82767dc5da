"""Records that instances share: one contract for every kind of them."""

from __future__ import annotations

import ast
import importlib
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from products import ROOT

from foreword.blocks.salt import Salt
from foreword.conformance import FlakyStore, soon
from foreword.errors import BadRecord, StoreConfigError, StoreError, StoreReadOnly
from foreword.prefixes.erasure import forget_tenant
from foreword.prefixes.lease_records import remove_expired
from foreword.store import shared_records
from foreword.store.base import record_tenant
from foreword.store.data_keys import DataKeys
from foreword.store.disk.disk_store import DiskStore
from foreword.store.machine import clock_id
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import IntegritySecret, KeyRing
from foreword.store.shared_records import RecordKind, SharedRecords
from foreword.store.tiered import TieredStore
from foreword.store_config import EncryptionConfig

ANN, BOB = Salt(b"ann"), Salt(b"bob")
TENANT = ANN.digest.hex()
KEY = bytes(range(32))
SCOPE = "ab" * 16
LAYOUT = {"model": KEY.hex(), "block_size": 16, "dtype": "bfloat16", "layers": [[1, 8, 8]]}
SAMPLE = {"shape": [1, 2], "tolerance": 0.01, "open": False, "values": "AACAPwAAAEA="}
NAMESPACE: dict[str, Any] = {
    "namespace": KEY.hex(), "vllm": "0.32.0", "settings": "ef" * 32, "resolved": {"a": "1"}, "measured": {"x": SAMPLE},
    "started": 1.0, "format": 1,
}  # fmt: skip
RETAINED = {
    "num_tokens": 16,
    "block_size": 16,
    "priority": 1,
    "root": KEY.hex(),
    "keys": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
}
# As version 0.1 wrote them: the parts of a record key, and the fields. Times are filled in by `sample`.
BEFORE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "layouts": (("cd" * 16,), {"model": "x", "fingerprint": KEY.hex(), "layout": LAYOUT, "kind": "window", "span": 32}),
    "erasures": (("12" * 12,), {"prefixes": ["34" * 12, "56" * 16], "what": "tenant x", "tiers": ["disk"]}),
    "quarantine": ((SCOPE, TENANT, KEY.hex()), {"root": KEY.hex(), "key": KEY.hex(), "source": "disk", "until": None}),
    "retained": ((SCOPE, TENANT, KEY.hex()), {**RETAINED, "format": 2, "ttl": 60.0, "expires": None}),
    "prefixes": (
        (SCOPE, TENANT, "rules"),
        {"name": "rules", "version": 3, "kind": "text", "content": "ä", "created": 1.0, "num_tokens": 5, "block_size": 16,
         "model": "x", "last_key": "ab", "format": 1},
    ),
    "namespaces": ((SCOPE, "ef-ab-cd-01"), NAMESPACE),
    "encoders": ((SCOPE, KEY.hex()), {"model": KEY.hex()}),
}  # fmt: skip
ENDS = {"quarantine": "until", "retained": "expires"}
LASTS = {"quarantine": 3600.0, "retained": 60.0}  # seconds


def all_kinds() -> dict[str, RecordKind[Any]]:
    """The kinds that modules of the package define."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if "RecordKind(" in (source := path.read_text(encoding="utf-8")):
            module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
            for node in ast.parse(source).body:
                if isinstance(node, ast.AnnAssign) and "RecordKind(" in ast.unparse(node.value or node):
                    assert isinstance(node.target, ast.Name)
                    kind = getattr(module, node.target.id)
                    found[kind.folder] = kind
    return found


KINDS = all_kinds()


def before(name: str, seconds: float = 60.0) -> tuple[str, bytes]:
    """A record of this kind as version 0.1 wrote it: its key and its data. It counts for `seconds`, if it has an end."""
    parts, fields = BEFORE[name]
    fields = fields | ({ENDS[name]: time.time() + seconds} if name in ENDS else {})
    return KINDS[name].key(*parts), json.dumps(fields).encode()


def sample(name: str, seconds: float = 60.0) -> tuple[str, Any]:
    """A record of this kind: its key, and what it says."""
    key, data = before(name, seconds)
    return key, KINDS[name].decode(key, data)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def disk(stack: ExitStack, folder: Path) -> DiskStore:
    return stack.enter_context(closing(DiskStore(folder, 8 << 20)))


every_kind = pytest.mark.parametrize("name", KINDS)


def test_all_kinds_are_tested() -> None:
    """Each kind of the package has a sample here."""
    assert KINDS.keys() == BEFORE.keys()


@every_kind
def test_a_tenant_is_named_or_not(name: str) -> None:
    """A kind whose records belong to tenants makes no key without one, and the other way round."""
    kind, (parts, _) = KINDS[name], BEFORE[name]
    assert bool(record_tenant(kind.key(*parts))) == kind.of_tenants == (TENANT in parts)
    with pytest.raises(StoreConfigError, match=name):
        kind.key(SCOPE, TENANT if not kind.of_tenants else "tenant", "name")


@every_kind
def test_what_was_written_before_is_read(name: str) -> None:
    """A record of version 0.1 is read; a new one has a checksum, says the same, and has all fields of the old one."""
    key, data = before(name)
    value = KINDS[name].decode(key, data)
    again = json.loads(KINDS[name].encode(value))
    assert KINDS[name].decode(key, KINDS[name].encode(value)) == value and "checksum" in again
    assert again | json.loads(data) | {"checksum": 0} == again | {"checksum": 0}


@every_kind
def test_instances_adopt_what_others_write(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """A record that one instance writes another finds and reads once; one that it removes another misses, unless it was just
    written there."""
    here, there = (SharedRecords(TieredStore([disk(stack, tmp_path)]), KINDS[name]) for _ in range(2))
    key, value = sample(name)
    here.put(key, value)
    found = there.scan()
    assert (found.values, found.expired, found.keys) == ({key: value}, {}, {key})
    assert there.get(key) == value
    assert there.scan(known=found.keys).values == {}
    assert here.remove(key) and not here.remove(key)
    assert there.scan().keys == set() == here.scan().keys and there.get(key) is None


@every_kind
def test_a_listing_that_lags_behind(
    name: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that was written here is not taken for removed because a listing does not have it yet; later it is."""
    store = disk(stack, tmp_path)
    records = SharedRecords(TieredStore([store]), KINDS[name])
    key, value = sample(name)
    records.put(key, value)
    monkeypatch.setattr(store, "records", lambda prefix, *, deadline: [])
    assert records.scan().keys == {key}
    monkeypatch.setattr(shared_records, "_SETTLED_SECONDS", -1.0)
    assert records.scan().keys == set()


@every_kind
def test_damage_costs_one_record(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A record with a flipped bit, cut short or under another name says nothing wrong: it is the old one or none. It is counted
    and logged once, is not deleted, and the sound copy of another tier is used."""
    draw = random.Random(7)
    store = MemoryStore(1 << 20, label="disk")
    tiers = TieredStore([store])
    records = SharedRecords(tiers, KINDS[name])
    key, value = sample(name)
    good = KINDS[name].encode(value)
    flipped = [bytearray(good) for _ in range(200)]
    for one in flipped:
        one[draw.randrange(len(one))] ^= 1 << draw.randrange(8)
    for data in (*flipped, good[:-2], b"", b"[]", b"{}", b"5", b"\xff", b"[" * 100_000, b"{" + b'"a":{' * 50_000):
        store.put_record(key, bytes(data), deadline=soon())
        assert records.get(key) in (None, value), data[:300]
    assert records.get(key) is None and records.scan().values == {} and records.scan().keys == {key}
    assert tiers.tiers[0].counters.errors == {"bad_record": 1}
    assert [one.getMessage() for one in caplog.records] == [f"disk: the record {key} is damaged, and is not used"]
    assert store.records("", deadline=soon()) == [key]
    sound = MemoryStore(1 << 20)
    sound.put_record(key, good, deadline=soon())
    both = SharedRecords(TieredStore([sound, store]), KINDS[name])
    assert both.get(key) == value and both.scan().values == {key: value}
    if KINDS[name].name(value) is not None:
        with pytest.raises(BadRecord):
            KINDS[name].decode(key + "0", good)


@every_kind
def test_what_cannot_be_read_stays(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """A store that fails differs from one that has no record: nothing counts as gone, nothing is deleted."""
    flaky = FlakyStore(disk(stack, tmp_path))
    records = SharedRecords(TieredStore([MemoryStore(1 << 20), flaky]), KINDS[name])
    key, value = sample(name, -60.0)
    if name in ENDS:  # it has an end, and its time is over
        value = msgspec.structs.replace(value, clock=clock_id(), ends_at=time.monotonic() - 1.0)
    records.put(key, value)
    SharedRecords(TieredStore([records._store.tiers[0].store]), KINDS[name]).remove(key)
    for call in (records.scan, lambda: records.get(key), lambda: remove_expired(records, key)):
        flaky.fail_next()
        with pytest.raises(StoreError):
            call()
    failed: list[str] = []
    flaky.fail_next()
    found = records.scan(failed=lambda tier, error: failed.append(tier.label))
    assert found.values == {} and failed == ["disk"]
    flaky.inject("fail")
    for _ in range(20):
        records.scan(failed=lambda tier, error: None)
    flaky.inject("fail", 0.0)
    assert records._store.tiers[1].breaker.closed, "a listing that fails says nothing of blocks"
    assert flaky.inner.records("", deadline=soon()) == [key]


@every_kind
def test_one_record_that_cannot_be_read(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """Costs only itself, and is known to be there."""
    store = disk(stack, tmp_path)
    records = SharedRecords(TieredStore([store]), KINDS[name])
    key, value = sample(name)
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    records.put(key, value)
    path = (
        tmp_path / "records" / "/".join([*(part + "=" for part in other.split("/")[:-1]), other.split("/")[-1] + "~"])
    )
    path.mkdir()
    store.records = lambda prefix, *, deadline: [key, other]  # type: ignore[method-assign]
    unread: list[str] = []
    found = records.scan(unread=lambda tier, error: unread.append(tier.label))
    assert (found.values, found.keys, unread) == ({key: value}, {key, other}, ["disk"])
    with pytest.raises(StoreError):
        records.get(other)


@pytest.mark.parametrize("name", ENDS)
def test_an_end(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """A record whose time is over is not adopted, and the instance that ends it deletes it; one that was renewed stays."""
    records = SharedRecords(TieredStore([disk(stack, tmp_path)]), KINDS[name])
    key, renewed = sample(name)
    value = msgspec.structs.replace(renewed, clock=clock_id(), ends_at=time.monotonic() - 1.0)
    records.put(key, value)
    found = records.scan()
    assert (found.values, found.expired) == ({}, {key: value})
    records.put(key, renewed)
    assert remove_expired(records, key) == renewed and records.get(key) == renewed
    records.put(key, value)
    assert remove_expired(records, key) is None and records.get(key) is None and remove_expired(records, key) is None


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("clock", ["", "another machine"])
@pytest.mark.parametrize("wall", [-86_400.0, 7200.0, 365 * 86_400.0])
def test_only_time_that_was_seen_ends_what_others_wrote(
    name: str, clock: str, wall: float, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of another machine, or of an earlier build, counts in each process for its whole time from when that process
    first saw it, whatever the wall clocks say. Then who has seen it for so long ends it. A renewal counts anew."""
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    monkeypatch.setattr(time, "time", lambda: real() + wall)
    here, there = (SharedRecords(TieredStore([disk(stack, tmp_path)]), KINDS[name]) for _ in range(2))
    key, value = sample(name)
    value = msgspec.structs.replace(value, clock=clock, ends_at=5.0)
    here.put(key, value)
    assert here.scan().values == {key: value}
    passed[0] += 0.75 * LASTS[name]
    assert there.scan().values == {key: value} and 0 < here.left(key, value) <= 0.25 * LASTS[name] + 1
    passed[0] += 0.5 * LASTS[name]
    assert there.scan().values == {key: value} == here.scan().expired, "each has its own count"
    assert remove_expired(there, key) == value, "seen there for half of its time"
    renewed = msgspec.structs.replace(value, ends_at=6.0)
    there.put(key, renewed)
    assert remove_expired(here, key) == renewed and here.scan().values == {key: renewed}
    passed[0] += 1.25 * LASTS[name]
    assert remove_expired(here, key) is None and there.scan().keys == set()


def test_no_end() -> None:
    """Other kinds have no end."""
    for name in KINDS.keys() - ENDS.keys():
        assert KINDS[name].lasts(sample(name)[1]) == math.inf


@every_kind
def test_a_tenant_is_forgotten(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """An erasure of the tenant removes the tenant's records, of whatever kind, and leaves all others."""
    store = TieredStore([disk(stack, tmp_path)])
    records = SharedRecords(store, KINDS[name])
    key, value = sample(name)
    records.put(key, value)
    assert forget_tenant(store, BOB).records == [] and records.get(key) == value
    assert forget_tenant(store, ANN).records == ([key] if KINDS[name].of_tenants else [])
    assert (records.get(key) is None) == KINDS[name].of_tenants


@every_kind
def test_encryption(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """A record is encrypted with the data key of its tenant. Once that is destroyed it is not read, not written and not taken
    for removed."""
    pytest.importorskip("cryptography")
    config = EncryptionConfig(key_store=str(tmp_path / "keys"), master_keys=(f"test:{'5a' * 32}",))
    keys = stack.enter_context(closing(DataKeys(config)))
    inner = disk(stack, tmp_path / "kv")
    records = SharedRecords(TieredStore([KeyRing(data=keys).sealed(inner)]), KINDS[name])
    key, value = sample(name)
    records.put(key, value)
    assert records.get(key) == value
    stored = inner.get_record(key, deadline=soon())
    assert stored is not None and all(part.encode() not in stored for part in msgspec.to_builtins(value))
    keys.destroy(bytes.fromhex(TENANT)[:12])
    if not KINDS[name].of_tenants:
        assert records.get(key) == value
        return
    assert records.get(key) is None and records.scan().values == {} and records.scan().keys == {key}
    with pytest.raises(StoreReadOnly):
        records.put(key, value)


@every_kind
def test_secrets(name: str, stack: ExitStack, tmp_path: Path) -> None:
    """A record that was planted or moved is not used where there is a secret."""
    pytest.importorskip("cryptography")
    inner = disk(stack, tmp_path)
    records = SharedRecords(TieredStore([KeyRing([IntegritySecret(1, "a secret")]).sealed(inner)]), KINDS[name])
    key, value = sample(name)
    records.put(key, value)
    assert records.get(key) == value
    inner.put_record(key + "0", inner.get_record(key, deadline=soon()) or b"", deadline=soon())
    assert records.get(key + "0") is None
    inner.put_record(key, KINDS[name].encode(value), deadline=soon())
    assert records.get(key) is None
