"""`/v1/prefixes` of the router: register, list, show and remove named prefixes. Each tenant sees its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replace_fields
from typing import Any, Final
from urllib.parse import quote

import msgspec

from foreword.api.dialects import chat
from foreword.api.dialects.decode import Limits
from foreword.api.front import Answer, Call, Handler, Reply
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.prefixes.book import NamedPrefix
from foreword.router.passthrough import send_to_one
from foreword.router.replicas import Upstream
from foreword.router.router import Router
from foreword.router_extras.fan_out import Fails, FanOut, FanOutHandler, fan_out, first, foreword_replicas
from foreword.router_extras.router_prefixes import PUBLIC_TENANT, NewPrefix, RouterPrefixes
from foreword.usage import TokenUsage

_PATH = "/v1/prefixes"
_PUBLIC_PATH = "/v1/public/prefixes"
_JSON: Final = {"content-type": "application/json"}
_NO_SERVER: Final = "None of Foreword's servers takes requests now. At vLLM, mark the text on one of the servers"


def add_routes(routes: Routes[Handler], router: Router, prefixes: RouterPrefixes) -> None:
    body = JsonBody(_parse, NewPrefix)

    # It goes to its end, so that all replicas have the prefix, and its tenant pays for what each of them computes.
    change = FanOut(to=foreword_replicas, merge=first, fails=Fails.IF_ANY, to_its_end=True)

    @routes.add("POST", _PATH, right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes", status=201)
    @fan_out(router, change)
    async def add(call: Call, fan: FanOutHandler) -> Answer:
        """Register a prefix on all replicas."""
        return await _register(fan, prefixes, call, call.body)

    @routes.add("PUT", _PATH + "/{name}", right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes")
    @fan_out(router, change)
    async def replace(call: Call, fan: FanOutHandler) -> Answer:
        """Register a prefix, or a new version of it, on all replicas."""
        new: NewPrefix = call.body
        new.name, new.replace = call.names["name"], True
        return await _register(fan, prefixes, call, new)

    @routes.add("GET", _PATH, right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def list_all(call: Call) -> Reply:
        """All named prefixes of the tenant, as one of the replicas has them."""
        if replicas := foreword_replicas(router):
            return await send_to_one(router, call, replicas, call.path, b"")
        found = [_describe(prefix) for prefix in prefixes.registry.of(call.tenant.name)]
        return {"object": "list", "data": found}

    @routes.add("GET", _PATH + "/{name}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def show(call: Call) -> Reply:
        """A prefix with its content."""
        if replicas := foreword_replicas(router):
            return await send_to_one(router, call, replicas, call.path, b"")
        prefix = prefixes.registry.get(call.tenant.name, call.names["name"])
        return {**_describe(prefix), **prefix.body}

    @routes.add("DELETE", _PATH + "/{name}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    @fan_out(router, change)
    async def remove(call: Call, fan: FanOutHandler) -> Reply:
        """Remove a prefix from all replicas."""
        tenant, name = call.tenant, call.names["name"]
        known = prefixes.registry.find(tenant.name, name)
        if known is not None:
            await prefixes.remove(tenant, name)
        answers = await fan.ask(call)
        answer = answers.merged() if answers.each else None
        if answer is not None and not (answer.status == 404 and known is not None):
            return answer
        known = known or prefixes.registry.get(tenant.name, name)
        return {"id": name, "object": "prefix", "deleted": True, "version": known.version}

    public = replace_fields(change, none=_NO_SERVER)
    operator: dict[str, Any] = {"right": Right.OPERATOR, "meter": Meter.FREE, "tag": "prefixes"}
    reads: dict[str, Any] = {"right": Right.TENANT, "meter": Meter.FREE, "body": NO_BODY, "tag": "prefixes"}

    @routes.add("POST", _PUBLIC_PATH, body=body, status=201, **operator)
    @routes.add("PUT", _PUBLIC_PATH + "/{name}", body=body, **operator)
    @fan_out(router, public)
    async def mark(call: Call, fan: FanOutHandler) -> Answer:
        """Register a prefix whose blocks all tenants share, on all of Foreword's servers."""
        new: NewPrefix = call.body
        new.replace |= call.method == "PUT"
        new.name = call.names.get("name", new.name)
        prefix = prefixes.registry.make(PUBLIC_TENANT.name, new)
        answer = await _change_public(router, prefixes, call, fan, "PUT", prefix)
        if answer.status < 300:
            await prefixes.add(PUBLIC_TENANT, prefix, lambda tokens: None)
        return answer

    @routes.add("DELETE", _PUBLIC_PATH + "/{name}", body=NO_BODY, **operator)
    @fan_out(router, public)
    async def unmark(call: Call, fan: FanOutHandler) -> Answer:
        """Remove such a prefix from all of Foreword's servers. Its blocks are no tenant's then."""
        name = call.names["name"]
        known = prefixes.registry.find(PUBLIC_TENANT.name, name)
        if known is not None:
            await prefixes.remove(PUBLIC_TENANT, name)
        return await _change_public(router, prefixes, call, fan, "DELETE", known or NamedPrefix(name, 0, "", (), 0.0))

    @routes.add("GET", _PUBLIC_PATH, **reads)
    @routes.add("GET", _PUBLIC_PATH + "/{name}", **reads)
    async def show_public(call: Call) -> Answer:
        """The prefixes whose blocks all tenants share, as one of Foreword's servers has them; or one, with its content."""
        return await send_to_one(router, call, foreword_replicas(router), call.path, b"")


async def _register(fan: FanOutHandler, prefixes: RouterPrefixes, call: Call, new: NewPrefix) -> Answer:
    tokens = 0

    def computed(count: int) -> None:
        nonlocal tokens
        tokens += count
        call.charge(TokenUsage(tokens))

    prefix = prefixes.registry.make(call.tenant.name, new)
    answers = await fan.ask(call)
    for one in answers.each.values():
        computed(_tokens(one.body))
    answer = answers.merged() if answers.each else None
    if answer is None or answer.status < 300:
        computed(0)
        await prefixes.add(call.tenant, prefix, computed)
    return answer or Answer.json(_describe(prefix), 201 if prefix.version == 1 else 200)


async def _change_public(
    router: Router, prefixes: RouterPrefixes, call: Call, fan: FanOutHandler, method: str, prefix: NamedPrefix
) -> Answer:
    """Register or remove a public prefix on all of Foreword's servers. Raises BadRequest, NoReplica, ReplicaFailed."""
    if router.auth.replica_key is None:
        raise BadRequest(
            "servers believe a router with their --router-key as its --replica-key; or mark the text on each of them"
        )
    path, body = f"{_PATH}/{quote(prefix.name, safe='')}", prefix.body if method == "PUT" else None

    async def send_to(upstream: Upstream) -> Answer:
        sent = prefixes.send(upstream.url, upstream.kind, PUBLIC_TENANT, method, path, body, fan.plan.answer_bytes)
        status, data = await sent
        return Answer(status, data, _JSON)

    return (await fan.ask(call, send_to=send_to)).merged()


def _describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as JSON: the fields that are known without an engine."""
    known = ("id", "object", "name", "version", "kind", "created")
    return {field: value for field, value in prefix.describe().items() if field in known}


def _tokens(body: Mapping[str, Any]) -> int:
    """Tokens of a prefix that a replica has registered."""
    count = body.get("num_tokens")
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
