"""What any backend must pass, and stores that misbehave on purpose. For tests: needs pytest and hypothesis.

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self): ...

        bounded = True            # only with a budget: then also

        @pytest.fixture
        def small(self): ...      # an empty store with room for exactly SMALL_BLOCKS frames of SMALL_PAYLOAD bytes

    class MyMachine(StoreMachine):
        def make_store(self): ...

    TestMyMachine = MyMachine.TestCase

    class TestMyView(ReadOnlyStoreContract):      # a store that is only read
        @pytest.fixture
        def over(self): ...

`FlakyStore` wraps a store and fails, waits, and alters what is read, when told to or by a seeded plan.
"""

from __future__ import annotations

from foreword.conformance.flaky import Fault, FlakyStore
from foreword.conformance.frames import (
    LAYOUT,
    ROOT,
    SMALL_BLOCKS,
    SMALL_BYTES,
    SMALL_PAYLOAD,
    make_frames,
    names_of,
    present,
    put_all,
    read,
    soon,
    whole,
)
from foreword.conformance.read_only_contract import ReadOnlyStoreContract
from foreword.conformance.store_contract import StoreContract
from foreword.conformance.store_machine import StoreMachine

__all__ = [
    "LAYOUT",
    "ROOT",
    "SMALL_BLOCKS",
    "SMALL_BYTES",
    "SMALL_PAYLOAD",
    "Fault",
    "FlakyStore",
    "ReadOnlyStoreContract",
    "StoreContract",
    "StoreMachine",
    "make_frames",
    "names_of",
    "present",
    "put_all",
    "read",
    "soon",
    "whole",
]
