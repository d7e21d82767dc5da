"""`/v1/requests` and `/v1/drain`: list running requests, migrate them, and continue requests that migrated here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from foreword.api.dialects.decode import Body
from foreword.api.front import Call, Handler
from foreword.api.routes import NO_BODY, JsonBody, Meter, Query, Right, Routes
from foreword.errors import NotFound
from foreword.process_config import ServerConfig
from foreword.server import generate_api, migration, request_notes
from foreword.server.endpoint import ServerContext, send_events
from foreword.server.job import Caller, Job
from foreword.server.prepare import formats_of
from foreword.transfer.errors import CannotMigrate


class MigrateBody(Body, kw_only=True):
    """`POST /v1/requests/{id}/migrate`."""

    to: Annotated[str, Meta(description="URL of the server that continues the request.")]


class DrainBody(Body, kw_only=True):
    """`POST /v1/drain`."""

    to: Annotated[list[str], Meta(description="URLs of servers to migrate to; --drain-to by default.")] = field(
        default_factory=list
    )


class StreamQuery(Query, frozen=True, kw_only=True):
    """`GET /v1/requests/{id}/stream`: the tokens that the client has, and what it reads."""

    start: Annotated[int, Meta(ge=0)] = field(default=0, name="from")
    format: Literal["events", "deltas"] = "events"


def add_routes(routes: Routes[Handler], context: ServerContext, config: ServerConfig) -> None:
    def visible_salt(call: Call) -> bytes | None:
        """The salt of the tenant whose requests the caller may see; None for an operator, who sees all requests."""
        return None if call.is_operator else call.tenant.salt

    def check_target(call: Call, url: str) -> None:
        """Raises Forbidden for a server that the caller may not name. An operator may name any."""
        if not call.is_operator or not config.admin_key:
            context.peers.check_url(url, "to")

    @routes.add("GET", "/v1/requests", right=Right.TENANT_OR_OPERATOR, meter=Meter.FREE, body=NO_BODY, tag="requests")
    async def listed(call: Call) -> dict[str, Any]:
        """The caller's running requests. An operator sees those of all tenants."""
        jobs = context.active.all(visible_salt(call))
        return {"object": "list", "data": [request_notes.describe(job) for job in jobs]}

    @routes.add(
        "POST",
        "/v1/requests/{name}/migrate",
        right=Right.OWNER_OR_OPERATOR,
        meter=Meter.FREE,
        body=JsonBody.of(MigrateBody, closed=True),
        tag="requests",
    )
    async def migrate(call: Call) -> dict[str, Any]:
        """Migrate a running request with its KV to the server at `to`. Its client's stream continues."""
        body: MigrateBody = call.body
        context.admission.check_loaded()
        job = context.active.find(call.names["name"], visible_salt(call))
        check_target(call, body.to)
        return await migration.migrate(context, job, body.to)

    # A server that asks for deltas charges them itself.
    @routes.add(
        "GET",
        "/v1/requests/{name}/stream",
        right=Right.TENANT,
        meter=Meter.CONTINUED,
        body=NO_BODY,
        query=StreamQuery,
        tag="requests",
    )
    async def stream(call: Call) -> None:
        """Continue the stream of a request that migrated here, after `from` tokens. `format=deltas` is for other servers."""
        name: str = call.names["name"]
        query: StreamQuery = call.query
        tenant, engine = call.tenant, context.admission.check_loaded()
        unclaimed = engine.unclaimed.find(name)
        if unclaimed is None or migration.owner_of(unclaimed.envelope) != tenant.salt:
            raise NotFound(f"no request {name!r} has migrated here and waits for its client")
        if query.start != len(unclaimed.output):
            raise CannotMigrate(f"the request migrated here after {len(unclaimed.output)} tokens, not {query.start}")
        caller = Caller.of(call.headers)
        deltas = query.format == "deltas"
        if deltas:
            # A server that asks for deltas writes the answer itself, and follows further migrations.
            caller = Caller(caller.headers, follows=True)
        formats = formats_of(engine.tokenizer, config)
        job = migration.resume(engine.tokenizer, unclaimed, formats, caller)
        if not deltas:
            job.charge = call.charge
            await send_events(call, generate_api.events(context, job), job.writer.error, config.stream_keep_alive)
            return
        job.streams = True
        await send_events(call, _deltas(context, job))

    @routes.add(
        "POST",
        "/v1/drain",
        right=Right.OPERATOR,
        meter=Meter.FREE,
        body=JsonBody.of(DrainBody, closed=True),
        tag="requests",
    )
    async def drain(call: Call) -> dict[str, Any]:
        """Refuse new requests and migrate the running ones to the servers in `to`. The server then waits to be stopped."""
        body: DrainBody = call.body
        for url in body.to:
            check_target(call, url)
        context.admission.check_loaded()
        return await migration.drain(context, body.to or list(config.drain_to))


async def _deltas(context: ServerContext, job: Job) -> AsyncGenerator[bytes, None]:
    async with aclosing(generate_api.run(context, job)) as deltas:
        async for item in deltas:
            if item is None:
                yield b""
            else:
                _, delta = item
                yield migration.delta_event(delta) if delta.moved is None else migration.moved_event(delta.moved)
