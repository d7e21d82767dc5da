"""Paths without placement: the models of all replicas, named prefixes on all replicas, anything else on one replica."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from foreword.api.tenants import Tenant
from foreword.errors import NoReplica, ReplicaFailed, UnknownModel, did_you_mean
from foreword.router.auth import request_headers, response_headers
from foreword.router.replicas import CONNECTION_ERRORS, Upstream
from foreword.router.service import Router


def add_routes(app: web.Application, router: Router) -> None:
    def authenticate(request: web.Request) -> Tenant:
        return router.auth.tenant(request.headers.get("authorization"))

    async def models(request: web.Request) -> web.Response:
        """The models of all replicas."""
        authenticate(request)
        return web.json_response({"object": "list", "data": list(_cards(router).values())})

    async def model(request: web.Request) -> web.Response:
        """One model."""
        authenticate(request)
        name, cards = request.match_info["name"], _cards(router)
        if name not in cards:
            raise UnknownModel(f"No model named {name!r} is served here{did_you_mean(name, cards)}", param="model")
        return web.json_response(cards[name])

    async def on_all(request: web.Request) -> web.StreamResponse:
        """State that each replica has: changes go to all replicas, reads to one."""
        tenant = authenticate(request)
        if request.method in ("GET", "HEAD"):
            return await _send_to_one(router, request, tenant, only_foreword=True)
        return await _send_to_all(router, request, tenant)

    async def on_one(request: web.Request) -> web.StreamResponse:
        """Any other path."""
        return await _send_to_one(router, request, authenticate(request))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    for path in ("/v1/prefixes", "/v1/prefixes/{name}", "/v1/cache"):
        app.router.add_route("*", path, on_all)
    for path in ("/tokenize", "/detokenize", "/v1/{path:.+}"):
        app.router.add_route("*", path, on_one)


def _cards(router: Router) -> dict[str, Any]:
    return {
        str(card["id"]): dict(card)
        for upstream in reversed(router.healthy())
        if upstream.info is not None
        for card in upstream.info.cards
    }


def _healthy(router: Router) -> list[Upstream]:
    """Replicas that take requests, the least loaded first. Raises NoReplica if there are none."""
    found = router.healthy()
    if not found:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    return found


def _with_prefixes(replicas: list[Upstream]) -> list[Upstream]:
    """Those that may have named prefixes, or all if none may."""
    return [one for one in replicas if one.kind != "openai"] or replicas


def _serving_model(replicas: list[Upstream], body: bytes) -> list[Upstream]:
    """Those that serve the model named in the body, or all if none does."""
    try:
        decoded = msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        return replicas
    name = decoded.get("model") if isinstance(decoded, dict) else None
    return [one for one in replicas if one.info and name in one.info.models] or replicas


async def _send(
    router: Router, request: web.Request, tenant: Tenant, upstream: Upstream, body: bytes
) -> aiohttp.ClientResponse:
    """Send the client's request to a replica. Returns the head of the response. Raises what aiohttp raises."""
    headers = request_headers(request.headers)
    headers.update(router.auth.headers(tenant, request.headers.get("authorization"), upstream.kind))
    headers["x-request-id"] = request["id"]
    if "accept-encoding" in request.headers:
        headers["accept-encoding"] = request.headers["accept-encoding"]
    url = URL(upstream.url + request.rel_url.raw_path_qs, encoded=True)
    return await router.session.request(request.method, url, data=body or None, headers=headers, allow_redirects=False)


async def _send_to_one(
    router: Router, request: web.Request, tenant: Tenant, *, only_foreword: bool = False
) -> web.StreamResponse:
    """Forward a request to one replica, and to another one if the first does not respond."""
    body = await request.read()
    candidates = _serving_model(_healthy(router), body)
    if only_foreword:
        candidates = _with_prefixes(candidates)
    problem = ""
    for upstream in candidates[: router.config.max_attempts]:
        upstream.in_flight += 1
        try:
            response = await _send(router, request, tenant, upstream, body)
        except CONNECTION_ERRORS as error:
            problem = f"{upstream.url}: {type(error).__name__}"
            router.failed(upstream, problem, certain=isinstance(error, aiohttp.ClientConnectorError))
        else:
            return await _copy(request, response)
        finally:
            upstream.in_flight -= 1
    raise ReplicaFailed(f"No replica answered; the last: {problem}")


async def _copy(request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
    """Copy a replica's response to the client as it arrives."""
    try:
        out = web.StreamResponse(status=response.status, headers=response_headers(response.headers))
        out.headers["x-request-id"] = request["id"]
        await out.prepare(request)
        while piece := await _next_piece(response):
            await out.write(piece)
        await out.write_eof()
        return out
    finally:
        response.close()


async def _next_piece(response: aiohttp.ClientResponse) -> bytes:
    """The next part of the body; empty at its end."""
    try:
        return await response.content.readany()
    except CONNECTION_ERRORS as error:
        # The head was sent: a cut connection is the only way to report the error.
        raise ConnectionResetError("the replica broke off") from error


async def _send_to_all(router: Router, request: web.Request, tenant: Tenant) -> web.Response:
    """Forward a request to every replica that has named prefixes. Returns the first failure, else the first success."""
    body = await request.read()
    replicas = _with_prefixes(_healthy(router))
    responses = await asyncio.gather(*(_send_whole(router, request, tenant, one, body) for one in replicas))
    failed = [response for response in responses if response.status >= 400 and response.status != 404]
    succeeded = [response for response in responses if response.status < 400]
    chosen = (failed or succeeded or responses)[0]
    chosen.headers["x-foreword-replicas"] = f"{len(succeeded)} of {len(responses)}"
    return chosen


async def _send_whole(
    router: Router, request: web.Request, tenant: Tenant, upstream: Upstream, body: bytes
) -> web.Response:
    try:
        async with await _send(router, request, tenant, upstream, body) as response:
            data = await response.read()
            return web.Response(body=data, status=response.status, headers=response_headers(response.headers))
    except CONNECTION_ERRORS as error:
        router.failed(upstream, f"the connection broke ({type(error).__name__})")
        raise ReplicaFailed(f"{upstream.url} did not answer; it may have executed the request. Retry it") from None
