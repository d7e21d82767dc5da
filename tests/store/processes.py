"""Children of the test process, forked: they have everything imported, may be killed at any moment, and run no test's end."""

import os
import signal
import traceback
from collections.abc import Callable


def start(work: Callable[[], object]) -> int:
    """Run `work` in a child; returns its process number. The child exits with 0, or 1 if `work` raised."""
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
    """Exit code of a child, less than 0 for the signal that ended it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a child that does `work`."""
    return wait(start(work))


def kill(child: int) -> int:
    """End a child at once; its exit code, which says whether it lived until then."""
    os.kill(child, signal.SIGKILL)
    return wait(child)


def pause(child: int) -> bool:
    """Stop a child where it stands; False if it has ended."""
    os.kill(child, signal.SIGSTOP)
    _, status = os.waitpid(child, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def go_on(child: int) -> None:
    os.kill(child, signal.SIGCONT)
