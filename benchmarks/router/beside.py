"""Two versions of the router, side by side: processor time per event and per request, by turns.

Both run at once, in front of the same servers, with the same settings. Events of slow streams are counted in the same windows;
requests go to one and then to the other, in another order each round. So what else runs on the machine meets both alike, and
the median of the ratios says more than any of the times. The router that is not in its turn is idle; its probes are noise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import median, table
from benchmarks.router import wire
from benchmarks.router.wire import (
    ROUTERS,
    STARTS,
    Broken,
    Client,
    Seen,
    Servers,
    all_seconds,
    connected,
    end_process,
    start_router,
    wait_for,
)

HERE = Path(__file__).resolve().parents[2]
HEAD = ["router", "what", "this code, us", "the other, us", "ratio", "least", "greatest", "turns"]
_CLIENTS = 8
# Requests of a turn: about as much work each.
_REQUESTS = {16: 240, 256: 48}


@dataclass(frozen=True, slots=True)
class Version:
    """A running router: its process and its port."""

    pid: int
    port: int


Turns = Sequence[tuple[float, float]]


def row(router: str, what: str, turns: Turns) -> list[str]:
    """A row of the table, of seconds for one event or request: those of this code and of the other one, turn by turn."""
    ratios = sorted(ours / theirs for ours, theirs in turns if theirs)
    ends = [ratios[0], ratios[-1]] if ratios else [float("nan")] * 2
    times = [f"{1e6 * median(one):.1f}" for one in ((ours for ours, _ in turns), (theirs for _, theirs in turns))]
    return [router, what, *times, *(f"{one:.3f}" for one in (median(ratios), *ends)), str(len(ratios))]


async def compare(servers: Servers, given: argparse.Namespace) -> int:
    """Print the table. Returns the number of failures. `given`: the options of `overhead`."""
    rows, failures = list[list[str]](), list[str]()
    for name, kind, flags in ROUTERS:
        if given.only not in name:
            continue
        with ExitStack() as stack:
            both = []
            for checkout in (HERE, given.beside.resolve()):
                process, port = start_router(servers.ports[kind], *flags, checkout=checkout)
                stack.callback(end_process, process)
                both.append(Version(process.pid, port))
            for one in both:
                await wait_for(one.port)
            for streams, pause in given.streams:
                what = f"event of {streams} streams, {1e3 * pause:.0f} ms apart"
                rows.append(row(name, what, await _events(both, streams, pause, servers, given, failures)))
            for events in _REQUESTS:
                rows.append(row(name, f"request of {events} events", await _requests(both, events, given, failures)))
    print(f"\n{table(HEAD, rows)}")
    for why in failures[:10]:
        print(f"failed: {why}")
    print(f"load afterwards: {' '.join(f'{one:.1f}' for one in os.getloadavg())}")
    return len(failures)


async def _events(
    both: Sequence[Version],
    streams: int,
    pause: float,
    servers: Servers,
    given: argparse.Namespace,
    failures: list[str],
) -> Turns:
    """Seconds for an event, in windows of `given.window` seconds."""
    held: Mapping[Version, list[Client]] = {one: await connected(one.port, streams) for one in both}
    clients, waiting = list[Client](), list[asyncio.Future[Seen]]()
    for number in range(streams):
        for one in both:
            clients.append(held[one][number])
            waiting.append(clients[-1].ask(one.port, pause=pause))
        await asyncio.sleep(max(pause / streams, len(both) / STARTS))
    async with asyncio.timeout(60):
        while not all(client.number or asked.done() for client, asked in zip(clients, waiting, strict=True)):
            await asyncio.sleep(pause)
    turns = []
    for _ in range(given.rounds):
        before = [(all_seconds(one.pid), _seen(held[one])) for one in both]
        await asyncio.sleep(given.window)
        after = [(all_seconds(one.pid), _seen(held[one])) for one in both]
        ours, theirs = (
            (busy - earlier) / max(events - known, 1)
            for (busy, events), (earlier, known) in zip(after, before, strict=True)
        )
        turns.append((ours, theirs))
    await servers.end_streams()
    done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    failures += [str(error) for error in done if isinstance(error, BaseException)]
    for client in clients:
        client.transport.close()
    return turns


def _seen(clients: Sequence[Client]) -> int:
    return sum(len(client.late) for client in clients)


async def _requests(both: Sequence[Version], events: int, given: argparse.Namespace, failures: list[str]) -> Turns:
    """Seconds for a request of so many events at once."""
    before, wire.EVENTS = wire.EVENTS, events
    turns = []
    try:
        for number in range(given.rounds + 1):
            spent = dict[Version, float]()
            for one in both if number % 2 else both[::-1]:
                spent[one] = await _turn(one, _REQUESTS[events], failures)
            if number:  # the first begins with cold caches
                turns.append((spent[both[0]], spent[both[1]]))
    finally:
        wire.EVENTS = before
    return turns


async def _turn(one: Version, requests: int, failures: list[str]) -> float:
    clients, each = await connected(one.port, _CLIENTS), requests // _CLIENTS
    before = all_seconds(one.pid)

    async def go_on(client: Client) -> None:
        try:
            for _ in range(each):
                await client.ask(one.port)
        except Broken as error:
            failures.append(str(error))

    await asyncio.gather(*map(go_on, clients))
    spent = all_seconds(one.pid) - before
    for client in clients:
        client.transport.close()
    return spent / (each * _CLIENTS)
