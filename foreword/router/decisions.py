"""The last decisions, for people who ask why."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from foreword.router.pool import Ticket
from foreword.routing.placement import Decision

logger = logging.getLogger(__name__)

_LONGEST_HEADER = 1000


@dataclass(frozen=True, slots=True)
class _Made:
    """A decision, without the prompt's keys: those of a thousand long prompts would be many."""

    at: float
    request_id: str
    tenant: str
    decision: Decision
    tokens: int
    source: str
    queued: float
    words: str


class Decisions:
    """The last `size` of them."""

    def __init__(self, size: int) -> None:
        self._last: deque[_Made] = deque(maxlen=size)

    def note(self, request_id: str, tenant: str, ticket: Ticket, why: str = "") -> str:
        """Remember a decision and return it in words. `why` says why there was another one before."""
        words = in_words(ticket, why)
        logger.debug("%s -> %s", request_id, words)
        tokens, source = ticket.query.tokens, ticket.prompt.source
        self._last.append(_Made(time.time(), request_id, tenant, ticket.decision, tokens, source, ticket.queued, words))
        return words

    def shown(self, last: int) -> list[dict[str, Any]]:
        """The last ones as JSON, the newest first."""
        return [_describe(made) for made in list(self._last)[::-1][:last]]


def in_words(ticket: Ticket, why: str = "") -> str:
    said = ticket.decision.in_words()
    if ticket.queued >= 0.001:
        said += f"; queued {ticket.queued:.2f} s"
    if ticket.prompt.source == "text" and ticket.query.keys:
        said += "; compared as text"
    return f"{why}: {said}" if why else said


def header(words: str) -> str:
    """Words as the value of a header."""
    line = " ".join(words.split())
    return line.encode("ascii", "replace").decode()[:_LONGEST_HEADER]


def _describe(made: _Made) -> dict[str, Any]:
    decision = made.decision
    return {
        "time": made.at,
        "request_id": made.request_id,
        "tenant": made.tenant,
        "replica": decision.replica,
        "prefill": decision.prefill,
        "reason": decision.reason,
        "home": decision.home,
        "prompt_tokens": made.tokens,
        "tokens_from": made.source,
        "expected_cached_tokens": decision.expected_cached,
        "queued_seconds": round(made.queued, 4),
        "in_words": made.words,
        "prices": [
            {
                "replica": price.replica,
                "seconds": round(price.total, 4),
                "reused_tokens": price.reused,
                "computed_tokens": price.computed,
                "excluded": price.excluded,
                "in_words": price.in_words(),
            }
            for price in decision.estimates
        ],
    }
