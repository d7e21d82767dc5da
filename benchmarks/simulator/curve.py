"""Hit rate over the size of one cache: the simulator beside an independent tool, the package llmtrafficlens.

    python -m benchmarks.simulator.curve mooncake-conversation.jsonl [--lens PYTHON]

One replica whose steps take no time, so only the size of its device decides. As in that package, only the prompts of the last
half of the requests count, and outputs are left out; the last column has them. PYTHON is an interpreter that has
llmtrafficlens (`pip install llmtrafficlens`); its figures are read from the report that it writes.

That package evicts the least recently used block. Foreword evicts the end of the least recently used chain first, as a block
without the blocks before it is useless; so it may be slightly better, never worse by more than a point.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import table
from foreword.sim.costs import EngineCosts, FleetSpec
from foreword.sim.run import simulate
from foreword.sim.trace import TraceRequest, block_size_of, read_trace

INSTANT = EngineCosts(base=0.0, prefill=1e-15, attention=0.0, decode_each=0.0, decode_context=0.0)
SIZES = (1 << 20, 4 << 20, 16 << 20, 1 << 30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--lens", metavar="PYTHON", help="interpreter with llmtrafficlens")
    given = parser.parse_args()
    trace = read_trace(given.trace)
    theirs = published(given.lens, given.trace) if given.lens else {}
    prompts = [
        replace(one, ids=array("I", one.ids[: -(-one.prompt_tokens // one.ids_tokens)]), output_tokens=1)
        for one in trace
    ]
    rows, worst = [], 0.0
    for size in SIZES:
        ours, whole = hit_rate(prompts, size), hit_rate(trace, size)
        other = theirs.get(size, theirs.get(None) if size == SIZES[-1] else None)
        name = "unbounded" if size == SIZES[-1] else f"{size >> 20}M tokens"
        rows.append([name, f"{ours:.1%}", f"{other:.1%}" if other is not None else "", f"{whole:.1%}"])
        worst = max(worst, abs(ours - other)) if other is not None else worst
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(["cache", "simulator", "llmtrafficlens", "simulator, with outputs"], rows))
    if theirs:
        print(f"\nThe rates differ by {worst * 100:.2f} points at most.")
    return int(worst > 0.02)


def hit_rate(trace: Sequence[TraceRequest], tokens: int) -> float:
    """Of the prompts of the last half of the requests."""
    spec = FleetSpec(replicas=1, device_tokens=tokens, block_size=block_size_of(trace, None), events=False)
    counted = simulate(trace, spec, "round-robin", INSTANT).outcomes[len(trace) // 2 :]
    return sum(one.cached_tokens for one in counted) / sum(one.request.prompt_tokens for one in counted)


def published(python: str, trace: Path) -> dict[int | None, float]:
    """Hit rate by size in tokens, None for an unbounded cache."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        code = "import sys; from llmtrafficlens.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [python, "-c", code, "profile", str(trace), "--format", "mooncake", "-o", str(report)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        curve = json.loads(report.with_suffix(".json").read_text())["reuse_potential"]["curve"]
    return {one["capacity_tokens"]: one["hit_rate"] for one in curve}


if __name__ == "__main__":
    sys.exit(main())
