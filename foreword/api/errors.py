"""Errors as HTTP responses with OpenAI's JSON: `{"error": {"message", "type", "param", "code"}}`.

All fronts share this mapping.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection
from typing import Any, Final, NamedTuple, Protocol

from foreword.api.sse import utf8
from foreword.errors import BadRequest, ForewordError, NotFound
from foreword.request_errors import RequestFailed

MAX_BODY_BYTES: Final = 64 << 20
_MAIN_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/prefixes",
    "/ui",
    "/metrics",
    "/health",
    "/ready",
)
# nginx's status for a client that closed the connection. No client sees it; the log and the metrics do.
CLIENT_GONE: Final = 499
# Seconds, by status, where the caller of `error_response` gives none.
_RETRY_AFTER: Final = {503: 5.0}
_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}


class BodyTooLarge(BadRequest, status=413, code="request_too_large"):
    """A body is larger than any prompt could need."""

    def __init__(self, limit: int = MAX_BODY_BYTES) -> None:
        super().__init__(f"The body has more than {limit / (1 << 20):g} MiB")


class UnsupportedMediaType(BadRequest, status=415, code="unsupported_media_type"):
    """A body is not declared as JSON. Browsers send such bodies across sites without a preflight request."""


class ErrorResponse(NamedTuple):
    """Status, headers and body with which a framework answers an error."""

    status: int
    body: bytes
    headers: dict[str, str]


class ErrorResponder(Protocol):
    """Makes the response to an error that is known before anything was sent."""

    def __call__(self, error: ForewordError, retry_after: float | None = None, request_id: str = "") -> ErrorResponse:
        """`retry_after`: seconds after which a retry makes sense."""


def error_body(error: ForewordError) -> dict[str, Any]:
    """The JSON that reports an error to a client."""
    return _body(error.message, error.status, error.param, error.code)


def error_response(error: ForewordError, retry_after: float | None = None) -> ErrorResponse:
    """The response to an error that is known before anything was sent.

    Args:
        retry_after: seconds after which a retry makes sense, for errors that a retry may cure.
    """
    headers = {}
    if error.retry:
        seconds = retry_after or error.retry_after or _RETRY_AFTER.get(error.status, 1.0)
        headers["retry-after"] = str(max(math.ceil(seconds), 1))
    elif error.status == 503:  # OpenAI's and Anthropic's clients would retry it
        headers["x-should-retry"] = "false"
    if error.code == RequestFailed.code:  # a gateway sees the head only
        headers["x-foreword-error"] = error.code
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _response(error.status, error_body(error), headers)


def openai_error(error: ForewordError, retry_after: float | None = None, request_id: str = "") -> ErrorResponse:
    """The format of most paths."""
    return error_response(error, retry_after)


def no_route_response(method: str, path: str, methods: Collection[str], known: Collection[str]) -> ErrorResponse:
    """The response where no route answers.

    Args:
        methods: those that the path takes; empty for an unknown path.
        known: paths to suggest instead of an unknown one.
    """
    if methods:
        message = f"{path} does not take {method}"
        return _response(405, _body(message, 405, None, None), {"allow": ", ".join(sorted(methods))})
    close = difflib.get_close_matches(path, (*known, *_MAIN_PATHS), n=1, cutoff=0.8)
    hint = f". Did you mean {close[0]!r}?" if close else f"; the main paths are {', '.join(_MAIN_PATHS)}"
    return error_response(NotFound(f"There is no route {path!r}{hint}"))


def internal_error_response(request_id: str) -> ErrorResponse:
    """The response to an exception that no code expected. The details are in the server's log only."""
    message = f"Internal error; the server's log has the details under request id {request_id}"
    return _response(500, _body(message, 500, None, "internal_error"), {"x-request-id": request_id})


def _response(status: int, body: dict[str, Any], headers: dict[str, str]) -> ErrorResponse:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return ErrorResponse(status, utf8(text), {"content-type": "application/json", **headers})


def _body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
