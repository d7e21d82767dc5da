"""A circuit breaker around the calls of one store."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

_FAILURES_TO_OPEN: Final = 3
_SUCCESS_COUNTS: Final = 0.25  # seconds for which a success shows that the store as a whole works
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class CircuitBreaker:
    """Opens after 3 consecutive failures, unless a call has just succeeded. While it is open, no call is allowed until a
    pause has passed.

    After the pause one trial call is allowed at a time. If it succeeds, the circuit closes; if it fails, the next pause is
    twice as long, up to 30 seconds. Thread-safe.
    """

    __slots__ = ("_clock", "_failures", "_lock", "_open_until", "_pause", "_succeeded_at")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._open_until = 0.0  # 0.0 while the circuit is closed
        self._succeeded_at = -math.inf

    def allows(self) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._open_until:
                return False
            if self._open_until:  # this is the trial call: refuse the others until it has ended
                self._open_until = now + self._pause
            return True

    def succeeded(self) -> bool:
        """Note a call that succeeded. Returns whether the circuit was open until now."""
        with self._lock:
            closed = self._open_until > 0.0
            self._failures = 0
            self._pause = _FIRST_PAUSE
            self._open_until = 0.0
            self._succeeded_at = self._clock()
            return closed

    def failed(self, *, certain: bool = False) -> bool:
        """Note a call that failed; a `certain` failure opens the circuit at once. Returns whether it has just opened."""
        with self._lock:
            self._failures += 1
            works = self._failures < _FAILURES_TO_OPEN or self._clock() - self._succeeded_at < _SUCCESS_COUNTS
            if works and not certain and not self._open_until:
                return False
            opened = not self._open_until
            self._open_until = self._clock() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return opened

    @property
    def is_open(self) -> bool:
        """Whether no call is allowed now."""
        return self._clock() < self._open_until

    @property
    def closed(self) -> bool:
        """Whether calls are allowed without a limit. While the circuit is open, that begins with a trial call that succeeds."""
        return not self._open_until
