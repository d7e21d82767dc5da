"""The log line of each HTTP request, and request ids. The server and the router share both."""

from __future__ import annotations

import logging
import os
import re
from typing import Final

logger = logging.getLogger(__name__)

_VALID_ID: Final = re.compile(r"[!-~]{1,128}")
# Polled every few seconds: logged at level DEBUG only.
_POLLED: Final = frozenset(("/health", "/ready", "/metrics"))


def request_id_from(header: str | None) -> str:
    """The client's `X-Request-Id` if it is printable ASCII, else a random id."""
    return header if header and _VALID_ID.fullmatch(header) else os.urandom(16).hex()


def log_request(method: str, path: str, status: int, seconds: float, request_id: str) -> None:
    """Write one line about a request that has ended."""
    level = logging.DEBUG if path in _POLLED or path.startswith("/ui") else logging.INFO
    if logger.isEnabledFor(level):
        shown = path.encode("ascii", "backslashreplace").decode("ascii")
        logger.log(level, "%s %s %d %.3f s [%s]", method, shown, status, seconds, request_id)
