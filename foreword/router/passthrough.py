"""Paths that are not placed: models from all replicas together, named prefixes to all, anything else to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from foreword.api.tenants import Tenant
from foreword.errors import NoReplica, ReplicaFailed, UnknownModel, did_you_mean
from foreword.router import auth as tenancy
from foreword.router.replicas import LOST, Upstream
from foreword.router.service import Router


def add_routes(app: web.Application, router: Router) -> None:
    async def models(request: web.Request) -> web.Response:
        """The models of all replicas."""
        router.callers.tenant(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": list(_cards(router).values())})

    async def model(request: web.Request) -> web.Response:
        """One model."""
        router.callers.tenant(request.headers.get("authorization"))
        name, cards = request.match_info["name"], _cards(router)
        if name not in cards:
            raise UnknownModel(f"No model named {name!r} is served here{did_you_mean(name, cards)}", param="model")
        return web.json_response(cards[name])

    async def to_all(request: web.Request) -> web.StreamResponse:
        """Each replica keeps its own: what changes goes to all, what reads goes to one."""
        tenant = router.callers.tenant(request.headers.get("authorization"))
        if request.method in ("GET", "HEAD"):
            return await _to_one(router, request, tenant, foreword=True)
        return await _to_all(router, request, tenant)

    async def to_one(request: web.Request) -> web.StreamResponse:
        """Everything else."""
        tenant = router.callers.tenant(request.headers.get("authorization"))
        return await _to_one(router, request, tenant)

    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    for path in ("/v1/prefixes", "/v1/prefixes/{name}", "/v1/cache"):
        app.router.add_route("*", path, to_all)
    for path in ("/tokenize", "/detokenize", "/v1/{path:.+}"):
        app.router.add_route("*", path, to_one)


def _cards(router: Router) -> dict[str, Any]:
    return {
        str(card["id"]): dict(card)
        for upstream in reversed(router.healthy())
        if upstream.facts is not None
        for card in upstream.facts.cards
    }


def _headers(router: Router, request: web.Request, tenant: Tenant, upstream: Upstream) -> CIMultiDict[str]:
    headers = tenancy.forwarded(request.headers)
    headers.update(router.callers.headers(tenant, request.headers.get("authorization"), upstream.kind))
    headers["x-request-id"] = request["id"]
    if "accept-encoding" in request.headers:
        headers["accept-encoding"] = request.headers["accept-encoding"]
    return headers


def _wanted(router: Router, body: bytes) -> list[Upstream]:
    """Replicas that serve the model which the body names, the one with least to do first."""
    found = list(router.healthy())
    if not found:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    try:
        decoded = msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        return found
    name = decoded.get("model") if isinstance(decoded, dict) else None
    serving = [one for one in found if one.facts and name in one.facts.models]
    return serving or found


async def _to_one(
    router: Router, request: web.Request, tenant: Tenant, *, foreword: bool = False
) -> web.StreamResponse:
    body = await request.read()
    candidates = _wanted(router, body)
    if foreword:
        candidates = [one for one in candidates if one.kind != "openai"] or candidates
    problem = ""
    for upstream in candidates[: router.config.max_attempts]:
        upstream.in_flight += 1
        try:
            response = await router.session.request(
                request.method,
                URL(upstream.url + request.rel_url.raw_path_qs, encoded=True),
                data=body or None,
                headers=_headers(router, request, tenant, upstream),
                allow_redirects=False,
            )
        except LOST as error:
            # Nothing came back, so nothing is doubled for the client.
            problem = f"{upstream.url}: {type(error).__name__}"
            router.failed(upstream, problem, certain=isinstance(error, aiohttp.ClientConnectorError))
            continue
        else:
            return await _copy(request, response)
        finally:
            upstream.in_flight -= 1
    raise ReplicaFailed(f"No replica answered; the last: {problem}")


async def _copy(request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
    """The replica's response, piece by piece."""
    try:
        out = web.StreamResponse(status=response.status, headers=tenancy.returned(response.headers))
        out.headers["x-request-id"] = request["id"]
        await out.prepare(request)
        async for piece in _pieces(response):
            await out.write(piece)
        await out.write_eof()
        return out
    finally:
        response.close()


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except LOST as error:
        # The client learns it from the missing end: there is no other way to say it by now.
        raise ConnectionResetError("the replica broke off") from error


async def _to_all(router: Router, request: web.Request, tenant: Tenant) -> web.Response:
    """To every replica that has such a thing. The first failure is the answer, else the first success."""
    body = await request.read()
    replicas = [one for one in router.healthy() if one.kind != "openai"] or list(router.healthy())
    if not replicas:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    answers = await asyncio.gather(*(_ask(router, request, tenant, one, body) for one in replicas))
    failed = [answer for answer in answers if answer.status >= 400 and answer.status != 404]
    good = [answer for answer in answers if answer.status < 400]
    chosen = (failed or good or answers)[0]
    chosen.headers["x-foreword-replicas"] = f"{len(good)} of {len(answers)}"
    return chosen


async def _ask(router: Router, request: web.Request, tenant: Tenant, upstream: Upstream, body: bytes) -> web.Response:
    url = URL(upstream.url + request.rel_url.raw_path_qs, encoded=True)
    headers = _headers(router, request, tenant, upstream)
    try:
        async with router.session.request(request.method, url, data=body or None, headers=headers) as response:
            data = await response.read()
            return web.Response(body=data, status=response.status, headers=tenancy.returned(response.headers))
    except LOST as error:
        router.failed(upstream, f"the connection broke ({type(error).__name__})")
        raise ReplicaFailed(
            f"{upstream.url} did not answer, so it is not known whether it did this; try again"
        ) from None
