"""Test suites for authors of storage backends, of integrations with engines, and of fronts. They need pytest and hypothesis.

A new backend implements `foreword.store.base.Store`. Its tests subclass the suites and provide stores in fixtures:

    class TestMine(StoreContract):
        @pytest.fixture
        def store(self): ...

        pins = False              # if `pin` has no effect; it still returns 0, and raises as every call does

        reserves = True           # if it keeps frames in the memory of this process, and has `reserve`, `publish` and `lend`

        bounded = True            # if the store has a budget and evicts; then it needs a second fixture:

        @pytest.fixture
        def small(self): ...      # an empty store with room for exactly SMALL_BLOCKS frames of SMALL_PAYLOAD bytes

        @pytest.fixture           # if the bytes can be changed behind the store's back
        def damage(self): ...     # a function (store, frame, bytes) that replaces the stored bytes of the frame

    class MyMachine(StoreMachine):
        pins, bounded, reserves = ..., ..., ...  # as above
        def make_store(self): ...

    TestMyMachine = MyMachine.TestCase

    class TestMyView(ReadOnlyStoreContract):      # a store that is never written to
        @pytest.fixture
        def holding(self): ...

| suite                   | tests                                                                       |
|-------------------------|-----------------------------------------------------------------------------|
| `StoreContract`         | every method, threads, deadlines; with `bounded` also eviction and pins     |
| `StoreMachine`          | random sequences of calls, compared with a dictionary                       |
| `ReadOnlyStoreContract` | a store that is only read                                                   |

An engine over Foreword's stores subclasses `foreword.conformance.engine_contract.EngineContract` (docs/guides/own-engine.md).

A front subclasses `foreword.api.front_contract.FrontContract`, with a fixture `front` that serves on real connections.
It asks each of its routes for rights, quota, charge, limits, the format of errors, and one count in the metrics.

`FlakyStore` wraps a store and injects failures, delays and damaged reads, to test what uses a store.
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
from foreword.conformance.store_contract import Damage, StoreContract
from foreword.conformance.store_machine import StoreMachine

__all__ = [
    "LAYOUT",
    "ROOT",
    "SMALL_BLOCKS",
    "SMALL_BYTES",
    "SMALL_PAYLOAD",
    "Damage",
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
