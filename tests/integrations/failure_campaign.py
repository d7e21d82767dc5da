"""Lets calls inside of vLLM's connector fail, one at a time, in a real vLLM, and prints a table.

    python tests/integrations/failure_campaign.py --failures 1000 --seed 1

Needs FOREWORD_VLLM_PYTHON. What is planted, and where: `vllm_failures_script.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_process import PYTHON, RemoteVllm, disk, make_model, prompts, run

# Where calls fail, and their share of the failures: while the connector starts, serves and stops, on vLLM's thread; and on the
# connector's own threads.
PHASES = {"start": 0.3, "serve": 0.4, "stop": 0.05, "threads": 0.25}


def failures(phase: str, count: int, seed: int, folder: Path, model: Path) -> dict[str, Any]:
    """Runs `count` failures in one vLLM, and returns what they did."""
    job = {
        "model": str(model),
        "store": ["memory://?size=64MiB", disk(folder)],
        "phase": phase,
        "count": count,
        "seed": seed,
        "prompts": prompts(seed, [100, 200, 130, 150]),
    }
    return run("vllm_failures_script.py", job)


def first_tokens(seed: int, folder: Path, model: Path, rounds: int) -> list[list[float]]:
    """Seconds to the first token of as many new prompts, by turns: of vLLM alone, and of one whose connector has failed."""
    folder.mkdir()
    stores = None, ["memory://?size=64MiB", disk(folder)]
    both = [RemoteVllm(folder / f"{number}.log", {}, model, store) for number, store in enumerate(stores)]
    try:
        for one in both:
            one.ready()
        assert both[1].call("fail")["degraded"], "the connector has not failed"
        found: list[list[float]] = [[], []]
        for number, prompt in enumerate(prompts(seed, [480] * (rounds + 10))):
            for at in (number % 2, 1 - number % 2):
                found[at].append(both[at].call("time", prompt=prompt)["seconds"])
        return [times[10:] for times in found]
    finally:
        for one in both:
            one.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-tokens", type=int, default=400, help="prompts whose time to the first token is taken")
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
        alone, failed = first_tokens(given.seed, Path(made) / "first", model, given.first_tokens)
    one, other = statistics.median(alone), statistics.median(failed)
    print(
        f"\nTime to the first token of {given.first_tokens} new prompts of 480 tokens each, by turns, median: vLLM alone "
        f"{one * 1e3:.2f} ms, after a failure {other * 1e3:.2f} ms ({other / one:.3f})"
    )
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
