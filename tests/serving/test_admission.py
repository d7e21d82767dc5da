"""Admission control: when the server takes requests, how many may wait, and how it drains."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from foreword.disaggregation.unclaimed import UnclaimedRequest, UnclaimedRequests
from foreword.engine.request import Request, SamplingParams
from foreword.errors import BadRequest
from foreword.request_errors import EngineFailed, NotReady, QueueFull, ShuttingDown
from foreword.server.admission import Admission


@dataclass
class Status:
    running: int = 0
    waiting: int = 0
    failed: str | None = None


@dataclass
class Engine:
    """The part of an engine that admission control uses."""

    now: Status = field(default_factory=Status)
    drained: list[float] = field(default_factory=list)
    unclaimed: UnclaimedRequests = field(default_factory=lambda: UnclaimedRequests(lambda name: None))

    @property
    def failed(self) -> str | None:
        return self.now.failed

    def queue(self) -> tuple[int, int]:
        return self.now.running, self.now.waiting

    async def drain(self, timeout: float) -> None:
        self.drained.append(timeout)


def admission(engine: Any = None, max_queue: int = 4) -> Admission:
    return Admission(max_queue, engine)


def test_no_requests_before_the_model_is_loaded() -> None:
    """Requests are refused until the engine is loaded, and admitted afterwards."""
    limits, engine = admission(), Engine()
    with pytest.raises(NotReady), limits.admit(1):
        pass
    limits.set_engine(engine)  # type: ignore[arg-type]
    with limits.admit(1) as admitted:
        assert admitted is engine  # type: ignore[comparison-overlap]


def test_a_failed_engine_takes_no_requests() -> None:
    """Requests to a stopped engine fail with the reason."""
    with pytest.raises(EngineFailed, match="out of memory"):
        admission(Engine(Status(failed="out of memory"))).engine()


def test_the_engines_queue_is_bounded() -> None:
    """A sequence that would exceed the queue is refused; running ones do not count."""
    limits = admission(Engine(Status(running=9, waiting=3)))
    limits.check_queue(1)
    with pytest.raises(QueueFull):
        limits.check_queue(2)


def test_a_burst_between_two_steps_counts() -> None:
    """Requests that are admitted but have not reached the engine yet count as waiting."""
    limits = admission(Engine())
    with limits.admit(3):
        limits.check_queue(1)
        with pytest.raises(QueueFull):
            limits.check_queue(2)
    limits.check_queue(4)


def test_more_sequences_than_the_queue_holds() -> None:
    """A request that could never be queued is the client's error, without a retry."""
    with pytest.raises(BadRequest, match="max_queue"):
        admission(Engine()).check_queue(5)


def test_drain_waits_for_running_requests() -> None:
    """Draining refuses new requests, waits for running ones, and only then stops the engine."""

    async def run() -> None:
        engine = Engine()
        limits = admission(engine)
        with limits.admit(1):
            draining = asyncio.create_task(limits.drain(600))
            await asyncio.sleep(0.01)
            assert not draining.done() and engine.drained == []
            with pytest.raises(ShuttingDown):
                limits.engine()
        await asyncio.wait_for(draining, 60)
        assert engine.drained == [0.0]

    asyncio.run(run())


def test_drain_waits_for_migrated_requests() -> None:
    """Draining waits until a migrated request is fetched, but no longer than its timeout."""

    async def run() -> None:
        engine = Engine()
        limits = admission(engine)
        engine.unclaimed.add(UnclaimedRequest(Request("came", (1,), SamplingParams()), (), b""))
        draining = asyncio.create_task(limits.drain(600))
        await asyncio.sleep(0.01)
        assert not draining.done() and engine.drained == []
        engine.unclaimed.claim("came")
        await asyncio.wait_for(draining, 60)
        engine.unclaimed.add(UnclaimedRequest(Request("another", (1,), SamplingParams()), (), b""))
        await asyncio.wait_for(limits.drain(0.01), 60)
        assert engine.drained == [0.0, 0.0]

    asyncio.run(run())


def test_drain_times_out() -> None:
    """After its timeout draining aborts the running requests."""

    async def run() -> None:
        engine = Engine()
        limits = admission(engine)
        with limits.admit(1):
            await asyncio.wait_for(limits.drain(0.01), 60)
        assert engine.drained == [0.0]

    asyncio.run(run())
