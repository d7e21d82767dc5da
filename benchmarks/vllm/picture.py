"""Puts a run into the figures that README's chart is drawn from: what a restart takes, and what is left of the throughput where
nothing is reused.

    python -m benchmarks.vllm.offload MODEL ... --contenders alone,lmcache,foreword-memory,foreword-disk \\
        --workloads restart,saving --json run.json
    python -m benchmarks.vllm.picture run.json --date 2026-11-21 --processor "AMD EPYC, AVX2 only"
    python docs/generate.py          draws docs/pictures/vllm-compared.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "10-vllm.json"
# The workload behind each group of bars by its unit, which figure of a record is shown, and the contender for
# Foreword.
_GROUPS = {"s": ("restart", "seconds", "foreword-disk"), "%": ("saving", "ratio", "foreword-memory")}


def values(run: dict[str, Any], unit: str) -> dict[str, float]:
    """The bars of a group: one per contender, vLLM alone first. Raises SystemExit if one is not in the run or failed."""
    workload, key, foreword = _GROUPS[unit]
    found = {one["contender"]: one for one in run["records"] if one["workload"] == workload and "failed" not in one}
    names = {"alone": "vLLM alone", "lmcache": "LMCache", foreword: f"Foreword, {foreword.removeprefix('foreword-')}"}
    bars: dict[str, float] = {}
    for contender, name in names.items():
        if contender == "alone" and unit == "%":
            bars[name] = 100
        elif contender not in found:
            raise SystemExit(f"the run has no {workload} of {contender}")
        else:
            bars[name] = round(found[contender][key] * (100 if unit == "%" else 1), 1)
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--date", required=True)
    parser.add_argument("--processor", required=True)
    args = parser.parse_args()
    run = json.loads(args.run.read_text(encoding="utf-8"))
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    for row in figures["rows"]:
        if group := row.get("compared"):
            group["values"] = values(run, group["unit"])
            row |= {"date": args.date, "processor": args.processor}
            print(f"change the words of this row by hand: {row['cells']}, {group['values']}")
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
