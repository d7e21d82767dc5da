"""Threads beside the one that computes: their priority and cores, so that they do not slow it; large batches in parts on
several threads, since a copy in the kernel takes one core; and one that has pages allocated.

Threads of the package are started here; `dev/threads.md` lists them, and the few that are not. Queues of jobs are in
`background_jobs.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

Result = TypeVar("Result")

CORES: Final = os.cpu_count() or 1
_PART_BYTES: Final = 2 << 20  # a part has at least this size
_POPULATE_BYTES: Final = 1 << 20  # meanwhile no other thread of the process can map memory
_AHEAD_BYTES: Final = 1 << 30  # what several long prompts load one after the other
_FIRST_BYTES: Final = 64 << 20  # count as populated: the thread takes them on before the first request comes
_POPULATE_PAUSE: Final = 0.002  # seconds after each piece: at most half a gigabyte per second
_POPULATE_NICE: Final = 10
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the module mmap
_cores: frozenset[int] = frozenset()


class Forked(Protocol):
    """An object with locks, threads or connections that a forked child cannot use."""

    def after_fork(self) -> None: ...


_forked: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def renew_in_child(owner: Forked) -> None:
    """Let a forked child begin with `owner.after_fork()`: a thread that the child does not have may have held a lock of it."""
    _forked.add(owner)


def _after_fork() -> None:
    for owner in list(_forked):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)


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


class PagePopulator:
    """A low-priority thread that populates memory from start to end, in pieces, 1 GiB ahead of use: the first write to a
    page costs as much as copying it, and on some virtual machines ten times as much.

    Where the kernel does not support it (before Linux 5.14), or for an address that no page begins at, it does nothing.

    Args:
        memory: what keeps the memory mapped. The thread has a reference to it until it is stopped or done.

    Attributes:
        ready: bytes from the start that are populated; all where the thread does not run.
    """

    def __init__(self, memory: object, address: int, size: int, name: str) -> None:
        self._used = 0
        self._stopped = False
        self.after_fork()
        self.ready = _FIRST_BYTES
        renew_in_child(self)
        background_thread(lambda: self._run(memory, address, size), name, nice=_POPULATE_NICE)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self.ready = sys.maxsize

    def extend(self, end: int) -> None:
        """Note that bytes up to `end` are in use or will be soon."""
        if end > self._used:
            with self._changed:
                self._used = max(self._used, end)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self, _memory: object, address: int, size: int) -> None:
        try:
            for offset in range(0, size, _POPULATE_BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or offset < self._used + _AHEAD_BYTES)  # noqa: B023
                    if self._stopped:
                        return
                piece = ctypes.c_size_t(min(_POPULATE_BYTES, size - offset))
                # Without the GIL, and without changing what is there.
                if ctypes.CDLL(None).madvise(ctypes.c_void_p(address + offset), piece, _MADV_POPULATE_WRITE):
                    return
                with self._changed:
                    self.ready = max(self.ready, offset + piece.value)
                    self._changed.wait_for(lambda: self._stopped, _POPULATE_PAUSE)
        finally:
            self.ready = sys.maxsize


def background_thread(
    run: Callable[[], object], name: str, *, nice: int = 0, bound: bool = True, start: bool = True
) -> threading.Thread:
    """A daemon thread for a loop that waits for something else than jobs, such as a connection or lists of its owner, which
    ends it. For jobs there is `BackgroundJobs`. In a forked child the thread counts as ended.

    Args:
        name: behind `foreword-`.
        nice: is added to the nice value of the thread.
        bound: whether it runs on the cores for background work. Else on those of the calling thread.

    Raises RuntimeError if the system has no more threads.
    """

    def work() -> None:
        if bound:
            use_background_cores()
        if nice:
            lower_priority(nice)
        run()

    thread = threading.Thread(target=work, name=f"foreword-{name}", daemon=True)
    if start:
        thread.start()
    return thread


def divide(sizes: Sequence[int], threads: int) -> list[slice]:
    """Divide a batch of items with these sizes in bytes into one part for each thread that it is worth."""
    count = min(threads, CORES, max(sum(sizes) // _PART_BYTES, 1), max(len(sizes), 1))
    bounds = [len(sizes) * number // count for number in range(count + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def at_once(calls: Sequence[Callable[[], Result]], threads: int | None = None) -> list[Result]:
    """Make calls at the same time, on this thread and on new ones, and wait for all of them. Raises what one of them raised;
    others may not have been made then.

    The new threads have the priority and the cores of this one. `threads`: with this one, at most.
    """
    turns, results, errors = itertools.count(), dict[int, Result](), list[BaseException]()

    def work() -> None:
        try:
            while (turn := next(turns)) < len(calls):
                results[turn] = calls[turn]()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    others = list[threading.Thread]()
    # No further threads, as at the end of the process: those that there are make the calls.
    with contextlib.suppress(RuntimeError):
        for _ in range(min(len(calls), threads or len(calls)) - 1):
            others.append(background_thread(work, "part", bound=False))
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return [results[turn] for turn in range(len(calls))]
