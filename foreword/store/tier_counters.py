"""Measurements of one tier of a tiered store: counters and the read rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from foreword.store.series import counted

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


OUTCOMES: Final[dict[str, Any]] = {"by": "outcome", "values": tuple(LookupOutcome)}


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
    """Counters of one tier since the start.

    In `errors`, `block_failed` counts blocks that a call could not read although others of the call were read.
    """

    hit_blocks: int = counted("Blocks read, whole and verified.", "blocks", "tier_hit_blocks", "loaded_blocks")
    missed_blocks: int = counted("Blocks requested and not read.", "blocks", "tier_missed_blocks")
    read_bytes: int = counted("Bytes read.", "bytes", "tier_read_bytes", "loaded_bytes")
    read_seconds: float = counted(
        "Seconds spent reading, over all threads.", "seconds", "tier_read_seconds", "load_busy_seconds"
    )
    written_blocks: int = counted("Blocks stored, or there already.", "blocks", "tier_written_blocks", "saved_blocks")
    written_bytes: int = counted("Bytes of these blocks.", "bytes", "tier_written_bytes", "saved_bytes")
    write_seconds: float = counted("Seconds spent writing.", "seconds", "tier_write_seconds", "save_busy_seconds")
    lookups: Counter[LookupOutcome] = counted(
        "Lookups in a tier; a request may look up several times.", "lookups", "tier_lookups", **OUTCOMES
    )
    lookup_seconds: float = counted("Seconds spent in lookups.", "seconds", "tier_lookup_seconds")
    skipped: int = counted("Calls not made: the circuit breaker was open.", "calls", "tier_skipped")
    errors: Counter[str] = counted("Failed calls.", "calls", "tier_errors", by="kind", summed=True)
    bad: Counter[str] = counted(
        "Blocks that failed verification, and were not used.",
        *("blocks", "tier_bad_blocks", "corrupt_blocks"),
        by="kind",
        summed=True,
    )
    refused: Counter[str] = counted(
        "Blocks that the tier's rules of admission refused.", "blocks", "tier_refused_blocks", by="kind"
    )


@dataclass(slots=True)
class Filling:
    """Bytes of a tier's slots that are read into from slower tiers at this moment, and how many such reads are late."""

    bytes: int = 0
    late: int = 0


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
