"""Measures the cost of choosing the next tokens of a batch, and the memory of a long-lived engine.

    python -m benchmarks.engine.sampling step [--vocab 151936] [--batch 1 16 64] [--threads 1] [--kernels torch]
    python -m benchmarks.engine.sampling history [--rounds 9]

`step` samples from random logits of a trained model's shape (the probability of the i-th token falls as i ** -1.5), and from
flat ones (standard normal), where top-p keeps most of the vocabulary. Times are processor time of the threads, the fastest of
24 calls. `argmax` is PyTorch's operator on the same logits, for comparison. Penalties follow a context of 32,768 tokens
in which a few tokens are frequent (ranks are log-uniform), and which grows by one token with each step.

`history` serves requests of 20 tokens that generate 10 with the embedded model, on an engine that remembers 2 ** 20 tokens of
such requests, and alternately on one that remembers nothing. The two share the machine's noise: compare the ratio.
"""

import argparse
import functools
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.harness import machine, set_up, table
from foreword import LLM, SamplingParams
from foreword.blocks.salt import NO_SALT
from foreword.engine.kernels import native
from foreword.engine.kernels.native import Kernels
from foreword.engine.sampler import sample
from foreword.engine.sequence import Draw, TokenCounts

TURNS, CALLS, CONTEXT = 4, 6, 32_768
REMEMBERED = 1 << 20
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "greedy, repetition penalty 1.1": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "temperature 1, repetition penalty 1.1": SamplingParams(repetition_penalty=1.1),
    "temperature 1, presence and frequency penalties 0.5": SamplingParams(presence_penalty=0.5, frequency_penalty=0.5),
    "temperature 1, a logit bias": SamplingParams(logit_bias={100: 1.0}),
}


def fastest(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of processor time. Each has several calls at a time, with its data in the caches, and several turns, so that
    they share the machine's noise."""
    best = dict.fromkeys(calls, math.inf)
    for name, call in [*calls.items()] * TURNS:
        for _ in range(CALLS):
            started = time.process_time()
            call()
            best[name] = min(best[name], (time.process_time() - started) * 1e3)
    return best


def peaked(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Logits whose probabilities follow a power law, in a random order in each row."""
    falling = -1.5 * torch.arange(1, vocab + 1).log()
    return torch.stack([falling[torch.randperm(vocab, generator=generator)] for _ in range(rows)])


def flat(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, vocab, generator=generator)


def step_of(logits: Tensor, params: SamplingParams, kernels: Kernels | None) -> Callable[[], object]:
    """One sampling step; texts grow by a token from step to step."""
    made, vocab = random.Random(0), logits.shape[1]
    texts = [array("I", (int(vocab ** made.random()) for _ in range(CONTEXT))) for _ in logits]
    counts = [TokenCounts() for _ in texts]

    def step() -> None:
        draws = [
            Draw(params, row, 0, text, CONTEXT, (), counts=kept)
            for row, (text, kept) in enumerate(zip(texts, counts, strict=True))
        ]
        for text, found in zip(texts, sample(logits, draws, kernels), strict=True):
            text.append(found.token)

    return step


def steps(vocab: int, batches: list[int], threads: int, kernels: Kernels | None) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    print(set_up({**machine(), "vocabulary": f"{vocab:,}", "threads": str(threads), "torch": torch.__version__}))
    for name, make in (("a trained model's shape", peaked), ("flat", flat)):
        rows: list[tuple[str, ...]] = []
        for batch in batches:
            logits = make(batch, vocab, generator)
            calls: dict[str, Callable[[], object]] = {"argmax": functools.partial(torch.argmax, logits, -1)}
            calls |= {kind: step_of(logits, params, kernels) for kind, params in KINDS.items()}
            times = fastest(calls)
            for kind, taken in times.items():
                ratios = (f"{taken / times[base]:.2f}" for base in ("greedy", "argmax"))
                rows.append((str(batch), kind, f"{taken:.2f}", *ratios))
        print(f"\n{name}\n\n" + table(("batch", "sampling", "ms", "against greedy", "against argmax"), rows))


def history(rounds: int) -> None:
    """Requests on an engine with a full memory of texts, and on a fresh one, in turn."""
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
    made = random.Random(1)
    old, fresh = (LLM(kv_memory="4096 tokens") for _ in range(2))
    for _ in range(REMEMBERED // 30 + 1):
        old._core._history.add(NO_SALT, array("I", (made.randrange(1000) for _ in range(30))))
    taken: dict[LLM, list[float]] = {old: [], fresh: []}
    for _ in range(rounds):
        prompts = [[made.randrange(1000) for _ in range(20)] for _ in range(40)]
        for llm in (old, fresh):
            started = time.process_time()
            for prompt in prompts:
                llm.generate([prompt], params)
            taken[llm].append((time.process_time() - started) / len(prompts) * 1e3)
    full, empty = (statistics.median(taken[llm]) for llm in (old, fresh))
    print(set_up({**machine(), "remembered": f"{REMEMBERED:,} tokens in texts of 30"}))
    print(f"\nrequest of 20 + 10 tokens: {full:.2f} ms, on a fresh engine {empty:.2f} ms, {(full / empty - 1):+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "history"))
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if given.what == "step":
        steps(given.vocab, given.batch, given.threads, native.load() if given.kernels == "native" else None)
    else:
        history(given.rounds)


if __name__ == "__main__":
    main()
