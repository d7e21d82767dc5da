"""Forked child processes for tests. They can be killed at any moment, and never run the teardown of a test."""

import ctypes
import itertools
import os
import signal
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

from foreword import compiled_code
from foreword.store.disk import files


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


def write_in_python() -> None:
    """From now on this process writes the files of disk stores without compiled code."""
    files.compiled_write = lambda: None


def die_in_python(call: str, number: int, after: bool) -> None:
    """Make this process kill itself before or after its `number`th call of os.`call`. Compiled code writes no files."""
    write_in_python()
    real = getattr(os, call)
    numbers = itertools.count()

    def dying(*arguments: object, **named: object) -> object:
        last = next(numbers) == number
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*arguments, **named)
        finally:
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, call, dying)


def die_in_c(call: str, number: int, after: bool) -> None:
    """Make this process kill itself before or after the `number`th call of this function of the system by files.cpp, which
    needs a compiler."""
    header = Path(__file__).with_name("dying.h")
    flags = (*compiled_code.FLAGS, "-include", str(header), f"-DVERSION={zlib.crc32(header.read_bytes())}")
    function = ctypes.CDLL(str(compiled_code.library(flags, compiled_code.FILE_SOURCES))).fw_write_files
    function.restype, function.argtypes = ctypes.c_int64, files.WRITE_ARGUMENTS
    os.environ["DIES"] = f"{call} {number} {'after' if after else 'before'}"
    files.compiled_write = lambda: function
