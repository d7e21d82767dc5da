"""Draws what a restart costs from the figures of `vllm/offload.py --workloads restart --json FILE`.

python -m benchmarks.vllm.picture restart.json docs/pictures/vllm-restart.svg [--contenders alone,lmcache,foreword-disk]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.picture import Bar, bars

_NAMES = {
    "alone": ("vLLM alone", "#9aa3ad"),
    "lmcache": ("LMCache", "#5b8fd6"),
    "mooncake": ("Mooncake", "#b08d57"),
    "example": ("ExampleConnector", "#c9a0c9"),
    "foreword-memory": ("Foreword, memory", "#1f6f43"),
    "foreword-tmpfs": ("Foreword, tmpfs", "#1f6f43"),
    "foreword-disk": ("Foreword, disk", "#1f6f43"),
}


def draw(run: dict[str, Any], wanted: list[str]) -> str:
    """One bar per contender: seconds until the working set was answered again after vLLM's restart."""
    found = {one["contender"]: one for one in run["records"] if one["workload"] == "restart" and "failed" not in one}
    chosen = [name for name in wanted if name in found]
    if not chosen:
        raise SystemExit(f"no restart of {', '.join(wanted)} in this file")
    rows = []
    for name in chosen:
        one = found[name]
        label = f"{one['seconds']:,.1f} s" + (f", {one['loaded']:.0%} loaded" if one["loaded"] else "")
        rows.append(Bar(_NAMES[name][0], one["seconds"], label, _NAMES[name][1]))
    facts = run["set_up"]
    asked = found[chosen[0]]["answers"]
    subtitle = f"{asked} long documents asked again; model {facts['model']}, {facts['dtype']}, {facts['cores']} cores"
    return bars(
        "After vLLM's restart", subtitle, "Seconds until all documents were answered again after a restart", rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--contenders", default="alone,lmcache,foreword-disk")
    args = parser.parse_args()
    run = json.loads(args.figures.read_text(encoding="utf-8"))
    args.picture.write_text(draw(run, args.contenders.split(",")), encoding="utf-8")


if __name__ == "__main__":
    main()
