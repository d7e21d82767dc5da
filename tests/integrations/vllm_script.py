"""Runs in an environment with vLLM: generates for prompts, with or without Foreword's connector, and prints JSON.

    python vllm_script.py '{"model": DIR, "store": [URL, ...] or null, "rounds": [[[token, ...], ...], ...]}'

Between rounds vLLM forgets its own cache, so that what it hits then came from the store. `resets` says for each round whether
the connector is reset too; `llm` are more of vLLM's arguments.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm_case import WITHIN, finish, loaded, make_llm, wait_for_files, worker_of


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import SamplingParams

    llm = make_llm(job)
    params = SamplingParams(max_tokens=job.get("max_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False)
    rounds = []
    for number, prompts in enumerate(job["rounds"]):
        outputs = llm.generate(
            [{"prompt_token_ids": tokens, **job.get("with", {})} for tokens in prompts], params, use_tqdm=False
        )
        rounds.append([{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs])
        worker = worker_of(llm) if job["store"] is not None else None
        if worker is not None:
            assert worker.offload.flush(WITHIN)
        elif "files" in job:
            wait_for_files(job["files"], job["counts"][number])
        llm.reset_prefix_cache(reset_connector=number < len(job.get("resets", ())) and job["resets"][number])
    found: dict[str, Any] = {"rounds": rounds}
    if job["store"] is not None:
        worker = worker_of(llm)
        if worker is not None:
            cache = worker.offload
            found["status"] = {name: getattr(cache.status(), name) for name in ("saved", "loaded", "cut", "dropped")}
            found["bad"] = {tier.label: dict(tier.counters.bad) for tier in cache.store.tiers}
            found["errors"] = {tier.label: dict(tier.counters.errors) for tier in cache.store.tiers}
            started = time.monotonic()
            cache.close(WITHIN)
            found["closed_in_time"] = time.monotonic() - started < WITHIN
        else:  # workers in processes of their own write what is queued when they are told to end
            found["loaded"] = loaded(llm) if not job.get("llm", {}).get("disable_log_stats", True) else {}
            llm.llm_engine.engine_core.shutdown()
    finish(found)


if __name__ == "__main__":
    main()
