"""Hit rate of a tenant whose working set fits into its share, while another tenant floods the store.

    python benchmarks/store_tenants.py [--size 16MiB] [--rounds 400]

The quiet tenant repeats chains of 40 % of the budget. The loud one writes new chains all the time, five for each chain of
the other. Printed: the hit rate of the quiet tenant alone and beside the flood, in the memory and the disk store.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from foreword.config import parse_bytes
from foreword.conformance import make_frames, names_of, put_all, read, soon
from foreword.store.base import Store
from foreword.store.disk.disk_store import DiskStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore

CHAIN = 16
PAYLOAD = 16 << 10
QUIET_PART = 0.4
LOUD_CHAINS = 5
QUIET, LOUD = b"quiet tenant".ljust(32), b"loud tenant".ljust(32)


def hit_rate(store: Store, size: int, rounds: int, *, flood: bool) -> float:
    """The share of the quiet tenant's blocks that are found, after its first round."""
    count = int(size * QUIET_PART) // (CHAIN * (PAYLOAD + HEADER_BYTES))
    chains = [make_frames(seed, CHAIN, PAYLOAD, root=QUIET) for seed in range(count)]
    draw = random.Random(1)
    for chain in chains:
        put_all(store, chain)
    found = 0
    for number in range(rounds):
        chain = draw.choice(chains)
        hits = store.lookup(names_of(chain), deadline=soon())
        found += sum(data is not None for data in read(store, chain[:hits]))
        put_all(store, chain)
        for other in range(LOUD_CHAINS if flood else 0):
            put_all(store, make_frames(1_000_000 + number * LOUD_CHAINS + other, CHAIN, PAYLOAD, root=LOUD))
    return found / (rounds * CHAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("16MiB"))
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    print("| store | alone | beside the flood | points lost |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Callable[[str], Store]] = {
            "memory": lambda _: MemoryStore(arguments.size),
            "disk": lambda name: DiskStore(Path(folder) / name, arguments.size),
        }
        for label, make in stores.items():
            rates = []
            for flood in (False, True):
                with closing(make(f"{flood}")) as store:
                    rates.append(100 * hit_rate(store, arguments.size, arguments.rounds, flood=flood))
            print(f"| {label} | {rates[0]:.1f} % | {rates[1]:.1f} % | {rates[0] - rates[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
