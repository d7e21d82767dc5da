"""Lets calls inside of vLLM's connector fail, one at a time, in a real vLLM, and prints a table.

    python tests/integrations/failure_campaign.py --failures 1000 --seed 1

Needs FOREWORD_VLLM_PYTHON. What is planted, and where: `vllm_failures_script.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_process import PYTHON, disk, make_model, prompts, run

# Where calls fail, and their share of the failures: while the connector starts, serves and stops, on vLLM's thread; and on the
# connector's own threads.
PHASES = {"start": 0.3, "serve": 0.4, "stop": 0.05, "threads": 0.25}


def failures(phase: str, count: int, seed: int, folder: Path, model: Path) -> dict[str, Any]:
    """What `count` failures in one vLLM did."""
    job = {
        "model": str(model),
        "store": ["memory://?size=64MiB", disk(folder)],
        "phase": phase,
        "count": count,
        "seed": seed,
        "prompts": prompts(seed, [100, 200, 130, 150]),
    }
    return run("vllm_failures_script.py", job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not PYTHON:
        parser.error("FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
    bad: list[str] = []
    print("| where | calls | failures | vLLM served on | wrong answers | degraded | not one line | blocks lost |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory(prefix="foreword-failures-") as made:
        model = make_model(Path(made) / "model")
        for phase, share in PHASES.items():
            count = max(round(given.failures * share), 1)
            # A vLLM serves 50 of them: a lost one would show how many came before.
            found = [
                failures(phase, min(50, count - done), given.seed + done, Path(made) / f"{phase}-{done}", model)
                for done in range(0, count, 50)
            ]
            sums = [sum(len(one[name]) for one in found) for name in ("failures", "wrong", "lines", "blocks")]
            degraded = sum(one["degraded"] for one in found)
            print(
                f"| {phase} | {found[0]['calls']} | {count} | {sums[0]} | {sums[1]} | {degraded} | {sums[2]} | {sums[3]} |"
            )
            sys.stdout.flush()
            bad += [line for one in found for name in ("wrong", "lines", "blocks") for line in one[name]]
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
