"""Encrypted frames and records, the keys of tenants, and what is left once a tenant's keys are destroyed."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from processes import in_child
from servers import RedisServer, S3Server

from foreword.blocks.layout import LayerLayout, Layout, tenant_of
from foreword.blocks.salt import Salt, ungenerated
from foreword.config import read_text
from foreword.conformance import FlakyStore, StoreContract, make_frames, names_of, read, soon, whole
from foreword.errors import BadFrame, ConfigError, StoreError, StoreReadOnly
from foreword.prefixes.erasure import KEY_STORE, PlaceOutcome, forget_tenant
from foreword.store import data_keys, master_keys
from foreword.store.base import FOREIGN, Store
from foreword.store.data_keys import SHARED, DataKey, DataKeys, data_keys_of, with_generation
from foreword.store.disk.disk_store import DiskStore
from foreword.store.engine_store import EngineStore
from foreword.store.frame import ENCRYPTED, HEADER_BYTES, RAW, Frame, Header, check, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import IntegritySecret, KeyRing, SealedStore, _encrypted
from foreword.store.store_keys import keys_from_environment
from foreword.store.tier_counters import TierState
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store_config import EncryptionConfig
from foreword.transfer.checks import check_stores_and_peers
from foreword.transfer_config import TransferConfig

OLD, NEW = f"old:{'11' * 32}", f"new:{'22' * 32}"
FRAMES = make_frames(1, 12, 3000)
TENANT = tenant_of(FRAMES[0].name)
RECORD = f"prefixes/{'0' * 32}/{TENANT.hex()}{'0' * 8}/name"
TEXT = b"the private text of a tenant"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def config(folder: Path, *masters: str, **more: float) -> EncryptionConfig:
    return EncryptionConfig(key_store=str(folder / "keys"), master_keys=masters or (OLD,), **more)  # type: ignore[arg-type]


def keys_in(stack: ExitStack, folder: Path, *masters: str, **more: float) -> DataKeys:
    """The data keys of one server."""
    return stack.enter_context(closing(DataKeys(config(folder, *masters, **more))))


def sealed(store: Store, keys: DataKeys, *, read_plain: bool = False) -> TieredStore:
    return TieredStore([KeyRing(data=keys, read_plain=read_plain).sealed(store)])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no key store that hangs."""
    monkeypatch.setattr(data_keys, "_CALL_SECONDS", 60.0)


class TestContract(StoreContract):
    """An encrypted store fulfills the contract."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        inner = MemoryStore(64 << 20, slot_bytes=(64 << 10) + HEADER_BYTES)
        with closing(DataKeys(config(tmp_path))) as keys:
            yield SealedStore(inner, KeyRing(data=keys))
        inner.close()


# The format


def test_vectors(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors of dev/formats.md: a data key's record, a frame and a record."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    monkeypatch.setattr(data_keys.secrets, "randbelow", lambda count: 7)  # type: ignore[attr-defined]
    monkeypatch.setattr(data_keys.time, "time", lambda: 1.5)  # type: ignore[attr-defined]
    keys = keys_in(stack, tmp_path, "m:" + "00" * 32)
    page = (Path(__file__).parents[2] / "dev/formats.md").read_text(encoding="utf-8")
    tenant = b"tenant" + bytes(6)
    one = frame(Header(b"l" * 16, tenant + b"salt", b"k" * 32, b"p" * 32, 3, RAW, 16, 16), b"sixteen bytes...")
    inner = MemoryStore(1 << 20)
    store = SealedStore(inner, KeyRing(data=keys))
    store.put([one], deadline=soon())
    store.put_record("layouts/x", b"{}", deadline=soon())
    [stored] = read(inner, [one])
    written = inner.get_record("layouts/x", deadline=soon())
    assert stored is not None and written is not None
    key = (tmp_path / "keys" / "records" / _files(tenant) / "80000007~").read_text()
    for vector in (key, stored.hex(), written.hex()):
        assert f"`{vector}`" in page, vector
    inner.close()


def _files(tenant: bytes) -> str:
    return f"{tenant[:6].hex()}=/{tenant[6:].hex()}="


def test_altered_bytes_are_damage(tmp_path: Path, stack: ExitStack) -> None:
    """A frame with any altered bit is no frame, and none that another reader may have, unless its key id is."""
    keys = keys_in(stack, tmp_path)
    [one] = make_frames(3, 1, 40)
    key = keys.sealing(TENANT)
    assert key is not None
    good = bytes(_encrypted(one, key).data)
    for place in range(len(good)):
        for bit in (0, 7):
            inner = MemoryStore(1 << 14)
            changed = bytearray(good)
            changed[place] ^= 1 << bit
            inner.put([Frame(one.header, memoryview(changed))], deadline=soon())
            buffer = memoryview(bytearray(len(good)))
            [length] = SealedStore(inner, KeyRing(data=keys)).get([one.name], [buffer], deadline=soon())
            id_changed = 40 + 128 <= place < 40 + 132
            assert length == (FOREIGN if id_changed else len(good)) or (place == 40 + 131 and length == len(good))
            if length > 0:
                with pytest.raises(BadFrame):
                    check(buffer, one.name, authenticated=True)
            inner.close()


def test_equal_blocks_differ(tmp_path: Path, stack: ExitStack) -> None:
    """A block is never the same bytes twice, and tells nothing by its checksum."""
    key = keys_in(stack, tmp_path).sealing(TENANT)
    assert key is not None
    first, second = (bytes(_encrypted(FRAMES[0], key).data) for _ in range(2))
    end = len(first) - HEADER_BYTES
    assert first[:end] != second[:end] and first[-32:-16] != second[-32:-16] != bytes(FRAMES[0].data)[-32:-16]
    assert first[end : end + 128] == second[end : end + 128] == bytes(FRAMES[0].data)[end : end + 128]


# A copy that outlives its key


@pytest.mark.parametrize("kind", ["disk", "redis", "s3"])
def test_a_copy_is_unreadable(kind: str, tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest) -> None:
    """Bytes copied from a disk, a Redis or a bucket tell nothing once the tenant's key is destroyed, to one who has the master
    keys, the code and the key store as it is then. Those of another tenant stay readable."""
    url = f"disk://{tmp_path}/store?size=64MiB" if kind == "disk" else request.getfixturevalue(f"{kind}_url")
    keys = keys_in(stack, tmp_path)
    ring = KeyRing(data=keys)
    other = make_frames(2, 4, 3000, root=b"another tenant's root, 32 bytes.")
    store = open_store([url], keys=ring)
    assert store.put(FRAMES, deadline=soon()) == len(FRAMES) and store.put(other, deadline=soon()) == 4
    store.put_record(RECORD, TEXT, deadline=soon())
    inner = store.tiers[0].store.inner  # type: ignore[attr-defined]
    copied = [one for one in read(inner, FRAMES) if one is not None]
    record = inner.get_record(RECORD, deadline=soon())
    assert len(copied) == len(FRAMES) and record is not None
    parts = {bytes(one.payload[i : i + 8]) for one in FRAMES for i in range(0, 2992, 8)}
    assert not any(text[i : i + 8] in parts for text in copied for i in range(len(text)))
    assert TEXT[:8] not in record
    if kind == "disk":
        everything = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
        assert TEXT not in everything and not any(bytes(one.payload[:16]) in everything for one in FRAMES)
    keys.destroy(TENANT)
    thief = MemoryStore(1 << 20)
    copies = [Frame(one.header, memoryview(data)) for one, data in zip(FRAMES, copied, strict=True)]
    thief.put(copies, deadline=soon())
    thief.put_record(RECORD, record, deadline=soon())
    again = sealed(thief, keys_in(stack, tmp_path))
    assert read(again, FRAMES) == [None] * len(FRAMES) and again.get_record(RECORD, deadline=soon()) is None
    assert read(store, FRAMES) == [None] * len(FRAMES) and store.get_record(RECORD, deadline=soon()) is None
    assert read(store, other) == whole(other)
    assert not store.tiers[0].counters.bad
    thief.close()
    store.close()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    server = RedisServer(tmp_path / "redis")
    yield server.url
    server.kill()


@pytest.fixture
def s3_url(tmp_path: Path) -> Iterator[str]:
    server = S3Server(tmp_path / "s3")
    yield server.url()
    server.kill()


# The keys of tenants


def test_another_server_notices(tmp_path: Path, stack: ExitStack) -> None:
    """A server that has a key in memory uses it no longer than `check_seconds` after another one has destroyed it, to read or
    to write. It writes what it still has of the tenant with no other key."""
    inner = MemoryStore(1 << 20)
    first, second = keys_in(stack, tmp_path), keys_in(stack, tmp_path, check_seconds=0.01)
    store = sealed(inner, second)
    store.put(FRAMES[:4], deadline=soon())
    assert read(store, FRAMES[:4]) == whole(FRAMES[:4])
    first.destroy(TENANT)
    destroyed = time.monotonic()
    while time.monotonic() < destroyed + 0.01:
        second.opening(TENANT, 0)
    assert read(store, FRAMES[:4]) == [None] * 4 and store.put(FRAMES[4:], deadline=soon()) == 0
    with pytest.raises(StoreReadOnly):
        store.put_record(RECORD, TEXT, deadline=soon())
    assert second.sealing(TENANT) is first.sealing(TENANT) is None
    inner.close()


def test_a_slow_destruction_brings_nothing_back(tmp_path: Path, stack: ExitStack) -> None:
    """A key that is written while its tenant's keys are destroyed is deleted again: one that is made, and one that is encrypted
    by another master key."""
    keys, other = keys_in(stack, tmp_path), keys_in(stack, tmp_path, NEW, OLD)
    key = keys.sealing(TENANT)
    assert key is not None
    put = other._store.put

    def late(path: str, data: bytes, deadline: float = math.inf) -> None:
        keys.destroy(TENANT)
        put(path, data)

    other._store.put = late  # type: ignore[method-assign]
    assert other.wrap_again() == (0, 0)
    assert other._create(TENANT) is None
    assert [one.id for one in keys.all()] == [] and keys.opening(TENANT, key.id) is None


def test_a_key_that_is_made_during_a_destruction(tmp_path: Path, stack: ExitStack) -> None:
    """The key of another server, made after the destruction has listed those that there are, is destroyed and named too."""
    keys, other = keys_in(stack, tmp_path), keys_in(stack, tmp_path)
    first, put, made = keys.sealing(TENANT), keys._store.put, list[int]()

    def late(path: str, data: bytes, deadline: float = math.inf) -> None:
        fresh = other._create(TENANT)
        assert fresh is not None
        made.append(fresh.id)
        put(path, data)

    keys._store.put = late  # type: ignore[method-assign]
    assert first is not None and set(keys.destroy(TENANT)) == {(TENANT, first.id), (TENANT, *made)}
    assert not list(keys.all())


def test_a_look_during_a_destruction(tmp_path: Path, stack: ExitStack) -> None:
    """A key that was read from the key store just before it was destroyed is looked for again at its next use."""
    keys = keys_in(stack, tmp_path, check_seconds=60.0)
    key = keys.sealing(TENANT)
    assert key is not None
    keys._entries.clear()
    get = keys._store.get

    def slow(path: str, deadline: float = math.inf) -> bytes | None:
        found = get(path)
        if path.endswith("destroyed") and found is None:
            keys._store.get = get  # type: ignore[method-assign]
            keys.destroy(TENANT)
        return found

    keys._store.get = slow  # type: ignore[method-assign]
    keys.opening(TENANT, key.id)
    assert keys.opening(TENANT, key.id) is None is keys.sealing(TENANT)


def test_servers_that_begin_at_once(tmp_path: Path, stack: ExitStack) -> None:
    """Servers that make a tenant's first key at the same time read what each other has written."""
    inner = MemoryStore(4 << 20)
    servers = [sealed(inner, keys_in(stack, tmp_path)) for _ in range(4)]
    gate = threading.Barrier(4)

    def write(number: int) -> None:
        gate.wait()
        servers[number].put(FRAMES[3 * number : 3 * number + 3], deadline=soon())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(read(server, FRAMES) == whole(FRAMES) for server in servers)
    inner.close()


def test_generations(tmp_path: Path, stack: ExitStack) -> None:
    """A tenant keeps its salt until its keys are destroyed, then it has another one, the same on all servers. Its names are
    others, and begin alike."""
    base = hashlib.sha256(b"tenant").digest()
    first, second = keys_in(stack, tmp_path), keys_in(stack, tmp_path, check_seconds=0.01)
    ended: list[bytes] = []
    second.on_end.append(ended.append)
    assert first.current(base) == second.current(base) == base
    seen = [base]
    for _ in range(3):
        first.destroy(Salt(seen[-1]).prefix)
        fresh = first.current(seen[-1])
        assert fresh not in seen and ungenerated(fresh) == base
        assert Salt(fresh).digest[:6] == Salt(base).digest[:6] and Salt(fresh).digest[:12] != Salt(seen[-1]).digest[:12]
        deadline = time.monotonic() + 60.0
        while second.current(base) != fresh:
            assert time.monotonic() < deadline
        seen.append(fresh)
    assert ended == seen[:-1]
    assert sorted(first.generations(base)[1:]) == sorted(Salt(one).prefix for one in seen[1:])
    assert first.generations(seen[2])[0] == Salt(base).prefix
    assert keys_in(stack, tmp_path).current(seen[1]) == seen[-1], "a router may be late"


@pytest.mark.parametrize("salt", [b"", b"a", bytes(9), bytes(10), bytes(range(32))])
def test_salts_of_generations(salt: bytes) -> None:
    """A salt in a generation is that salt's, of the same client, and fits into vLLM's cache_salt."""
    fresh = with_generation(salt, b"123456")
    assert ungenerated(fresh) == salt == with_generation(fresh, b"")
    assert with_generation(fresh, b"abcdef") == with_generation(salt, b"abcdef")
    both = Salt.of(fresh, "session")
    assert Salt.parse(both.text) == both and len(both.text) <= 128
    assert both.prefix[:12] == Salt(fresh).prefix == Salt(salt).prefix[:6] + b"123456"


# Rotation


def test_a_new_master_key(tmp_path: Path, stack: ExitStack) -> None:
    """A new master key is added, data keys are encrypted by it, and the old one ends. No block is written for that. What is
    left of the old master key opens nothing."""
    inner = MemoryStore(1 << 20)
    old = sealed(inner, keys_in(stack, tmp_path, OLD))
    old.put(FRAMES, deadline=soon())
    before = read(inner, FRAMES)
    both = keys_in(stack, tmp_path, NEW, OLD)
    assert read(sealed(inner, both), FRAMES) == whole(FRAMES)
    assert both.wrap_again() == (1, 0) == both.wrap_again()
    assert read(inner, FRAMES) == before
    assert read(sealed(inner, keys_in(stack, tmp_path, NEW)), FRAMES) == whole(FRAMES)
    late = sealed(inner, keys_in(stack, tmp_path, OLD))
    assert read(late, FRAMES) == [None] * len(FRAMES) and not late.tiers[0].counters.bad
    assert keys_in(stack, tmp_path, OLD).wrap_again() == (0, 1)
    inner.close()


def test_a_new_data_key(tmp_path: Path, stack: ExitStack) -> None:
    """A tenant's new data key encrypts from then on, and the old one decrypts until its end. The tenant keeps its names."""
    inner = MemoryStore(1 << 20)
    keys = keys_in(stack, tmp_path, check_seconds=0.01)
    store = sealed(inner, keys)
    store.put(FRAMES[:6], deadline=soon())
    before = keys.sealing(TENANT)
    fresh = keys.rotate(TENANT, 3600.0)
    assert before is not None and fresh is not None and fresh.id != before.id
    deadline = time.monotonic() + 60.0
    while (now := keys.sealing(TENANT)) is None or now.id != fresh.id:
        assert time.monotonic() < deadline
    store.put(FRAMES[6:], deadline=soon())
    assert read(store, FRAMES) == whole(FRAMES)
    keys._write(TENANT, replace(before, ends=time.time()))
    assert read(store, FRAMES) == [None] * 6 + whole(FRAMES[6:])
    keys.destroy(TENANT)
    assert keys.rotate(TENANT, 0.0) is None and read(store, FRAMES) == [None] * 12
    inner.close()


def test_what_an_ended_key_left_is_replaced(tmp_path: Path, stack: ExitStack) -> None:
    """Blocks whose data key has ended are misses until they are put again, also by a process that starts later. Those of a key
    that the key store does not have, which may be another one's, stay as they are."""
    inner, others = MemoryStore(1 << 20), MemoryStore(1 << 20)
    keys = keys_in(stack, tmp_path, check_seconds=0.01)
    sealed(inner, keys).put(FRAMES, deadline=soon())
    elsewhere = keys_in(stack, tmp_path / "elsewhere", check_seconds=0.01)
    sealed(others, elsewhere).put(FRAMES, deadline=soon())
    foreign = read(others, FRAMES)
    assert keys.rotate(TENANT, 0.0) is not None
    for number in range(2):
        some = FRAMES[6 * number :][:6]
        store = sealed(inner, keys_in(stack, tmp_path))
        assert read(store, some) == [None] * 6
        store.put(some, deadline=soon())
        assert read(store, some) == whole(some)
    beside = sealed(others, keys)
    assert read(beside, FRAMES) == [None] * len(FRAMES)
    beside.put(FRAMES, deadline=soon())
    assert read(others, FRAMES) == foreign and read(sealed(others, elsewhere), FRAMES) == whole(FRAMES)
    inner.close()
    others.close()


def test_switching_on_and_rotating_a_fleet(tmp_path: Path, stack: ExitStack) -> None:
    """Four servers that read and write while encryption is switched on one by one, and then the master key is changed one by
    one: a server always finds what one with its keys has written, or one without encryption while it reads plain blocks.
    Nothing plain is written after the switch."""
    inner = MemoryStore(8 << 20)
    steps = ["plain"] * 4
    stages = ["plain", "mixed", "old", "both", "new"]

    def server(stage: str) -> TieredStore:
        masters = {"mixed": (OLD,), "old": (OLD, NEW), "both": (NEW, OLD), "new": (NEW,)}
        if stage == "plain":
            return TieredStore([inner])
        return sealed(inner, keys_in(stack, tmp_path, *masters[stage]), read_plain=stage == "mixed")

    servers = [server("plain") for _ in range(4)]
    written: list[tuple[str, Frame]] = []
    fresh = iter(make_frames(5, 400, 500))
    for stage in stages[1:]:
        if stage == "new":
            keys_in(stack, tmp_path, NEW, OLD).wrap_again()
        for number in range(4):
            steps[number] = stage
            servers[number] = server(stage)
            for writer, kind in zip(servers, steps, strict=True):
                batch = [next(fresh) for _ in range(3)]
                assert writer.put(batch, deadline=soon()) == 3
                written += [("plain" if kind == "plain" else "encrypted", one) for one in batch]
            for reader, kind in zip(servers, steps, strict=True):
                readable = {"plain": {"plain"}, "mixed": {"plain", "encrypted"}}.get(kind, {"encrypted"})
                found = read(reader, [one for _, one in written])
                lost = [how for (how, one), data in zip(written, found, strict=True) if data != bytes(one.data)]
                assert not set(lost) & readable, (stage, kind, lost)
                assert all(data is None for (how, _), data in zip(written, found, strict=True) if how not in readable)
                assert not reader.tiers[0].counters.bad
    raw = read(inner, [one for how, one in written if how == "encrypted"])
    assert len(raw) > 150 and all(data is not None and data[-192 + 131] & 0x80 for data in raw)
    late = sealed(inner, keys_in(stack, tmp_path, OLD))
    assert read(late, [one for _, one in written]) == [None] * len(written)
    inner.close()


def test_plain_frames_are_verified(tmp_path: Path, stack: ExitStack) -> None:
    """Damaged plain frames are damage with `read_plain`, sound ones are read, and records too. Without it they are left for
    other readers, and replaced when the block is put."""
    inner = MemoryStore(1 << 20)
    keys = keys_in(stack, tmp_path)
    TieredStore([inner]).put(FRAMES[:3], deadline=soon())
    inner.put_record("layouts/x", b"plain", deadline=soon())
    damaged = Frame(FRAMES[3].header, memoryview(bytearray(FRAMES[3].data)))
    damaged.data[5] ^= 1
    inner.put([damaged], deadline=soon())
    store = sealed(inner, keys, read_plain=True)
    assert read(store, FRAMES[:4]) == [*whole(FRAMES[:3]), None]
    assert sum(store.tiers[0].counters.bad.values()) == 1
    assert store.get_record("layouts/x", deadline=soon()) == b"plain"
    strict = sealed(inner, keys)
    assert read(strict, FRAMES[:3]) == [None] * 3 and not strict.tiers[0].counters.bad
    assert strict.get_record("layouts/x", deadline=soon()) is None
    assert strict.put(FRAMES[:3], deadline=soon()) == 3 and read(strict, FRAMES[:3]) == whole(FRAMES[:3])
    assert read(TieredStore([inner]), FRAMES[:3]) == [None] * 3
    inner.close()


def test_signed_blocks_stay_readable(tmp_path: Path, stack: ExitStack) -> None:
    """Where blocks were signed before, those with a known secret are read. New ones are encrypted."""
    inner = MemoryStore(1 << 20)
    secrets = [IntegritySecret(1, "a secret of the tests")]
    TieredStore([KeyRing(secrets).sealed(inner)]).put(FRAMES[:3], deadline=soon())
    both = TieredStore([KeyRing(secrets, keys_in(stack, tmp_path)).sealed(inner)])
    both.put(FRAMES[3:], deadline=soon())
    assert read(both, FRAMES) == whole(FRAMES)
    signed_only = TieredStore([KeyRing(secrets).sealed(inner)])
    assert read(signed_only, FRAMES) == [*whole(FRAMES[:3]), *[None] * 9] and not signed_only.tiers[0].counters.bad
    inner.close()


# A key store that fails


def test_a_key_store_that_is_down(tmp_path: Path, stack: ExitStack) -> None:
    """Known keys are used for `outage_seconds` while the key store fails, unknown ones not at all, and no block is damaged by
    it. A destruction fails, and says so."""
    inner = MemoryStore(1 << 20)
    for outage in (3600.0, 0.0):
        broken = FlakyStore(stack.enter_context(closing(DiskStore(tmp_path / str(outage), 1 << 20))))
        keys = stack.enter_context(
            closing(DataKeys(config(tmp_path, check_seconds=0.01, outage_seconds=outage), broken))
        )
        store = sealed(inner, keys)
        inner.delete(names_of(FRAMES), deadline=soon())
        store.put(FRAMES, deadline=soon())
        salt = keys.current(b"tenant")
        broken.inject("fail", 1.0)
        with pytest.raises(StoreError):
            keys.destroy(TENANT)
        time.sleep(0.02)  # until known keys are due for a look
        assert read(store, FRAMES) == (whole(FRAMES) if outage else [None] * 12)
        assert keys.sealing(SHARED) is None and keys.current(b"tenant") == salt and not store.tiers[0].counters.bad
        if not outage:  # blocks are read, and not written: as with a tier that is read only
            assert store.put(FRAMES, deadline=soon()) == 0 and store.tiers[0].state is TierState.READ_ONLY
            assert store.tiers[0].counters.errors["store_without_keys"] and store.tiers[0].breaker.closed
        receipt = forget_tenant(store, Salt(), keys=keys)
        assert not receipt.complete and receipt.places[0].tier == KEY_STORE
        assert receipt.places[0].outcome is PlaceOutcome.UNREACHABLE and receipt.keys == []
    inner.close()


def test_a_child_that_was_forked_while_the_key_store_was_down(tmp_path: Path, stack: ExitStack) -> None:
    """A forked child asks the key store again, and does not wait for its parent's thread, which it does not have."""
    broken = FlakyStore(stack.enter_context(closing(DiskStore(tmp_path / "keys", 1 << 20))))
    keys = stack.enter_context(closing(DataKeys(config(tmp_path, check_seconds=3600.0), broken)))
    broken.inject("fail", 1.0)
    assert keys.sealing(TENANT) is None and not keys.answers

    def child() -> None:
        signal.alarm(60)  # ends the child if it waits
        broken.inject("fail", 0.0)
        assert keys.answers and keys.sealing(b"other" + TENANT[5:]) is not None

    assert in_child(child) == 0 and not keys.answers


def test_a_receipt_names_the_keys(tmp_path: Path, stack: ExitStack) -> None:
    """Forgetting a tenant destroys its keys first, and the receipt says which, even if no store can be reached."""
    keys = keys_in(stack, tmp_path)
    salt = Salt(b"tenant")
    frames = make_frames(6, 3, 100, root=salt.digest + bytes(16))
    broken = FlakyStore(MemoryStore(1 << 20))
    store = sealed(broken, keys)
    store.put(frames, deadline=soon())
    key = keys.sealing(salt.prefix)
    broken.inject("fail", 1.0)
    receipt = forget_tenant(store, salt, keys=keys)
    assert key is not None and receipt.keys == [f"{salt.prefix.hex()}/{key.id:08x}"] == receipt.plain()["keys"]
    assert not receipt.complete and receipt.places[0].outcome is PlaceOutcome.ERASED
    broken.inject("fail", 0.0)
    assert read(store, frames) == [None] * 3
    assert forget_tenant(store, salt, keys=keys).complete
    broken.close()


def test_kv_from_before_an_erasure_is_not_saved(tmp_path: Path, stack: ExitStack) -> None:
    """An engine that has named the blocks of a prompt, and saves them after the tenant's key was destroyed, saves nothing; what
    it names from then on is saved."""
    keys, salt = keys_in(stack, tmp_path), b"the salt of a tenant"
    layout = Layout(b"model", 16, (LayerLayout(1, 16, 16),), "float32")
    with closing(sealed(MemoryStore(1 << 20), keys)) as store:
        engine = EngineStore(layout, store, salt, keys=KeyRing(data=keys))

        def save(named: list[bytes]) -> bool:
            rows = [memoryview(bytearray(layout.block_bytes + HEADER_BYTES)) for _ in named]
            return engine.save(named, 0, rows, soon())

        prompt = list(range(48))
        assert save(engine.keys(prompt)) and engine.find(engine.keys(prompt), soon()) == 3
        before = engine.keys(prompt)
        keys.destroy(Salt(salt).digest[:12])
        assert not save(before) and engine.find(engine.keys(prompt), soon()) == 0
        assert save(engine.keys(prompt)) and engine.find(engine.keys(prompt), soon()) == 3


# Master keys


def until(condition: Callable[[], bool]) -> bool:
    """Wait for a condition that another thread or process brings about."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_where_master_keys_come_from(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a command, and the environment give the same keys. A file is read again when a key is missing."""
    file = tmp_path / "masters"
    file.write_text(f"# current\n{OLD}\n", encoding="ascii")
    inner = MemoryStore(1 << 20)
    sealed(inner, keys_in(stack, tmp_path)).put(FRAMES, deadline=soon())
    folder = str(tmp_path / "keys")
    for chosen in (
        EncryptionConfig(key_store=folder, master_key_file=str(file)),
        EncryptionConfig(key_store=folder, master_key_command=f"cat {file}"),
    ):
        assert read(sealed(inner, stack.enter_context(closing(DataKeys(chosen)))), FRAMES) == whole(FRAMES)
    monkeypatch.setenv("FOREWORD_ENCRYPTION_KEY_STORE", folder)
    monkeypatch.setenv("FOREWORD_ENCRYPTION_MASTER_KEYS", OLD)
    ring = keys_from_environment()
    assert ring is not None and ring.data is not None
    assert read(TieredStore([ring.sealed(inner)]), FRAMES) == whole(FRAMES)
    file.write_text(NEW, encoding="ascii")
    keys = stack.enter_context(closing(DataKeys(EncryptionConfig(key_store=folder, master_key_file=str(file)))))
    assert read(sealed(inner, keys), FRAMES) == [None] * 12
    file.write_text(f"{NEW}\n{OLD}\n", encoding="ascii")
    monkeypatch.setattr(master_keys, "_AGAIN_SECONDS", 0.0)
    keys._entries.clear()
    assert read(sealed(inner, keys), FRAMES) == whole(FRAMES)
    inner.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"master_keys": ("a:short",)}, "64 hexadecimal"),
        ({"master_keys": (OLD, OLD)}, "each ID once"),
        ({"master_key_file": "/nowhere/at/all"}, "cannot read"),
        ({"master_key_command": "false"}, "failed with status"),
        ({"master_key_command": "/nowhere/at/all"}, "No such file"),
        ({"master_key_command": "true"}, "no master key"),
        ({"master_key_command": f"{sys.executable} -c \"print('x' * 100000)\""}, "more than 64 KiB"),
        ({"master_keys": (OLD,), "key_store": "memory://"}, "outlives a process"),
    ],
)
def test_wrong_master_keys(tmp_path: Path, given: dict[str, str], message: str) -> None:
    """Master keys that cannot be read are errors that do not repeat them."""
    chosen = EncryptionConfig(**{"key_store": str(tmp_path / "keys"), **given})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message) as raised:
        DataKeys(chosen)
    assert "1111" not in raised.value.message and "1111" not in repr(chosen)


def test_master_keys_that_anybody_can_change(tmp_path: Path) -> None:
    """A file of master keys that every user can write to is refused: one of them could read what is encrypted from then on. One
    that they can read is as the user wants it: secrets of containers are such files."""
    file = tmp_path / "masters"
    file.write_text(OLD, encoding="ascii")
    given = EncryptionConfig(key_store=str(tmp_path / "keys"), master_key_file=str(file))
    for mode in (0o666, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod o-w {file}") as raised:
            DataKeys(given)
        assert "1111" not in raised.value.message
    file.chmod(0o664)
    with closing(DataKeys(given)):
        pass


def test_a_file_of_master_keys_that_is_replaced_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of master keys that goes just when it has been read is an error that says so."""
    file = tmp_path / "masters"
    file.write_text(OLD, encoding="ascii")

    def read_and_remove(path: str, *how: str) -> str:
        text = read_text(path, *how)
        file.unlink()
        return text

    monkeypatch.setattr(master_keys, "read_text", read_and_remove)
    with pytest.raises(ConfigError, match=r"master_key_file .*: No such file"):
        DataKeys(EncryptionConfig(key_store=str(tmp_path / "keys"), master_key_file=str(file)))


class Command:
    """A key command whose behaviour is a file: it ends and prints master keys, or hangs. Each run leaves a line.

    Attributes:
        hanging: shell code that hangs.
    """

    def __init__(self, folder: Path, hanging: str) -> None:
        self.keys, self.hang, self.runs = folder / "printed", folder / "hang", folder / "runs"
        self.keys.write_text(OLD, encoding="ascii")
        self.runs.touch()
        script = folder / "command"
        script.write_text(
            f"echo $$ >> {self.runs}\nif [ -e {self.hang} ]; then {hanging}; fi\ncat {self.keys}\n", encoding="ascii"
        )
        self.config = EncryptionConfig(key_store=str(folder / "keys"), master_key_command=f"sh {script}")

    @property
    def groups(self) -> list[int]:
        return [int(line) for line in self.runs.read_text(encoding="ascii").split()]


HANGING = {
    "direct": "exec sleep 600",
    "child": "sleep 600",
    "closed": "exec >&-; sleep 600",
    "child-without-output": "sleep 600 >/dev/null & wait",
    "pipeline": "sleep 600 | cat",
}


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("hanging", HANGING)
def test_a_command_that_hangs(hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of a key service is ended after its time, with all processes of its group."""
    monkeypatch.setattr(master_keys, "_COMMAND_SECONDS", 0.2)
    command = Command(tmp_path, HANGING[hanging])
    command.hang.touch()
    with pytest.raises(ConfigError, match="took longer"):
        DataKeys(command.config)
    [group] = command.groups
    assert until(lambda: not _lives(group))


@pytest.mark.parametrize("hanging", HANGING)
def test_a_command_whose_parent_is_killed(hanging: str, tmp_path: Path) -> None:
    """A command of a key service ends, with all processes of its group, when the process that started it is killed."""
    command = Command(tmp_path, HANGING[hanging])
    command.hang.touch()
    program = """
import subprocess
import sys
from foreword.store.data_keys import DataKeys
from foreword.store_config import EncryptionConfig
DataKeys(EncryptionConfig(key_store=sys.argv[1], master_key_command=sys.argv[2]))
"""
    given = command.config.key_store, command.config.master_key_command
    parent = subprocess.Popen([sys.executable, "-c", program, *map(str, given)])
    try:
        assert until(lambda: bool(command.groups))
        [group] = command.groups
        assert _lives(group)
    finally:
        parent.kill()
        parent.wait()
    assert until(lambda: not _lives(group))


def test_what_a_command_leaves_running(tmp_path: Path) -> None:
    """A command has ended when its process has, though another one that it started keeps its output open."""
    masters = tmp_path / "masters"
    masters.write_text(OLD, encoding="ascii")
    script = tmp_path / "command"
    script.write_text(f"setsid sleep 60 &\necho $! > {tmp_path}/left\ncat {masters}\n", encoding="ascii")
    DataKeys(EncryptionConfig(key_store=str(tmp_path / "keys"), master_key_command=f"sh {script}")).close()
    os.kill(int((tmp_path / "left").read_text(encoding="ascii")), signal.SIGKILL)


@pytest.mark.parametrize("hanging", ["direct", "child"])
def test_a_hanging_command_costs_only_its_tenant(
    hanging: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the command hangs that would print an unknown master key, all tenants but that of the key store and read, new ones
    too, and one attempt is under way at any time. The call that asked gives up after its time, before the command ends."""
    monkeypatch.setattr(master_keys, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(master_keys, "_WAIT_SECONDS", 0.05)
    command = Command(tmp_path, HANGING[hanging])
    keys = stack.enter_context(closing(DataKeys(command.config)))
    store = sealed(MemoryStore(1 << 20), keys)
    chains = [make_frames(number, 4, 500, root=bytes([number]) * 32) for number in range(1, 9)]
    assert store.put(chains[0], deadline=soon())
    elsewhere = keys_in(stack, tmp_path, NEW, OLD)
    assert elsewhere.sealing(tenant_of(chains[1][0].name)) is not None  # its master key is unknown to the first server
    command.hang.touch()
    asked = [threading.Thread(target=keys.sealing, args=(tenant_of(chains[1][0].name), soon())) for _ in range(4)]
    for thread in asked:
        thread.start()
    assert until(lambda: len(command.groups) == 2)  # the start, and the attempt
    assert read(store, chains[0]) == whole(chains[0])
    for chain in (chains[0], *chains[2:]):
        assert store.put(chain, deadline=soon()) == len(chain)
        assert read(store, chain) == whole(chain)
    for thread in asked:
        thread.join()
    assert _lives(command.groups[-1]) and len(command.groups) == 2
    command.hang.unlink()
    command.keys.write_text(f"{NEW}\n{OLD}\n", encoding="ascii")
    os.killpg(command.groups[-1], signal.SIGKILL)
    keys._entries.clear()
    number = next(one.id for one in elsewhere.all() if one.tenant == tenant_of(chains[1][0].name))
    assert until(lambda: keys.opening(tenant_of(chains[1][0].name), number) is not None)


def test_the_pause_begins_when_a_command_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of an attempt and the next one lies the pause, also if the attempt took longer than the pause."""
    monkeypatch.setattr(master_keys, "_WAIT_SECONDS", 60.0)
    command = Command(tmp_path, "sleep 0.2")
    masters = master_keys.MasterKeys(command.config)
    monkeypatch.setattr(master_keys, "_AGAIN_SECONDS", 0.0)
    command.hang.touch()
    assert masters.get("unknown") is None and len(command.groups) == 2
    monkeypatch.setattr(master_keys, "_AGAIN_SECONDS", 3600.0)
    began = time.monotonic()
    assert masters.get("unknown") is None and len(command.groups) == 2
    assert masters._ended_at <= began
    masters._ended_at -= 3601.0
    assert masters.get("unknown") is None and len(command.groups) == 3
    assert masters.get("old", time.monotonic() - 1) is not None


def test_a_call_in_a_hurry_says_nothing_of_the_key_store(tmp_path: Path, stack: ExitStack) -> None:
    """A call whose deadline is near gives up then. It neither counts as a failure of the key store nor is what it did not find
    out remembered."""
    broken = FlakyStore(DiskStore(str(tmp_path / "keys"), 1 << 20))
    keys = stack.enter_context(closing(DataKeys(config(tmp_path), broken)))
    broken.inject("hang", 1.0)
    assert keys.sealing(TENANT, time.monotonic() + 0.05) is None and keys.answers
    broken.inject("hang", 0.0)
    broken.release()
    assert keys.sealing(TENANT, soon()) is not None


def test_a_key_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a key record are synced before its rename, and each folder above it after that, up to what was there."""
    calls = list[tuple[str, str]]()
    fsync, rename = os.fsync, os.rename

    def synced(handle: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source: str, target: str) -> None:
        calls.append(("rename", source))
        calls.append(("renamed", target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder = tmp_path / "new" / "folder"
    store = DiskStore(str(folder), 1 << 20, sync_records=True)
    store.put_record("a/b/c", b"key", deadline=soon())
    [source] = [path for call, path in calls if call == "rename"]
    [target] = [path for call, path in calls if call == "renamed"]
    assert calls[0] == ("fsync", source) and calls[1] == ("rename", source)
    after = {path for call, path in calls[calls.index(("renamed", target)) :] if call == "fsync"}
    parents = [str(one) for one in Path(target).parents]
    assert after >= set(parents[: parents.index(str(tmp_path)) + 1])
    calls.clear()
    store.put_record("a/b/c", b"other", deadline=soon())
    assert [call for call, _ in calls][:3] == ["fsync", "rename", "renamed"]
    calls.clear()
    assert store.delete_record("a/b/c", deadline=soon())
    assert calls == [("fsync", str(folder / "records"))]
    store.close()


def test_wrong_configurations(tmp_path: Path) -> None:
    """A key store needs master keys from one place, and master keys a key store. It is none of the stores for blocks."""
    twice = {"key_store": "x", "master_keys": (OLD,), "master_key_file": "y"}
    for wrong in ({"key_store": "x"}, {"master_keys": (OLD,)}, twice):
        with pytest.raises(ConfigError, match="exactly one"):
            EncryptionConfig(**wrong)  # type: ignore[arg-type]
    assert data_keys_of(EncryptionConfig()) is None
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in ("keys", "keys/", "./keys", "link/keys", "keys/kv", "."):
        with pytest.raises(ConfigError, match="key store of its own"):
            check_stores_and_peers([f"disk://{tmp_path}/{folder}?size=1GiB"], TransferConfig(), config(tmp_path))
    assert not (tmp_path / "keys").exists()
    (tmp_path / "keys").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        data_keys_of(config(tmp_path))


def test_damaged_keys(tmp_path: Path, stack: ExitStack) -> None:
    """A record of the key store that is damaged, or was copied from another tenant or id, is no key."""
    keys = keys_in(stack, tmp_path)
    key = keys.sealing(TENANT)
    assert key is not None
    good = json.loads(keys._wrapped(TENANT, key))

    def unwrapped(**changed: object) -> DataKey | None:
        return keys._unwrapped(TENANT, key.id, json.dumps({**good, **changed}).encode())

    assert unwrapped() == key
    other = "0" * 24
    for change in (
        {"created": 1.0},
        {"ends": 9e9},
        {"key": "00" * 48},
        {"nonce": 5},
        {"tenant": other},
    ):
        assert unwrapped(**change) is None
    with pytest.raises(StoreError, match="is not known here"):
        unwrapped(master="x")
    assert keys._unwrapped(bytes(12), key.id, json.dumps({**good, "tenant": other}).encode()) is None
    assert keys._unwrapped(TENANT, key.id, b"[]") is None is keys._unwrapped(TENANT, key.id, b"\xff")
    assert key.id & ENCRYPTED
