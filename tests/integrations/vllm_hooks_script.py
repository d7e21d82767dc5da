"""Runs in an environment with vLLM: calls of functions in the connector's hooks in steps that move no KV, as JSON.

python vllm_hooks_script.py '{"model": DIR, "store": [URL, ...], "loads": [[RUNNING, WAITING], ...]}'

Counted in steps that read no statistics (`calls`), and in steps that all do (`reading`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm_case

from benchmarks.vllm.hooks import decode, start
from foreword.integrations.vllm import connector_metrics


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    llm, meter = start(job["model"], job["store"])
    decode(llm, meter, 4, 0, 64, counts=True)
    found = []
    for running, waiting in job["loads"]:
        counts: dict[str, Any] = {}
        for name, seconds in (("reading", 0.0), ("calls", 1e9)):
            vars(connector_metrics)["REPORT_SECONDS"] = seconds
            # The interval in force was set by the last report. These prompts' KV is saved, on disk too, before what counts: one
            # that a writer ends in the meantime changes the counts that a step reads.
            decode(llm, meter, running, waiting, 4, counts=True)
            assert vllm_case.worker_of(llm).offload.flush(vllm_case.WITHIN)
            counted = decode(llm, meter, running, waiting, 60, counts=True)
            counts |= {"steps": len(counted), name: sorted(counted)}
        found.append(counts)
    vllm_case.finish({"found": found})


if __name__ == "__main__":
    main()
