"""Runs prompts through llama-cpp-python with Foreword's cache, in an interpreter that has it (see llama_process.py)."""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType
from typing import Any

import llama_cpp

from foreword.errors import ForewordError
from foreword.integrations.llama_cpp import ForewordCache


def answer(llm: Any, prompt: list[int], count: int) -> list[int]:
    llm.create_completion(prompt=prompt, max_tokens=count, temperature=0.0)
    found: list[int] = llm.input_ids[len(prompt) : llm.n_tokens].tolist()
    return found


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    if job.get("images"):
        # As if a model that sees images was loaded before: `.ci/llama` builds without the library for those.
        sys.modules["llama_cpp.mtmd_cpp"] = ModuleType("llama_cpp.mtmd_cpp")
    settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **job.get("settings", {})}
    llm = llama_cpp.Llama(job["model"], **settings)
    cache = None
    if job["store"] is not None:
        options = job.get("cache", {})
        if "salt" in options:
            options["salt"] = options["salt"].encode()
        try:
            cache = ForewordCache(llm, job["store"], **options)
        except (ForewordError, TypeError) as error:
            print(json.dumps({"refused": type(error).__name__, "why": str(error)}))
            return
        llm.set_cache(cache)
    rounds = []
    for prompts in job["rounds"]:
        found = []
        for prompt in prompts:
            if not job.get("keep"):
                llm._ctx.kv_cache_clear()
                llm.reset()
            if cache is not None:
                cache.loaded_tokens = 0
            started = time.monotonic()
            tokens = answer(llm, prompt, job.get("count", 12))
            taken = time.monotonic() - started
            found.append({"tokens": tokens, "loaded": cache.loaded_tokens if cache else 0, "seconds": taken})
            if "own" in job:  # llama.cpp's own hit of as many blocks of this size
                llm.n_tokens = (len(prompt) - 1) // job["own"] * job["own"]
                found[-1]["own"] = answer(llm, prompt, job.get("count", 12))
        rounds.append(found)
    result: dict[str, Any] = {"rounds": rounds}
    if cache is not None:
        tiers = cache.store.tiers
        result |= {
            "lookups": dict(cache.lookups),
            "saved": cache.saved_blocks,
            "unsaved": dict(cache.unsaved),
            "bad": {tier.label: dict(tier.counters.bad) for tier in tiers},
            "bytes": cache.cache_size,
            "block": cache.store.status().blocks,
        }
        cache.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
