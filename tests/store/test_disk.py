"""The disk store: the contract, its files, and several processes on one folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.store.base import Store
from foreword.store.disk import DiskStore
from foreword.testing import SMALL_BYTES, StoreContract


class TestContract(StoreContract):
    bounded = True

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20)
        yield store
        store.close()

    @pytest.fixture
    def second(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "store", 64 << 20)
        yield store
        store.close()

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Store]:
        store = DiskStore(tmp_path / "small", SMALL_BYTES)
        yield store
        store.close()
