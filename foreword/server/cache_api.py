"""`/v1/cache/*`: tenants keep, prefetch and release prefixes. Each tenant sees its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword.api import cache_control
from foreword.api.cache_control import CacheRequest
from foreword.api.dialects.limits import Limits
from foreword.api.errors import CLIENT_GONE
from foreword.api.tenants import Tenant
from foreword.blocks.retention import RetentionAnswer
from foreword.blocks.salt import Salt
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids
from foreword.server.routes import Routes
from foreword.server.stream import unless_disconnected

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

Verb = Callable[["AsyncEngine", Sequence[int], CacheRequest, Salt], Awaitable[RetentionAnswer]]


def add_routes(routes: Routes, context: ServerContext) -> None:
    @routes.add("POST", "/v1/cache/retain", "cache")
    async def retain(request: Request) -> Response:
        """Keep the KV of a prefix for a time after its last use. It is computed if necessary."""
        return await _answer(context, request, "retain", context.tenant(request), _retain)

    @routes.add("POST", "/v1/cache/pin", "cache")
    async def pin(request: Request) -> Response:
        """Keep the KV of a prefix until it is released."""
        tenant = context.rights.check_own(request, "pinning")
        return await _answer(context, request, "pin", tenant, _pin)

    @routes.add("POST", "/v1/cache/prefetch", "cache")
    async def prefetch(request: Request) -> Response:
        """Load what the stores have of a coming prompt to the device. Nothing is computed."""
        return await _answer(context, request, "prefetch", context.tenant(request), _prefetch)

    @routes.add("POST", "/v1/cache/release", "cache")
    async def release(request: Request) -> Response:
        """End what is kept along a prompt, or with all: true everything that the caller keeps."""
        tenant, body = context.tenant(request), await _body(context, request, releases=True)
        if body.all:
            context.rights.check_own(request, "releasing everything")
        engine = context.admission.engine()
        tokens = None if body.all else await _tokens(context, engine, body)
        released = await context.work.run(len(tokens or ()), partial(engine.release, tokens, salt=_salt(tenant, body)))
        return JSONResponse({"object": "cache.release", "released": [dataclasses.asdict(one) for one in released]})

    @routes.add("GET", "/v1/cache/retained", "cache")
    async def retained(request: Request) -> dict[str, Any]:
        """What the caller keeps with cache control."""
        found = context.admission.engine().retentions(context.tenant(request).salt)
        return {"object": "list", "data": [dataclasses.asdict(one) for one in found]}


async def _retain(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    ttl = cache_control.DEFAULT_TTL if body.seconds is None else body.seconds
    return await engine.retain(tokens, ttl, body.priority, salt=salt)


async def _pin(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    return await engine.pin(tokens, salt=salt)


async def _prefetch(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    prefetch = partial(engine.prefetch, tokens, salt=salt)
    return await (prefetch() if body.seconds is None else prefetch(seconds=body.seconds))


async def _answer(context: ServerContext, request: Request, name: str, tenant: Tenant, verb: Verb) -> Response:
    with context.quotas.admit(tenant.name, time.monotonic()) as admitted, context.admission.admit(1) as engine:
        body = await _body(context, request)
        tokens = await _tokens(context, engine, body)
        if name != "prefetch":
            context.quotas.charge(admitted, len(tokens), time.monotonic())
        answer = await unless_disconnected(request.receive, _awaited(verb(engine, tokens, body, _salt(tenant, body))))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(cache_control.answered(name, len(tokens), answer))


async def _awaited(work: Awaitable[RetentionAnswer]) -> RetentionAnswer:
    return await work


def _salt(tenant: Tenant, body: CacheRequest) -> Salt:
    return Salt.of(tenant.salt, body.cache_salt)


async def _body(context: ServerContext, request: Request, *, releases: bool = False) -> CacheRequest:
    limits = Limits.for_model(context.admission.engine().info.max_model_len, context.max_body)
    async with context.bodies.read(request, context.max_body) as raw:
        return await context.work.run(len(raw), cache_control.parse, raw, limits, releases=releases)


async def _tokens(context: ServerContext, engine: AsyncEngine, body: CacheRequest) -> Sequence[int]:
    """The prefix as tokens. Raises BadRequest, PromptTooLong, UnknownModel."""
    check_model(engine, body.model)
    if not isinstance(body.prompt, tuple):
        check_length(engine, body.size, "messages" if body.prompt is None else "prompt")
    tokens = await context.work.run(body.size, cache_control.tokens_of, engine.tokenizer, body)
    check_token_ids(engine, tuple(tokens), "prompt")
    return tokens
