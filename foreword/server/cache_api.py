"""`/v1/cache/*`: tenants keep, prefetch and release prefixes. Each tenant sees its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from foreword.api import cache_control
from foreword.api.cache_control import CacheBody, CacheRequest
from foreword.api.front import Call, Handler
from foreword.api.rights import Right
from foreword.api.routes import NO_BODY, JsonBody, Meter, Routes
from foreword.api.tenants import Tenant
from foreword.blocks.retention import RetentionAnswer
from foreword.blocks.salt import Salt
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

Verb = Callable[["AsyncEngine", Sequence[int], CacheRequest, Salt], Awaitable[RetentionAnswer]]

_BODY = JsonBody(cache_control.parse, CacheBody)
_RELEASE = JsonBody(partial(cache_control.parse, releases=True), CacheBody)


def add_routes(routes: Routes[Handler], context: ServerContext) -> None:
    @routes.add("POST", "/v1/cache/retain", right=Right.TENANT, meter=Meter.TOKENS, body=_BODY, tag="cache")
    async def retain(call: Call) -> dict[str, Any]:
        """Keep the KV of a prefix for a time after its last use. It is computed if necessary."""
        return await _answer(context, call, "retain", _retain)

    @routes.add("POST", "/v1/cache/pin", right=Right.OWNER, meter=Meter.TOKENS, body=_BODY, tag="cache")
    async def pin(call: Call) -> dict[str, Any]:
        """Keep the KV of a prefix until it is released. It is computed if necessary."""
        return await _answer(context, call, "pin", _pin)

    @routes.add("POST", "/v1/cache/prefetch", right=Right.TENANT, meter=Meter.REQUEST, body=_BODY, tag="cache")
    async def prefetch(call: Call) -> dict[str, Any]:
        """Load what the stores have of a coming prompt to the device. Nothing is computed."""
        return await _answer(context, call, "prefetch", _prefetch)

    @routes.add("POST", "/v1/cache/release", right=Right.TENANT, meter=Meter.FREE, body=_RELEASE, tag="cache")
    async def release(call: Call) -> dict[str, Any]:
        """End what is kept along a prompt, or with all: true everything that the caller keeps."""
        body: CacheRequest = call.body
        if body.all:
            call.require(Right.OWNER, "releasing everything")
        engine = context.admission.engine()
        tokens = None if body.all else await _tokens(context, engine, body)
        salt = _salt(call.tenant, body)
        released = await context.work.run(len(tokens or ()), partial(engine.release, tokens, salt=salt))
        return {"object": "cache.release", "released": [dataclasses.asdict(one) for one in released]}

    @routes.add("GET", "/v1/cache/retained", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="cache")
    async def retained(call: Call) -> dict[str, Any]:
        """What the caller keeps with cache control."""
        found = context.admission.engine().retentions(call.tenant.salt)
        return {"object": "list", "data": [dataclasses.asdict(one) for one in found]}


async def _retain(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    ttl = cache_control.DEFAULT_TTL if body.seconds is None else body.seconds
    return await engine.retain(tokens, ttl, body.priority, salt=salt)


async def _pin(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    return await engine.pin(tokens, salt=salt)


async def _prefetch(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    prefetch = partial(engine.prefetch, tokens, salt=salt)
    return await (prefetch() if body.seconds is None else prefetch(seconds=body.seconds))


async def _answer(context: ServerContext, call: Call, name: str, verb: Verb) -> dict[str, Any]:
    body: CacheRequest = call.body
    with context.admission.admit(1) as engine:
        tokens = await _tokens(context, engine, body)
        if name != "prefetch":
            call.charge(len(tokens))
        return cache_control.answered(name, len(tokens), await verb(engine, tokens, body, _salt(call.tenant, body)))


def _salt(tenant: Tenant, body: CacheRequest) -> Salt:
    return Salt.of(tenant.salt, body.cache_salt)


async def _tokens(context: ServerContext, engine: AsyncEngine, body: CacheRequest) -> Sequence[int]:
    """The prefix as tokens. Raises BadRequest, PromptTooLong, UnknownModel."""
    check_model(engine, body.model)
    if not isinstance(body.prompt, tuple):
        check_length(engine, body.size, "messages" if body.prompt is None else "prompt")
    tokens = await context.work.run(body.size, cache_control.tokens_of, engine.tokenizer, body)
    check_token_ids(engine, tuple(tokens), "prompt")
    return tokens
