"""`/v1/prefixes` of the router: register, list, show and remove named prefixes. Each tenant sees its own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from foreword.api.dialects import chat
from foreword.api.dialects.decode import Limits
from foreword.api.front import Answer, Call, Handler, Reply
from foreword.api.rights import Right
from foreword.api.routes import NO_BODY, JsonBody, Meter, Routes
from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.events import TokenUsage
from foreword.prefixes.book import NamedPrefix
from foreword.router.passthrough import chosen, foreword_replicas, send_to_all, send_to_one
from foreword.router.prefix_registry import NewPrefix
from foreword.router.service import Router

_PATH = "/v1/prefixes"


def add_routes(routes: Routes[Handler], router: Router) -> None:
    body = JsonBody(_parse, NewPrefix)

    @routes.add("POST", _PATH, right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes", status=201)
    async def add(call: Call) -> Answer:
        """Register a prefix on all replicas."""
        return await asyncio.shield(asyncio.ensure_future(_register(router, call, call.body)))

    @routes.add("PUT", _PATH + "/{name}", right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes")
    async def replace(call: Call) -> Answer:
        """Register a prefix, or a new version of it, on all replicas."""
        new: NewPrefix = call.body
        new.name, new.replace = call.names["name"], True
        return await asyncio.shield(asyncio.ensure_future(_register(router, call, new)))

    @routes.add("GET", _PATH, right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def list_all(call: Call) -> Reply:
        """All named prefixes of the tenant, as one of the replicas has them."""
        if replicas := foreword_replicas(router):
            return await send_to_one(router, call, replicas, call.path, b"")
        found = [_describe(prefix) for prefix in router.prefixes.registry.of(call.tenant.name)]
        return {"object": "list", "data": found}

    @routes.add("GET", _PATH + "/{name}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def show(call: Call) -> Reply:
        """One prefix with its content."""
        if replicas := foreword_replicas(router):
            return await send_to_one(router, call, replicas, call.path, b"")
        prefix = router.prefixes.registry.get(call.tenant.name, call.names["name"])
        return {**_describe(prefix), **prefix.body}

    @routes.add("DELETE", _PATH + "/{name}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def remove(call: Call) -> Reply:
        """Remove a prefix from all replicas."""
        tenant, name = call.tenant, call.names["name"]
        known = router.prefixes.registry.find(tenant.name, name)
        if known is not None:
            await router.prefixes.remove(tenant, name)
        replicas = foreword_replicas(router)
        answer = chosen(await send_to_all(router, call, replicas, b"")) if replicas else None
        if answer is not None and not (answer.status == 404 and known is not None):
            return answer
        known = known or router.prefixes.registry.get(tenant.name, name)
        return {"id": name, "object": "prefix", "deleted": True, "version": known.version}


async def _register(router: Router, call: Call, new: NewPrefix) -> Answer:
    """Goes to its end, so that all replicas have the prefix, and its tenant pays for what each of them computes."""
    tokens = 0

    def computed(count: int) -> None:
        nonlocal tokens
        tokens += count
        call.charge(TokenUsage(tokens))

    prefix = router.prefixes.registry.make(call.tenant.name, new)
    replicas, answer = foreword_replicas(router), None
    if replicas:
        answers = await send_to_all(router, call, replicas, call.raw)
        for one in answers:
            computed(_tokens(one))
        answer = chosen(answers)
    if answer is None or answer.status < 300:
        computed(0)
        await router.prefixes.add(call.tenant, prefix, computed)
    return answer or Answer.json(_describe(prefix), 201 if prefix.version == 1 else 200)


def _describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as JSON: the fields that are known without an engine."""
    known = ("id", "object", "name", "version", "kind", "created")
    return {field: value for field, value in prefix.describe().items() if field in known}


def _tokens(answer: Answer) -> int:
    """Those of a prefix that a replica has registered."""
    try:
        found: Any = msgspec.json.decode(answer.body) if answer.status < 300 else None
    except (msgspec.DecodeError, RecursionError):
        return 0
    count = found.get("num_tokens") if isinstance(found, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _parse(raw: bytes, limits: Limits) -> NewPrefix:
    """Raises BadRequest."""
    limits.check(raw)
    try:
        new = decode_json(raw, NewPrefix)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a named prefix: {error}") from None
    if new.messages is not None:
        # Raises for what is no conversation.
        chat.parse(msgspec.json.encode({"messages": new.messages}), limits)
    return new
