"""What is measured in one tier of a tiered store: counters and the read rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

_RATE_LIFETIME: Final = 60.0  # seconds until a measured rate expires; then one load is tried again
_RATE_WEIGHT: Final = 0.3


class LookupOutcome(StrEnum):
    """How a lookup ended: of one tier, or of a request in all tiers. Each lookup has exactly one outcome.

    Attributes:
        FOUND: at least one block.
        ABSENT: no block, and every tier has said so.
        TIMED_OUT: no block, and a tier did not answer in time, or there was no time left to ask it.
        TIER_OFF: no block, and a tier failed, or was not asked because its circuit breaker is open.
        NOT_ALLOWED: nothing was asked: the request's KV may not be loaded, or an audit has suspended the tier.
        TOO_SMALL: nothing was asked: the prompt is shorter than a block.
    """

    FOUND = "found"
    ABSENT = "absent"
    TIMED_OUT = "timed_out"
    TIER_OFF = "tier_off"
    NOT_ALLOWED = "not_allowed"
    TOO_SMALL = "too_small"


class TierState(StrEnum):
    """Whether a tier is used.

    Attributes:
        OK: it is read and written.
        OFF: it is skipped: its circuit breaker is open.
        SUSPENDED: it is not read: an audit has found a wrong block that came from it.
        READ_ONLY: it takes no blocks: as configured, or because the system forbids writes.
        FULL: it finds no room for blocks, or evicts although its budget is not used up.
        HOLDING: blocks wait in faster tiers before they are written to it (`hold=`).
    """

    OK = "ok"
    OFF = "off"
    SUSPENDED = "suspended"
    READ_ONLY = "read_only"
    FULL = "full"
    HOLDING = "holding"


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start. `errors` and `bad` (frames that failed verification) count by kind.

    In `errors`, `block_failed` counts blocks that a call could not read although others of the call were read. `lookups` count
    by outcome; a request may look up several times in one tier.
    """

    hit_blocks: int = 0
    missed_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    lookups: Counter[LookupOutcome] = field(default_factory=Counter)
    lookup_seconds: float = 0.0
    skipped: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)

    @property
    def stamp(self) -> tuple[float, ...]:
        """Differs from before if a counter has changed. It is quicker than to read all of them."""
        kinds = sum(self.lookups.values()), sum(self.errors.values()), sum(self.bad.values())
        return *kinds, self.skipped, self.hit_blocks, self.missed_blocks, self.read_seconds, self.write_seconds


@dataclass(slots=True)
class Filling:
    """Bytes of a tier's slots that are read into from slower tiers at this moment, and how many such reads are late.
    `slot_bytes`: of a slot, when one was last taken."""

    bytes: int = 0
    late: int = 0
    slot_bytes: int = 0


# What metrics show of a tier: name, help, and how the value is read from its counters.
PER_TIER: Final[tuple[tuple[str, str, Callable[[TierCounters], float]], ...]] = (
    ("loaded_blocks", "Blocks read from a tier and verified.", lambda c: c.hit_blocks),
    ("loaded_bytes", "Bytes read from a tier.", lambda c: c.read_bytes),
    ("load_busy_seconds", "Seconds spent reading from a tier, over all threads.", lambda c: c.read_seconds),
    ("missed_blocks", "Blocks that were requested from a tier and not read.", lambda c: c.missed_blocks),
    ("corrupt_blocks", "Blocks that failed verification; removed and not used.", lambda c: sum(c.bad.values())),
    ("saved_blocks", "Blocks written to a tier, including those it had already.", lambda c: c.written_blocks),
    ("saved_bytes", "Bytes written to a tier.", lambda c: c.written_bytes),
    ("save_busy_seconds", "Seconds spent writing to a tier.", lambda c: c.write_seconds),
    ("lookup_seconds", "Seconds spent on lookups in a tier.", lambda c: c.lookup_seconds),
    ("errors", "Calls to a tier that failed.", lambda c: sum(c.errors.values())),
    ("skipped", "Calls to a tier that its open circuit breaker skipped.", lambda c: c.skipped),
)


class Rate:
    """Measured bytes per second as an exponential moving average. 0.0 if there is no recent measurement."""

    __slots__ = ("_at", "_clock", "last")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.last = 0.0  # the last value, however old
        self._at = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        value = amount / max(seconds, 1e-9)
        known = self.value
        self.last = value if not known else known + _RATE_WEIGHT * (value - known)
        self._at = self._clock()

    @property
    def value(self) -> float:
        return self.last if self._clock() - self._at < _RATE_LIFETIME else 0.0
