"""A request whose own connection is dead: its replica lives, and answers health checks and other requests. It is answered by
another replica soon after the stall timeout, and not at the end of its time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import http_client
import httpx
import pytest
from router_parts import Loop, RouterThread
from shared_server import SharedServer, until

from foreword.router import proxied_request, response_proxy, silence
from foreword.router import router as router_module

SCRIPT = Path(__file__).with_name("mortal_replica.py")
WAYS = [
    *((how, streams) for how in ("new", "request", "answer") for streams in (False, True)),
    ("rest", True),  # a whole answer comes at once
]
POSTS = (b"POST /v1/completions", b"POST /v1/chat/completions")


class SwallowingRelay:
    """A TCP relay that keeps its connections open, and swallows some of what passes. How is one of

    new      all of connections that are accepted from now on
    request  requests for completions, and what comes after them on the same connection
    answer   the answers to these
    rest     all of these from their first event on
    """

    def __init__(self, loop: Loop, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self.how = ""
        self.swallowed = 0
        self.passed = 0
        self.port = loop.call(self._open)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.how == "new":
            self.swallowed += 1
            await reader.read(-1)
            writer.close()
            return
        there, away = await asyncio.open_connection(*self._target)
        dead = asyncio.Event()
        down = asyncio.ensure_future(self._down(there, writer, dead))
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if data.startswith(POSTS):
                    self.passed += 1
                    if self.how:
                        self.swallowed += 1
                        dead.set()
                if not (dead.is_set() and self.how in ("request", "")):
                    away.write(data)
        down.cancel()
        away.close()
        writer.close()

    async def _down(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, dead: asyncio.Event) -> None:
        with suppress(ConnectionError):
            while data := await there.read(1 << 16):
                if not dead.is_set():
                    writer.write(data)
                elif self.how == "rest":  # up to the first event, however many came with it
                    head, event, _ = data.partition(b"data:")
                    writer.write(head + event)
                    if event:
                        return


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@contextmanager
def vllm_like() -> Iterator[str]:
    command = [sys.executable, str(SCRIPT), "vllm"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@contextmanager
def routed(*urls: str, stall: str = "1") -> Iterator[RouterThread]:
    named = [part for url in urls for part in ("--replica", url)]
    flags = ("--policy", "round-robin", "--stall-timeout", stall, "router.health_timeout=2", "--warm-seconds", "0")
    router = RouterThread(*named, *flags)
    try:
        yield router.wait_for(len(urls))
    finally:
        router.kill()


def post(router: RouterThread, number: int, *, streams: bool) -> httpx.Response:
    body = {"prompt": f"count {number}", "max_tokens": 4, "temperature": 0, "stream": streams}
    return http_client.post(f"{router.url}/v1/completions", json=body)


def complete(answer: httpx.Response) -> bool:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.text.rstrip().endswith("[DONE]") and '"error"' not in answer.text
    return answer.status_code == 200 and bool(answer.json()["choices"])


def check(relay: SwallowingRelay, router: RouterThread, how: str, streams: bool) -> None:
    """Requests are served while the relay swallows some."""
    numbers = iter(range(1000))
    until(lambda: complete(post(router, next(numbers), streams=streams)) and relay.passed > 0)
    relay.how = how
    with ThreadPoolExecutor(4) as pool:  # more than there are connections already
        answers = list(pool.map(lambda number: post(router, number, streams=streams), range(1000, 1004)))
    assert all(map(complete, answers)), [one.text for one in answers]
    assert relay.swallowed > 0
    assert "sent nothing for" in router.text or "answers neither requests nor" in router.text
    assert router.metric("foreword:router_retries_total") > 0


@pytest.mark.parametrize(("how", "streams"), WAYS)
def test_servers_of_foreword(loop: Loop, server: SharedServer, how: str, streams: bool) -> None:
    """A server that does not list the request (any more) has lost it, or its answer."""
    relay = SwallowingRelay(loop, server.url)
    with routed(relay.url, server.url) as router:
        check(relay, router, how, streams)


@pytest.mark.parametrize(("how", "streams"), WAYS)
def test_servers_of_vllm(loop: Loop, how: str, streams: bool) -> None:
    """A vLLM server that has not begun a stream, or that has fewer requests than it is silent on, has lost some."""
    with vllm_like() as url, vllm_like() as other:
        relay = SwallowingRelay(loop, url)
        with routed(relay.url, other) as router:
            check(relay, router, how, streams)


@pytest.mark.parametrize("streams", [False, True])
def test_a_long_prompt_is_not_lost(loop: Loop, streams: bool) -> None:
    """A request that its replica has, and has begun to answer if it is a stream, is awaited, however long that takes."""
    with vllm_like() as url, routed(url) as router, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "SLOW", "max_tokens": 4, "stream": streams}
        answer = pool.submit(http_client.post, f"{router.url}/v1/completions", json=body)
        until(lambda: http_client.get(f"{url}/running").json() == 1)
        asked = http_client.get(f"{url}/asked").json()
        until(lambda: http_client.get(f"{url}/asked").json() >= asked + 4)
        http_client.post(f"{url}/release")
        assert complete(answer.result())
        assert router.metric("foreword:router_retries_total") == 0


class _Ahead:
    """The router's clock, which a test puts forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.seconds


@pytest.mark.parametrize(("how", "streams"), [("request", False), ("request", True), ("answer", False)])
def test_it_is_decided_at_the_limit(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, server: SharedServer, how: str, streams: bool
) -> None:
    """A replica is asked before the default of 60 s is over, so that the request goes to another one with the first look behind
    them: without a further question, and never before."""
    ahead, asked = _Ahead(), list[float]()
    for module in (proxied_request, response_proxy, router_module, silence):
        monkeypatch.setattr(module, "clock", ahead)

    async def counted(*arguments: Any) -> str:
        reason = await silence.why_lost(*arguments)
        asked.append(ahead.seconds)
        return reason

    monkeypatch.setattr(router_module, "why_lost", counted)
    relay = SwallowingRelay(loop, server.url)
    with routed(relay.url, server.url, stall="60") as router, ThreadPoolExecutor(2) as pool:
        numbers = iter(range(1000))
        until(lambda: complete(post(router, next(numbers), streams=streams)) and relay.passed > 0)
        relay.how = how
        # One of them over the relay.
        answers = [pool.submit(post, router, number, streams=streams) for number in (1000, 1001)]
        until(lambda: relay.swallowed == 1 and sum(one.done() for one in answers) == 1)
        assert not asked
        ahead.seconds = 55.0
        until(lambda: len(asked) >= 1)
        assert sum(one.done() for one in answers) == 1 and router.metric("foreword:router_retries_total") == 0
        ahead.seconds = 60.0
        assert all(complete(one.result()) for one in answers)
        assert 60.0 not in asked
        assert router.metric("foreword:router_retries_total") == 1
