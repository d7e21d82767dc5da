"""Several processes of a router on one port: what they share, and what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterProcess
from scripted_replica import ScriptedReplica
from shared_server import until
from test_router_deaths import Mortals

from foreword.api.stored_responses import StoredResponses
from foreword.errors import NotFound
from foreword.process_config import RouterConfig
from foreword.router.replicas import clock
from foreword.router.suspicious import Ask, AskDigests
from foreword.router_extras.router_prefixes import NewPrefix, PrefixRegistry
from foreword.router_extras.workers.bus import Told, WorkerBus
from foreword.router_extras.workers.shared_quotas import SharedMemory
from foreword.router_extras.workers.supervisor import Seat
from foreword.router_extras.workers.worker_router import SharedPool, SharedSuspects, SharedWorkers
from foreword.routing.known_prompts import KnownPrefix, PromptChain

CHAT = "/v1/chat/completions"
ADMIN = "the key of the operator"


class RememberingReplica(ScriptedReplica):
    """Reports the messages that it has had before as cached, 100 tokens each."""

    def __init__(self, loop: Loop) -> None:
        self.known: set[str] = set()
        self.requests = 0
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        return [web.post(CHAT, self._chat)]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests += 1
        prefixes = [json.dumps(body["messages"][: n + 1]) for n in range(len(body["messages"]))]
        cached = 100 * sum(one in self.known for one in prefixes)
        self.known |= set(prefixes)
        usage = {
            "prompt_tokens": 100 * len(prefixes),
            "completion_tokens": 1,
            "total_tokens": 100 * len(prefixes) + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        answer = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return web.json_response({**head, "choices": [answer], "usage": usage})


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def routed(replicas: Sequence[RememberingReplica], *flags: str, workers: int = 2) -> Iterator[RouterProcess]:
    named = [part for one in replicas for part in ("--replica", one.url)]
    router = RouterProcess(*named, "--workers", str(workers), *flags).wait_for(len(replicas) * workers)
    try:
        if workers > 1:
            until(lambda: router.metric("foreword:router_workers", state="answering") == workers)
        yield router
    finally:
        router.kill()


def ask(router: RouterProcess, messages: list[Any], key: str = "none") -> httpx.Response:
    """Asks on a connection of its own, which any worker may take."""
    body = {"model": "m", "messages": messages, "max_tokens": 1}
    with httpx.Client(timeout=60) as client:
        return client.post(router.url + CHAT, json=body, headers={"authorization": f"Bearer {key}"})


def settle(router: RouterProcess) -> None:
    """Let workers hear all that the others have told: the one that is asked for a response that it lacks asks them first."""
    body = {"model": "m", "input": "and now?", "previous_response_id": "resp_none"}
    with httpx.Client(timeout=60) as client:
        assert client.post(f"{router.url}/v1/responses", json=body).status_code == 404


def conversations(router: RouterProcess) -> list[int]:
    """The cached tokens of each turn of a trace of conversations. A turn begins when all workers know that the one before
    it has ended, and its replica is free."""
    spoken: list[list[Any]] = [[{"role": "user", "content": f"conversation {n} " + "word " * 300}] for n in range(6)]
    found: list[int] = []
    for turn in range(4):
        for said in spoken:
            settle(router)
            usage = ask(router, said).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
            said += [
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": f"turn {turn} " + "more " * 300},
            ]
    return found


def served_by(router: RouterProcess) -> Counter[str]:
    """Requests by the worker that the log names."""
    return Counter(re.findall(rf"(worker \d): POST {CHAT} 200", router.text))


def ask_both(router: RouterProcess, *, spared: RememberingReplica) -> None:
    """Ask until both of two workers have answered, which the system chooses, and at least twelve questions. None goes to a
    replica that is to be spared."""
    before = spared.requests
    for number in itertools.count():
        assert ask(router, [{"role": "user", "content": f"question {number}"}]).status_code == 200
        if number >= 11 and len(served_by(router)) == 2:
            break
        assert number < 1000, "one worker has answered all"
    assert spared.requests == before


def test_the_same_hits_as_one(loop: Loop) -> None:
    """A trace of conversations, each request over a connection of its own, has the same hits behind two workers as behind one:
    each knows where the other has placed a conversation. Both serve."""
    found = {}
    for workers in (1, 2):
        replicas = [RememberingReplica(loop) for _ in range(3)]
        with routed(replicas, workers=workers) as router:
            found[workers] = conversations(router)
            served = len(found[workers])
            until(lambda: router.metric("foreword:router_requests_total", dialect="chat", outcome="ok") == served)  # noqa: B023
            if workers == 2:
                until(
                    lambda: (
                        ask(router, [{"role": "user", "content": "more"}]).is_success and len(served_by(router)) == 2
                    )
                )
    assert found[2] == found[1] == [100 * max(2 * turn - 1, 0) for turn in range(4) for _ in range(6)]


def test_quotas_are_those_of_all(loop: Loop) -> None:
    """A tenant has its quota once, whichever workers its requests come to, also after one was killed and another was started,
    which the metrics count. Requests are served meanwhile."""
    flags = ("--api-keys", "alice=a", "--api-keys", "bob=b", "--quota", "alice requests=20", "--admin-key", ADMIN)
    with routed([RememberingReplica(loop)], *flags, "--replica-key", "r") as router:
        hello = [{"role": "user", "content": "hello"}]
        first = [ask(router, hello, "a").status_code for _ in range(10)]
        pid = router.popen.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGKILL)
        until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        until(lambda: ask(router, hello, "b").status_code == 200)
        second = [ask(router, hello, "a").status_code for _ in range(15)]
        assert first == [200] * 10
        # The bucket fills by one in three seconds.
        assert 10 <= second.count(200) <= 10 + 3 and second[0] == 200 and second[-1] == 429


def test_an_operators_change_reaches_all(loop: Loop) -> None:
    """A replica that is drained, removed or added through one worker is so for all of them."""
    one, two = RememberingReplica(loop), RememberingReplica(loop)
    with routed([one], "--admin-key", ADMIN) as router:
        headers = {"authorization": f"Bearer {ADMIN}"}

        def change(method: str, path: str, url: str) -> None:
            with httpx.Client(timeout=60) as client:
                answer = client.request(method, router.url + path, json={"replica": url}, headers=headers)
            assert answer.status_code in (200, 201), answer.text

        change("POST", "/v1/router/replicas", two.url)
        until(lambda: router.text.count(f"replica {two.url} serves") == 2)
        change("POST", "/v1/router/drain", one.url)
        ask_both(router, spared=one)
        change("DELETE", "/v1/router/replicas", one.url)
        until(lambda: router.text.count(f"replica {one.url} removed") == 2)


def children(router: RouterProcess) -> list[int]:
    """The workers' processes."""
    pid = router.popen.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class GatedReplica(RememberingReplica):
    """Holds requests that say so until `gate` is opened."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.gate = loop, loop.call(asyncio.Event)
        self.held = 0
        super().__init__(loop)

    def open(self) -> None:
        self.loop.call(self.gate.set)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if b"HOLD" in await request.read():
            self.held += 1
            await self.gate.wait()
        return await super()._chat(request)


@contextmanager
def held_requests(router: RouterProcess, replica: GatedReplica) -> Iterator[list[Future[httpx.Response]]]:
    """Requests that run at the replica, four and more, until each worker has one."""
    with ThreadPoolExecutor(64) as pool:
        try:
            running: list[Future[httpx.Response]] = []
            while len(running) < 4 or len(set(re.findall(r"(worker \d): held", held_by(router)))) < len(
                children(router)
            ):
                assert len(running) < 60
                running.append(pool.submit(ask, router, [{"role": "user", "content": "HOLD"}]))
                until(lambda: replica.held == len(running))
            yield running
        finally:
            replica.open()


def held_by(router: RouterProcess) -> str:
    """Workers that have a request at a replica: those with more connections to clients than they listen with."""
    found = []
    for number, child in enumerate(children(router)):
        links = [os.readlink(one) for one in Path(f"/proc/{child}/fd").iterdir() if one.is_symlink()]
        sockets = {one[8:-1] for one in links if one.startswith("socket:[")}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = f":{int(router.url.rsplit(':', 1)[1]):04X}"
        if any(row[1].endswith(port) and row[3] == "01" and row[9] in sockets for row in rows):
            found.append(f"worker {number}: held")
    return "\n".join(found)


def statuses(running: list[Future[httpx.Response]]) -> set[object]:
    return {one.exception(60) or one.result().status_code for one in running}


@pytest.mark.parametrize("whom", ["supervisor", "group"])
def test_a_signal_drains_all(loop: Loop, whom: str) -> None:
    """A signal to the first process, or as of a terminal to all processes at once, ends all workers, each after its requests,
    and the exit status is 0."""
    replica = GatedReplica(loop)
    with routed([replica]) as router, held_requests(router, replica) as running:
        workers = children(router)
        for process in (*(workers if whom == "group" else ()), router.popen.pid):
            os.kill(process, signal.SIGTERM)
        # The workers that were signalled first have the supervisor's signal, too, before requests end.
        until(lambda: router.text.count("shutting down") == 2)
        replica.open()
        assert statuses(running) == {200}
        assert router.end() == 0 and router.text.count("stopped") == 2


def test_a_second_signal_ends_all_at_once(loop: Loop) -> None:
    """Requests that run are not waited for, and the status names the signal."""
    replica = GatedReplica(loop)
    with routed([replica]) as router, held_requests(router, replica) as running:
        os.kill(router.popen.pid, signal.SIGTERM)
        until(lambda: router.text.count("shutting down") == 2)
        os.kill(router.popen.pid, signal.SIGINT)
        assert router.end() == 128 + signal.SIGINT
        assert all(isinstance(one.exception(60), httpx.HTTPError) for one in running)


def test_workers_end_with_their_supervisor(loop: Loop) -> None:
    """When the supervisor is killed, each worker ends after its requests, and the folder of their sockets is removed."""
    replica = GatedReplica(loop)
    with routed([replica]) as router, held_requests(router, replica) as running:
        workers = children(router)
        folders = {path_of(process) for process in workers}
        os.kill(router.popen.pid, signal.SIGKILL)
        until(lambda: router.text.count("shutting down") == 2)
        replica.open()
        assert statuses(running) == {200}
        until(lambda: router.text.count("stopped") == 2)
        assert not [one for one in folders if one.exists()]


def path_of(process: int) -> Path:
    """The folder of a worker's sockets."""
    owned = {os.readlink(one)[8:-1] for one in Path(f"/proc/{process}/fd").iterdir() if one.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return next(
        Path(row[7]).parent for row in rows if len(row) > 7 and row[6] in owned and "foreword-workers-" in row[7]
    )


def test_a_worker_that_ends_alone_leaves_the_port_to_the_others(loop: Loop) -> None:
    """While one worker waits for its requests, new ones are answered by the others: none with 503. A connection between two
    requests is closed, so that its client connects anew. Two signals to it are as one."""
    replica = GatedReplica(loop)

    def ask_twice() -> set[int]:
        with router.http() as client:
            said = [
                {"model": "m", "messages": [{"role": "user", "content": one}], "max_tokens": 1}
                for one in ("HOLD", "next")
            ]
            return {client.post(CHAT, json=one).status_code for one in said}

    with routed([replica]) as router, held_requests(router, replica) as running, ThreadPoolExecutor(8) as pool:
        before = replica.held
        kept = [pool.submit(ask_twice) for _ in range(8)]
        until(lambda: replica.held == before + 8)
        ending = children(router)[0]
        os.kill(ending, signal.SIGTERM)
        os.kill(ending, signal.SIGTERM)
        found = Counter(ask(router, [{"role": "user", "content": f"question {n}"}]).status_code for n in range(20))
        until(lambda: "shutting down" in router.text)
        found += Counter(ask(router, [{"role": "user", "content": f"question {n}"}]).status_code for n in range(20))
        assert found == {200: 40} and ending in children(router)
        replica.open()
        assert statuses(running) == {200}
        assert [one.result(60) for one in kept] == [{200}] * 8
        until(lambda: router.metric("foreword:router_worker_restarts_total", reason="status") == 1)


def test_settings_that_cannot_work_end_the_router(loop: Loop) -> None:
    """A fault that a worker finds before it serves is one line and status 2, as of one process: it is not tried again."""
    flags = ("--usage-ledger", "/nonexistent/folder/ledger")
    router = RouterProcess("--replica", "http://127.0.0.1:9", "--workers", "3", *flags)
    try:
        assert router.end(60) == 2
        assert "another one is started" not in router.text
        assert "/nonexistent/folder" in router.text.splitlines()[-1] or "/nonexistent/folder" in router.text
    finally:
        router.kill()


def test_a_worker_that_hangs_is_replaced() -> None:
    """A worker that has said that it runs, and then says nothing, is killed, and another one is started; one that waits before
    it says so is left alone."""
    script = """
import os, signal, sys, time
from foreword.router_extras.workers.supervisor import Supervisor
def serve(seat):
    memory = seat.memory
    if seat.number or sum(memory.restarts().values()):
        os.kill(os.getppid(), signal.SIGTERM) if not seat.number else signal.pause()
        return 0
    memory.beat()
    signal.pause()
sys.exit(Supervisor(2, serve, hung_seconds=1.0).run())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr.count("worker 0 hangs") == 1 and "worker 1" not in done.stderr


def test_a_fork_that_fails_is_tried_again() -> None:
    """The supervisor lives on, with the other workers, and forks again later."""
    script = """
import os, signal, sys
from foreword.router_extras.workers.supervisor import Supervisor
real, failures = os.fork, [1]
def fork():
    if failures:
        failures.pop()
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()
os.fork = fork
def serve(seat):
    if seat.number:
        signal.pause()
    os.kill(os.getppid(), signal.SIGTERM)
    return 0
sys.exit(Supervisor(2, serve).run())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "worker 0 could not be started" in done.stderr, done.stderr


@pytest.mark.parametrize("flags", [("--picker", "127.0.0.1:0"), ("--prefix-file", "/tmp/prefixes.json")])
def test_what_only_one_process_can_have_is_refused(loop: Loop, flags: tuple[str, ...]) -> None:
    """The start is refused, with the setting and what to do."""
    router = RouterProcess("--replica", "http://127.0.0.1:9", "--workers", "2", *flags)
    until(router.ended)
    assert f"{flags[0]} works in one process only: leave out --workers, or {flags[0]}" in " ".join(router.text.split())


def test_responses_and_names_are_known_to_all(loop: Loop) -> None:
    """A response that one worker has stored is continued at any, and a named prefix that one has registered stands before the
    prompts at any; once it is removed, at none. An erasure removes both everywhere."""
    keys = ("--api-keys", "alice=a", "--replica-key", "r")
    with routed([RememberingReplica(loop)], *keys) as router:

        def call(method: str, path: str, body: Any = None) -> httpx.Response:
            with httpx.Client(timeout=60) as client:
                return client.request(method, router.url + path, json=body, headers={"authorization": "Bearer a"})

        def named(name: str) -> set[int]:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prefix": name}
            return {call("POST", CHAT, body).status_code for _ in range(12)}

        said = {"model": "m", "input": "hello"}
        first = call("POST", "/v1/responses", said).json()["id"]
        again = [call("POST", "/v1/responses", {**said, "previous_response_id": first}) for _ in range(12)]
        assert {one.status_code for one in again} == {200}
        prefix = {"name": "law", "messages": [{"role": "system", "content": "You know the law."}]}
        assert call("POST", "/v1/prefixes", prefix).status_code == 201
        assert named("law") == {200}
        assert call("DELETE", "/v1/prefixes/law").status_code == 200
        assert named("law") == {404}
        assert call("POST", "/v1/prefixes", prefix).status_code == 201
        call("DELETE", "/v1/cache")
        assert named("law") == {404}
        gone = [call("GET", f"/v1/responses/{first}") for _ in range(12)]
        assert {one.status_code for one in gone} == {404}


def test_lost_messages_are_noticed(tmp_path: Path) -> None:
    """A worker that read another one's messages so late that they were given up is told so when the connection begins anew: its
    state is incomplete. The first connection of each is none of that."""

    async def run() -> list[int]:
        missed: list[int] = []
        heard = 0

        def told(worker: int, message: object) -> None:
            nonlocal heard
            heard += isinstance(message, Told)

        async def asked(kind: str, content: Any) -> None: ...

        buses = []
        for number in range(2):
            seat = Seat(number, 2, tmp_path, SharedMemory(), -1)
            buses.append(WorkerBus(seat, told, asked, lambda: [Told("known", None)], lambda _: None, missed.append))
            await buses[-1].start()
        while heard < 2:
            await asyncio.sleep(0)
        assert not missed
        large = bytes(40 << 20)
        for _ in range(3):
            buses[0].tell(Told("news", large))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while not missed:
                await asyncio.sleep(0.01)
        for bus in buses:
            await bus.stop()
        return missed

    assert asyncio.run(run()) == [0]


def test_requests_that_replicas_die_of_are_known_to_all(loop: Loop) -> None:
    """A request at which two replicas have died is refused by every worker, with the same error, and no third replica dies."""
    mortals = Mortals(4, "vllm")
    try:
        named = [part for url in mortals.urls for part in ("--replica", url)]
        router = RouterProcess(*named, "--workers", "2").wait_for(8)
        try:
            until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
            poison = [{"role": "user", "content": "RESET"}]
            answers = [ask(router, poison) for _ in range(12)]
            assert mortals.dead() == 2
            until(lambda: len(refused_by(router)) == 2)
            assert {one.json()["error"]["code"] for one in answers} == {"suspicious_request"}
        finally:
            router.kill()
    finally:
        mortals.kill()


def test_equal_requests_at_several_workers_are_at_two_replicas(loop: Loop) -> None:
    """Until one answer is complete, requests that ask the same go to two replicas in all, whichever workers have them, also for
    a worker that was started meanwhile. Any may be the one that ends its server."""
    replicas = [GatedReplica(loop) for _ in range(6)]
    with routed(replicas, workers=3) as router, ThreadPoolExecutor(40) as pool:
        same = [{"role": "user", "content": "HOLD"}]

        def more(count: int) -> list[Future[httpx.Response]]:
            before = sum(one.held for one in replicas)
            started = [pool.submit(ask, router, same) for _ in range(count)]
            until(lambda: sum(one.held for one in replicas) == before + count)
            return started

        try:
            running = more(1)
            (holder,) = re.findall(r"worker (\d)", held_by(router))
            os.kill(children(router)[(int(holder) + 1) % 3], signal.SIGKILL)
            until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
            until(lambda: router.metric("foreword:router_workers", state="answering") == 3)
            # One after the other: what two workers place at the same moment they cannot know of each other.
            running += [one for _ in range(12) for one in more(1)] + more(20)
            assert sum(bool(one.held) for one in replicas) <= 2
        finally:
            for one in replicas:
                one.open()
        assert statuses(running) == {200}
        until(lambda: statuses(more(20)) == {200} and len(served_by(router)) == 3)  # the system chooses who serves


class Linked:
    """Workers without processes: what one tells, the others have heard."""

    def __init__(self, number: int, all_of: list[Linked]) -> None:
        self.number, self._all = number, all_of
        self.on_gone: Callable[[int], object] = lambda number: None
        self._handlers: dict[str, Callable[[Any], object]] = {}
        all_of.append(self)

    def on(self, kind: str, handler: Callable[[Any], object], known: Callable[[], Any] = tuple) -> None:
        self._handlers[kind] = handler

    def hear(self, names: Any) -> None:
        """Nothing waits here."""

    def tell(self, kind: str, content: Any, **how: Any) -> None:
        for one in self._all:
            if one is not self:
                one._handlers[kind](content)


def test_attempts_that_end_free_the_others() -> None:
    """An attempt at one worker counts at the others until it ends, or its worker does. A digest that a worker has served counts
    there no more, and still at the others."""

    async def run() -> None:
        linked: list[Linked] = []
        first, second = (SharedSuspects(lambda: None, cast(Any, Linked(number, linked))) for number in range(2))
        here, there = (Ask(one, AskDigests(b"digest", b"start"), "a request") for one in (first, second))
        flights = here.sent("a"), here.sent("b")
        assert (there.spare, there.allowed()) == (0, frozenset(("a", "b")))
        flights[0].left()
        assert (there.spare, there.allowed()) == (1, None)
        linked[1].on_gone(0)
        assert there.spare == 2
        flights[1].left()
        there.sent("c").served()
        assert (there.spare, here.spare) == (2, 1)

    asyncio.run(run())


def test_prompts_that_no_table_has_are_known_to_all(tmp_path: Path) -> None:
    """A prompt that one worker has placed by its blocks is found by its bytes at the others, once no event names these blocks:
    its tokens are wrong, although as many, or the events are late. Until then the table of blocks is believed."""
    known = PromptChain(b"t", (b"1" * 16, b"2" * 16), (400, 800))

    async def run() -> None:
        routers = [SimpleNamespace(pools={}, suspects=None, config=RouterConfig()) for _ in range(2)]
        seats = [Seat(number, 2, tmp_path, SharedMemory(), -1) for number in range(2)]
        workers = [SharedWorkers(cast(Any, one), seat, lambda: None) for one, seat in zip(routers, seats, strict=True)]
        pools = [SharedPool(one, "m", RouterConfig(), {}) for one in workers]
        for router, pool, worker in zip(routers, pools, workers, strict=True):
            router.pools["m"] = pool
            await worker.bus.start()

        def found() -> KnownPrefix | None:
            return pools[1].known.find(known, clock())

        async with asyncio.timeout(60):
            while not all(worker.bus.connected for worker in workers):
                await asyncio.sleep(0.01)
            pools[0].known.placed(known, 200, "r", clock(), by_keys=True)
            assert not pools[0].known.computed(known, 200, named=True)
            while found() is None:
                await asyncio.sleep(0.01)
            await workers[0].settle()
            assert found().held == {}  # type: ignore[union-attr]
            assert pools[0].known.computed(known, 210, named=False)
            while not found().held:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        assert found().held == {"r": 210}  # type: ignore[union-attr]
        for worker in workers:
            await worker.bus.stop()

    asyncio.run(run())


def refused_by(router: RouterProcess) -> set[str]:
    """Workers that have refused a request, as the log names them."""
    return set(re.findall(r"(worker \d): request \S+ is refused", router.text))


def test_a_new_worker_knows_an_operators_changes(loop: Loop) -> None:
    """A worker that is started after a replica was drained sends no requests there."""
    one, two = RememberingReplica(loop), RememberingReplica(loop)
    with routed([one, two], "--admin-key", ADMIN) as router:
        with httpx.Client(timeout=60) as client:
            headers = {"authorization": f"Bearer {ADMIN}"}
            client.post(router.url + "/v1/router/drain", json={"replica": one.url}, headers=headers).raise_for_status()
        pid = router.popen.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1]:
            os.kill(int(child), signal.SIGKILL)
        until(lambda: router.text.count(f"replica {two.url} serves") == 3)
        until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
        ask_both(router, spared=one)


class Workers:
    """Buses of several workers in one process, with what each handles."""

    def __init__(self, folder: Path, count: int, answer_seconds: float = 60.0) -> None:
        self.names = [PrefixRegistry() for _ in range(count)]
        self.responses = [StoredResponses(1 << 20) for _ in range(count)]
        self.questions: Counter[str] = Counter()
        self.stuck = asyncio.Event()
        self.buses = [self._bus(Seat(n, count, folder, SharedMemory(), -1), answer_seconds) for n in range(count)]

    def _bus(self, seat: Seat, answer_seconds: float) -> WorkerBus:
        names, responses = self.names[seat.number], self.responses[seat.number]

        def forget(at: float) -> None:
            names.forget("alice", at)
            responses.forget(b"salt", at)

        handlers: dict[str, Callable[[Any], object]] = {
            "prefix": lambda told: names.learn(*told),
            "prefix removed": lambda told: names.unlearn(*told),
            "response": lambda told: responses.keep(*told),
            "forget": forget,
        }

        def told(worker: int, message: Any) -> None:
            handlers[message.kind](message.content)

        async def asked(kind: str, content: Any) -> Any:
            self.questions[kind] += 1
            if kind == "stuck":
                await self.stuck.wait()
            elif kind != "settle":
                handlers[kind](content)

        return WorkerBus(seat, told, asked, list, lambda _: None, lambda _: None, answer_seconds)

    async def __aenter__(self) -> Workers:
        for bus in self.buses:
            await bus.start()
        while any(len(bus.connected) < len(self.buses) - 1 for bus in self.buses):
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.stuck.set()
        for bus in self.buses:
            await bus.stop()


def test_an_erasure_is_not_undone_by_what_is_on_its_way(tmp_path: Path) -> None:
    """A response and a name that a worker told before an erasure, and that arrive after it, are not kept; what a request after
    the erasure stores is, also where the erasure is heard late."""

    async def run() -> None:
        async with Workers(tmp_path, 3) as all_of:
            first, second, third = all_of.buses
            all_of.responses[0].added = lambda *kept: first.tell(Told("response", kept))
            before = time.monotonic()
            prefix = all_of.names[0].make("alice", NewPrefix("law", content="secret"))
            all_of.names[0].put("alice", prefix)
            at = time.monotonic()
            all_of.names[1].forget("alice", at)
            all_of.responses[1].forget(b"salt", at)
            await second.ask("forget", at)
            # These are read behind the erasure.
            first.tell(Told("prefix", ("alice", "law", 1, "secret", prefix.created, prefix.made)))
            all_of.responses[0].added(b"salt", "old", b"secret", before)
            all_of.responses[0].add(b"salt", "new", [], b"{}", time.monotonic())
            for bus in (second, third):
                await bus.ask("settle")
            await third.ask("forget", at)
            for names, responses in zip(all_of.names, all_of.responses, strict=True):
                assert not names.all()
                with pytest.raises(NotFound):
                    responses.get(b"salt", "old")
                assert responses.get(b"salt", "new").body == b"{}"

    asyncio.run(run())


def test_a_name_registered_at_two_workers_is_the_same_at_all(tmp_path: Path) -> None:
    """Two workers each get the other's registration after their own: all keep the later one."""

    async def run() -> list[Any]:
        async with Workers(tmp_path, 3) as all_of:

            async def add(number: int, text: str) -> None:
                names = all_of.names[number]
                prefix = names.make("alice", NewPrefix("law", content=text, replace=True))
                names.put("alice", prefix)
                told = "alice", prefix.name, prefix.version, prefix.content, prefix.created, prefix.made
                await all_of.buses[number].ask("prefix", told)

            await asyncio.gather(add(0, "of the first"), add(1, "of the second"))
            return [names.get("alice", "law").content for names in all_of.names]

    assert asyncio.run(run()) == ["of the second"] * 3


def test_a_removal_and_a_new_version_that_cross(tmp_path: Path) -> None:
    """A name that one worker removes while another one registers a new version of it is the same at all afterwards: the new
    version, which the first did not know. A removal of the version that all know is one."""

    async def run() -> None:
        async with Workers(tmp_path, 3) as all_of:

            async def add(number: int, text: str) -> None:
                names = all_of.names[number]
                prefix = names.make("alice", NewPrefix("law", content=text, replace=True))
                names.put("alice", prefix)
                told = "alice", prefix.name, prefix.version, prefix.content, prefix.created, prefix.made
                await all_of.buses[number].ask("prefix", told)

            async def remove(number: int) -> None:
                removed = all_of.names[number].remove("alice", "law")
                await all_of.buses[number].ask("prefix removed", ("alice", "law", removed.version))

            await add(0, "first")
            await asyncio.gather(remove(0), add(1, "second"))
            assert [names.get("alice", "law").content for names in all_of.names] == ["second"] * 3
            await remove(2)
            assert not any(names.all() for names in all_of.names)

    asyncio.run(run())


def test_who_has_not_answered_is_known(tmp_path: Path) -> None:
    """A worker that is late, that is not connected, or whose handler raised is named with the answers of the others; a handler
    that raised is answered at once, and later questions and messages are handled."""

    async def run() -> None:
        async with Workers(tmp_path, 3) as all_of:
            first = all_of.buses[0]
            assert (await first.ask("settle")).silent == []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(first, "_answer_seconds", 0.2)
                assert (await first.ask("stuck")).silent == [1, 2]
            failed = await first.ask("no such kind")
            assert list(failed) == [] and failed.silent == [1, 2]
            first.tell(Told("no such kind", None))
            assert (await first.ask("settle")).silent == [] and [one.failures for one in all_of.buses] == [0, 2, 2]

            async def asked(kind: str, content: Any) -> None: ...

            seat = Seat(0, 2, tmp_path, SharedMemory(), -1)
            alone = WorkerBus(seat, lambda *_: None, asked, list, lambda _: None, lambda _: None)
            assert (await alone.ask("settle")).silent == [1]

    asyncio.run(run())


def test_to_settle_takes_one_question_to_each(tmp_path: Path) -> None:
    """Messages of the others from before their answers have arrived, without questions among them."""

    async def run() -> None:
        async with Workers(tmp_path, 4) as all_of:
            for number, bus in enumerate(all_of.buses[1:]):
                bus.tell(Told("response", (b"salt", f"r{number}", b"data", 1.0)), urgent=False)
            await all_of.buses[0].ask("settle")
            assert all_of.responses[0].used and len({key for _, key in all_of.responses[0]._kept}) == 3
            assert all_of.questions == {"settle": 3}

    asyncio.run(run())


def test_a_new_worker_counts_requests_that_run(loop: Loop) -> None:
    """The limit of requests in flight at a replica is that of all workers, also for one that was started while they ran."""
    replica = GatedReplica(loop)
    with routed([replica], "--max-in-flight", "1") as router, ThreadPoolExecutor(32) as pool:
        try:
            running = [pool.submit(ask, router, [{"role": "user", "content": "HOLD"}])]
            until(lambda: replica.held == 1)
            (holder,) = re.findall(r"worker (\d)", held_by(router))
            os.kill(children(router)[1 - int(holder)], signal.SIGKILL)
            until(lambda: router.metric("foreword:router_worker_restarts_total", reason="signal") == 1)
            until(lambda: router.metric("foreword:router_workers", state="answering") == 2)
            more = [pool.submit(ask, router, [{"role": "user", "content": "HOLD"}]) for _ in range(12)]
            until(lambda: router.metric("foreword:router_queue_length") == 12)
            assert replica.held == 1
        finally:
            replica.open()
        assert statuses(running + more) == {200}
