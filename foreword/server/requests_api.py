"""`/v1/requests`: what runs here, moving it to another server, and going on with what moved here; `/v1/drain`."""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foreword.api.schemas import DrainBody, MoveBody
from foreword.config import ServerConfig
from foreword.errors import BadRequest, CannotMove, Forbidden, NotFound
from foreword.server import migration as moving
from foreword.server import openai
from foreword.server.endpoint import Front
from foreword.server.handoff_message import resume
from foreword.server.job import Caller, Job
from foreword.server.openapi import json_body
from foreword.server.relay import delta_event, keep_alive, moved_event
from foreword.server.stream import EventStream


def router(front: Front, config: ServerConfig) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1", tags=["requests"])

    def whose(request: Request) -> bytes | None:
        """The salt of the caller, who sees its own requests, as does a tenant for whom a router speaks; None for an operator,
        who sees all of them."""
        if _is_operator(request, config):
            return None
        tenant = front.tenant(request)
        return None if tenant.source == "none" and config.admin_key is None else tenant.salt

    def check_target(request: Request, url: str) -> None:
        """Raises Forbidden where the caller may not send this server there: it is the operator who decides that."""
        if not _is_operator(request, config):
            front.peers.check_url(url, "to")

    @routes.get("/requests")
    async def listed(request: Request) -> dict[str, Any]:
        """The caller's requests that run here; an operator sees everybody's."""
        return {"object": "list", "data": [running.plain() for running in front.in_flight.all(whose(request))]}

    @routes.post("/requests/{name}/migrate", openapi_extra=json_body(MoveBody))
    async def migrate(request: Request, name: str) -> dict[str, Any]:
        """Move a running request with its KV to the server at `to`; its client's stream goes on."""
        salt = whose(request)
        body = await front.body(request, MoveBody)
        front.gate.check_loaded()
        running = front.in_flight.find(name, salt)
        check_target(request, body.to)
        return await moving.move(front, running, body.to)

    @routes.get("/requests/{name}/stream")
    async def stream(request: Request, name: str) -> Response:
        """Go on with a request that moved here, from the token after the first `from`. `format=deltas` is for servers."""
        tenant, engine = front.tenant(request), front.gate.check_loaded()
        unclaimed = engine.unclaimed.find(name)
        if unclaimed is None or unclaimed.request.salt != tenant.salt:
            raise NotFound(f"no request {name!r} has moved here and waits to be fetched")
        begin = _number(request.query_params.get("from", "0"))
        if begin != len(unclaimed.output):
            raise CannotMove(f"the request moved here after {len(unclaimed.output)} tokens, not {begin}")
        caller = Caller.of(request.headers)
        job = resume(engine, unclaimed.request, unclaimed.output, unclaimed.envelope, caller)
        if request.query_params.get("format") == "deltas":
            # Whoever asks for deltas writes the answer itself, and follows.
            job = dataclasses.replace(job, streams=True, caller=Caller(caller.headers, follows=True))
            return EventStream(keep_alive(_deltas(front, job)))
        return EventStream(openai.events(front, job))

    @routes.post("/drain", openapi_extra=json_body(DrainBody))
    async def drain(request: Request) -> dict[str, Any]:
        """Let nobody in any more and move all requests to the servers in `to`. The server then waits to be stopped."""
        if not _is_operator(request, config):
            tenant = front.tenant(request)
            if tenant.source != "none" or config.admin_key is not None:
                raise Forbidden("draining a server takes the key of its operator (--admin-key)")
        body = await front.body(request, DrainBody)
        for url in body.to:
            check_target(request, url)
        front.gate.check_loaded()
        return await moving.drain(front, body.to or list(config.drain_to))

    return routes


def _is_operator(request: Request, config: ServerConfig) -> bool:
    if config.admin_key is None:
        return False
    scheme, _, given = request.headers.get("authorization", "").strip().partition(" ")
    right = config.admin_key.encode()
    return scheme.lower() == "bearer" and hmac.compare_digest(right, given.strip().encode("latin-1", "replace"))


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise BadRequest(f"'from' counts tokens; {text!r} is no number", param="from")
    return int(text)


async def _deltas(front: Front, job: Job) -> AsyncGenerator[bytes, None]:
    async with aclosing(openai.run(front, job)) as deltas:
        async for _, delta in deltas:
            yield delta_event(delta) if delta.moved is None else moved_event(delta.moved)
