"""Whether a part of a fleet answers for the whole: hit rate, TTFT, and the smallest fleet that meets a service level.

    python -m benchmarks.simulator.sample mooncake-conversation.jsonl [--copies 20] [--replicas 120,160,200] [--samples 5,10]

The whole is the trace, copied (`multiplied` in sim/trace.py), on each number of replicas; a sample of N is one in N of its
sessions (`sampled`) on an N-th of the replicas. Seeds choose when the copies begin, and which sessions are taken. Progress
goes to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.harness import machine, set_up, table, write_figures
from foreword.sim.costs import FleetSpec
from foreword.sim.report import summarize
from foreword.sim.run import simulate
from foreword.sim.trace import block_size_of, multiplied, read_trace, sampled

HEAD = ["fleet", "seeds", "hit rate", "TTFT mean", "TTFT p90", "seconds to simulate"]


def measure(trace: Path, copies: int, replicas: int, parts: int, seed: int) -> tuple[float, float, float, float]:
    """Hit rate, mean and 90th percentile of TTFT in seconds, and the seconds that the simulation took."""
    # Copies begin at the same times in all samples: a sample is of one whole.
    whole = multiplied(read_trace(trace), copies, seed=seed if parts == 1 else 1)
    requests = sampled(whole, parts, seed=seed)
    spec = FleetSpec(replicas=replicas // parts, block_size=block_size_of(requests, None))
    result = simulate(requests, spec, "cost")
    numbers = summarize(result)
    print(
        f"{replicas} replicas, sample of {parts}, seed {seed}: {len(requests):,} requests, hits {numbers.hit_share:.1%}, "
        f"mean {numbers.mean:.3f} s, p90 {numbers.p90:.3f} s, {result.wall:.0f} s to simulate",
        file=sys.stderr,
        flush=True,
    )
    return numbers.hit_share, numbers.mean, numbers.p90, result.wall


def spread(values: list[float], form: str, unit: str = "") -> str:
    """The mean of some runs, and the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):{form}}{unit} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--replicas", default="120,160,200", help="sizes of the whole fleet")
    parser.add_argument("--samples", default="5,10")
    parser.add_argument("--seeds", type=int, default=2, help="of the whole")
    parser.add_argument("--sample-seeds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds: service level for the p90 of TTFT")
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at the same time")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = [int(one) for one in given.replicas.split(",")]
    cases = [
        (size, parts, seed)
        for size in sizes
        for parts in (1, *map(int, given.samples.split(",")))
        for seed in range(1, 1 + (given.seeds if parts == 1 else given.sample_seeds))
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        running = {case: pool.submit(measure, given.trace, given.copies, *case) for case in cases}
        found = {case: future.result() for case, future in running.items()}
    rows = []
    for size in sizes:
        for parts in dict.fromkeys(case[1] for case in cases):
            runs = [found[case] for case in cases if case[:2] == (size, parts)]
            hits, means, p90s, walls = ([run[i] for run in runs] for i in range(4))
            name = f"{size}" if parts == 1 else f"{size}, sample of {parts}"
            rows.append(
                [
                    name,
                    str(len(runs)),
                    spread([100 * one for one in hits], ".1f", " %"),
                    spread(means, ".2f", " s"),
                    spread(p90s, ".2f", " s"),
                    f"{statistics.mean(walls):.0f}",
                ]
            )
    facts = machine() | {"copies": str(given.copies), "trace": given.trace.name}
    for parts in dict.fromkeys(case[1] for case in cases):
        enough = []
        for seed in dict.fromkeys(case[2] for case in cases if case[1] == parts):
            good = [size for size in sizes if found[size, parts, seed][2] < given.limit]
            enough.append(str(min(good)) if good else f"more than {max(sizes)}")
        name = "whole" if parts == 1 else f"sample of {parts}"
        facts[f"smallest fleet with p90 below {given.limit:g} s, {name}"] = ", ".join(enough) + " (one per seed)"
    print(set_up(facts))
    print(table(HEAD, rows))
    if given.json is not None:
        write_figures(given.json, "A sample of a fleet", HEAD, rows, facts)


if __name__ == "__main__":
    main()
