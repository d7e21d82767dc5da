"""Disaggregated prefill and migration: ITL of other requests, TTFT, and the pause of a migrated request.

    python -m benchmarks.engine.random_model 88m MODEL
    python -m benchmarks.instances.disaggregation MODEL [--only itl ttft move hits] [--dtype bfloat16] [--rounds 5]

Every server is a real `foreword serve` process bound to its cores; the client measures over HTTP. Four experiments:

itl    inter-token latency of running requests while prompts of 8,000 tokens arrive. Disaggregated: prefill on one
       core, decode on the other. Together: one process on both cores, chunked prefill, with each of --chunks.
ttft   time to first token of a prompt of 4,000 tokens, computed locally and on another server; and the share of
       the bytes that had left before the prompt was computed.
move   a request with 4,000 tokens of context migrates: its pause, as the server and as the client see it, against
       computing its context there.
hits   the decode side has 3,500 of 4,000 tokens: how many bytes travel.

Rounds of the two sides of a comparison take turns.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import machine, median, ratio, set_up, table, version_of

LONG, CONTEXT, HELD = 8_000, 4_000, 3_500
BLOCK = 16
START_SECONDS = 300.0
Rows = list[list[str]]


@dataclass
class Server:
    """A `foreword serve` process."""

    url: str
    process: subprocess.Popen[str]
    address: str = ""

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def forget(self) -> None:
        httpx.delete(f"{self.url}/v1/cache").raise_for_status()


@dataclass
class Bench:
    """The servers and settings of all experiments."""

    model: str
    dtype: str
    rounds: int
    running: int
    prompts: int
    chunks: Sequence[int]
    cores: Sequence[int]
    draws: random.Random = field(default_factory=lambda: random.Random(1))

    def prompt(self, length: int) -> list[int]:
        return [self.draws.randrange(1, 8000) for _ in range(length)]

    @contextmanager
    def server(self, cores: Sequence[int], tokens: int, *flags: str) -> Iterator[Server]:
        """A server on these cores, with as many threads, and room for so many tokens."""
        command = [sys.executable, "-m", "foreword", "serve", self.model, "--port", "0", "--dtype", self.dtype]
        command += ["--kv-memory", f"{tokens} tokens", "--threads", str(len(cores)), "--no-self-check", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            yield _ready(process)
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def pair(self, tokens: int, roles: tuple[str, str] = ("prefill", "decode")) -> Iterator[tuple[Server, Server]]:
        """Two servers, a core each."""
        with ExitStack() as stack:
            made = [
                stack.enter_context(self.server([core], tokens, "--role", role))
                for core, role in zip(self.cores, roles, strict=True)
            ]
            yield made[0], made[1]


def _ready(process: subprocess.Popen[str]) -> Server:
    assert process.stderr is not None
    url, seen = "", []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"listens on (http://\S+);", line):
            url = found[1]
        if " ready: " in line:
            break
    else:
        raise SystemExit("".join(seen))
    # The rest of its output is not read; a full pipe would stop it.
    subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    server = Server(url, process)
    server.address = httpx.get(f"{url}/v1/instance").json()["transfer"] or ""
    return server


def body(prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        **more,
    }


def apart(prefill: Server) -> dict[str, Any]:
    return {"kv_transfer_params": {"prefill": prefill.address}}


async def events(client: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> AsyncIterator[tuple[float, str]]:
    """When each event of a stream came, and its text. One token is one event."""
    async with client.stream("POST", f"{url}/v1/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter(), line


async def first_token(client: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> float:
    """Seconds to the first token; the stream is read to its end."""
    started, first = time.perf_counter(), 0.0
    async for at, _ in events(client, url, asked):
        first = first or at - started
    return first


# Inter-token latency


async def gaps(bench: Bench, url: str, more: dict[str, Any]) -> list[float]:
    """Seconds between tokens of running requests while long prompts arrive."""
    times: list[list[float]] = [[] for _ in range(bench.running)]

    async def run(client: httpx.AsyncClient, number: int) -> None:
        async for at, _ in events(client, url, body(bench.prompt(64), 8_000)):
            times[number].append(at)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        tasks = [asyncio.create_task(run(client, number)) for number in range(bench.running)]
        while not all(len(one) > 10 for one in times):
            await asyncio.sleep(0.05)
        began = time.perf_counter()
        for _ in range(bench.prompts):
            await first_token(client, url, body(bench.prompt(LONG), 2, **more))
        ended = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found: list[float] = []
    for one in times:
        inside = [at for at in one if began <= at <= ended]
        found += [b - a for a, b in itertools.pairwise(inside)]
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def itl(bench: Bench) -> Rows:
    room = bench.running * 8_000 + 2 * LONG
    found: dict[str, list[list[float]]] = {}
    for _ in range(bench.rounds):
        with bench.pair(room) as (prefill, decode):
            asyncio.run(first(bench, decode, apart(prefill)))
            found.setdefault("apart", []).append(asyncio.run(gaps(bench, decode.url, apart(prefill))))
        for chunk in bench.chunks:
            with bench.server(bench.cores, room, "--max-batch-tokens", str(chunk)) as one:
                asyncio.run(first(bench, one, {}))
                found.setdefault(f"together, chunks of {chunk}", []).append(asyncio.run(gaps(bench, one.url, {})))
    ours = median(percentile(one, 0.99) for one in found["apart"])
    rows = []
    for name, rounds in found.items():
        p99 = median(percentile(one, 0.99) for one in rounds)
        p50 = median(percentile(one, 0.5) for one in rounds)
        longest = max(max(one, default=0.0) for one in rounds)
        tokens = str(sum(map(len, rounds)))
        rows.append([name, ms(p50), ms(p99), ms(longest), tokens, f"{ratio(p99, ours):.2f}"])
    return rows


async def first(bench: Bench, server: Server, more: dict[str, Any]) -> None:
    """Connections, kernels and arenas are made by the first request."""
    async with httpx.AsyncClient(timeout=None) as client:
        await first_token(client, server.url, body(bench.prompt(600), 4, **more))


# TTFT


def ttft(bench: Bench) -> Rows:
    with bench.pair(4 * CONTEXT) as (prefill, decode):
        asyncio.run(first(bench, decode, apart(prefill)))
        asyncio.run(first(bench, prefill, {}))
        sides = {"in place": (prefill, {}), "apart": (decode, apart(prefill))}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        labels = {"kind": "prefill", "side": "source"}
        names = ("foreword:transfer_hidden_bytes_total", "foreword:transfer_bytes_total")
        before = [prefill.metric(name, **labels) for name in names]

        async def run() -> None:
            async with httpx.AsyncClient(timeout=None) as client:
                for number in range(2 * bench.rounds):
                    name = sorted(sides)[number % 2]
                    server, more = sides[name]
                    prefill.forget()
                    decode.forget()
                    seconds[name].append(await first_token(client, server.url, body(bench.prompt(CONTEXT), 2, **more)))

        asyncio.run(run())
        time.sleep(0.5)  # the last lease
        hidden, sent = (prefill.metric(name, **labels) - was for name, was in zip(names, before, strict=True))
    place, away = median(seconds["in place"]), median(seconds["apart"])
    return [
        ["in place", ms(place), "1.00", ""],
        [
            "apart",
            ms(away),
            f"{ratio(away, place):.2f}",
            f"{100 * ratio(hidden, sent):.0f} % of {sent / bench.rounds / 2**20:.1f} MiB",
        ],
    ]


# Migration


def move(bench: Bench) -> Rows:
    pauses: list[float] = []
    clients: list[float] = []
    usual: list[float] = []
    computed: list[float] = []
    moved: dict[str, Any] = {}
    with bench.pair(4 * CONTEXT, ("both", "both")) as (here, there):
        asyncio.run(first(bench, here, {}))
        asyncio.run(first(bench, there, {}))
        for _ in range(bench.rounds):
            here.forget()
            there.forget()
            moved, stream = asyncio.run(one_move(bench, here, there))
            pauses.append(moved["pause"])
            clients.append(max(stream))
            usual.append(median(stream))
            there.forget()
            computed.append(asyncio.run(once(bench, there)))
    pause, client, again = median(pauses), median(clients), median(computed)
    return [
        ["pause, as the source sees it", ms(pause), f"{ratio(again, pause):.0f}x shorter"],
        ["longest gap that the client sees", ms(client), f"{ratio(again, client):.0f}x shorter"],
        ["usual inter-token latency", ms(median(usual)), ""],
        ["computing the context there", ms(again), ""],
        ["KV", f"{moved['bytes'] / 2**20:.1f} MiB", f"{moved['rounds']} rounds, {1000 * moved['seconds']:.0f} ms"],
    ]


async def one_move(bench: Bench, here: Server, there: Server) -> tuple[dict[str, Any], list[float]]:
    """Migrate a streaming request after 20 tokens. Returns the migration's figures and the client's ITLs."""
    answer: asyncio.Task[httpx.Response] | None = None
    times: list[float] = []
    async with httpx.AsyncClient(timeout=None) as client:
        async for at, line in events(client, here.url, body(bench.prompt(CONTEXT), 150)):
            times.append(at)
            if len(times) == 20:
                name = json.loads(line[6:])["id"]
                path = f"{here.url}/v1/requests/{name}/migrate"
                answer = asyncio.create_task(client.post(path, json={"to": there.url}))
        assert answer is not None
        response = await answer
    response.raise_for_status()
    return response.json(), [b - a for a, b in itertools.pairwise(times)]


async def once(bench: Bench, server: Server) -> float:
    async with httpx.AsyncClient(timeout=None) as client:
        return await first_token(client, server.url, body(bench.prompt(CONTEXT), 1))


# Prefix hits


def hits(bench: Bench) -> Rows:
    rows: Rows = []
    with bench.pair(4 * CONTEXT) as (prefill, decode):
        labels = {"kind": "prefill", "side": "destination"}

        async def ask(prompt: list[int]) -> tuple[float, float]:
            async with httpx.AsyncClient(timeout=None) as client:
                before = decode.metric("foreword:transfer_bytes_total", **labels)
                seconds = await first_token(client, decode.url, body(prompt, 2, **apart(prefill)))
                return seconds, decode.metric("foreword:transfer_bytes_total", **labels) - before

        asyncio.run(first(bench, decode, apart(prefill)))
        per_token = asyncio.run(ask(bench.prompt(CONTEXT)))[1] / CONTEXT
        for held in (0, HELD):
            prompt = bench.prompt(CONTEXT)
            if held:
                asyncio.run(ask(prompt[:held]))
            seconds, sent = asyncio.run(ask(prompt))
            missing = CONTEXT - held // BLOCK * BLOCK
            rows.append(
                [f"{held:,}", f"{missing:,}", f"{sent / per_token:,.0f}", f"{sent / 2**20:.2f} MiB", ms(seconds)]
            )
    return rows


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


EXPERIMENTS = {
    "itl": (itl, ["8k prompts arrive", "median gap", "p99", "longest", "gaps", "p99 / apart's"]),
    "ttft": (ttft, ["4k prompt", "TTFT", "/ local", "hidden"]),
    "move": (move, ["4k tokens of context", "", ""]),
    "hits": (hits, ["tokens held", "missing", "tokens that travelled", "bytes", "TTFT"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=4, help="requests that decode while prompts arrive")
    parser.add_argument("--prompts", type=int, default=3, help="long prompts per round")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 128])
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    bench = Bench(
        arguments.model,
        arguments.dtype,
        arguments.rounds,
        arguments.running,
        arguments.prompts,
        arguments.chunks,
        cores,
    )
    facts = {
        **machine(),
        "model": f"{Path(arguments.model).name}, {arguments.dtype}",
        "versions": f"foreword {version_of('foreword')}, torch {version_of('torch')}",
        "servers": f"cores {cores[0]} and {cores[1]}, one thread per core, blocks of {BLOCK} tokens",
        "work": f"{arguments.running} requests decode, {arguments.prompts} prompts of {LONG:,} tokens one after the other",
        "rounds": f"{arguments.rounds}; medians",
    }
    print(set_up(facts))
    for name in arguments.only:
        run, head = EXPERIMENTS[name]
        print(f"\n{name}\n\n{table(head, run(bench))}", flush=True)


if __name__ == "__main__":
    main()
