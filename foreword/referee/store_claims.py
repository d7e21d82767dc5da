"""`foreword conform --store URL`: the tests of `foreword.conformance` on the backend of a URL. Needs pytest, hypothesis."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from foreword.conformance import StoreContract
from foreword.errors import ConfigError
from foreword.store.base import Store
from foreword.store.types import Reach, StoreUrl
from foreword.store.urls import check_stores, parse

_VARIABLE: Final = "FOREWORD_CONFORM_STORE"
_REACHED_SECONDS: Final = 5.0
_numbers = itertools.count()


def check_store(url: str) -> int:
    """Run the tests; returns the exit status. Raises StoreError for a wrong URL, and for a store that cannot be reached,
    ConfigError for a store of another process."""
    [parsed] = check_stores([url])
    if parsed.reach is Reach.INSTANCE:
        raise ConfigError("a peer is a view of another instance's memory, not a store that can be written to")
    part = parsed.type.empty_part(parsed, f"conform-{os.getpid()}")
    with closing(part.type.open(part, None)) as store:
        store.records("", deadline=time.monotonic() + _REACHED_SECONDS)  # one that cannot be reached fails here, once
    part.type.remove_part(part)
    os.environ[_VARIABLE] = url
    TestStore.pins = parsed.type.pins
    options = ["-p", "no:cacheprovider", "-q", "-rs", "--rootdir", str(Path(__file__).parent), "-c", os.devnull]
    return int(pytest.main([*options, "--pyargs", __name__]))


class TestStore(StoreContract):
    """The contract; what a store has written is removed after each test."""

    @pytest.fixture
    def part(self) -> Iterator[StoreUrl]:
        url = parse(os.environ[_VARIABLE])
        part = url.type.empty_part(url, f"conform-{os.getpid()}-{next(_numbers)}")
        yield part
        if part.persistent:
            part.type.remove_part(part)

    @pytest.fixture
    def store(self, part: StoreUrl) -> Iterator[Store]:
        with closing(part.type.open(part, None)) as store:
            yield store

    @pytest.fixture
    def second(self, part: StoreUrl) -> Iterator[Store]:
        if not part.persistent:
            pytest.skip("the store is in this process")
        with closing(part.type.open(part, None)) as store:
            yield store
