"""Threads that work while somebody else computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def step_back(nice: int) -> None:
    """Let the calling thread run when the processor has nothing better to do: `nice` steps below its present priority.

    Linux has priorities per thread; elsewhere nothing happens. Threads that it starts inherit it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
