"""Cache control: a retained prefix in a flood of other prompts, and the next turn of a session after a prefetch.

    python -m benchmarks.engine.cache_control flood [--tokens 10000] [--prompts 3000]
    python -m benchmarks.engine.cache_control prefetch [--tokens 8192] [--rounds 7] [--tool 2.0]

`flood` uses a small random model: two prefixes of equal length, one retained with a ttl; other prompts that fill the pool many
times; at intervals both prefixes are asked for again. These are counts, so the processor does not matter.

`prefetch` uses a random model of 88M parameters and a disk store. A session's turn ends with a tool call; after it the next
turn comes, with some new tokens. In turns: its blocks stayed on the device; they are on disk only and `prefetch` is called when
the tool call begins; they are on disk only and nothing is called; they are nowhere. It prints medians of the next turn's TTFT.
The files of the disk store are in the page cache of the operating system, unless memory is short.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.random_model import SIZES, Size, make
from benchmarks.harness import machine, median, set_up, table
from foreword import LLM, SamplingParams
from foreword.blocks.retention import Retention
from foreword.engine.request import Request
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.store_config import StoreConfig

TINY = Size("tiny", 2_500_000, 2, 128, 2, 1, 256, 8_192)
NEW_TOKENS = 64
OTHER_TOKENS = 256


def text(length: int, seed: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, 8_000) for _ in range(length)]


def flood(tokens: int, prompts: int, intervals: int) -> None:
    """Prints which share of the prefixes' lookups hit."""
    hits: dict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        make(TINY, Path(folder))
        with LLM(folder, kv_memory=f"{5 * tokens} tokens", self_check=False) as llm:
            end = tokens // llm.info.block_size * llm.info.block_size
            prefixes = {"retained": text(tokens, 1), "not retained": text(tokens, 2)}
            one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            [output] = llm.generate(prefixes["retained"], one, retain=[Retention(tokens, 3600.0)])
            print(f"retain: {output.retained[0].status}, {output.retained[0].tokens} tokens")
            llm.generate(prefixes["not retained"], one)
            for interval in range(intervals):
                count = prompts // intervals
                others = [text(OTHER_TOKENS, 1000 + interval * count + number) for number in range(count)]
                llm.generate(others, one)
                for name, prefix in prefixes.items():
                    [output] = llm.generate([*prefix, *text(NEW_TOKENS, 10**6 + interval)], one)
                    hits[name].append(min(output.cached_tokens, end))
            llm.check()
            print(
                set_up(
                    {**machine(), "pool": f"{llm.info.kv_tokens} tokens", "other prompts": f"{prompts} of 256 tokens"}
                )
            )
    rows = [
        [name, str(len(found)), str(sum(one == end for one in found)), f"{sum(found) / end / len(found):.0%}"]
        for name, found in hits.items()
    ]
    print(table([f"prefix of {tokens} tokens", "lookups", "full hits", "tokens hit"], rows))


async def ttft(engine: AsyncEngine, name: str, tokens: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were cached."""
    request = Request(name, tuple(tokens), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    started, first, cached = time.perf_counter(), 0.0, 0
    async for delta in engine.generate(request):
        first, cached = first or time.perf_counter() - started, delta.cached_tokens
    return first, cached


async def sessions(engine: AsyncEngine, tokens: int, rounds: int, tool: float) -> dict[str, list[tuple[float, int]]]:
    """TTFT and cached tokens of the next turn, by what happened before it."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    kinds = ["on the device", "prefetch, on disk", "on disk", "not cached"]
    for number in range(-1, rounds):
        for kind in kinds:
            seed = 100 * (number + 2) + kinds.index(kind)
            turn = text(tokens, seed)
            if kind != "not cached":
                await ttft(engine, f"{seed}-first", turn)
            assert await asyncio.to_thread(engine._parts.flush, 60.0)
            if kind != "on the device":
                await engine.clear_cache()
            if kind == "prefetch, on disk":
                called = time.perf_counter()
                answer = await engine.prefetch(turn)
                took = time.perf_counter() - called
                assert answer.status == "accepted", answer
                await asyncio.sleep(max(tool - took, 0.0))
                found["prefetch itself"].append((took, answer.tokens))
            else:
                await asyncio.sleep(tool)
            measured = await ttft(engine, f"{seed}-next", [*turn, *text(NEW_TOKENS, seed + 50)])
            if number >= 0:  # the first round warms up
                found[kind].append(measured)
            engine.release()
    return found


def prefetch(tokens: int, rounds: int, tool: float) -> None:
    """Prints the next turn's TTFT."""
    with tempfile.TemporaryDirectory() as folder:
        make(SIZES["88m"], Path(folder) / "model")
        config = EngineConfig(model=f"{folder}/model", kv_memory=f"{4 * tokens} tokens", self_check=False)
        store = StoreConfig(urls=(f"disk://{folder}/store?size=8GiB",))
        engine = AsyncEngine.from_config(config, store=store)
        try:
            found = asyncio.run(sessions(engine, tokens, rounds, tool))
        finally:
            engine.close()
    base = median(seconds for seconds, _ in found["on the device"])
    rows = [
        [kind, f"{median(cached for _, cached in each):.0f}", f"{median(s for s, _ in each) * 1000:.1f}",
         f"{median(s for s, _ in each) / base:.2f}"]
        for kind, each in found.items()
    ]  # fmt: skip
    facts = {
        "model": "random, 88M",
        "turn": f"{tokens} + {NEW_TOKENS} tokens",
        "tool call": f"{tool} s",
        "rounds": str(rounds),
    }
    print(set_up({**machine(), **facts}))
    print(table(["next turn", "cached tokens", "TTFT ms, median", "of a device hit"], rows))


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description="Cache control.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("flood")
    one.add_argument("--tokens", type=int, default=10_000)
    one.add_argument("--prompts", type=int, default=3_000)
    one.add_argument("--intervals", type=int, default=10)
    other = kinds.add_parser("prefetch")
    other.add_argument("--tokens", type=int, default=8_192)
    other.add_argument("--rounds", type=int, default=7)
    other.add_argument("--tool", type=float, default=2.0)
    arguments = parser.parse_args()
    if arguments.kind == "flood":
        flood(arguments.tokens, arguments.prompts, arguments.intervals)
    else:
        prefetch(arguments.tokens, arguments.rounds, arguments.tool)


if __name__ == "__main__":
    main()
