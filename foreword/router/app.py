"""The router's routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from foreword import __version__
from foreword.api.errors import CLIENT_GONE, MAX_BODY_BYTES, error_response, http_error_response
from foreword.api.request_log import log_request, request_id_from
from foreword.errors import ForewordError, ShuttingDown
from foreword.router import admin, dashboard
from foreword.router import completions as proxying
from foreword.router import passthrough as passing
from foreword.router.errors import to_aiohttp
from foreword.router.replicas import clock
from foreword.router.service import Router

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(router: Router) -> web.Application:
    """The application. `router` must have been started on the same loop."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_edge(router)])

    async def completions(request: web.Request) -> web.StreamResponse:
        return await proxying.handle(router, request, "completion")

    async def chat(request: web.Request) -> web.StreamResponse:
        return await proxying.handle(router, request, "chat")

    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.on_response_prepare.append(_sign)
    _add_probes(app, router)
    admin.add_routes(app, router)
    dashboard.install(app, router)
    passing.add_routes(app, router)
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = "foreword"


def _edge(router: Router) -> Any:
    """Outermost: the request's id, errors as JSON, one line in the log, a count."""

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        request["id"] = request_id_from(request.headers.get("x-request-id"))
        began, status = clock(), CLIENT_GONE
        router.inside += 1
        try:
            if router.draining and request.path.startswith("/v1/") and not request.path.startswith("/v1/router"):
                raise ShuttingDown("The router is shutting down and takes no new requests; retry later")
            answer = await handler(request)
            status = answer.status
        except ForewordError as error:
            answer = _refuse(router, request, error)
            status = answer.status
        except web.HTTPException as error:
            answer = to_aiohttp(http_error_response(error.status, error.reason, request.method, request.path))
            status = answer.status
        finally:
            router.inside -= 1
            _note(router, request, status, clock() - began)
        if not answer.prepared:
            answer.headers["x-request-id"] = request["id"]
        return answer

    return edge


def _refuse(router: Router, request: web.Request, error: ForewordError) -> web.Response:
    router.metrics.shed(request.get("tenant", "unknown"), error.code)
    if error.status >= 500 and not error.retry:
        logger.error("request %s: %s", request["id"], error.message)
    return to_aiohttp(error_response(error, router.retry_after()))


def _note(router: Router, request: web.Request, status: int, seconds: float) -> None:
    resource = request.match_info.route.resource
    router.metrics.response(resource.canonical if resource is not None else "unknown", status)
    log_request(request.method, request.path, status, seconds, request["id"])


def _add_probes(app: web.Application, router: Router) -> None:
    async def health(request: web.Request) -> web.Response:
        """Alive?"""
        return web.json_response({"status": "alive"})

    async def ready(request: web.Request) -> web.Response:
        """Would a request be taken?"""
        reason = router.ready()
        if reason is None:
            return web.json_response({"status": "ready"})
        body = {"status": "shutting_down" if router.draining else "not_ready", "reason": reason}
        return web.json_response(body, status=503, headers={"retry-after": "1"})

    async def metrics(request: web.Request) -> web.Response:
        """Prometheus."""
        content, media_type = router.metrics.render(request.headers.get("accept", ""))
        return web.Response(body=content, headers={"content-type": media_type})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
