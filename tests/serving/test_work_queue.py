"""Parsing and tokenizing off the event loop: what waits for what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from foreword.api.work_queue import SHORT, WorkQueue


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def queue(clock: list[float]) -> Iterator[WorkQueue]:
    made = WorkQueue(clock=lambda: clock[0])
    yield made
    made.close()


def blocked(queue: WorkQueue, size: int) -> threading.Event:
    """Occupy a thread with work of this size until the event is set."""
    begun, free = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        free.wait(60)

    queue.submit(size, work)
    assert begun.wait(60)
    return free


def test_short_work_does_not_wait_for_long(queue: WorkQueue) -> None:
    """While long work runs and more of it waits, short work runs at once."""
    free = blocked(queue, 1 << 21)
    waiting = [queue.submit(1 << 21, int) for _ in range(3)]
    assert queue.submit(3, lambda: "short").result(60) == "short"
    assert not any(one.done() for one in waiting)
    free.set()
    assert [one.result(60) for one in waiting] == [0, 0, 0]


def test_shorter_long_work_first_until_it_has_waited(queue: WorkQueue, clock: list[float]) -> None:
    """Shorter work overtakes longer work, but not work that has waited in proportion to its size."""
    free, done = blocked(queue, 1 << 21), []
    sizes = [("1 MiB", 1 << 20), ("half", 1 << 19)]
    futures = [queue.submit(size, done.append, name) for name, size in sizes]
    clock[0] = 100.0
    futures.append(queue.submit(SHORT + 1, done.append, "new"))
    free.set()
    for future in futures:
        future.result(60)
    assert done == ["half", "1 MiB", "new"]


def test_cancelled_work_does_not_run(queue: WorkQueue) -> None:
    """Work whose client has gone before it began is skipped."""
    ran: list[int] = []

    async def run() -> None:
        free = blocked(queue, 1 << 21)
        task = asyncio.create_task(queue.run(1 << 20, ran.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        free.set()
        await queue.run(1 << 21, ran.append, 2)

    asyncio.run(run())
    assert ran == [2]


def test_errors_reach_the_caller(queue: WorkQueue) -> None:
    """An exception of the work is raised where its result is awaited."""
    with pytest.raises(ZeroDivisionError):
        asyncio.run(queue.run(1, lambda: 1 // 0))
