"""Background jobs: a queue with a bound, and threads that survive what they do."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.store.background import at_once, background_thread, set_background_cores
from foreword.store.background_jobs import BackgroundJobs, all_jobs

LIMIT = 60.0


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "foreword.store.background_jobs"):
        yield


class Reference:
    """A queue with one thread, as long as the thread is held by its first job: the order of what is taken, refusals by reason,
    and failures."""

    def __init__(self, most: int | None) -> None:
        self.most, self.waiting, self.refused = most, list[int](), 0
        self.done, self.failed = list[int](), 0

    def give(self, number: int) -> bool:
        taken = self.most is None or len(self.waiting) < self.most
        self.refused += not taken
        if taken:
            self.waiting.append(number)
        return taken

    def let_run(self, bad: set[int]) -> None:
        self.failed += sum(number in bad for number in self.waiting)
        self.done += self.waiting
        self.waiting.clear()


class Held:
    """Jobs of which the first holds the thread until `free`."""

    def __init__(self, jobs: BackgroundJobs) -> None:
        self.jobs, self.gate, self.begun = jobs, threading.Event(), threading.Event()

    def hold(self) -> None:
        self.gate.clear()
        self.begun.clear()
        assert self.jobs.add(self._wait) and self.begun.wait(LIMIT)

    def _wait(self) -> None:
        self.begun.set()
        assert self.gate.wait(LIMIT)


def is_at_rest(jobs: BackgroundJobs) -> bool:
    return jobs.flush(LIMIT) and not jobs.waiting


@pytest.mark.usefixtures("quiet")
@given(
    rounds=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8), max_size=4),
    most=st.none() | st.integers(1, 5),
)
def test_jobs_follow_a_simple_reference(rounds: list[list[tuple[bool, bool]]], most: int | None) -> None:
    """Jobs end in the order in which they were given. As many wait as the bound says, and each other one is refused and
    counted. A job that raises is counted, or its error is its caller's, and the jobs behind it are done."""
    reference, jobs, done = Reference(most), BackgroundJobs("test", most=most), list[int]()
    held, number, bad = Held(jobs), 0, set[int]()

    def work(one: int, fails: bool) -> int:
        done.append(one)
        if fails:
            raise ValueError(one)
        return one

    for one_round in rounds:
        held.hold()
        results: list[tuple[int, bool, Future[int]]] = []
        for fails, wanted in one_round:
            number += 1
            taken = reference.give(number)
            if wanted and taken:
                results.append((number, fails, jobs.submit(work, number, fails)))
            elif wanted:
                with pytest.raises(RuntimeError):
                    jobs.submit(work, number, fails)
            else:
                assert jobs.add(lambda one=number, fails=fails: work(one, fails)) == taken  # type: ignore[misc]
                bad |= {number} if fails else set()
            assert jobs.waiting == len(reference.waiting)
        held.gate.set()
        assert is_at_rest(jobs)
        reference.let_run(bad)
        assert done == reference.done
        for one, fails, future in results:
            with pytest.raises(ValueError, match=str(one)) if fails else contextlib.nullcontext():
                assert future.result(0) == one
    assert jobs.close(LIMIT)
    assert (jobs.failed, jobs.dropped["full"]) == (reference.failed, reference.refused)


@pytest.mark.usefixtures("quiet")
def test_a_job_that_exits_ends_no_thread() -> None:
    """A job that raises SystemExit counts as failed, and the next one is done."""
    jobs, done = BackgroundJobs("test", most=None), threading.Event()

    def leave() -> None:
        raise SystemExit

    assert jobs.add(leave) and jobs.flush(LIMIT)
    assert jobs.add(done.set) and jobs.flush(LIMIT)
    assert done.is_set() and jobs.failed == 1 and jobs.waiting == 0
    assert jobs.close(LIMIT)


def test_flush_waits_for_what_was_given_before() -> None:
    """`flush` returns when the jobs given before it have ended, also on several threads, and not for those that come later. It
    says when that takes too long."""
    jobs, gates, ended = BackgroundJobs("test", most=None, threads=3), [threading.Event() for _ in range(4)], set[int]()

    def work(number: int) -> None:
        assert gates[number].wait(LIMIT)
        ended.add(number)

    for number in range(3):
        jobs.submit(work, number)
    assert not jobs.flush(0.0)
    flushed = threading.Thread(target=lambda: ended.add(99) if jobs.flush(LIMIT) else None)
    flushed.start()
    gates[1].set()
    gates[0].set()
    assert 99 not in ended
    last = jobs.submit(work, 3)
    gates[2].set()
    flushed.join(LIMIT)
    assert ended == {0, 1, 2, 99} and not last.done()
    gates[3].set()
    assert jobs.close(LIMIT) and jobs.flush(0.0)


def test_close_does_what_is_left_and_joins() -> None:
    """`close` does the jobs that wait, refuses later ones, and leaves no thread. It says so if a job goes on."""
    jobs, done = BackgroundJobs("test-close", most=None, threads=2), list[int]()
    held = Held(jobs)
    held.hold()
    for number in range(5):
        jobs.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not jobs.close(0.0)
    held.gate.set()
    assert jobs.close(LIMIT) and sorted(done) == [0, 1, 2, 3, 4]
    assert not jobs.add(lambda: done.append(9)) and jobs.dropped == {"closed": 1}
    with pytest.raises(RuntimeError, match="closed"):
        jobs.submit(done.append, 9)
    assert not any(thread.name == "foreword-test-close" for thread in threading.enumerate())


def test_stop_drops_what_waits() -> None:
    """`stop` waits for nothing; jobs that wait are counted, and whoever waits for one is told."""
    jobs, done = BackgroundJobs("test", most=None), list[int]()
    held = Held(jobs)
    held.hold()
    waiting = jobs.submit(done.append, 1)
    jobs.add(lambda: done.append(2))
    jobs.stop()
    with pytest.raises(CancelledError):
        waiting.result(0)
    held.gate.set()
    assert jobs.close(LIMIT) and done == [] and jobs.dropped == {"closed": 2}


def test_a_cancelled_job_is_not_done() -> None:
    """A job whose caller cancels it before it begins is never done."""
    jobs, done = BackgroundJobs("test", most=None), list[int]()
    held = Held(jobs)
    held.hold()
    assert jobs.submit(done.append, 1).cancel()
    held.gate.set()
    assert jobs.close(LIMIT) and done == []


@pytest.mark.usefixtures("quiet")
def test_ticks_come_between_jobs() -> None:
    """Ticks come without any job, while there are jobs, and after one that raised; on one thread, so never beside a job."""
    turns, inside = [threading.Event() for _ in range(3)], threading.Lock()
    ticks = iter(turns)

    def tick() -> None:
        with inside:
            turn = next(ticks, None)
            if turn is not None:
                turn.set()
                raise ValueError("a tick that fails")

    jobs = BackgroundJobs("test", most=None, tick=tick, every=0.005)
    assert turns[0].wait(LIMIT)

    def job() -> None:
        assert inside.acquire(blocking=False)
        inside.release()

    while not turns[2].is_set():
        jobs.submit(job).result(LIMIT)
    assert jobs.close(LIMIT) and jobs.failed == 3


def test_threads_end_with_a_forgotten_queue() -> None:
    """A queue that nothing refers to any more ends its threads when its jobs are done, and keeps nothing of its jobs alive."""

    class Kept:
        pass

    jobs, gate, kept = BackgroundJobs("test-forgotten", most=None, threads=2), threading.Event(), Kept()
    seen = weakref.ref(kept)

    def job(_held: Kept) -> bool:
        return gate.wait(LIMIT)

    results = [jobs.submit(job, kept) for _ in range(2)]
    threads = [one for one in threading.enumerate() if one.name == "foreword-test-forgotten"]
    assert len(threads) == 2
    del jobs, kept
    gc.collect()
    assert seen() is not None
    gate.set()
    assert all(one.result(LIMIT) for one in results)
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    del results
    gc.collect()
    assert seen() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """A child that is forked while jobs run and wait begins with none of them, counts them, and does its own; the parent's are
    done in the parent."""
    jobs, done = BackgroundJobs("test", most=2), list[int]()
    held = Held(jobs)
    held.hold()
    jobs.add(lambda: done.append(1))
    child = os.fork()
    if not child:
        fine = jobs.waiting == 0 and jobs.flush(0.0) and jobs.dropped == {"fork": 2}
        fine = fine and jobs.submit(lambda: 7).result(LIMIT) == 7 and jobs.close(LIMIT) and done == []
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.gate.set()
    assert jobs.close(LIMIT) and done == [1] and not jobs.dropped


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds single threads")
def test_threads_use_the_background_cores() -> None:
    """Threads run on the cores for background work, with the nice value that is asked for."""
    cores = os.sched_getaffinity(0)
    jobs = BackgroundJobs("test", most=None, nice=3)
    set_background_cores({min(cores)})
    try:
        found = jobs.submit(lambda: (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)))
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid())
        assert found.result(LIMIT)[0] == {min(cores)} and found.result()[1] == min(nice + 3, 19)
    finally:
        set_background_cores(())
        assert jobs.close(LIMIT)


def test_too_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system has no more threads, those that there are do the jobs; without any the caller is told."""
    left = 1

    def start(*args: Any, **kwargs: Any) -> threading.Thread:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        return background_thread(*args, **kwargs)

    monkeypatch.setattr("foreword.store.background_jobs.background_thread", start)
    jobs = BackgroundJobs("test", most=None, threads=4)
    assert [jobs.submit(lambda: 1).result(LIMIT) for _ in range(5)] == [1] * 5
    assert jobs.close(LIMIT)
    with pytest.raises(RuntimeError, match="can't start"):
        BackgroundJobs("test", most=None).submit(lambda: 1)


@pytest.mark.parametrize("threads", [None, 1, 2, 9])
def test_calls_at_once(threads: int | None) -> None:
    """The results are in the order of the calls, on as many threads as are asked for. What one raises is raised, after all have
    ended."""
    ended = list[int]()

    def call(number: int) -> Callable[[], int]:
        def work() -> int:
            ended.append(number)
            return number * number

        return work

    assert at_once([call(number) for number in range(5)], threads) == [0, 1, 4, 9, 16]
    assert sorted(ended) == [0, 1, 2, 3, 4] and at_once(list[Callable[[], int]]()) == []

    def fail() -> int:
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        at_once([call(0), fail, call(2)], threads)


def test_calls_that_wait_for_each_other() -> None:
    """Each call has a thread of its own unless fewer are asked for."""
    meet = threading.Barrier(4)
    assert at_once([lambda: meet.wait(LIMIT) >= 0] * 4) == [True] * 4


def test_bounds_can_be_looked_at() -> None:
    """All queues of a process can be listed with what waits and the bound."""
    jobs = BackgroundJobs("test-bounds", most=3)
    held = Held(jobs)
    held.hold()
    jobs.add(lambda: None)
    assert [(one.waiting, one.most) for one in all_jobs() if one.name == "test-bounds"] == [(1, 3)]
    held.gate.set()
    assert jobs.close(LIMIT)
