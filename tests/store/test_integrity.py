"""Signed frames and records: what a party with write access to a store, but without the secret, puts there is refused."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from foreword.errors import BadFrame, ConfigError
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, check, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import KeyRing, SealedStore
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store_config import StoreConfig

FIRST, SECOND = "1:the first secret of the tests", "2:the second secret of the tests"
ANN, BOB = b"a" * 16, b"b" * 16
SIZE = 256
PLANTED = 10_000


def ring(*entries: str) -> KeyRing:
    keys = KeyRing.of(StoreConfig(integrity_secrets=entries))
    assert keys is not None
    return keys


def later() -> float:
    return time.monotonic() + 60.0


def block(root: bytes, number: int) -> Frame:
    key = number.to_bytes(32, "little")
    header = Header(bytes(16), root, key, bytes(32), number, RAW, SIZE, SIZE)
    return frame(header, root * (SIZE // 16))


@pytest.fixture
def plain() -> Iterator[MemoryStore]:
    """The shared store, as a party with write access reaches it."""
    store = MemoryStore(size=PLANTED * (SIZE + HEADER_BYTES + 1024))
    yield store
    store.close()


def fetched(store: TieredStore, names: Sequence[bytes]) -> list[bool]:
    buffers = [memoryview(bytearray(SIZE + HEADER_BYTES)) for _ in names]
    return [found is not None for found in store.fetch(names, buffers, deadline=later())]


def test_planted_blocks_are_refused(plain: MemoryStore) -> None:
    """None of 10,000 blocks planted under another tenant's names is loaded: unsigned ones, signed ones of the attacker's own
    tenant under changed headers, signatures by another secret, and altered content."""
    victim = TieredStore([SealedStore(plain, ring(FIRST))])
    own = MemoryStore(size=1 << 20)
    SealedStore(own, ring(FIRST)).put([block(ANN, 0)], deadline=later())
    stolen = memoryview(bytearray(SIZE + HEADER_BYTES))
    assert own.get([block(ANN, 0).name], [stolen], deadline=later()) == [len(stolen)]
    other = SealedStore(plain, ring("1:another secret altogether"))
    planted: list[Frame] = []
    for number in range(PLANTED):
        kind = number % 4
        target = block(BOB, number)
        if kind == 1:
            copy = bytearray(stolen)
            copy[SIZE + 24 : SIZE + 40], copy[SIZE + 40 : SIZE + 72] = BOB, target.header.key
            target = Frame(target.header, memoryview(copy))
        elif kind == 3:
            copy = bytearray(stolen)
            copy[number % SIZE] ^= 1
            copy[SIZE + 24 : SIZE + 40], copy[SIZE + 40 : SIZE + 72] = BOB, target.header.key
            target = Frame(target.header, memoryview(copy))
        planted.append(target)
    for kind in range(4):
        store = other if kind == 2 else plain
        assert store.put(planted[kind::4], deadline=later()) == PLANTED // 4
    names = [one.name for one in planted]
    assert plain.lookup(names, deadline=later()) == PLANTED
    assert not any(fetched(victim, names))
    counters = victim.tiers[0].counters
    # Those without a signature may be for readers without a key.
    assert counters.bad == {"unauthenticated": PLANTED * 3 // 4} and counters.errors["block_foreign"] == PLANTED // 4
    own.close()


def test_signed_blocks_are_loaded_and_heal(tmp_path: Path) -> None:
    """Blocks that a server with the secret wrote are loaded by another one that has it; a planted block is replaced by the next
    put."""
    url = f"disk://{tmp_path}/store?size=16MiB"
    blocks = [block(BOB, number) for number in range(20)]
    names = [one.name for one in blocks]
    attacker = open_store([url])
    attacker.put(blocks[:10], deadline=later())
    server = open_store([url], keys=ring(FIRST))
    assert not any(fetched(server, names))
    deadline = later()
    while not all(fetched(server, names)):
        assert time.monotonic() < deadline
        server.put(blocks, deadline=later())
    server.close()
    again = open_store([url], keys=ring(SECOND, FIRST))
    assert all(fetched(again, names)), "the second server signs with a newer secret and knows this one"
    again.close()
    attacker.close()


def test_a_frame_comes_back_as_it_was(plain: MemoryStore) -> None:
    """Signing changes neither content nor checksum of what readers get, and no memory of the writer."""
    store = SealedStore(plain, ring(FIRST))
    one = block(ANN, 3)
    before = bytes(one.data)
    store.put([one], deadline=later())
    buffer = memoryview(bytearray(len(before)))
    assert store.get([one.name], [buffer], deadline=later()) == [len(before)]
    assert bytes(buffer) == before == bytes(one.data)
    check(buffer, one.name)


def test_altered_bytes_are_refused(plain: MemoryStore) -> None:
    """A signed frame with any altered byte is refused."""
    store = SealedStore(plain, ring(FIRST))
    one = block(ANN, 4)
    store.put([one], deadline=later())
    signed = memoryview(bytearray(len(one.data)))
    plain.get([one.name], [signed], deadline=later())
    for place in range(len(signed)):
        changed = MemoryStore(size=1 << 16)
        copy = bytearray(signed)
        copy[place] ^= 1 << place % 8
        changed.put([Frame(one.header, memoryview(copy))], deadline=later())
        buffer = memoryview(bytearray(len(signed)))
        SealedStore(changed, ring(FIRST)).get([one.name], [buffer], deadline=later())
        with pytest.raises(BadFrame):
            check(buffer, one.name, authenticated=True)
        changed.close()


def test_records(plain: MemoryStore) -> None:
    """Records are signed under their keys: one that was altered, is not signed, or lies under another key is missing."""
    store = SealedStore(plain, ring(FIRST))
    store.put_record("prefixes/a", b"data", deadline=later())
    assert store.get_record("prefixes/a", deadline=later()) == b"data"
    assert SealedStore(plain, ring(SECOND, FIRST)).get_record("prefixes/a", deadline=later()) == b"data"
    signed = plain.get_record("prefixes/a", deadline=later())
    assert signed is not None
    plain.put_record("prefixes/b", signed, deadline=later())
    plain.put_record("prefixes/c", b"data", deadline=later())
    plain.put_record("prefixes/d", b"", deadline=later())
    plain.put_record("prefixes/a", signed[:-1] + b"A", deadline=later())
    assert [store.get_record(f"prefixes/{one}", deadline=later()) for one in "abcde"] == [None] * 5
    assert store.status().notes["unauthenticated_records"] == 4


@pytest.mark.parametrize(
    "wrong", ["secret", "x:a secret of the tests", "0:a secret of the tests", "1:short", "4294967295:" + "s" * 20]
)
def test_wrong_secrets(wrong: str) -> None:
    """A secret without a number, with one out of range, or a short one is an error that does not repeat it."""
    with pytest.raises(ConfigError, match="integrity_secrets") as raised:
        StoreConfig(integrity_secrets=(wrong,))
    assert wrong.partition(":")[2] not in raised.value.message or ":" not in wrong
    with pytest.raises(ConfigError, match="twice"):
        StoreConfig(integrity_secrets=(FIRST, FIRST))
    assert "first secret" not in repr(StoreConfig(integrity_secrets=(FIRST,)))
