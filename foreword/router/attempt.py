"""One attempt to serve a request on a replica, and what its errors mean."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import aiohttp

from foreword.api.dialects.answer_reader import error_of
from foreword.errors import ForewordError
from foreword.observability.tracing import Span
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import Upstream
from foreword.routing.placement import Decision, PlacementQuery

_MIN_PAUSE: Final = 0.1
_MAX_PAUSE: Final = 5.0


@dataclass(eq=False, slots=True)
class Attempt:
    """A request that was placed on a replica. Its owner must end it with `ReplicaPool.finished` or `ReplicaPool.failed`.

    Attributes:
        queued: seconds spent in the router's queue.
        sent_at: when it was placed.
        weights: those of the replica when it was chosen; None if they were not known.
        prefill: the replica that computes the prompt, if it is another one.
        begun: the first token was observed, at `first_token_at`.
        span: of its trace, ended with it; None without traces. problem: why it failed.
        first_token_timer: set if the first token cannot be observed; fires when it is expected.
    """

    id: str
    upstream: Upstream
    decision: Decision
    query: PlacementQuery
    prompt: TokenizedPrompt
    queued: float
    sent_at: float
    weights: str | None = None
    prefill: Upstream | None = None
    begun: bool = False
    first_token_at: float | None = None
    first_token_timer: asyncio.TimerHandle | None = None
    span: Span | None = None
    problem: str = ""

    def end_span(self) -> None:
        if self.span is not None:
            if self.first_token_at is not None:
                self.span.event("first token", self.first_token_at)
            self.span.end(self.problem)


def describe_error(error: BaseException) -> str:
    """Why a replica failed, for people."""
    if isinstance(error, ForewordError):
        return error.message
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return f"the connection broke ({type(error).__name__})"


def is_certain(error: BaseException) -> bool:
    """Whether one such error is enough to open the replica's circuit."""
    return isinstance(error, aiohttp.ClientConnectorError)


def describe_response(status: int, data: bytes) -> str:
    """An error response of a replica, for people, shortened."""
    message = error_of(data).message
    return f"it says {status}" + (f": {message[:200]}" if message else "")


def retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds for which an overloaded replica gets no requests."""
    try:
        pause = float(response.headers.get("retry-after", "1"))
    except ValueError:
        pause = 1.0
    return min(max(pause, _MIN_PAUSE), _MAX_PAUSE)
