"""An attempt to serve a request on a replica, what its errors mean, and the log of the last placement decisions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from foreword.api.dialects.answer_reader import error_of
from foreword.errors import ForewordError
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import Upstream, no_answer
from foreword.routing.placement import Decision, PlacementQuery

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss
    from foreword.observability.tracing import Span
    from foreword.router.suspicious import Flight

logger = logging.getLogger(__name__)

_MAX_HEADER = 1000
_KEPT_DECISIONS: Final = 1000  # what an operator looks at
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
        flight: what deaths of replicas concern of it; None where they do not. ended: it was ended.
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
    flight: Flight | None = None
    ended: bool = False

    def end_span(self) -> None:
        if self.span is not None:
            if self.first_token_at is not None:
                self.span.event("first token", self.first_token_at)
            self.span.end(self.problem)


def describe_error(error: BaseException) -> str:
    """Why a replica failed, for people."""
    return error.message if isinstance(error, ForewordError) else no_answer(error)


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
    return min(max(_MIN_PAUSE, pause), _MAX_PAUSE)  # of what is no number, the least


@dataclass(slots=True)
class DecisionRecord:
    """A decision without the prompt's keys, which would take much memory. `miss`: why part of the prompt was not cached."""

    at: float
    request_id: str
    tenant: str
    dialect: str
    decision: Decision
    tokens: int
    source: str
    queued: float
    words: str
    miss: Miss | None = None


class DecisionLog:
    """The last decisions (`records`, the newest last)."""

    def __init__(self) -> None:
        self.records: deque[DecisionRecord] = deque(maxlen=_KEPT_DECISIONS)

    def record(self, request_id: str, tenant: str, dialect: str, attempt: Attempt, previous: str = "") -> str:
        """Record a decision and return it in words. `previous` says why an earlier attempt failed."""
        words = in_words(attempt, previous)
        logger.debug("%s -> %s", request_id, words)
        tokens, source = attempt.query.tokens, attempt.prompt.source
        self.records.append(
            DecisionRecord(
                time.time(), request_id, tenant, dialect, attempt.decision, tokens, source, attempt.queued, words
            )
        )
        return words

    def explained(self, request_id: str, miss: Miss) -> None:
        """Why part of a request's prompt was not cached."""
        for record in reversed(self.records):
            if record.request_id == request_id:
                record.miss = miss
                return

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last decisions as JSON, newest first."""
        return [described(record) | {"prices": _prices(record)} for record in list(self.records)[::-1][:count]]


def in_words(attempt: Attempt, previous: str = "") -> str:
    text = attempt.decision.in_words()
    if attempt.queued >= 0.001:
        text += f"; queued {attempt.queued:.2f} s"
    if attempt.prompt.source == "text" and attempt.query.keys:
        text += "; compared as text"
    elif attempt.prompt.source == "known":
        text += f"; compared as text behind {len(attempt.prompt.tokens)} known tokens"
    return f"{previous}: {text}" if previous else text


def as_header(words: str) -> str:
    """Words as the value of an HTTP header."""
    line = " ".join(words.split())
    return line.encode("ascii", "replace").decode()[:_MAX_HEADER]


def described(record: DecisionRecord) -> dict[str, Any]:
    """A decision as JSON, without prices."""
    decision = record.decision
    return {
        "time": record.at,
        "request_id": record.request_id,
        "tenant": record.tenant,
        "dialect": record.dialect,
        "replica": decision.replica,
        "prefill": decision.prefill,
        "reason": decision.reason,
        "home": decision.home,
        "prompt_tokens": record.tokens,
        "tokens_from": record.source,
        "expected_cached_tokens": decision.expected_cached,
        "queued_seconds": round(record.queued, 4),
        "in_words": record.words,
        "miss": asdict(record.miss) if record.miss is not None else None,
    }


def _prices(record: DecisionRecord) -> list[dict[str, Any]]:
    return [
        {
            "replica": estimate.replica,
            "seconds": round(estimate.total, 4),
            "others_seconds": round(estimate.others, 4),
            "decoding_seconds": round(estimate.stalls, 4),
            "ageing_seconds": round(estimate.ageing, 4),
            "coming_seconds": round(estimate.coming, 4),
            "reused_tokens": estimate.reused,
            "computed_tokens": estimate.computed,
            "excluded": estimate.excluded,
            "in_words": estimate.in_words(),
        }
        for estimate in record.decision.estimates
    ]
