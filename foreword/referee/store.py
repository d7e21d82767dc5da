"""`foreword conform --store URL`: the tests of `foreword.conformance` on the backend of a URL. Needs pytest, hypothesis."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from foreword.conformance import StoreContract
from foreword.errors import ConfigError
from foreword.store.base import Store
from foreword.store.urls import StoreUrl, open_store, parse

_VARIABLE: Final = "FOREWORD_CONFORM_STORE"
_ERASE_SECONDS: Final = 60.0
_numbers = itertools.count()
_SHARED: Final = ("file", "s3", "gs", "az")


def check_store(url: str) -> int:
    """Run the tests; returns the exit status. Raises StoreError for a wrong URL, ConfigError for a store of another process."""
    parsed = parse(url)
    if parsed.scheme == "peer":
        raise ConfigError("a peer is a view of another instance's memory, not a store that can be written to")
    os.environ[_VARIABLE] = url
    TestStore.pins = parsed.scheme in ("memory", "disk")
    options = ["-p", "no:cacheprovider", "-q", "-rs", "--rootdir", str(Path(__file__).parent), "-c", os.devnull]
    return int(pytest.main([*options, "--pyargs", __name__]))


def part_of(url: str, number: int) -> str:
    """The URL of an empty part of a store: a folder below it, or a prefix of its own."""
    parsed: StoreUrl = parse(url)
    address, _, query = url.partition("?")
    if parsed.scheme == "memory":
        return url
    if parsed.scheme in ("disk", *_SHARED):
        address = f"{address.rstrip('/')}/conform-{os.getpid()}-{number}"
        return address + (f"?{query}" if query else "")
    more = f"prefix={parsed.options.get('prefix', 'foreword')}-conform-{os.getpid()}-{number}"
    kept = "&".join(part for part in query.split("&") if part and not part.startswith("prefix="))
    return f"{address}?{kept}&{more}" if kept else f"{address}?{more}"


class TestStore(StoreContract):
    """The contract; what a store has written is removed after each test."""

    @pytest.fixture
    def url(self) -> Iterator[str]:
        url = part_of(os.environ[_VARIABLE], next(_numbers))
        yield url
        parsed = parse(url)
        if parsed.scheme in ("disk", "file"):
            shutil.rmtree(parsed.path, ignore_errors=True)
        elif parsed.persistent:
            with closing(open_store([url])) as tiers:
                tiers.tiers[0].store.erase(deadline=time.monotonic() + _ERASE_SECONDS)

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        with closing(open_store([url])) as tiers:
            yield tiers.tiers[0].store

    @pytest.fixture
    def second(self, url: str) -> Iterator[Store]:
        if not parse(url).persistent:
            pytest.skip("the store is in this process")
        with closing(open_store([url])) as tiers:
            yield tiers.tiers[0].store
