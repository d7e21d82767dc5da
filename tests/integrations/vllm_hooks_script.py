"""Runs in an environment with vLLM: calls of functions in the connector's hooks in steps that move no KV, as JSON.

python vllm_hooks_script.py '{"model": DIR, "store": [URL, ...], "loads": [[RUNNING, WAITING], ...]}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm_case

from benchmarks.vllm.hooks import decode, start


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    llm, meter = start(job["model"], job["store"])
    decode(llm, meter, 4, 0, 64, counts=True)
    found = []
    for running, waiting in job["loads"]:
        counted = decode(llm, meter, running, waiting, 100, counts=True)
        found.append(
            {"steps": len(counted), "calls": min(counted)}
        )  # without statistics, which slow steps read each time
    vllm_case.finish({"found": found})


if __name__ == "__main__":
    main()
