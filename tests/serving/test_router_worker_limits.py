"""Limits of a router with workers: those that each worker has a part of, and those that all have together."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import http_client
import httpx
import pytest
from router_parts import Loop, RouterProcess
from shared_server import until
from test_router_workers import CHAT, GatedReplica, RememberingReplica, ask, children, held_by, routed, settle

HOLD = [{"role": "user", "content": "HOLD"}]
HELLO = [{"role": "user", "content": "hello"}]
ALICE = ("--api-keys", "alice=a", "--replica-key", "r")


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


def refusing(router: RouterProcess) -> int:
    """How many workers have answered 429."""
    return len(set(re.findall(rf"(worker \d): POST {CHAT} 429", router.text)))


@contextmanager
def asking(replica: GatedReplica) -> Iterator[ThreadPoolExecutor]:
    """Threads for requests; the replica holds none any more at the end."""
    with ThreadPoolExecutor(64) as pool:
        try:
            yield pool
        finally:
            replica.open()


def waiting(asked: list[Future[httpx.Response]]) -> int:
    return sum(not one.done() for one in asked)


def test_the_queue_is_divided(loop: Loop) -> None:
    """Two requests queue at each of two workers, where four may: the others get 429. All that queue are served when the
    replica is free, whichever worker the request there was of."""
    replica = GatedReplica(loop)
    with routed([replica], "--max-in-flight", "1", "--max-queue", "4") as router, asking(replica) as pool:
        first = pool.submit(ask, router, HOLD)
        until(lambda: replica.held == 1)
        settle(router)
        asked: list[Future[httpx.Response]] = []
        while refusing(router) < 2:
            assert len(asked) < 60, "one worker has refused nothing"
            asked.append(pool.submit(ask, router, HELLO))
            until(lambda: asked[-1].done() or waiting(asked) <= 4)
        until(lambda: waiting(asked) <= 4)
        assert replica.held == 1 and not first.done()
        replica.open()
        found = Counter(one.result(60).status_code for one in asked)
        assert first.result(60).status_code == 200 and found == {200: 4, 429: len(asked) - 4}


def test_connections_are_divided(loop: Loop) -> None:
    """Each worker keeps its part of the connections, and closes an idle one for a new one above that."""
    with routed([RememberingReplica(loop)], "--max-connections", "6") as router, ExitStack() as stack:
        host, port = router.url.removeprefix("http://").split(":")
        opened: list[socket.socket] = []

        def still_open() -> int:
            return sum(map(is_open, opened))

        while len(opened) < 20 or still_open() < 6:
            assert len(opened) < 200, "the workers keep fewer than six"
            opened.append(stack.enter_context(socket.create_connection((host, int(port)), 60)))
            opened[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert opened[-1].recv(4096).startswith(b"HTTP/1.1 200")
            until(lambda: still_open() <= 6)


def is_open(one: socket.socket) -> bool:
    """Whether the other side has not closed a connection on which nothing is to be read."""
    return not select.select([one], [], [], 0)[0]


def test_the_memory_of_responses_is_divided(loop: Loop) -> None:
    """Two workers, which both have each response, keep as many as one does with half of the memory: the newest."""

    def kept(workers: int, memory: str) -> list[int]:
        rng = random.Random(7)
        with routed([RememberingReplica(loop)], "--response-memory", memory, workers=workers) as router:
            names = []
            for _ in range(24):
                said = {"model": "m", "input": rng.randbytes(2_000).hex()}
                names.append(httpx.post(f"{router.url}/v1/responses", json=said, timeout=60).json()["id"])
                settle(router)
            return [
                number
                for number, name in enumerate(names)
                if httpx.get(f"{router.url}/v1/responses/{name}", timeout=60).status_code == 200
            ]

    half = kept(1, "128KiB")
    assert 2 < len(half) < 12 and half[-1] == 23
    assert kept(2, "256KiB") == half


def test_requests_at_a_time_are_those_of_all(loop: Loop) -> None:
    """A tenant runs as many requests as its quota says, whichever workers they come to. Those of a worker that is killed do not
    run any more, and leave room for as many."""
    replica = GatedReplica(loop)
    with routed([replica], *ALICE, "--quota", "alice concurrent=6") as router, asking(replica) as pool:
        asked: list[Future[httpx.Response]] = []

        def hold(count: int) -> None:
            for _ in range(count):
                asked.append(pool.submit(ask, router, HOLD, "a"))

        hold(6)
        until(lambda: replica.held == 6)
        while refusing(router) < 2:
            assert len(asked) < 60, "one worker has refused nothing"
            assert ask(router, HOLD, "a").status_code == 429
        having = int(held_by(router)[len("worker ")])
        os.kill(children(router)[having], signal.SIGKILL)
        until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
        ended = [one for one in asked if one.done()]
        assert ended and all(one.exception() is not None for one in ended)
        hold(len(ended))
        until(lambda: replica.held == 6 + len(ended))
        assert ask(router, HOLD, "a").status_code == 429
        replica.open()
        assert {one.result(60).status_code for one in asked if one not in ended} == {200}


def test_tokens_are_those_of_all(loop: Loop) -> None:
    """A tenant that has used up its tokens gets 429 from every worker, also from one that has served nothing of it."""
    with routed([RememberingReplica(loop)], *ALICE, "--quota", "alice tokens=60") as router:
        assert ask(router, HELLO, "a").status_code == 200  # 101 tokens
        settled = http_client.post(
            f"{router.url}/v1/responses", json={"model": "m"}, headers={"authorization": "Bearer a"}
        )
        assert settled.status_code == 429
        while refusing(router) < 2:
            assert ask(router, HELLO, "a").status_code == 429
