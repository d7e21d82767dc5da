"""The load that this router put on one replica. Pure; times are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from foreword.routing.costs import ReplicaCosts, pairs

_LIFETIME_WEIGHT: Final = 0.1
_RECENT_SECONDS: Final = 180.0
_USUAL_PROMPT: Final = 1024


class PrefillWork(NamedTuple):
    """Prompt tokens to compute, and the query-key pairs they make with earlier tokens of their prompts."""

    tokens: float
    pairs: float

    def seconds(self, costs: ReplicaCosts) -> float:
        return self.tokens * costs.prefill + self.pairs * costs.attention


NO_WORK: Final = PrefillWork(0.0, 0.0)


@dataclass(slots=True, eq=False, kw_only=True)
class SentRequest:
    """A request in flight.

    Attributes:
        tokens: length of the prompt; the last `computed` of them are expected to be computed.
        resident: tokens of KV memory that it needs, including its output.
        queued, running: load of the replica when the request was sent.
        first_at: time of the first token; None before it.
    """

    tokens: int
    computed: int
    resident: int
    sent_at: float
    queued: PrefillWork = NO_WORK
    running: int = 0
    first_at: float | None = None

    @property
    def work(self) -> PrefillWork:
        return PrefillWork(self.computed, pairs(self.computed, self.tokens - self.computed))


@dataclass(slots=True)
class ReplicaLoad:
    """Requests in flight on one replica: `waiting` have no first token yet (in send order), `running` decode."""

    waiting: dict[SentRequest, None] = field(default_factory=dict)
    running: dict[SentRequest, None] = field(default_factory=dict)
    resident: int = 0
    lifetime: float = 0.0
    _waiting_tokens: int = 0
    _waiting_pairs: float = 0.0
    _head_since: float = 0.0
    _recent: float = 0.0
    _recent_at: float = 0.0

    def queued(self, now: float, costs: ReplicaCosts) -> PrefillWork:
        """Prompt work that is not done yet. The head of the queue has been computing since it became the head."""
        if not self.waiting:
            return NO_WORK
        head = next(iter(self.waiting))
        tokens = head.computed
        head_pairs = pairs(tokens, head.tokens - tokens)
        done = min(max(now - self._head_since, 0.0) / (tokens * costs.prefill + head_pairs * costs.attention), 1.0)
        return PrefillWork(self._waiting_tokens - done * tokens, max(self._waiting_pairs - done * head_pairs, 0.0))

    def recent_tokens(self, now: float) -> float:
        """Prompt tokens sent recently, exponentially decayed with a time constant of three minutes."""
        passed = now - self._recent_at
        return self._recent * math.exp(-passed / _RECENT_SECONDS) if passed > 0 else self._recent

    def rank(self, costs: ReplicaCosts, running: int, capacity: int | None) -> tuple[float, float]:
        """For comparing replicas: those without a queue by the time that a usual prompt takes, then others by when it would be
        computed there, then those without free memory. Lower is better. Does not change while time passes."""
        if capacity is not None and self.resident >= capacity:
            return 2.0, self.resident / max(capacity, 1)
        usual = costs.prefill * _USUAL_PROMPT + costs.interference(_USUAL_PROMPT, running)
        if not self.waiting:
            return 0.0, usual
        return 1.0, self._head_since + PrefillWork(self._waiting_tokens, self._waiting_pairs).seconds(costs) + usual

    def recent_rank(self) -> float:
        """For comparing replicas by `recent_tokens`: its logarithm on a scale that does not change while time passes."""
        return math.log(self._recent) + self._recent_at / _RECENT_SECONDS if self._recent > 0 else -math.inf

    def memory_wait(self, needed: int, capacity: int | None) -> float:
        """Expected seconds until `needed` tokens fit, if requests keep finishing at their present rate (Little's law)."""
        if capacity is None or not self.resident:
            return 0.0
        missing = self.resident + min(needed, capacity) - capacity
        return missing * self.lifetime / self.resident if missing > 0 else 0.0

    def sent(self, request: SentRequest, now: float) -> None:
        if not self.waiting:
            self._head_since = now
        self.waiting[request] = None
        self._waiting_tokens += request.computed
        self._waiting_pairs += request.work.pairs
        self.resident += request.resident
        self._recent, self._recent_at = self.recent_tokens(now) + request.tokens, now

    def first_token(self, request: SentRequest, now: float) -> bool:
        """Move a request from waiting to running. False if it is not waiting."""
        if request not in self.waiting:
            return False
        self._leave_queue(request, now)
        request.first_at = now
        self.running[request] = None
        return True

    def received(self, request: SentRequest) -> None:
        """Add a request that had its first token on another replica."""
        self.running[request] = None
        self.resident += request.resident

    def finished(self, request: SentRequest, now: float) -> None:
        """Remove a request that succeeded or failed, if it is here."""
        if request in self.waiting:
            self._leave_queue(request, now)
        elif request in self.running:
            del self.running[request]
        else:
            return
        self.resident -= request.resident
        took = now - request.sent_at
        self.lifetime = took if not self.lifetime else self.lifetime + _LIFETIME_WEIGHT * (took - self.lifetime)

    def _leave_queue(self, request: SentRequest, now: float) -> None:
        del self.waiting[request]
        self._waiting_tokens -= request.computed
        self._waiting_pairs = self._waiting_pairs - request.work.pairs if self.waiting else 0.0
        self._head_since = now
