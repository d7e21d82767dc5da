"""What Foreword's threads take from those that compute beside them: cores, and patience."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from foreword.blocks.layout import LayerLayout, Layout
from foreword.offload.copies import Staging
from foreword.offload.manager import PATIENCE, OffloadManager
from foreword.store.background import set_background_cores, use_background_cores
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells and binds threads one by one")
T = TypeVar("T")


def elsewhere(work: Callable[[], T]) -> T:
    """On a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


@linux
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes with one thread here")
def test_copies_bring_no_team() -> None:
    """A thread that copies blocks makes OpenMP start no threads for it: they would compete with those that compute."""
    blocks = torch.zeros(64, 1 << 18, dtype=torch.uint8)
    staging = Staging([blocks], 64)

    def copy() -> set[str]:
        before = set(os.listdir("/proc/self/task"))
        staging.gather(range(64), range(64))
        staging.scatter(range(64), range(64))
        return set(os.listdir("/proc/self/task")) - before

    assert elsewhere(copy) == set()


@linux
def test_threads_leave_the_core_of_whoever_starts_them() -> None:
    """A thread that was started on one core, as from a bound one, runs where it was told to; nothing is bound without that."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}

    def started_on_one_core() -> set[int]:
        os.sched_setaffinity(0, one)
        found: list[set[int]] = []

        def look() -> None:
            use_background_cores()
            found.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
        return found[0]

    assert elsewhere(started_on_one_core) == one
    set_background_cores(cores)
    try:
        assert elsewhere(started_on_one_core) == cores
    finally:
        set_background_cores(())


def test_a_search_may_take_a_tenth_of_computing() -> None:
    """A late search is waited for as long as that is little beside computing the blocks, and no less than configured."""
    layout = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
    blocks = torch.zeros(8, layout.block_bytes, dtype=torch.uint8)
    store = TieredStore([MemoryStore(1 << 20)])
    cache = OffloadManager(store, Staging([blocks], 8), layout, lookup_timeout=1.0)
    keys = [bytes([number]) * 32 for number in range(100)]
    try:
        now = time.monotonic()
        assert cache.find(keys).deadline >= now + 1.0
        cache.prefill_seconds.note(1600, 1000.0)  # tokens, seconds: as many tokens as 100 blocks have
        now = time.monotonic()
        assert cache.find(keys).deadline >= now + PATIENCE * 1000.0 * 0.99
        assert cache.find(keys[:1]).deadline >= now + 1.0
    finally:
        cache.close()
