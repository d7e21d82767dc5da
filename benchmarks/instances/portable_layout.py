"""Measures the portable layout: loading and saving a prompt's KV in units against whole blocks, in one process.

    python -m benchmarks.instances.portable_layout [--tokens 4096] [--rounds 15] [--stores memory disk] [--json FILE]

The KV is that of an 88M-parameter Llama (12 layers, 4 KV heads of 64), in the packings of vLLM's CPU backend: `vec` (K
transposed) and, for bfloat16 on processors with AMX, `amx` (tiles). Each round saves the prompt's blocks and waits until they
are written, then finds and loads them into other blocks, in the native layout and then in each portable one. A unit is written
tokens x heads.

load         find all blocks and load them: wall time, and processor time of all threads
save         until the blocks are copied out of the KV cache, which a step of the engine waits for
ratio        to the native layout of the same block size

All times are the best of the rounds, as other processes only make them longer.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch

from benchmarks.harness import machine, ratio, set_up, table, version_of
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import BlockUnits, LayerLayout, Layout, whole_blocks
from foreword.blocks.portable_units import portable_units
from foreword.engine.external_kv import EngineStores
from foreword.integrations.vllm_extras.packing import cpu_planes
from foreword.offload.frame_copies import PlaneGroup, copy_compiled
from foreword.offload.staging import StagingArena
from foreword.offload.unit_group import UnitGroup
from foreword.store.urls import open_store

LAYERS, HEADS, HEAD_SIZE = 12, 4, 64
PACKINGS = ((torch.bfloat16, "amx"), (torch.bfloat16, "vec"), (torch.float32, "vec"))
BLOCK_SIZES = (32, 64, 128)
# Tokens and head units; None for whole blocks.
LAYOUTS: tuple[tuple[int, int] | None, ...] = (None, (32, 2), (32, 4), (16, 4))
STAGING = 256 << 20
ROOT = bytes(32)
WITHIN = 120.0


@dataclass(frozen=True)
class Case:
    """One store, packing and block size."""

    store: str
    dtype: torch.dtype
    packing: str
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.store}, {str(self.dtype).removeprefix('torch.')} {self.packing}, blocks of {self.block_size}"


@dataclass(frozen=True)
class Times:
    """Seconds: of a load, wall and processor time, and of a save."""

    load: float
    load_cpu: float
    save: float


class Device:
    """A KV cache with room for the prompt twice, and its stores."""

    def __init__(self, case: Case, units: tuple[int, int] | None, tokens: int, url: str) -> None:
        self._count = tokens // case.block_size
        shape = (2 * self._count, HEADS, case.block_size, 2 * HEAD_SIZE)
        caches = [torch.randn(shape).to(case.dtype) for _ in range(LAYERS)]
        dtype = str(case.dtype).removeprefix("torch.")
        layers = (LayerLayout(HEADS, HEAD_SIZE, HEAD_SIZE),) * LAYERS
        layout = Layout(bytes(32), case.block_size, layers, dtype, order=f"cpu-{case.packing}")
        divided, group = _divide(layout, caches, case, units)
        size = divided.layouts[0].block_bytes
        self._changed = threading.Event()
        self.offload = EngineStores(
            open_store([url]),
            StagingArena([group], STAGING // size),
            [divided],
            lookup_timeout=WITHIN,
            load_timeout=WITHIN,
            on_change=self._changed.set,
        )
        self._keys = chain_keys(ROOT, range(tokens), case.block_size if units is None else units[0])
        self._divided = divided

    def round(self) -> Times:
        """Save the first half of the cache and load it into the second."""
        started = time.perf_counter()
        self.offload.save(ROOT, self._keys, ROOT, 0, range(self._count))
        save = time.perf_counter() - started
        assert self.offload.flush(WITHIN)
        wall, cpu = time.perf_counter(), time.process_time()
        search = self.offload.search(ROOT, self._keys, 0, len(self._keys) * self._divided.tokens)
        self._wait(lambda: search.answered)
        assert search.found is not None
        plan = self.offload.costs.best(search.found, 0, patient=True)
        assert plan is not None
        load = self.offload.load(plan, ROOT, self._keys, range(self._count, 2 * self._count))
        self._wait(lambda: load.finished)
        times = Times(time.perf_counter() - wall, time.process_time() - cpu, save)
        assert load.loaded == len(load.blocks), f"{load.loaded} of {len(load.blocks)} frames were loaded"
        return times

    def _wait(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.wait(0.01)
            self._changed.clear()


def _divide(
    layout: Layout, caches: list[torch.Tensor], case: Case, units: tuple[int, int] | None
) -> tuple[BlockUnits, Sequence[torch.Tensor] | PlaneGroup]:
    """How blocks divide into frames, and the tensors for the staging arena."""
    if units is None:
        return whole_blocks(layout), caches
    divided = portable_units(layout, unit_tokens=units[0], head_units=units[1])
    planes = [plane for cache in caches for plane in cpu_planes(cache, case.packing, HEAD_SIZE)]
    return divided, UnitGroup(planes, units[0], len(divided.layouts), copy_compiled)


def measure(case: Case, tokens: int, rounds: int) -> Iterator[tuple[str, int, Times]]:
    """Name, frames and best times of each layout; the layouts take turns."""
    with tempfile.TemporaryDirectory() as folder:
        devices = []
        for number, units in enumerate(LAYOUTS):
            url = f"disk://{folder}/{number}?size=4GiB" if case.store == "disk" else "memory://?size=512MiB"
            devices.append(Device(case, units, tokens, url))
        found: list[list[Times]] = [[device.round() for device in devices] for _ in range(rounds + 1)][1:]
        for number, units in enumerate(LAYOUTS):
            each = [one[number] for one in found]
            times = Times(*(min(getattr(one, name) for one in each) for name in ("load", "load_cpu", "save")))
            frames = tokens // (case.block_size if units is None else units[0]) * (1 if units is None else units[1])
            yield "native" if units is None else f"units of {units[0]} x {HEADS // units[1]}", frames, times
        for device in devices:
            device.offload.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stores", nargs="+", choices=("memory", "disk"), default=["memory", "disk"])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"torch": version_of("torch"), "tokens": str(arguments.tokens), "rounds": str(arguments.rounds)}
    print(set_up({**machine(), **facts}), flush=True)
    everything = {}
    for store, (dtype, packing), block_size in product(arguments.stores, PACKINGS, BLOCK_SIZES):
        case = Case(store, dtype, packing, block_size)
        results = list(measure(case, arguments.tokens, arguments.rounds))
        native = results[0][2]
        rows = [
            [
                name,
                str(frames),
                f"{times.load * 1e3:.1f}",
                f"{times.load_cpu * 1e3:.1f}",
                f"{times.save * 1e3:.1f}",
                f"{ratio(times.load, native.load):.2f}",
                f"{ratio(times.load_cpu, native.load_cpu):.2f}",
            ]
            for name, frames, times in results
        ]
        print(f"\n{case.name}\n")
        head = ("layout", "frames", "load ms", "load CPU ms", "save ms", "load ratio", "CPU ratio")
        print(table(head, rows), flush=True)
        everything[case.name] = {name: {"frames": frames, **asdict(times)} for name, frames, times in results}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "results": everything}, file, indent=2)


if __name__ == "__main__":
    main()
