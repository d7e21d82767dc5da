r"""One vLLM, with or without a KV connector, in one process; `vllm_offload.py` starts it and tells it what to do.

Lines of JSON come on standard input, one answer each goes to standard output. The first line says what to start:

    {"model": DIR, "dtype": "float32", "transfer": null, "max_model_len": 8192, "kv_bytes": N, "batched": 2048,
     "block_size": 32}

The others are `{"ask": [[token, ...], ...], "new_tokens": 8}` (in turn, or `"together": true`), `{"settle": seconds}` (what is
written behind gets its time), `{"stored": true}`, `{"forget": true}` (vLLM drops its own prefix cache) and `{"end": true}`.
Times are seconds; the first token's counts from the request's arrival. A warm-up of 40 tokens does not count.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))


class Engine:
    """vLLM's `LLM`, and what the driver asks of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        self._params = SamplingParams
        self._connected = job["transfer"] is not None
        self._llm = LLM(
            job["model"],
            dtype=job["dtype"],
            enforce_eager=True,
            max_model_len=job["max_model_len"],
            max_num_batched_tokens=job["batched"],
            kv_cache_memory_bytes=job["kv_bytes"],
            block_size=job["block_size"],
            skip_tokenizer_init=True,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=job["transfer"],
        )
        self.ask({"ask": [[7] * 40], "new_tokens": 2})

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Generates greedily."""
        params = self._params(
            max_tokens=line.get("new_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in line["ask"]]
        began = time.perf_counter()
        if line.get("together"):
            results = self._generate(prompts, params)
        else:
            results = [one for prompt in prompts for one in self._generate([prompt], params)]
        return {"results": results, "seconds": time.perf_counter() - began}

    def _generate(self, prompts: list[dict[str, Any]], params: Any) -> list[dict[str, Any]]:
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        whole = time.perf_counter() - began
        return [_result(output, whole) for output in outputs]

    def settle(self, seconds: float) -> dict[str, Any]:
        """Waits until Foreword's connector has written everything; with others, where it cannot be known, for `seconds`."""
        began = time.perf_counter()
        cache = self._foreword()
        if cache is not None:
            cache.flush()
        elif self._connected:
            time.sleep(seconds)
        return {"seconds": time.perf_counter() - began}

    def _foreword(self) -> Any:
        module = sys.modules.get("foreword.integrations.vllm.worker")
        if module is None:
            return None
        worker = module.worker_of(str(self._llm.llm_engine.vllm_config.kv_transfer_config.engine_id))
        return None if worker is None else worker.offload

    def stored(self) -> dict[str, Any]:
        """Bytes in Foreword's last tier, and the bytes per token of all blocks of all KV groups."""
        cache = self._foreword()
        if cache is None:
            return {"bytes": 0, "complete": 0.0}
        complete = sum(
            one.layouts[0].block_bytes * one.block_units / (one.tokens * one.per_block) for one in cache.units
        )
        return {"bytes": cache.store.tiers[-1].store.status().bytes, "complete": complete}

    def forget(self) -> dict[str, Any]:
        """Drops vLLM's own cache. Requests whose blocks a connector still reads stand in its way for some steps."""
        deadline = time.monotonic() + 20
        while not (done := bool(self._llm.reset_prefix_cache())) and time.monotonic() < deadline:
            self._llm.llm_engine.step()
            time.sleep(0.001)
        return {"done": done}


def _result(output: Any, whole: float) -> dict[str, Any]:
    [answer] = output.outputs
    metrics = output.metrics
    first = metrics.first_token_latency if metrics is not None and metrics.first_token_latency else whole
    tokens = list(answer.token_ids)
    logprobs = [place[token].logprob for place, token in zip(answer.logprobs, tokens, strict=True)]
    return {
        "ttft": first,
        "whole": whole,
        "asked": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "tokens": tokens,
        "logprobs": logprobs,
    }


def _answer_plainly() -> None:
    """llvmlite's library object answers to every name, `__dict__` among them, and vLLM 0.32 stumbles on it when it goes
    through all modules, if a connector has imported numba before (LMCache's does)."""
    try:
        from llvmlite.binding import ffi  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return
    library, answer = type(ffi.lib), type(ffi.lib).__getattr__

    def plain(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = plain


def main() -> None:
    """Answers line after line until the end."""
    # What libraries print to standard output is not for the driver.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    _answer_plainly()
    began = time.perf_counter()
    engine = Engine(job)
    send({"ready": time.perf_counter() - began})
    for text in sys.stdin:
        line = json.loads(text)
        if "ask" in line:
            send(engine.ask(line))
        elif "settle" in line:
            send(engine.settle(line["settle"]))
        elif "forget" in line:
            send(engine.forget())
        elif "stored" in line:
            send(engine.stored())
        else:
            break
    send(engine.settle(1.0))
    os._exit(0)  # vLLM's own end takes seconds, and a store has what it has by now


main()
