"""The application: all routes around one engine. `serve` runs it as a process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from foreword import __version__
from foreword.api.tenants import Tenants
from foreword.config import Config
from foreword.errors import ForewordError
from foreword.observability.metrics import PrometheusObserver
from foreword.server import cache_api, dashboard, instance_api, openai_api, requests_api
from foreword.server import errors as faults
from foreword.server import migration as moving
from foreword.server import prefixes as prefixes_api
from foreword.server.endpoint import Front
from foreword.server.limits import Gate
from foreword.server.peers import Peers
from foreword.server.requests_log import RequestsLog

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.kv_events import Source


def create_app(
    engine: AsyncEngine | Gate, registry: PrometheusObserver, config: Config, events: Source | None = None
) -> FastAPI:
    """The ASGI application.

    Args:
        engine: a loaded engine, or a gate that will be opened when the engine is loaded.
        registry: what `/metrics` shows. It must have been given to the engine as an observer.
        events: where the engine's KV events are published.

    Raises ConfigError for malformed API keys or peers.
    """
    gate = engine if isinstance(engine, Gate) else Gate(config.server.max_queue, engine)
    tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizing")
    front = Front(gate, Tenants.from_config(config.server), tokenizing, peers=Peers.from_config(config))
    app = FastAPI(title="Foreword", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(RequestsLog, counted=registry.count_response)
    app.include_router(openai_api.router(front))
    app.include_router(prefixes_api.router(front))
    app.include_router(cache_api.router(front))
    app.include_router(instance_api.router(front))
    app.include_router(requests_api.router(front, config.server))
    app.state.move_away = partial(moving.drain, front, config.server.drain_to)
    dashboard.install(app, front, registry)
    _add_probes(app, gate, registry)
    _add_sources(app, events)
    faults.install(app)
    return app


def _add_sources(app: FastAPI, events: Source | None) -> None:
    @app.get("/kv_event_sources", tags=["probes"])
    async def kv_event_sources() -> dict[str, Any]:
        """Where KV events are published, by rank; nothing if they are not (`--kv-events`)."""
        return {} if events is None else {"0": events.described()}


def _add_probes(app: FastAPI, gate: Gate, registry: PrometheusObserver) -> None:
    @app.get("/health", tags=["probes"])
    async def health() -> Response:
        """Alive? 200 from the start, also while the model is loaded; 503 only if a restart is needed."""
        failed = gate.loaded.status().failed if gate.loaded is not None else None
        if failed is not None:
            return JSONResponse({"status": "failed", "reason": failed}, 503)
        return JSONResponse({"status": "alive"})

    @app.get("/ready", tags=["probes"])
    async def ready() -> Response:
        """Does it take requests? 503 while the model is loaded and while the server shuts down."""
        try:
            engine = gate.engine()
        except ForewordError as error:
            body = {"status": error.code, "reason": error.message}
            return JSONResponse(body, 503, headers={"retry-after": "1"})
        return JSONResponse({"status": "ready", "model": engine.info.name})

    @app.get("/metrics", tags=["probes"])
    async def metrics(request: Request) -> Response:
        """Prometheus."""
        content, media_type = registry.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    @app.get("/version", tags=["probes"])
    async def show_version() -> dict[str, Any]:
        """Foreword's version."""
        return {"version": __version__}
