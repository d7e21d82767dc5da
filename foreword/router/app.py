"""The router's HTTP application: routes, and a middleware for request ids, errors and the log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from foreword import __version__
from foreword.api.dialects.registry import DIALECTS
from foreword.api.errors import CLIENT_GONE, ErrorResponse, error_response, http_error_response
from foreword.api.request import DialectName
from foreword.api.request_log import log_request, request_id_from
from foreword.errors import ForewordError, ShuttingDown
from foreword.observability.tracing import Tracer
from foreword.router import admin, cache_api, completions, dashboard, passthrough, prefixes_api
from foreword.router.client_request import PATHS
from foreword.router.replicas import clock
from foreword.router.service import Router
from foreword.router.state_metrics import RouterStateCollector

logger = logging.getLogger(__name__)

# Those that replicas need not know.
TRANSLATED: Final[tuple[DialectName, ...]] = ("responses", "messages")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(router: Router) -> web.Application:
    """The application. `router` must have been started on the same loop."""
    app = web.Application(middlewares=[_middleware(router)])

    for interface, path in PATHS.items():
        app.router.add_post(path, partial(completions.handle, router, interface))
    for name in TRANSLATED:
        app.router.add_post(DIALECTS[name].path, partial(completions.handle_translated, router, name))
    app.router.add_post("/v1/messages/count_tokens", partial(completions.count_tokens, router))
    app.on_response_prepare.append(_set_server_header)
    router.metrics.add_collector(RouterStateCollector(router))
    _add_probes(app, router)
    admin.add_routes(app, router)
    dashboard.install(app, router)
    passthrough.add_routes(app, router)
    cache_api.add_routes(app, router)
    prefixes_api.add_routes(app, router)
    return app


async def _set_server_header(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = "foreword"


def _middleware(router: Router) -> Any:
    """Sets the request id, converts errors to JSON, logs and counts the request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request["id"] = request_id_from(request.headers.get("x-request-id"))
        if router.tracer is not None:
            _begin_span(router.tracer, request)
        began, status = clock(), CLIENT_GONE
        router.active += 1
        try:
            if router.draining and request.path.startswith("/v1/") and not request.path.startswith("/v1/router"):
                raise ShuttingDown("The router is shutting down and takes no new requests; retry later")
            with router.connections.serving(request):
                response = await handler(request)
            status = response.status
        except ForewordError as error:
            response = _reject(router, request, error)
            status = response.status
        except web.HTTPException as error:
            response = _to_aiohttp(http_error_response(error.status, error.reason, request.method, request.path))
            status = response.status
        finally:
            router.active -= 1
            _count(router, request, status, clock() - began)
            if (span := request.get("span")) is not None:
                span.note({"http.response.status_code": status})
                span.end(f"status {status}" if status >= 500 else "")
        if not response.prepared:
            response.headers["x-request-id"] = request["id"]
        return response

    return middleware


def _begin_span(tracer: Tracer, request: web.Request) -> None:
    if request.method == "POST" and request.path.startswith("/v1/") and not request.path.startswith("/v1/router"):
        attributes = {"url.path": request.path, "gen_ai.request.id": request["id"]}
        request["span"] = tracer.request("router request", request.headers, attributes)


def _reject(router: Router, request: web.Request, error: ForewordError) -> web.Response:
    router.metrics.rejected(request.get("tenant", "unknown"), error.code)
    if error.status >= 500 and not error.retry:
        logger.error("request %s: %s", request["id"], error.message)
    seconds = error.retry_after or router.retry_after()
    if "dialect" in request:
        return _to_aiohttp(request["dialect"].error_response(error, seconds, request["id"]))
    return _to_aiohttp(error_response(error, seconds))


def _to_aiohttp(response: ErrorResponse) -> web.Response:
    return web.Response(body=response.body, status=response.status, headers=response.headers)


def _count(router: Router, request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    router.metrics.response(resource.canonical if resource is not None else "unknown", status)
    log_request(request.method, request.path, status, seconds, request["id"])


def _add_probes(app: web.Application, router: Router) -> None:
    async def health(request: web.Request) -> web.Response:
        """Liveness. `quarantined`, if there are any, is the number of tenants whose cached KV an audit found to be wrong."""
        tenants = len(router.audit.salts)
        return web.json_response({"status": "alive", **({"quarantined": tenants} if tenants else {})})

    async def ready(request: web.Request) -> web.Response:
        """Readiness: whether a request would be taken."""
        reason = router.ready()
        if reason is None:
            return web.json_response({"status": "ready"})
        body = {"status": "shutting_down" if router.draining else "not_ready", "reason": reason}
        return web.json_response(body, status=503, headers={"retry-after": "1"})

    async def metrics(request: web.Request) -> web.Response:
        """Metrics for Prometheus."""
        content, media_type = router.metrics.render(request.headers.get("accept", ""))
        return web.Response(body=content, headers={"content-type": media_type})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
