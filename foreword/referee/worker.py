r"""One vLLM, with or without a KV connector, in one process; `process.py` starts it and says what to do.

Imports nothing of Foreword, so that any interpreter with vLLM can run it. Lines of JSON come on standard input, and each has
one line of JSON as answer on standard output. The first line says what to start; `llm` are arguments of vLLM's `LLM`:

    {"model": DIR, "transfer": null, "llm": {"dtype": "float32", "max_model_len": 8192, "block_size": 32}}

The others: `{"ask": [[token, ...], ...], "new_tokens": 8}`, with `how` (one of HOW), `salt` and `adapter` ([name, number,
path]); `{"settle": seconds}`, time for background writes; `{"stored": true}`; `{"forget": true}`, vLLM resets its own prefix
cache; `{"end": true}`. Times are seconds; TTFT counts from the request's arrival. A warm-up of 40 tokens does not count.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# One prompt after the other; all at once; all at once, half of them aborted and asked again; all at once, all preempted after
# some steps; all at once, step by step, so that drafted tokens are counted.
HOW = ("turn", "together", "abort", "preempt", "steps")
_BEFORE = 12  # steps before requests are aborted or preempted


class Engine:
    """vLLM's `LLM`, and what the driver asks of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        self._params = SamplingParams
        self._connected = job["transfer"] is not None
        self._count = self._preempted = self._drafted = 0
        given = {"enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False, "seed": 0}
        self._llm = LLM(job["model"], kv_transfer_config=job["transfer"], **{**given, **job["llm"]})
        # A new prompt each time: a connector may have kept, or lost, what it was asked before.
        self.ask({"ask": [[1 + byte for byte in os.urandom(40)]], "new_tokens": 2})

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily."""
        params = self._params(
            max_tokens=line.get("new_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        salt = {"cache_salt": line["salt"]} if line.get("salt") else {}
        prompts = [{"prompt_token_ids": tokens, **salt} for tokens in line["ask"]]
        adapter = self._adapter(line["adapter"]) if line.get("adapter") else None
        began = time.perf_counter()
        how = line.get("how", "turn")
        if how == "turn":
            results = [one for prompt in prompts for one in self._generate([prompt], params, adapter)]
        elif how == "together":
            results = self._generate(prompts, params, adapter)
        else:
            results = self._disturbed(prompts, params, how)
        counts = {"preempted": self._preempted, "drafted": self._drafted}
        return {"results": results, "seconds": time.perf_counter() - began, **counts}

    def _adapter(self, given: list[Any]) -> Any:
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

        return LoRARequest(*given)

    def _generate(self, prompts: list[dict[str, Any]], params: Any, adapter: Any) -> list[dict[str, Any]]:
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        whole = time.perf_counter() - began
        return [_result(output, whole) for output in outputs]

    def _disturbed(self, prompts: list[dict[str, Any]], params: Any, how: str) -> list[dict[str, Any]]:
        engine = self._llm.llm_engine
        done: dict[str, Any] = {}
        names = [self._add(prompt, params) for prompt in prompts]
        for _ in range(_BEFORE if how != "steps" else 0):
            self._step(done)
        if how == "abort":
            engine.abort_request(names[1::2])
            self._run(done)
            names[1::2] = [self._add(prompt, params) for prompt in prompts[1::2]]
        elif how == "preempt":
            running = list(self._requests().values())
            self._llm.reset_prefix_cache(reset_running_requests=True)
            self._preempted += sum(one.num_preemptions for one in running)
        self._run(done)
        return [_result(done[name], 0.0) for name in names]

    def _requests(self) -> dict[str, Any]:
        found: dict[str, Any] = self._llm.llm_engine.engine_core.engine_core.scheduler.requests
        return found

    def _add(self, prompt: dict[str, Any], params: Any) -> str:
        self._count += 1
        name = f"asked-{self._count}"
        self._llm.llm_engine.add_request(name, prompt, params)
        return name

    def _run(self, done: dict[str, Any]) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._step(done)

    def _step(self, done: dict[str, Any]) -> None:
        outputs = self._llm.llm_engine.step()
        done.update((output.request_id, output) for output in outputs)
        if not outputs:
            time.sleep(0.0005)  # for the threads that it waits for
        self._drafted += sum(len(one.spec_token_ids) for one in self._requests().values())

    def settle(self, seconds: float) -> dict[str, Any]:
        """Wait until Foreword's connector has written everything; with others, where it cannot be known, for `seconds`."""
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
        """Reset vLLM's own cache. Requests whose blocks a connector still reads delay that for some steps."""
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


def serve(start: Callable[[dict[str, Any]], Any]) -> None:
    """Answer line after line until the end. `start` makes the engine from the first line."""
    # What libraries print to standard output is not for the driver.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = start(job)
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


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    _answer_plainly()
    serve(Engine)
