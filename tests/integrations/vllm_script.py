"""Runs in an environment with vLLM: generates for prompts, with or without Foreword's connector, and prints JSON.

    python vllm_script.py '{"model": DIR, "store": [URL, ...] or null, "rounds": [[[token, ...], ...], ...]}'

Between rounds vLLM forgets its own cache, so that what it hits then came from the store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    transfer = None
    if job["store"] is not None:
        transfer = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": job["store"], **job.get("extra", {})},
        }
    llm = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=job.get("kv_bytes", 64 << 20),
        block_size=32,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        kv_transfer_config=transfer,
    )
    params = SamplingParams(max_tokens=job.get("max_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False)
    rounds = []
    for prompts in job["rounds"]:
        outputs = llm.generate(
            [{"prompt_token_ids": tokens, **job.get("with", {})} for tokens in prompts], params, use_tqdm=False
        )
        rounds.append([{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs])
        if transfer is not None:
            from foreword.integrations.vllm import _shared

            for cache in _shared.values():
                cache.flush()
        llm.reset_prefix_cache()
    found: dict[str, Any] = {"rounds": rounds}
    if transfer is not None:
        [cache] = _shared.values()
        found["status"] = {name: getattr(cache.status(), name) for name in ("saved", "loaded", "cut", "dropped")}
        found["bad"] = {tier.label: dict(tier.counters.bad) for tier in cache.store.tiers}
        found["errors"] = {tier.label: dict(tier.counters.errors) for tier in cache.store.tiers}
        started = time.monotonic()
        cache.close(20)
        found["closed_in_time"] = time.monotonic() - started < 20
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # vLLM's own end takes seconds


main()
