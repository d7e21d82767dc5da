"""One line per request, and its id: taken from `X-Request-Id` or drawn, and returned in the same header."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_VALID_ID = re.compile(r"[!-~]{1,128}")
_QUIET = ("/health", "/ready", "/metrics")

# Told of each response: the route's path (not the URL, of which there is no end) and the status.
Counted = Callable[[str, int], None]


class RequestsLog:
    """ASGI middleware. It sets `request.state.request_id`."""

    def __init__(self, app: ASGIApp, counted: Counted) -> None:
        self._app = app
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # A route that failed unforeseen is answered 500 further out, after this.
            self._finish(scope, request_id, status or 500, time.monotonic() - began)

    def _finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self._counted(route, status)
        quiet = scope["path"] in _QUIET or scope["path"].startswith("/ui")
        level = logging.DEBUG if quiet else logging.INFO
        path = scope["path"].encode("ascii", "backslashreplace").decode("ascii")
        logger.log(level, "%s %s %d %.3f s [%s]", scope["method"], path, status, seconds, request_id)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
