"""The contract of stores for `SqliteStore`. Run it with pytest."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from foreword_sqlite import SqliteStore

from foreword.conformance import SMALL_BYTES, Damage, StoreContract, StoreMachine
from foreword.store.base import Store
from foreword.store.frame import Frame

_SIZE = 1 << 30


class TestSqliteStore(StoreContract):
    bounded = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Callable[[int], Store]]:
        made: list[Store] = []

        def make(size: int) -> Store:
            made.append(SqliteStore(str(tmp_path / "kv.db"), size))
            return made[-1]

        yield make
        for store in made:
            store.close()

    @pytest.fixture
    def store(self, make: Callable[[int], Store]) -> Store:
        return make(_SIZE)

    @pytest.fixture
    def second(self, make: Callable[[int], Store]) -> Store:
        return make(_SIZE)

    @pytest.fixture
    def small(self, make: Callable[[int], Store]) -> Store:
        return make(SMALL_BYTES)

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Damage:
        def replace(store: Store, frame: Frame, data: bytes) -> None:
            with closing(sqlite3.connect(tmp_path / "kv.db")) as db, db:
                db.execute("UPDATE block SET data = ? WHERE name = ?", (data, frame.name))

        return replace


class SqliteMachine(StoreMachine):
    bounded = True

    def make_store(self) -> Store:
        return SqliteStore(":memory:", SMALL_BYTES)


TestSqliteMachine = SqliteMachine.TestCase
