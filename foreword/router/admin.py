"""The operator's API at `/v1/router`: state, replicas and decisions of the router, and changes to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from foreword.errors import BadRequest, ConfigError
from foreword.router.body import check_media_type
from foreword.router.client_request import decode_object
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import Upstream, clock, parse_spec
from foreword.router.service import Router

_MAX_DECISIONS: Final = 1000

Handler = Callable[[web.Request], Awaitable[web.Response]]


def add_routes(app: web.Application, router: Router) -> None:
    async def state(request: web.Request) -> web.Response:
        """The state of the router and all replicas."""
        return web.json_response(_state(router))

    async def replicas(request: web.Request) -> web.Response:
        """Health, load, known blocks and learned costs of each replica."""
        listed = [describe(router, one) for one in router.upstreams.values()]
        return web.json_response({"object": "list", "data": listed})

    async def add(request: web.Request) -> web.Response:
        """Add a replica: `{"replica": "http://host:8000", "role": "decode"}`."""
        body = decode_object(await request.read())
        try:
            spec = parse_spec(_text(body, "replica"), str(body.get("role", "both")))
            upstream = router.add(spec, "api")
        except ConfigError as error:
            raise BadRequest(error.message, param="replica") from None
        return web.json_response(describe(router, upstream), status=201)

    async def remove(request: web.Request) -> web.Response:
        """Remove a replica; its streams continue to their end."""
        given = request.query.get("replica")
        upstream = router.remove(given if given is not None else await named(request))
        return web.json_response({"replica": upstream.url, "removed": True, "in_flight": upstream.in_flight})

    async def drain(request: web.Request) -> web.Response:
        """Send no new requests to a replica; those in flight continue. Or send requests to a drained replica again."""
        drained = request.path.endswith("/drain")
        return web.json_response(describe(router, router.drain(await named(request), drained)))

    async def decisions(request: web.Request) -> web.Response:
        """The last placement decisions, newest first (`?last=100`)."""
        last = request.query.get("last", "100")
        if not last.isdigit():
            raise BadRequest("last: must be a number", param="last")
        return web.json_response({"object": "list", "data": router.decisions.last(min(int(last), _MAX_DECISIONS))})

    async def named(request: web.Request) -> str:
        return _text(decode_object(await request.read()), "replica")

    def add_route(method: str, path: str, handler: Handler) -> None:
        async def checked(request: web.Request) -> web.Response:
            router.auth.check_admin(request, changes=method != "GET" or path == "decisions")
            if method == "POST":
                check_media_type(request)
            return await handler(request)

        app.router.add_route(method, f"/v1/router/{path}", checked)

    add_route("GET", "state", state)
    add_route("GET", "replicas", replicas)
    add_route("POST", "replicas", add)
    add_route("DELETE", "replicas", remove)
    add_route("POST", "drain", drain)
    add_route("POST", "undrain", drain)
    add_route("GET", "decisions", decisions)


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
        "weights": pool.by_weights(),
        "queued": pool.waiting,
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
            "weights": upstream.weights,
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
