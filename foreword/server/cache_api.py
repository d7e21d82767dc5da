"""`/v1/cache/*`: tenants keep, prefetch and release prefixes. Each tenant sees its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from foreword.api import cache_control, session_control
from foreword.api.cache_control import CacheRequest
from foreword.api.front import Call, Handler
from foreword.api.rights import Tenant
from foreword.api.routes import Right, Routes
from foreword.blocks.retention import RetentionAnswer
from foreword.blocks.salt import Salt
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

Verb = Callable[["AsyncEngine", Sequence[int], CacheRequest, Salt], Awaitable[RetentionAnswer]]


def add_routes(routes: Routes[Handler], context: ServerContext) -> None:
    async def retained(call: Call) -> dict[str, Any]:
        """Retentions of the caller."""
        found = context.admission.engine().retentions(call.tenant.salt)
        return {"object": "list", "data": [dataclasses.asdict(one) for one in found]}

    def handler(verb: str, text: str) -> Handler:
        async def answer(call: Call) -> dict[str, Any]:
            return await (_release(context, call) if verb == "release" else _answer(context, call, verb))

        answer.__name__, answer.__doc__ = verb, text
        return answer

    async def session(call: Call) -> dict[str, Any]:
        """Open a session, fork it, compact it, or end it, which frees what only it has used in every tier."""
        body: session_control.SessionBody = call.body
        engine, tenant = context.admission.engine(), call.tenant.salt
        if body.action in ("open", "fork"):
            engine.sessions.open(tenant, body.session_id, body.parent_session_id or "", body.timeout)
            return {"object": "session", "id": body.session_id, "action": body.action}
        keep = body.keep_tokens if body.action == "compact" else None
        freed = await engine.shorten_session(tenant, body.session_id, keep)
        return {"object": "session", "id": body.session_id, "action": body.action, "freed_blocks": freed}

    async def open_sessions(call: Call) -> dict[str, Any]:
        """The open sessions of the caller."""
        found = context.admission.engine().sessions.all(call.tenant.salt)
        return {"object": "list", "data": [one.describe() for one in found]}

    session_control.add_routes(routes, session, open_sessions)
    cache_control.add_routes(
        routes, lambda verb: partial(cache_control.parse, releases=verb == "release"), handler, retained
    )


async def _release(context: ServerContext, call: Call) -> dict[str, Any]:
    body: CacheRequest = call.body
    if body.all:
        call.require(Right.OWNER, "releasing everything")
    engine = context.admission.engine()
    tokens = None if body.all else await _tokens(context, engine, body)
    salt = _salt(call.tenant, body)
    released = await context.work.run(len(tokens or ()), partial(engine.release, tokens, salt=salt))
    return {"object": "cache.release", "released": [dataclasses.asdict(one) for one in released]}


async def _retain(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    ttl = cache_control.DEFAULT_TTL if body.seconds is None else body.seconds
    return await engine.retain(tokens, ttl, body.priority, salt=salt)


async def _prefetch(engine: AsyncEngine, tokens: Sequence[int], body: CacheRequest, salt: Salt) -> RetentionAnswer:
    prefetch = partial(engine.prefetch, tokens, salt=salt)
    return await (prefetch() if body.seconds is None else prefetch(seconds=body.seconds))


_VERBS: dict[str, Verb] = {
    "retain": _retain,
    "pin": lambda engine, tokens, body, salt: engine.pin(tokens, salt=salt),
    "prefetch": _prefetch,
}


async def _answer(context: ServerContext, call: Call, name: str) -> dict[str, Any]:
    body: CacheRequest = call.body
    with context.admission.admit(1) as engine:
        tokens = await _tokens(context, engine, body)
        if name != "prefetch":
            call.charge(TokenUsage(len(tokens)))
        answer = await _VERBS[name](engine, tokens, body, _salt(call.tenant, body))
        return cache_control.answered(name, len(tokens), answer)


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
