"""Paths that generate no text: models of all replicas, tokenization on one, removal of KV on all.

With `foreword.router.app`, `cache_api` and `prefixes_api` this is the table of all paths. A path that is not in it is refused:
replicas have paths that only their operator may call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from foreword.api.callers import credentials
from foreword.api.tenants import Tenant
from foreword.errors import BadRequest, ForewordError, NoReplica, ReplicaFailed, UnknownModel, did_you_mean
from foreword.router.auth import request_headers, response_headers
from foreword.router.client_request import decode_object
from foreword.router.replicas import CONNECTION_ERRORS, Upstream, read_whole
from foreword.router.service import Router

_DROPPED = frozenset(("kv_transfer_params", "cache_salt", "salt", "request_id"))


def add_routes(app: web.Application, router: Router) -> None:
    def authenticate(request: web.Request) -> Tenant:
        tenant = router.auth.tenant(request.headers)
        request["tenant"] = tenant.name
        return tenant

    def own(request: web.Request, purpose: str) -> Tenant:
        tenant = router.auth.check_own(request, purpose)
        request["tenant"] = tenant.name
        return tenant

    async def models(request: web.Request) -> web.Response:
        """The models of all replicas."""
        authenticate(request)
        return web.json_response(listed_models(router))

    async def model(request: web.Request) -> web.Response:
        """One model."""
        authenticate(request)
        return web.json_response(listed_models(router, request.match_info["name"]))

    async def clear_cache(request: web.Request) -> web.StreamResponse:
        """Remove the tenant's blocks from all replicas."""
        tenant = own(request, "removing cached blocks")
        if not request.query.get("cache_salt"):
            router.responses.forget(tenant.salt)
        return await erase_everywhere(router, request, tenant)

    async def stored_response(request: web.Request) -> web.Response:
        """A stored response."""
        tenant = authenticate(request)
        body = router.responses.get(tenant.salt, request.match_info["name"]).body
        return web.Response(body=body, content_type="application/json")

    async def forget_response(request: web.Request) -> web.Response:
        """Remove a stored response. Responses that continue it stay."""
        tenant, name = own(request, "removing responses"), request.match_info["name"]
        router.responses.remove(tenant.salt, name)
        return web.json_response({"id": name, "object": "response", "deleted": True})

    async def tokenize(request: web.Request) -> web.StreamResponse:
        """Tokenization, by a replica of the model."""
        tenant = authenticate(request)
        body = decode_object(await router.bodies.whole(request, router.limits()), router.limits())
        name = body.get("model")
        replicas = router.pool(name if isinstance(name, str) else None).tokenizing_replicas()
        if not replicas:
            raise NoReplica("No replica of this model can tokenize")
        path = str(replicas[0].info and replicas[0].info.tokenize_path)
        if request.path.endswith("/detokenize"):
            path = path.replace("tokenize", "detokenize")
        data = msgspec.json.encode({key: value for key, value in body.items() if key not in _DROPPED})
        return await send_to_one(router, request, tenant, replicas, path, data)

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_delete("/v1/cache", clear_cache)
    app.router.add_get("/v1/responses/{name}", stored_response)
    app.router.add_delete("/v1/responses/{name}", forget_response)
    for path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"):
        app.router.add_post(path, tokenize)


def listed_models(router: Router, name: str = "") -> dict[str, Any]:
    """The models of all replicas, or the one of this name. Raises UnknownModel."""
    cards: dict[str, dict[str, Any]] = _cards(router)
    if not name:
        return {"object": "list", "data": list(cards.values())}
    if name not in cards:
        raise UnknownModel(f"No model named {name!r} is served here{did_you_mean(name, cards)}", param="model")
    return cards[name]


def _cards(router: Router) -> dict[str, Any]:
    return {
        str(card["id"]): dict(card)
        for upstream in reversed(router.healthy())
        if upstream.info is not None
        for card in upstream.info.cards
    }


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
    router: Router, request: web.Request, tenant: Tenant, upstream: Upstream, path: str, body: bytes
) -> web.Response:
    """Send the client's request to a replica. Raises what aiohttp raises, and ReplicaFailed."""
    headers = request_headers(request.headers)
    headers.update(router.auth.headers(tenant, credentials(request.headers), upstream.kind))
    headers["x-request-id"], headers["accept-encoding"] = request["id"], "identity"
    if body:
        headers["content-type"] = "application/json"
    url = URL(upstream.url + path, encoded=True)
    limit = aiohttp.ClientTimeout(total=router.config.request_timeout)
    async with router.session.request(
        request.method, url, data=body or None, headers=headers, allow_redirects=False, timeout=limit
    ) as response:
        data = await read_whole(response)
        if 300 <= response.status < 400:
            raise ReplicaFailed(f"{upstream.url} redirects")
        answer = web.Response(body=data, status=response.status, headers=response_headers(response.headers))
    answer.headers["x-request-id"] = request["id"]
    return answer


async def send_to_one(
    router: Router, request: web.Request, tenant: Tenant, replicas: list[Upstream], path: str, body: bytes
) -> web.Response:
    """Forward a request that changes nothing to one replica, and to another one if the first does not respond."""
    problem = ""
    for upstream in replicas[: router.config.max_attempts]:
        upstream.in_flight += 1
        try:
            return await _send(router, request, tenant, upstream, path, body)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            problem = f"{upstream.url}: {type(error).__name__}"
            router.failed(upstream, problem, certain=isinstance(error, aiohttp.ClientConnectorError))
        finally:
            upstream.in_flight -= 1
    raise ReplicaFailed(f"No replica answered; the last: {problem}")


async def send_to_all(
    router: Router, request: web.Request, tenant: Tenant, replicas: list[Upstream], body: bytes
) -> web.Response:
    """Forward a request to these replicas. Returns the first failure, else the first success."""
    path = request.rel_url.raw_path
    responses = await asyncio.gather(*(send_once(router, request, tenant, one, path, body) for one in replicas))
    failed = [response for response in responses if response.status >= 400 and response.status != 404]
    succeeded = [response for response in responses if response.status < 400]
    chosen = (failed or succeeded or responses)[0]
    chosen.headers["x-foreword-replicas"] = f"{len(succeeded)} of {len(responses)}"
    return chosen


async def erase_everywhere(router: Router, request: web.Request, tenant: Tenant) -> web.Response:
    """Forward the request to every replica, also to those that take no requests now. The answer has the receipt of each, and
    why it did not come from the others. If none came, the answer is the first failure."""
    able = [one for one in router.upstreams.values() if one.kind == "foreword"]
    if request.query.get("scope", "tenant") != "tenant":  # replicas would take the router for an operator
        raise BadRequest("the cache of all tenants is cleared on each server by itself", param="scope")
    given = [one for one in request.query.getall("cache_salt", []) if one]
    salts = [one for salt in given for one in router.audit.salts.all_of(tenant.salt, salt)]
    path = str(URL("/v1/cache").with_query([("cache_salt", str(one)) for one in salts]))
    sent = (send_once(router, request, tenant, one, path, b"") for one in able)
    answers = dict(zip([one.url for one in able], await asyncio.gather(*sent, return_exceptions=True), strict=True))
    receipts: dict[str, dict[str, Any]] = {}
    unreachable = {
        one.url: "it was not reached yet" if one.info is None else "it is not a Foreword server"
        for one in router.upstreams.values()
        if one not in able
    }
    for url, answer in answers.items():
        if isinstance(answer, web.Response) and answer.status < 400:
            receipts[url] = msgspec.json.decode(answer.body if isinstance(answer.body, bytes) else b"{}")
        elif isinstance(answer, ForewordError | web.Response):
            unreachable[url] = answer.message if isinstance(answer, ForewordError) else f"HTTP {answer.status}"
        else:
            raise answer
    if not receipts:
        failed = next(iter(answers.values()), NoReplica("No replica can remove cached blocks"))
        if isinstance(failed, web.Response):
            return failed
        raise failed
    each = receipts.values()
    left, device = (sum(one.get(name, 0) for one in each) for name in ("left", "device_blocks"))
    complete = not unreachable and all(one.get("complete", not one.get("left")) for one in each)
    merged = {"what": next(iter(each))["what"], "left": left, "device_blocks": device, "complete": complete}
    done = {"x-foreword-replicas": f"{len(receipts)} of {len(router.upstreams)}"}
    return web.json_response({**merged, "unreachable": unreachable, "replicas": receipts}, headers=done)


async def send_once(
    router: Router, request: web.Request, tenant: Tenant, upstream: Upstream, path: str, body: bytes
) -> web.Response:
    """Forward a request that may change something to a replica. Raises ReplicaFailed."""
    try:
        return await _send(router, request, tenant, upstream, path, body)
    except CONNECTION_ERRORS as error:
        router.failed(upstream, f"the connection broke ({type(error).__name__})")
        raise ReplicaFailed(f"{upstream.url} did not answer; it may have executed the request. Retry it") from None
