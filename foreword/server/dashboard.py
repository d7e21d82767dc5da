"""The dashboard of one engine: its page, and what the page needs beyond `/metrics`. A caller sees its own tenant's names."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from foreword import __version__
from foreword.api.prefixes import describe
from foreword.blocks.common_prefixes import CommonPrefix
from foreword.dashboard import pages
from foreword.dashboard.history import MetricsHistory, Sampling
from foreword.errors import ForewordError, Unauthorized
from foreword.observability.metrics import PrometheusObserver
from foreword.server.endpoint import Front

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.prefixes.book import NamedPrefix

_SHOWN_REQUESTS: Final = 50
_SHOWN_CHAINS: Final = 8
# Seconds for which found chains are good: finding them compares thousands of texts.
_CHAINS_AGE: Final = 4.0
_MAX_TENANTS: Final = 256


def install(app: FastAPI, front: Front, registry: PrometheusObserver) -> None:
    """Add `/ui` to an engine's application."""
    history = MetricsHistory(registry.families)
    app.include_router(_data(front, history))
    app.include_router(_pages())
    app.add_middleware(Sampling, history=history)


def _pages() -> APIRouter:
    known = pages.files()
    routes = APIRouter(prefix="/ui", include_in_schema=False)

    @routes.get("")
    async def to_folder() -> Response:
        # Relative, so that it also works behind a proxy that adds a path.
        return RedirectResponse("ui/", headers=pages.HEADERS)

    @routes.get("/{name:path}")
    async def file(request: Request, name: str) -> Response:
        found = pages.find(known, name)
        status, body = found.answer(request.headers.get("if-none-match"))
        return Response(body, status, headers=found.headers)

    return routes


def _is_welcome(front: Front, request: Request) -> bool:
    """Whether a request comes with a key that is known, or needs none: asked for so that no browser logs an error 401."""
    try:
        front.tenant(request)
    except Unauthorized:
        return False
    return True


def _data(front: Front, history: MetricsHistory) -> APIRouter:
    routes = APIRouter(prefix="/ui/data", tags=["dashboard"])
    chains = _Chains()

    @routes.get("/kind")
    async def kind(request: Request) -> dict[str, Any]:
        """What this is the page of, and whether the caller may see more. Needs no key."""
        return {"kind": "server", "version": __version__, "welcome": _is_welcome(front, request)}

    @routes.get("/history")
    async def show_history(request: Request) -> dict[str, Any]:
        """The last half hour of the metrics."""
        front.tenant(request)
        return await asyncio.to_thread(history.plain)

    @routes.get("/now")
    async def now(request: Request) -> dict[str, Any]:
        """State, and the caller's newest requests, named prefixes and shared chains. No text."""
        salt = front.tenant(request).salt
        newest = [one.plain() for one in front.recent.newest(salt, _SHOWN_REQUESTS)]
        answer: dict[str, Any] = {
            "time": time.time(),
            "state": _state(front),
            "requests": newest,
            "prefixes": [],
            "chains": [],
        }
        engine = front.gate.loaded
        if engine is None or engine.status().failed is not None:
            return answer
        info, prefixes = engine.info, await _prefixes(engine, salt)
        answer["model"] = {
            "name": info.name,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "kv_bytes_per_block": info.kv_bytes_per_block,
        }
        answer["prefixes"] = [describe(prefix) for prefix in prefixes]
        answer["chains"] = [_shown(chain, prefixes) for chain in await chains.of(engine, salt)]
        return answer

    return routes


def _state(front: Front) -> dict[str, str]:
    try:
        front.gate.engine()
    except ForewordError as error:
        return {"status": error.code or "not_ready", "reason": error.message}
    return {"status": "ready", "reason": ""}


async def _prefixes(engine: AsyncEngine, salt: bytes) -> Sequence[NamedPrefix]:
    try:
        await engine.prefixes.refresh(salt)
        return engine.prefixes.list(salt=salt)
    except ForewordError:
        return ()  # the server is going down, or its store does not answer


class _Chains:
    """Shared chains per tenant, as found some seconds ago."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, tuple[float, Sequence[CommonPrefix]]] = OrderedDict()
        self._finding = asyncio.Lock()

    async def of(self, engine: AsyncEngine, salt: bytes) -> Sequence[CommonPrefix]:
        async with self._finding:
            at, found = self._found.get(salt, (-_CHAINS_AGE, ()))
            if time.monotonic() - at < _CHAINS_AGE:
                return found
            try:
                found = await engine.common_prefixes(salt, _SHOWN_CHAINS)
            except ForewordError:
                return found  # the engine is going down
            self._found[salt] = time.monotonic(), found
            self._found.move_to_end(salt)
            if len(self._found) > _MAX_TENANTS:
                self._found.popitem(last=False)
            return found


def _shown(chain: CommonPrefix, prefixes: Sequence[NamedPrefix]) -> dict[str, Any]:
    """A chain without its tokens. `begins_with` is the longest named prefix in it."""
    length, tokens = len(chain.tokens), tuple(chain.tokens)
    inside = [one for one in prefixes if 0 < len(one.tokens) <= length and tokens[: len(one.tokens)] == one.tokens]
    # Of a prefix that ends within a block, only the full blocks are shared.
    around = [one for one in prefixes if len(one.tokens) > length and one.tokens[:length] == tokens]
    longest = max(inside, key=lambda one: len(one.tokens)) if inside else None
    return {
        "tokens": length,
        "blocks": chain.blocks,
        "users": chain.users,
        "on_device": chain.on_device,
        "begins_with": longest.name if longest is not None else None,
        "part_of": [one.name for one in around[:3]],
    }
