"""Only what is proven to be damaged is deleted. A device that fails, a slow network, and a reader without the key, the codec or
the version of a block leave it where it is."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from foreword.blocks.layout import Layout
from foreword.cli.store import _verify_tier
from foreword.conformance import FlakyStore, make_frames, names_of, put_all, read, soon, whole
from foreword.errors import StoreUnavailable
from foreword.store.base import Name, Store
from foreword.store.codec import Codec
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES, VERSION, Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.sealing import IntegritySecret, KeyRing, SealedStore
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore
from foreword.store.wrappers import StoreWrapper

PAYLOAD = 3000
CHAINS = 12
LENGTH = 16


class Undeleted(StoreWrapper):
    """Notes what is deleted."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.deleted: list[Name] = []

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self.deleted += names
        return super().delete(names, deadline=deadline)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def chains() -> list[list[Frame]]:
    return [make_frames(seed, LENGTH, PAYLOAD) for seed in range(CHAINS)]


def memory(stack: ExitStack) -> MemoryStore:
    return stack.enter_context(closing(MemoryStore(size=16 << 20)))


def fail_reads(monkeypatch: pytest.MonkeyPatch, number: int, chosen: Callable[[int], bool] = lambda _: True) -> None:
    """Let the system's reads of chosen files, by their inode, fail with this error."""
    real = os.readv

    def readv(handle: int, buffers: Sequence[memoryview]) -> int:
        if chosen(os.fstat(handle).st_ino):
            raise OSError(number, os.strerror(number))
        return real(handle, buffers)

    monkeypatch.setattr("os.readv", readv)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EPERM, errno.EUCLEAN, errno.ESTALE, errno.ENOMEM])
def test_a_device_that_fails_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """While no block can be read the tier counts as failing and is skipped, although lookups succeed. Afterwards every block is
    there."""
    with closing(DiskStore(tmp_path, 64 << 20)) as disk, closing(TieredStore([disk])) as store:
        known = chains()
        for frames in known:
            put_all(store, frames)
        tier = store.tiers[0]
        with monkeypatch.context() as failing:
            fail_reads(failing, number)
            for frames in known:
                tier.lookup(names_of(frames), soon())
                assert read(store, frames) == [None] * LENGTH
        assert not tier.breaker.closed and not tier.counters.bad
        assert tier.counters.lookups[LookupOutcome.TIER_OFF]
        for frames in known:
            assert read(disk, frames) == whole(frames)


def test_a_bad_sector_costs_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose file cannot be read: the others of its chain are served, a lookup ends before it, and storing it again
    writes another file."""
    with closing(DiskStore(tmp_path, 64 << 20)) as disk, closing(TieredStore([disk])) as store:
        frames = make_frames(1, LENGTH, PAYLOAD)
        put_all(store, frames)
        [victim] = tmp_path.rglob(frames[5].header.key.hex())
        inode = victim.stat().st_ino
        fail_reads(monkeypatch, errno.EIO, lambda one: one == inode)
        for _ in range(5):
            found = read(store, frames)
            assert [index for index in range(LENGTH) if found[index] is None] == [5]
        tier = store.tiers[0]
        assert tier.breaker.closed and not tier.counters.bad and tier.counters.errors == {"block_unreadable": 5}
        assert tier.lookup(names_of(frames), soon())[0] == 5
        assert tier.present(names_of(frames), soon())[0] == [index != 5 for index in range(LENGTH)]
        put_all(store, frames)
        assert victim.stat().st_ino != inode
        assert read(store, frames) == whole(frames)


def test_damage_on_the_way_is_not_damage_in_the_store(stack: ExitStack) -> None:
    """A block that arrives damaged is read once more before it is deleted: only one that is damaged then, too, is."""
    inner = Undeleted(memory(stack))
    flaky = FlakyStore(inner)
    store = stack.enter_context(closing(TieredStore([flaky])))
    frames = make_frames(1, LENGTH, PAYLOAD)
    put_all(store, frames)
    turns = iter([True] * LENGTH + [False] * LENGTH)
    flaky._happens = lambda fault: fault == "corrupt" and next(turns)  # type: ignore[method-assign]
    assert read(store, frames) == [None] * LENGTH
    assert sum(store.tiers[0].counters.bad.values()) == LENGTH and not inner.deleted
    flaky._happens = lambda fault: False  # type: ignore[method-assign]
    assert read(store, frames) == whole(frames)
    flaky.spoil(names_of(frames[3:4]))
    read(store, frames)
    assert inner.deleted == names_of(frames[3:4])


def ring(*secrets: tuple[int, str]) -> KeyRing:
    return KeyRing([IntegritySecret(number, f"{text}, a secret of the tests") for number, text in secrets])


class Xor(Codec):
    """Two codecs that write the same length."""

    lossy = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"xor{number}"

    def encode(self, payload: memoryview, layout: Layout) -> bytes:
        return bytes(one ^ self.number for one in payload)[:-1]

    def decode(self, data: memoryview, layout: Layout, out: memoryview) -> None:
        out[:-1] = bytes(one ^ self.number for one in data)
        out[-1:] = b"\0"


def newer(frame: Frame) -> Frame:
    """A frame of the next version of the format."""
    data = bytearray(frame.data)
    data[-HEADER_BYTES + 4 : -HEADER_BYTES + 6] = (VERSION + 1).to_bytes(2, "little")
    data[-32:-16] = xxhash.xxh3_128(bytes(data[:-32])).digest()
    return replace(frame, data=memoryview(data))


OLD, NEW = (1, "old"), (2, "new")
WRITERS: dict[str, Callable[[Store], Store]] = {
    "unsigned": lambda store: store,
    "old key": lambda store: SealedStore(store, ring(OLD)),
    "new key": lambda store: SealedStore(store, ring(NEW)),
}
READERS: dict[str, tuple[Callable[[Store], Store], set[str]]] = {
    "no key": (lambda store: store, {"unsigned"}),
    "old key": (lambda store: SealedStore(store, ring(OLD)), {"old key"}),
    "new key": (lambda store: SealedStore(store, ring(NEW)), {"new key"}),
    "both keys": (lambda store: SealedStore(store, ring(NEW, OLD)), {"old key", "new key"}),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_reader_without_the_key(stack: ExitStack, writer: str, reader: str) -> None:
    """A reader of a signed store without the right secret misses, and does not delete: one that has it still finds all."""
    inner = Undeleted(memory(stack))
    frames = make_frames(1, LENGTH, PAYLOAD)
    put_all(WRITERS[writer](inner), frames)
    opened, readable = READERS[reader]
    store = stack.enter_context(closing(TieredStore([opened(inner)])))
    found = read(store, frames)
    tier = store.tiers[0]
    if writer in readable:
        assert found == whole(frames)
    else:
        assert found == [None] * LENGTH and tier.counters.errors["block_foreign"] == LENGTH
        assert tier.lookup(names_of(frames), soon())[0] == 0
    assert not inner.deleted and not tier.counters.bad and tier.breaker.closed
    assert read(TieredStore([WRITERS[writer](inner)]), frames) == whole(frames)


def test_a_key_replaces_blocks_without_one(stack: ExitStack) -> None:
    """Once secrets are switched on, a server that stores a block again signs it. One without the secret replaces nothing."""
    inner = memory(stack)
    frames = make_frames(1, LENGTH, PAYLOAD)
    unsigned = stack.enter_context(closing(TieredStore([inner])))
    put_all(unsigned, frames[:8])
    signed = TieredStore([SealedStore(inner, ring(NEW))])
    assert read(signed, frames) == [None] * LENGTH
    put_all(signed, frames)
    assert read(signed, frames) == whole(frames)
    assert read(unsigned, frames) == [None] * LENGTH
    put_all(unsigned, frames)
    assert read(TieredStore([SealedStore(inner, ring(NEW))]), frames) == whole(frames)


def test_another_version_is_left(stack: ExitStack) -> None:
    """Blocks of a newer Foreword in a shared store are misses."""
    inner = Undeleted(memory(stack))
    frames = make_frames(1, LENGTH, PAYLOAD)
    put_all(inner, [newer(frame) for frame in frames])
    store = TieredStore([inner])
    assert read(store, frames) == [None] * LENGTH
    assert not inner.deleted and not store.tiers[0].counters.bad


@pytest.mark.parametrize("version", range(VERSION + 1, VERSION + 4))
def test_damage_is_not_taken_for_another_version(stack: ExitStack, version: int) -> None:
    """A block whose version and payload were damaged together is deleted, and is there again once it has been stored again."""
    inner = memory(stack)
    frames = make_frames(1, LENGTH, PAYLOAD)
    data = bytearray(frames[3].data)
    data[-HEADER_BYTES + 4 : -HEADER_BYTES + 6] = version.to_bytes(2, "little")
    data[7] ^= 1
    put_all(inner, [replace(one, data=memoryview(data)) if one is frames[3] else one for one in frames])
    store = TieredStore([inner])
    assert read(store, frames) == [None if one is frames[3] else bytes(one.data) for one in frames]
    assert store.tiers[0].counters.bad["reserved"] == 1
    put_all(inner, frames)
    assert read(store, frames) == whole(frames)


def test_damage_is_not_taken_for_another_key(stack: ExitStack) -> None:
    """A block that was damaged so that it looks signed is deleted, and is there again once it has been stored again."""
    inner = memory(stack)
    frames = make_frames(1, LENGTH, PAYLOAD)
    data = bytearray(frames[3].data)
    for at in (131, 140, 180):  # key id, nonce, signature
        data[-HEADER_BYTES + at] ^= 1
    data[7] ^= 1
    put_all(inner, [replace(one, data=memoryview(data)) if one is frames[3] else one for one in frames])
    store = TieredStore([inner])
    assert read(store, frames) == [None if one is frames[3] else bytes(one.data) for one in frames]
    assert store.tiers[0].counters.bad["checksum"] == 1
    put_all(inner, frames)
    assert read(store, frames) == whole(frames)


@pytest.mark.parametrize("seed", range(4))
def test_no_fault_deletes(stack: ExitStack, seed: int) -> None:
    """Calls and blocks that fail at random, under random readers, delete nothing, and neither does `verify --repair`."""
    draw = random.Random(seed)
    inner = Undeleted(memory(stack))
    known = chains()
    for frames in known:
        put_all(SealedStore(inner, ring(NEW)), frames)
    plan = {"fail": 0.1, "block_fails": 0.2, "unreadable": 0.2}
    for number in range(60):
        opened, _ = READERS[draw.choice(list(READERS))]
        flaky = FlakyStore(inner, seed=draw.randrange(1 << 30), plan=plan)
        store = TieredStore([opened(flaky)])
        frames = draw.choice(known)
        for _ in range(3):
            read(store, frames)
        if number % 10 == 0:
            try:
                found = _verify_tier(store.tiers[0], True)
            except StoreUnavailable:
                continue
            assert not found.removed and not found.bad
            assert found.sound + found.unread + found.foreign == CHAINS * LENGTH
    assert not inner.deleted
    for frames in known:
        assert read(TieredStore([SealedStore(inner, ring(NEW))]), frames) == whole(frames)
