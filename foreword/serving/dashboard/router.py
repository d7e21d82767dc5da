"""The dashboard of a router: its page, and what the page needs beyond `/metrics`, for whoever may read the router's state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, FastAPI, Request

from foreword import __version__
from foreword.errors import Forbidden, Unauthorized
from foreword.serving.dashboard import pages
from foreword.serving.dashboard.history import MetricsHistory, Sampling
from foreword.serving.dashboard.replicas import NOTHING, Fill, Fills

if TYPE_CHECKING:
    from foreword.serving.router.replicas import Upstream
    from foreword.serving.router.service import Router

_SHOWN_DECISIONS: Final = 40


def install(app: FastAPI, router: Router) -> None:
    """Add `/ui` to a router's application."""
    history = MetricsHistory(router.metrics.families, on_loop=True)
    app.include_router(_data(router, history))
    app.include_router(pages.router())
    app.add_middleware(Sampling, history=history)


def _data(router: Router, history: MetricsHistory) -> APIRouter:
    routes = APIRouter(prefix="/ui/data", tags=["dashboard"])
    fills = Fills()

    def check(request: Request) -> None:
        router.callers.check_admin(request.headers.get("authorization"), changes=False)

    @routes.get("/kind")
    async def kind(request: Request) -> dict[str, Any]:
        """What this is the page of, and whether the caller may see more. Needs no key."""
        answer = {"kind": "router", "version": __version__, "welcome": True, "closed": ""}
        try:
            check(request)
        except Unauthorized:
            answer["welcome"] = False
        except Forbidden as error:
            answer["closed"] = error.message
        return answer

    @routes.get("/history")
    async def show_history(request: Request) -> dict[str, Any]:
        """The last half hour of the metrics."""
        check(request)
        return history.plain()

    @routes.get("/now")
    async def now(request: Request) -> dict[str, Any]:
        """State, replicas and the last decisions."""
        check(request)
        problem = router.ready()
        full = await fills.of([one.url for one in router.upstreams.values() if one.kind != "openai"])
        decisions = router.decisions.shown(_SHOWN_DECISIONS)
        models = [pool.model for pool in router.pools.values() if pool.upstreams]
        return {
            "time": time.time(),
            "state": {"status": "not_ready" if problem else "ready", "reason": problem or ""},
            "subject": f"router of {', '.join(models)}" if models else "router",
            "replicas": [describe(router, one, full.get(one.url, NOTHING)) for one in router.upstreams.values()],
            "decisions": [{**one, "prices": None} for one in decisions],
        }

    return routes


def describe(router: Router, upstream: Upstream, fill: Fill) -> dict[str, Any]:
    """A replica as JSON."""
    from foreword.serving.router.replicas import clock  # the router imports this module

    now = clock()
    pool = router.pools.get(upstream.model or "")
    replica = pool.fleet.replicas.get(upstream.url) if pool is not None else None
    shown: dict[str, Any] = {
        "url": upstream.url,
        "model": upstream.model,
        "kind": upstream.kind,
        "role": upstream.spec.role,
        "drained": upstream.drained,
        "excluded": upstream.excluded(now),
        "in_flight": upstream.in_flight,
        "usage": fill.usage,
        "device": fill.device,
        "tiers": fill.tiers,
        "waiting_first": 0,
        "queued_tokens": 0,
        "prefill_speed": None,
        "sends_events": False,
        "known_blocks": 0,
    }
    if pool is not None and replica is not None:
        costs = replica.learner.costs
        estimated = len(replica.estimate) if replica.estimate is not None else 0
        shown |= {
            "waiting_first": len(replica.load.waiting),
            "queued_tokens": round(replica.load.queued_tokens(now, costs.prefill)),
            "prefill_speed": 1 / costs.prefill if costs.prefill > 0 else None,
            "sends_events": replica.sends_events,
            "known_blocks": pool.fleet.directory.blocks(upstream.url) if replica.sends_events else estimated,
        }
    return shown
