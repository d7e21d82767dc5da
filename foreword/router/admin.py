"""The operator's API at `/v1/router`: state, replicas and decisions of the router, and changes to them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from foreword.api.dialects.decode import Body, refuse
from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, JsonBody, Meter, Query, Right, Routes
from foreword.errors import BadRequest, ConfigError
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import Upstream, clock, parse_spec
from foreword.router.router import Router

_PATH: Final = "/v1/router/"


class ReplicaBody(Body, kw_only=True):
    """Names a replica by its URL."""

    replica: str
    role: str = "both"


class RemoveQuery(Query, frozen=True, kw_only=True):
    """`DELETE /v1/router/replicas`."""

    replica: str = ""


class DecisionsQuery(Query, frozen=True, kw_only=True):
    """`GET /v1/router/decisions`: how many."""

    last: Annotated[int, Meta(ge=0)] = 100


def add_routes(routes: Routes[Handler], router: Router) -> None:
    state, operator, free = Right.STATE, Right.OPERATOR, Meter.FREE
    body = JsonBody.of(ReplicaBody, closed=True)

    @routes.add("GET", _PATH + "state", right=state, meter=free, body=NO_BODY, tag="router")
    async def show_state(call: Call) -> dict[str, Any]:
        """The state of the router and all replicas."""
        return {
            "ready": router.ready() is None,
            "draining": router.draining,
            "in_flight": sum(one.in_flight for one in router.upstreams.values()),
            "models": [_pool_state(pool) for pool in router.pools.values()],
            "replicas": [describe(router, one) for one in router.upstreams.values()],
        }

    @routes.add("GET", _PATH + "replicas", right=state, meter=free, body=NO_BODY, tag="router")
    async def replicas(call: Call) -> dict[str, Any]:
        """Health, load, known blocks and learned costs of each replica."""
        return {"object": "list", "data": [describe(router, one) for one in router.upstreams.values()]}

    @routes.add("POST", _PATH + "replicas", right=operator, meter=free, body=body, tag="router", status=201)
    async def add(call: Call) -> Answer:
        """Add a replica: `{"replica": "http://host:8000", "role": "decode"}`."""
        try:
            spec = parse_spec(call.body.replica, call.body.role)
            upstream = await router.changed("add", router.add(spec, "api"))
        except ConfigError as error:
            raise BadRequest(error.message, param="replica") from None
        return Answer.json(describe(router, upstream), 201)

    optional = JsonBody.of(ReplicaBody, optional=True, closed=True)

    @routes.add(
        "DELETE", _PATH + "replicas", right=operator, meter=free, body=optional, query=RemoveQuery, tag="router"
    )
    async def remove(call: Call) -> dict[str, Any]:
        """Remove a replica; its streams continue to their end."""
        query: RemoveQuery = call.query
        if bool(query.replica) == (call.body is not None):
            raise refuse("replica", "is required once, in the query or in the body")
        upstream = await router.changed("remove", router.remove(query.replica or call.body.replica))
        return {"replica": upstream.url, "removed": True, "in_flight": upstream.in_flight}

    @routes.add("POST", _PATH + "drain", right=operator, meter=free, body=body, tag="router")
    async def drain(call: Call) -> dict[str, Any]:
        """Send no new requests to a replica; those in flight continue."""
        return describe(router, await router.changed("drain", router.drain(call.body.replica, True)))

    @routes.add("POST", _PATH + "undrain", right=operator, meter=free, body=body, tag="router")
    async def undrain(call: Call) -> dict[str, Any]:
        """Send requests to a drained replica again."""
        return describe(router, await router.changed("undrain", router.drain(call.body.replica, False)))

    @routes.add(
        "GET", _PATH + "decisions", right=operator, meter=free, body=NO_BODY, query=DecisionsQuery, tag="router"
    )
    async def decisions(call: Call) -> dict[str, Any]:
        """The last placement decisions, newest first (`?last=100`)."""
        query: DecisionsQuery = call.query
        return {"object": "list", "data": router.decisions.last(query.last)}


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
    """A replica as JSON."""
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
            "kv_events": [source.endpoint for source in info.event_sources],
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
