"""Batch invariance: does a hit equal the computation bit for bit, and what does it cost?

    python -m benchmarks.engine.bit_exact [MODEL] --pairs 10000 [--redis redis://HOST:PORT] [--s3 s3://BUCKET/...]
    python -m benchmarks.engine.bit_exact --kinds llama windows experts gpt2 latent tied --dtype float32 bfloat16 float16 \
        --pairs 20000
    python -m benchmarks.engine.bit_exact MODEL --speed --rounds 5 [--json FILE]

Each prompt is computed once alone, cold and in one step. Each pair computes one of them again, with a random hit, from a
random source, in chunks of a random size and in a random batch, and compares the logits of its tokens with those of the first
computation: all logits of the token after the prompt and of those generated after it, bit for bit. Sources: recomputed,
this engine's device, its memory tier, what another engine wrote to a disk, Redis or an object store and this one loads,
what another instance has on its device (`peer`), answers that outgrow the memory and are preempted, a prompt that another
instance prefills, and a request that migrates between two instances while it generates 32 tokens. The campaign has rounds of
200 pairs with prompts of their own, seeded by `--seed` and the round's number. `--kinds` makes small random models of these
kinds; each has a share of the pairs in each dtype.

`--speed` measures the engine with default settings against the same engine in its fastest mode (`batch_invariant` off), by
turns: prefill of 512, 2,048 and 8,192 tokens, decode after 128 tokens at batch 1, 16 and 64, after 8,192 tokens, and of 16
sequences behind a prefix of 2,048.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine.random_model import KINDS, SIZES, make
from benchmarks.harness import cores, machine, median, set_up, table, write_figures

# Of a round: pairs and prompts. Tokens of the longest prompt and of outputs; requests in a batch.
ROUND, PROMPTS = 200, 60
# One prompt in five is long: its keys are several of the parts of attention (kernels/attention.h).
LONGEST, SHORT, NEW_TOKENS, LONG_OUTPUT, BATCH = 1_200, 400, 4, 32, 6
CHUNKS = (16, 33, 64, 100, 256, 512)
COLUMNS = ("pairs", "hits", "cached", "different")
SHARED_TOKENS, NEW_DECODED = 2_048, 32
# Prompts, their own tokens, and those of a prefix that they share.
TASKS = {
    "prefill 512": (1, 512, 0),
    "prefill 2,048": (1, 2_048, 0),
    "prefill 8,192": (1, 8_192, 0),
    "decode, batch 1": (1, 128, 0),
    "decode, batch 16": (16, 128, 0),
    "decode, batch 64": (64, 128, 0),
    "decode, 8k context": (1, 8_192, 0),
    "decode, shared prefix": (16, 8, SHARED_TOKENS),
}

# A request's cached tokens, and digests of the logits of its tokens: of each those of all instances that computed it.
Found = tuple[int, list[set[bytes]]]
# Digests by prompt and number of the tokens before; an instance that prefills for another one has request ids of its own.
Seen = dict[tuple[tuple[int, ...], int], bytes]


class Engine:
    """An LLM whose logits are recorded."""

    def __init__(self, model: str | None, stores: Sequence[str] = (), **options: Any) -> None:
        from foreword import LLM
        from foreword.store_config import StoreConfig

        patient = StoreConfig(urls=tuple(stores), lookup_timeout=60.0, load_timeout=60.0)
        self.llm: Any = LLM(model, store=patient, **options)
        if self.llm.offload is not None:
            self.llm.offload.costs.prefill_rate = float  # load what there is, however fast it is computed
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

    @property
    def url(self) -> str:
        """Of the first one, as a store."""
        assert self.pair.first.instance is not None
        return f"peer://{self.pair.first.instance.address}"

    def compute(self, prompts: Sequence[list[int]], chunk: int) -> None:
        """Have these at the first one, and nothing else."""
        self.pair.clear()
        self._engines[0]._core.scheduler._max_batch_tokens = chunk
        self.pair.compute(prompts, greedy(1))

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

    def __init__(self, arguments: argparse.Namespace, folder: Path, model: str | None, dtype: str) -> None:
        options = {"batch_invariant": "on", "dtype": dtype, "threads": arguments.threads, "self_check": False}
        options |= {"kv_memory": f"{4 * BATCH * (LONGEST + 64)} tokens"}
        self._seed = f"{arguments.seed} {dtype}"
        self._truth = Engine(model, **options, enable_prefix_caching=False)
        self._vocabulary = self._truth.llm.info.vocab_size
        self._engines = {"computed": self._truth, "device": Engine(model, **options)}
        self._engines["memory"] = Engine(model, ["memory://?size=64MiB"], **options)
        small = {"kv_memory": f"{LONGEST + 2 * LONG_OUTPUT} tokens", "reserve": 0.0}
        self._engines["preempted"] = Engine(model, **options | small)
        self._engines["preempted"].llm._core.cache._lookahead = 0
        self._pair = Pair(model, **options)
        self._engines["peer"] = Engine(model, [self._pair.url], **options)
        given = {"disk": f"disk://{folder}/store", "redis": arguments.redis, "s3": arguments.s3}
        stores = {name: url for name, url in given.items() if url}
        self._writer = Engine(model, [*stores.values()], **options)
        for source, url in stores.items():
            self._engines[source] = Engine(model, [url + "?read_only=1" * (source == "disk")], **options)
        known = [*self._engines, "prefilled", "migrated"]
        self.counts = {source: Counter[str]() for source in known if source in (arguments.sources or known)}

    def run(self, number: int, pairs: int) -> None:
        """One round."""
        chance = Random(f"{self._seed} {number}")
        count = min(PROMPTS, pairs)
        prompts = [
            self._text(chance, chance.randint(1, LONGEST if chance.random() < 0.2 else SHORT)) for _ in range(count)
        ]
        long = max(count // 4, 1)  # of these, longer outputs, which have time to migrate
        lengths = [LONG_OUTPUT if prompt < long else NEW_TOKENS for prompt in range(count)]
        expected = [self._truth.compute([prompt], new)[0][1] for prompt, new in zip(prompts, lengths, strict=True)]
        for prompt in prompts:
            self._writer.compute([prompt[: chance.randint(1, len(prompt))]], 1, chance.choice(CHUNKS))
        self._writer.llm.flush()
        while pairs > 0:
            source = chance.choice(list(self.counts))
            longer = source in ("migrated", "preempted")
            known = long if longer else count
            drawn = chance.sample(range(known), min(pairs, known, chance.randint(1, BATCH)))
            pairs -= len(drawn)
            new_tokens = LONG_OUTPUT if longer else chance.randint(1, NEW_TOKENS)
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
        if source == "peer":
            self._pair.compute(parts, chance.choice(CHUNKS))
        return self._engines[source].hit(prompts, parts if source in ("device", "memory") else [], new_tokens, chance)

    def close(self) -> None:
        for engine in [*self._engines.values(), self._writer]:
            engine.llm.close()
        self._pair.pair.__exit__()


def compare(arguments: argparse.Namespace, folder: Path) -> str:
    """Compute the pairs, in rounds; tables of hits and differences by source and by model."""
    models: dict[str, str | None] = {kind: str(folder / kind) for kind in arguments.kinds} or {"": arguments.model}
    chance = Random(arguments.seed)
    for kind in arguments.kinds:
        # Also widths at which vectors leave numbers over. PyTorch multiplies by experts, a quarter as wide, by 16 bytes.
        step = 32 if kind in ("experts", "latent", "recurrent") else 8
        size = replace(SIZES["tiny"], feed_forward=step * chance.randrange(64 // step, 384 // step))
        make(size, folder / kind, arguments.seed, kind)
    started = time.monotonic()
    campaigns: dict[str, dict[str, Counter[str]]] = {}
    for kind, model in models.items():
        for dtype in arguments.dtype:
            name = f"{kind} {dtype}".strip()
            campaign = Campaign(arguments, folder / "stores" / name.replace(" ", "-"), model, dtype)
            campaigns[name] = campaign.counts
            done, share = 0, -(-arguments.pairs // (len(models) * len(arguments.dtype)))
            while done < share:
                number = arguments.first_round + done // ROUND
                pairs = min(ROUND, share - done)
                campaign.run(number, pairs)
                done += pairs
                different = sum(count["different"] for count in campaign.counts.values())
                seconds = time.monotonic() - started
                print(f"{seconds:,.0f} s, {name}, round {number}: {done:,} pairs, {different} different", flush=True)
            campaign.close()
    by_source: dict[str, Counter[str]] = {}
    for counts in campaigns.values():
        for source, count in counts.items():
            by_source.setdefault(source, Counter()).update(count)
    by_model = {name: sum(counts.values(), Counter()) for name, counts in campaigns.items()}
    return "\n\n".join(_table(what, counts) for what, counts in (("source", by_source), ("model", by_model)))


def _table(what: str, counts: Mapping[str, Counter[str]]) -> str:
    """Hits and differences, and of all."""
    every = {**counts, "all": sum(counts.values(), Counter())}
    return table([what, *COLUMNS], [[name, *(f"{one[column]:,}" for column in COLUMNS)] for name, one in every.items()])


class Plain:
    """An LLM in one mode, which is timed."""

    def __init__(self, arguments: argparse.Namespace, **options: Any) -> None:
        from foreword import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self._processor_time = arguments.processor_time
        self.llm: Any = LLM(
            arguments.model, dtype=arguments.dtype[0], threads=arguments.threads, kv_memory="24576 tokens", **options
        )

    def prefill_speed(self, prompt: list[int]) -> float:
        """Tokens per second of a prompt of which nothing is cached."""
        self.llm.clear_cache()
        return len(prompt) / self._seconds([prompt], 1)

    def decode_speed(self, prompts: Sequence[list[int]]) -> float:
        """Tokens per second of decode steps: the prompts are cached, and the time for one token is subtracted."""
        self.llm.clear_cache()
        self._generate([prompts[0][:SHARED_TOKENS]], 1)
        self._generate(prompts, 1)
        first = self._seconds(prompts, 1)
        return len(prompts) * NEW_DECODED / (self._seconds(prompts, NEW_DECODED + 1) - first)

    def _seconds(self, prompts: Sequence[list[int]], new_tokens: int) -> float:
        clock = time.process_time if self._processor_time else time.perf_counter
        start = clock()
        self._generate(prompts, new_tokens)
        return clock() - start

    def _generate(self, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.llm.generate(prompts, self._sampling(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))


def measure(arguments: argparse.Namespace, facts: dict[str, str]) -> str:
    """Tokens per second of both modes, which take turns on the same prompts; medians."""
    modes = {"fastest": Plain(arguments, batch_invariant="off"), "default": Plain(arguments)}
    if inexact := modes["default"].llm.info.inexact:
        raise SystemExit(f"the default mode is not batch-invariant: {inexact}")
    vocabulary = modes["fastest"].llm.info.vocab_size
    chance = Random(arguments.seed)
    speeds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in TASKS} for mode in modes}
    for number in range(arguments.rounds + 1):
        for name in arguments.tasks or TASKS:
            batch, length, shared = TASKS[name]
            prefix = [chance.randrange(3, vocabulary) for _ in range(shared)]
            prompts = [[*prefix, *(chance.randrange(3, vocabulary) for _ in range(length))] for _ in range(batch)]
            for mode in sorted(modes, reverse=number % 2 == 0):
                engine = modes[mode]
                speed = engine.prefill_speed(prompts[0]) if name.startswith("prefill") else engine.decode_speed(prompts)
                if number:
                    speeds[mode][name].append(speed)
    rows = []
    for name in arguments.tasks or TASKS:
        fast, ours = speeds["fastest"][name], speeds["default"][name]
        share = median(mine / theirs for mine, theirs in zip(ours, fast, strict=True))
        rows.append([name, f"{median(fast):,.0f}", f"{median(ours):,.0f}", f"{share:.0%}"])
    head = ["tokens per second", "fastest", "default", "default / fastest, median of rounds"]
    if arguments.json is not None:
        write_figures(arguments.json, "Batch invariance, by turns", head, rows, facts | load_of(), speeds=speeds)
    return table(head, rows)


def load_of() -> dict[str, str]:
    """Other work of the machine."""
    return {"load of the machine": ", ".join(f"{load:.1f}" for load in os.getloadavg()[:2])}


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description="Batch invariance: exactness and cost.")
    parser.add_argument("model", nargs="?", help="a folder; by default the model that ships with Foreword")
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument(
        "--first-round", type=int, default=0, help="continue a campaign: the round after the last printed"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], nargs="+", default=["bfloat16"])
    parser.add_argument("--kinds", choices=sorted(KINDS), nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--redis", help="URL of a Redis server whose database is used as a store")
    parser.add_argument("--s3", help="URL of an object store")
    parser.add_argument(
        "--processor-time", action="store_true", help="with --speed and one thread: beside other processes"
    )
    parser.add_argument("--tasks", choices=list(TASKS), nargs="+", help="with --speed, only these")
    parser.add_argument("--json", type=Path, help="with --speed, write the table to this file (docs/figures)")
    parser.add_argument("--sources", nargs="+", help="only these sources; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="measure the cost instead")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    facts = {**machine(), "threads": str(arguments.threads), "dtype": ", ".join(arguments.dtype)}
    print(set_up(facts | load_of()), flush=True)
    if arguments.speed:
        print(f"\n{measure(arguments, facts)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"\n{compare(arguments, Path(folder))}")


if __name__ == "__main__":
    main()
