"""Starts the workers of a router, starts those again that end, and ends all of them. It has no threads and no event loop, so
that it can fork at any time.

All workers accept from one listening socket, which they inherit. With a socket for each (SO_REUSEPORT) the system would assign
connections to a worker when they come, also to one that has just died.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from foreword.errors import ConfigError
from foreword.router_extras.workers.shared_quotas import MOST_WORKERS, SharedMemory
from foreword.router_extras.workers.socket_folder import socket_folder

if TYPE_CHECKING:
    from foreword.configuration import Config

logger = logging.getLogger(__name__)

_WATCHED: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
# A worker that ends earlier is started again only after this time.
_LEAST_SECONDS: Final = 1.0
_FAILED: Final = 70  # the status of a worker whose code raised
_REFUSED: Final = 2  # of one whose settings cannot work
_REFUSAL: Final = "refusal"  # a file with the reason
# Between two looks whether the workers say that they run.
_LOOK_SECONDS: Final = 1.0
_HUNG_SECONDS: Final = 30.0


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
    """`serve` runs one worker to its end and returns its exit status. One that has said that it runs (`SharedMemory.beat`) and
    then says nothing for `hung_seconds` is killed, and another one is started."""

    def __init__(self, count: int, serve: Callable[[Seat], int], hung_seconds: float = _HUNG_SECONDS) -> None:
        self._count, self._serve, self._hung_seconds = count, serve, hung_seconds
        # By worker: how often it had said that it runs, and how many looks have found that unchanged. Looks, not the time: this
        # process may have been stopped with the workers.
        self._looks: dict[int, tuple[int, int]] = {}
        self._next_look = 0.0
        self._ended_by = 0
        self._refused = False
        self._memory = SharedMemory()
        self._running: dict[int, tuple[int, float]] = {}  # by process: its number, and when it began
        self._due: list[tuple[float, int]] = []
        self._stopping = False

    def run(self) -> int:
        """Run the workers until a signal; returns the exit status. A second signal ends them at once. Raises ConfigError if one
        of the first workers does before it serves."""
        with socket_folder() as folder:
            return self._run(folder)

    def _run(self, folder: Path) -> int:
        reader, self._writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            for number in range(self._count):
                self._start(number, folder, reader)
            while self._running or (self._due and not self._stopping):
                self._wait()
                self._collect()
                now = time.monotonic()
                for due, number in [one for one in self._due if one[0] <= now]:
                    self._due.remove((due, number))
                    if not self._stopping:
                        self._start(number, folder, reader)
            if self._refused:
                raise ConfigError((folder / _REFUSAL).read_text(encoding="utf-8"))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        return 128 + self._ended_by if self._ended_by else 0

    def _start(self, number: int, folder: Path, reader: int) -> None:
        self._memory.begins(number)
        self._looks.pop(number, None)
        try:
            process = os.fork()
        except OSError as error:
            logger.error("worker %d could not be started: %s", number, error.strerror)
            self._due.append((time.monotonic() + _LEAST_SECONDS, number))
            return
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
        except ConfigError as error:
            logger.error("worker %d: %s", number, error.message)
            status = _refuse(folder, error.message)
        except BaseException:
            logger.exception("worker %d failed", number)
        finally:
            logging.shutdown()
            os._exit(status)

    def _wait(self) -> None:
        self._next_look = max(self._next_look, time.monotonic())
        pause = min((self._next_look, *(due for due, _ in self._due))) - time.monotonic()
        found = signal.sigtimedwait(_WATCHED, max(pause, 0.01))
        if found is not None and found.si_signo != signal.SIGCHLD:
            # For a worker a second one is as the first: it may have got the first one itself, as one of a process group.
            self._ended_by = found.si_signo if self._stopping else 0
            self._end(signal.SIGKILL if self._stopping else signal.SIGTERM)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._look()

    def _end(self, number: int) -> None:
        self._stopping = True
        self._memory.end_all()
        for process in self._running:
            os.kill(process, number)

    def _look(self) -> None:
        """Kill workers that do not run on."""
        for process, (number, _) in self._running.items():
            beats = self._memory.beats(number)
            before, same = self._looks.get(number, (0, 0))
            same = same + 1 if beats and beats == before else 0
            self._looks[number] = beats, same
            if same * _LOOK_SECONDS >= self._hung_seconds:
                logger.error("worker %d hangs: it is killed", number)
                self._looks.pop(number)
                os.kill(process, signal.SIGKILL)

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
            if code == _REFUSED and not any(self._memory.restarts().values()) and not self._refused:
                self._refused = True
                self._end(signal.SIGTERM)
                continue
            reason = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            logger.error("worker %d %s; another one is started", number, reason)
            self._memory.ended(number, by_signal=code < 0)
            now = time.monotonic()
            self._due.append((max(now, began + _LEAST_SECONDS), number))


def _refuse(folder: Path, message: str) -> int:
    """Leave the reason for the supervisor; returns the status of such a worker."""
    with suppress(OSError):
        (folder / _REFUSAL).write_text(message, encoding="utf-8")
        return _REFUSED
    return _FAILED
