"""Runs in an environment with vLLM: vLLM with its own offloading, and `ForewordTier` behind it, as JSON.

python vllm_offload_script.py '{"model": DIR, "tier": {"store": [URL, ...]}, "llm": {...}, "steps": [[NAME, ARG, ...], ...]}'

Prints what each step has found. vLLM refuses its offloading on processors, so `vllm_offload_cpu.py` has the copies between its
blocks and host memory.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import vllm_case

_KV_BYTES = 64 << 20


class Offloading:
    """The steps. Each is a method."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.executor import multiproc_executor

        # vLLM's CPU build would start the processes of ranks anew, and each imports everything again.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        patience = {"lookup_timeout": vllm_case.WITHIN, "load_timeout": 2 * vllm_case.WITHIN}
        tier = {"type": "ForewordTier", "module_path": "foreword.integrations.vllm", **patience, **job["tier"]}
        extra = {
            "cpu_bytes_to_use": job.get("host_bytes", 32 << 20),
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_offload_cpu",
            "secondary_tiers": [tier],
            **job.get("extra", {}),
        }
        given = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": _KV_BYTES,
            "block_size": 32, "skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False,
        }  # fmt: skip
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self.llm = LLM(job["model"], kv_transfer_config=transfer, **{**given, **job.get("llm", {})})
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.tier = self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]

    def ask(self, prompt: list[int], salt: str | None = None) -> dict[str, Any]:
        """Generate greedily. `cached`: tokens that were not computed."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        [output] = self.llm.generate([given], sampling, use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def written(self, blocks: int) -> dict[str, int]:
        """Step until as many blocks were saved, or have failed to be, since the start."""
        until = time.monotonic() + vllm_case.WITHIN
        counts = self.tier.counts
        while counts["saved"] + counts["not_saved"] + counts["refused"] < blocks:
            assert time.monotonic() < until, dict(counts)
            self.core.step()
        return dict(counts)

    def settle(self) -> None:
        """Step until vLLM's copies to host memory and all of the tier's jobs have ended."""
        until = time.monotonic() + vllm_case.WITHIN
        side = self.core.scheduler.connector.connector_scheduler
        while side._jobs or side.manager._jobs:
            assert time.monotonic() < until, "a job did not end"
            self.core.step()

    def change_weights(self) -> None:
        """Double the weights of a layer, as a trainer does that is in the workers."""
        self.llm.collective_rpc(_double)

    def reset(self) -> bool:
        """vLLM's own caches, those on the device and in host memory."""
        return bool(self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    def name_weights(self, name: str) -> None:
        self.core.set_weight_version(name)

    def about(self) -> dict[str, Any]:
        """The namespace, what has become of blocks, and vLLM's metrics of them."""
        blocks = {
            one.labels["outcome"]: one.value
            for one in self.llm.get_metrics()
            if one.name == "vllm:foreword_offload_blocks"
        }
        return {
            "namespace": self.tier.namespace.hex(),
            "degraded": self.tier.degraded,
            "counts": dict(self.tier.counts),
            "metrics": blocks,
            "budget": self.tier._store.status().budget,
            "bytes": self.tier._store.status().bytes,
        }


def _double(worker: Any) -> None:
    for name, weight in worker.model_runner.get_model().named_parameters():
        if "layers.1" in name:
            weight.data.mul_(2)


def main() -> None:
    job = json.loads(sys.argv[1])
    under = Offloading(job)
    found = [getattr(under, step[0])(*step[1:]) for step in job["steps"]]
    under.core.shutdown()
    vllm_case.finish({"found": found})


if __name__ == "__main__":
    main()
