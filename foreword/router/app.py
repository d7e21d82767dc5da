"""The router's front: its routes, and what it does with requests besides."""

from __future__ import annotations

from functools import partial

from foreword.api import probes
from foreword.api.front import Answer, Call, Front, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Route, Routes
from foreword.request_errors import ShuttingDown
from foreword.router import admin, completions, extras, passthrough
from foreword.router.router import Router
from foreword.router.state_metrics import RouterStateCollector


def create_front(router: Router) -> Front:
    """The front of a router that has been started on the running event loop."""
    router.metrics.add_collector(RouterStateCollector(router))
    front = router.front = Front(
        routes_of(router),
        router.auth.rights,
        router.quotas,
        router.bodies,
        router.work,
        router.metrics,
        router.limits,
        router.origins,
        router.unknown_fields,
        ready=partial(_check_ready, router),
        retry_after=router.retry_after,
        tracer=router.tracer,
        ledger=router.ledger,
        span_name="router request",
    )
    router.fronts.append(front)
    for call in router.on_serving:
        call()
    return front


def routes_of(router: Router) -> Routes[Handler]:
    """The router's table. What is not in it is refused: replicas have paths that only their operator may call."""
    routes = Routes[Handler]()
    for api in (completions, passthrough, extras, admin):
        api.add_routes(routes, router)
    _add_probes(routes, router)
    probes.add_routes(routes, router.render)
    return routes


def _check_ready(router: Router, route: Route[Handler]) -> None:
    """Raises ShuttingDown. The operator still sees the state."""
    if router.draining and route.path.startswith("/v1/") and route.right not in (Right.STATE, Right.OPERATOR):
        raise ShuttingDown("The router is shutting down and takes no new requests; retry later")


def _add_probes(routes: Routes[Handler], router: Router) -> None:
    @routes.add("GET", "/ping", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    @routes.add("POST", "/ping", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    @routes.add("GET", "/health", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def health(call: Call) -> Answer:
        """Liveness. `quarantined`, if there are any, is the number of tenants whose cached KV an audit found to be wrong."""
        tenants = router.audit.quarantined
        return Answer.json({"status": "alive", **({"quarantined": tenants} if tenants else {})})

    @routes.add("GET", "/ready", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def ready(call: Call) -> Answer:
        """Readiness: whether a request would be taken."""
        reason = router.ready()
        if reason is None:
            return Answer.json({"status": "ready"})
        body = {"status": "shutting_down" if router.draining else "not_ready", "reason": reason}
        return Answer.json(body, 503, {"retry-after": "1"})
