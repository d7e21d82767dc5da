"""Every error of the router as OpenAI's JSON, as the server has it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from foreword.errors import ForewordError


def body_of(error: ForewordError) -> dict[str, Any]:
    """The JSON that tells a client of an error."""
    return body(error.message, error.status, error.param, error.code)


def body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """The same from its parts."""
    return {"error": {"message": message, "type": _kind(status), "param": param, "code": code}}


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def response(error: ForewordError, retry_after: float = 1.0) -> web.Response:
    """The response to an error that is known before anything was sent."""
    headers = {"content-type": "application/json"}
    if error.retry:
        headers["retry-after"] = str(math.ceil(retry_after))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return web.Response(body=msgspec.json.encode(body_of(error)), status=error.status, headers=headers)
