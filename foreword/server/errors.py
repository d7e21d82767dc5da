"""Every error as OpenAI's JSON: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from foreword.errors import BadRequest, ForewordError, NotFound, did_you_mean

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
_RETRY_AFTER = {429: "1", 503: "5"}


def body_of(error: ForewordError) -> dict[str, Any]:
    """The JSON that tells a client of an error."""
    return _body(error.message, error.status, error.param, error.code)


def _body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def respond(error: ForewordError) -> JSONResponse:
    """The response to an error that is known before anything was sent."""
    headers = {}
    if error.retry:
        headers["retry-after"] = _RETRY_AFTER.get(error.status, "1")
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every exception that leaves a route."""

    @app.exception_handler(ForewordError)
    async def on_known(request: Request, error: ForewordError) -> Response:
        if error.status >= 500 and not error.retry:
            logger.error("%s %s: %s", request.method, request.url.path, error.message)
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return respond(BadRequest(f"{place}: {first['msg']}", param=place))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return respond(NotFound(_no_route(request, app)))
        message = error.detail
        if error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return JSONResponse(_body(message, error.status_code, None, None), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def on_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    # The process's edge: whatever was not foreseen becomes a 500. Starlette raises it again afterwards, so the server
    # logs the traceback and stays up. This handler runs outside the middleware, so it adds the request id itself.
    @app.exception_handler(Exception)
    async def on_unknown(request: Request, error: Exception) -> Response:
        request_id = getattr(request.state, "request_id", "")
        message = f"Internal error; the server's log has the details under request id {request_id}"
        logger.error("request %s: %s %s failed", request_id, request.method, request.url.path)
        return JSONResponse(_body(message, 500, None, "internal_error"), 500, headers={"x-request-id": request_id})


def _no_route(request: Request, app: FastAPI) -> str:
    paths = app.openapi()["paths"]
    return f"There is no route {request.url.path!r}{did_you_mean(request.url.path, paths)}"
