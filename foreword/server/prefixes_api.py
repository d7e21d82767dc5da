"""`/v1/prefixes`: register, list, replace and remove named prefixes. Each tenant sees its own."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword.api.bodies import NewPrefixBody, PrefixBody
from foreword.api.errors import CLIENT_GONE
from foreword.api.prefixes import PrefixEndpoints
from foreword.server.endpoint import ServerContext, check_length
from foreword.server.routes import Routes
from foreword.server.stream import unless_disconnected


def add_routes(routes: Routes, context: ServerContext) -> None:
    def endpoints(request: Request) -> PrefixEndpoints:
        salt = context.tenant(request).salt
        return PrefixEndpoints(context.admission.engine().prefixes, salt)

    @routes.add("POST", "/v1/prefixes", "prefixes", NewPrefixBody, status=201)
    async def add(request: Request) -> Response:
        """Compute a prefix, pin its blocks and give it a name."""
        found, body = endpoints(request), await context.body(request, NewPrefixBody)
        return await _add(context, request, found, body.name, body, replace=body.replace)

    @routes.add("GET", "/v1/prefixes", "prefixes")
    async def list_all(request: Request) -> dict[str, Any]:
        """All named prefixes of the caller, the bytes they pin, and the server's budget for all tenants."""
        return await endpoints(request).list()

    @routes.add("GET", "/v1/prefixes/{name}", "prefixes")
    async def show(request: Request) -> dict[str, Any]:
        """One prefix with its content."""
        return await endpoints(request).show(request.path_params["name"])

    @routes.add("PUT", "/v1/prefixes/{name}", "prefixes", PrefixBody)
    async def replace(request: Request) -> Response:
        """Register a prefix, or a new version of it."""
        found, body = endpoints(request), await context.body(request, PrefixBody)
        return await _add(context, request, found, request.path_params["name"], body, replace=True)

    @routes.add("DELETE", "/v1/prefixes/{name}", "prefixes")
    async def remove(request: Request) -> dict[str, Any]:
        """Remove a prefix and unpin its blocks. They stay cached until they are evicted."""
        return await endpoints(request).remove(request.path_params["name"])


async def _add(
    context: ServerContext,
    request: Request,
    endpoints: PrefixEndpoints,
    name: str,
    body: PrefixBody,
    *,
    replace: bool,
) -> Response:
    messages = body.plain_messages(context.limits)
    with context.admission.admit(1) as engine:
        check_length(engine, len(body.content or ""), "content")
        check_length(engine, sum(len(message["content"]) for message in messages or ()), "messages")
        adding = endpoints.add(name, body.content, messages, replace=replace)
        answer = await unless_disconnected(request.receive, adding)
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    status, prefix = answer
    return JSONResponse(prefix, status_code=status)
