"""Loads of whole chains by an offload manager, for tests: search, plan, load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from foreword.conformance import soon
from foreword.engine.external_kv import EngineStores
from foreword.offload.load import LoadPlan, StoreLoad

WITHIN = 60.0


def plan_of(offload: EngineStores, root: bytes, keys: Sequence[bytes]) -> LoadPlan:
    """The load of a chain, all of which the stores have."""
    tokens = len(keys) * offload.units[0].tokens
    search, until = offload.search(root, keys, 0, tokens), soon(WITHIN)
    while not search.answered:
        assert time.monotonic() < until, "timeout"
        offload.wait(offload.changes, 0.01)
    assert search.found is not None and search.found.position == tokens
    return LoadPlan(0, tokens, search.found.places)


def hand_over(offload: EngineStores, root: bytes, keys: Sequence[bytes], blocks: Sequence[int]) -> StoreLoad:
    """A load of a chain into device blocks, which has not begun."""
    plan = plan_of(offload, root, keys)
    free: Iterator[int] = iter(blocks)
    parts = plan.blocks(offload.groups, keys, lambda group, block: next(free))
    return offload.hand_over(root, parts, plan.position)


def load(offload: EngineStores, root: bytes, keys: Sequence[bytes], blocks: Sequence[int]) -> StoreLoad:
    """Start to load a chain into device blocks."""
    return offload.load(plan_of(offload, root, keys), root, keys, blocks)
