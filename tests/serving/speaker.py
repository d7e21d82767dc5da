"""A scripted replica whose words show which weights said them: `a0 a1 a2 ...` or `b0 b1 b2 ...`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from router_parts import Loop
from scripted_replica import ScriptedReplica

NUM_WORDS = 8
PROMPT_IDS = [7, 8, 9]
FIRST_TOKEN = 100


class Speaker(ScriptedReplica):
    """A server of Foreword, or of vLLM, with the connector or without.

    Attributes:
        weights: a hexadecimal fingerprint; its first character begins all words.
        publishes: its metrics have the fingerprint, if it is one of vLLM's.
        cut_after: the next stream is reset after this number of words.
        at_cut: called before that, on the replica's event loop.
        noise: added to the log-probabilities. None: it returns none.
        started: when its process started; None if its metrics do not say.
        asked: the bodies of completions, without those of the router's own.
    """

    def __init__(self, loop: Loop, weights: str, owner: str = "vllm", **more: Any) -> None:
        self.publishes = True
        self.cut_after: int | None = None
        self.at_cut: Callable[[], object] = lambda: None
        self.noise: float | None = 0.0
        self.started: float | None = 1.0
        self.asked: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._loop = loop
        for name, value in more.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        super().__init__(loop, owner, weights)

    def restart(self, weights: str) -> None:
        """Another process answers at the same address, at once."""
        self.weights = weights
        self.started = None if self.started is None else self.started + 1

    def hold(self) -> None:
        """Streams stop before their next word."""
        self._loop.call(self.gate.clear)

    def release(self) -> None:
        self._loop.call(self.gate.set)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/ready", self._health),
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._completions),
            web.post("/v1/detokenize", self._detokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        name = "foreword:model_info" if self.owner == "foreword" else "vllm:foreword_model_info"
        lines = [f'{name}{{fingerprint="{self.weights}"}} 1.0'] if self.publishes else []
        lines += [f"process_start_time_seconds {self.started}"] if self.started is not None else []
        return web.Response(text="\n".join([*lines, 'vllm:cache_config_info{block_size="16"} 1.0', ""]))

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": "".join(self._word(one - FIRST_TOKEN) for one in tokens if one >= 100)})

    def _word(self, number: int) -> str:
        return f"{self.weights[0]}{number} "

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("echo") and "logprobs" in body:
            return self._logprobs(body)
        self.asked.append(body)
        first = self._first(body)
        if body.get("stream"):
            return await self._stream(request, first)
        text = "".join(map(self._word, range(first, NUM_WORDS)))
        return web.json_response({**self._chunk(), "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})

    def _first(self, body: dict[str, Any]) -> int:
        """The word with which to go on."""
        if body.get("continuation"):
            return len(body["continuation"]["token_ids"])
        prompt = body.get("prompt")
        return len(prompt) - len(PROMPT_IDS) if isinstance(prompt, list) else 0

    def _chunk(self) -> dict[str, Any]:
        chunk: dict[str, Any] = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        return chunk | ({"system_fingerprint": f"fp_{self.weights[:12]}"} if self.owner == "foreword" else {})

    async def _stream(self, request: web.Request, first: int) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        chunk, word, cut_after, self.cut_after = self._chunk(), self._word, self.cut_after, None
        for number in range(first, NUM_WORDS):
            await self.gate.wait()
            if cut_after == number:
                self.at_cut()
                assert request.transport is not None
                request.transport.abort()
                return out
            last = number == NUM_WORDS - 1
            choice: dict[str, Any] = {"index": 0, "text": word(number), "finish_reason": "stop" if last else None}
            choice["token_ids"] = [FIRST_TOKEN + number]
            if number == first:
                choice["prompt_token_ids"] = PROMPT_IDS
            await out.write(b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    def _logprobs(self, body: dict[str, Any]) -> web.Response:
        """Log-probabilities as a model would have them: other weights give other values, and the same weights nearly the
        same."""
        if self.noise is None:
            return web.json_response({"error": {"message": "no log-probabilities"}}, status=400)
        tokens = [body["prompt"][at : at + 4] for at in range(0, len(body["prompt"]), 4)]
        values: list[float | None] = [None]
        for number in range(1, len(tokens)):
            values.append(-1.0 - (int(self.weights[:6], 16) * number % 97) / 40 + self.noise * (-1) ** number)
        choice = {"index": 0, "text": body["prompt"], "finish_reason": "length"}
        choice["logprobs"] = {"tokens": [*tokens, "x"], "token_logprobs": [*values, -0.5]}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1}
        return web.json_response({**self._chunk(), "choices": [choice], "usage": usage})
