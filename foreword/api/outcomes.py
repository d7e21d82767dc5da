"""How requests ended, for the metrics and the log of a server or a router, and the ids of requests."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from foreword.api.errors import CLIENT_GONE
from foreword.errors import ForewordError
from foreword.usage import TokenUsage

logger = logging.getLogger(__name__)

# The attribute of a log record that gives the fields of its object (`configure_logging`) when it is called.
LOG_FIELDS: Final = "foreword_fields"
_NO_TOKENS: Final = TokenUsage()
_VALID_ID: Final = re.compile(r"[!-~]{1,128}")
# Polled every few seconds: logged at level DEBUG only.
_POLLED: Final = frozenset(("/health", "/ping", "/ready", "/metrics"))


def request_id_from(header: str | None) -> str:
    """The client's `X-Request-Id` if it is printable ASCII, else a random id."""
    return header if header and _VALID_ID.fullmatch(header) else os.urandom(16).hex()


@dataclass(frozen=True, slots=True)
class Access:
    """Fields of a request's log line besides its text, where lines are objects (`--log-format json`).

    Attributes:
        tenant: the caller's; empty where no keys are asked for.
        replica: URL of the server that answered, of a router's request.
        ttft: seconds until its first token; None without one.
    """

    tenant: str = ""
    usage: TokenUsage = _NO_TOKENS
    replica: str = ""
    ttft: float | None = None

    def fields(self, method: str, path: str, status: int, seconds: float, request_id: str) -> dict[str, Any]:
        """The fields of the object. Those that are not known are left out."""
        usage = self.usage
        known = {"tenant": self.tenant, "model": usage.model, "replica": self.replica}
        tokens = {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "output_tokens": usage.output}
        return {
            "request_id": request_id,
            "method": method,
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            **{name: value for name, value in known.items() if value},
            **(tokens if usage.charged else {}),
            **({} if self.ttft is None else {"ttft": round(self.ttft, 6)}),
        }


def log_request(
    method: str, path: str, status: int, seconds: float, request_id: str, access: Callable[[], Access] = Access
) -> None:
    """Write one line about a request that has ended. `access` is called if it is written."""
    level = logging.DEBUG if path in _POLLED or path.startswith("/ui") else logging.INFO
    if logger.isEnabledFor(level):
        shown = path.encode("ascii", "backslashreplace").decode("ascii")
        ended = (method, shown, status, seconds, request_id)
        logger.log(level, "%s %s %d %.3f s [%s]", *ended, extra={LOG_FIELDS: partial(access().fields, *ended)})


class ClientGone(Exception):
    """The client closed the connection."""


Outcome = Literal["ok", "client_error", "overloaded", "server_error", "disconnected"]


def outcome_of_status(status: int, *, retry: bool = True) -> Outcome:
    """The outcome of a response with this status. `retry`: a 503 asks the client to retry."""
    if status == CLIENT_GONE:
        return "disconnected"
    if status == 429 or (status == 503 and retry):
        return "overloaded"
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"


def outcome_of(status: int, error: BaseException | None) -> Outcome:
    """The outcome of a request that ended with this status, or with an error."""
    if error is None:
        return outcome_of_status(status)
    if isinstance(error, ForewordError):
        return outcome_of_status(error.status, retry=error.retry)
    return "disconnected" if isinstance(error, asyncio.CancelledError | ClientGone) else "server_error"
