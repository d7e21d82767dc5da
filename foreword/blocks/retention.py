"""Prefixes that a request asks to keep, and what became of them (`blocks/leases.py` is the book)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["accepted", "clipped", "refused"]

MAX_PRIORITY: Final = 100
# Below all priorities that clients can ask for: what a prefetch keeps.
PREFETCH_PRIORITY: Final = -1


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to keep the KV of a prompt's first `end` tokens.

    Attributes:
        ttl: seconds after the last use; None: until it is released.
        priority: of the tenant's retentions, those with a lower priority lose their blocks first.
        stored: keep it in the stores too.
    """

    end: int
    ttl: float | None
    priority: int = 0
    stored: bool = True


@dataclass(frozen=True, slots=True)
class RetentionAnswer:
    """The result of a retention, or of a prefetch.

    Attributes:
        tokens: leading tokens that are kept; 0 if it was refused.
        ttl: seconds that it is kept after its last use; None until it is released.
        reason: why it was clipped or refused.
    """

    status: Status
    tokens: int
    ttl: float | None = None
    reason: str = ""
