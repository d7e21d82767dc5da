"""Facts that processes of one machine agree on: its boot, and the clock that has counted since.

The wall clock of a machine may be wrong, and may be set at any moment; the name of a host is chosen by those who start it. A
boot has an id that no other boot ever has, and one monotonic clock for all processes, which measures how long something takes.
"""

from __future__ import annotations

import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The id of the current boot of the machine; "" if the system has none."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def clock_id() -> str:
    """A name of the clock that `time.monotonic` reads: equal in all processes that read the same clock, so their times compare.
    A process that cannot tell has a clock of its own."""
    return _clock_id(os.getpid())


@lru_cache(1)
def _clock_id(process: int) -> str:
    boot = boot_id()
    try:
        space = os.readlink("/proc/self/ns/time")  # containers may have a clock of their own
    except OSError:
        space = ""
    return f"{boot}/{space}" if boot else f"process/{process}/{secrets.token_hex(8)}"
