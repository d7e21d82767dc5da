"""Paths that generate no text: models of all replicas, and tokenization on one."""

from __future__ import annotations

from typing import Any

import aiohttp
from yarl import URL

from foreword.api.front import Answer, Call, Handler
from foreword.api.request import ClientBody
from foreword.api.rights import credentials
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.errors import did_you_mean
from foreword.request_errors import NoReplica, ReplicaFailed, UnknownModel
from foreword.router.auth import request_headers, response_headers
from foreword.router.replica_body import edited, read_body
from foreword.router.replicas import CONNECTION_ERRORS, MAX_RESPONSE_BYTES, Upstream, read_whole
from foreword.router.router import Router

_DROPPED = frozenset(("kv_transfer_params", "cache_salt", "salt", "request_id"))


def add_routes(routes: Routes[Handler], router: Router) -> None:
    @routes.add("GET", "/v1/models", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="models")
    async def models(call: Call) -> dict[str, Any]:
        """The models of all replicas."""
        return listed_models(router)

    @routes.add("GET", "/v1/models/{name:path}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="models")
    async def model(call: Call) -> dict[str, Any]:
        """A model."""
        return listed_models(router, call.names["name"])

    async def tokenize(call: Call) -> Answer:
        """Tokenization, by a replica of the model."""
        body: ClientBody = call.body
        replicas = router.pool(body.text("model")).tokenizing_replicas()
        if not replicas:
            raise NoReplica("No replica of this model can tokenize")
        path = str(replicas[0].info and replicas[0].info.tokenize_path)
        if call.path.endswith("/detokenize"):
            path = path.replace("tokenize", "detokenize")
        return await send_to_one(router, call, replicas, path, edited(body, _DROPPED, {}))

    for path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"):
        add = routes.add("POST", path, right=Right.TENANT, meter=Meter.FREE, body=JsonBody(read_body), tag="models")
        add(tokenize)


def listed_models(router: Router, name: str = "") -> dict[str, Any]:
    """The models of all replicas, or the one of this name. Raises UnknownModel, and NoReplica if no replica takes requests: a
    client that lists models once would keep an empty list."""
    cards: dict[str, dict[str, Any]] = {
        str(card["id"]): dict(card)
        for upstream in reversed(router.healthy())
        if upstream.info is not None
        for card in upstream.info.cards
    }
    if not cards:
        raise NoReplica(f"No model is known now: {router.ready() or 'no replica has answered yet'}")
    if not name:
        return {"object": "list", "data": list(cards.values())}
    if name not in cards:
        raise UnknownModel(f"No model named {name!r} is served here{did_you_mean(name, cards)}", param="model")
    return cards[name]


async def send(
    router: Router,
    call: Call,
    upstream: Upstream,
    path: str,
    body: bytes,
    silence: float | None = None,
    limit: int = MAX_RESPONSE_BYTES,
) -> Answer:
    """Send the client's request to a replica. Raises what aiohttp raises, also after `silence` seconds, and ReplicaFailed."""
    headers = request_headers(call.headers)
    headers.update(router.auth.headers(call.tenant, credentials(call.headers), upstream.kind))
    headers.update({"x-request-id": call.id, "accept-encoding": "identity"})
    headers.update({"content-type": "application/json"} if body else {})
    url = URL(upstream.url + path, encoded=True)
    timeout = aiohttp.ClientTimeout(total=router.config.request_timeout, sock_read=silence)
    async with router.session.request(
        call.method, url, data=body or None, headers=headers, allow_redirects=False, timeout=timeout
    ) as response:
        data = await read_whole(response, limit)
        if 300 <= response.status < 400:
            raise ReplicaFailed(f"{upstream.url} redirects")
        return Answer(response.status, data, response_headers(response.headers))


async def send_to_one(router: Router, call: Call, replicas: list[Upstream], path: str, body: bytes) -> Answer:
    """Forward a request that changes and computes nothing to one replica, and to another one, or again, if it is silent."""
    problem, silence = "", router.config.stall_timeout
    for upstream in (replicas * 2)[: router.config.max_attempts]:
        upstream.in_flight += 1
        try:
            return await send(router, call, upstream, path, body, silence=silence)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            problem = f"{upstream.url}: {type(error).__name__}"
            router.failed(upstream, problem, certain=isinstance(error, aiohttp.ClientConnectorError))
        finally:
            upstream.in_flight -= 1
    raise ReplicaFailed(f"No replica answered; the last: {problem}")
