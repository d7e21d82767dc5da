"""What is measured in one tier of a tiered store: counters and the read rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_RATE_LIFETIME: Final = 60.0  # seconds until a measured rate expires; then one load is tried again
_RATE_WEIGHT: Final = 0.3


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start. `errors` and `bad` (frames that failed verification) count by kind.

    In `errors`, `block_failed` counts blocks that a call could not read although others of the call were read.
    """

    hit_blocks: int = 0
    missed_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    lookups: int = 0
    lookup_seconds: float = 0.0
    skipped: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)


class Rate:
    """Measured bytes per second as an exponential moving average. 0.0 if there is no recent measurement."""

    __slots__ = ("_at", "_clock", "_value")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        value = amount / max(seconds, 1e-9)
        known = self.value
        self._value = value if not known else known + _RATE_WEIGHT * (value - known)
        self._at = self._clock()

    @property
    def value(self) -> float:
        return self._value if self._clock() - self._at < _RATE_LIFETIME else 0.0
