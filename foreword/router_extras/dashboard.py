"""The router's dashboard: its pages, and the data that they need beyond `/metrics`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any, Final

from foreword import __version__
from foreword.api.front import Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.dashboard.metric_history import MetricsHistory
from foreword.dashboard.pages import add_pages
from foreword.request_errors import Forbidden, Unauthorized
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import Upstream, clock
from foreword.router.router import Router
from foreword.router_extras.fleet_overview import (
    SharedPrefixes,
    answers_of,
    decisions_of,
    misses_of,
    of_fleet,
    prefixes_of,
)
from foreword.router_extras.replica_memory import memory_of

_SHOWN_DECISIONS: Final = 20
_SHOWN_CANDIDATES: Final = 4
_SHOWN_PREFIXES: Final = 10
_SHOWN_CAUSES: Final = 20
_SHOWN_REQUESTS: Final = 8

# How the prompts of each model began.
Shared = defaultdict[str, SharedPrefixes]


def add_routes(routes: Routes[Handler], router: Router) -> None:
    history = MetricsHistory(router.metrics.families, on_loop=True)
    router.on_serving.append(history.keep_sampling)
    shared: Shared = defaultdict(SharedPrefixes)
    router.on_placed = lambda model, *placed: shared[model].record(*placed)

    @routes.add("GET", "/ui/data/kind", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def kind(call: Call) -> dict[str, Any]:
        """The kind of page, and whether the client may see the data. Needs no key."""
        answer = {"kind": "router", "version": __version__, "welcome": True, "closed": ""}
        try:
            call.require(Right.STATE, "reading the router's state")
        except Unauthorized:
            answer["welcome"] = False
        except Forbidden as error:
            answer["closed"] = error.message
        return answer

    @routes.add("GET", "/ui/data/history", right=Right.STATE, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def show_history(call: Call) -> dict[str, Any]:
        """The metrics of the last hour."""
        return history.plain()

    @routes.add("GET", "/ui/data/now", right=Right.STATE, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def now(call: Call) -> dict[str, Any]:
        """The present state: replicas and the last decisions."""
        return _now(router, shared, decisions=call.allows(Right.OPERATOR))

    add_pages(routes)


def _now(router: Router, shared: Shared, *, decisions: bool) -> dict[str, Any]:
    problem = router.ready()
    status = "shutting_down" if router.draining else "not_ready" if problem else "ready"
    models = [pool.model for pool in router.pools.values() if pool.upstreams]
    last = decisions_of(router.decisions, _SHOWN_DECISIONS, _SHOWN_CANDIDATES) if decisions else []
    order = sorted(router.upstreams)
    return {
        "time": time.time(),
        "state": {"status": status, "reason": problem or ""},
        "subject": f"router of {', '.join(models)}" if models else "router",
        "fleet": of_fleet([one.recent for one in router.upstreams.values()]),
        "replicas": [_replica(router, router.upstreams[url]) for url in order],
        "reads_prompts": any(pool.needs_prompts for pool in router.pools.values()),
        "decisions": last,
        "prefixes": [found for pool in router.pools.values() for found in _prefixes(pool, shared[pool.model], order)]
        if decisions
        else None,
        "misses": misses_of(router.decisions, _SHOWN_CAUSES, _SHOWN_REQUESTS) if decisions else None,
    }


def _prefixes(pool: ReplicaPool, shared: SharedPrefixes, order: list[str]) -> list[dict[str, Any]]:
    more = {"model": pool.model, "replicas": len(pool.upstreams)}
    return [one | more for one in prefixes_of(shared, pool.fleet, order, _SHOWN_PREFIXES)]


def _replica(router: Router, upstream: Upstream) -> dict[str, Any]:
    """A replica as the page shows it. A fleet has many, and the page asks often."""
    pool = router.pool_of(upstream)
    replica = pool.fleet.replicas.get(upstream.url) if pool is not None else None
    waiting = list(replica.load.waiting) if replica is not None else []
    # Costs of a replica that was never used are assumed.
    learned = replica is not None and math.isfinite(replica.learned_at) and replica.cost_model.prefill_measured
    prefill = replica.cost_model.costs.prefill if replica is not None and learned else None
    device, tiers = memory_of(upstream.metrics.memory)
    return {
        "replica": upstream.url,
        "role": upstream.spec.role,
        "reason": upstream.excluded(clock()) or None,
        "drained": upstream.drained,
        "in_flight": upstream.in_flight,
        "waiting": len(waiting),
        "queued_tokens": sum(one.computed for one in waiting),
        "known_blocks": pool.fleet.directory.blocks(upstream.url) if pool is not None and replica is not None else 0,
        "kv_events": bool(upstream.info and upstream.info.event_sources),
        "speed": round(1 / prefill) if prefill else None,
        "usage": upstream.metrics.usage,
        "device": device,
        "tiers": tiers,
        **answers_of(upstream.recent),
    }
