"""The operator's API at `/v1/router`: state, replicas and decisions of the router, and changes to them."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from foreword.errors import BadRequest, ConfigError
from foreword.router.client_request import decode_object
from foreword.router.pool import ReplicaPool
from foreword.router.replicas import Upstream, clock, parse_spec
from foreword.router.service import Router

_MAX_DECISIONS: Final = 1000


def add_routes(app: web.Application, router: Router) -> None:
    def check(request: web.Request, *, changes: bool) -> None:
        router.auth.check_admin(request.headers.get("authorization"), changes=changes)

    async def state(request: web.Request) -> web.Response:
        """The state of the router and all replicas."""
        check(request, changes=False)
        return web.json_response(_state(router))

    async def replicas(request: web.Request) -> web.Response:
        """Health, load, known blocks and learned costs of each replica."""
        check(request, changes=False)
        return web.json_response(
            {"object": "list", "data": [describe(router, one) for one in router.upstreams.values()]}
        )

    async def add(request: web.Request) -> web.Response:
        """Add a replica: `{"replica": "http://host:8000", "role": "decode"}`."""
        check(request, changes=True)
        body = decode_object(await request.read())
        try:
            spec = parse_spec(_text(body, "replica"), str(body.get("role", "both")))
            upstream = router.add(spec, "api")
        except ConfigError as error:
            raise BadRequest(error.message, param="replica") from None
        return web.json_response(describe(router, upstream), status=201)

    async def remove(request: web.Request) -> web.Response:
        """Remove a replica; its streams continue to their end."""
        check(request, changes=True)
        given = request.query.get("replica")
        upstream = router.remove(given if given is not None else _text(decode_object(await request.read()), "replica"))
        return web.json_response({"replica": upstream.url, "removed": True, "in_flight": upstream.in_flight})

    async def drain(request: web.Request) -> web.Response:
        """Send no new requests to a replica; those in flight continue."""
        check(request, changes=True)
        return web.json_response(
            describe(router, router.drain(_text(decode_object(await request.read()), "replica"), True))
        )

    async def undrain(request: web.Request) -> web.Response:
        """Send requests to a drained replica again."""
        check(request, changes=True)
        return web.json_response(
            describe(router, router.drain(_text(decode_object(await request.read()), "replica"), False))
        )

    async def decisions(request: web.Request) -> web.Response:
        """The last placement decisions, newest first (`?last=100`)."""
        check(request, changes=False)
        last = request.query.get("last", "100")
        if not last.isdigit():
            raise BadRequest("last: must be a number", param="last")
        return web.json_response({"object": "list", "data": router.decisions.last(min(int(last), _MAX_DECISIONS))})

    app.router.add_get("/v1/router/state", state)
    app.router.add_get("/v1/router/replicas", replicas)
    app.router.add_post("/v1/router/replicas", add)
    app.router.add_delete("/v1/router/replicas", remove)
    app.router.add_post("/v1/router/drain", drain)
    app.router.add_post("/v1/router/undrain", undrain)
    app.router.add_get("/v1/router/decisions", decisions)


def _text(body: dict[str, Any], name: str) -> str:
    found = body.get(name)
    if not isinstance(found, str) or not found.strip():
        raise BadRequest(f'{name}: must be a string, such as {{"{name}": "http://host:8000"}}', param=name)
    return found


def _state(router: Router) -> dict[str, Any]:
    return {
        "ready": router.ready() is None,
        "draining": router.draining,
        "in_flight": sum(one.in_flight for one in router.upstreams.values()),
        "models": [_pool_state(pool) for pool in router.pools.values()],
        "replicas": [describe(router, one) for one in router.upstreams.values()],
    }


def _pool_state(pool: ReplicaPool) -> dict[str, Any]:
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
    info = upstream.info
    described: dict[str, Any] = {
        "replica": upstream.url,
        "role": upstream.spec.role,
        "source": upstream.source,
        "takes_requests": not excluded,
        "reason": excluded or None,
        "breaker": upstream.breaker.state,
        "drained": upstream.drained,
        "in_flight": upstream.in_flight,
    }
    if info is not None:
        described |= {
            "kind": info.kind,
            "models": list(info.models),
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "capacity_tokens": info.capacity_tokens,
            "transfer": info.transfer,
            "kv_events": [endpoint for endpoint, _ in info.event_sources],
        }
    pool = router.pool_of(upstream)
    if pool is not None and upstream.url in pool.fleet.replicas:
        described |= _placement_state(pool, upstream.url)
    return described


def _placement_state(pool: ReplicaPool, url: str) -> dict[str, Any]:
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
