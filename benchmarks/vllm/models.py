"""Models of many kinds under vLLM, alone and with the connector: tokens that differ, and cached tokens.

    python -m benchmarks.vllm.models --vllm-python ENVIRONMENT/bin/python [--kinds Llama,LFM2] [--prompts 200]
        [--threads 1] [--json FILE]

The models are small and random (`foreword/referee/models.py`); the environment is made by `.ci/vllm FOLDER`. Prompts
have 20 to 1,500 tokens and share prefixes. One prompt after the other is asked, in these passes:

own    a second time: vLLM's own cache has everything, alone and with the connector
reset  with the connector, after vLLM's own cache was reset: hits come from the disk
fresh  with the connector in a fresh process

In float32 every answer is compared with vLLM's alone. Kinds whose answers depend on what is computed together (in bfloat16 all
do) are compared with hits of as many tokens in vLLM's own cache; prompts without such a hit are counted apart.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, set_up, table
from foreword.referee.models import KINDS

TESTS = Path(__file__).resolve().parents[2] / "tests" / "integrations"

Answers = list[dict[str, Any]]
_WITHIN = 3_600


class Failed(Exception):
    """vLLM did not start, or ended early."""


def measure(kind: Any, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    model, store = kind.build(folder / "model"), [f"disk://{folder}/kv?size=4GiB"]
    job = {
        "model": str(model),
        "kv_bytes": 1 << 30,
        "llm": kind.arguments(),
        "prompts": {"seed": arguments.seed, "count": arguments.prompts},
    }
    alone, first = _run(
        arguments,
        {
            **job,
            "runs": [
                {"store": None, "passes": ["ask", "ask"]},
                {"store": store, "passes": ["ask", "ask", "forget", "ask"]},
            ],
        },
    )
    [fresh] = _run(arguments, {**job, "runs": [{"store": store, "passes": ["ask"]}]})
    cold, own = alone["answers"]
    passes = {"cold": first["answers"][0], "own": first["answers"][1], "reset": first["answers"][2]}
    passes["fresh"] = fresh["answers"][0]
    row: dict[str, Any] = {"kind": kind.name, "layers": kind.layers, "dtype": kind.dtype, "groups": alone["groups"]}
    for name, found in passes.items():
        row[name] = compare(found, cold if kind.exact or name == "cold" else own, kind.exact)
        row[name]["fewer"] = _fewer(found, cold if name == "cold" else own)
    return {**row, "alone": {"cold": _cached(cold), "own": _cached(own)}}


def compare(found: Answers, reference: Answers, exact: bool) -> dict[str, int]:
    """Tokens that differ and their prompts; cached tokens; prompts that could not be compared."""
    pairs = [
        (mine["tokens"], theirs["tokens"])
        for mine, theirs in zip(found, reference, strict=True)
        if exact or mine["cached"] == theirs["cached"]
    ]
    return {
        "tokens": sum(a != b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)),
        "prompts": sum(mine != theirs for mine, theirs in pairs),
        "cached": _cached(found),
        "apart": len(found) - len(pairs),
    }


def _cached(found: Answers) -> int:
    return sum(one["cached"] for one in found)


def _fewer(found: Answers, than: Answers) -> int:
    """Prompts that had fewer cached tokens than under vLLM alone."""
    return sum(mine["cached"] < theirs["cached"] for mine, theirs in zip(found, than, strict=True))


def _run(arguments: argparse.Namespace, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises Failed with the last line that vLLM wrote."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent.parent), "OMP_NUM_THREADS": str(arguments.threads)}
    command = [arguments.vllm_python, str(TESTS / "vllm_kinds_script.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_WITHIN, check=False)
    if done.returncode:
        raise Failed(next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), done.stderr[-300:]))
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])["results"]
    return found


def show(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = ["model", "KV cache groups", "dtype", "differing tokens: cold", "own", "reset", "fresh", "not comparable"]
    head += ["cached tokens, vLLM alone: own", "connector: own", "reset", "fresh", "prompts with fewer"]
    passes = ("cold", "own", "reset", "fresh")
    lines = [
        [
            row["kind"],
            ", ".join(row["groups"]),
            row["dtype"],
            *(str(row[name]["tokens"]) for name in passes),
            str(sum(row[name]["apart"] for name in passes)),
            f"{row['alone']['own']:,}",
            *(f"{row[name]['cached']:,}" for name in passes[1:]),
            str(sum(row[name]["fewer"] for name in passes)),
        ]
        for row in rows
    ]
    return table(head, lines)


def main() -> None:
    """Measure every kind, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--kinds", default=",".join(KINDS), help="names with commas between")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of vLLM")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    facts = machine()
    print(
        set_up(
            {
                **facts,
                "prompts": f"{arguments.prompts} of 20 to 1,500 tokens, 8 tokens generated",
                "threads": str(arguments.threads),
            }
        ),
        flush=True,
    )
    rows = []
    for name in arguments.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(measure(KINDS[name], arguments, Path(folder)))
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f"{name}: {error}", flush=True)
                continue
        print(f"{name}: done", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    print()
    print(show(rows))


if __name__ == "__main__":
    main()
