"""The service behind named prefixes, without an engine: registering, sharing through a store, pins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from servers import wait_until

from foreword.blocks.keys import PUBLIC_ROOT
from foreword.blocks.leases import Lease, Leases
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import tenant_digest
from foreword.conformance import FlakyStore, soon
from foreword.errors import BadRequest, StoreError
from foreword.offload.search import StoredGroup
from foreword.prefixes import prefix_service, public_records
from foreword.prefixes.book import Content, NamedPrefix
from foreword.prefixes.errors import PrefixBudgetExceeded, UnknownPrefix
from foreword.prefixes.lease_records import PREFIXES, Chain, PrefixRecord
from foreword.prefixes.pins import StorePins
from foreword.prefixes.prefix_service import PrefixService, Registration
from foreword.prefixes.stored_names import PrefixStorage
from foreword.store import shared_records
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore

BLOCK, MODEL = 4, "0" * 64


class Pins(StorePins):
    """The keys that are pinned in a memory store."""

    def __init__(self, store: TieredStore) -> None:
        super().__init__(store, MODEL, [StoredGroup(KVGroup(GroupKind.FULL, BLOCK), ())])
        self.pinned: set[bytes] = set()

    def pin(self, root: bytes, keys: Chain) -> None:
        self.pinned.update(keys)

    def unpin(self, tenant: str, root: bytes, keys: Chain) -> None:
        self.pinned.difference_update(self.alone(tenant, keys)[0])


class Storage(PrefixStorage):
    """An instance's view of a memory store."""

    def __init__(self, shared: MemoryStore | None = None) -> None:
        self.shared = shared or MemoryStore(1 << 16)
        self.flaky = FlakyStore(self.shared)
        store = TieredStore([self.flaky])
        self.kept = Pins(store)
        super().__init__(store, self.kept, "m", BLOCK)

    def check_room(self, name: str, tokens: Sequence[int], salt: bytes) -> None:
        if len(tokens) > 100:
            raise PrefixBudgetExceeded("the store is too small")

    @property
    def pinned(self) -> set[bytes]:
        return self.kept.pinned


def tokenize(content: Content) -> list[int]:
    """Makes one token per character; chats are refused."""
    if not isinstance(content, str):
        raise BadRequest("this model has no chat template")
    return [ord(char) for char in content]


class Instance:
    """An engine's service, and the budget of its device in blocks."""

    def __init__(self, storage: Storage | None = None, budget: int = 1000) -> None:
        self.unpinned: list[int] = []
        self.kept = Leases[int](budget, budget, block_bytes=1, drop=self.unpinned.extend)
        self.service = PrefixService(tokenize, self._reserve, storage)
        self.book = self.service.book

    def _reserve(self, name: str, tokens: Sequence[int]) -> Lease[int]:
        lease = self.kept.reserve(name, len(tokens) // BLOCK)
        if lease is None:
            raise PrefixBudgetExceeded("the budget is spent")
        return lease

    def compute(self, registration: Registration, blocks: Sequence[int]) -> None:
        assert registration.lease is not None
        self.kept.fill(registration.lease, blocks)

    def add(self, name: str, content: str, blocks: Sequence[int] = (), *, replace: bool = False) -> NamedPrefix:
        with self.service.register(name, content, replace=replace) as registration:
            self.compute(registration, blocks)
            made = registration.finish()
        assert made is not None
        return made

    def look(self, name: str | None = None) -> list[str]:
        return [prefix.name for prefix in self.service.refresh(name=name)]


def test_versions_and_pins() -> None:
    """A new version takes the place of the old one, whose device blocks are unpinned."""
    instance = Instance()
    assert instance.add("rules", "a" * 8, [1, 2]).version == 1
    with pytest.raises(BadRequest, match="exists"):
        instance.add("rules", "b" * 8)
    assert instance.unpinned == []
    made = instance.add("rules", "b" * 4, [3], replace=True)
    assert (made.version, made.bytes, made.ready) == (2, 1, True)
    assert instance.unpinned == [1, 2]
    assert instance.service.remove("rules") == made
    assert instance.unpinned == [1, 2, 3]
    assert instance.kept.free == 1000


def test_given_up() -> None:
    """A registration that is not finished leaves neither a name nor a reservation nor pinned blocks."""
    instance = Instance()
    with instance.service.register("rules", "a" * 8) as registration:
        assert instance.kept.free == 998
        instance.compute(registration, [1, 2])
    assert (instance.kept.free, instance.unpinned, instance.book.list()) == (1000, [1, 2], [])
    assert registration.finish() is None
    for wrong in ({}, {"content": "x", "messages": []}, {"content": ""}, {"messages": [{"role": "user"}]}):
        with pytest.raises(BadRequest):
            instance.service.register("rules", **wrong)
    assert instance.kept.free == 1000


def test_two_registrations_of_one_name() -> None:
    """The second of two registrations of one name at once is refused unless it replaces."""
    instance = Instance()
    first, second = (instance.service.register("rules", text) for text in ("a" * 4, "b" * 4))
    third = instance.service.register("rules", "c" * 4, replace=True)
    for one, block in ((first, 1), (second, 2), (third, 3)):
        instance.compute(one, [block])
    assert first.finish() is not None
    with pytest.raises(BadRequest, match="exists"):
        second.finish()
    made = third.finish()
    assert made is not None and made.version == 2
    assert sorted(instance.unpinned) == [1, 2] and instance.kept.free == 999


def test_a_store_that_fails_keeps_the_old_version() -> None:
    """If no store takes the record of a new version, the old one stays."""
    storage = Storage()
    instance = Instance(storage)
    instance.add("rules", "a" * 8, [1, 2])
    storage.flaky.fail_next()
    with pytest.raises(StoreError):
        instance.add("rules", "b" * 8, [3, 4], replace=True)
    assert instance.book.get("rules").version == 1 and instance.kept.free == 998
    assert instance.unpinned == [3, 4]
    with pytest.raises(PrefixBudgetExceeded):
        instance.service.register("long", "x" * 101)
    assert instance.kept.free == 998


def test_other_instances_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that one instance registers, replaces and removes is seen by another; its KV is pinned there once it is
    computed."""
    monkeypatch.setattr(prefix_service, "_UNKNOWN_SECONDS", 3600.0)
    monkeypatch.setattr(prefix_service, "_REFRESH_SECONDS", 3600.0)
    storage = Storage()
    here, there = Instance(storage), Instance(Storage(storage.shared))
    here.add("rules", "a" * 8)
    assert there.service.stale() and there.look() == ["rules"] and not there.service.stale()
    assert there.service.stale(name="other") is False  # within the pause of unknown names
    adopted = there.book.get("rules")
    assert (adopted.version, adopted.ready, adopted.content) == (1, False, "a" * 8)
    there.book.use("rules", "text")
    with there.service.repin(adopted) as registration:
        there.compute(registration, [7, 8])
        registration.finish()
    ready = there.book.get("rules")
    assert (ready.version, ready.ready, ready.uses, ready.created) == (1, True, 1, adopted.created)
    here.add("rules", "b" * 8, replace=True)
    assert there.look() == ["rules"] and there.unpinned == [7, 8]
    with there.service.repin(adopted) as registration:  # an older version: nothing comes of it
        there.compute(registration, [9])
        assert registration.finish() is None
    assert there.unpinned == [7, 8, 9]
    here.service.remove("rules")
    assert there.look() == [] and not there.book.list()


@pytest.mark.parametrize("trouble", ["slow", "hangs"])
def test_public_blocks_when_a_process_starts(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process knows which blocks are public before its first request. A store that hangs does not keep it from starting; what
    it has is known once it answers."""
    flaky, keys = FlakyStore(MemoryStore(1 << 16)), [bytes([number]) * 32 for number in (1, 2)]
    store = TieredStore([flaky])
    record = PrefixRecord(
        2 * BLOCK, BLOCK, bytes(32).hex(), b"".join(keys), name="law", version=1, kind="text", content="x", created=0.0,
        model="tiny", last_key=keys[-1].hex(),
    )  # fmt: skip
    SharedRecords(store, PREFIXES).put(PREFIXES.key(MODEL[:32], PUBLIC_ROOT.hex(), "law"), record)
    if trouble == "slow":
        flaky.delay(0.1)
        monkeypatch.setattr(public_records, "READ_SECONDS", 60.0)
    else:
        flaky.stick()
        monkeypatch.setattr(public_records, "READ_SECONDS", 0.05)
        monkeypatch.setattr(public_records, "_SCAN_SECONDS", 0.01)
    with contextlib.closing(public_records.PublicRecords(store, MODEL)) as found:
        assert found.blocks.keys == (frozenset(keys) if trouble == "slow" else frozenset())
        monkeypatch.setattr(found._records, "_seconds", 60.0)
        flaky.release()
        wait_until(lambda: found.blocks.keys == frozenset(keys), "what is public")


def test_a_removed_prefix_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix whose record has gone is dropped, once its registration is some seconds old."""
    storage = Storage()
    instance = Instance(storage)
    instance.add("rules", "a" * 8, [1])
    [key] = storage.shared.records("", deadline=soon())
    storage.shared.delete_record(key, deadline=soon())
    instance.look()
    assert instance.book.get("rules"), "just registered: the listing may lag behind"
    monkeypatch.setattr(shared_records, "_SETTLED_SECONDS", -1.0)
    instance.look()
    with pytest.raises(UnknownPrefix):
        instance.book.get("rules")
    assert instance.unpinned == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_names_that_were_removed_elsewhere_leave_their_budget(fails: bool) -> None:
    """A registration for which the budget is spent drops names that another instance has removed, also those of other tenants
    and those that were registered here a moment ago; not those whose record is damaged, and none while the store fails."""
    storage = Storage()
    here, there = Instance(storage, budget=4), Instance(Storage(storage.shared))
    here.add("rules", "a" * 8, [1, 2])
    with here.service.register("other", "o" * 8, salt=b"t2") as registration:
        here.compute(registration, [3, 4])
        registration.finish()
    there.look()
    there.service.refresh(b"t2")
    with pytest.raises(PrefixBudgetExceeded):
        here.add("more", "b" * 8, [5, 6])
    [key] = [one for one in storage.shared.records("", deadline=soon()) if one.endswith("/rules")]
    storage.shared.put_record(key, b"{}", deadline=soon())
    there.service.remove("other", salt=b"t2")
    storage.flaky.inject("fail", float(fails))
    if fails:
        with pytest.raises(PrefixBudgetExceeded):
            here.add("more", "b" * 8, [5, 6])
        assert here.unpinned == []
        return
    here.add("more", "b" * 8, [5, 6])
    assert here.unpinned == [3, 4] and here.book.get("rules")
    assert here.kept.free == 0


class _SlowStorage(Storage):
    """Answers late whether a record exists."""

    def __init__(self, shared: MemoryStore | None = None) -> None:
        super().__init__(shared)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def exists(self, name: str, salt: bytes) -> bool:
        found = super().exists(name, salt)
        self.asked.set()
        assert self.go_on.wait(60)
        return found


@pytest.mark.parametrize("again", [False, True])
def test_names_change_while_a_store_is_asked(again: bool) -> None:
    """While a slow store is asked which names were removed elsewhere, others register and remove names. A version that was
    registered meanwhile is not dropped."""
    storage = _SlowStorage()
    here, there = Instance(storage, budget=4), Instance(Storage(storage.shared))
    here.add("rules", "a" * 8, [1, 2])
    here.add("small", "s" * 4, [3])
    there.look()
    there.service.remove("rules")
    refused = list[PrefixBudgetExceeded]()

    def register() -> None:
        try:
            here.add("more", "b" * 12, [5, 6, 7])
        except PrefixBudgetExceeded as error:
            refused.append(error)

    def change() -> None:
        here.service.remove("small")
        if again:
            here.service.remove("rules")
            here.add("rules", "r" * 8, [8, 9])

    registering, changing = threading.Thread(target=register), threading.Thread(target=change)
    registering.start()
    assert storage.asked.wait(60)
    changing.start()
    changing.join(60)
    waited = changing.is_alive()
    storage.go_on.set()
    registering.join(60)
    changing.join(60)
    assert not waited
    assert (len(refused), here.book.version("rules", salt=b"")) == ((1, 1) if again else (0, 0))
    assert [one.name for one in here.book.list()] == (["rules"] if again else ["more"])


def test_a_store_that_cannot_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where records cannot be listed, an unknown name is looked up by itself, and known names stay."""
    storage = Storage()
    Instance(storage).add("rules", "a" * 8)

    def fails(*_: object, **__: object) -> list[str]:
        raise StoreError("cannot list")

    monkeypatch.setattr(storage.shared, "records", fails)
    instance = Instance(storage)
    assert (
        instance.look() == []
        and instance.look("rules") == ["rules"]
        and instance.look("none") == []
        and instance.look("a/b") == []
    )
    assert instance.book.get("rules").version == 1


def test_a_prefix_that_does_not_suit(caplog: pytest.LogCaptureFixture) -> None:
    """A prefix that this model's template refuses is skipped, with one warning; the others are adopted."""
    storage = Storage()
    chat = ({"role": "system", "content": "x"},)
    facts: dict[str, Any] = {"name": "chat", "version": 1, "kind": "messages", "content": chat, "model": "m"}
    record = PrefixRecord(1, BLOCK, **facts, created=0.0, last_key="")
    key = PREFIXES.key(MODEL[:32], tenant_digest(b""), "chat")
    SharedRecords(TieredStore([storage.shared]), PREFIXES).put(key, record)
    Instance(storage).add("rules", "a" * 8)
    instance = Instance(storage)
    assert instance.look() == ["rules"]
    instance.look()
    assert [record.getMessage() for record in caplog.records] == [
        "prefix 'chat' does not suit this server: this model has no chat template"
    ]


def test_shared_blocks_stay_pinned() -> None:
    """Removing a prefix unpins in the store what no other prefix of the tenant needs."""
    storage = Storage()
    instance = Instance(storage)
    instance.add("short", "a" * 8)
    instance.add("long", "a" * 8 + "b" * 8)
    assert len(storage.pinned) == 4
    instance.service.remove("long")
    assert len(storage.pinned) == 2
    instance.add("short", "c" * 4, replace=True)
    assert storage.pinned == set(storage.chain([ord("c")] * 4, b"")[1])
