"""The circuit breaker of one replica: closed, open, half-open. Pure; times are given."""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_MAX_PAUSE: Final = 30.0
_PROBE_INTERVAL: Final = 1.0


class ReplicaBreaker:
    """Opens after `failures` consecutive failures, or after one that proves that the replica is down. Requests and health
    probes are counted apart: a replica that answers probes and fails requests is not healthy.

    While it is open, the replica gets no requests. After a pause a health probe is sent, then one every second. When a probe
    succeeds, the breaker is half-open: one request at a time is sent until one succeeds. If that request fails, the next pause
    is twice as long. So a replica that answers probes and fails requests is tried less and less often, and a replica that
    was down is used again as soon as it answers.
    """

    def __init__(self, failures: int = 3) -> None:
        self.failures = failures
        self.reason = ""
        self.opened = 0
        self._failed_requests = 0
        self._failed_probes = 0
        self._pause = _FIRST_PAUSE
        self._open_until: float | None = None
        self._half_open = False

    @property
    def state(self) -> str:
        return "open" if self._open_until is not None else "half-open" if self._half_open else "closed"

    @property
    def half_open(self) -> bool:
        return self._half_open

    def failed(self, now: float, reason: str, *, certain: bool = False) -> bool:
        """Note a failed request; `certain` failures open the breaker at once. True if it has just opened."""
        self._failed_requests += 1
        return self._maybe_open(now, reason, certain or self._failed_requests >= self.failures)

    def _maybe_open(self, now: float, reason: str, enough: bool) -> bool:
        if self._open_until is not None or not (enough or self._half_open):
            return False
        self.reason, self._half_open = reason, False
        self._open_until = now + self._pause
        self._pause = min(self._pause * 2, _MAX_PAUSE)
        self.opened += 1
        return True

    def succeeded(self) -> None:
        """Note a successful request. Ignored while open, because the request was sent before."""
        if self._open_until is None:
            self._failed_requests = self._failed_probes = 0
            self._half_open, self.reason, self._pause = False, "", _FIRST_PAUSE

    def due(self, now: float) -> bool:
        """Whether a probe should be sent; always true while not open."""
        return self._open_until is None or now >= self._open_until

    def probed(self, now: float, problem: str | None, *, certain: bool = False) -> bool:
        """Note the result of a probe. True if the breaker has just opened."""
        if self._open_until is None:
            self._failed_probes = 0 if problem is None else self._failed_probes + 1
            enough = certain or self._failed_probes >= self.failures
            return problem is not None and self._maybe_open(now, problem, enough)
        if problem is not None:
            self.reason, self._open_until = problem, now + _PROBE_INTERVAL
        else:
            self._open_until, self._half_open = None, True
            self._failed_requests = self._failed_probes = 0
        return False
