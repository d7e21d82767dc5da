"""A fake vLLM server and fake stores, between which the real middleware runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foreword.api.dialects.decode import Limits
from foreword.blocks.salt import Salt
from foreword.errors import StoreError

GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class MemoryStorage:
    """Stores that pin every block at once and keep no records."""

    budget_bytes = 1000

    def __init__(self) -> None:
        self.pinned: list[Sequence[int]] = []
        self.pins = SimpleNamespace(needed=[])

    def check_room(self, *_: Any) -> None:
        pass

    def all(self, salt: bytes) -> None:
        raise StoreError("no records are kept")

    def get(self, name: str, salt: bytes) -> None:
        return None

    def put(self, prefix: Any, salt: bytes) -> None:
        pass

    def remove(self, name: str, salt: bytes) -> None:
        pass

    def pin(self, tokens: Sequence[int], salt: Salt) -> tuple[int, bool]:
        self.pinned.append(tokens)
        return len(tokens), True

    def unpin(self, tokens: Sequence[int], salt: bytes) -> None:
        self.pinned.remove(tuple(tokens))

    def mark(self, texts: Sequence[Sequence[int]]) -> None:
        pass

    def position(self, num_tokens: int) -> int:
        return num_tokens // 2 * 2

    def stored(self, tokens: Sequence[int], salt: Salt) -> int:
        return 0 if salt else min(self.position(len(tokens)), 4)

    def close(self) -> None:
        pass


class FakeVllm:
    """The routes of a vLLM server that the middleware calls, one token per character, and its engine's client."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version, self.paused, self.fails = "default", False, ""
        self.reached, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.sessions: set[str] | None = None  # of a connector that answers
        self.tokenized = 0
        self.waiting = 0
        paths = {"/tokenize": "tokenize", **dict.fromkeys(GENERATES, "complete")}
        self.app = Starlette(routes=[self.route(path, name) for path, name in paths.items()])

    def route(self, path: str, name: str) -> Route:
        async def call(request: Request) -> Response:
            found: Response = await getattr(self, name)(request)
            return found

        return Route(path, call, methods=["POST"])

    async def at_gate(self) -> None:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1

    def pass_by(self) -> asyncio.Event:
        """Only those that wait now wait on. Returns their gate."""
        held, self.gate = self.gate, asyncio.Event()
        self.gate.set()
        return held

    def forget(self) -> None:
        self.raw, self.bodies, self.calls = [], [], []

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        self.paused = True
        self.reached.set()
        await self.at_gate()
        if self.fails == "pause":
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))
        if self.fails == "version":
            raise RuntimeError("the engine is dead")
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))
        self.paused = False

    async def tokenize(self, request: Request) -> JSONResponse:
        self.tokenized += 1
        body = await request.json()
        text = body.get("prompt") or "".join(f"<{one['role']}>{one['content']}" for one in body["messages"])
        return JSONResponse({"tokens": [ord(char) for char in text]})

    async def complete(self, request: Request) -> JSONResponse:
        """Answers as vLLM, which takes all that Python reads as JSON."""
        self.raw.append(await request.body())
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            return JSONResponse({"error": {"message": "not JSON", "type": "BadRequestError"}}, 400)
        if not isinstance(body, dict):
            return JSONResponse({"error": {"message": "no object", "type": "BadRequestError"}}, 400)
        self.bodies.append(body)
        await self.at_gate()
        params = body.get("kv_transfer_params")
        told = params.get("foreword_session") if isinstance(params, dict) else None
        if self.sessions is not None and told is not None and "action" in told:
            return JSONResponse({"kv_transfer_params": {"foreword_session": self.session(**told)}})
        return JSONResponse({"usage": {"prompt_tokens_details": {"cached_tokens": 4}}})

    def session(self, action: str, session_id: str = "", **_: Any) -> dict[str, Any]:
        assert self.sessions is not None
        if action == "list":
            return {"data": [{"id": name, "requests": 0} for name in self.sessions]}
        (self.sessions.discard if action == "end" else self.sessions.add)(session_id)
        return {}


def routes_before(vllm: Callable[[str], Any], fake: FakeVllm) -> tuple[Any, Any]:
    """The middleware's routes before those of a fake vLLM, and its prefixes."""
    storage = MemoryStorage()
    inner = vllm("vllm_middleware.vllm_prefixes").InnerServer(fake.app, fake.app, None)
    prefixes, middleware = (
        vllm("vllm_middleware.vllm_prefixes").VllmPrefixes(storage, inner),
        vllm("vllm_middleware.middleware"),
    )
    prefetch, sessions = middleware.PrefetchEndpoint(storage, inner), middleware.SessionEndpoint(inner, 1)
    front = middleware.make_front(prefixes, middleware.WeightsEndpoints(fake), prefetch, sessions, Limits())
    return middleware.PrefixRoutes(fake.app, prefixes, front), prefixes


def served(vllm: Callable[[str], Any], check: Callable[[httpx.AsyncClient, FakeVllm, Any], Awaitable[None]]) -> None:
    """Run a check against a fake vLLM behind the routes for prefixes."""

    async def main() -> None:
        fake = FakeVllm()
        routes, prefixes = routes_before(vllm, fake)
        storage = prefixes._storage
        async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://vllm") as client:
            await check(client, fake, storage)
        await prefixes.close()

    asyncio.run(main())
