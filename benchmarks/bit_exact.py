"""Batch invariance: does a hit equal the computation bit for bit, and what does it cost?

    python benchmarks/bit_exact.py [MODEL] --pairs 10000 [--redis redis://HOST:PORT]
    python benchmarks/bit_exact.py MODEL --speed --rounds 5

Each prompt is computed once alone, cold and in one step. Each pair computes one of them again, with a random hit, from a
random source, in chunks of a random size and in a random batch, and compares the logits of its tokens with those of the
first computation: all logits of the token after the prompt and of those generated after it, bit for bit. Sources: computed
again, this engine's device, and what another engine wrote to a store and this one loads. The hit's length is drawn for each
pair on the device, and for each prompt in a store (in Redis until the prompt is drawn again: it is saved whole).

`--speed` measures the engine with `batch_invariant` against the same engine without it, in its fastest mode: prefill of
2,048 tokens, decode after 128 tokens at batch 1 and 16, after 8,192 tokens, and of 16 sequences behind a prefix of 2,048.
"""

import argparse
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import cores, machine, median, set_up, table

PROMPTS, LONGEST, NEW_TOKENS, BATCH = 400, 400, 4, 6
CHUNKS = (16, 33, 64, 100, 256, 512)
COLUMNS = ("pairs", "hits", "cached", "different")
SHARED_TOKENS, NEW_DECODED = 2_048, 32
# Prompts, their own tokens, and those of a prefix that they share.
TASKS = {
    "prefill": (1, 2_048, 0),
    "decode, batch 1": (1, 128, 0),
    "decode, batch 16": (16, 128, 0),
    "decode, 8k context": (1, 8_192, 0),
    "decode, shared prefix": (16, 8, SHARED_TOKENS),
}


class Engine:
    """An LLM whose logits are recorded: a digest for each request's sampled token."""

    def __init__(self, model: str | None, **options: Any) -> None:
        from foreword import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self.llm: Any = LLM(model, **options)
        self._seen: dict[tuple[str, int], bytes] = {}
        runner: Any = self.llm._core._runner
        self._forward, runner._forward = runner._forward, self._record

    def _record(self, step: Any, rows: Sequence[int]) -> Any:
        logits = self._forward(step, rows)
        sampled = [chunk for chunk in step.chunks if chunk.samples]
        for chunk, row in zip(sampled, logits[: len(sampled)], strict=True):
            place = chunk.sequence.request.id, chunk.start + chunk.count
            self._seen[place] = hashlib.sha256(row.float().numpy().tobytes()).digest()
        return logits

    def compute(self, prompts: Sequence[list[int]], new_tokens: int, chunk: int = 512) -> list[tuple[int, list[bytes]]]:
        """For each prompt, all in one batch: its cached tokens, and the digests of the logits that followed."""
        self.llm._core.scheduler._max_batch_tokens = chunk
        self._seen.clear()
        params = self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        found = []
        for output in self.llm.generate(prompts, params):
            places = range(len(output.prompt_tokens), len(output.prompt_tokens) + new_tokens)
            found.append((output.cached_tokens, [self._seen[output.request_id, place] for place in places]))
        return found


def compare(arguments: argparse.Namespace, folder: Path) -> str:
    """Compute the pairs; a table of hits and differences by source."""
    chance = random.Random(arguments.seed)
    options = {"batch_invariant": True, "dtype": arguments.dtype, "threads": arguments.threads}
    options |= {"kv_memory": f"{4 * BATCH * (LONGEST + 64)} tokens"}
    truth = Engine(arguments.model, **options, enable_prefix_caching=False)
    vocabulary = truth.llm.info.vocab_size
    count = min(PROMPTS, arguments.pairs)
    prompts = [[chance.randrange(3, vocabulary) for _ in range(chance.randint(1, LONGEST))] for _ in range(count)]
    expected = [truth.compute([prompt], NEW_TOKENS)[0][1] for prompt in prompts]
    engines = {"computed": truth, "device": Engine(arguments.model, **options)}
    stores = {"disk": f"disk://{folder}/store", "redis": arguments.redis or ""}
    for source, url in stores.items():
        if url:
            write_prefixes(Engine(arguments.model, **options, store=url), prompts, chance)
            engines[source] = Engine(arguments.model, **options, store=url + "?read_only=1" * (source == "disk"))
    counts = {source: Counter[str]() for source in engines}
    left = arguments.pairs
    while left > 0:
        source = chance.choice(list(engines))
        drawn = chance.sample(range(count), min(left, chance.randint(1, BATCH)))
        left -= len(drawn)
        engine, new_tokens = engines[source], chance.randint(1, NEW_TOKENS)
        engine.llm.clear_cache()
        if source == "device":
            warm = [prompts[number][: chance.randint(1, len(prompts[number]))] for number in drawn]
            engine.compute(warm, 1, chance.choice(CHUNKS))
        found = engine.compute([prompts[number] for number in drawn], new_tokens, chance.choice(CHUNKS))
        for number, (cached, digests) in zip(drawn, found, strict=True):
            different = digests != expected[number][:new_tokens]
            counts[source].update(pairs=1, hits=cached > 0, cached=cached, different=different)
            if different:
                print(f"different: {source}, prompt {number}, {cached} cached, {len(drawn)} in the batch", flush=True)
    rows = [[source, *(f"{count[name]:,}" for name in COLUMNS)] for source, count in counts.items()]
    total = sum(counts.values(), Counter())
    return table(["source", *COLUMNS], [*rows, ["all", *(f"{total[name]:,}" for name in COLUMNS)]])


def write_prefixes(writer: Engine, prompts: Sequence[list[int]], chance: random.Random) -> None:
    """Compute a part of each prompt and leave it in the writer's store."""
    for prompt in prompts:
        writer.compute([prompt[: chance.randint(1, len(prompt))]], 1, chance.choice(CHUNKS))
    writer.llm.close()


class Plain:
    """An LLM in one mode, which is timed."""

    def __init__(self, arguments: argparse.Namespace, **options: Any) -> None:
        from foreword import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self.llm: Any = LLM(
            arguments.model, dtype=arguments.dtype, threads=arguments.threads, kv_memory="16384 tokens", **options
        )

    def seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """How long it takes to complete some prompts, of which at most a shared prefix is cached."""
        self.llm.clear_cache()
        if len(prompts) > 1 and prompts[0][:SHARED_TOKENS] == prompts[1][:SHARED_TOKENS]:
            self._generate([prompts[0][:SHARED_TOKENS]], 1)
        start = time.perf_counter()
        self._generate(prompts, new_tokens)
        return time.perf_counter() - start

    def _generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.llm.generate(prompts, self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))


def measure(arguments: argparse.Namespace) -> str:
    """Tokens per second of both modes, which take turns on the same prompts; medians."""
    modes = {"fastest": Plain(arguments), "batch_invariant": Plain(arguments, batch_invariant=True)}
    vocabulary = modes["fastest"].llm.info.vocab_size
    chance = random.Random(arguments.seed)
    speeds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in TASKS} for mode in modes}
    for number in range(arguments.rounds + 1):
        for name, (batch, length, shared) in TASKS.items():
            prefix = [chance.randrange(3, vocabulary) for _ in range(shared)]
            prompts = [[*prefix, *(chance.randrange(3, vocabulary) for _ in range(length))] for _ in range(batch)]
            for mode in sorted(modes, reverse=number % 2 == 0):
                first = modes[mode].seconds(prompts, 1)
                if name == "prefill":
                    speed = length / first
                else:
                    speed = batch * NEW_DECODED / (modes[mode].seconds(prompts, NEW_DECODED + 1) - first)
                if number:
                    speeds[mode][name].append(speed)
    rows = [[mode, *(f"{median(mine[name]):,.1f}" for name in TASKS)] for mode, mine in speeds.items()]
    pairs = {name: zip(*(mine[name] for mine in speeds.values()), strict=True) for name in TASKS}
    shares = [f"{100 * median(ours / theirs for theirs, ours in pairs[name]):.0f} %" for name in TASKS]
    return table(["tokens per second", *TASKS], [*rows, ["share, median of rounds", *shares]])


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description="Batch invariance: exactness and cost.")
    parser.add_argument("model", nargs="?", help="a folder; by default the model that ships with Foreword")
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--redis", help="URL of a Redis server whose database is used as a store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="measure the cost instead")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(set_up({**machine(), "threads": str(arguments.threads), "dtype": arguments.dtype}), flush=True)
    if arguments.speed:
        print(f"\n{measure(arguments)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"\n{compare(arguments, Path(folder))}")


if __name__ == "__main__":
    main()
