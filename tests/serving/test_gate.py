"""Who may enter, and when it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from foreword.disaggregation.unclaimed import UnclaimedRequest, UnclaimedRequests
from foreword.engine.request import Request, SamplingParams
from foreword.errors import BadRequest, EngineFailed, NotReady, QueueFull, ShuttingDown
from foreword.server.limits import Gate


@dataclass
class Status:
    running: int = 0
    waiting: int = 0
    failed: str | None = None


@dataclass
class Engine:
    """As much of an engine as a gate needs."""

    now: Status = field(default_factory=Status)
    drained: list[float] = field(default_factory=list)
    unclaimed: UnclaimedRequests = field(default_factory=lambda: UnclaimedRequests(lambda name: None))

    def status(self) -> Status:
        return self.now

    async def drain(self, timeout: float) -> None:
        self.drained.append(timeout)


def gate(engine: Any = None, max_queue: int = 4) -> Gate:
    return Gate(max_queue, engine)


def test_closed_until_loaded() -> None:
    """Before the engine is loaded nobody enters; afterwards the engine is given out."""
    door, engine = gate(), Engine()
    with pytest.raises(NotReady), door.admit(1):
        pass
    door.open(engine)  # type: ignore[arg-type]
    with door.admit(1) as entered:
        assert entered is engine  # type: ignore[comparison-overlap]


def test_a_failed_engine_lets_nobody_in() -> None:
    """An engine that has stopped for good is an error with its reason."""
    with pytest.raises(EngineFailed, match="out of memory"):
        gate(Engine(Status(failed="out of memory"))).engine()


def test_the_engines_queue_is_bounded() -> None:
    """Who would wait beyond the bound is refused; what is running does not count."""
    door = gate(Engine(Status(running=9, waiting=3)))
    door.check_room(1)
    with pytest.raises(QueueFull):
        door.check_room(2)


def test_a_burst_is_bounded_before_the_engine_sees_it() -> None:
    """Requests that were let in, but have not reached the engine yet, count as waiting."""
    door = gate(Engine())
    with door.admit(3):
        door.check_room(1)
        with pytest.raises(QueueFull):
            door.check_room(2)
    door.check_room(4)


def test_more_than_the_queue_holds_is_a_mistake() -> None:
    """A request that could never be queued is the client's mistake, not a matter of trying again."""
    with pytest.raises(BadRequest, match="max_queue"):
        gate(Engine()).check_room(5)


def test_drain_waits_for_those_inside() -> None:
    """Draining lets nobody in, waits for those inside, and only then stops the engine."""

    async def run() -> None:
        engine = Engine()
        door = gate(engine)
        with door.admit(1):
            draining = asyncio.create_task(door.drain(600))
            await asyncio.sleep(0.01)
            assert not draining.done() and engine.drained == []
            with pytest.raises(ShuttingDown):
                door.engine()
        await asyncio.wait_for(draining, 60)
        assert engine.drained == [0.0]

    asyncio.run(run())


def test_drain_waits_for_what_moved_here() -> None:
    """Draining waits until somebody has fetched a request that moved here, and for no longer than its time."""

    async def run() -> None:
        engine = Engine()
        door = gate(engine)
        engine.unclaimed.add(UnclaimedRequest(Request("came", (1,), SamplingParams()), (), b""))
        draining = asyncio.create_task(door.drain(600))
        await asyncio.sleep(0.01)
        assert not draining.done() and engine.drained == []
        engine.unclaimed.claim("came")
        await asyncio.wait_for(draining, 60)
        engine.unclaimed.add(UnclaimedRequest(Request("another", (1,), SamplingParams()), (), b""))
        await asyncio.wait_for(door.drain(0.01), 60)
        assert engine.drained == [0.0, 0.0]

    asyncio.run(run())


def test_drain_does_not_wait_for_ever() -> None:
    """After its time draining aborts what is still inside."""

    async def run() -> None:
        engine = Engine()
        door = gate(engine)
        with door.admit(1):
            await asyncio.wait_for(door.drain(0.01), 60)
        assert engine.drained == [0.0]

    asyncio.run(run())
