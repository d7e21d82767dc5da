"""Whether a part of a fleet answers for the whole: hit rate, TTFT, and the smallest fleet that meets a service level.

    python -m benchmarks.simulator.sample mooncake-conversation.jsonl [--copies 20] [--replicas 120,160,200] [--samples 5,10]
    python -m benchmarks.simulator.sample agent-*.jsonl [--copies 20] [--replicas 64] [--samples 8]

The whole is the trace, copied (`multiplied` in sim/trace.py; `sessions` in workloads.py for several files, one session each),
on each number of replicas; a sample of N is one in N of its sessions (`sampled`) on an N-th of the replicas. Seeds choose when
the copies begin, and which sessions are taken. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.harness import machine, set_up, table, write_figures
from benchmarks.simulator.workloads import sessions
from foreword.sim.costs import FleetSpec
from foreword.sim.report import summarize
from foreword.sim.run import simulate
from foreword.sim.trace import block_size_of, multiplied, read_trace, sampled

HEAD = ["fleet", "seeds", "hit rate", "TTFT mean", "p50", "p90", "seconds to simulate"]


def measure(traces: list[Path], copies: int, seconds: float, replicas: int, parts: int, seed: int) -> tuple[float, ...]:
    """Hit rate, mean, median and 90th percentile of TTFT in seconds, and the seconds of processor time of the simulation."""
    # Copies begin at the same times in all samples: a sample is of one whole.
    begins = seed if parts == 1 else 1
    if len(traces) > 1:
        whole = sessions(traces, copies, seconds, None, seed=begins)
    else:
        whole = multiplied(read_trace(traces[0]), copies, seed=begins)
    requests = sampled(whole, parts, seed=seed)
    spec = FleetSpec(replicas=replicas // parts, block_size=block_size_of(requests, None))
    began = time.process_time()
    result = simulate(requests, spec, "cost")
    took = time.process_time() - began
    numbers = summarize(result)
    print(
        f"{replicas} replicas, sample of {parts}, seed {seed}: {len(requests):,} requests, hits {numbers.hit_share:.1%}, "
        f"mean {numbers.mean:.3f} s, p50 {numbers.p50:.3f} s, p90 {numbers.p90:.3f} s, {took:.0f} s to simulate",
        file=sys.stderr,
        flush=True,
    )
    return numbers.hit_share, numbers.mean, numbers.p50, numbers.p90, took


def spread(values: list[float], form: str, unit: str = "") -> str:
    """The mean of some runs, and the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):{form}}{unit} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--replicas", default="120,160,200", help="sizes of the whole fleet")
    parser.add_argument("--samples", default="5,10")
    parser.add_argument("--seconds", type=float, default=1200.0, help="within which sessions of several files begin")
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
        running = {case: pool.submit(measure, given.traces, given.copies, given.seconds, *case) for case in cases}
        found = {case: future.result() for case, future in running.items()}
    rows = []
    for size in sizes:
        for parts in dict.fromkeys(case[1] for case in cases):
            runs = [found[case] for case in cases if case[:2] == (size, parts)]
            hits, *times, seconds = ([run[i] for run in runs] for i in range(5))
            name = f"{size}" if parts == 1 else f"{size}, sample of {parts}"
            rows.append(
                [
                    name,
                    str(len(runs)),
                    spread([100 * one for one in hits], ".1f", " %"),
                    *(spread(one, ".3g", " s") for one in times),
                    f"{statistics.mean(seconds):.0f}",
                ]
            )
    facts = machine() | {"copies": str(given.copies), "traces": ", ".join(one.name for one in given.traces)}
    for parts in dict.fromkeys(case[1] for case in cases):
        enough = []
        for seed in dict.fromkeys(case[2] for case in cases if case[1] == parts):
            good = [size for size in sizes if found[size, parts, seed][3] < given.limit]
            enough.append(str(min(good)) if good else f"more than {max(sizes)}")
        name = "whole" if parts == 1 else f"sample of {parts}"
        facts[f"smallest fleet with p90 below {given.limit:g} s, {name}"] = ", ".join(enough) + " (one per seed)"
    print(set_up(facts))
    print(table(HEAD, rows))
    if given.json is not None:
        write_figures(given.json, "A sample of a fleet", HEAD, rows, facts)


if __name__ == "__main__":
    main()
