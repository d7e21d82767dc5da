"""Batch invariance: does a hit equal the computation bit for bit, and what does it cost?

    python -m benchmarks.engine.bit_exact [MODEL] --pairs 10000 [--redis redis://HOST:PORT]
    python -m benchmarks.engine.bit_exact MODEL --speed --rounds 5

Each prompt is computed once alone, cold and in one step. Each pair computes one of them again, with a random hit, from a
random source, in chunks of a random size and in a random batch, and compares the logits of its tokens with those of the
first computation: all logits of the token after the prompt and of those generated after it, bit for bit. Sources: computed
again, this engine's device, its memory tier, what another engine wrote to a disk or Redis and this one loads, a prompt that
another instance prefills, and a request that migrates between two instances while it generates 32 tokens. The campaign has
rounds of 200 pairs with prompts of their own, seeded by `--seed` and the round's number.

`--speed` measures the engine with `batch_invariant` against the same engine without it, in its fastest mode: prefill of
2,048 tokens, decode after 128 tokens at batch 1 and 16, after 8,192 tokens, and of 16 sequences behind a prefix of 2,048.
"""

import argparse
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness import cores, machine, median, set_up, table

# Of a round: pairs and prompts. Tokens of the longest prompt and of outputs; requests in a batch.
ROUND, PROMPTS = 200, 60
LONGEST, NEW_TOKENS, LONG_OUTPUT, BATCH = 400, 4, 32, 6
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

# A request's cached tokens, and digests of the logits of its tokens: of each those of all instances that computed it.
Found = tuple[int, list[set[bytes]]]
# Digests by prompt and number of the tokens before; an instance that prefills for another one has request ids of its own.
Seen = dict[tuple[tuple[int, ...], int], bytes]


class Engine:
    """An LLM whose logits are recorded."""

    def __init__(self, model: str | None, **options: Any) -> None:
        from foreword import LLM

        self.llm: Any = LLM(model, **options)
        self.seen = record(self.llm._core)

    def compute(self, prompts: Sequence[list[int]], new_tokens: int, chunk: int = 512) -> list[Found]:
        """Complete prompts, all in one batch."""
        self.llm._core.scheduler._max_batch_tokens = chunk
        self.seen.clear()
        found = []
        outputs = self.llm.generate(prompts, greedy(new_tokens))
        for prompt, output in zip(prompts, outputs, strict=True):
            places = [(tuple(prompt), len(prompt) + number) for number in range(new_tokens)]
            found.append((output.cached_tokens, [{self.seen[place]} for place in places]))
        return found

    def hit(
        self, prompts: Sequence[list[int]], warm: Sequence[list[int]], new_tokens: int, chance: Random
    ) -> list[Found]:
        """Complete prompts after parts of them were computed, and flushed to the store if there is one."""
        self.llm.clear_cache()
        if warm:
            self.compute(warm, 1, chance.choice(CHUNKS))
        if warm and self.llm.offload is not None:
            self.llm.flush()
            self.llm.clear_cache()
        found = self.compute(prompts, new_tokens, chance.choice(CHUNKS))
        if warm and self.llm.offload is not None:
            self.llm.offload.store.tiers[0].store.erase(deadline=time.monotonic() + 60)
        return found


class Pair:
    """Two instances whose logits are recorded: prompts are computed, or decoding begins, at the other one."""

    def __init__(self, model: str | None, **options: Any) -> None:
        from benchmarks.instances.instance_pair import InstancePair

        self.pair = InstancePair(model, **options)
        self._engines = (self.pair.first, self.pair.second)
        self._seen = [record(engine._core) for engine in self._engines]

    def hit(
        self, source: str, prompts: Sequence[list[int]], warm: Sequence[list[int]], new_tokens: int, chance: Random
    ) -> list[Found]:
        """Complete prompts with KV from the other instance, which has parts of them cached."""
        self.pair.clear()
        for engine in self._engines:
            engine._core.scheduler._max_batch_tokens = chance.choice(CHUNKS)
        complete = {"prefilled": self.pair.prefill, "migrated": self.pair.migrate}[source]
        if warm:
            complete(warm, greedy(1))
        for seen in self._seen:
            seen.clear()
        found = []
        for prompt, one in zip(prompts, complete(prompts, greedy(new_tokens)), strict=True):
            places = [(tuple(prompt), len(prompt) + number) for number in range(new_tokens)]
            digests = [{seen[place] for seen in self._seen if place in seen} for place in places]
            found.append((one.received, digests))
        return found


def greedy(new_tokens: int) -> Any:
    from foreword import SamplingParams

    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def record(core: Any) -> Seen:
    """Digests of the logits of an engine's sampled tokens, from now on."""
    seen: Seen = {}
    runner = core._runner
    forward = runner._forward

    def recorded(step: Any, rows: Sequence[int]) -> Any:
        logits = forward(step, rows)
        sampled = [chunk for chunk in step.chunks if chunk.samples]
        for chunk, row in zip(sampled, logits[: len(sampled)], strict=True):
            place = tuple(chunk.sequence.request.tokens), chunk.start + chunk.count
            seen[place] = hashlib.sha256(row.float().numpy().tobytes()).digest()
        return logits

    runner._forward = recorded
    return seen


class Campaign:
    """Compares hits of all sources with cold computations, in rounds with prompts of their own.

    Attributes:
        counts: of pairs, hits, cached tokens and differences, by source.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        options = {"batch_invariant": True, "dtype": arguments.dtype, "threads": arguments.threads, "self_check": False}
        options |= {"kv_memory": f"{4 * BATCH * (LONGEST + 64)} tokens"}
        self._seed = arguments.seed
        self._truth = Engine(arguments.model, **options, enable_prefix_caching=False)
        self._vocabulary = self._truth.llm.info.vocab_size
        self._engines = {"computed": self._truth, "device": Engine(arguments.model, **options)}
        self._engines["memory"] = Engine(arguments.model, **options, store="memory://?size=64MiB")
        self._pair = Pair(arguments.model, **options)
        stores = {"disk": f"disk://{folder}/store"} | ({"redis": arguments.redis} if arguments.redis else {})
        self._writer = Engine(arguments.model, **options, store=list(stores.values()))
        for source, url in stores.items():
            self._engines[source] = Engine(arguments.model, **options, store=url + "?read_only=1" * (source == "disk"))
        known = [*self._engines, "prefilled", "migrated"]
        self.counts = {source: Counter[str]() for source in known if source in (arguments.sources or known)}

    def run(self, number: int, pairs: int) -> None:
        """One round."""
        chance = Random(f"{self._seed} {number}")
        count = min(PROMPTS, pairs)
        prompts = [self._text(chance, chance.randint(1, LONGEST)) for _ in range(count)]
        long = max(count // 4, 1)  # of these, longer outputs, which have time to migrate
        lengths = [LONG_OUTPUT if prompt < long else NEW_TOKENS for prompt in range(count)]
        expected = [self._truth.compute([prompt], new)[0][1] for prompt, new in zip(prompts, lengths, strict=True)]
        for prompt in prompts:
            self._writer.compute([prompt[: chance.randint(1, len(prompt))]], 1, chance.choice(CHUNKS))
        self._writer.llm.flush()
        while pairs > 0:
            source = chance.choice(list(self.counts))
            migrated = source == "migrated"
            known = long if migrated else count
            drawn = chance.sample(range(known), min(pairs, known, chance.randint(1, BATCH)))
            pairs -= len(drawn)
            new_tokens = LONG_OUTPUT if migrated else chance.randint(1, NEW_TOKENS)
            found = self._hit(source, [prompts[one] for one in drawn], new_tokens, chance)
            for drawn_one, (cached, digests) in zip(drawn, found, strict=True):
                different = digests != expected[drawn_one][:new_tokens]
                self.counts[source].update(pairs=1, hits=cached > 0, cached=cached, different=different)
                if different:
                    where = f"round {number}, prompt {drawn_one}, {cached} cached, {len(drawn)} in the batch"
                    print(f"different: {source}, {where}", flush=True)

    def _text(self, chance: Random, length: int) -> list[int]:
        return [chance.randrange(3, self._vocabulary) for _ in range(length)]

    def _hit(self, source: str, prompts: Sequence[list[int]], new_tokens: int, chance: Random) -> list[Found]:
        parts = [prompt[: chance.randint(1, len(prompt))] for prompt in prompts]
        if source in ("prefilled", "migrated"):
            return self._pair.hit(source, prompts, parts if chance.random() < 0.5 else [], new_tokens, chance)
        return self._engines[source].hit(prompts, parts if source in ("device", "memory") else [], new_tokens, chance)

    def table(self) -> str:
        """Hits and differences by source."""
        rows = [[source, *(f"{count[name]:,}" for name in COLUMNS)] for source, count in self.counts.items()]
        total = sum(self.counts.values(), Counter())
        return table(["source", *COLUMNS], [*rows, ["all", *(f"{total[name]:,}" for name in COLUMNS)]])

    def close(self) -> None:
        self._pair.pair.__exit__()
        for engine in [*self._engines.values(), self._writer]:
            engine.llm.close()


def compare(arguments: argparse.Namespace, folder: Path) -> str:
    """Compute the pairs, in rounds; a table of hits and differences by source."""
    campaign = Campaign(arguments, folder)
    started, done = time.monotonic(), 0
    while done < arguments.pairs:
        number = arguments.first_round + done // ROUND
        pairs = min(ROUND, arguments.pairs - done)
        campaign.run(number, pairs)
        done += pairs
        different = sum(count["different"] for count in campaign.counts.values())
        by_source = ", ".join(f"{source} {count['pairs']}" for source, count in campaign.counts.items())
        seconds = time.monotonic() - started
        print(f"{seconds:,.0f} s, round {number}: {done:,} pairs ({by_source}), {different} different", flush=True)
    campaign.close()
    return campaign.table()


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
    chance = Random(arguments.seed)
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
    parser.add_argument(
        "--first-round", type=int, default=0, help="continue a campaign: the round after the last printed"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--redis", help="URL of a Redis server whose database is used as a store")
    parser.add_argument("--sources", nargs="+", help="only these sources; by default all")
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
