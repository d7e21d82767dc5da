"""`/v1/cache/*` in front of several replicas.

A verb about a prefix goes to the replicas that hold most of it, and to the one that serves its session. If none is known, it
goes to all replicas of the model. So does a release: a replica may keep a prefix whose blocks it had to give up. The answer is
that of the replica that keeps most, and has the answers of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from foreword.api.errors import error_body
from foreword.api.tenants import Tenant
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest, NoReplica, ReplicaFailed
from foreword.router.client_request import ClientRequest, decode_object
from foreword.router.passthrough import healthy, send_once
from foreword.router.replicas import Upstream, clock
from foreword.router.service import Router

# Larger bodies are parsed on a thread.
_INLINE_BYTES: Final = 128 << 10
_RANKS: Final = {"accepted": 2, "clipped": 1}


def add_routes(app: web.Application, router: Router) -> None:
    async def retained(request: web.Request) -> web.Response:
        """What the tenant keeps with cache control, and on which replicas."""
        tenant = router.auth.tenant(request.headers)
        request["tenant"] = tenant.name
        return _retained(await _ask(router, request, tenant, _able(healthy(router))))

    async def control(request: web.Request) -> web.Response:
        """Retain, pin, prefetch or release."""
        verb = request.path.rpartition("/")[2]
        own = verb in ("pin", "release")
        tenant = router.auth.check_own(request, "pinning and releasing") if own else router.auth.tenant(request.headers)
        request["tenant"] = tenant.name
        with router.quotas.admit(tenant.name, clock()):
            raw = await router.bodies.whole(request, router.limits())
            body = await _decoded(router, raw)
            given = body.get("cache_salt")
            if given is not None and not isinstance(given, str):
                raise BadRequest("cache_salt must be a string", param="cache_salt")
            body["cache_salt"] = router.audit.salts.all_of(tenant.salt, given)[-1]
            targets = await _targets(router, request, tenant, body, verb)
            return _answer(verb, targets, await _ask(router, request, tenant, list(targets), body))

    app.router.add_get("/v1/cache/retained", retained)
    for verb in ("retain", "pin", "prefetch", "release"):
        app.router.add_post(f"/v1/cache/{verb}", control)


async def _decoded(router: Router, raw: bytes) -> dict[str, Any]:
    if len(raw) <= _INLINE_BYTES:
        return decode_object(raw, router.limits())
    return await asyncio.to_thread(decode_object, raw, router.limits())


def _able(replicas: Sequence[Upstream], verb: str = "") -> list[Upstream]:
    """Foreword's servers among the replicas, and those of vLLM for a prefetch; all if there are none."""
    kinds = ("foreword", "vllm") if verb == "prefetch" else ("foreword",)
    return [one for one in replicas if one.kind in kinds] or list(replicas)


async def _targets(
    router: Router, request: web.Request, tenant: Tenant, body: Mapping[str, Any], verb: str
) -> dict[Upstream, str]:
    """The replicas that get a request, and why. Raises NoReplica, UnknownModel."""
    model = body.get("model")
    everything = body.get("all") is True
    if everything and model is None:
        return dict.fromkeys(_able(healthy(router)), "all replicas")
    pool = router.pool(model if isinstance(model, str) else None)
    able = _able([one for one in healthy(router) if one.url in pool.upstreams], verb)
    if not able:
        raise NoReplica("No replica of this model takes requests now")
    if everything or verb == "release" or not pool.needs_prompts:
        return dict.fromkeys(able, "all replicas")
    asked = _as_prompt(body)
    prompt = await router.prompts.tokenize(asked, pool.tokenizing_replicas)
    session = asked.session(request.headers.get("x-session-id"))
    name = f"{tenant.name}/{session}" if session is not None else None
    known = pool.likely_replicas(pool.query(prompt, asked.model, _salt(tenant, body), name, None))
    found = {one: f"holds {known[one.url]} tokens" for one in able if one.url in known}
    return found or dict.fromkeys(able, "all replicas: none is known to hold it")


def _salt(tenant: Tenant, body: Mapping[str, Any]) -> Salt:
    """Of the blocks that a body is about."""
    return Salt.of(tenant.salt, body["cache_salt"])


def _as_prompt(body: Mapping[str, Any]) -> ClientRequest:
    """The prefix as a request that is placed."""
    model = body.get("model")
    given = {**body, "add_generation_prompt": False}
    return ClientRequest(
        "completion" if body.get("prompt") is not None else "chat",
        b"",
        given,
        model if isinstance(model, str) else None,
        streams=False,
        single=True,
        wants_usage=False,
        wants_token_ids=False,
    )


async def _ask(
    router: Router,
    request: web.Request,
    tenant: Tenant,
    targets: Sequence[Upstream],
    body: Mapping[str, Any] | None = None,
) -> dict[Upstream, web.Response]:
    """The answers of these replicas. One that does not answer counts as an error response."""

    async def one(upstream: Upstream) -> web.Response:
        data = b""
        if body is not None:
            # Only Foreword's servers know the tenant without it.
            given = body["cache_salt"] if upstream.kind == "foreword" else _salt(tenant, body).text or None
            data = msgspec.json.encode({**body, "cache_salt": given})
        try:
            return await send_once(router, request, tenant, upstream, request.rel_url.raw_path, data)
        except ReplicaFailed as error:
            return web.json_response(error_body(error), status=error.status)

    return dict(zip(targets, await asyncio.gather(*map(one, targets)), strict=True))


def _answer(verb: str, why: Mapping[Upstream, str], answers: Mapping[Upstream, web.Response]) -> web.Response:
    """The answers of all replicas in one. A release fails if one of them does, so that the client repeats it."""
    served = {one: _body(answer) for one, answer in answers.items() if answer.status < 400}
    failed = [answer for answer in answers.values() if answer.status >= 400 and answer.status != 404]
    if not served or (verb == "release" and failed):
        return (failed or list(answers.values()))[0]
    best = max(served.values(), key=lambda body: (_RANKS.get(str(body.get("status")), 0), _tokens(body)))
    if verb == "release":
        best = {**best, "released": _merged({one: body.get("released") for one, body in served.items()})}
    replicas = [{"replica": one.url, "why": why[one], **_body(answer)} for one, answer in answers.items()]
    return _respond({**best, "replicas": replicas}, len(served), len(answers))


def _retained(answers: Mapping[Upstream, web.Response]) -> web.Response:
    served = {one: _body(answer).get("data") for one, answer in answers.items() if answer.status < 400}
    if not served:
        return next(iter(answers.values()))
    return _respond({"object": "list", "data": _merged(served)}, len(served), len(answers))


def _merged(lists: Mapping[Upstream, Any]) -> list[dict[str, Any]]:
    """Entries of several replicas, each once, with the replicas that have it."""
    found: dict[Any, dict[str, Any]] = {}
    for upstream, entries in lists.items():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                found.setdefault(entry["id"], {**entry, "replicas": []})["replicas"].append(upstream.url)
    return list(found.values())


def _respond(body: Mapping[str, Any], served: int, asked: int) -> web.Response:
    return web.json_response(body, headers={"x-foreword-replicas": f"{served} of {asked}"})


def _body(answer: web.Response) -> dict[str, Any]:
    """A replica's answer as an object; empty if it is none."""
    try:
        found = msgspec.json.decode(answer.text or "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokens(body: Mapping[str, Any]) -> int:
    found = body.get("tokens")
    return found if isinstance(found, int) else 0
