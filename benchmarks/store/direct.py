"""Processor time of the host for a block that a device copies straight to or from the memory tier.

    python -m benchmarks.store.direct [--sizes 64,256,2048] [--rounds 7]

All of the host's work is done, on tensors of the processor, except what a device does: kernels and copies of the copy engine,
and the calls that launch them (about 10 us for a kernel; six for a piece of the ring of 32 MiB). So figures do not depend on a
GPU. The tier has room for eight loads, and each save evicts blocks. Time is that of the threads that work: the engine's for a
save, with the one that publishes or writes, and a loading thread for a load. "Through staging" is the way without
`store.direct` on the same device, with checksums and copies by the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.runs import consecutive_runs
from foreword.engine.external_kv import EngineStores
from foreword.offload import device, direct_tier, ring
from foreword.offload.device_checksum import DeviceChecksums
from foreword.offload.load import LoadPlan
from foreword.offload.staging import StagingArena
from foreword.store.background import PagePopulator
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

ROOT = b"r" * 32
TIER_LOADS = 8  # that the memory tier has room for
TOKENS = 16
LAYERS = 32


class InOrder:
    """A device that has done its work when it is queued."""

    def submit(self, stream: device.Stream, work: Callable[[], object]) -> None:
        work()

    def record(self, stream: device.Stream) -> InOrder:
        return self

    def wait(self, stream: device.Stream, event: device.Event) -> None: ...

    def synchronize(self) -> None: ...


class Timed:
    """Processor time of calls, in the thread that makes them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given, **more)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def without_device(stack: ExitStack) -> None:
    """Leave out what a device does."""

    for place, name, call in (
        (device.PlaneTable, "copy", lambda *given, **more: None),
        (device.DeviceCopies, "_move", lambda self, target, source, slots: consecutive_runs(slots)),
        (ring.DeviceRing, "_copy_out", lambda *given: None),
        (ring.DeviceRing, "_copy_in", lambda *given: None),
        (DeviceChecksums, "seal", lambda *given: None),
        (DeviceChecksums, "check", lambda self, frames, slots, size, heads, found: found.fill_(1)),
        (direct_tier.DirectTier, "_test", lambda self: ""),
        (direct_tier, "SMALLEST_PAYLOAD", 0),
        # Nothing is copied into the tier, so its pages need not be there.
        (PagePopulator, "extend", lambda *given: None),
    ):
        stack.enter_context(mock.patch.object(place, name, call))


def measure(size: int, rounds: int, *, direct: bool) -> tuple[float, float]:
    """Microseconds for a block of `size` bytes, saved and loaded."""
    count = max(min((512 << 20) // size, 512), 64)
    row = size // (2 * LAYERS)
    layout = Layout(b"m" * 32, TOKENS, (LayerLayout(1, row // 32, row // 32),) * LAYERS, "bfloat16")
    blocks = [torch.zeros(count, row, dtype=torch.uint8) for _ in range(2 * LAYERS)]
    saved, published, loaded = Timed(), Timed(), Timed()
    with ExitStack() as stack:
        without_device(stack)
        staging = StagingArena([blocks], 8 if direct else 2 * count, InOrder())
        memory = MemoryStore((TIER_LOADS if direct else 2) * count * (size + 192), slot_bytes=size + 192)
        offload = EngineStores(TieredStore([memory]), staging, [layout], lookup_timeout=1.0, direct=direct)
        stack.callback(offload.close, 10.0)
        if direct:
            assert isinstance(offload._direct, direct_tier.DirectTier) and offload._direct.usable
            tier = offload._direct.tier
            stack.enter_context(mock.patch.object(tier, "publish", published.around(tier.publish)))
        else:
            for holder, name in ((offload._writer, "_sealed"), (offload.store.tiers[0], "put")):
                stack.enter_context(mock.patch.object(holder, name, published.around(getattr(holder, name))))
            stack.enter_context(mock.patch.object(offload._writer, "_max_write_slots", 32))
        stack.enter_context(mock.patch.object(offload, "_load", loaded.around(offload._load)))
        saves, loads, full = [], [], TIER_LOADS if direct else 1  # from then on blocks are evicted
        for number in range(full + rounds):
            keys = chain_keys(ROOT, [number] * TOKENS * count, TOKENS)
            saved.seconds = published.seconds = loaded.seconds = 0.0
            assert saved.around(offload.save)(ROOT, keys, ROOT, 0, range(count)) == count
            assert offload.flush(60.0)
            saves.append((saved.seconds + published.seconds) / count)
            plan = LoadPlan(0, count * TOKENS, {(0, block): 0 for block in range(count)})
            load = offload.load(plan, ROOT, keys, range(count), patient=True)
            assert load.task is not None
            load.task.result()  # and not `done`, which comes before the time is noted
            assert load.loaded == count, (load.loaded, count)
            loads.append(loaded.seconds / count)
    return statistics.median(saves[full:]) * 1e6, statistics.median(loads[full:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="64,256,2048", help="KiB of a block's KV")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| block | way | save, us | load, us |\n|---|---|---:|---:|")
    for size in (int(one) << 10 for one in arguments.sizes.split(",")):
        for way, direct in (("direct", True), ("through staging", False)):
            save, load = measure(size, arguments.rounds, direct=direct)
            print(f"| {size >> 10} KiB | {way} | {save:.1f} | {load:.1f} |", flush=True)


if __name__ == "__main__":
    main()
