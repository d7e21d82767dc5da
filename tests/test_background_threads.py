"""Background threads do not compete with compute threads, and searches have a bounded timeout."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from foreword.blocks.layout import LayerLayout, Layout
from foreword.engine.external_kv import EngineStores
from foreword.offload.policy import PATIENCE
from foreword.offload.staging import StagingArena
from foreword.store.background import set_background_cores, use_background_cores
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists and binds single threads")
T = TypeVar("T")


def elsewhere(work: Callable[[], T]) -> T:
    """Run on a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


@linux
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes with one thread here")
def test_copies_start_no_openmp_threads() -> None:
    """Copying blocks starts no OpenMP threads, which would compete with the compute threads."""
    blocks = torch.zeros(64, 1 << 18, dtype=torch.uint8)
    staging = StagingArena([[blocks]], 64)

    def copy() -> set[str]:
        before = set(os.listdir("/proc/self/task"))
        staging.gather(range(64), range(64))
        staging.scatter(range(64), range(64))
        return set(os.listdir("/proc/self/task")) - before

    assert elsewhere(copy) == set()


def resident(address: int) -> int:
    """Bytes of the mapping at this address that have pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if "-" in name:
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low <= address < high
        elif inside and name == "Rss:":
            return int(values[0]) << 10
    raise AssertionError("nothing is mapped there")


@linux
def test_pages_are_allocated_before_they_are_written() -> None:
    """The pages of a staging arena are allocated in the background, so that no load waits for them."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        held = ctypes.c_char.from_buffer(page)
        populated = ctypes.CDLL(None).madvise(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(1), 23)
        del held
    if populated:
        pytest.skip("this kernel populates no pages (MADV_POPULATE_WRITE, Linux 5.14)")
    blocks = torch.zeros(16, 1 << 20, dtype=torch.uint8)
    staging = StagingArena([[blocks]], 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(staging.buffer(0)))
    until = time.monotonic() + 60
    while resident(address) < 16 << 20:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not any(staging.buffer(15))


@linux
def test_background_threads_use_the_background_cores() -> None:
    """A thread started from a bound thread uses the background cores. Without background cores it stays bound."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}

    def started_on_one_core() -> set[int]:
        os.sched_setaffinity(0, one)
        found: list[set[int]] = []

        def report() -> None:
            use_background_cores()
            found.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=report)
        thread.start()
        thread.join(60)
        return found[0]

    assert elsewhere(started_on_one_core) == one
    set_background_cores(cores)
    try:
        assert elsewhere(started_on_one_core) == cores
    finally:
        set_background_cores(())


def test_the_deadline_of_a_search_follows_the_compute_time() -> None:
    """A search may take the configured time, or a tenth of the time to compute the blocks if that is longer."""
    layout = Layout(b"m" * 32, 16, (LayerLayout(1, 8, 8),), "float32")
    blocks = torch.zeros(8, layout.block_bytes, dtype=torch.uint8)
    store = TieredStore([MemoryStore(1 << 20)])
    cache = EngineStores(store, StagingArena([[blocks]], 8), [layout], lookup_timeout=1.0)
    keys = [bytes([number]) * 32 for number in range(100)]
    try:
        now = time.monotonic()
        assert cache.search(bytes(32), keys, 0, 1600).deadline >= now + 1.0
        cache.prefill_rate.note(1600, 1000.0)  # tokens, seconds: as many tokens as 100 blocks have
        now = time.monotonic()
        assert cache.search(bytes(32), keys, 0, 1600).deadline >= now + PATIENCE * 1000.0 * 0.99
        assert cache.search(bytes(32), keys[:1], 0, 16).deadline >= now + 1.0
    finally:
        cache.close()
