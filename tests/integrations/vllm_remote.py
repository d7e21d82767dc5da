"""Runs in an environment with vLLM: a vLLM that serves calls from its standard input until that ends.

    python vllm_remote.py '{"model": DIR, "store": [URL, ...], "role": "kv_both", "extra": {...}, "separate": false}'

Every line of the input is a JSON object: `do` and its arguments. Every reply is a line of JSON after a mark.
`separate`: the engine and its worker are in separate processes, as with `vllm serve`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from vllm_case import WITHIN, Engine, Gate, loaded, make_llm, metrics, scheduler_of, wait_for_files, worker_of

MARK = "reply> "
_COUNTS = ("loads_declined", "leases", "leases_unread", "lent_blocks", "shared_blocks")


class Warnings(logging.Handler):
    """Collects Foreword's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        logging.getLogger("foreword").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> list[str]:
        messages, self._messages = self._messages, []
        return messages


class Served:
    """The calls that a test may make."""

    def __init__(self, job: dict[str, Any]) -> None:
        if job.get("separate"):
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self.warnings = Warnings()
        self.llm = make_llm(job)
        self.worker = worker_of(self.llm) if job["store"] is not None else None
        self.stores = len(job["store"] or ())

    def ask(self, prompt: list[int], count: int = 8, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Generate greedily; `params` are vLLM's `kv_transfer_params`."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        [output] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "params": output.kv_transfer_params,
        }

    def time(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds to the first token."""
        began = time.perf_counter()
        self.ask(prompt, 1)
        return {"seconds": time.perf_counter() - began}

    def fail(self) -> dict[str, Any]:
        """From now on the connector's scheduler side fails."""
        connector = scheduler_of(self.llm).connector
        connector._scheduler_side = None
        connector._begin = lambda namespace: 1 // 0
        self.ask([1, 2, 3], 1)
        return {"degraded": connector.degraded}

    def ask_and_kill(self, prompt: list[int], params: dict[str, Any], victim: int) -> dict[str, Any]:
        """The producer dies when its blocks are about to be read."""
        tier = self.worker.offload.store.tiers[self.stores]
        gate = Gate(tier.store, "get")
        tier.store = gate
        gate.shut()

        def kill() -> None:
            assert gate.reached.wait(WITHIN)
            os.kill(victim, signal.SIGKILL)
            gate.open()

        killer = threading.Thread(target=kill)
        killer.start()
        found = self.ask(prompt, params=params)
        killer.join(WITHIN)
        tier.store = gate._store
        return found

    def forget(self) -> dict[str, Any]:
        """vLLM's own cache, once everything is written."""
        if self.worker is not None:
            assert self.worker.offload.flush(WITHIN)
        return {"forgotten": self.llm.reset_prefix_cache()}

    def write(self) -> dict[str, Any]:
        """Wait until everything is written."""
        return {"written": self.worker.offload.flush(WITHIN)}

    def forget_written(self, folder: str, count: int) -> dict[str, Any]:
        """Resets the prefix cache when workers in other processes have written as many blocks into a folder."""
        wait_for_files(folder, count)
        return {"forgotten": self.llm.reset_prefix_cache()}

    def compute_quickly(self) -> dict[str, Any]:
        """From now on the scheduler's side believes that computing takes no time. How fast it knows the tiers to be."""
        costs = scheduler_of(self.llm).connector._scheduler_side._stores.costs
        costs.prefill_rate = lambda: 1e12
        return {"rates": list(costs._read_rates())}

    def idle(self) -> dict[str, Any]:
        """Step until vLLM has nothing left to wait for."""
        Engine(self.llm).until(lambda: not scheduler_of(self.llm).has_requests())
        return self.state()

    def state(self) -> dict[str, Any]:
        """Free blocks, leases, and blocks that were read by other instances and from producers."""
        found: dict[str, Any] = {"free": Engine(self.llm).free_blocks}
        if self.worker is None:
            return {**found, "loaded": loaded(self.llm), **{name: self._sum(name) for name in _COUNTS}}
        found["address"] = self.worker.handshake.peers
        leases = self.worker._leases
        if leases is not None:
            found.update(asdict(leases.counts), leased=leases.status().device, shared=leases.status().memory)
        tiers = self.worker.offload.store.tiers
        return {**found, "read": [tier.counters.hit_blocks for tier in tiers]}

    def sleep(self, version: str = "") -> dict[str, Any]:
        """vLLM's sleep mode, wake-up, and then this version of the weights. vLLM's worker for CPUs ignores sleep mode, so it
        gets what the one for GPUs does with the KV cache; its contents are lost meanwhile."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.worker.cpu_worker import CPUWorker

        def sleep(worker: Any, level: int = 1) -> None:
            get_kv_transfer_group().unregister_kv_caches()
            for cache in worker.model_runner.kv_caches:
                cache.fill_(777.0)

        CPUWorker.sleep = sleep
        CPUWorker.wake_up = lambda worker, tags=None: get_kv_transfer_group().restore_kv_caches()
        self.llm.sleep(level=1)
        self.llm.wake_up()
        if version:
            self.llm.llm_engine.engine_core.engine_core.set_weight_version(version)
        return self.state()

    def _sum(self, name: str) -> float:
        return sum(float(one.value) for one in metrics(self.llm, name))


def main() -> None:
    vllm = Served(json.loads(sys.argv[1]))
    print(MARK + json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        found = getattr(vllm, job.pop("do"))(**job)
        print(MARK + json.dumps({**found, "warnings": vllm.warnings.take()}), flush=True)
    if vllm.worker is None:
        vllm.llm.llm_engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
