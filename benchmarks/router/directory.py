"""The directory of 10 million blocks over 8 replicas: memory per block, looking up a prompt of 32k tokens, events per second.

    python -m benchmarks.router.directory [--blocks 10000000] [--replicas 8]

Every replica holds chains of 2,048 blocks (32,768 tokens of 16 per block). A tenth of each chain is a system prompt that one in
eight chains share, so that lookups meet several holders. Beside it the obvious structure, a dictionary from key to the set of
replicas, at a tenth of the size, and for vLLM's events the table from its hashes to our keys. Each in its own process.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

from benchmarks.harness import machine, median, set_up, table
from foreword.routing.directory import CacheTier, Directory
from foreword.routing.event_feed import KeyTable
from foreword.routing.placement import Candidate, CostPolicy, PlacementQuery

PROMPT = 2048
SHARED = PROMPT // 10
GROUPS = 8


def chain(number: int) -> list[bytes]:
    """The keys of prompt `number`: hash chains as real ones are."""
    keys: list[bytes] = []
    key = sha256(f"group {number % GROUPS}".encode()).digest()
    for i in range(PROMPT):
        key = sha256(key if i != SHARED else key + number.to_bytes(8, "big")).digest()
        keys.append(key)
    return keys


def rss() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def prompts(blocks: int) -> int:
    """How many prompts have this many their own blocks."""
    return max(blocks // (PROMPT - SHARED), 1)


def chains(blocks: int) -> Iterator[tuple[int, list[bytes]]]:
    return ((number, chain(number)) for number in range(prompts(blocks)))


def lookups(numbers: list[int], look: Callable[[list[bytes]], object]) -> float:
    """Median microseconds of a lookup."""
    times = []
    for number in numbers:
        keys = chain(number)
        started = time.perf_counter()
        look(keys)
        times.append((time.perf_counter() - started) * 1e6)
    return median(times)


def fill(directory: Directory, blocks: int, replicas: int) -> float:
    """Seconds spent in `stored`, 32 blocks per event."""
    spent = 0.0
    for number, keys in chains(blocks):
        name = f"replica-{number % replicas}"
        started = time.perf_counter()
        for low in range(0, PROMPT, 32):
            directory.stored(name, CacheTier.DEVICE, keys[low - 1] if low else None, keys[low : low + 32])
        spent += time.perf_counter() - started
    return spent


def remove(directory: Directory, numbers: list[int], replicas: int) -> float:
    """Seconds spent in `removed`, a block per event, tails first."""
    spent = 0.0
    for number in numbers:
        keys = chain(number)[::-1]
        started = time.perf_counter()
        for key in keys:
            directory.removed(f"replica-{number % replicas}", CacheTier.DEVICE, (key,))
        spent += time.perf_counter() - started
    return spent


def measure_directory(blocks: int, replicas: int) -> list[list[str]]:
    rng = random.Random(1)
    before = rss()
    directory = Directory(blocks * 5 // 4)
    spent = fill(directory, blocks, replicas)
    held = len(directory)
    size = (rss() - before) / held
    known = rng.choices(range(prompts(blocks)), k=200)
    cold = range(10**7, 10**7 + 200)
    warm_us = lookups(known, directory.lookup)
    cold_us = lookups(list(cold), directory.lookup)
    policy = CostPolicy()

    def place(keys: list[bytes]) -> object:
        found = directory.lookup(keys)
        query = PlacementQuery(keys, PROMPT * 16, 16)
        return policy.choose(
            query, [Candidate(f"replica-{i}", reach=found.of(f"replica-{i}")) for i in range(replicas)]
        )

    placed_us = lookups(known, place)
    started = time.perf_counter()
    keys = chain(known[0])
    made_us = (time.perf_counter() - started) * 1e6 / len(keys) * PROMPT
    gone = remove(directory, known[:100], replicas)
    return [
        ["records held (blocks per replica)", f"{held:,}"],
        ["forgotten for want of room", f"{directory.evicted:,}"],
        ["memory per block, by RSS", f"{size:.1f} bytes"],
        ["lookup of 32k tokens, held", f"{warm_us:.1f} us"],
        ["lookup of 32k tokens, cold", f"{cold_us:.1f} us"],
        ["lookup and decision", f"{placed_us:.1f} us"],
        ["making the keys, for comparison", f"{made_us:.0f} us"],
        ["stored, 32 blocks per event", f"{prompts(blocks) * PROMPT / spent:,.0f} blocks/s"],
        ["removed, one block per event", f"{100 * PROMPT / gone:,.0f} events/s"],
    ]


def measure_full(blocks: int, replicas: int) -> list[list[str]]:
    """A directory that is full: every insertion makes others go."""
    directory = Directory(blocks // 4)
    spent = fill(directory, blocks, replicas)
    stored = prompts(blocks) * PROMPT
    return [[f"stored into a full one ({blocks // 4:,})", f"{stored / spent:,.0f} blocks/s"]]


def measure_dictionary(blocks: int, replicas: int) -> list[list[str]]:
    before = rss()
    held: dict[bytes, set[str]] = {}
    for number, keys in chains(blocks):
        for key in keys:
            held.setdefault(key, set()).add(f"replica-{number % replicas}")
    size = (rss() - before) / len(held)

    def look(keys: list[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        for depth, key in enumerate(keys, start=1):
            names = held.get(key)
            if not names:
                break
            for name in names:
                if found.get(name, 0) == depth - 1:
                    found[name] = depth
        return found

    known = random.Random(1).choices(range(prompts(blocks)), k=50)
    return [
        [f"dictionary of sets ({len(held):,}): memory", f"{size:.1f} bytes"],
        ["dictionary of sets: lookup of 32k tokens, held", f"{lookups(known, look):.1f} us"],
    ]


def measure_names(blocks: int) -> list[list[str]]:
    before = rss()
    names = KeyTable(blocks * 5 // 4)
    spent = 0.0
    for _, keys in chains(blocks):
        started = time.perf_counter()
        for key in keys:
            names.put(key[-8:], key)
        spent += time.perf_counter() - started
    return [
        [f"vLLM's hashes to keys ({blocks:,}): memory", f"{(rss() - before) / blocks:.1f} bytes"],
        ["vLLM's hashes to keys: put", f"{prompts(blocks) * PROMPT / spent:,.0f} blocks/s"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=8)
    args = parser.parse_args()
    facts = {
        **machine(),
        "blocks": f"{args.blocks:,}",
        "replicas": str(args.replicas),
        "prompt": f"{PROMPT} blocks of 16",
    }
    print(set_up(facts), end="\n\n")
    small = args.blocks // 10
    rows: list[list[str]] = []
    # Memory that one measurement freed would hide what the next one takes, so each has its own process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        rows += processes.submit(measure_directory, args.blocks, args.replicas).result()
        rows += processes.submit(measure_full, small, args.replicas).result()
        rows += processes.submit(measure_dictionary, small, args.replicas).result()
        rows += processes.submit(measure_names, small).result()
    print(table(["what", "value"], rows))


if __name__ == "__main__":
    main()
