"""The embedded engine with the embedded model, behind the lines of `worker.py`: `foreword conform --engine`."""

from __future__ import annotations

import time
from typing import Any

from foreword.blocks.salt import Salt
from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.build_engine import build_engine
from foreword.referee.worker import serve
from foreword.store_config import StoreConfig


class EmbeddedEngine:
    """The engine with a store, or without, and what the driver asks of it. `llm` of the first line has vLLM's names."""

    def __init__(self, job: dict[str, Any]) -> None:
        given = job["llm"]
        config = EngineConfig(
            dtype=given["dtype"],
            block_size=given["block_size"],
            max_model_len=given["max_model_len"],
            max_batch_tokens=given["max_num_batched_tokens"],
            kv_memory=str(given["kv_cache_memory_bytes"]),
            seed=0,
        )
        stores = tuple(job["transfer"]["store"]) if job["transfer"] else ()
        self._parts = build_engine(config, store=StoreConfig(urls=stores))
        self._count = 0

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily."""
        began = time.perf_counter()
        salt = Salt.of(b"", line.get("salt"))
        prompts = line["ask"]
        groups = [[prompt] for prompt in prompts] if line.get("how", "turn") == "turn" else [prompts]
        results = [one for group in groups for one in self._generate(group, line.get("new_tokens", 8), salt)]
        return {"results": results, "seconds": time.perf_counter() - began}

    def _generate(self, prompts: list[list[int]], new_tokens: int, salt: Salt) -> list[dict[str, Any]]:
        core = self._parts.core
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        found: dict[str, list[Delta]] = {}
        for prompt in prompts:
            self._count += 1
            request = Request(f"asked-{self._count}", tuple(prompt), params, salt)
            core.validate(request)
            core.add(request)
            found[request.id] = []
        while core.has_work():
            for delta in core.step():
                if delta.finish_reason == "error":
                    raise delta.failure
                found[delta.request_id].append(delta)
        return [_result(deltas) for deltas in found.values()]

    def settle(self, seconds: float) -> dict[str, Any]:
        """Wait until the stores have everything."""
        self._parts.flush(60.0)
        return {"seconds": 0.0}

    def forget(self) -> dict[str, Any]:
        """Reset the prefix cache."""
        self._parts.core.cache.clear()
        return {"done": True}


def _result(deltas: list[Delta]) -> dict[str, Any]:
    return {
        "cached": deltas[0].cached_tokens,
        "tokens": [token for delta in deltas for token in delta.tokens],
        "logprobs": [one.logprob for delta in deltas for one in delta.logprobs],
    }


if __name__ == "__main__":
    serve(EmbeddedEngine)
