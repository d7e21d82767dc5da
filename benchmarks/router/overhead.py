"""Measures the router's cost: the same streaming load sent straight to a server, through nginx, and through the router.

    python -m benchmarks.router.overhead [--rounds 4] [--streams 1000/0.1,2000/0.1,4000/0.2] [--events 16]
        [--vllm-router COMMAND] [--apart SECONDS] [--beside CHECKOUT]

The server behind is a small one that sends fixed events (`router/wire.py`), so that all that is seen is the way. The proxy has
one core; server and clients share another, and what that core costs is seen in the straight way's figures. All contenders take
turns, in short slices. nginx (if it is installed) is a plain reverse proxy: it neither reads the prompt nor remembers the
answer. The router is measured three times: in front of plain OpenAI servers (prompts compared as text), of vLLM servers with
the tokenizer in the router, and with the servers' own /tokenize. Every prompt is new, of about 1 kB. `--vllm-router` adds that
router (`pip install vllm-router`, its program), with placement by the cache.

Four parts: requests one by one; a steady rate (open loop, exponential pauses); as many as it can; and slow streams side by
side: 1000/0.1 are 1,000 streams with an event every 0.1 seconds each (much more than 20,000 events per second in all are too
many for server and clients on one core). Every event is numbered and carries the time it was sent: one that is missing, doubled
or out of order is a failure. About three minutes.

With `--beside` another checkout of this repository takes turns with this one instead, and nothing else is measured: processor
time per event of slow streams and per request of 16 and 256 events, of each of the three routers (`router/beside.py`). Both
hold the streams at once: half as many as above are as many events.

`--apart` is another measurement, in place of these: the processor time of a request whose events come alone, so many seconds
apart, as those of a model do. Each contender has a turn in each round, and the ratio to `vllm-router` is that within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.harness import machine, median, set_up, table, version_of
from benchmarks.router import wire
from benchmarks.router.beside import compare
from benchmarks.router.wire import (
    REST_CORE,
    STARTS,
    Broken,
    Client,
    Contender,
    Seen,
    Servers,
    all_seconds,
    connected,
    many_files,
    nginx_version,
    settle_memory,
    start,
    wait_for,
)

PATIENCE = 60.0
# Those that hold thousands of streams; the others would tell the same again.
RIVAL = "vllm-router, cache aware"
SIDE_BY_SIDE = ("straight", "nginx", RIVAL, "router, vLLM, own tokenizer")


@dataclass
class Figures:
    """Measurements of one contender."""

    alone: list[Seen] = field(default_factory=list)
    steady: list[Seen] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of each contender, in turn")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each contender in a round, in each part")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second, steady")
    parser.add_argument("--clients", type=int, default=32, help="when they send as many as they can")
    parser.add_argument(
        "--streams",
        default="1000/0.1,2000/0.1,4000/0.2",
        help="slow streams, and seconds between events; empty for none",
    )
    parser.add_argument("--window", type=float, default=4.0, help="seconds that slow streams are looked at")
    parser.add_argument("--events", type=int, default=wire.EVENTS, help="of a stream, but for the slow ones")
    parser.add_argument("--vllm-router", help="the program of the package vllm-router; without it that row is left out")
    parser.add_argument("--beside", type=Path, help="another checkout, with which this one takes turns")
    parser.add_argument("--apart", type=float, metavar="SECONDS", help="only requests whose events come so far apart")
    parser.add_argument("--only", default="", help="contenders whose name contains this, and the straight way")
    given = parser.parse_args()
    pairs = [one.partition("/") for one in given.streams.split(",") if one]
    wire.EVENTS = given.events
    given.streams = [(int(streams), float(pause or 0.1)) for streams, _, pause in pairs]
    return given


def main() -> int:
    given = read_arguments()
    os.sched_setaffinity(0, {REST_CORE})
    many_files()
    began = time.monotonic()
    versions = {"aiohttp": version_of("aiohttp"), "uvloop": version_of("uvloop"), "nginx": nginx_version()}
    print(set_up(machine() | versions), flush=True)
    servers = Servers()
    if given.beside is not None:
        settle_memory()
        return int(uvloop.run(compare(servers, given)) > 0)
    with ExitStack() as stack:
        contenders = [
            one for one in start(stack, servers, given.vllm_router) if given.only in one.name or one.pid is None
        ]
        failed = uvloop.run(measure(contenders, servers, given))
    print(f"\nAll of it took {time.monotonic() - began:.0f} s.")
    return int(failed > 0)


async def measure(contenders: list[Contender], servers: Servers, given: argparse.Namespace) -> int:
    settle_memory()
    found = {one.name: Figures() for one in contenders}
    for one in contenders:
        await wait_for(one.port)
        await one_by_one(one, found[one.name], 0.5)
        found[one.name] = Figures()
    parts = ((one_by_one, tell_alone), (steady, tell_steady), (full, tell_full))
    for part, say in ((apart, tell_apart),) if given.apart else parts:
        for number in range(given.rounds):
            for one in contenders[number % 2 :] + contenders[: number % 2]:
                await part(one, found[one.name], given.seconds, given)
        say(found, given)
    failed = [f"{name}: {why}" for name, one in found.items() for why in one.failures]
    for why in failed[:10]:
        print(f"failed: {why}")
    if given.apart:
        return len(failed)
    held = [one for one in contenders if one.name in SIDE_BY_SIDE or given.only]
    return len(failed) + await side_by_side(held, servers, given)


async def one_by_one(one: Contender, figures: Figures, seconds: float, given: argparse.Namespace | None = None) -> None:
    """Time per event on an idle machine."""
    [client] = await connected(one.port, 1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        figures.alone.append(await client.ask(one.port))
    client.transport.close()


async def steady(one: Contender, figures: Figures, seconds: float, given: argparse.Namespace) -> None:
    """Requests at a rate that does not wait for answers."""
    free = await connected(one.port, 8)
    rng, until, when = random.Random(7), time.monotonic() + 2 * seconds, time.monotonic()
    under_way: list[asyncio.Task[None]] = []

    async def send() -> None:
        client = free.pop() if free else (await connected(one.port, 1))[0]
        try:
            figures.steady.append(await client.ask(one.port))
            free.append(client)
        except Broken as error:
            figures.failures.append(str(error))

    while when < until:
        await asyncio.sleep(max(when - time.monotonic(), 0))
        under_way.append(asyncio.ensure_future(send()))
        when += rng.expovariate(given.rate)
    await asyncio.gather(*under_way)
    for client in free:
        client.transport.close()


async def full(one: Contender, figures: Figures, seconds: float, given: argparse.Namespace) -> None:
    """Each client sends the next as soon as the last has ended."""
    clients, ended = await connected(one.port, given.clients), 0
    began, busy = time.monotonic(), one.cpu_seconds()

    async def go_on(client: Client) -> None:
        nonlocal ended
        try:
            while time.monotonic() < began + seconds:
                await client.ask(one.port)
                ended += 1
        except Broken as error:
            figures.failures.append(str(error))

    await asyncio.gather(*map(go_on, clients))
    took = time.monotonic() - began
    figures.rates.append(ended / took)
    busy = one.cpu_seconds() - busy
    figures.busy.append(busy / took)
    figures.cost.append(busy / max(ended, 1))
    for client in clients:
        client.transport.close()


async def apart(one: Contender, figures: Figures, seconds: float, given: argparse.Namespace) -> None:
    """Each client sends the next request as soon as the last has ended, whose events came one by one."""
    if one.pid is None:
        return
    clients, ended = await connected(one.port, given.clients), 0
    began, busy = time.monotonic(), all_seconds(one.pid)

    async def go_on(client: Client) -> None:
        nonlocal ended
        try:
            while time.monotonic() < began + seconds:
                seen = await client.ask(one.port, pause=given.apart, ends=1)
                figures.late += [late for _, late in seen.late]
                ended += 1
        except Broken as error:
            figures.failures.append(str(error))

    await asyncio.gather(*map(go_on, clients))
    figures.rates.append(ended / (time.monotonic() - began))
    figures.cost.append((all_seconds(one.pid) - busy) / max(ended, 1))
    for client in clients:
        client.transport.close()


# Slow streams


async def side_by_side(contenders: list[Contender], servers: Servers, given: argparse.Namespace) -> int:
    """Holds so many streams through each, one after the other. Returns the number of failures."""
    head = [
        "",
        "streams",
        "ms between",
        "events/s",
        "p50",
        "p99",
        "added p50",
        "added p99",
        "of a core",
        "us/event",
        "ends",
        "KiB/stream",
        "failed",
    ]
    if not given.streams:
        return 0
    print(
        "\nSlow streams side by side: milliseconds from sending an event to its arrival; `of a core`: of the proxy's,"
    )
    print("`us/event`: microseconds of it for an event; `ends`: what server and clients took of theirs", flush=True)
    rows, failed = [], 0
    for streams, pause in given.streams:
        straight: tuple[float, ...] = ()
        for one in contenders:
            held = await hold(one, streams, pause, servers, given.window)
            straight = straight or held.late
            added = [f"{1e3 * (ours - theirs):.2f}" for ours, theirs in zip(held.late, straight, strict=True)]
            late = [f"{1e3 * value:.2f}" for value in held.late]
            each = f"{1e6 * held.busy / held.events:.1f}"
            proxy = [f"{held.busy:.0%}", each, f"{held.ends:.0%}", f"{held.memory / 1024:.1f}"]
            if one.pid is None:
                added, proxy = ["", ""], ["", "", proxy[2], ""]
            rows.append(
                [
                    one.name,
                    str(streams),
                    f"{1e3 * pause:.0f}",
                    f"{held.events:.0f}",
                    *late,
                    *added,
                    *proxy,
                    str(len(held.failures)),
                ]
            )
            failed += len(held.failures)
            print(
                f"{' '.join(f'{a}: {b};' for a, b in zip(head[1:], rows[-1][1:], strict=True))} {one.name}", flush=True
            )
            for why in held.failures[:3]:
                print(f"failed: {why}")
    print(f"\n{table(head, rows)}")
    return failed


@dataclass(frozen=True, slots=True)
class Held:
    """Measurements while streams were held: events delivered per second, how late (p50, p99), shares of the cores, bytes of
    the proxy's memory per stream."""

    events: float
    late: tuple[float, ...]
    busy: float
    ends: float
    memory: float
    failures: list[str]


async def hold(one: Contender, streams: int, pause: float, servers: Servers, window: float) -> Held:
    before, began = one.memory(), time.monotonic()
    clients, waiting = [], []
    for number in range(streams):
        [client] = await connected(one.port, 1)
        clients.append(client)
        waiting.append(client.ask(one.port, pause=pause))
        await asyncio.sleep(max(began + number / STARTS - time.monotonic(), 0))
    async with asyncio.timeout(PATIENCE):
        while not all(client.number for client in clients):
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    opened, busy, ends = time.monotonic(), one.cpu_seconds(), servers.cpu_seconds() + time.process_time()
    await asyncio.sleep(window)
    closed, memory = time.monotonic(), one.memory()
    took = closed - opened
    busy, ends = one.cpu_seconds() - busy, servers.cpu_seconds() + time.process_time() - ends
    await servers.end_streams()
    done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
    failures = [str(error) for error in done if isinstance(error, BaseException)]
    late = [late for client in clients for at, late in client.late if opened <= at < closed]
    for client in clients:
        client.transport.close()
    return Held(
        len(late) / took,
        (quantile(late, 0.5), quantile(late, 0.99)),
        busy / took,
        ends / took,
        max(memory - before, 0) / streams,
        failures,
    )


# Tables


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def latencies(name: str, seen: list[Seen], straight: list[Seen]) -> list[str]:
    firsts, ends = [one.first for one in seen], [one.end for one in seen]
    theirs = [one.end for one in straight]
    cells = [1e3 * quantile(values, share) for values in (firsts, ends) for share in (0.5, 0.99)]
    cells += [1e3 * (quantile(ends, share) - quantile(theirs, share)) for share in (0.5, 0.99)]
    return [name, str(len(seen)), *(f"{cell:.2f}" for cell in cells), f"{1e3 * max(ends):.1f}"]


LATENCY_HEAD = ["", "requests", "first p50", "first p99", "end p50", "end p99", "added p50", "added p99", "longest"]


def tell_alone(found: dict[str, Figures], given: argparse.Namespace) -> None:
    print(
        f"\nOne by one, {wire.EVENTS} events: milliseconds to the first event and the end, and what the way adds to the end"
    )
    rows = [latencies(name, one.alone, found["straight"].alone) for name, one in found.items()]
    print(table(LATENCY_HEAD, rows), flush=True)


def tell_steady(found: dict[str, Figures], given: argparse.Namespace) -> None:
    print(f"\n{given.rate:g} requests/s, sent without waiting for answers: the same")
    rows = [latencies(name, one.steady, found["straight"].steady) for name, one in found.items()]
    print(table(LATENCY_HEAD, rows), flush=True)


def tell_full(found: dict[str, Figures], given: argparse.Namespace) -> None:
    print(f"\n{given.clients} clients, each sends the next when one has ended: requests/s (the proxy has one core)")
    rows = [
        [
            name,
            f"{median(one.rates):.0f}",
            " ".join(f"{rate:.0f}" for rate in one.rates),
            f"{median(one.busy):.0%}",
            f"{1e3 * median(one.cost):.2f}",
        ]
        for name, one in found.items()
    ]
    print(table(["", "median", "all rounds", "of a core", "CPU ms each"], rows), flush=True)


def tell_apart(found: dict[str, Figures], given: argparse.Namespace) -> None:
    print(
        f"\nRequests of {wire.EVENTS} events, each {given.apart:g} s behind the one before, of {given.clients} clients:"
    )
    print(
        "milliseconds of the processor for a request, by rounds; `ratio`: to vllm-router in the same round", flush=True
    )
    rows, rival = [], found.get(RIVAL, Figures()).cost
    for name, one in found.items():
        if not one.cost:
            continue
        ratios = [ours / theirs for ours, theirs in zip(one.cost, rival, strict=False)]
        each = " ".join(f"{1e3 * cost:.2f}" for cost in one.cost)
        late = [f"{1e3 * quantile(one.late, share):.1f}" for share in (0.5, 0.99)]
        shown = [f"{median(ratios):.2f}" if ratios else "", f"{median(one.rates):.0f}"]
        rows.append([name, f"{1e3 * median(one.cost):.2f}", each, *shown, *late, str(len(one.failures))])
    print(table(["", "median", "rounds", "ratio", "requests/s", "late p50, ms", "p99", "failed"], rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
