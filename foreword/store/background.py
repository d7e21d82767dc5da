"""Priority and CPU affinity of background threads, so that they do not slow the thread that computes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable

_cores: frozenset[int] = frozenset()


def lower_priority(nice: int) -> None:
    """Raise the calling thread's nice value by `nice`. Threads that it starts inherit the value.

    Linux only, where threads have separate priorities; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def set_background_cores(cores: Iterable[int]) -> None:
    """Set the cores that `use_background_cores` applies to threads that call it from now on.

    For processes whose computing thread is bound to one core, as OpenMP binds it under vLLM. A thread inherits the binding of
    the thread that starts it, and would otherwise compete for that core.
    """
    global _cores
    _cores = frozenset(cores)


def use_background_cores() -> None:
    """Bind the calling thread, and the threads that it starts, to the cores given to `set_background_cores`.

    Does nothing if no cores were given, and on systems other than Linux.
    """
    if _cores and sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _cores)
