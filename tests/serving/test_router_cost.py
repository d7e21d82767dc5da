"""Work that the router does for each streamed request, as counts: times differ from machine to machine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterThread
from scripted_replica import ScriptedReplica

from foreword.router.proxied_request import ProxiedRequest

_REQUESTS = 20
_EVENT = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":%b}]}\n\n'
_STREAM = _EVENT % b"null" * 15 + _EVENT % b'"length"' + b"data: [DONE]\n\n"


class Prompt(ScriptedReplica):
    """Sends a stream of 16 events at once."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._answer)]

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=_STREAM, headers={"content-type": "text/event-stream"})


class CountingRouter(RouterThread):
    """Counts the tasks that are started on its event loop."""

    tasks = 0

    def count(self) -> None:
        """Count from now on."""
        self._loop.call_soon_threadsafe(self._loop.set_task_factory, self._start)

    def _start(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        self.tasks += 1
        return asyncio.Task(work, loop=loop, **more)


@pytest.fixture
def router() -> Iterator[CountingRouter]:
    """A router in front of two plain servers."""
    loop = Loop()
    found = [Prompt(loop, owner="somebody") for _ in range(2)]
    router = CountingRouter(*(word for one in found for word in ("--replica", one.url)))
    try:
        yield router.wait_for(2)
    finally:
        router.kill()


def ask(router: RouterThread, count: int) -> None:
    """Send streamed requests one by one over one connection, each with a prompt of its own."""
    with closing(httpx.Client(timeout=60)) as client:
        for number in range(count):
            body = {"model": "m", "prompt": f"{number} tell me more " * 40, "max_tokens": 16, "stream": True}
            answer = client.post(f"{router.url}/v1/completions", json=body)
            assert answer.status_code == 200 and answer.content == _STREAM


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
