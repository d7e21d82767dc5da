"""Routes of `/v1/prefixes`: register, show, replace and remove named prefixes. Each tenant sees its own only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foreword.api.prefixes import PrefixEndpoints
from foreword.api.schemas import NewPrefix, PrefixContent
from foreword.server.endpoint import Front, check_length
from foreword.server.errors import CLIENT_GONE
from foreword.server.openapi import json_body
from foreword.server.stream import unless_disconnected


def router(front: Front) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/prefixes", tags=["prefixes"])

    def endpoints(request: Request) -> PrefixEndpoints:
        return PrefixEndpoints(front.gate.engine().prefixes, front.tenant(request).salt)

    @routes.post("", openapi_extra=json_body(NewPrefix), status_code=201)
    async def add(request: Request) -> Response:
        """Compute a prefix, pin it and give it a name."""
        found, body = endpoints(request), await front.body(request, NewPrefix)
        return await _add(front, request, found, body.name, body, replace=body.replace)

    @routes.get("")
    async def list_all(request: Request) -> dict[str, Any]:
        """All named prefixes of the caller, the bytes they pin, and the server's budget for those of all tenants."""
        return await endpoints(request).list()

    @routes.get("/{name}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """One prefix with its content."""
        return await endpoints(request).show(name)

    @routes.put("/{name}", openapi_extra=json_body(PrefixContent))
    async def replace(request: Request, name: str) -> Response:
        """Register a prefix, or a new version of it."""
        found, body = endpoints(request), await front.body(request, PrefixContent)
        return await _add(front, request, found, name, body, replace=True)

    @routes.delete("/{name}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Remove a prefix and unpin its KV, which stays cached until it is evicted."""
        return await endpoints(request).remove(name)

    return routes


async def _add(
    front: Front, request: Request, endpoints: PrefixEndpoints, name: str, body: PrefixContent, *, replace: bool
) -> Response:
    messages = None if body.messages is None else [message.plain() for message in body.messages]
    with front.gate.admit(1) as engine:
        if body.content is not None:
            check_length(engine, body.content, "content")
        check_length(engine, "".join(message["content"] for message in messages or ()), "messages")
        adding = endpoints.add(name, body.content, messages, replace=replace)
        answer = await unless_disconnected(request.receive, adding)
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    status, made = answer
    return JSONResponse(made, status_code=status)
