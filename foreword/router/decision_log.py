"""The log of the last placement decisions (`/v1/router/decisions`)."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from foreword.api.misses.causes import Miss
from foreword.router.attempt import Attempt
from foreword.routing.placement import Decision

logger = logging.getLogger(__name__)

_MAX_HEADER = 1000


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
    """The last `size` decisions."""

    def __init__(self, size: int) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=size)

    def record(self, request_id: str, tenant: str, dialect: str, attempt: Attempt, previous: str = "") -> str:
        """Record a decision and return it in words. `previous` says why an earlier attempt failed."""
        words = in_words(attempt, previous)
        logger.debug("%s -> %s", request_id, words)
        tokens, source = attempt.query.tokens, attempt.prompt.source
        self._records.append(
            DecisionRecord(
                time.time(), request_id, tenant, dialect, attempt.decision, tokens, source, attempt.queued, words
            )
        )
        return words

    def explained(self, request_id: str, miss: Miss) -> None:
        """Why part of a request's prompt was not cached."""
        for record in reversed(self._records):
            if record.request_id == request_id:
                record.miss = miss
                return

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last decisions as JSON, newest first."""
        return [_describe(record) | {"prices": _prices(record)} for record in list(self._records)[::-1][:count]]

    def overview(self, count: int, candidates: int) -> list[dict[str, Any]]:
        """The last decisions as `last`, with their cheapest candidates in numbers instead of all prices."""
        return [_describe(record) | _cheapest(record, candidates) for record in list(self._records)[::-1][:count]]


def in_words(attempt: Attempt, previous: str = "") -> str:
    text = attempt.decision.in_words()
    if attempt.queued >= 0.001:
        text += f"; queued {attempt.queued:.2f} s"
    if attempt.prompt.source == "text" and attempt.query.keys:
        text += "; compared as text"
    return f"{previous}: {text}" if previous else text


def as_header(words: str) -> str:
    """Words as the value of an HTTP header."""
    line = " ".join(words.split())
    return line.encode("ascii", "replace").decode()[:_MAX_HEADER]


def _describe(record: DecisionRecord) -> dict[str, Any]:
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
        "miss": dataclasses.asdict(record.miss) if record.miss is not None else None,
    }


def _prices(record: DecisionRecord) -> list[dict[str, Any]]:
    return [
        {
            "replica": estimate.replica,
            "seconds": round(estimate.total, 4),
            "others_seconds": round(estimate.others, 4),
            "reused_tokens": estimate.reused,
            "computed_tokens": estimate.computed,
            "excluded": estimate.excluded,
            "in_words": estimate.in_words(),
        }
        for estimate in record.decision.estimates
    ]


def _cheapest(record: DecisionRecord, count: int) -> dict[str, Any]:
    decision = record.decision
    order = sorted(decision.estimates, key=lambda one: (one.replica != decision.replica, bool(one.excluded), one.price))
    shown = [
        {
            "replica": one.replica,
            "seconds": round(one.total, 4),
            "queued": round(one.queue + one.memory, 4),
            "loading": round(one.load + one.transfer, 4),
            "computing": round(one.compute, 4),
            "other": round(one.decode + one.first, 4),
            "tokens": one.from_tiers,
            "computed": one.computed,
            "excluded": one.excluded,
        }
        for one in order[:count]
    ]
    return {"candidates": shown, "more": max(len(order) - count, 0)}
