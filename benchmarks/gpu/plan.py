"""Everything that needs a GPU, in one command below nine minutes (five more with vLLM), offline: models are made on the spot.

    python -m benchmarks.gpu.plan [--device cuda] [--out results] [--steps tokens,copies] [--tiny]     (make gpu)
    python -m benchmarks.gpu.plan --json docs/figures/70-gpu.json --results results/gpu-plan.json

Each step (gpu/steps.py) runs in a process of its own with a time limit, side by side where it measures no time; a step that
fails is printed as failed, with its error, and the others run. Writes `gpu-plan.md` and `gpu-plan.json` into the output
folder. Ends with status 2 where there is no GPU, and 1 if a step failed. Needs what `pip install '.[engine]'` installs, and
Triton; only the step `serve` needs what `foreword serve` needs.

The second form runs nothing: it makes the table of docs/benchmarks.md from results, which may come from another machine.

With `--device cpu --tiny` and TRITON_INTERPRET=1 the same steps run on a CPU with tiny shapes, which tries the script.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import LARGE, STEPS, TINY
from benchmarks.harness import machine, table, version_of

ROOT = Path(__file__).resolve().parents[2]


def run_step(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A step in a process of its own: its rows, seconds, and the error if it failed."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.plan",
        "--only",
        name,
        "--device",
        options.device,
        *(["--tiny"] if options.tiny else []),
    ]
    # The limits are for a GPU.
    limit = STEPS[name].limit * (6 if options.tiny else 1)
    begin = time.perf_counter()
    error = None
    out = options.out / f"{name}.out"  # what a step has found is there also if this process is killed
    try:
        with out.open("w") as answers:
            done = subprocess.run(
                command, stdout=answers, stderr=subprocess.PIPE, text=True, timeout=limit, env=os.environ
            )
        if done.returncode:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            error = lines[-1][:400] if lines else f"status {done.returncode}"
            print(done.stderr[-4000:], file=sys.stderr)
    except subprocess.TimeoutExpired:
        error = f"took more than {limit} s"
    lines = [line for line in out.read_text().splitlines() if line.startswith("[")]
    rows = json.loads(lines[-1]) if lines else []
    return {"step": name, "seconds": round(time.perf_counter() - begin, 1), "error": error, "rows": rows}


def describe(device: str) -> dict[str, str]:
    """The device and the versions."""
    import torch

    card = torch.cuda.get_device_name() if device.startswith("cuda") else "none: on a CPU, in Triton's interpreter"
    versions = {name: version_of(name) for name in ("torch", "triton", "transformers")}
    return {"card": card, **versions, "cpu": machine()["cpu"], "date": time.strftime("%Y-%m-%d")}


def markdown(facts: dict[str, str], results: list[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [f"# GPU plan: {facts['card']}", "", ", ".join(f"{k} {v}" for k, v in facts.items() if k != "card"), ""]
    for result in results:
        outcome = f"FAILED: {result['error']}" if result["error"] else "done"
        lines += [f"## {result['step']}: {outcome} ({result['seconds']} s)", ""]
        if result["rows"]:
            cells = [[row.get(key, "") for key in ("what", "figure", "share", "limit")] for row in result["rows"]]
            lines += [table(["", "figure", "share", "limit"], cells), ""]
    return "\n".join(lines)


def write_table(target: Path, sources: list[Path]) -> None:
    """The results of some runs in a table of docs/benchmarks.md. A step that was run again has the later results; what the
    table has of other steps stays."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sources]
    found: dict[str, list[dict[str, Any]]] = {}
    if target.exists():
        for row in json.loads(target.read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["cells"][0], []).append(row)
    for run in runs:
        for result in run["results"]:
            error = (result["error"] or "").partition(": [")[0]  # without what was compared, which rows say
            failed = [{"what": f"failed: {error[:120]}", "figure": ""}] if error else []
            found[result["step"]] = [
                {
                    "cells": [result["step"], row["what"], row["figure"], row.get("share") or row.get("limit", "")],
                    "processor": run["facts"]["card"],
                    "date": run["facts"]["date"],
                }
                for row in result["rows"] + failed
            ]
    versions = ", ".join(f"{name} {runs[0]['facts'][name]}" for name in ("torch", "triton", "transformers"))
    table = {
        "title": "The engine on a GPU",
        "text": f"`make gpu`: a Llama of 8B parameters with random weights in bfloat16 ({versions}). Kernels are compared with "
        "PyTorch in float32, tokens with Transformers; `serve` is `foreword serve` with the built-in model in float32, "
        "asked, asked again, and after a restart. `vllm` is vLLM with the connector, in one process, and vLLM alone: a Llama "
        "of 1B parameters in bfloat16, a long prompt of 8,192 tokens.",
        "head": ["step", "what", "figure", "share, or limit"],
        "command": "gpu/plan.py",
        "rows": [row for step in STEPS for row in found.get(step, ())],
    }
    target.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """0 if all steps succeeded, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Tests and measurements that need a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try this script")
    parser.add_argument("--steps", default=",".join(STEPS), help="which steps, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--only", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write a table from --results, and run nothing")
    parser.add_argument("--results", type=Path, nargs="+", help="gpu-plan.json of earlier runs")
    options = parser.parse_args()
    if options.json:
        write_table(options.json, options.results or [options.out / "gpu-plan.json"])
        return 0
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no GPU here: PyTorch sees no CUDA device. Nothing was run.")
        return 2
    if options.only:
        shapes = TINY if options.tiny else LARGE
        print(json.dumps(STEPS[options.only].run(shapes, torch.device(options.device), options.tiny)))
        return 0
    facts, results = describe(options.device), []
    options.out.mkdir(parents=True, exist_ok=True)
    for result in run_steps(options):
        results.append(result)
        print(markdown(facts, [result]), flush=True)
        (options.out / "gpu-plan.json").write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
        (options.out / "gpu-plan.md").write_text(markdown(facts, results) + "\n")
    return int(any(result["error"] for result in results))


def run_steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of the steps: first of those that measure no time, side by side, then of the others."""
    names = options.steps.split(",")
    with ThreadPoolExecutor(len(names)) as pool:
        yield from pool.map(lambda name: run_step(name, options), [name for name in names if not STEPS[name].timed])
    yield from (run_step(name, options) for name in names if STEPS[name].timed)


if __name__ == "__main__":
    raise SystemExit(main())
