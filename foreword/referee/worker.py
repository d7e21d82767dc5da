r"""A vLLM, with or without a KV connector, in one process; `process.py` starts it and says what to do.

Imports nothing of Foreword, so that any interpreter with vLLM can run it. Lines of JSON come on standard input, and each has
one line of JSON as answer on standard output. The first line says what to start; `llm` are arguments of vLLM's `LLM`:

    {"model": DIR, "transfer": null, "llm": {"dtype": "float32", "max_model_len": 8192, "block_size": 32}}

The others: `{"ask": [[token, ...], ...], "new_tokens": 8}`, with `how` (one of HOW), `salt` and `adapter` ([name, number,
path], or a list with one or null for each prompt). A prompt may also be `{"text": "...", "images": [seed, ...], "uuids": null
or [name, ...]}`. A server of a pooling model answers with a vector in place of log-probabilities. `{"settle": seconds}`, time
for background writes; `{"stored": true}`; `{"forget": true}`, vLLM resets its own prefix cache; `{"exchange": true}`, the
weights of the first and the last layer change places in memory, and vLLM resets its cache and the connector; its answer has
the output tokens of each request by then; `{"metrics":
"vllm:foreword_"}`, vLLM's counters and gauges with names that start so; `{"end": true}`. Times are seconds; TTFT counts from a
request's arrival. A warm-up of 40 tokens does not count; `"warm_up": false` in the first line leaves it out. Every answer has
`cpu`, the processor seconds of this process.

Requests step by step, so that what disturbs them meets them where a claim wants it (`crossed.py`): `{"add": [{"name": "a",
"prompt": [token, ...], "salt": null, "adapter": null, "new_tokens": 8}, ...]}`; `{"step": N, "until": {"computed": tokens}}`
(or `loading`: requests whose KV is being loaded; `answered`: requests with an output token; `preempted`, so far), at most N
steps, has as answer the same counts; `{"abort": [name, ...]}`; `{"preempt": true}`, all that run; `{"hold": true}`, what loads
read is not written into KV until `{"hold": false}` (Foreword's connector only; the answer says whether it can);
`{"finish": [name, ...]}`, all to their ends, and the answers of these; `{"reset": true, "connector":
false}`, vLLM's cache, once.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# One prompt after the other; all at once; all at once, those that are not computed after some steps aborted and asked again;
# all at once, all preempted after some steps; all at once, step by step, so that drafted tokens and preemptions are counted.
HOW = ("turn", "together", "abort", "preempt", "steps")


class VllmEngine:
    """vLLM's `LLM`, and what the driver asks of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        self._params = SamplingParams
        self._connected = job["transfer"] is not None
        self._pools = job["llm"].get("runner") == "pooling"
        self._count = self._drafted = 0
        self._preemptions: dict[str, int] = {}
        self._ended: dict[str, Any] = {}
        self._released = threading.Event()
        self._released.set()
        self._held = False
        given = {"enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False, "seed": 0}
        self._llm = LLM(job["model"], kv_transfer_config=job["transfer"], **{**given, **job["llm"]})
        cache = self._foreword()
        if cache is not None:
            # Claims are about what is loaded. These models compute so fast that a busy machine would not load at all.
            cache.prefill_rate = _Unmeasured()
        # A new prompt each time: a connector may have kept, or lost, what it was asked before.
        if job.get("warm_up", True):
            self.ask({"ask": [[1 + byte for byte in os.urandom(40)]], "new_tokens": 2})

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily; or pool."""
        params = self._params(
            max_tokens=line.get("new_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        salt = {"cache_salt": line["salt"]} if line.get("salt") else {}
        prompts = [{**_prompt(one), **salt} for one in line["ask"]]
        adapters = _adapters(line.get("adapter"), len(prompts))
        began = time.perf_counter()
        how = line.get("how", "turn")
        if how == "turn":
            pairs = zip(prompts, adapters, strict=True)
            results = [one for prompt, adapter in pairs for one in self._answer([prompt], params, [adapter])]
        elif how == "together":
            results = self._answer(prompts, params, adapters)
        else:
            results = self._disturbed(prompts, params, how)
        counts = {"preempted": sum(self._preemptions.values()), "drafted": self._drafted}
        return {"results": results, "seconds": time.perf_counter() - began, **counts}

    def _answer(self, prompts: list[dict[str, Any]], params: Any, adapters: list[Any]) -> list[dict[str, Any]]:
        if self._pools:
            vectors = self._llm.encode(prompts, pooling_task="embed", use_tqdm=False)
            return [
                {
                    "asked": len(output.prompt_token_ids),
                    "cached": output.num_cached_tokens,
                    "tokens": [],
                    "logprobs": output.outputs.data.reshape(-1).tolist(),
                }
                for output in vectors
            ]
        began = time.perf_counter()
        given = adapters if any(adapters) else None
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=given)
        whole = time.perf_counter() - began
        return [_result(output, whole) for output in outputs]

    def _disturbed(self, prompts: list[dict[str, Any]], params: Any, how: str) -> list[dict[str, Any]]:
        engine = self._llm.llm_engine
        done: dict[str, Any] = {}
        names = [self._add(prompt, params) for prompt in prompts]
        # One prompt of 400 tokens is computed then, and another one half, whichever come first.
        while (
            how != "steps"
            and engine.has_unfinished_requests()
            and sum(one.num_computed_tokens for one in self._requests().values()) < 640
        ):
            self._step(done)
        if how == "abort":
            # vLLM may add something of its own to the names.
            cut = {
                "-".join(name.split("-")[:2])
                for name, one in self._requests().items()
                if one.num_computed_tokens < one.num_prompt_tokens
            }
            engine.abort_request(list(cut))
            self._run(done)
            names = [
                self._add(prompt, params) if name in cut else name for name, prompt in zip(names, prompts, strict=True)
            ]
        elif how == "preempt":
            self._llm.reset_prefix_cache(reset_running_requests=True)
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
        for name, request in self._requests().items():
            self._drafted += len(request.spec_token_ids)
            self._preemptions[name] = request.num_preemptions

    def add(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Add requests without a step."""
        for one in requests:
            params = self._params(
                max_tokens=one.get("new_tokens", 8), temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0
            )
            salt = {"cache_salt": one["salt"]} if one.get("salt") else {}
            [adapter] = _adapters(one.get("adapter"), 1)
            given = {**_prompt(one["prompt"]), **salt}
            self._llm.llm_engine.add_request(one["name"], given, params, lora_request=adapter)
        return {"added": len(requests)}

    def step(self, most: int, until: dict[str, int]) -> dict[str, Any]:
        """Step until a count is reached, at most `most` times."""
        steps = 0
        while steps < most and not any(self._counts()[name] >= count for name, count in until.items()):
            if not self._llm.llm_engine.has_unfinished_requests():
                break
            self._step(self._ended)
            steps += 1
        return {"steps": steps, **self._counts()}

    def _counts(self) -> dict[str, int]:
        requests = list(self._requests().values())
        return {
            "computed": sum(one.num_computed_tokens for one in requests),
            "loading": sum(one.status.name == "WAITING_FOR_REMOTE_KVS" for one in requests),
            "answered": sum(one.num_output_tokens > 0 for one in requests),
            "running": sum(one.status.name == "RUNNING" for one in requests),
            "preempted": sum(self._preemptions.values()),
        }

    def abort(self, names: list[str]) -> dict[str, Any]:
        """Abort requests. vLLM may add something of its own to the names."""
        self._llm.llm_engine.abort_request(names)
        return self._counts()

    def preempt(self) -> dict[str, Any]:
        """Preempt all requests that run. Those whose KV is being loaded keep their blocks, and so does vLLM's cache."""
        done = self.reset(connector=False, running=True)["done"]
        return {"reset": done, **self._counts()}

    def hold(self, held: bool) -> dict[str, Any]:
        """Hold loads open, between their reads and their writes into KV, or let them continue."""
        if not held:
            self._released.set()
            return {"held": False}
        cache = self._foreword()
        if cache is None:
            return {"held": False}
        self._released.clear()
        if not self._held:
            self._held = True
            _wait_behind_reads(cache.store, self._released)
        return {"held": True}

    def finish(self, names: list[str]) -> dict[str, Any]:
        """All requests to their ends; the answers of these."""
        self._run(self._ended)
        ended, self._ended = self._ended, {}
        return {"results": [_result(ended[name], 0.0) for name in names], **self._counts()}

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
        """The part of Foreword's connector that moves blocks; None with another connector, or without one."""
        module = sys.modules.get("foreword.integrations.vllm.worker_side")
        if module is None or not self._connected:
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
        """Reset vLLM's own cache. With Foreword's connector that succeeds at once, as in vLLM alone; requests whose blocks
        another still reads delay it for some steps."""
        deadline = time.monotonic() + (0 if self._foreword() is not None else 20)
        while not (done := bool(self._llm.reset_prefix_cache())) and time.monotonic() < deadline:
            self._llm.llm_engine.step()
            time.sleep(0.001)
        return {"done": done}

    def metrics(self, start: str) -> dict[str, Any]:
        """Name, labels and value of each."""
        found = [one for one in self._llm.get_metrics() if one.name.startswith(start) and hasattr(one, "value")]
        return {"metrics": [[one.name, one.labels, one.value] for one in found]}

    def exchange(self, running: bool = False) -> dict[str, Any]:
        """Exchange the weights of two layers of equal parts, as a trainer in the same process would: vLLM learns of it only by
        the reset of both caches. `running`: requests that run are preempted, and computed anew."""
        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        _exchange_layers(executor.driver_worker.get_model())
        done = self.reset(True, running)
        return {**done, "outputs": {name: list(one.output_token_ids) for name, one in self._requests().items()}}

    def reset(self, connector: bool, running: bool = False) -> dict[str, Any]:
        """Reset vLLM's cache, once, and perhaps the connector's with it."""
        try:
            done = self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError:  # vLLM's own refusal, while KV of requests is being loaded
            done = False
        return {"done": bool(done)}


class _Unmeasured:
    """A rate that is never measured: all that is found is loaded."""

    value = last = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


def _wait_behind_reads(store: Any, released: threading.Event) -> None:
    """Let each read of a load wait before its blocks are used: those of a tier that lends its memory too."""
    fetch = store.fetch

    def held_fetch(*args: Any, **more: Any) -> Any:
        found = fetch(*args, **more)
        released.wait()
        return found

    def held_lend(lend: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def held(*args: Any, **more: Any) -> Any:
            with lend(*args, **more) as found:
                released.wait()
                yield found

        return held

    store.fetch = held_fetch
    for tier in store.tiers:
        tier.lend = held_lend(tier.lend)


def _exchange_layers(model: Any) -> None:
    """The weights of the first layer and of the last one that has parts of the same types change places. Whole modules move:
    kernels for CPUs keep packed copies of the weights in them. What holds KV, and so has a layer's name, stays."""
    layers = model.model.layers
    first = layers[0]
    last = next(one for one in reversed(layers) if _parts(one) == _parts(first))
    _exchange(first, last)


def _parts(module: Any) -> list[tuple[str, type]]:
    return [(name, type(part)) for name, part in module.named_modules()]


def _exchange(one: Any, other: Any) -> None:
    for name, mine in list(one.named_children()):
        theirs = getattr(other, name)
        if any(hasattr(part, "kv_cache") for part in mine.modules()):
            if not hasattr(mine, "kv_cache"):
                _exchange(mine, theirs)
        else:
            setattr(one, name, theirs)
            setattr(other, name, mine)


def _prompt(one: Any) -> dict[str, Any]:
    if isinstance(one, list):
        return {"prompt_token_ids": one}
    found: dict[str, Any] = {"prompt": one["text"]}
    if one["images"]:
        found["multi_modal_data"] = {"image": [_image(seed) for seed in one["images"]]}
    if one.get("uuids"):
        found["multi_modal_uuids"] = {"image": one["uuids"]}
    return found


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))


def _adapters(given: list[Any] | None, count: int) -> list[Any]:
    if not given:
        return [None] * count
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

    each = [given] * count if isinstance(given[0], str) else given
    return [LoRARequest(*one) if one else None for one in each]


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
    # Lines that libraries print to standard output is not for the driver.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps({**answer, "cpu": time.process_time()}) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    engine = start(job)
    send({"ready": time.perf_counter() - began})
    answers_to: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "ask": engine.ask,
        "settle": lambda line: engine.settle(line["settle"]),
        "forget": lambda line: engine.forget(),
        "exchange": lambda line: engine.exchange(line.get("running", False)),
        "reset": lambda line: engine.reset(line["connector"]),
        "add": lambda line: engine.add(line["add"]),
        "step": lambda line: engine.step(line["step"], line.get("until", {})),
        "abort": lambda line: engine.abort(line["abort"]),
        "preempt": lambda line: engine.preempt(),
        "hold": lambda line: engine.hold(line["hold"]),
        "finish": lambda line: engine.finish(line["finish"]),
        "stored": lambda line: engine.stored(),
        "metrics": lambda line: engine.metrics(line["metrics"]),
    }
    for text in sys.stdin:
        line = json.loads(text)
        if "end" in line:
            break
        name = next((name for name in answers_to if name in line), None)
        if name is None:
            raise ValueError(f"unknown line: {text.strip()}")
        send(answers_to[name](line))
    send(engine.settle(1.0))
    os._exit(0)  # vLLM's own end takes seconds, and a store has what it has by now


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    _answer_plainly()
    serve(VllmEngine)
