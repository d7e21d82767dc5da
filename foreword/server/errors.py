"""Errors as Starlette responses."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from foreword.api.errors import (
    CLIENT_GONE,
    ErrorResponse,
    error_response,
    http_error_response,
    internal_error_response,
)
from foreword.errors import ForewordError

logger = logging.getLogger(__name__)


def exception_handlers(known_paths: Collection[str]) -> Mapping[Any, Any]:
    """Handlers that turn every exception into a response. An unknown path is answered with the nearest of `known_paths`."""

    async def on_foreword_error(request: Request, error: ForewordError) -> Response:
        if error.status >= 500 and not error.retry:
            logger.error("%s %s: %s", request.method, request.url.path, error.message)
        # Endpoints of dialects answer in their own format.
        respond = getattr(request.state, "error_response", error_response)
        return _starlette(respond(error, None))

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        answer = http_error_response(error.status_code, error.detail, request.method, path, known_paths)
        return _starlette(answer, error.headers)

    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    # Starlette raises the exception again after this response, so the server logs its traceback and keeps running.
    async def on_unexpected(request: Request, error: Exception) -> Response:
        request_id = getattr(request.state, "request_id", "")
        logger.error("request %s: %s %s failed", request_id, request.method, request.url.path)
        return _starlette(internal_error_response(request_id))

    return {
        ForewordError: on_foreword_error,
        HTTPException: on_http_error,
        ClientDisconnect: on_disconnect,
        Exception: on_unexpected,
    }


def _starlette(answer: ErrorResponse, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.body, answer.status, {**answer.headers, **(headers or {})})
