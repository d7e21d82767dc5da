"""A background thread that does one thing after the other, and something every few seconds."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from foreword.store.background import use_background_cores


class Follower:
    """A background thread that does what it is given, one after the other. It starts at once.

    Args:
        regularly: is done every few seconds, between two other things.
    """

    def __init__(self, name: str, regularly: Callable[[], object], seconds: float) -> None:
        self._regularly = regularly
        self._seconds = seconds
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Do this when all that was given before is done."""
        self._work.put(work)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was given is done. False if that takes longer. At once after `close`."""
        done = threading.Event()
        self.do(done.set)
        return not self._thread.is_alive() or done.wait(timeout)

    def close(self, timeout: float) -> None:
        """End when all that was given is done."""
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        use_background_cores()
        due = time.monotonic() + self._seconds
        while True:
            left = due - time.monotonic()
            if left <= 0:
                self._regularly()
                due = time.monotonic() + self._seconds
                continue
            with contextlib.suppress(queue.Empty):
                work = self._work.get(timeout=left)
                if work is None:
                    return
                work()
