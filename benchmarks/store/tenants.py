"""Hit rate of a tenant whose working set fits into its share, while another tenant floods the store.

    python -m benchmarks.store.tenants [--size 16MiB] [--rounds 400]

The quiet tenant repeats chains of 40 % of the budget. The loud one writes new chains all the time, five for each chain of
the other, all without a salt of its client, or each under another one. Printed: the hit rate of the quiet tenant alone and
beside both floods, in the memory and the disk store, without and with a quota of 50 % of the budget.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
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
QUOTA = 0.5


def root_of(tenant: bytes, cache_salt: str | None = None) -> bytes:
    return Scope(b"model", 16, Salt.of(tenant, cache_salt)).root()


QUIET = root_of(b"quiet")
# The salt of the loud tenant's chains, by their number; None for no flood.
FLOODS: dict[str, Callable[[int], bytes] | None] = {
    "alone": None,
    "beside the flood": lambda _: root_of(b"loud"),
    "with a salt per chain": lambda number: root_of(b"loud", f"salt {number}"),
}


def hit_rate(store: Store, size: int, rounds: int, flood: Callable[[int], bytes] | None) -> float:
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
        if flood is not None:
            for other in range(number * LOUD_CHAINS, (number + 1) * LOUD_CHAINS):
                put_all(store, make_frames(1_000_000 + other, CHAIN, PAYLOAD, root=flood(other)))
    return found / (rounds * CHAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("16MiB"))
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    print(f"| store | {' | '.join(FLOODS)} | points lost |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Callable[[str, float | None], Store]] = {
            "memory": lambda _, quota: MemoryStore(arguments.size, tenant_quota=quota),
            "disk": lambda name, quota: DiskStore(Path(folder) / name, arguments.size, tenant_quota=quota),
        }
        for label, make in stores.items():
            for quota in (None, QUOTA):
                rates = []
                for name, flood in FLOODS.items():
                    with closing(make(f"{name} {quota}", quota)) as store:
                        rates.append(100 * hit_rate(store, arguments.size, arguments.rounds, flood))
                with_quota = "" if quota is None else ", with a quota"
                shown = " | ".join(f"{rate:.1f} %" for rate in rates)
                print(f"| {label}{with_quota} | {shown} | {rates[0] - min(rates):.1f} |", flush=True)


if __name__ == "__main__":
    main()
