"""A circuit breaker for one replica: closed, open, half-open. Pure; times are given."""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_BETWEEN_PROBES: Final = 1.0


class ReplicaBreaker:
    """Closed: requests go there. After `failures` failures in a row, or one that leaves no doubt, it is open: none do. After a
    pause a probe decides, and again a second later if that fails; when one is answered it is half-open: one request at a time
    goes there until one has succeeded. If that fails, the next pause is twice as long: what answers probes and fails requests
    is tried ever less often, but what was away and comes back is used at once."""

    def __init__(self, failures: int = 3) -> None:
        self.failures = failures
        self.reason = ""
        self.opened = 0
        self._row = 0
        self._pause = _FIRST_PAUSE
        self._until: float | None = None
        self._half = False

    @property
    def state(self) -> str:
        return "open" if self._until is not None else "half-open" if self._half else "closed"

    def failed(self, now: float, reason: str, *, certain: bool = False) -> bool:
        """A request or a probe failed; `certain` failures open it at once. True if it has just opened."""
        self._row += 1
        if self._until is not None:
            return False
        if not (certain or self._half or self._row >= self.failures):
            return False
        self.reason, self._half = reason, False
        self._until = now + self._pause
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        self.opened += 1
        return True

    def succeeded(self) -> None:
        """A request succeeded. While it is open this says nothing: the request had begun before."""
        if self._until is None:
            self._row, self._half, self.reason, self._pause = 0, False, "", _FIRST_PAUSE

    def due(self, now: float) -> bool:
        """Whether a probe should be sent: always while it is not open."""
        return self._until is None or now >= self._until

    def probed(self, now: float, problem: str | None) -> bool:
        """What a probe found. True if the breaker has just opened."""
        if self._until is None:
            if problem is None:
                if not self._half:
                    self._row = 0
                return False
            return self.failed(now, problem)
        if problem is not None:
            self.reason, self._until = problem, now + _BETWEEN_PROBES
            return False
        self._until, self._half = None, True
        return False

    @property
    def half_open(self) -> bool:
        return self._half
