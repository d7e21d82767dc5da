"""What one replica has to do, as far as it was sent from here. Pure; times are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from foreword.routing.costs import ReplicaCosts, pairs

_WEIGHT: Final = 0.1
_NEVER: Final = -1.0
_RECENT_SECONDS: Final = 180.0


class Work(NamedTuple):
    """Tokens of prompts that are to be computed, and each of them with each token before it in its prompt."""

    tokens: float
    pairs: float

    def seconds(self, costs: ReplicaCosts) -> float:
        return self.tokens * costs.prefill + self.pairs * costs.attention


NO_WORK: Final = Work(0.0, 0.0)


@dataclass(slots=True)
class Sent:
    """A request in flight.

    Attributes:
        tokens: length of the prompt; the last `computed` of them are expected to be computed.
        resident: tokens of KV memory that it needs, its answer included.
        queued, running: what the replica had to do when it was sent.
    """

    tokens: int
    computed: int
    resident: int
    sent_at: float
    queued: Work = NO_WORK
    running: int = 0
    first_at: float = _NEVER

    @property
    def work(self) -> Work:
        return Work(self.computed, pairs(self.computed, self.tokens - self.computed))

    @property
    def has_begun(self) -> bool:
        return self.first_at >= 0


@dataclass(slots=True)
class Load:
    """Requests in flight on one replica: those without a first token, in order of sending, and those that decode."""

    waiting: dict[str, Sent] = field(default_factory=dict)
    running: dict[str, Sent] = field(default_factory=dict)
    resident: int = 0
    lifetime: float = 0.0
    _waiting_tokens: int = 0
    _waiting_pairs: float = 0.0
    _since: float = 0.0
    _recent: float = 0.0
    _recent_at: float = 0.0

    def queued(self, now: float, costs: ReplicaCosts) -> Work:
        """Prompts that are not computed yet. The first in the queue has been computed since it became the first."""
        if not self.waiting:
            return NO_WORK
        head = next(iter(self.waiting.values())).work
        done = min(max(now - self._since, 0.0) / head.seconds(costs), 1.0)
        tokens = self._waiting_tokens - done * head.tokens
        return Work(tokens, max(self._waiting_pairs - done * head.pairs, 0.0))

    def recent_tokens(self, now: float) -> float:
        """Of prompts that were sent there, each counting less the longer ago it was: in three minutes to 1/e."""
        return self._recent * math.exp(-max(now - self._recent_at, 0.0) / _RECENT_SECONDS)

    def memory_wait(self, needed: int, capacity: int | None) -> float:
        """Seconds until `needed` tokens have room, if requests go on leaving as they did (Little's law)."""
        if capacity is None or not self.resident:
            return 0.0
        missing = self.resident + min(needed, capacity) - capacity
        return missing * self.lifetime / self.resident if missing > 0 else 0.0

    def sent(self, request: str, sent: Sent, now: float) -> None:
        if not self.waiting:
            self._since = now
        self.waiting[request] = sent
        self._waiting_tokens += sent.computed
        self._waiting_pairs += sent.work.pairs
        self.resident += sent.resident
        self._recent, self._recent_at = self.recent_tokens(now) + sent.tokens, now

    def first_token(self, request: str, now: float) -> Sent | None:
        """None if the request is unknown or has begun already."""
        sent = self._leave_queue(request, now)
        if sent is not None:
            sent.first_at = now
            self.running[request] = sent
        return sent

    def finished(self, request: str, now: float) -> Sent | None:
        """The request ended, well or not. None if it is unknown."""
        sent = self.running.pop(request, None) or self._leave_queue(request, now)
        if sent is None:
            return None
        self.resident -= sent.resident
        took = now - sent.sent_at
        self.lifetime = took if not self.lifetime else self.lifetime + _WEIGHT * (took - self.lifetime)
        return sent

    def _leave_queue(self, request: str, now: float) -> Sent | None:
        sent = self.waiting.pop(request, None)
        if sent is not None:
            self._waiting_tokens -= sent.computed
            self._waiting_pairs = self._waiting_pairs - sent.work.pairs if self.waiting else 0.0
            self._since = now
        return sent
