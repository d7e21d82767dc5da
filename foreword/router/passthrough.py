"""Paths that generate no text: models of all replicas, tokenization on one, removal of KV on all."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from yarl import URL

from foreword.api.front import Answer, Call, Handler
from foreword.api.request import ClientBody
from foreword.api.rights import credentials
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.errors import NoReplica, ReplicaFailed, UnknownModel, did_you_mean
from foreword.router.auth import request_headers, response_headers
from foreword.router.replica_body import edited, read_body
from foreword.router.replicas import CONNECTION_ERRORS, Upstream, read_whole
from foreword.router.service import Router

_DROPPED = frozenset(("kv_transfer_params", "cache_salt", "salt", "request_id"))


def add_routes(routes: Routes[Handler], router: Router) -> None:
    free = Meter.FREE

    @routes.add("GET", "/v1/models", right=Right.TENANT, meter=free, body=NO_BODY, tag="models")
    async def models(call: Call) -> dict[str, Any]:
        """The models of all replicas."""
        return listed_models(router)

    @routes.add("GET", "/v1/models/{name:path}", right=Right.TENANT, meter=free, body=NO_BODY, tag="models")
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
        add = routes.add("POST", path, right=Right.TENANT, meter=free, body=JsonBody(read_body), tag="models")
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


def healthy(router: Router) -> list[Upstream]:
    """Replicas that take requests, the least loaded first. Raises NoReplica if there are none."""
    found = router.healthy()
    if not found:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    return found


def foreword_replicas(router: Router) -> list[Upstream]:
    """Foreword's servers among the replicas that take requests, the least loaded first."""
    return [one for one in router.healthy() if one.kind == "foreword"]


async def _send(
    router: Router, call: Call, upstream: Upstream, path: str, body: bytes, *, silence: float | None = None
) -> Answer:
    """Send the client's request to a replica. Raises what aiohttp raises, also after `silence` seconds, and ReplicaFailed."""
    headers = request_headers(call.headers)
    headers.update(router.auth.headers(call.tenant, credentials(call.headers), upstream.kind))
    headers["x-request-id"], headers["accept-encoding"] = call.id, "identity"
    if body:
        headers["content-type"] = "application/json"
    url = URL(upstream.url + path, encoded=True)
    limit = aiohttp.ClientTimeout(total=router.config.request_timeout, sock_read=silence)
    async with router.session.request(
        call.method, url, data=body or None, headers=headers, allow_redirects=False, timeout=limit
    ) as response:
        data = await read_whole(response)
        if 300 <= response.status < 400:
            raise ReplicaFailed(f"{upstream.url} redirects")
        return Answer(response.status, data, response_headers(response.headers))


async def send_to_one(router: Router, call: Call, replicas: list[Upstream], path: str, body: bytes) -> Answer:
    """Forward a request that changes and computes nothing to one replica, and to another one, or again, if it is silent."""
    problem, silence = "", router.config.stall_timeout
    for upstream in (replicas * 2)[: router.config.max_attempts]:
        upstream.in_flight += 1
        try:
            return await _send(router, call, upstream, path, body, silence=silence)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            problem = f"{upstream.url}: {type(error).__name__}"
            router.failed(upstream, problem, certain=isinstance(error, aiohttp.ClientConnectorError))
        finally:
            upstream.in_flight -= 1
    raise ReplicaFailed(f"No replica answered; the last: {problem}")


async def send_to_all(router: Router, call: Call, replicas: list[Upstream], body: bytes) -> list[Answer]:
    """Forward a request to these replicas."""
    return await asyncio.gather(*(send_once(router, call, one, call.path, body) for one in replicas))


def chosen(answers: list[Answer]) -> Answer:
    """The answer that counts: of several the first failure, else the first success."""
    failed = [answer for answer in answers if answer.status >= 400 and answer.status != 404]
    succeeded = [answer for answer in answers if answer.status < 400]
    one = (failed or succeeded or answers)[0]
    counts = {"x-foreword-replicas": f"{len(succeeded)} of {len(answers)}"}
    return Answer(one.status, one.body, {**one.headers, **counts})


async def send_once(router: Router, call: Call, upstream: Upstream, path: str, body: bytes) -> Answer:
    """Forward a request that may change something to a replica. Raises ReplicaFailed."""
    try:
        return await _send(router, call, upstream, path, body)
    except CONNECTION_ERRORS as error:
        router.failed(upstream, f"the connection broke ({type(error).__name__})")
        raise ReplicaFailed(f"{upstream.url} did not answer; it may have executed the request. Retry it") from None
