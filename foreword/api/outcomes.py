"""How requests ended, for the metrics of a server or a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from foreword.api.errors import CLIENT_GONE
from foreword.errors import ForewordError


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


Count = Callable[[str, Outcome], None]
"""Counts a request's dialect and outcome."""


@dataclass(slots=True)
class Ending:
    """How one request ended, with what is known until now. At the end of its block it is counted."""

    count: Count
    dialect: str
    status: int = 200
    error: BaseException | None = None

    @property
    def outcome(self) -> Outcome:
        if self.error is None:
            return outcome_of_status(self.status)
        if isinstance(self.error, ForewordError):
            return outcome_of_status(self.error.status, retry=self.error.retry)
        return "disconnected" if isinstance(self.error, asyncio.CancelledError | ClientGone) else "server_error"

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.error = error or self.error
        self.count(self.dialect, self.outcome)
