"""`/v1/requests` and `/v1/drain`: list running requests, migrate them, and continue requests that migrated here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foreword.api.bodies import DrainBody, MigrateBody
from foreword.config import ServerConfig
from foreword.errors import BadRequest, CannotMigrate, NotFound
from foreword.server import active_requests, generation, migration, migration_message
from foreword.server.endpoint import ServerContext
from foreword.server.job import Caller, Job
from foreword.server.prepare import formats_of
from foreword.server.relay import delta_event, moved_event
from foreword.server.routes import Routes
from foreword.server.stream import EventStream


def add_routes(routes: Routes, context: ServerContext, config: ServerConfig) -> None:
    def visible_salt(request: Request) -> bytes | None:
        """The salt of the tenant whose requests the caller may see; None for an operator, who sees all requests."""
        return None if context.rights.is_operator(request) else context.tenant(request).salt

    def check_target(request: Request, url: str) -> None:
        """Raises Forbidden for a server that the caller may not name. An operator may name any."""
        if not context.rights.is_operator(request) or not config.admin_key:
            context.peers.check_url(url, "to")

    @routes.add("GET", "/v1/requests", "requests")
    async def listed(request: Request) -> dict[str, Any]:
        """The caller's running requests. An operator sees those of all tenants."""
        jobs = context.active.all(visible_salt(request))
        return {"object": "list", "data": [active_requests.describe(job) for job in jobs]}

    @routes.add("POST", "/v1/requests/{name}/migrate", "requests", MigrateBody)
    async def migrate(request: Request) -> dict[str, Any]:
        """Migrate a running request with its KV to the server at `to`. Its client's stream continues."""
        salt = visible_salt(request)
        if salt is not None:
            context.rights.check_own(request, "migrating requests")
        body = await context.body(request, MigrateBody)
        context.admission.check_loaded()
        job = context.active.find(request.path_params["name"], salt)
        check_target(request, body.to)
        return await migration.migrate(context, job, body.to)

    @routes.add("GET", "/v1/requests/{name}/stream", "requests")
    async def stream(request: Request) -> Response:
        """Continue the stream of a request that migrated here, after `from` tokens. `format=deltas` is for other servers."""
        name = request.path_params["name"]
        tenant, engine = context.tenant(request), context.admission.check_loaded()
        unclaimed = engine.unclaimed.find(name)
        if unclaimed is None or migration_message.owner(unclaimed.envelope) != tenant.salt:
            raise NotFound(f"no request {name!r} has migrated here and waits for its client")
        start = _number(request.query_params.get("from", "0"))
        if start != len(unclaimed.output):
            raise CannotMigrate(f"the request migrated here after {len(unclaimed.output)} tokens, not {start}")
        caller = Caller.of(request.headers)
        deltas = request.query_params.get("format") == "deltas"
        if deltas:
            # A server that asks for deltas writes the answer itself, and follows further migrations.
            caller = Caller(caller.headers, follows=True)
        formats = formats_of(engine.tokenizer, config)
        job = migration_message.resume(engine.tokenizer, unclaimed, formats, caller)
        if not deltas:
            return EventStream(generation.events(context, job), job.writer.error, config.stream_keep_alive)
        job.streams = True
        return EventStream(_deltas(context, job))

    @routes.add("POST", "/v1/drain", "requests", DrainBody)
    async def drain(request: Request) -> dict[str, Any]:
        """Refuse new requests and migrate the running ones to the servers in `to`. The server then waits to be stopped."""
        context.rights.check_operator(request, "draining a server")
        body = await context.body(request, DrainBody)
        for url in body.to:
            check_target(request, url)
        context.admission.check_loaded()
        return await migration.drain(context, body.to or list(config.drain_to))


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise BadRequest(f"from: must be a number of tokens, not {text!r}", param="from")
    return int(text)


async def _deltas(context: ServerContext, job: Job) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.run(context, job)) as deltas:
        async for item in deltas:
            if item is None:
                yield b""
            else:
                _, delta = item
                yield delta_event(delta) if delta.moved is None else moved_event(delta.moved)
