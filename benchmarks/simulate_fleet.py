"""How long the simulator takes for a large fleet, and how much memory: a trace, copied, on many replicas.

    python benchmarks/simulate_fleet.py mooncake-conversation.jsonl [--copies 125] [--replicas 1000] [--limit N]

Copies share only the blocks that most requests of the trace have (its system prompt), and begin at different times within a
minute (`multiplied` in sim/trace.py). Eight replicas per copy of Mooncake's trace is the load of the tables in
docs/guides/simulator.md. The simulator is compiled first, unless there is a copy. Progress lines go to standard error.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time
from pathlib import Path

from timing import table

from foreword.sim.compiled import use_compiled

REPORT_EVERY = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--copies", type=int, default=125)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--limit", type=int, help="only the first requests")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--no-compile", action="store_true", help="run the modules as they are")
    given = parser.parse_args()
    compiled = not given.no_compile and use_compiled(report=lambda text: print(text, file=sys.stderr, flush=True))
    run(given, compiled)


def run(given: argparse.Namespace, compiled: bool) -> None:
    # After `use_compiled`, which decides where these come from.
    from foreword.sim.costs import FleetSpec
    from foreword.sim.report import summarize
    from foreword.sim.run import simulate
    from foreword.sim.trace import block_size_of, multiplied, read_trace

    started = time.perf_counter()
    trace = multiplied(read_trace(given.trace), given.copies)[: given.limit]
    prepared = time.perf_counter() - started
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {'compiled' if compiled else 'not compiled'}; "
        f"{len(trace):,} requests, {given.copies} copies",
        file=sys.stderr,
    )

    def progress(arrived: int) -> None:
        if arrived % REPORT_EVERY == 0:
            seconds = time.perf_counter() - started - prepared
            more = seconds * (len(trace) / arrived - 1)
            line = f"{arrived:,} requests in {seconds:.0f} s, about {more:.0f} s more, peak memory {peak():.2f} GB"
            print(line, file=sys.stderr, flush=True)

    spec = FleetSpec(replicas=given.replicas, block_size=block_size_of(trace, None))
    result = simulate(trace, spec, given.policy, progress=progress)
    numbers = summarize(result)
    steps = sum(one.steps for one in result.replicas.values())
    rows = [
        ["requests, replicas", f"{len(trace):,}, {given.replicas:,}"],
        ["virtual time", f"{result.seconds:,.0f} s"],
        ["to copy the trace", f"{prepared:.1f} s"],
        ["to simulate", f"{result.wall:.1f} s"],
        ["per request", f"{result.wall / len(trace) * 1e3:.3f} ms"],
        ["peak memory", f"{peak():.2f} GB"],
        ["engine steps", f"{steps:,}"],
        ["hit rate", f"{numbers.hit_share:.1%}"],
        ["TTFT mean, p90", f"{numbers.mean:.2f} s, {numbers.p90:.2f} s"],
    ]
    print(table(["", given.policy], rows))


def peak() -> float:
    """Of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
