"""Many concurrent streams through one router."""

from __future__ import annotations

import asyncio
import json
import resource

import aiohttp
import pytest
from aiohttp import web
from router_parts import Loop, RouterProcess
from shared_server import until

STREAMS, EVENTS = 200, 10
CHUNK = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


class Barrier:
    """A server whose streams continue only when all of them have begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.all_there = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 1000}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({}, status=400)  # the router's own question
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        for number in range(EVENTS):
            reason = "length" if number == EVENTS - 1 else None
            choice = {"index": 0, "text": f" {number}", "token_ids": [number], "finish_reason": reason}
            await out.write(b"data: " + json.dumps({**CHUNK, "choices": [choice]}).encode() + b"\n\n")
            if not number:
                self.begun += 1
                if self.begun == STREAMS:
                    self.all_there.set()
                await self.all_there.wait()
        await out.write(b"data: [DONE]\n\n")
        return out


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """The text of one complete stream."""
    body = {"model": "m", "prompt": f"{number} count", "stream": True, "max_tokens": EVENTS}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        lines = [line[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
    assert answer.status == 200 and lines[-1] == b"[DONE]", lines[-1:]
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.extended
def test_concurrent_streams() -> None:
    """Hundreds of streams are open at once, each gets its tokens once and in order, and afterwards the router has
    nothing in flight."""
    loop, server = Loop(), Barrier()
    router = RouterProcess("--replica", loop.call(server.start)).wait_for(1)

    async def together() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            async with asyncio.timeout(150):
                return await asyncio.gather(*(ask(session, router.url, number) for number in range(STREAMS)))

    try:
        texts = loop.call(together)
        assert texts == ["".join(f" {number}" for number in range(EVENTS))] * STREAMS
        until(lambda: router.metric("foreword:router_in_flight") == 0)
        assert router.metric("foreword:router_retries_total") == 0
    finally:
        router.kill()


@pytest.mark.extended
def test_the_limit_of_open_files_is_raised() -> None:
    """A router raises its limit of open files to the system's maximum."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, hard), hard))
    try:
        router = RouterProcess("--replica", "http://127.0.0.1:9", forked=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert router.url
        assert resource.prlimit(router.popen.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        router.kill()
