"""The contract of leases, for both kinds of places that keep KV: a device, whose pool counts references to its blocks, and
stores, which pin theirs. One book decides for both, so one reference says what is kept."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from example_counts import represented

from foreword.blocks.layout import ROOT_BYTES
from foreword.blocks.leases import Leases
from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.public_blocks import public_keys
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.retention import Retention, RetentionAnswer
from foreword.blocks.salt import PUBLIC, Salt, tenant_digest
from foreword.conformance import make_frames, put_all
from foreword.conformance.frames import LAYOUT, names_of
from foreword.engine.prompt_leases import EngineLeases
from foreword.errors import StoreUnavailable
from foreword.integrations.vllm_extras.retentions import CacheAction, ConnectorRetentions
from foreword.offload.search import StoredGroup
from foreword.prefixes import lease_follower
from foreword.prefixes.lease_follower import LeaseFollower
from foreword.prefixes.lease_records import RETENTIONS, RetentionRecord
from foreword.prefixes.pins import StorePins
from foreword.prefixes.prefix_service import PrefixService
from foreword.prefixes.stored_names import PrefixStorage
from foreword.store import shared_records, tier_threads
from foreword.store.base import Name
from foreword.store.frame import RAW, Header, frame
from foreword.store.machine import clock_id
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

SIZE, LENGTH, BUDGET, BYTES = 4, 8, 12, 1000  # tokens of a block, blocks of a chain and of all leases, bytes of a block
TENANTS, CHAINS = (b"x", b"y"), (1, 2, 3, 4)
Key = tuple[bytes, int, int]  # tenant, chain, blocks


class Hours:
    """The clock of leases, which the test moves on; stands in for the module `time`."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


class Place(ABC):
    """A place that keeps KV, with its book."""

    book: Leases[Any]

    @abstractmethod
    def take(self, tenant: bytes, chain: int, count: int, ttl: float | None, priority: int) -> RetentionAnswer:
        """Keep the first blocks of a chain."""

    @abstractmethod
    def chain_of(self, tenant: bytes, chain: int) -> list[bytes]:
        """The keys of its blocks."""

    @abstractmethod
    def kept(self) -> int:
        """Blocks that are kept, as the pool or the store counts them."""

    def end(self, tenant: bytes, chain: int) -> None:
        self.book.release(tenant_digest(tenant), self.chain_of(tenant, chain))

    def use(self, tenant: bytes, chain: int, count: int) -> None:
        self.book.on_path(tenant_digest(tenant), self.chain_of(tenant, chain)[:count])

    def known(self) -> set[Key]:
        """All leases of the book."""
        keys = {self.chain_of(tenant, chain)[0]: (tenant, chain) for tenant in TENANTS for chain in CHAINS}
        return {(*keys[one.keys[0]], one.tokens // SIZE) for one in self.book.all()}

    @abstractmethod
    def close(self) -> None: ...


class Device(Place):
    def __init__(self, hours: Hours) -> None:
        self.cache = PrefixCache(512, SIZE)
        # Some bytes more than whole blocks take.
        self.leases = EngineLeases(self.cache, BUDGET * BYTES + 7, BUDGET * BYTES + 7, block_bytes=BYTES)
        self.book = self.leases.book
        self.book._clock = hours.monotonic

    def take(self, tenant: bytes, chain: int, count: int, ttl: float | None, priority: int) -> RetentionAnswer:
        table = self.cache.open(array("I", [chain] * SIZE * LENGTH), salt=Salt(tenant))
        self.cache.admit(table, self.cache.lookup(table))
        assert self.cache.advance(table, SIZE * LENGTH)
        answer = self.leases.keep(table, Retention(count * SIZE, ttl, priority))
        self.cache.release(table)
        return answer

    def chain_of(self, tenant: bytes, chain: int) -> list[bytes]:
        return list(self.cache.open([chain] * SIZE * LENGTH, salt=Salt(tenant)).chain.keys_to(LENGTH)[:LENGTH])

    def kept(self) -> int:
        self.leases.settle()
        self.cache.check()
        return self.cache.pool.num_blocks - self.cache.pool.num_free

    def close(self) -> None:
        pass


class Pinned(Place):
    """A store that has all blocks, and the connector's leases in it."""

    def __init__(self, hours: Hours) -> None:
        self.frames = {
            (tenant, chain): make_frames(100 * number + chain, LENGTH, 100, root=tenant * 32)
            for number, tenant in enumerate(TENANTS)
            for chain in CHAINS
        }
        self.memory, self.hours = MemoryStore(1 << 20), hours
        self.store = TieredStore([self.memory])
        for frames in self.frames.values():
            put_all(self.memory, frames)
        self._block = self.memory.status().bytes // self.memory.status().blocks
        self.open()

    def open(self) -> None:
        group = StoredGroup(KVGroup(GroupKind.FULL, SIZE), (LAYOUT,))
        per_key = (1 << 19) // BUDGET  # half of the store is for leases
        self.leases = ConnectorRetentions(self.store, [group], bytes(32), SIZE, SIZE, per_key)
        self.book = self.leases.book
        self.book._clock = self.hours.monotonic

    def take(self, tenant: bytes, chain: int, count: int, ttl: float | None, priority: int) -> RetentionAnswer:
        action = CacheAction("pin" if ttl is None else "retain", count * SIZE, ttl, priority)
        [answer] = self.leases.apply(
            [action], tenant * 32, self.chain_of(tenant, chain), LENGTH * SIZE, Salt(tenant).tenant
        )
        return answer

    def chain_of(self, tenant: bytes, chain: int) -> list[bytes]:
        return [frame.header.key for frame in self.frames[tenant, chain]]

    def kept(self) -> int:
        assert self.leases._stored.flush(60)
        return self.memory.status().pinned_bytes // self._block

    def restart(self) -> None:
        self.leases.close()
        self.open()

    def close(self) -> None:
        self.leases.close()
        self.store.close()


@contextmanager
def opened(make: Callable[[Hours], Place], hours: Hours, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    for module in (lease_follower, shared_records):
        patch.setattr(module, "time", hours)
    place = make(hours)
    try:
        yield place
    finally:
        place.close()


both = pytest.mark.parametrize("make", [Device, Pinned])


@both
def test_what_two_leases_share_is_kept_once(make: Callable[[Hours], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two leases that begin alike take what they share once; the end of one leaves what the other one needs; the end of both
    leaves nothing. A tenant's release ends no lease of another."""
    with opened(make, Hours(), monkeypatch) as place:
        for count in (3, 6):
            assert place.take(b"x", 1, count, 600.0, 0) == RetentionAnswer("accepted", count * SIZE, 600.0)
        assert place.kept() == 6 and place.book.retained_bytes == 6 * place.book.block_bytes
        place.book.release(tenant_digest(b"y"), place.chain_of(b"x", 1))
        assert place.kept() == 6
        place.book.release(tenant_digest(b"x"), place.chain_of(b"x", 1)[5:])
        assert place.kept() == 3
        place.end(b"x", 1)
        assert (place.kept(), place.book.retained_bytes) == (0, 0)


@both
def test_the_budget_is_in_bytes(make: Callable[[Hours], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the budget is kept as far as whole blocks fit, and the answer says how many bytes there are."""
    with opened(make, Hours(), monkeypatch) as place:
        place.take(b"x", 1, 7, None, 60)
        answer = place.take(b"x", 2, 7, None, 50)
        assert (answer.status, answer.tokens) == ("clipped", (BUDGET - 7) * SIZE)
        assert f"the budget of {BUDGET * place.book.block_bytes:,} bytes" in answer.reason
        assert place.kept() == BUDGET and place.book.retained_bytes <= place.book.budget


@both
def test_the_end_is_by_the_clock_of_the_book(make: Callable[[Hours], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends its ttl after its last use, and what it kept is free."""
    hours = Hours()
    with opened(make, hours, monkeypatch) as place:
        place.take(b"x", 1, 4, 1000.0, 0)
        place.take(b"y", 1, 4, 1000.0, 0)
        hours.passed += 900
        place.use(b"x", 1, 4)
        hours.passed += 900
        place.book.expire()
        assert (place.known(), place.kept()) == ({(b"x", 1, 4)}, 4)


def test_pins_outlive_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the leases in a store are known, and end in their time, by a release, or with their tenant."""
    hours = Hours()
    with opened(Pinned, hours, monkeypatch) as place:
        assert isinstance(place, Pinned)
        place.take(b"x", 1, 4, 1000.0, 0)
        place.take(b"x", 2, 5, 9000.0, 0)
        place.take(b"y", 3, 3, None, 0)
        assert place.kept() == 12
        hours.passed += 500
        place.restart()
        assert (place.known(), place.kept()) == ({(b"x", 1, 4), (b"x", 2, 5), (b"y", 3, 3)}, 12)
        hours.passed += 501
        place.book.expire()
        assert place.kept() == 8
        place.end(b"x", 2)
        place.end(b"y", 3)
        assert (place.kept(), place.memory.records("retained/", deadline=time.monotonic() + 60)) == (0, [])


def test_blocks_that_come_back_to_a_faster_tier_are_pinned() -> None:
    """A retention that was adopted from its record is pinned in a tier that gets its blocks only when they are used, a moment
    later, too. One that has ended meanwhile is not."""
    root, deadline = bytes(range(32)), time.monotonic() + 60
    chains = [make_frames(number, 2, 100, root=root) for number in (1, 2)]
    slow = MemoryStore(1 << 20)
    group = StoredGroup(KVGroup(GroupKind.FULL, SIZE), (LAYOUT,))

    @contextmanager
    def followed(*stores: MemoryStore) -> Iterator[tuple[Leases[bytes], LeaseFollower]]:
        store = TieredStore(stores)  # it is not closed: the slow one outlives it
        book = Leases[bytes](100, 100, block_bytes=1)
        follower = LeaseFollower(book, store, StorePins(store, MODEL, [group]), SIZE)
        try:
            yield book, follower
        finally:
            follower.close(60)

    keys = [[one.header.key for one in frames] for frames in chains]
    with followed(slow) as (book, follower):
        for frames, chain in zip(chains, keys, strict=True):
            put_all(slow, frames)
            book.retain(TENANT, root, chain, chain, Retention(2 * SIZE, None, 0), block_size=SIZE, whole=False)
        assert follower.flush(60)
    fast = MemoryStore(1 << 20)
    for key in slow.records("", deadline=deadline):  # memory forgets its records with its process
        fast.put_record(key, slow.get_record(key, deadline=deadline) or b"", deadline=deadline)
    with followed(fast, slow) as (book, follower):
        assert [len(book.on_path(TENANT, chain)) for chain in keys] == [1, 1]
        follower._jobs.add(follower._tick)
        assert follower.flush(60) and fast.status().pinned_bytes == 0
        for frames in chains:
            put_all(fast, frames)
        book.release(TENANT, keys[1])
        follower._jobs.add(follower._tick)
        assert follower.flush(60)
        assert fast.status().pinned_bytes == slow.status().pinned_bytes == sum(len(one.data) for one in chains[0])
        assert fast.status().pinned_bytes > 0


class Refusing(MemoryStore):
    """A store that fails to pin while it is told so."""

    fails = True

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        if self.fails:
            raise StoreUnavailable("it fails")
        return super().pin(names, pinned=pinned, deadline=deadline)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_tier_that_fails_to_pin_is_asked_until_it_does(adopted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retention of this process, and one that it has adopted and used, is pinned in each tier, however long one fails and
    another one has its pins. One that has ended meanwhile is not."""
    monkeypatch.setattr(tier_threads, "_FIRST_PAUSE", 0.0)
    root = bytes(range(32))
    chains = [make_frames(number, 2, 100, root=root) for number in (1, 2)]
    keys = [[one.header.key for one in frames] for frames in chains]
    fast, slow = Refusing(1 << 20), MemoryStore(1 << 20)
    for frames in chains:
        put_all(fast, frames)
        put_all(slow, frames)
    store = TieredStore([fast, slow])

    def follow() -> tuple[Leases[bytes], LeaseFollower]:
        book = Leases[bytes](100, 100, block_bytes=1)
        group = StoredGroup(KVGroup(GroupKind.FULL, SIZE), (LAYOUT,))
        return book, LeaseFollower(book, store, StorePins(store, MODEL, [group]), SIZE)

    def ticks(follower: LeaseFollower, count: int) -> None:
        for _ in range(count):
            follower._jobs.add(follower._tick)
        assert follower.flush(60)

    book, follower = follow()
    for chain in keys:
        book.retain(TENANT, root, chain, chain, Retention(2 * SIZE, None, 0), block_size=SIZE, whole=False)
    assert follower.flush(60)
    if adopted:
        follower.close(60)
        book, follower = follow()
        assert [len(book.on_path(TENANT, chain)) for chain in keys] == [1, 1]
    ticks(follower, 40)
    assert fast.status().pinned_bytes == 0 < slow.status().pinned_bytes
    book.release(TENANT, keys[1])
    fast.fails = False
    ticks(follower, 12)
    assert fast.status().pinned_bytes == slow.status().pinned_bytes == sum(len(one.data) for one in chains[0])
    assert not follower._coming
    follower.close(60)
    store.close()


def test_blocks_that_are_written_later_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector's blocks are written after a request asked to keep them: they are pinned once they are there, unless their
    lease has ended before."""
    with opened(Pinned, Hours(), monkeypatch) as place:
        assert isinstance(place, Pinned)
        late = [place.frames[b"x", chain][:3] for chain in (1, 2)]
        place.memory.delete(names_of(late[0] + late[1]), deadline=time.monotonic() + 60)
        for chain in (1, 2):
            place.take(b"x", chain, 3, 600.0, 0)
        assert place.kept() == 0
        place.end(b"x", 2)
        assert place.kept() == 0
        put_all(place.memory, late[0] + late[1])
        place.leases._stored._jobs.add(place.leases._stored._tick)
        assert place.kept() == 3
        assert place.memory.status().blocks == len(place.frames) * LENGTH


def test_tenants_lease_the_same_public_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public blocks have one chain of keys for all tenants. Each tenant has a lease of its own: the end of one neither ends
    nor loses another's, and no block is left behind."""
    with opened(Device, Hours(), monkeypatch) as place:
        assert isinstance(place, Device)
        text = [1] * SIZE * LENGTH
        place.cache.public.set([public_keys(place.cache.scope(PUBLIC), text)])
        shared = place.chain_of(b"x", 1)
        assert shared == place.chain_of(b"y", 1)
        for tenant in TENANTS:
            assert place.take(tenant, 1, 5, 600.0, 0).status == "accepted"
        assert place.kept() == 5
        assert len(place.book.release(tenant_digest(b"x"), shared)) == 1
        assert (place.kept(), len(place.book.of(tenant_digest(b"y")))) == (5, 1)
        assert place.book.on_path(tenant_digest(b"x"), shared) == []
        assert len(place.book.release(tenant_digest(b"y"), shared)) == 1
        assert (place.kept(), place.book.count) == (0, 0)


@dataclass
class Reference:
    """The rules of leases, from sets that are made anew each time."""

    leases: dict[Key, tuple[float | None, int, float, int]] = field(
        default_factory=dict
    )  # ttl, priority, end, last use
    now: float = 0.0
    uses: int = 0

    def rank(self, key: Key) -> tuple[bool, int, int]:
        ttl, priority, _, used = self.leases[key]
        return ttl is None, priority, used

    def blocks(self, keys: Sequence[Key]) -> set[Key]:
        return {(tenant, chain, block) for tenant, chain, count in keys for block in range(count)}

    def of(self, tenant: bytes) -> list[Key]:
        return [key for key in self.leases if key[0] == tenant]

    def expire(self) -> None:
        self.leases = {key: one for key, one in self.leases.items() if one[2] > self.now}

    def take(self, tenant: bytes, chain: int, count: int, ttl: float | None, priority: int) -> int:
        """Returns how many blocks are kept."""
        self.expire()
        self.uses += 1
        [other] = [one for one in TENANTS if one != tenant]
        theirs = len(self.blocks(self.of(other)))
        limit = max(BUDGET - theirs, BUDGET // (2 if theirs else 1))
        wanted = [(tenant, chain, block) for block in range(count)]
        if len(self.blocks(self.of(tenant)) | set(wanted)) > limit:
            rank = ttl is None, priority, self.uses
            fixed = self.blocks([key for key in self.of(tenant) if self.rank(key) > rank])
            while wanted and len(fixed | set(wanted)) > limit:
                wanted.pop()
        if not wanted:
            return 0
        new = (tenant, chain, len(wanted))
        end = float("inf") if ttl is None else self.now + ttl
        known = self.leases.get(new, (ttl, priority, end, 0))
        ttl, end = (ttl, end) if end >= known[2] else (known[0], known[2])
        self.leases[new] = ttl, max(priority, known[1]), end, self.uses
        while len(self.blocks(self.of(tenant))) > limit:
            del self.leases[min((key for key in self.of(tenant) if key != new), key=self.rank)]
        while len(self.blocks(list(self.leases))) > BUDGET:
            del self.leases[min(self.of(other), key=self.rank)]
        return len(wanted)

    def use(self, tenant: bytes, chain: int, count: int) -> None:
        self.expire()
        for length in range(1, count + 1):
            if (tenant, chain, length) in self.leases:
                self.uses += 1
                ttl, priority, end, _ = self.leases[tenant, chain, length]
                self.leases[tenant, chain, length] = ttl, priority, end if ttl is None else self.now + ttl, self.uses

    def end(self, tenant: bytes, chain: int) -> None:
        self.leases = {key: one for key, one in self.leases.items() if key[:2] != (tenant, chain)}


@both
@pytest.mark.parametrize("seed", represented(range(40), *range(4)))
def test_random_leases(make: Callable[[Hours], Place], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tenants take, use and end, in whatever time: exactly the blocks are kept that the reference keeps."""
    draw, hours, reference = random.Random(seed), Hours(), Reference()
    with opened(make, hours, monkeypatch) as place:
        for _ in range(60):
            tenant, chain, count = draw.choice(TENANTS), draw.choice(CHAINS), draw.randrange(1, LENGTH + 1)
            match draw.choice(["take"] * 6 + ["use", "end", "wait"]):
                case "take":
                    ttl, priority = draw.choice([1000.0, 5000.0, None]), draw.randrange(3)
                    answer = place.take(tenant, chain, count, ttl, priority)
                    assert answer.tokens == reference.take(tenant, chain, count, ttl, priority) * SIZE
                case "use":
                    place.use(tenant, chain, count)
                    reference.use(tenant, chain, count)
                case "end":
                    place.end(tenant, chain)
                    reference.end(tenant, chain)
                case "wait":
                    hours.passed += (seconds := draw.uniform(0, 2000))
                    reference.now += seconds
                    place.book.expire()
                    reference.expire()
            assert place.known() == set(reference.leases)
            assert place.kept() == len(reference.blocks(list(reference.leases)))
            assert place.book.retained_bytes == place.kept() * place.book.block_bytes <= place.book.budget


MODEL, TENANT = "ab" * 32, "17d85b9bf8b5b2004d366c7acf6c8491"
_LONG = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQECAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg=="
_SHORT = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
_ROOT = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
# As two earlier builds wrote them, byte by byte: without clocks, and with them.
RECORDS = {
    "2026-11-28": {
        f"prefixes/{MODEL[:32]}/67026fb5c7a6f2431dee06d950ea0c46/rules": '{"num_tokens": 13, "block_size": 4, "root": '
        '"67026fb5c7a6f2431dee06d950ea0c46074bca570d3a4ac6ace5760847dcb783", "keys": '
        '"t0IZcJEyiUfO+cUZz6nRoKQAdzOt5nYgeS6lO/X43b7oGkwbzW59cZTkxiKASR11+l6OafpAtRsCqQ32c3OCA0xcLDvwqJPaalY07lOdoPuQa+HitoVxoLWX'
        '0xKeF7pm", "name": "rules", "version": 1, "kind": "text", "content": "You are kind.", "created": 1795995696.187068, '
        '"model": "m", "last_key": "4c5c2c3bf0a893da6a5634ee539da0fb906be1e2b68571a0b597d3129e17ba66", "format": 2, '
        '"checksum": "f580b1fb8d6fc49fe11189e7103b9b1b"}',
        f"retained/{MODEL[:32]}/{TENANT}/{'01' * 32}": f'{{"num_tokens": 4, "block_size": 4, "root": "{_ROOT}", '
        f'"keys": "{_SHORT}", "ttl": null, "expires": null, "priority": 100, "format": 2, '
        '"checksum": "a68f7b045cfad21404757369653a3177"}',
        f"retained/{MODEL[:32]}/{TENANT}/{'02' * 32}": f'{{"num_tokens": 8, "block_size": 4, "root": "{_ROOT}", '
        f'"keys": "{_LONG}", "ttl": 600.0, "expires": 1795996296.186599, "priority": 7, "format": 2, '
        '"checksum": "307a8e642fd88bca0c92a8b2a414b79f"}',
    },
    "2026-11-29": {
        f"prefixes/{MODEL[:32]}/67026fb5c7a6f2431dee06d950ea0c46/rules": '{"num_tokens": 13, "block_size": 4, "root": '
        '"67026fb5c7a6f2431dee06d950ea0c46074bca570d3a4ac6ace5760847dcb783", "keys": '
        '"t0IZcJEyiUfO+cUZz6nRoKQAdzOt5nYgeS6lO/X43b7oGkwbzW59cZTkxiKASR11+l6OafpAtRsCqQ32c3OCA0xcLDvwqJPaalY07lOdoPuQa+HitoVxoLWX'
        '0xKeF7pm", "name": "rules", "version": 1, "kind": "text", "content": "You are kind.", "created": 1795995687.421784, '
        '"model": "m", "last_key": "4c5c2c3bf0a893da6a5634ee539da0fb906be1e2b68571a0b597d3129e17ba66", "format": 2, '
        '"checksum": "2adb7da8ddaf3aa57b6534d5235fc599"}',
        f"retained/{MODEL[:32]}/{TENANT}/{'01' * 32}": f'{{"num_tokens": 4, "block_size": 4, "root": "{_ROOT}", '
        f'"keys": "{_SHORT}", "ttl": null, "expires": null, "priority": 100, "format": 2, "clock": "", "ends_at": 0.0, '
        '"checksum": "b8334ce0cfd70093dc9f00bda9a3c6e9"}',
        f"retained/{MODEL[:32]}/{TENANT}/{'02' * 32}": f'{{"num_tokens": 8, "block_size": 4, "root": "{_ROOT}", '
        f'"keys": "{_LONG}", "ttl": 600.0, "expires": 1795996287.4195707, "priority": 7, "format": 2, '
        '"clock": "a14f74aa-17b0-4a05-9c45-f59c771bb32b/time:[4026531834]", "ends_at": 25828.840234484, '
        '"checksum": "bfd6df11767cb44d08a077a78088accc"}',
    },
}


@pytest.mark.parametrize("build", RECORDS)
def test_records_of_earlier_builds(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that earlier builds have written are known with all that they said, and end like others: a retention
    after its ttl, counted from when it was first seen, since its writer's clock is another one."""
    hours, deadline = Hours(), time.monotonic() + 60
    for module in (lease_follower, shared_records):
        monkeypatch.setattr(module, "time", hours)
    monkeypatch.setattr(shared_records, "clock_id", lambda: "another machine's")
    memory = MemoryStore(1 << 20)
    with closing(TieredStore([memory])) as store:
        for key, text in RECORDS[build].items():
            memory.put_record(key, text.encode(), deadline=deadline)
        root = bytes(range(32))
        keys = [bytes([number]) * 32 for number in (1, 2)]
        headers = [Header(LAYOUT, root[:ROOT_BYTES], key, root, 0, RAW, 100, 100) for key in keys]
        frames = [frame(header, bytes(100)) for header in headers]
        put_all(memory, frames)
        memory.pin(names_of(frames), deadline=deadline)  # as the earlier build did
        pins = StorePins(store, MODEL, [StoredGroup(KVGroup(GroupKind.FULL, SIZE), (LAYOUT,))])
        book = Leases[int](100, 100, block_bytes=1, clock=hours.monotonic)
        follower = LeaseFollower(book, store, pins, SIZE)
        service = PrefixService(
            lambda content: [ord(char) for char in str(content)],
            lambda *_: None,
            PrefixStorage(store, pins, "m", SIZE),
        )
        try:
            timed, lasting = book.of(TENANT)
            assert (timed.tokens, timed.ttl, timed.priority, timed.root) == (8, 600.0, 7, root)
            assert (lasting.tokens, lasting.ttl, lasting.priority) == (4, None, 100)
            [name] = service.refresh()
            assert (name.name, name.version, name.content) == ("rules", 1, "You are kind.")
            assert memory.status().pinned_bytes == memory.status().bytes > 0
            hours.passed += 601
            book.expire()
            assert follower.flush(60)
            assert book.of(TENANT) == [lasting]
            assert memory.status().pinned_bytes == memory.status().bytes // 2
            book.release(TENANT, [lasting.key])
            service.remove("rules")
            assert follower.flush(60)
            assert memory.records("", deadline=deadline) == [] and memory.status().pinned_bytes == 0
        finally:
            follower.close(5)


class AskedStore(MemoryStore):
    """A memory store whose callers are interrupted, once, when it has read a record: by what is in `meanwhile`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.meanwhile: list[Callable[[], object]] = []

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        found = super().get_record(key, deadline=deadline)
        while self.meanwhile:
            self.meanwhile.pop()()
        return found


@pytest.mark.parametrize("record", ["has expired", "was removed elsewhere"])
def test_a_request_retains_during_a_scan(record: str) -> None:
    """While a scan looks at a prefix whose retention is over, by its time or as another instance has ended it, a request
    retains this prefix again: what it is told holds. It is known, its record is in the store, and its blocks are pinned."""
    root, deadline = bytes(range(32)), time.monotonic() + 60
    memory = AskedStore(1 << 20)
    frames = make_frames(1, 2, 100, root=root)
    keys = [frame.header.key for frame in frames]
    put_all(memory, frames)
    with closing(TieredStore([memory])) as store:
        pins = StorePins(store, MODEL, [StoredGroup(KVGroup(GroupKind.FULL, SIZE), (LAYOUT,))])
        book = Leases[bytes](100, 100, block_bytes=1)
        follower = LeaseFollower(book, store, pins, SIZE)

        def retain() -> None:
            wish = Retention(2 * SIZE, 600.0, 0)
            answer = book.retain(TENANT, root, keys, keys, wish, block_size=SIZE, whole=False)
            assert answer == RetentionAnswer("accepted", 2 * SIZE, 600.0)

        def again() -> None:
            book.release(TENANT, keys)
            retain()

        def write(key: bytes, ends_at: float) -> str:
            chain = [*keys[:-1], key]
            over = RetentionRecord(
                2 * SIZE,
                SIZE,
                root.hex(),
                b"".join(chain),
                ttl=1.0,
                expires=0.0,
                priority=0,
                clock=clock_id(),
                ends_at=ends_at,
            )
            name = RETENTIONS.key(MODEL[:32], TENANT, key.hex())
            memory.put_record(name, RETENTIONS.encode(over), deadline=deadline)
            return name

        try:
            name = RETENTIONS.key(MODEL[:32], TENANT, keys[-1].hex())
            if record == "has expired":
                assert write(keys[-1], time.monotonic() - 1) == name
                memory.meanwhile.append(retain)
            else:
                retain()
                assert follower.flush(60) and memory.delete_record(name, deadline=deadline)
                follower._records._written.clear()  # so long ago that listings have it
                write(bytes(32), time.monotonic() + 600)  # what the scan reads
                memory.meanwhile.append(again)
            follower._jobs.add(follower.scan)
            for _ in range(2):  # the scan, and what it leaves to be done
                assert follower.flush(60)
            assert not memory.meanwhile
            found = book.known(TENANT, keys[-1])
            assert found is not None and found.ttl == 600.0
            stored = RETENTIONS.decode(name, bytes(memory.get_record(name, deadline=deadline) or b""))
            assert stored.ttl == 600.0
            assert memory.status().pinned_bytes == memory.status().bytes > 0
        finally:
            follower.close(5)
