"""Measures what prefix caching costs and what it brings, each claim compared in one run.

    python -m benchmarks.engine.prefix_caching MODEL [--only overhead twice named ttft] [--rounds 3] [--json FILE]

MODEL is a folder (see engine/random_model.py). Four experiments:

overhead  prompts that share nothing, cache on against cache off: throughput.
twice     200 prompts, twice (the experiment of vLLM's pull request 9972): time with the cache against without; the bound is
          the time of computing only what cannot be cached: the prompts once, and one token of each the second time.
named     a named prefix of 32 % of every prompt against computing it each time; the bound is 1 / (1 - 0.32) = 1.47.
ttft      a prompt of 4,096 tokens that is wholly cached: time to first token against one decode step at that length.
"""

import argparse
import inspect
import random
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine, median, set_up, table, version_of, write_figures
from foreword import LLM, SamplingParams

Prompts = list[list[int]]


class Bench:
    """One engine with the cache and one without, on the same model, and seeded random prompts."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        options: dict[str, Any] = {"dtype": dtype, "threads": threads, "kv_memory": "80000 tokens", "self_check": False}
        self.on = LLM(model, **options)
        self.off = LLM(model, enable_prefix_caching=False, **options)
        self._random = random.Random(0)

    def prompts(self, count: int, length: int) -> Prompts:
        size = self.on.info.vocab_size
        return [[self._random.randrange(size) for _ in range(length)] for _ in range(count)]

    def seconds(self, llm: LLM, prompts: Prompts, max_tokens: int, prefix: str | None = None) -> float:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, prefix=prefix)
        return time.perf_counter() - started


def overhead(bench: Bench, rounds: int) -> list[tuple[str, str, str, str]]:
    """Throughput with the cache on, nothing to reuse, as a share of that with the cache off."""
    shares = []
    for turn in range(3 * rounds):
        prompts = bench.prompts(16, 128)
        order = [bench.on, bench.off] if turn % 2 else [bench.off, bench.on]
        taken = {id(llm): bench.seconds(llm, prompts, 16) for llm in order}
        shares.append(taken[id(bench.off)] / taken[id(bench.on)])
    return [("overhead: throughput on / off", f"{median(shares):.3f}", "at least 0.99", _spread(shares))]


def twice(bench: Bench, rounds: int) -> list[tuple[str, str, str, str]]:
    """Time of 200 prompts twice, and how much of the gain that is possible at all is reached."""
    gains, reached, hits = [], [], []
    for _ in range(rounds):
        prompts = bench.prompts(200, 128)
        bench.on.clear_cache()
        started = time.perf_counter()
        outputs = bench.on.generate(prompts + prompts, _ONE)
        on = time.perf_counter() - started
        off = bench.seconds(bench.off, prompts + prompts, 1)
        bound = bench.seconds(bench.off, prompts, 1) + bench.seconds(bench.off, [p[-1:] for p in prompts], 1)
        gains.append(off / on)
        reached.append((off / on) / (off / bound))
        hits.append(sum(o.cached_tokens for o in outputs) / sum(len(o.prompt_tokens) for o in outputs))
    return [
        ("200 prompts twice: share of tokens cached", f"{median(hits):.1%}", "about 49 %", ""),
        ("200 prompts twice: time off / on", f"{median(gains):.2f}x", "", _spread(gains)),
        ("200 prompts twice: share of the possible gain", f"{median(reached):.1%}", "at least 90 %", _spread(reached)),
    ]


def named(bench: Bench, rounds: int) -> list[tuple[str, str, str, str]]:
    """A named prefix of 32 % of the prompt: throughput with it against computing everything."""
    gains = []
    tokenizer = bench.on.tokenizer
    source = tokenizer.encode(inspect.getsource(textwrap))
    for turn in range(rounds):
        text = tokenizer.decode(source[200 * turn + 1 : 200 * turn + 164])
        bench.on.clear_cache()
        entry = bench.on.add_prefix("manual", text, replace=turn > 0)
        own = bench.prompts(32, round(len(entry.tokens) * 0.68 / 0.32))
        whole = [[*entry.tokens, *prompt] for prompt in own]
        share = len(entry.tokens) / len(whole[0])
        on = bench.seconds(bench.on, own, 1, prefix="manual")
        off = bench.seconds(bench.off, whole, 1)
        gains.append((off / on) * (1 - share))
    best = median(gains)
    return [
        ("named prefix of 32 %: throughput gain", f"{best / (1 - 0.32):.2f}x", "1.32x of 1.47x", ""),
        ("named prefix of 32 %: share of the bound", f"{best:.1%}", "at least 90 %", _spread(gains)),
    ]


def ttft(bench: Bench, rounds: int) -> list[tuple[str, str, str, str]]:
    """Time to first token of a wholly cached prompt over the time of one decode step at its length."""
    ratios, firsts, colds = [], [], []
    for _ in range(3 * rounds):
        prompt = bench.prompts(1, 4096)
        colds.append(bench.seconds(bench.on, prompt, 1))
        first = median([bench.seconds(bench.on, prompt, 1) for _ in range(5)])
        step = median(
            [(bench.seconds(bench.on, prompt, 17) - bench.seconds(bench.on, prompt, 1)) / 16 for _ in range(3)]
        )
        firsts.append(first)
        ratios.append(first / step)
    return [
        ("4k prompt wholly cached: TTFT / decode step", f"{median(ratios):.2f}", "at most 1.5", _spread(ratios)),
        ("4k prompt: TTFT, cached", f"{median(firsts) * 1000:.1f} ms", "", ""),
        ("4k prompt: TTFT, computed", f"{median(colds) * 1000:.0f} ms", "", ""),
    ]


_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
EXPERIMENTS: dict[str, Callable[[Bench, int], list[tuple[str, str, str, str]]]] = {
    "overhead": overhead,
    "twice": twice,
    "named": named,
    "ttft": ttft,
}


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f} in {len(values)} runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = machine() | {"torch": torch.__version__, "transformers": version_of("transformers")}
    facts |= {"model": Path(args.model).name, "dtype": args.dtype, "threads": str(args.threads)}
    print(set_up(facts) + "\n")
    bench = Bench(args.model, args.threads, args.dtype)
    bench.seconds(bench.on, bench.prompts(2, 64), 4)
    bench.seconds(bench.off, bench.prompts(2, 64), 4)
    rows: list[tuple[str, str, str, str]] = []
    for name in args.only:
        rows += EXPERIMENTS[name](bench, args.rounds)
        print(f"{name} done", flush=True)
    head = ("measure", "median", "wanted", "runs")
    print("\n" + table(head, rows))
    if args.json:
        write_figures(args.json, "Prefix caching", head, rows, facts)


if __name__ == "__main__":
    main()
