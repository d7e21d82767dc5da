"""Quotas of tenants in memory and on disk: a tenant that has reached its quota evicts its own blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreword.blocks.keys import FINGERPRINT_BYTES, Scope
from foreword.blocks.layout import ROOT_BYTES, tenant_of
from foreword.blocks.salt import Salt
from foreword.conformance import SMALL_PAYLOAD, make_frames, names_of, present, put_all, read, soon, whole
from foreword.errors import StoreConfigError
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.urls import open_store

BLOCK = HEADER_BYTES + SMALL_PAYLOAD
ROOTS = [bytes([number]) * 32 for number in range(3)]


@pytest.fixture(params=["memory://", "disk://{folder}"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Opens a store with room for 40 blocks and a quota, if there is one."""
    stores: list[Store] = []

    def make(quota: str) -> Store:
        url = request.param.format(folder=tmp_path / str(len(stores)))
        limit = f"&tenant_quota={quota}" if quota else ""
        stores.append(open_store([f"{url}?size={40 * BLOCK}{limit}"]))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def root_of(salt: Salt) -> bytes:
    return Scope(b"model", 16, salt).root()


def blocks_of(store: Store, root: bytes) -> int:
    listed = store.scan(deadline=soon())
    return sum(block.name[FINGERPRINT_BYTES:].startswith(root[:ROOT_BYTES]) for block in listed)


@pytest.mark.parametrize("quota", ["25%", str(10 * BLOCK)])
def test_a_tenant_has_at_most_its_quota(opened: Callable[[str], Store], quota: str) -> None:
    """A tenant never has more than its quota, although there is room; what it used last stays, and others lose nothing."""
    store = opened(quota)
    others = [make_frames(seed, 5, SMALL_PAYLOAD, root=ROOTS[seed]) for seed in (1, 2)]
    for chain in others:
        put_all(store, chain)
    for seed in range(10, 16):
        chain = make_frames(seed, 4, SMALL_PAYLOAD, root=ROOTS[0])
        assert store.put(chain, deadline=soon()) == 4
        assert read(store, chain) == whole(chain)
        assert blocks_of(store, ROOTS[0]) <= 10
    assert blocks_of(store, ROOTS[0]) == 10 and all(read(store, one) == whole(one) for one in others)
    assert store.lookup(names_of(make_frames(14, 4, SMALL_PAYLOAD, root=ROOTS[0])), deadline=soon()) == 4
    assert store.put(make_frames(20, 30, SMALL_PAYLOAD, root=ROOTS[0]), deadline=soon()) == 10, "the first ten"


@pytest.mark.parametrize("quota", ["", "40%"])
def test_a_client_with_many_salts_is_one_tenant(opened: Callable[[str], Store], quota: str) -> None:
    """A tenant that writes every chain under another `cache_salt` has one share and one quota: another tenant, which uses what
    fits into its share now and then, finds all of it."""
    store = opened(quota)
    mine = [make_frames(seed, 4, SMALL_PAYLOAD, root=root_of(Salt(b"ann"))) for seed in range(3)]
    for chain in mine:
        put_all(store, chain)
    for number in range(60):
        flood = root_of(Salt.of(b"bob", f"salt {number}"))
        assert store.put(make_frames(100 + number, 4, SMALL_PAYLOAD, root=flood), deadline=soon()) == 4
        if number % 10 == 9:
            chain = mine[number // 10 % 3]
            assert read(store, chain) == whole(chain)
    of_bob = sum(tenant_of(block.name) == Salt(b"bob").prefix for block in store.scan(deadline=soon()))
    assert of_bob == (16 if quota else 28), "what the quota or the other tenant leaves"


def test_a_tenant_that_floods(opened: Callable[[str], Store]) -> None:
    """A tenant that writes without end does not evict another one that keeps within its share."""
    store = opened("")
    chain = make_frames(90, 3, SMALL_PAYLOAD, root=ROOTS[0])
    put_all(store, chain)
    for seed in range(91, 111):
        put_all(store, make_frames(seed, 4, SMALL_PAYLOAD, root=ROOTS[1]))
    assert read(store, chain) == whole(chain)
    put_all(store, make_frames(111, 30, SMALL_PAYLOAD, root=ROOTS[0]))
    assert sum(present(store, chain)) < 3, "beyond its share it is evicted like others"


def test_an_idle_tenant_has_no_share(opened: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that has not used the store for an hour is evicted first, and makes the shares of the others no smaller: one
    with less than half loses nothing to one that has more, also when the idle one has gone."""
    store, real = opened(""), time.monotonic
    idle, small, large = (
        make_frames(50 + number, count, SMALL_PAYLOAD, root=ROOTS[number]) for number, count in enumerate((6, 16, 18))
    )
    for chain in (idle, small, large):
        put_all(store, chain)
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3660.0)
    for chain in (small, large):
        assert read(store, chain) == whole(chain)
    for seed in range(60, 66):
        put_all(store, make_frames(seed, 4, SMALL_PAYLOAD, root=ROOTS[2]))
        assert sum(present(store, idle)) == max(6 - 4 * (seed - 59), 0)
    assert all(present(store, small)) and blocks_of(store, ROOTS[2]) == 24


def test_a_tenant_that_becomes_idle(opened: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of the others grow in the moment in which a tenant becomes idle, also if its blocks are pinned and stay, and
    however short the time since the last eviction is."""
    store, real = opened(""), time.monotonic
    idle, small, large = (
        make_frames(50 + number, count, SMALL_PAYLOAD, root=ROOTS[number]) for number, count in enumerate((6, 16, 18))
    )
    for chain in (idle, small, large):
        put_all(store, chain)
    assert store.pin(names_of(idle), deadline=soon()) == 6
    for seconds, oldest in ((3560.0, large), (3605.0, small)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: real() + seconds)
        read(store, small if oldest is large else [*large, *make_frames(60, 4, SMALL_PAYLOAD, root=ROOTS[2])])
        put_all(store, make_frames(60 + int(seconds > 3600), 4, SMALL_PAYLOAD, root=ROOTS[2]))
        # Before, a third is the share of each, and the tenant of `small` has more; its blocks were used later.
        assert all(present(store, small)) and all(present(store, idle)) and blocks_of(store, ROOTS[2]) == 18


def test_an_idle_tenant_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, a tenant that was idle and uses the store again has a share at once, and so have the others less."""
    store, real = open_store([f"memory://?size={40 * BLOCK}"]), time.monotonic
    idle, small, large = (
        make_frames(50 + number, count, SMALL_PAYLOAD, root=ROOTS[number]) for number, count in enumerate((6, 16, 18))
    )
    for chain in (idle, small, large):
        put_all(store, chain)
    assert store.pin(names_of(idle), deadline=soon()) == 6
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3660.0)
    for again in (small, large):
        assert read(store, again) == whole(again)
    put_all(store, make_frames(60, 4, SMALL_PAYLOAD, root=ROOTS[2]))
    assert all(present(store, small)), "a half for each of two"
    assert read(store, idle) == whole(idle)
    put_all(store, make_frames(61, 4, SMALL_PAYLOAD, root=ROOTS[2]))
    assert sum(present(store, small)) == 40 // 3 and all(present(store, idle)), "a third for each of three"
    store.close()


def test_wrong_quotas(opened: Callable[[str], Store]) -> None:
    """A quota has a size, and is not larger than the store."""
    for wrong in ("0", "150%", "many%", "1TiB"):
        with pytest.raises(StoreConfigError, match="tenant_quota"):
            opened(wrong)
