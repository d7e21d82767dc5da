"""The router's dashboard: its pages, and the data that they need beyond `/metrics`."""

from __future__ import annotations

import time
from typing import Any, Final

from aiohttp import web

from foreword import __version__
from foreword.dashboard import pages
from foreword.dashboard.metric_history import MetricsHistory
from foreword.errors import Forbidden, Unauthorized
from foreword.router.replicas import Upstream, clock
from foreword.router.service import Router

_SHOWN_DECISIONS: Final = 20
_SHOWN_CANDIDATES: Final = 4


def install(app: web.Application, router: Router) -> None:
    """Add `/ui` to a router's application."""
    history = MetricsHistory(router.metrics.families, on_loop=True)

    async def start(_: web.Application) -> None:
        history.keep_sampling()

    app.on_startup.append(start)
    _add_data(app, router, history)
    _add_pages(app)


def _add_pages(app: web.Application) -> None:
    async def page(request: web.Request) -> web.Response:
        found = pages.respond(request.match_info.get("name"), request.headers.get("if-none-match"))
        return web.Response(body=found.body, status=found.status, headers=found.headers)

    async def root(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "ui"})

    app.router.add_get("/", root)
    app.router.add_get("/ui", page)
    app.router.add_get("/ui/{name:.*}", page)


def _add_data(app: web.Application, router: Router, history: MetricsHistory) -> None:
    def check(request: web.Request) -> None:
        router.auth.check_admin(request, changes=False)

    def may_change(request: web.Request) -> bool:
        try:
            router.auth.check_admin(request, changes=True)
        except (Unauthorized, Forbidden):
            return False
        return True

    async def kind(request: web.Request) -> web.Response:
        """What the page shows, and whether the client may see the data. Needs no key."""
        answer = {"kind": "router", "version": __version__, "welcome": True, "closed": ""}
        try:
            check(request)
        except Unauthorized:
            answer["welcome"] = False
        except Forbidden as error:
            answer["closed"] = error.message
        return web.json_response(answer)

    async def show_history(request: web.Request) -> web.Response:
        """The metrics of the last half hour."""
        check(request)
        return web.json_response(history.plain())

    async def now(request: web.Request) -> web.Response:
        """The present state: replicas and the last decisions."""
        check(request)
        return web.json_response(_now(router, decisions=may_change(request)))

    app.router.add_get("/ui/data/kind", kind)
    app.router.add_get("/ui/data/history", show_history)
    app.router.add_get("/ui/data/now", now)


def _now(router: Router, *, decisions: bool) -> dict[str, Any]:
    problem = router.ready()
    status = "shutting_down" if router.draining else "not_ready" if problem else "ready"
    models = [pool.model for pool in router.pools.values() if pool.upstreams]
    last = router.decisions.overview(_SHOWN_DECISIONS, _SHOWN_CANDIDATES) if decisions else []
    return {
        "time": time.time(),
        "state": {"status": status, "reason": problem or ""},
        "subject": f"router of {', '.join(models)}" if models else "router",
        "replicas": [_replica(router, one) for one in router.upstreams.values()],
        "decisions": last,
    }


def _replica(router: Router, upstream: Upstream) -> dict[str, Any]:
    """What the page shows of a replica. A fleet has many, and the page asks often."""
    pool = router.pool_of(upstream)
    replica = pool.fleet.replicas.get(upstream.url) if pool is not None else None
    waiting = list(replica.load.waiting) if replica is not None else []
    prefill = replica.cost_model.costs.prefill if replica is not None else 0.0
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
        "speed": round(1 / prefill) if prefill > 0 else None,
        "usage": upstream.metrics.usage,
        "device": upstream.metrics.device,
        "tiers": upstream.metrics.tiers,
    }
