"""Cost of a memory tier for a load that comes from the disk behind it.

    python -m benchmarks.store.promotion [--folder /var/tmp] [--sizes 64,1024] [--rounds 9] [--mib 64]

A fresh engine loads a chain that only the disk has, with the stores of three deployments, whose order is drawn anew in each
round: the disk alone; memory and disk; and memory and disk as it was, where what was loaded is copied from the staging arena.
Processor time is that of all threads of the process from the load's start until nothing waits to be written; the pages of the
tier's memory were cleared before. Bytes hashed and copied by the host per byte delivered are counted where
the code does it; the kernel's copy out of its page cache is not among them. Blocks in memory afterwards are counted, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash

from benchmarks.harness import machine, set_up, table
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.engine.external_kv import EngineStores
from foreword.offload import manager
from foreword.offload.load import LoadPlan
from foreword.offload.staging import RowGroup, StagingArena
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.memory import memory_store
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

ROOT = b"r" * 32
TOKENS = 16
LAYERS = 8
KINDS = ("disk", "memory and disk", "memory and disk, copied")


def layout_of(size: int) -> Layout:
    """The layout of blocks of `size` bytes."""
    return Layout(
        b"m" * 32,
        TOKENS,
        (LayerLayout(1, size // LAYERS // TOKENS // 8, size // LAYERS // TOKENS // 8),) * LAYERS,
        "float32",
    )


def engine(stores: Sequence[Store], layout: Layout, count: int) -> tuple[EngineStores, torch.Tensor]:
    blocks = torch.zeros(count, layout.block_bytes, dtype=torch.uint8)
    slots = max(2 * (32 << 20) // layout.block_bytes, 8)
    return EngineStores(TieredStore(stores), StagingArena([[blocks]], slots), [layout]), blocks


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that the host hashes and copies."""
    counts: Counter[str] = Counter()
    copy, write = RowGroup.copy, memory_store.MemoryArena.write
    hashed = xxhash.xxh3_128

    def hash_(data: Any = b"") -> Any:
        counts["hashed"] += memoryview(data).nbytes
        return hashed(data)

    def copied(group: RowGroup, arena: Any, block: int, slot: int, many: int, **more: Any) -> None:
        counts["copied"] += group.block_bytes * many
        copy(group, arena, block, slot, many, **more)

    def written(arena: Any, offset: int, data: memoryview, size: int = 0) -> None:
        counts["copied"] += size or data.nbytes
        write(arena, offset, data, size)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(xxhash, "xxh3_128", hash_))
        stack.enter_context(mock.patch.object(RowGroup, "copy", copied))
        stack.enter_context(mock.patch.object(memory_store.MemoryArena, "write", written))
        yield counts


def await_clearing() -> None:
    """Wait until the pages of new memory are cleared, as they are when a model has been read: 256 MiB ahead of their use."""
    while any(one.name.endswith("-pages") for one in threading.enumerate()):
        time.sleep(0.01)


def load(kind: str, folder: str, layout: Layout, count: int) -> dict[str, float]:
    """A load by a fresh engine."""
    stores: list[Store] = [DiskStore(folder, 1 << 30)]
    if kind != "disk":
        stores.insert(0, MemoryStore(2 * count * (layout.block_bytes + 4096)))
    with ExitStack() as stack:
        if kind == KINDS[2]:
            stack.enter_context(mock.patch.object(manager, "read_into", return_value=None))
        counts = stack.enter_context(counted())
        engine_stores, _ = engine(stores, layout, count)
        keys = chain_keys(ROOT, [1] * TOKENS * count, TOKENS)
        place = len(stores) - 1
        plan = LoadPlan(0, TOKENS * count, {(0, number): place for number in range(count)})
        await_clearing()
        began, wall = time.process_time(), time.perf_counter()
        loaded = engine_stores.load(plan, ROOT, keys, range(count), patient=True)
        assert loaded.task is not None
        loaded.task.result()
        wall = time.perf_counter() - wall
        engine_stores.flush()
        spent = time.process_time() - began
        size = count * layout.block_bytes
        there = stores[0].status().blocks if place else 0
        engine_stores.close()
        assert loaded.loaded == count
        return {
            "processor ms": spent * 1e3,
            "wall ms": wall * 1e3,
            "hashed": counts["hashed"] / size,
            "copied": counts["copied"] / size,
            "in memory": there,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--sizes", default="64,1024", help="KiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=64)
    given = parser.parse_args()
    draw = random.Random(1)
    print(set_up(machine()))
    rows = []
    for size in [int(text) << 10 for text in given.sizes.split(",")]:
        layout, count = layout_of(size), (given.mib << 20) // size
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = str(Path(folder, "blocks"))
            saver, blocks = engine([DiskStore(path, 1 << 30)], layout, count)
            blocks.random_(0, 255)
            keys, step = chain_keys(ROOT, [1] * TOKENS * count, TOKENS), 16
            for low in range(0, count, step):
                parent = keys[low - 1] if low else ROOT
                assert saver.save(ROOT, keys[low : low + step], parent, low, range(low, low + step)) == step
                assert saver.flush()
            saver.close()
            results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for _ in range(given.rounds):
                for kind in draw.sample(KINDS, len(KINDS)):
                    results[kind].append(load(kind, path, layout, count))
        alone = [one["processor ms"] for one in results["disk"]]
        for kind in KINDS:
            found = {name: statistics.median(one[name] for one in results[kind]) for name in results[kind][0]}
            ratio = statistics.median(
                one["processor ms"] / base for one, base in zip(results[kind], alone, strict=True)
            )
            rows.append([f"{size >> 10} KiB", kind, *(f"{value:.2f}" for value in found.values()), f"{ratio:.2f}"])
    print(table(["block", "stores", "processor ms", "wall ms", "hashed", "copied", "in memory", "of disk alone"], rows))


if __name__ == "__main__":
    main()
