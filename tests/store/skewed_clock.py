"""A wall clock that is wrong, and is set forward and back while a process runs: for campaigns and tests."""

from __future__ import annotations

import os
import random
import time
from typing import Final

DAY: Final = 86_400.0
OFFSETS: Final = (0.0, -DAY, 2 * 3600.0, 365 * DAY)
VARIABLE: Final = "CAMPAIGN_CLOCKS"
_CALLS: Final = 200  # for which an offset holds

_real = time.time
_calls = 0


def skew(seed: int) -> None:
    """From now on the wall clock of this process, and of those that it starts, is set to another time after each few calls.
    Each process has its own offsets."""
    os.environ[VARIABLE] = str(seed)

    def wrong() -> float:
        global _calls
        _calls += 1
        draw = random.Random(f"{seed} {os.getpid()} {_calls // _CALLS}")
        return _real() + draw.choice(OFFSETS)

    time.time = wrong


def follow_parent() -> None:
    """Skew the clock of this process if its parent did so."""
    if VARIABLE in os.environ and time.time is _real:
        skew(int(os.environ[VARIABLE]))
