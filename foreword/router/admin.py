"""`/v1/router`: what the router knows and decided, and what an operator may change."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from foreword.errors import BadRequest, ConfigError
from foreword.router.pool import Pool
from foreword.router.replicas import Upstream, clock, parse
from foreword.router.service import Router

_MOST_SHOWN: Final = 1000


def add_routes(app: web.Application, router: Router) -> None:
    def check(request: web.Request, *, changes: bool) -> None:
        router.callers.check_admin(request.headers.get("authorization"), changes=changes)

    async def state(request: web.Request) -> web.Response:
        """Everything at a glance."""
        check(request, changes=False)
        return web.json_response(_state(router))

    async def replicas(request: web.Request) -> web.Response:
        """Each replica: health, load, what it holds as far as is known, what time costs there."""
        check(request, changes=False)
        return web.json_response(
            {"object": "list", "data": [describe(router, one) for one in router.upstreams.values()]}
        )

    async def add(request: web.Request) -> web.Response:
        """A replica comes: `{"replica": "http://host:8000", "role": "decode"}`."""
        check(request, changes=True)
        body = await _body(request)
        try:
            spec = parse(_text(body, "replica"), str(body.get("role", "both")))
            upstream = router.add(spec, "api")
        except ConfigError as error:
            raise BadRequest(error.message, param="replica") from None
        return web.json_response(describe(router, upstream), status=201)

    async def remove(request: web.Request) -> web.Response:
        """A replica goes; its streams go on to their end."""
        check(request, changes=True)
        given = request.query.get("replica")
        upstream = router.remove(given if given is not None else _text(await _body(request), "replica"))
        return web.json_response({"replica": upstream.url, "removed": True, "in_flight": upstream.in_flight})

    async def drain(request: web.Request) -> web.Response:
        """A replica takes no new requests; those in flight go on."""
        check(request, changes=True)
        return web.json_response(describe(router, router.drain(_text(await _body(request), "replica"), True)))

    async def undrain(request: web.Request) -> web.Response:
        """A drained replica takes requests again."""
        check(request, changes=True)
        return web.json_response(describe(router, router.drain(_text(await _body(request), "replica"), False)))

    async def decisions(request: web.Request) -> web.Response:
        """The last decisions and why, the newest first (`?last=100`)."""
        check(request, changes=False)
        last = request.query.get("last", "100")
        if not last.isdigit():
            raise BadRequest("last: must be a number", param="last")
        return web.json_response({"object": "list", "data": router.decisions.shown(min(int(last), _MOST_SHOWN))})

    app.router.add_get("/v1/router/state", state)
    app.router.add_get("/v1/router/replicas", replicas)
    app.router.add_post("/v1/router/replicas", add)
    app.router.add_delete("/v1/router/replicas", remove)
    app.router.add_post("/v1/router/drain", drain)
    app.router.add_post("/v1/router/undrain", undrain)
    app.router.add_get("/v1/router/decisions", decisions)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object")
    return body


def _text(body: dict[str, Any], name: str) -> str:
    found = body.get(name)
    if not isinstance(found, str) or not found.strip():
        raise BadRequest(f'{name}: must be a text, such as {{"{name}": "http://host:8000"}}', param=name)
    return found


def _state(router: Router) -> dict[str, Any]:
    return {
        "ready": router.ready() is None,
        "draining": router.draining,
        "in_flight": sum(one.in_flight for one in router.upstreams.values()),
        "models": [_pool(pool) for pool in router.pools.values()],
        "replicas": [describe(router, one) for one in router.upstreams.values()],
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "model": pool.model,
        "policy": pool.fleet.policy.name,
        "replicas": list(pool.upstreams),
        "queued": len(pool.queue),
        "sessions": len(pool.fleet.sessions),
        "sessions_moved": pool.fleet.sessions_moved,
        "directory_blocks": len(pool.fleet.directory),
        "directory_budget_blocks": pool.fleet.directory.max_blocks,
    }


def describe(router: Router, upstream: Upstream) -> dict[str, Any]:
    """One replica as JSON."""
    excluded = upstream.excluded(clock())
    facts = upstream.facts
    said: dict[str, Any] = {
        "replica": upstream.url,
        "role": upstream.spec.role,
        "source": upstream.source,
        "takes_requests": not excluded,
        "reason": excluded or None,
        "breaker": upstream.breaker.state,
        "drained": upstream.drained,
        "in_flight": upstream.in_flight,
    }
    if facts is not None:
        said |= {
            "kind": facts.kind,
            "models": list(facts.models),
            "max_model_len": facts.max_model_len,
            "block_size": facts.block_size,
            "capacity_tokens": facts.capacity_tokens,
            "transfer": facts.transfer,
            "kv_events": [endpoint for endpoint, _ in facts.sources],
        }
    pool = router.pools.get(upstream.model or "")
    if pool is not None and upstream.url in pool.fleet.replicas:
        said |= _learned(pool, upstream.url)
    return said


def _learned(pool: Pool, url: str) -> dict[str, Any]:
    replica = pool.fleet.replicas[url]
    costs, accuracy = replica.cost_model.costs, replica.accuracy
    estimated = len(replica.estimated_blocks) if replica.estimated_blocks is not None else None
    return {
        "waiting": len(replica.load.waiting),
        "running": len(replica.load.running),
        "known_blocks": pool.fleet.directory.blocks(url),
        "estimated_blocks": estimated,
        "expected_cached_tokens": accuracy.expected_tokens,
        "actual_cached_tokens": accuracy.actual_tokens,
        "costs": {
            "first_seconds": costs.first,
            "prefill_seconds_per_token": costs.prefill,
            "decode_seconds": costs.decode_base,
            "decode_seconds_per_sequence": costs.decode_each,
        },
    }
