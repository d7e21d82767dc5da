"""A scripted OpenAI-compatible server that knows only chat completions and completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from router_parts import Loop
from scripted_replica import ScriptedReplica

WORDS = ["It ", "is ", "sunny ", "in ", "Rome."]
TEXT = "".join(WORDS)
ARGUMENTS = ['{"city"', ': "Rome"}']
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16},
}


class ChatReplica(ScriptedReplica):
    """The server. `seen` has the bodies by path, `broken` makes the next streams end after two chunks, `hold` makes it silent
    until `release`."""

    def __init__(self, loop: Loop, owner: str = "vllm") -> None:
        self._loop = loop
        self._gate = asyncio.Event()
        self._gate.set()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.broken = False
        super().__init__(loop, owner)

    def hold(self) -> None:
        self._loop.call(self._gate.clear)

    def release(self) -> None:
        self._loop.call(self._gate.set)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.seen if where == path]

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completions),
            web.post("/v1/cache/prefetch", self._prefetch),
        ]

    async def _prefetch(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.json()))
        return web.json_response({"object": "cache.prefetch", "status": "clipped", "tokens": 16})

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
