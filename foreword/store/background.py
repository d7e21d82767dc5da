"""Threads that work while somebody else computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable

_cores: frozenset[int] = frozenset()


def step_back(nice: int) -> None:
    """Let the calling thread run when the processor has nothing better to do: `nice` steps below its present priority.

    Linux has priorities per thread; elsewhere nothing happens. Threads that it starts inherit it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def spread_over(cores: Iterable[int]) -> None:
    """Cores for those of this process's background threads that begin from now on (`spread`).

    For processes whose computing thread is bound to a core, as OpenMP binds it under vLLM: threads inherit the binding of the
    thread that starts them, and would take turns with it there.
    """
    global _cores
    _cores = frozenset(cores)


def spread() -> None:
    """Let the calling thread run on the cores of `spread_over`; nothing happens if none were given, or not on Linux. Threads
    that it starts inherit it."""
    if _cores and sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _cores)
