"""Lookups of a scheduler whose workers are other processes: over real stores and sockets they end on the thread that asks."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import wait_until
from vllm_stub import stubbed_vllm
from vllm_waits import WITHIN

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.conformance import soon
from foreword.offload.lookups import StoreLookups
from foreword.offload.search import StoredGroup
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import RAW, Frame, Header, frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytestmark = pytest.mark.timeout(2 * WITHIN)
RANKS = 2
LAYOUTS = [Layout(bytes([rank]) * 32, 16, (LayerLayout(1, 8, 8),), "float32") for rank in range(RANKS)]
GROUP = StoredGroup(KVGroup(GroupKind.FULL, 16), tuple(layout.fingerprint for layout in LAYOUTS))
ROOT = b"r" * 32
BLOCKS, CHAINS = 4, 40


def keys_of(chain: int) -> list[bytes]:
    return chain_keys(ROOT, [chain] * 16 * BLOCKS, 16)


def frames_of(chain: int, rank: int) -> list[Frame]:
    size, parent, made = LAYOUTS[rank].block_bytes, ROOT, []
    for depth, key in enumerate(keys_of(chain)):
        header = Header(LAYOUTS[rank].fingerprint, ROOT[:16], key, parent, depth, RAW, size, size)
        made.append(frame(header, bytes(size)))
        parent = key
    return made


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.{name}")


class Workers:
    """Two ranks with a memory tier and a disk each, and the scheduler's lookups in them."""

    def __init__(self, vllm: Callable[[str], Any], folder: Path) -> None:
        peers = vllm("vllm_extras.peer_ranks")
        self.memory = [MemoryStore(1 << 20) for _ in range(RANKS)]
        self.endpoints = [
            vllm("vllm_extras.endpoints").LookupEndpoint([layout], [memory], "engine", rank)
            for rank, (layout, memory) in enumerate(zip(LAYOUTS, self.memory, strict=True))
        ]
        self.disks = [DiskStore(folder / "kv", 1 << 24) for _ in range(RANKS)]
        addresses = zip(LAYOUTS, self.endpoints, strict=True)
        found = peers.RankStores("memory", local=True)
        found.set_ranks({one.fingerprint: peers.WorkerMemory(where.address, "memory") for one, where in addresses})
        self.disk = DiskStore(folder / "kv", 1 << 24)
        self.store = TieredStore([found, self.disk])
        self.store.warm_up([layout.fingerprint for layout in LAYOUTS])
        self.lookups = StoreLookups(self.store, WITHIN, WITHIN, lambda: 0.0)

    def ask(self, chain: int) -> int:
        """Look up a chain. Returns how many tokens all ranks have of it."""
        search = self.lookups.search([GROUP], ROOT, keys_of(chain), 0, 16 * BLOCKS)
        wait_until(lambda: search.answered, "the end of the lookup")
        assert search.found is not None
        return search.found.position

    def close(self) -> None:
        self.lookups.close()
        self.store.close()
        for one in (*self.endpoints, *self.memory, *self.disks):
            one.close()


@pytest.fixture
def workers(vllm: Callable[[str], Any], tmp_path: Path) -> Iterator[Workers]:
    made = Workers(vllm, tmp_path)
    yield made
    made.close()


def test_names_of_sockets_have_no_passwords(vllm: Callable[[str], Any]) -> None:
    """The folder of a worker's socket, whose name every user of the machine can list, is named after the engine alone: the URLs
    of the stores, which tell the connectors of an engine apart, may have passwords."""
    settings = vllm("vllm.connector_config").ConnectorSettings.read({"store": "redis://:secret@host"})
    info = SimpleNamespace(config=SimpleNamespace(lora_config=None), separate=True, events=False)
    worker = vllm("vllm.worker_side").ForewordConnectorWorker(info, settings, f"one {settings.store.urls}")
    with closing(MemoryStore(1 << 20)) as memory:
        worker._memory_tiers, worker.offload = [memory], SimpleNamespace(units=[SimpleNamespace(layouts=LAYOUTS[:1])])
        worker._listen(LAYOUTS[:1], [], TieredStore([memory]))
        with closing(worker._lookups) as endpoint:
            assert re.fullmatch("foreword-vllm-one-0-[a-z0-9_]+", endpoint.folder.name)


def test_mixed_traffic(workers: Workers) -> None:
    """New chains, chains in memory and chains on disk, which the ranks save, evict and delete meanwhile: nearly every lookup is
    answered on the thread that asks, and all are right. A chain of which a rank lacks a part is none."""
    draw = random.Random(59)
    on_disk, in_memory = (list[set[int]]([set() for _ in range(RANKS)]) for _ in range(2))
    for rank, disk in enumerate(workers.disks):  # the first lookup behind the first writes of a process reads the index
        disk.put(frames_of(CHAINS, rank), deadline=soon())
    workers.ask(CHAINS)
    before = workers.lookups.counts()
    for _ in range(400):
        chain = draw.randrange(CHAINS)
        for rank in range(RANKS) if draw.random() < 0.8 else [draw.randrange(RANKS)]:
            frames = frames_of(chain, rank)
            for stores, known in ((workers.memory, in_memory), (workers.disks, on_disk)):
                if draw.random() < 0.3:
                    stores[rank].put(frames, deadline=soon())
                    known[rank].add(chain)
                elif draw.random() < 0.3:
                    stores[rank].delete([one.name for one in frames], deadline=soon())
                    known[rank].discard(chain)
        asked = draw.choice((chain, draw.randrange(CHAINS)))
        there = all(asked in on_disk[rank] or asked in in_memory[rank] for rank in range(RANKS))
        assert workers.ask(asked) == (16 * BLOCKS if there else 0)
    counts = workers.lookups.counts()
    total = sum(counts.lookups.values()) - sum(before.lookups.values())
    assert counts.inline - before.inline >= 0.95 * total and total == 400


def test_a_worker_that_shows_no_table(workers: Workers) -> None:
    """A worker whose names cannot be read is asked over its socket."""
    for endpoint in workers.endpoints:
        for path in endpoint.folder.glob("names-*"):
            path.unlink()
    for rank in range(RANKS):
        workers.memory[rank].put(frames_of(3, rank), deadline=soon())
    assert workers.ask(3) == 16 * BLOCKS and workers.ask(4) == 0
    assert not workers.lookups.counts().inline
