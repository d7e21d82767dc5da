"""Disk stores over several folders: the contract, and one folder that fails."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from foreword.conformance import Damage, StoreContract, make_frames, names_of, read, soon, whole
from foreword.errors import StoreError, StoreUnavailable
from foreword.store.base import Store
from foreword.store.disk.striped_store import StripedStore, folder_of
from foreword.store.urls import open_store

FOLDERS = 3
SIZE = 64 << 20


def folders(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"disk{number}") for number in range(FOLDERS)]


class TestContract(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(StripedStore(folders(tmp_path), 3 * SIZE)) as store:
            yield store

    @pytest.fixture
    def second(self, tmp_path: Path) -> Iterator[Store]:
        with closing(StripedStore(folders(tmp_path), 3 * SIZE)) as store:
            yield store

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def write(_: Store, one: object, data: bytes) -> None:
            key = one.header.key.hex()  # type: ignore[attr-defined]
            [file] = tmp_path.glob(f"disk?/*/*/{key[:2]}/{key}")
            file.write_bytes(data)

        return write


def test_blocks_are_spread(tmp_path: Path) -> None:
    """A URL with several folders: each has about its share of blocks, and a store opened again finds all of them."""
    chain = make_frames(1, 300, 100)
    url = f"disk://{','.join(folders(tmp_path))}?size=3MiB"
    with closing(open_store([url])) as store:
        assert store.put(chain, deadline=soon()) == 300
    counts = [sum(1 for _ in Path(folder).glob("?" * 32 + "/*/*/*")) for folder in folders(tmp_path)]
    assert sum(counts) == 300 and min(counts) > 60
    with closing(StripedStore(folders(tmp_path), 3 << 20)) as again:
        assert again.lookup(names_of(chain), deadline=soon()) == 300
        assert read(again, chain) == whole(chain)
        assert again.status().blocks == 300 and again.status().budget == 3 << 20


def list_into(store: Store, listed: set[bytes]) -> None:
    for names in store.list_names(deadline=soon()):
        listed.update(names)


@pytest.mark.parametrize("running", [True, False])
def test_a_dead_disk(tmp_path: Path, running: bool) -> None:
    """A folder that fails, under an open store or at the start, loses its own blocks; listings say that they are not
    complete."""
    chain = make_frames(2, 60, 100)
    where = [folder_of(one.name, folders(tmp_path)) for one in chain]
    alive = [one for one, stripe in zip(chain, where, strict=True) if stripe != 1]
    dead = folders(tmp_path)[1]
    store = StripedStore(folders(tmp_path), 3 * SIZE)
    store.put(chain, deadline=soon())
    if not running:
        store.close()
    shutil.rmtree(dead)
    Path(dead).write_text("not a folder")
    if not running:
        store = StripedStore(folders(tmp_path), 3 * SIZE)
    with closing(store):
        expected = [None if stripe == 1 else bytes(one.data) for one, stripe in zip(chain, where, strict=True)]
        assert read(store, chain) == expected
        assert store.lookup(names_of(chain), deadline=soon()) == where.index(1)
        assert store.present(names_of(chain), deadline=soon()) == [stripe != 1 for stripe in where]
        more = make_frames(3, 60, 100)
        assert store.put(more, deadline=soon()) == sum(folder_of(one.name, folders(tmp_path)) != 1 for one in more)
        listed: set[bytes] = set()
        with pytest.raises(StoreError):
            list_into(store, listed)
        assert listed >= {one.name for one in alive}, "the other folders are listed"
        if not running:
            with pytest.raises(StoreError):
                store.delete(names_of(chain), deadline=soon())
            assert read(store, chain) == [None] * 60, "what could be deleted is"


def test_no_folder_can_be_opened(tmp_path: Path) -> None:
    """If all folders fail, opening the store fails."""
    for folder in folders(tmp_path):
        Path(folder).write_text("not a folder")
    with pytest.raises(StoreUnavailable):
        StripedStore(folders(tmp_path), SIZE)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("disk")]


def test_a_further_folder() -> None:
    """A further folder takes its share of the names from each of the others; the rest stay where they are."""
    names = names_of(make_frames(4, 400, 10))
    before = [folder_of(name, ["/a", "/b", "/c"]) for name in names]
    after = [folder_of(name, ["/a", "/b", "/c", "/d"]) for name in names]
    assert all(new in (old, 3) for old, new in zip(before, after, strict=True))
    assert 60 < after.count(3) < 140
