"""A scripted vLLM server that continues streams exactly, and misbehaves in one of many ways on demand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web
from router_parts import Loop
from scripted_replica import ScriptedReplica

WORDS = ["w0", " w1", " w2", " w3", " w4"]
TEXT = "".join(WORDS)
PROMPT_IDS = [7, 8, 9]
FIRST_TOKEN = 100
FLOOD = 4000
ERROR = {"message": "no", "type": "BadRequestError", "code": 400}
# Bytes that are sent after the third word of a stream.
PIECES = {
    "done early": b"data: [DONE]\n\n",
    "bytes that are not text": b"data: \x00\xff\xfe not json\n\n",
    "choices are numbers": b'data: {"choices": [7]}\n\n',
    "choices are an object": b'data: {"choices": {"a": 1}}\n\n',
    "token ids are a string": b'data: {"id":"c","choices":[{"index":0,"text":" x","token_ids":"abc"}]}\n\n',
    "token ids are negative": b'data: {"id":"c","choices":[{"index":0,"text":" x","token_ids":[-1]}]}\n\n',
    "delta is a string": b'data: {"id":"c","choices":[{"index":0,"text":" x","token_ids":[1],"delta":"str"}]}\n\n',
    "text is a number": b'data: {"id":"c","choices":[{"index":0,"text":7,"token_ids":[1]}]}\n\n',
    "nested deeply": b"data: " + b"[" * 100_000 + b"\n\n",
    "half an event": b'data: {"id": "c", "cho',
    "clean end": b"",
    "aborted": b'data: {"id":"c","choices":[{"index":0,"text":"","token_ids":[],"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n',
}
# Answers instead of a stream or a response: status, media type, body.
ANSWERS: dict[str, tuple[int, str, bytes]] = {
    "500": (500, "application/json", json.dumps({"error": {"message": "CUDA out of memory"}}).encode()),
    "503": (503, "text/plain", b"busy"),
    "HTML": (200, "text/html", b"<html>It works</html>"),
    "cut JSON": (200, "application/json", b'{"id": "x", "choices": ['),
    "empty JSON": (200, "application/json", b"{}"),
    "no choices": (200, "application/json", b'{"choices": []}'),
    "other types": (200, "application/json", b'{"choices": [{"text": 7}]}'),
    "aborted whole": (200, "application/json", b'{"choices": [{"index": 0, "text": "w0", "finish_reason": "abort"}]}'),
    "nothing": (204, "text/plain", b""),
    "400": (400, "application/json", json.dumps({"error": ERROR}).encode()),
    "401": (401, "application/json", b'{"error": "Unauthorized"}'),
    "404": (404, "application/json", json.dumps({"error": ERROR}).encode()),
    "redirect": (307, "text/plain", b""),
    "an empty stream": (200, "text/event-stream", b""),
    "a stream of nothing": (200, "text/event-stream", b"data: [DONE]\n\n"),
}
MODES = [*ANSWERS, *PIECES, "reset", "stall", "hang", "endless"]


class HostileReplica(ScriptedReplica):
    """The server. `mode` is one of MODES, `flood` for 40 MB of text, or empty to behave well; `seen` has all bodies."""

    def __init__(self, loop: Loop) -> None:
        self.mode = ""
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = 0
        super().__init__(loop)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/completions", self._completions)]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        body = await request.json()
        self.seen.append(body)
        self.open += 1
        try:
            return await self._behave(request, body)
        finally:
            self.open -= 1

    async def _behave(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.mode in ANSWERS:
            status, media_type, data = ANSWERS[self.mode]
            headers = {"location": "http://127.0.0.1:1/x"} if status == 307 else {}
            return web.Response(body=data, status=status, content_type=media_type, headers=headers)
        if self.mode == "hang":
            await asyncio.sleep(600)
        prompt = body.get("prompt")
        first = len(prompt) - len(PROMPT_IDS) if isinstance(prompt, list) else 0
        if self.mode == "flood":
            return await self._flood(request)
        if body.get("stream"):
            return await self._stream(request, first)
        if self.mode:
            assert request.transport is not None
            request.transport.abort()
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        choice = {"index": 0, "text": TEXT, "finish_reason": "stop"}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    async def _stream(self, request: web.Request, first: int) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        for number in range(first, len(WORDS)):
            last = number == len(WORDS) - 1
            choice: dict[str, Any] = {"index": 0, "text": WORDS[number], "finish_reason": "stop" if last else None}
            choice["token_ids"] = [FIRST_TOKEN + number]
            if number == first:
                choice["prompt_token_ids"] = PROMPT_IDS
            chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
            await out.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if number == 2 and self.mode:
                return await self._misbehave(request, out)
        await out.write(b"data: [DONE]\n\n")
        return out

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        for number in range(FLOOD):
            choice = {"index": 0, "text": "x" * 10_000, "token_ids": [number], "prompt_token_ids": PROMPT_IDS}
            await out.write(b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n")
        last = {"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        await out.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return out

    async def _misbehave(self, request: web.Request, out: web.StreamResponse) -> web.StreamResponse:
        if self.mode == "stall":
            await asyncio.sleep(600)
        if self.mode == "reset":
            assert request.transport is not None
            request.transport.abort()
        while self.mode == "endless":
            await out.write(b"x" * 65536)
        await out.write(PIECES.get(self.mode, b""))
        return out
