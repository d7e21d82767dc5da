"""A queue of jobs, and the threads beside the one that computes that do them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from foreword.futures import complete
from foreword.store.background import background_thread, renew_in_child

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

_EXIT_SECONDS: Final = 2.0


class BackgroundJobs:
    """Does jobs in the order in which they are given, on threads of its own, which start with the first job. Thread-safe.

    A job that raises ends neither its thread nor the jobs behind it. Threads are daemons: at the end of the process the jobs
    that run are waited for, two seconds at most. A forked child begins with an empty queue and starts threads when it has a
    job. Threads of one that nothing refers to any more end when its jobs are done.

    Args:
        name: of the threads, behind `foreword-`.
        most: jobs that may wait besides those that run; one more is refused. None where each job belongs to a caller that is
            bounded itself.
        threads: jobs that run at the same time, at most. Only those of a single thread end in order.
        tick: is called about every `every` seconds between two jobs, by the first thread, which then starts at once.
        nice: is added to the nice value of the threads.
        bound: whether the threads run on the cores for background work. Else on those of the thread that gave the job.

    Attributes:
        dropped: jobs that are not done, by the reason: `full`, `closed`; in a forked child `fork`, those of the parent.
    """

    def __init__(
        self,
        name: str,
        *,
        most: int | None,
        threads: int = 1,
        tick: Callable[[], object] | None = None,
        every: float = 0.0,
        nice: int = 0,
        bound: bool = True,
    ) -> None:
        self.name, self.most, self.threads, self.dropped = name, most, threads, Counter[str]()
        self._nice, self._bound, self._closed = nice, bound, False
        self._work = _Work(name, tick, every)
        weakref.finalize(self, self._work.end).atexit = False
        _all.add(self)
        renew_in_child(self)
        if tick is not None:
            self._start_thread()

    @property
    def failed(self) -> int:
        """Jobs given to `add`, and ticks, that raised."""
        return self._work.failed

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun."""
        return self._work.queue.qsize()

    def add(self, job: Callable[[], object]) -> bool:
        """Do a job whose result is not needed. False if it is refused: the queue is full or closed. Raises RuntimeError if no
        thread can be started."""
        return not self._give(_Job(job))

    def submit(self, job: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Do a job whose result the caller needs. Raises RuntimeError, as pools of the standard library do, if the queue is
        full or closed, or no thread can be started."""
        future: Future[Result] = Future()
        if refused := self._give(_Job(lambda: job(*args, **kwargs), future)):
            raise RuntimeError(f"the queue {self.name!r} is {refused}")
        return future

    def flush(self, timeout: float) -> bool:
        """Wait for all jobs that were given before. False if that takes longer, or the threads have ended before."""
        return self._work.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Refuse further jobs, and wait until those that were given are done and the threads have ended. False if that takes
        longer; they go on then."""
        with self._work.changed:
            if not self._closed:
                self._closed = True
                self._work.end()
        return self._join(time.monotonic() + timeout)

    def stop(self) -> None:
        """Refuse further jobs, and drop those that wait; waits for nothing."""
        with self._work.changed:
            self._closed = True
            self.dropped["closed"] += self._work.drop_all()
            self._work.end()

    def _give(self, job: _Job) -> str:
        """Returns why the job is refused."""
        work = self._work
        with work.changed:
            full = self.most is not None and work.queue.qsize() >= self.most
            if refused := "closed" if self._closed else "full" if full else "":
                self.dropped[refused] += 1
                return refused
            if len(work.threads) < self.threads:
                try:
                    self._start_thread()
                except RuntimeError:  # the system has no more threads
                    if not work.threads:
                        raise
            work.open[job] = None
            work.queue.put(job)
        return ""

    def _start_thread(self) -> None:
        # It keeps its queue: a forked child has another one.
        work, queue, ticks = self._work, self._work.queue, not self._work.threads and self._work.tick is not None
        run = work.run_with_ticks if ticks else work.run
        work.threads.append(background_thread(lambda: run(queue), self.name, nice=self._nice, bound=self._bound))

    def _join(self, until: float) -> bool:
        for thread in self._work.threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._work.threads)

    def after_fork(self) -> None:
        self.dropped["fork"] += len(self._work.open)
        self._work.reset()


class _Job:
    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[], Any], future: Future[Any] | None = None) -> None:
        self.call, self.future = call, future


_Queue = SimpleQueue[_Job | None]


class _Work:
    """The part that threads refer to, so that a forgotten `BackgroundJobs` is collected and ends them."""

    def __init__(self, name: str, tick: Callable[[], object] | None, every: float) -> None:
        self.name, self.tick, self.every, self.failed = name, tick, every, 0
        self.reset()

    def reset(self) -> None:
        self.changed = threading.Condition()  # in a forked child, another thread may have held it
        self.queue = _Queue()
        self.open: dict[_Job, None] = {}  # jobs that have not ended, in order
        self.threads: list[threading.Thread] = []
        self._flushing = 0

    def run(self, queue: _Queue) -> None:
        while (job := queue.get()) is not None:
            self._do(job)
            del job  # an idle thread keeps nothing alive

    def run_with_ticks(self, queue: _Queue) -> None:
        due = time.monotonic() + self.every
        while True:
            try:
                left = due - time.monotonic()
                job = queue.get(timeout=left) if left > 0 else _Job(self.tick or self.end)
            except Empty:
                continue
            if job is None:
                return
            self._do(job)
            if left <= 0:
                due = time.monotonic() + self.every
            del job

    def _do(self, job: _Job) -> None:
        if job.future is None:
            try:
                job.call()
            except BaseException:  # also SystemExit: no caller waits for it, and the jobs behind it must be done
                self.failed += 1
                logger.exception("a job of %s failed", self.name)
        elif job.future.set_running_or_notify_cancel():
            complete(job.future, job.call)
        self.open.pop(job, None)
        # `flush` adds itself before it looks at `open`: either it sees that the job is gone, or this sees `flush`.
        if self._flushing:
            with self.changed:
                self.changed.notify_all()

    def flush(self, timeout: float) -> bool:
        with self.changed:
            self._flushing += 1
            asked = list(self.open)
            self.changed.wait_for(
                lambda: not any(job in self.open for job in asked) or not any(one.is_alive() for one in self.threads),
                timeout,
            )
            self._flushing -= 1
            return not any(job in self.open for job in asked)

    def drop_all(self) -> int:
        """Drop the jobs that no thread has begun. Returns how many."""
        count = 0
        try:
            while True:
                if (job := self.queue.get_nowait()) is not None:
                    count += 1
                    del self.open[job]
                    if job.future is not None:
                        job.future.cancel()
        except Empty:
            self.changed.notify_all()
            return count

    def end(self) -> None:
        """End each thread when the jobs before this are done."""
        for _ in self.threads:
            self.queue.put(None)


_all: Final[weakref.WeakSet[BackgroundJobs]] = weakref.WeakSet()


def all_jobs() -> list[BackgroundJobs]:
    """The queues of this process, for a look at their bounds."""
    return list(_all)


def _at_exit() -> None:
    """Threads that are in a library's code while the interpreter ends may end the process by a signal."""
    until, found = time.monotonic() + _EXIT_SECONDS, all_jobs()
    for jobs in found:
        jobs.stop()
    for jobs in found:
        jobs._join(until)


atexit.register(_at_exit)
