"""Blocks that requests find in a Redis cluster before and after one of its three nodes, without replicas, is killed.

    python -m benchmarks.store.nodes [--chains 40] [--blocks 64]

Each request looks a chain up, reads the prefix that was found, and stores the blocks behind it, as an engine does that has
computed them. Every round asks for every chain once. Needs a Redis or Valkey server on PATH, and the packages of the tests.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import machine, set_up, table
from foreword.conformance import make_frames, names_of, read
from foreword.store.frame import Frame
from foreword.store.redis.redis_store import RedisStore
from foreword.store.tiered import TieredStore

sys.path.append(str(Path(__file__).parents[2] / "tests" / "store"))
from servers import RedisCluster  # type: ignore[import-not-found]

PAYLOAD = 16 << 10
LOOKUP = 0.25  # seconds until the deadline of a lookup
PATIENCE = 30.0


def one_round(store: TieredStore, chains: list[list[Frame]]) -> tuple[float, float]:
    """The share of blocks that were found, and the longest lookup in seconds."""
    found, longest = 0, 0.0
    for chain in chains:
        started = time.monotonic()
        hits = len(store.locate(names_of(chain), deadline=started + LOOKUP))
        longest = max(longest, time.monotonic() - started)
        found += sum(data is not None for data in read(store, chain[:hits]))
        if hits < len(chain):
            store.put(chain[hits:], deadline=time.monotonic() + PATIENCE)
    return found / sum(map(len, chains)), longest


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=64)
    arguments = parser.parse_args()
    chains = [make_frames(seed, arguments.blocks, PAYLOAD) for seed in range(arguments.chains)]
    rows: list[list[str]] = []

    def note(what: str) -> None:
        share, longest = one_round(store, random.sample(chains, len(chains)))
        rows.append([what, f"{100 * share:.1f} %", f"{longest * 1e3:.0f} ms"])

    with tempfile.TemporaryDirectory() as folder:
        cluster = RedisCluster(Path(folder), "--cluster-require-full-coverage", "no")
        try:
            store = TieredStore([RedisStore(cluster.url)])
            for what in ("empty", "stored"):
                note(what)
            cluster.nodes[0].kill()
            for number in (1, 2, 3):
                note(f"one node is dead, round {number}")
            cluster.nodes[0].start()
            time.sleep(5)
            for number in (1, 2):
                note(f"it is back, empty, round {number}")
            store.close()
        finally:
            cluster.kill()
    print(set_up(machine()))
    print(table(["cluster of three", "blocks found", "longest lookup"], rows))


if __name__ == "__main__":
    main()
