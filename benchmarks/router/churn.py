"""Replicas that come and go under load: real servers over one disk store, a real router and streaming clients, all on this
machine.

    python -m benchmarks.router.churn [MODEL] [--only churn|join]

MODEL is a folder; without it, the embedded model. Questions after shared system prompts of real text, which one follows Zipf's
law; open loop with Poisson arrivals.

churn   a server is added, and removed again, every --period seconds; then all servers are restarted, one after the other. A
        server that leaves gets SIGTERM, no more: it drains, and the router has to notice. Every request must succeed. Hit share
        and TTFT over time, and how long the hit share takes to recover.
join    a server joins; the hit share of its first minute beside that of the others in the same minute, and the part of it that
        was on its device. With warm-up and without, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from benchmarks.harness import machine, median, set_up, table, version_of
from benchmarks.router.burst import EMBEDDED, SYSTEM_TOKENS, failures, hit_share, questions
from benchmarks.router.fleet import Answer, Client, Process, Request, router, servers

WINDOW = 10.0
# The hit share has recovered when a window has this part of the share before.
RECOVERED = 0.95
FIRST_MINUTE = 60.0
COMMON = ("--threads", "1", "--log-level", "warning", "--no-self-check")


def main() -> int:
    given = read_arguments()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    facts = machine() | {
        "libraries": ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "aiohttp")),
        "servers": f"{given.replicas} x foreword serve {given.model.name}, one thread and KV memory for {given.kv_memory} "
        f"tokens each, {'no store' if given.no_store else 'one disk store for all'}; all processes share the cores",
        "requests": f"{given.rate:g}/s, one of {given.systems} system prompts of {SYSTEM_TOKENS} tokens and a question, "
        f"{given.answer} tokens of output",
    }
    print(set_up(facts), flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="foreword-churn-") as folder:
        flags = [str(given.model), "--served-model-name", "bench", "--kv-memory", f"{given.kv_memory} tokens"]
        flags += ["--kv-events", "tcp://127.0.0.1:0"]
        flags += [] if given.no_store else ["--store", f"disk://{folder}/store?size=4GiB"]
        names = [f"s{i}" for i in range(given.replicas)]
        with servers(Path(folder), names, *flags) as fleet:
            bench = Bench(given, Path(folder), fleet, flags, questions(given, tokenizer))
            if given.only != "join":
                failed |= asyncio.run(churn(bench))
            if given.only != "churn":
                failed |= asyncio.run(joins(bench))
    return int(failed)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", default=EMBEDDED)
    parser.add_argument("--only", choices=("churn", "join"))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--systems", type=int, default=24, help="number of system prompts")
    parser.add_argument("--answer", type=int, default=24, help="tokens of every answer")
    parser.add_argument("--kv-memory", type=int, default=12288, help="tokens of each device")
    parser.add_argument("--no-store", action="store_true", help="servers share nothing, so there is nothing to load")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds of load before the first change")
    parser.add_argument("--period", type=float, default=30.0, help="churn: seconds between changes")
    parser.add_argument("--changes", type=int, default=4, help="churn: how often one is added or removed")
    parser.add_argument("--rounds", type=int, default=2, help="join: with warm-up and without, each")
    given = parser.parse_args()
    given.requests = 4096
    return given


@dataclass
class Bench:
    """The servers and settings of both parts."""

    given: argparse.Namespace
    folder: Path
    fleet: list[Process]
    flags: list[str]
    requests: list[Request]

    def another(self, name: str) -> Process:
        """A server that is not started yet."""
        return Process(self.folder, name, ["serve", *COMMON, *self.flags])

    def forget(self) -> None:
        for one in self.fleet:
            one.forget()


@dataclass
class Load:
    """Requests until `stop`. `changes`: time and what happened then."""

    bench: Bench
    client: Client
    began: float = field(default_factory=time.perf_counter)
    changes: list[tuple[float, str]] = field(default_factory=list)
    _stopped: bool = False
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        chance = random.Random(self.bench.given.seed + 2)
        async with asyncio.TaskGroup() as group:
            for request in self.bench.requests:
                if self._stopped:
                    break
                group.create_task(self.client.ask(request))
                await asyncio.sleep(chance.expovariate(self.bench.given.rate))

    async def stop(self) -> list[Answer]:
        """No further requests; the answers once all have ended."""
        assert self._task is not None
        self._stopped = True
        await self._task
        return self.client.answers

    def note(self, what: str) -> None:
        self.changes.append((time.perf_counter(), what))
        print(f"  {time.perf_counter() - self.began:5.0f} s  {what}", flush=True)


async def takes_requests(front: Process, one: Process) -> None:
    async with httpx.AsyncClient() as http:
        while True:
            listed = (await http.get(f"{front.url}/v1/router/replicas", timeout=30)).json()["data"]
            if any(found["replica"] == one.url and found["takes_requests"] for found in listed):
                return
            await asyncio.sleep(0.1)


async def change(front: Process, method: str, one: Process) -> None:
    """Add a replica to the router, or remove it."""
    async with httpx.AsyncClient() as http:
        body = {"replica": one.url}
        (await http.request(method, f"{front.url}/v1/router/replicas", json=body, timeout=30)).raise_for_status()


async def loaded(bench: Bench, stack: AsyncExitStack, *flags: str) -> tuple[Process, Load]:
    """A new router, and load on it after it has settled."""
    front = stack.enter_context(router(bench.folder, bench.fleet, "--tokenizer", str(bench.given.model), *flags))
    load = Load(bench, await stack.enter_async_context(Client(front.url)))
    load.start()
    await asyncio.sleep(bench.given.settle)
    return front, load


# Churn


async def churn(bench: Bench) -> bool:
    print(
        f"\nOne of {bench.given.replicas + 1} servers added or removed every {bench.given.period:g} s, then all restarted:"
    )
    bench.forget()
    async with AsyncExitStack() as stack:
        front, load = await loaded(bench, stack)
        extra: Process | None = None
        for number in range(bench.given.changes):
            began = time.perf_counter()
            if extra is None:
                extra = bench.another(f"extra{number}")
                stack.callback(extra.kill)
                await asyncio.to_thread(extra.start)
                await change(front, "POST", extra)
                await takes_requests(front, extra)
                load.note("a server added")
            else:
                load.note("a server removed")
                await change(front, "DELETE", extra)
                await asyncio.to_thread(extra.stop)
                extra = None
            await asyncio.sleep(max(bench.given.period - (time.perf_counter() - began), 0))
        for number, one in enumerate(bench.fleet):
            load.note(f"server {number + 1} restarted")
            await asyncio.to_thread(one.stop)
            await asyncio.to_thread(one.start)
            await asyncio.to_thread(one.wait_ready)
            await takes_requests(front, one)
        load.note("all restarted")
        await asyncio.sleep(2 * bench.given.period)
        ended = time.perf_counter()
        answers = await load.stop()
    report(load, answers, ended)
    return bool(failures(answers))


def report(load: Load, answers: Sequence[Answer], ended: float) -> None:
    began, rows = load.began, []
    shares: list[tuple[float, float]] = []
    for number in range(int((ended - began) // WINDOW)):
        start = began + number * WINDOW
        sent = [one for one in answers if start <= one.sent < start + WINDOW]
        shares.append((start + WINDOW, hit_share(sent)))
        noted = [text for at, text in load.changes if start <= at < start + WINDOW]
        ttft = sorted(1000 * one.ttft for one in sent if one.first)
        rows.append(
            [
                "; ".join(noted),
                f"{start - began:.0f}",
                str(len(sent)),
                str(len(failures(sent))),
                f"{hit_share(sent):.1%}",
                f"{median(ttft):.0f}",
                f"{ttft[-1]:.0f}" if ttft else "",
            ]
        )
    print(table(["change", "from s", "requests", "failed", "hit share", "TTFT p50 ms", "max ms"], rows))
    first = load.changes[0][0]
    before = hit_share([one for one in answers if first - 2 * WINDOW <= one.sent < first])
    print(f"hit share in the {2 * WINDOW:.0f} s before the first change: {before:.1%}")
    for at, what in load.changes:
        back = next((end for end, share in shares if end - WINDOW >= at and share >= RECOVERED * before), None)
        text = "not within the run" if back is None else f"after at most {back - at:.0f} s"
        print(f"  {what}: {RECOVERED:.0%} of that again {text}")
    print(f"requests: {len(answers)}, failed: {len(failures(answers))} {failures(answers)[:3] or ''}", flush=True)


# A server joins


def on_device(one: Process) -> tuple[float, float]:
    """Cached prompt tokens: those that were on the device, and all."""
    name = "vllm:prompt_tokens_cached_by_source_total"
    return one.metric(name, source="device"), one.metric(name)


async def joins(bench: Bench) -> bool:
    print(f"\nA server joins {bench.given.replicas}; its first minute:")
    rows, failed = [], []
    for number in range(bench.given.rounds):
        for seconds in (10, 0) if number % 2 == 0 else (0, 10):
            bench.forget()
            async with AsyncExitStack() as stack:
                front, load = await loaded(bench, stack, "--warm-seconds", str(seconds))
                extra = bench.another(f"join{number}-{seconds}")
                stack.callback(extra.kill)
                await asyncio.to_thread(extra.start)
                await asyncio.to_thread(extra.wait_ready)
                began = time.perf_counter()
                await change(front, "POST", extra)
                await takes_requests(front, extra)
                joined = time.perf_counter()
                before = on_device(extra)
                await asyncio.sleep(FIRST_MINUTE)
                answers = await load.stop()
                device, cached = (now - then for now, then in zip(on_device(extra), before, strict=True))
                warmed = front.metric("foreword:router_warm_up_tokens_total")
                await asyncio.to_thread(extra.stop)
            minute = [one for one in answers if joined <= one.sent]
            own = [one for one in minute if one.replica == extra.url]
            others = [one for one in minute if one.replica != extra.url]
            failed += failures(answers)
            rows.append(
                [
                    "on" if seconds else "off",
                    f"{joined - began:.1f}",
                    f"{warmed:.0f}",
                    str(len(own)),
                    f"{hit_share(own):.1%}",
                    f"{hit_share(others):.1%}",
                    f"{hit_share(own) / max(hit_share(others), 1e-9):.0%}",
                    f"{device / max(cached, 1):.0%}",
                    f"{1000 * median(one.ttft for one in own):.0f} / {1000 * median(one.ttft for one in others):.0f}",
                ]
            )
            print(f"  warm-up {rows[-1]}", flush=True)
    head = ["warm-up", "s until it takes requests", "tokens", "its requests", "its hit share", "others'", "of others'"]
    print(table([*head, "hits on device", "TTFT p50 ms, its / others'"], rows))
    print(f"failed: {len(failed)} {failed[:3] or ''}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
