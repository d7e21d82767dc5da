"""`/v1/prefixes` of the router: register, list, show and remove named prefixes. Each tenant sees its own."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import quote

import msgspec

from foreword.api.dialects import chat
from foreword.api.dialects.answer_reader import decode_object
from foreword.api.dialects.decode import Limits
from foreword.api.front import Answer, Call, Handler, Reply
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.prefixes.book import NamedPrefix
from foreword.request_errors import NoReplica, ReplicaFailed
from foreword.router.passthrough import send_to_one
from foreword.router.replicas import CONNECTION_ERRORS
from foreword.router.router import Router
from foreword.router_extras.fan_out import chosen, foreword_replicas, send_to_all
from foreword.router_extras.router_prefixes import PUBLIC_TENANT, NewPrefix, RouterPrefixes
from foreword.tasks import to_its_end
from foreword.usage import TokenUsage

_PATH = "/v1/prefixes"
_PUBLIC_PATH = "/v1/public/prefixes"
_JSON: Final = {"content-type": "application/json"}


def add_routes(routes: Routes[Handler], router: Router, prefixes: RouterPrefixes) -> None:
    body = JsonBody(_parse, NewPrefix)

    @routes.add("POST", _PATH, right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes", status=201)
    async def add(call: Call) -> Answer:
        """Register a prefix on all replicas."""
        return await to_its_end(
            _register(router, prefixes, call, call.body), f"request {call.id}: registering a prefix"
        )

    @routes.add("PUT", _PATH + "/{name}", right=Right.TENANT, meter=Meter.TOKENS, body=body, tag="prefixes")
    async def replace(call: Call) -> Answer:
        """Register a prefix, or a new version of it, on all replicas."""
        new: NewPrefix = call.body
        new.name, new.replace = call.names["name"], True
        return await to_its_end(_register(router, prefixes, call, new), f"request {call.id}: registering a prefix")

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
    async def remove(call: Call) -> Reply:
        """Remove a prefix from all replicas."""
        tenant, name = call.tenant, call.names["name"]
        known = prefixes.registry.find(tenant.name, name)
        if known is not None:
            await prefixes.remove(tenant, name)
        replicas = foreword_replicas(router)
        answer = chosen(await send_to_all(router, call, replicas, b"")) if replicas else None
        if answer is not None and not (answer.status == 404 and known is not None):
            return answer
        known = known or prefixes.registry.get(tenant.name, name)
        return {"id": name, "object": "prefix", "deleted": True, "version": known.version}

    operator: dict[str, Any] = {"right": Right.OPERATOR, "meter": Meter.FREE, "tag": "prefixes"}
    reads: dict[str, Any] = {"right": Right.TENANT, "meter": Meter.FREE, "body": NO_BODY, "tag": "prefixes"}

    @routes.add("POST", _PUBLIC_PATH, body=body, status=201, **operator)
    @routes.add("PUT", _PUBLIC_PATH + "/{name}", body=body, **operator)
    async def mark(call: Call) -> Answer:
        """Register a prefix whose blocks all tenants share, on all of Foreword's servers."""
        new: NewPrefix = call.body
        new.replace |= call.method == "PUT"
        new.name = call.names.get("name", new.name)
        prefix = prefixes.registry.make(PUBLIC_TENANT.name, new)
        answer = await to_its_end(
            _change_public(router, prefixes, "PUT", prefix), f"request {call.id}: registering a prefix"
        )
        if answer.status < 300:
            await prefixes.add(PUBLIC_TENANT, prefix, lambda tokens: None)
        return answer

    @routes.add("DELETE", _PUBLIC_PATH + "/{name}", body=NO_BODY, **operator)
    async def unmark(call: Call) -> Answer:
        """Remove such a prefix from all of Foreword's servers. Its blocks are no tenant's then."""
        name = call.names["name"]
        known = prefixes.registry.find(PUBLIC_TENANT.name, name)
        if known is not None:
            await prefixes.remove(PUBLIC_TENANT, name)
        return await _change_public(router, prefixes, "DELETE", known or NamedPrefix(name, 0, "", (), 0.0))

    @routes.add("GET", _PUBLIC_PATH, **reads)
    @routes.add("GET", _PUBLIC_PATH + "/{name}", **reads)
    async def show_public(call: Call) -> Answer:
        """The prefixes whose blocks all tenants share, as one of Foreword's servers has them; or one, with its content."""
        return await send_to_one(router, call, foreword_replicas(router), call.path, b"")


async def _register(router: Router, prefixes: RouterPrefixes, call: Call, new: NewPrefix) -> Answer:
    """Goes to its end, so that all replicas have the prefix, and its tenant pays for what each of them computes."""
    tokens = 0

    def computed(count: int) -> None:
        nonlocal tokens
        tokens += count
        call.charge(TokenUsage(tokens))

    prefix = prefixes.registry.make(call.tenant.name, new)
    replicas, answer = foreword_replicas(router), None
    if replicas:
        answers = await send_to_all(router, call, replicas, call.raw)
        for one in answers:
            computed(_tokens(one))
        answer = chosen(answers)
    if answer is None or answer.status < 300:
        computed(0)
        await prefixes.add(call.tenant, prefix, computed)
    return answer or Answer.json(_describe(prefix), 201 if prefix.version == 1 else 200)


async def _change_public(router: Router, prefixes: RouterPrefixes, method: str, prefix: NamedPrefix) -> Answer:
    """Register or remove a public prefix on all of Foreword's servers. Raises BadRequest, NoReplica, ReplicaFailed."""
    if router.auth.replica_key is None:
        raise BadRequest(
            "servers believe a router with their --router-key as its --replica-key; or mark the text on each of them"
        )
    replicas = foreword_replicas(router)
    if not replicas:
        raise NoReplica("None of Foreword's servers takes requests now. At vLLM, mark the text on one of the servers")
    path, body = f"{_PATH}/{quote(prefix.name, safe='')}", prefix.body if method == "PUT" else None
    sent = (prefixes.send(one.url, one.kind, PUBLIC_TENANT, method, path, body) for one in replicas)
    try:
        return chosen([Answer(status, data, _JSON) for status, data in await asyncio.gather(*sent)])
    except CONNECTION_ERRORS as error:
        raise ReplicaFailed(f"a server did not answer; it may have executed the request. Retry it ({error})") from None


def _describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as JSON: the fields that are known without an engine."""
    known = ("id", "object", "name", "version", "kind", "created")
    return {field: value for field, value in prefix.describe().items() if field in known}


def _tokens(answer: Answer) -> int:
    """Tokens of a prefix that a replica has registered."""
    count = decode_object(answer.body).get("num_tokens") if answer.status < 300 else None
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
