"""Large batches in parts on several threads: a copy in the kernel takes one core."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Result = TypeVar("Result")

_CORES: Final = os.cpu_count() or 1
_PART_BYTES: Final = 2 << 20  # a part has at least this size


def divide(sizes: Sequence[int], threads: int) -> list[slice]:
    """Divide a batch of items with these sizes in bytes into one part for each thread that it is worth."""
    count = min(threads, _CORES, max(sum(sizes) // _PART_BYTES, 1), max(len(sizes), 1))
    bounds = [len(sizes) * number // count for number in range(count + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Make calls at the same time, the first on this thread, and wait for all of them. Raises what one of them raised.

    The other threads are new ones, so they have the priority of this one.
    """
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(len(calls) - 1, "foreword-part") as threads:
        others = [_started(threads, call) for call in calls[1:]]
        first = calls[0]()
    return [first, *(result() for result in others)]


def _started(threads: ThreadPoolExecutor, call: Callable[[], Result]) -> Callable[[], Result]:
    """Make a call on another thread. Returns what waits for the result."""
    try:
        return threads.submit(call).result
    except RuntimeError:  # no further threads, as at the end of the process: the caller makes the call itself
        return call
