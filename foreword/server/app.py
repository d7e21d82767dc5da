"""The ASGI application: all endpoints over one engine. `foreword.server.process` runs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword import __version__
from foreword.api.quotas import Quotas
from foreword.api.stored_responses import StoredResponses
from foreword.api.tenants import Tenants
from foreword.api.tools.detection import formats_named
from foreword.api.work_queue import WorkQueue
from foreword.config import Config, parse_bytes
from foreword.dashboard.metric_history import MetricsHistory
from foreword.errors import ForewordError
from foreword.observability.metrics import PrometheusObserver
from foreword.observability.tracing import EngineTraces
from foreword.server import (
    cache_api,
    dashboard,
    generate_api,
    instance_api,
    migration,
    model_api,
    prefixes_api,
    requests_api,
)
from foreword.server.admission import Admission
from foreword.server.endpoint import ServerContext
from foreword.server.errors import exception_handlers
from foreword.server.peers import Peers
from foreword.server.prepare import parser_names
from foreword.server.request_log import RequestLog
from foreword.server.rights import Rights
from foreword.server.routes import Routes

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.kv_events import EventSource


def create_app(
    engine: AsyncEngine | Admission,
    registry: PrometheusObserver,
    config: Config,
    events: EventSource | None = None,
    traces: EngineTraces | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        engine: a loaded engine, or an admission control that gets its engine later.
        registry: the metrics of `/metrics`. It must be an observer of the engine.
        events: where the engine's KV events are published.
        traces: of the requests. It must be an observer of the engine.

    Raises ConfigError for malformed API keys, peers or quotas, and for unknown parsers.
    """
    admission = engine if isinstance(engine, Admission) else Admission(config.server.max_queue, engine)
    tenants, peers = Tenants.from_config(config.server), Peers.from_config(config)
    formats_named(*parser_names(config.server))
    rights = Rights(tenants, config.server)
    quotas = Quotas.parse(config.server.quotas)
    responses = StoredResponses(parse_bytes(config.server.response_memory), config.server.response_ttl)
    context = ServerContext(
        admission,
        tenants,
        config.server,
        WorkQueue(),
        rights,
        quotas,
        responses,
        peers=peers,
        count_outcome=registry.count_outcome,
        traces=traces,
    )
    history = MetricsHistory(registry.families)
    routes = Routes()
    generate_api.add_routes(routes, context)
    model_api.add_routes(routes, context)
    prefixes_api.add_routes(routes, context)
    cache_api.add_routes(routes, context)
    instance_api.add_routes(routes, context)
    requests_api.add_routes(routes, context, config.server)
    dashboard.add_routes(routes, context, history)
    _add_probes(routes, admission, registry, events)
    log = Middleware(RequestLog, on_request=history.keep_sampling, count=registry.count_response)
    app = Starlette(routes=routes.table, middleware=[log], exception_handlers=exception_handlers(routes.paths))
    app.router.redirect_slashes = False
    app.state.migrate_all = partial(migration.drain, context, config.server.drain_to)
    return app


def _add_probes(routes: Routes, admission: Admission, registry: PrometheusObserver, events: EventSource | None) -> None:
    @routes.add("GET", "/health", "probes")
    async def health(request: Request) -> Response:
        """Liveness. 200 from the start, also while the model is loaded; 503 only if the server needs a restart. `quarantined`,
        if there are any, is the number of chains that are not reused because an audit found their KV to be wrong."""
        engine = admission.loaded
        failed = engine.status().failed if engine is not None else None
        if failed is not None:
            return JSONResponse({"status": "failed", "reason": failed}, 503)
        chains = len(engine.quarantine.chains) if engine is not None else 0
        return JSONResponse({"status": "alive", **({"quarantined": chains} if chains else {})})

    @routes.add("GET", "/ready", "probes")
    async def ready(request: Request) -> Response:
        """Readiness. 503 while the model is loaded and while the server shuts down."""
        try:
            engine = admission.engine()
        except ForewordError as error:
            body = {"status": error.code, "reason": error.message}
            return JSONResponse(body, 503, headers={"retry-after": "1"})
        return JSONResponse({"status": "ready", "model": engine.info.name})

    @routes.add("GET", "/metrics", "probes")
    async def metrics(request: Request) -> Response:
        """The metrics for Prometheus."""
        content, media_type = registry.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    @routes.add("GET", "/version", "probes")
    async def show_version(request: Request) -> dict[str, Any]:
        """Foreword's version."""
        return {"version": __version__}

    @routes.add("GET", "/kv_event_sources", "probes")
    async def kv_event_sources(request: Request) -> dict[str, Any]:
        """The ZeroMQ endpoints that publish KV events, by rank. Empty without `--kv-events`."""
        return {} if events is None else {"0": events.described()}

    @routes.add("GET", "/openapi.json", None)
    async def openapi(request: Request) -> dict[str, Any]:
        return routes.openapi()
