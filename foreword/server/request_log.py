"""ASGI middleware: request ids, one log line and one count per request."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.api.request_log import log_request, request_id_from


class RequestLog:
    """Takes the request id from `X-Request-Id` or draws one, and returns it in the same header.

    Args:
        on_request: called before each request.
        count: called after each response with the route's path (not the URL: their number has no bound) and the status.
    """

    def __init__(self, app: ASGIApp, on_request: Callable[[], None], count: Callable[[str, int], None]) -> None:
        self._app = app
        self._on_request = on_request
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._on_request()
        request_id = request_id_from(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # An unexpected exception is answered with status 500 by the outermost middleware, after this.
            status = status or 500
            self._count(getattr(scope.get("route"), "path", "unknown"), status)
            log_request(scope["method"], scope["path"], status, time.monotonic() - started, request_id)
