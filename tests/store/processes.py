"""Forked child processes for tests. They can be killed at any moment, and never run the teardown of a test."""

import os
import signal
import traceback
from collections.abc import Callable


def start(work: Callable[[], object]) -> int:
    """Run `work` in a child and return its process id. The child exits with 0, or with 1 if `work` raised."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a child. Returns its exit code, negative for a signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a child and return its exit code."""
    return wait(start(work))


def kill(child: int) -> int:
    """Kill a child and return its exit code, which tells whether it was still running."""
    os.kill(child, signal.SIGKILL)
    return wait(child)


def pause(child: int) -> bool:
    """Stop a child with SIGSTOP. False if it has ended."""
    os.kill(child, signal.SIGSTOP)
    _, status = os.waitpid(child, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def resume(child: int) -> None:
    os.kill(child, signal.SIGCONT)
