"""Runs in an environment with vLLM: computes prompts for `vllm_contract.py`, with the store of the test, which it reaches by a
socket. Each line of the input is a prompt and its tenant, each reply what was cached, and the KV of its blocks."""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

import store_bridge
from vllm_case import Engine, make_llm, scheduler_of, worker_of

MARK = "reply> "


class Prompts(Engine):
    """vLLM's engine, which computes one prompt after another."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._names = map(str, itertools.count())
        for store in (scheduler_of(llm).connector._scheduler_side._stores.store, worker_of(llm).offload.store):
            for tier in store.tiers:  # a circuit breaker that has opened tries again at the next call
                tier.breaker._clock = itertools.count(step=100).__next__

    def compute(self, tokens: list[int], tenant: str) -> dict[str, Any]:
        self.llm.reset_prefix_cache()
        name = self.add(next(self._names), tokens, 2, **({"cache_salt": tenant} if tenant else {}))
        self.until(lambda: name in self.tokens)
        scheduler = scheduler_of(self.llm)
        [request] = scheduler.requests
        [blocks] = scheduler.kv_cache_manager.get_block_ids(request)
        config = self.engine.vllm_config.cache_config
        caches = self.engine.model_executor.driver_worker.worker.model_runner.kv_caches
        kv = {
            (number + 1) * config.block_size: "".join(
                cache.select(cache.shape.index(config.num_gpu_blocks), block).contiguous().numpy().tobytes().hex()
                for cache in caches
            )
            for number, block in enumerate(blocks[: len(tokens) // config.block_size])
        }
        assert len(set(kv.values())) == len(kv)  # these are the blocks: other tokens, other bytes
        found = {"cached": self.cached[name], "kv": kv}
        self.run()
        worker_of(self.llm).offload.flush(5.0)
        return found


def main() -> None:
    store_bridge.register()
    engine = Prompts(make_llm(json.loads(sys.argv[1])))
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(engine.compute(**json.loads(line))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
