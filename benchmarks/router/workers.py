"""Measures a request's cost behind several workers of a router: processor time, by turns.

    python -m benchmarks.router.workers [--workers 1,2] [--clients 8,16] [--rounds 6] [--requests 640]

Each router is in front of the same two small servers that send 16 events at once (`router/wire.py`); every prompt is new, of
about 1 kB. The time is that which the scheduler gave to all threads of all the router's processes, so other work on the machine
changes it little, though not nothing: caches are shared, and a process that waits for a core finds more to read at once. The
two ratios are the time against that of one worker with as many clients in all, and with as many for each worker: more requests
at once cost each of them less. The second one says how many requests two full cores serve. Nothing is pinned. The router that
is not in its turn is idle; its probes are part of the other rounds' noise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections import defaultdict
from contextlib import ExitStack

import uvloop

from benchmarks.harness import machine, median, set_up, table
from benchmarks.router.wire import (
    Client,
    Servers,
    all_seconds,
    connected,
    end_process,
    many_files,
    settle_memory,
    start_router,
    wait_for,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2", help="numbers of workers; the first is compared with")
    parser.add_argument(
        "--clients", default="8,16", help="numbers of clients, each of which sends the next request at once"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=640, help="in a round")
    given = parser.parse_args()
    many_files()
    print(set_up(machine()), flush=True)
    servers = Servers()
    with ExitStack() as stack:
        routers: dict[int, tuple[int, int]] = {}
        for count in map(int, given.workers.split(",")):
            process, port = start_router(servers.ports["vllm"], "--workers", str(count), pinned=False)
            stack.callback(end_process, process)
            routers[count] = process.pid, port
        uvloop.run(measure(routers, given))
    print(set_up({"load afterwards": " ".join(f"{one:.1f}" for one in os.getloadavg())}))
    return 0


async def measure(routers: dict[int, tuple[int, int]], given: argparse.Namespace) -> None:
    settle_memory()
    clients = [int(one) for one in given.clients.split(",")]
    costs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _, port in routers.values():
        await wait_for(port)
        await send(port, clients[0], given.requests)
    for number, (count, many) in itertools.product(range(given.rounds), itertools.product(routers, clients)):
        turn = list(routers)[::-1][list(routers).index(count)] if number % 2 else count
        pid, port = routers[turn]
        before = all_seconds(pid)
        await send(port, many, given.requests)
        costs[turn, many].append((all_seconds(pid) - before) / given.requests)
    rows, first = [], next(iter(routers))
    for count, many in itertools.product(routers, clients):
        found = median(costs[count, many])
        ratios = [
            f"{found / median(costs[first, one]):.2f}" if (first, one) in costs else "" for one in (many, many // count)
        ]
        spread = " ".join(f"{1e3 * one:.2f}" for one in costs[count, many])
        rows.append([str(count), str(many), f"{1e3 * found:.2f}", *ratios, f"{1 / found:.0f}", spread])
    head = ["workers", "clients", "CPU ms each", "same clients", "same for each", "requests per CPU s", "all rounds"]
    print(table(head, rows))


async def send(port: int, clients: int, requests: int) -> None:
    """Requests over new connections, which any worker may take."""
    left = itertools.count(requests, -1)
    connections = await connected(port, clients)

    async def go_on(client: Client) -> None:
        while next(left) > 0:
            await client.ask(port)

    await asyncio.gather(*map(go_on, connections))
    for client in connections:
        client.transport.close()


if __name__ == "__main__":
    sys.exit(main())
