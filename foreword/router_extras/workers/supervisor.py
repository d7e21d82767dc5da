"""Starts the workers of a router, starts those again that end, and ends all of them. It has no threads and no event loop, so
that it can fork at any time.

All workers accept from one listening socket, which they inherit. With a socket for each (SO_REUSEPORT) the system would assign
connections to a worker when they come, also to one that has just died.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from foreword.errors import ConfigError
from foreword.router_extras.workers.shared_quotas import MOST_WORKERS, SharedMemory

if TYPE_CHECKING:
    from foreword.configuration import Config

logger = logging.getLogger(__name__)

_WATCHED: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
# A worker that ends earlier is started again only after this time.
_LEAST_SECONDS: Final = 1.0
_FAILED: Final = 70  # the status of a worker whose code raised


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker.

    Attributes:
        number: its own, of `count`; from 0.
        folder: of the sockets over which workers talk.
        parent: a file that ends when the supervisor has ended.
    """

    number: int
    count: int
    folder: Path
    memory: SharedMemory
    parent: int


def check(config: Config) -> None:
    """Raises ConfigError for settings that only one process can have."""
    given = config.router
    if given.workers > MOST_WORKERS:
        raise ConfigError(f"--workers {given.workers}: at most {MOST_WORKERS}")
    alone = {
        "--picker": given.picker,
        "--audit-every": given.audit_every or None,
        "--audit-reports": given.audit_reports,
        "--prefix-file": given.prefix_file,
        "--record": config.server.record,
    }
    setting = next((name for name, value in alone.items() if value is not None), None)
    if setting is not None:
        raise ConfigError(f"{setting} works in one process only: leave out --workers, or {setting}")


class Supervisor:
    """`serve` runs one worker to its end and returns its exit status."""

    def __init__(self, count: int, serve: Callable[[Seat], int]) -> None:
        self._count, self._serve = count, serve
        self._memory = SharedMemory()
        self._running: dict[int, tuple[int, float]] = {}  # by process: its number, and when it began
        self._due: list[tuple[float, int]] = []
        self._stopping = False

    def run(self) -> int:
        """Run the workers until a signal; returns the exit status. A second signal ends them at once."""
        folder = Path(tempfile.mkdtemp(prefix="foreword-workers-"))
        reader, self._writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            for number in range(self._count):
                self._start(number, folder, reader)
            while self._running or (self._due and not self._stopping):
                self._wait()
                self._collect()
                now = time.monotonic()
                for _, number in [one for one in self._due if one[0] <= now]:
                    if not self._stopping:
                        self._start(number, folder, reader)
                self._due = [one for one in self._due if one[0] > now]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            shutil.rmtree(folder, ignore_errors=True)
        return 0

    def _start(self, number: int, folder: Path, reader: int) -> None:
        process = os.fork()
        if process:
            self._running[process] = number, time.monotonic()
            return
        status = _FAILED
        try:
            os.close(self._writer)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            random.seed()
            self._memory.worker = number
            status = self._serve(Seat(number, self._count, folder, self._memory, reader))
        except BaseException:
            logger.exception("worker %d failed", number)
        finally:
            logging.shutdown()
            os._exit(status)

    def _wait(self) -> None:
        pause = min((due for due, _ in self._due), default=time.monotonic() + 60.0) - time.monotonic()
        found = signal.sigtimedwait(_WATCHED, max(pause, 0.01))
        if found is not None and found.si_signo != signal.SIGCHLD:
            self._stopping = True
            for process in self._running:
                os.kill(process, found.si_signo)

    def _collect(self) -> None:
        """Note the workers that have ended."""
        for process, (number, began) in list(self._running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            del self._running[process]
            code = os.waitstatus_to_exitcode(status)
            if self._stopping:
                continue
            reason = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            logger.error("worker %d %s; another one is started", number, reason)
            self._memory.ended(number, by_signal=code < 0)
            now = time.monotonic()
            self._due.append((max(now, began + _LEAST_SECONDS), number))
