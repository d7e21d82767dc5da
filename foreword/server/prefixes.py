"""`/v1/prefixes`: register, look at, replace and remove named prefixes (R15 to R18). Each tenant sees its own only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foreword.api.schemas import NewPrefix, PrefixContent
from foreword.server.endpoint import Front, check_length
from foreword.server.errors import CLIENT_GONE
from foreword.server.openapi import json_body
from foreword.server.stream import unless_disconnected

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.prefixes.book import NamedPrefix


def router(front: Front) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/prefixes", tags=["prefixes"])

    @routes.post("", openapi_extra=json_body(NewPrefix), status_code=201)
    async def add(request: Request) -> Response:
        """Compute a prefix, pin it and give it a name."""
        salt, _ = front.tenant(request).salt, front.gate.engine()
        body = await front.body(request, NewPrefix)
        return await _store(front, request, body.name, body, salt, body.replace)

    @routes.get("")
    async def list_all(request: Request) -> dict[str, Any]:
        """All named prefixes of the caller, the bytes they pin, and the server's budget for everybody's."""
        salt, engine = front.tenant(request).salt, front.gate.engine()
        await engine.prefixes.refresh(salt)
        found = engine.prefixes.list(salt=salt)
        return {
            "object": "list",
            "data": [describe(prefix) for prefix in found],
            "pinned_bytes": sum(prefix.bytes for prefix in found),
            "budget_bytes": engine.prefixes.budget_bytes,
        }

    @routes.get("/{name}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """One prefix with its content."""
        salt, engine = front.tenant(request).salt, front.gate.engine()
        await engine.prefixes.refresh(salt, name)
        prefix = engine.prefixes.get(name, salt=salt)
        return {**describe(prefix), **_content(prefix)}

    @routes.put("/{name}", openapi_extra=json_body(PrefixContent))
    async def replace(request: Request, name: str) -> Response:
        """Register a prefix, or a new version of it."""
        salt, _ = front.tenant(request).salt, front.gate.engine()
        body = await front.body(request, PrefixContent)
        return await _store(front, request, name, body, salt, True)

    @routes.delete("/{name}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Forget a prefix and unpin its KV, which stays cached while there is room."""
        salt, engine = front.tenant(request).salt, front.gate.engine()
        removed = await engine.prefixes.remove(name, salt=salt)
        return {"id": removed.name, "object": "prefix", "deleted": True, "version": removed.version}

    return routes


async def _store(
    front: Front, request: Request, name: str, body: PrefixContent, salt: bytes, replace: bool
) -> Response:
    with front.gate.admit(1) as engine:
        adding = _add(engine, name, body, salt, replace)
        prefix = await unless_disconnected(request.receive, adding)
    if prefix is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(describe(prefix), status_code=201 if prefix.version == 1 else 200)


async def _add(engine: AsyncEngine, name: str, body: PrefixContent, salt: bytes, replace: bool) -> NamedPrefix:
    if body.content is not None:
        check_length(engine, body.content, "content")
        return await engine.prefixes.add(name, content=body.content, salt=salt, replace=replace)
    messages = [message.plain() for message in body.messages or ()]
    check_length(engine, "".join(message["content"] for message in messages), "messages")
    return await engine.prefixes.add(name, messages=messages, salt=salt, replace=replace)


def describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as JSON, without its content. `bytes` is the KV it pins; times are seconds since 1970."""
    return {
        "id": prefix.name,
        "object": "prefix",
        "name": prefix.name,
        "version": prefix.version,
        "kind": prefix.kind,
        "num_tokens": len(prefix.tokens),
        "bytes": prefix.bytes,
        "ready": prefix.ready,
        "created": int(prefix.created),
        "uses": prefix.uses,
        "hit_tokens": prefix.hit_tokens,
        "last_used": prefix.last_used,
    }


def _content(prefix: NamedPrefix) -> dict[str, Any]:
    if isinstance(prefix.content, str):
        return {"content": prefix.content}
    return {"messages": [dict(message) for message in prefix.content]}
