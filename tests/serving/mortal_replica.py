"""A replica that dies of some requests: a process of its own that really ends, or says that its engine has.

    python mortal_replica.py OWNER

It prints its URL. A request whose body contains one of these words does this:

    RESET    it ends in the prompt, without an answer
    SPEAK    it ends after two words of the answer
    ERROR    it answers 500, and ends a moment later
    ENGINE   it answers 500, and /health says 503 from then on; the process stays
    BREAK    the connection breaks, and the process lives
    ALONE    it answers 500 with the code `request_failed`, and lives
    SLOW     it answers after a POST of /release; a stream begins before

GET /running gives the number of requests that run, /asked that of reads of its metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from aiohttp import web

TEXT = ["one", " two", " three", " four"]
WORDS = ("RESET", "SPEAK", "ERROR", "ENGINE", "BREAK", "ALONE", "SLOW")
# The prompts of SPEAK as token ids, so that a continuation has it, too.
FATAL = 666
WEIGHTS = f'vllm:foreword_model_info{{model_name="m",engine="0",fingerprint="{"a1" * 32}"}} 1.0\n'
# Long enough for the answer to be read.
LINGER_SECONDS = 0.05


class MortalReplica:
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.engine_stopped = False
        self.release = asyncio.Event()
        self.running = self.asked = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.post("/v1/completions", self.complete),
                web.post("/v1/chat/completions", self.complete),
                web.get("/running", self.count),
                web.get("/asked", self.times),
                web.post("/release", self.let_go),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine_stopped else 200)

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=f'{WEIGHTS}vllm:num_requests_running{{engine="0"}} {self.running}\n')

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response(self.running)

    async def times(self, request: web.Request) -> web.Response:
        return web.json_response(self.asked)

    async def let_go(self, request: web.Request) -> web.Response:
        self.release.set()
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt")
        ids = prompt if isinstance(prompt, list) else []
        said = "SPEAK" if FATAL in ids else next((word for word in WORDS if word in json.dumps(body)), "")
        self.running += 1
        try:
            return await self.behave(request, body, said, max(len(ids) - 3, 0))
        finally:
            self.running -= 1

    async def behave(self, request: web.Request, body: dict[str, Any], said: str, first: int) -> web.StreamResponse:
        if said == "SLOW" and not body.get("stream"):
            await self.release.wait()
        if said == "RESET":
            os._exit(1)
        if said == "BREAK":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if said == "ALONE":
            return self.error("the engine failed at this request", "request_failed")
        if said == "ERROR":
            asyncio.get_running_loop().call_later(LINGER_SECONDS, os._exit, 1)
            return self.error("EngineCore encountered an issue", None)
        self.engine_stopped = self.engine_stopped or said == "ENGINE"
        if self.engine_stopped:
            return self.error("the engine stopped", "engine_error")
        if body.get("stream"):
            return await self.stream(request, said, first)
        if said == "SPEAK":
            os._exit(1)
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        choice = {"index": 0, "text": "".join(TEXT), "finish_reason": "stop"}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    async def stream(self, request: web.Request, said: str, first: int) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        if said == "SLOW":
            await self.release.wait()
        for number, word in list(enumerate(TEXT))[first:]:
            if said == "SPEAK" and number == 2:
                os._exit(1)
            last = number == len(TEXT) - 1
            choice: dict[str, Any] = {"index": 0, "text": word, "finish_reason": "stop" if last else None}
            ids = [7, 8, FATAL if said == "SPEAK" else 9]
            choice |= {"token_ids": [number + 1], **({} if number else {"prompt_token_ids": ids})}
            chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
            await out.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    def error(self, message: str, code: str | None) -> web.Response:
        return web.json_response({"error": {"message": message, "type": "server_error", "code": code}}, status=500)


async def main(owner: str) -> None:
    runner = web.AppRunner(MortalReplica(owner).app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
