"""Processes that a command starts: none outlives the command, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt: what was started is ended on the way out.

    One that is ignored, such as SIGHUP under nohup, stays so. The first ends the command; those after it, such as a closed
    terminal's second SIGHUP, are ignored: they would cut the way out short. On the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for one in caught:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    caught = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in caught:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in caught:
            signal.signal(one, signal.SIG_DFL)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that Linux kills once this process has ended, also by SIGKILL.

    Elsewhere, and on other threads than the main one, with whose end it would be killed, the caller alone ends it. `options`
    are those of Popen.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return subprocess.Popen(command, **options)
    control, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(command, preexec_fn=tie, **options)


def end_with_parent() -> None:
    """In a process of `multiprocessing`, such as an executor's: end when the process that started it has ended.

    It would wait for work for ever: its siblings have the other end of its queue, too.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="foreword-parent", daemon=True).start()
