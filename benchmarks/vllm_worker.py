r"""Measures ONE vLLM, with or without a KV connector, in one process, and prints a line of JSON; `vllm_offload.py` runs it.

    echo '{"model": DIR, "dtype": "float32", "transfer": null, "max_model_len": 8192, "kv_bytes": N, "prompts": [...]}' \
        | python benchmarks/vllm_worker.py -

Every prompt is a list of token ids, or `"forget"`: then vLLM forgets its own prefix cache first. Times are seconds to the first
token and to the last, one request at a time, after a warm-up that does not count.
"""

import json
import os
import resource
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0,1")


def main() -> None:
    """Generates for every prompt in turn."""
    job: dict[str, Any] = json.loads(sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1])
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    started = time.perf_counter()
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job.get("batched", 2048),
        kv_cache_memory_bytes=job["kv_bytes"],
        block_size=job.get("block_size", 32),
        skip_tokenizer_init=True,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config=job["transfer"],
    )
    ready = time.perf_counter() - started
    new_tokens = job.get("new_tokens", 8)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    full = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [7] * 40}], one, use_tqdm=False)
    results = []
    for prompt in job["prompts"]:
        if prompt == "forget":
            time.sleep(job.get("settle", 1.0))  # what writes behind gets its time
            llm.reset_prefix_cache()
            continue
        began = time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": prompt}], full, use_tqdm=False)
        whole = time.perf_counter() - began
        metrics = output.metrics
        first = metrics.first_token_latency if metrics is not None and metrics.first_token_latency else whole
        tokens = list(output.outputs[0].token_ids)
        results.append({"ttft": first, "whole": whole, "cached": output.num_cached_tokens, "tokens": tokens})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if job["transfer"] is not None:
        time.sleep(job.get("settle", 1.0))
    print("\n" + json.dumps({"results": results, "peak": peak, "ready": ready}), flush=True)
    os._exit(0)  # vLLM's own end takes seconds, and a store has what it has by now


main()
