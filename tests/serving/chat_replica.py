"""A scripted OpenAI-compatible server that knows only chat completions and completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from router_parts import Loop

WORDS = ["It ", "is ", "sunny ", "in ", "Rome."]
TEXT = "".join(WORDS)
ARGUMENTS = ['{"city"', ': "Rome"}']
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16},
}


class ChatReplica:
    """The server. `seen` has the bodies by path, `broken` makes the next streams end after two chunks, `hold` makes it silent
    until `release`."""

    def __init__(self, loop: Loop, owner: str = "vllm") -> None:
        self._loop = loop
        self._gate = asyncio.Event()
        self._gate.set()
        self.owner = owner
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.paths: list[str] = []
        self.broken = False
        self.url: str = loop.call(self._start)

    def hold(self) -> None:
        self._loop.call(self._gate.clear)

    def release(self) -> None:
        self._loop.call(self._gate.set)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.seen if where == path]

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/cache/prefetch", self._prefetch)
        app.router.add_route("*", "/{path:.*}", self._other)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card]})

    async def _prefetch(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.json()))
        return web.json_response({"object": "cache.prefetch", "status": "clipped", "tokens": 16})

    async def _other(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        return web.Response(status=404)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(("/v1/completions", body))
        choice = {"index": 0, "text": TEXT, "finish_reason": "stop"}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": USAGE})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(("/v1/chat/completions", body))
        await self._gate.wait()
        if body.get("temperature") == 2:
            error = {"message": "temperature is too high", "type": "invalid_request_error", "param": "temperature"}
            return web.json_response({"error": error}, status=400)
        deltas = [{"content": word} for word in WORDS]
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            deltas = [{"tool_calls": [first]}]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ARGUMENTS]
        reason = "tool_calls" if "tool_calls" in deltas[0] else "stop"
        if body.get("stream"):
            return await self._stream(request, [{"role": "assistant", "content": ""}, *deltas], reason)
        message: dict[str, Any] = {"role": "assistant", "content": TEXT if reason == "stop" else None}
        if reason == "tool_calls":
            call = {"name": "weather", "arguments": "".join(ARGUMENTS)}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": call}]
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": USAGE})

    async def _stream(self, request: web.Request, deltas: list[dict[str, Any]], reason: str) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        chunk: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for number, delta in enumerate(deltas):
            if self.broken and number == 1:
                assert request.transport is not None
                request.transport.abort()
            data = {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            await out.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        for last in (
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {**chunk, "choices": [], "usage": USAGE},
        ):
            await out.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out
