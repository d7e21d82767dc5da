"""Measures what an engine gains from a store, each claim compared in one run.

    python -m benchmarks.store.serving MODEL [--only ttft documents decode] [--redis redis://127.0.0.1:6379] [--folder DIR]

MODEL is a folder (see engine/random_model.py). Three experiments:

ttft       a prompt of 4,096 tokens that was evicted from the device: TTFT from memory, disk, the same encrypted, and
           Redis against computing it.
documents  documents of 10 to 40 kB, each asked several questions in turn, in a device memory that is too small for all of
           them (the experiment of vLLM's pull request 11385): time with a store against the device's prefix cache alone, and
           whether the answers are the same.
decode     decoding at batch 4 while every block is written behind to memory and disk, against no store.

Without --redis the benchmark starts `redis-server` itself, if there is one.
"""

import argparse
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, median, set_up, table, version_of, write_figures
from foreword import LLM, SamplingParams
from foreword.store_config import EncryptionConfig

PROMPT = 4_096
QUESTIONS = 4
Rows = list[list[str]]


@contextmanager
def redis_server() -> Iterator[str | None]:
    """A server of our own on a free port, without persistence; None if it is not installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class Bench:
    """Seeded prompts and engines of one model."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, redis: str | None) -> None:
        self.model: str = arguments.model
        self.rounds: int = arguments.rounds
        self.halved: bool = arguments.halve
        self.redis = redis
        self.folder = folder
        self._options = {"dtype": arguments.dtype, "threads": arguments.threads, "self_check": False}
        self._random = random.Random(1)

    def engine(self, tokens: int, store: tuple[str, ...] = (), **options: Any) -> LLM:
        return LLM(self.model, kv_memory=f"{tokens} tokens", store=store, **self._options, **options)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(1, 8000) for _ in range(length)]

    def tiers(self) -> dict[str, str]:
        found = {"memory": "memory://?size=2GiB", "disk": f"disk://{self.folder}/kv?size=8GiB"}
        return found | ({"redis": self.redis} if self.redis else {})


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def ttft(bench: Bench) -> Rows:
    """TTFT of a long prompt in seconds, by where its KV is."""
    rows: Rows = []
    computed: list[float] = []
    taken: dict[str, list[float]] = {}
    keys = EncryptionConfig(key_store=f"{bench.folder}/keys", master_keys=(f"benchmark:{'5a' * 32}",))
    encrypted = {"disk, encrypted": f"disk://{bench.folder}/encrypted?size=8GiB"}
    for tier, url in (bench.tiers() | encrypted).items():
        with bench.engine(6_000, (url,), encryption=keys if tier in encrypted else None) as llm:
            for _ in range(bench.rounds + 1):
                prompt = bench.prompt(PROMPT)
                started = time.perf_counter()
                llm.generate(prompt, greedy(1))
                computed.append(time.perf_counter() - started)
                llm.flush()
                llm.clear_cache()
                started = time.perf_counter()
                [warm] = llm.generate(prompt, greedy(1))
                taken.setdefault(tier, []).append(time.perf_counter() - started)
                assert warm.cached_tokens >= PROMPT - 1, (tier, warm.cached_tokens)
                llm.clear_cache()
    base = median(computed)
    rows.append(["TTFT of 4,096 tokens, computed", f"{base * 1e3:,.0f} ms", ""])
    for tier, each in taken.items():
        rows.append([f"... from {tier}", f"{median(each[1:]) * 1e3:,.0f} ms", f"{base / median(each[1:]):.1f}x faster"])
    return rows


def documents(bench: Bench) -> Rows:
    """Documents too many for the device, asked in turn."""
    lengths = [2_500, 4_000, 6_000, 8_000, 10_000]  # tokens: 10 to 40 kB of text at four bytes a token
    texts = [bench.prompt(length // (2 if bench.halved else 1)) for length in lengths]
    asked = [[*text, *bench.prompt(32)] for _ in range(QUESTIONS) for text in texts]
    longest = max(map(len, asked))
    seconds: dict[str, float] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for name, store in (("device", ()), ("store", ("memory://?size=3GiB", bench.tiers()["disk"]))):
        with bench.engine(longest + 2_000, store) as llm:
            started = time.perf_counter()
            outputs = [llm.generate(prompt, greedy(16))[0] for prompt in asked]
            seconds[name] = time.perf_counter() - started
            answers[name] = [output.outputs[0].tokens for output in outputs]
    same = sum(a == b for a, b in zip(answers["device"], answers["store"], strict=True))
    saved = 1 - seconds["store"] / seconds["device"]
    return [
        ["documents, the device's prefix cache alone", f"{seconds['device']:.1f} s", ""],
        ["... with memory and disk", f"{seconds['store']:.1f} s", f"{saved:.0%} less time"],
        ["... answers that are the same", f"{same} of {len(asked)}", ""],
    ]


def decode(bench: Bench) -> Rows:
    """Tokens per second while blocks are written behind."""
    with bench.engine(8_000, ("memory://?size=1GiB", bench.tiers()["disk"])) as on, bench.engine(8_000) as off:
        shares = []
        for turn in range(3 * bench.rounds):
            prompts = [bench.prompt(64) for _ in range(4)]
            speed = {}
            for llm in (on, off) if turn % 2 else (off, on):
                started = time.perf_counter()
                llm.generate(prompts, greedy(65))
                speed[llm is on] = 1 / (time.perf_counter() - started)
            shares.append(speed[True] / speed[False])
        status = on.offload.status() if on.offload is not None else None
    spread = f"{min(shares):.3f} to {max(shares):.3f} in {len(shares)} runs"
    written = f"{status.saved} blocks written, {status.dropped} dropped" if status else ""
    return [["decode speed while writing behind / no store", f"{median(shares):.3f}", f"{spread}; {written}"]]


EXPERIMENTS = {"ttft": ttft, "documents": documents, "decode": decode}


def main() -> None:
    """Runs the experiments and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--halve", action="store_true", help="documents of half the length")
    parser.add_argument("--redis", help="a server; without it one is started")
    parser.add_argument("--folder", type=Path, help="where the disk store lies; a temporary folder without it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    facts = {
        **machine(),
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "rounds": str(arguments.rounds),
    }
    print(set_up(facts | {name: version_of(name) for name in ("torch", "transformers", "redis")}), flush=True)
    rows: Rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, redis_server() as started:
        bench = Bench(arguments, Path(folder), arguments.redis or started)
        for name in arguments.only:
            rows += EXPERIMENTS[name](bench)
            print(f"{name} done", flush=True)
    head = ["what", "figure", ""]
    print("\n" + table(head, rows))
    if arguments.json:
        write_figures(arguments.json, "Serving with stores", head, rows, facts)


if __name__ == "__main__":
    main()
