"""Quotas of tenants in memory and on disk: a tenant that has reached its quota evicts its own blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foreword.blocks.layout import FINGERPRINT_BYTES, ROOT_BYTES
from foreword.conformance import SMALL_PAYLOAD, make_frames, names_of, put_all, read, soon, whole
from foreword.errors import StoreConfigError
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.urls import open_store

BLOCK = HEADER_BYTES + SMALL_PAYLOAD
ROOTS = [bytes([number]) * 32 for number in range(3)]


@pytest.fixture(params=["memory://", "disk://{folder}"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Opens a store with room for 40 blocks and a quota."""
    stores: list[Store] = []

    def make(quota: str) -> Store:
        url = request.param.format(folder=tmp_path / str(len(stores)))
        stores.append(open_store([f"{url}?size={40 * BLOCK}&tenant_quota={quota}"]))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


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


def test_wrong_quotas(opened: Callable[[str], Store]) -> None:
    """A quota has a size, and is not larger than the store."""
    for wrong in ("0", "150%", "many%", "1TiB"):
        with pytest.raises(StoreConfigError, match="tenant_quota"):
            opened(wrong)
