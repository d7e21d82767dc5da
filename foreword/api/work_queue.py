"""Threads for parsing and tokenizing: off the event loop, and long work never ahead of short."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from foreword.futures import complete

P = ParamSpec("P")
T = TypeVar("T")

# Characters or bytes up to which work counts as short: a few milliseconds.
SHORT: Final = 32 << 10
# Seconds that work waits behind newer and shorter work, per byte of its size: ten seconds per MiB.
_DELAY_PER_BYTE: Final = 10.0 / (1 << 20)

_Entry = tuple[float, int, "Future[Any]", Callable[[], Any]]


class WorkQueue:
    """Two threads: one takes short work only, the other takes all work, by size and age.

    Work counts as having arrived later the longer it is. So short work overtakes long work, and long work still gets its
    turn.

    Args:
        clock: seconds, for the age of work.
        inline: bytes or characters up to which callers do work themselves.
    """

    def __init__(self, name: str = "parsing", clock: Callable[[], float] = time.monotonic, *, inline: int = 0) -> None:
        self.inline = inline
        self._clock = clock
        self._short: list[_Entry] = []
        self._long: list[_Entry] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Threads without work, each with the queue that wakes it.
        self._idle: dict[bool, SimpleQueue[None]] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(only_short,), name=f"{name}-{lane}", daemon=True)
            for lane, only_short in (("short", True), ("any", False))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `work`, which handles about `size` bytes or characters."""
        future: Future[T] = Future()
        entry = (self._clock() + size * _DELAY_PER_BYTE, next(self._numbers), future, lambda: work(*args, **kwargs))
        short = size <= SHORT
        with self._lock:
            heapq.heappush(self._short if short else self._long, entry)
            wake = self._idle.pop(short, None) or self._idle.pop(False, None)
        if wake is not None:
            wake.put(None)
        return future

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a thread of this queue. If the caller is cancelled first, work that has not begun never runs."""
        return await asyncio.wrap_future(self.submit(size, work, *args, **kwargs))

    def close(self) -> None:
        """End the threads. Work that has not begun is cancelled."""
        with self._lock:
            self._closed = True
            for _, _, future, _ in (*self._short, *self._long):
                future.cancel()
            for wake in self._idle.values():
                wake.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, only_short: bool) -> None:
        wake = SimpleQueue[None]()
        while True:
            with self._lock:
                entry = self._next(only_short)
                if entry is None and self._closed:
                    return
                if entry is None:
                    self._idle[only_short] = wake
            if entry is None:
                wake.get()
                continue
            _, _, future, work = entry
            if future.set_running_or_notify_cancel():
                complete(future, work)

    def _next(self, only_short: bool) -> _Entry | None:
        queues = [queue for queue in ((self._short,) if only_short else (self._short, self._long)) if queue]
        if not queues or self._closed:
            return None
        return heapq.heappop(min(queues, key=lambda queue: queue[0][:2]))
