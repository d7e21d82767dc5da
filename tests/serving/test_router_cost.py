"""Work that the router does for each streamed request, as counts: times differ from machine to machine."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, ClassVar, cast

import aiohttp
import httpx
import pytest
from router_parts import Loop, RouterThread

import foreword
from foreword.configuration import Config
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replica_pool import ReplicaPool
from foreword.router.router import Router
from foreword.router.suspicious import Ask, AskDigests

_REQUESTS = 20
# Functions of these packages are counted; others, such as those that log, differ between a test and a process.
_COUNTED = tuple(str(Path(package.__file__).parent) for package in (aiohttp, foreword) if package.__file__)
_EVENT = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":%b}]}\n\n'
_EVENTS = [*[_EVENT % b"null"] * 15, _EVENT % b'"length"', b"data: [DONE]\n\n"]
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"somebody","max_model_len":8192}]}'


class Prompt(asyncio.Protocol):
    """Sends a stream of 16 events at once, each in a chunk of its own as servers write them. `received`: in one piece each."""

    received: ClassVar[list[bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._data = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if found and len(rest) >= (int(length[1]) if length else 0):
            self._data = b""
            self._transport.write(self._answer(head.split()[1]))

    def _answer(self, path: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
        if path == b"/v1/completions":
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in _EVENTS)
            return head % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
        found = b"{}" if path == b"/health" else _MODELS
        return head % b"application/json" + b"content-length: %d\r\n\r\n%b" % (len(found), found)


def started(loop: Loop) -> str:
    """The URL of a new server."""

    async def start() -> str:
        server = await asyncio.get_running_loop().create_server(Prompt, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    url: str = loop.call(start)
    return url


class CountingRouter(RouterThread):
    """Counts the tasks that are started on its event loop, or the calls of Python functions there."""

    tasks = calls = 0

    def count(self) -> None:
        """Count from now on."""
        self._loop.call_soon_threadsafe(self._loop.set_task_factory, self._start)

    def count_calls(self, on: bool) -> None:
        """Begin or end to count calls; what counts them slows the router down."""
        self._loop.call_soon_threadsafe(sys.setprofile, self._called if on else None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(_COUNTED)

    def _start(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        self.tasks += 1
        return asyncio.Task(work, loop=loop, **more)


@pytest.fixture
def router() -> Iterator[CountingRouter]:
    """A router in front of two plain servers."""
    loop = Loop()
    router = CountingRouter(*(word for _ in range(2) for word in ("--replica", started(loop))))
    try:
        yield router.wait_for(2)
    finally:
        router.kill()


def ask(router: RouterThread, count: int, answered: Callable[[], object] = lambda: None) -> None:
    """Send streamed requests one by one over one connection, each with a prompt of its own. `answered`: called after each."""
    with closing(httpx.Client(timeout=60)) as client:
        for number in range(count):
            body = {"model": "m", "prompt": f"{number} tell me more " * 40, "max_tokens": 16, "stream": True}
            answer = client.post(f"{router.url}/v1/completions", json=body)
            assert answer.status_code == 200 and answer.content == b"".join(_EVENTS)
            answered()


def test_a_stream_leaves_nothing_to_the_garbage_collector(router: CountingRouter) -> None:
    """No cycle of references holds a request that was answered: the collector, which stops all streams, has little to do."""
    ask(router, 2)
    gc.collect()
    gc.disable()
    try:
        ask(router, _REQUESTS)
        # The handler of the last request may be about to end.
        assert sum(isinstance(one, ProxiedRequest) for one in gc.get_objects()) <= 1
    finally:
        gc.enable()


def test_a_stream_takes_two_tasks(router: CountingRouter) -> None:
    """A request on a new connection whose answer comes at once starts the tasks of connection and handler, and no other: none
    sends its body, none asks for tokens where no replica knows them, and none forwards its events."""
    ask(router, 2)
    router.count()
    found: list[int] = []
    for _ in range(_REQUESTS):
        before = router.tasks
        ask(router, 1)
        found.append(router.tasks - before)
    # Some answers come in parts, or beside a probe.
    assert min(found) == 2


def test_a_stream_takes_no_more_calls_than_before_prices(router: CountingRouter) -> None:
    """A request of 16 events takes at most as many calls of Python functions, aiohttp's too, as before placement had prices and
    routers knew suspects. Generators count with each of their values."""
    seen: list[int] = []
    router.count_calls(True)
    ask(router, 2 * _REQUESTS, lambda: seen.append(router.calls))
    router.count_calls(False)
    # Probes come between some requests.
    found = median(after - before for before, after in pairwise(seen[4:]))
    assert found <= 1000


def test_a_request_is_sent_in_one_call(router: CountingRouter) -> None:
    """Head and body of a request go to the replica together: each call of the system costs as much as 50 of Python."""
    Prompt.received.clear()
    ask(router, _REQUESTS)
    whole = [data for data in Prompt.received if data.startswith(b"POST /v1/completions")]
    assert len(whole) == _REQUESTS
    assert all(b"tell me more" in data for data in whole)


class CountedPool(ReplicaPool):
    """A pool with a request that waits. `served`: how often its queue was."""

    waiting = 1
    served = 0

    def serve_queue(self) -> None:
        self.served += 1


def test_attempts_that_end_together_serve_the_queue_once() -> None:
    """Attempts that end in one turn of the event loop, as those of other workers do, look for places for waiting requests once,
    and not within the call that ends them."""

    async def end() -> list[int]:
        router = Router(Config())
        pool = router.pools["m"] = CountedPool("m", router.config, {})
        found = []
        for _ in range(2):
            asks = [Ask(router.suspects, AskDigests(f"{number}".encode(), None), "name") for number in range(200)]
            for flight in [one.sent("http://a") for one in asks]:
                flight.release()
            found.append(pool.served)
            await asyncio.sleep(0)
            found.append(pool.served)
        return found

    assert asyncio.run(end()) == [0, 1, 1, 2]
