"""A device that is busy with an engine's steps: streams that run as late as the test lets them, beside real threads.

The stream that computes continues when a step ends; the others when a thread waits for them, and not while they are stalled.
Waits are counted, by thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from foreword.offload.device import Event, Stream

WITHIN = 60.0


@dataclass(eq=False)
class StepEnd:
    """The end of a step in the stream that computes. It is reached when the test says so."""

    reached: bool = False


@dataclass(eq=False)
class DeviceEvent:
    """A point in a stream of the device."""

    device: BusyDevice
    stream: Stream
    done: bool = False

    def synchronize(self) -> None:
        self.device.run_until(self)


@dataclass(frozen=True)
class Barrier:
    """A barrier in a stream: work behind it comes after an event."""

    event: DeviceEvent


Work = Callable[[], object] | DeviceEvent | Barrier | StepEnd


@dataclass(eq=False)
class BusyDevice:
    """The `Queues` of a device. Each thread has a stream of its own to load.

    Attributes:
        marks: events that were recorded in the stream that computes, and the times that a stream was told to wait for one.
        waits: how often each thread waited for an event that had not been reached.
    """

    seed: int = 0
    marks: int = 0
    waits_for_marks: int = 0
    waits: Counter[int] = field(default_factory=Counter)
    stalled: bool = False

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._changed = threading.Condition(threading.RLock())
        self._streams: dict[Hashable, deque[Work]] = {Stream.COMPUTE: deque()}
        self._steps: deque[StepEnd] = deque()
        self._awaited: list[DeviceEvent] = []

    # Queues

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        self._append(stream, work)

    def record(self, stream: Stream) -> Event:
        event = DeviceEvent(self, stream)
        self.marks += stream is Stream.COMPUTE
        self._append(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, DeviceEvent)
        self.waits_for_marks += event.stream is Stream.COMPUTE
        self._append(stream, Barrier(event))

    def _append(self, stream: Stream, work: Work) -> None:
        with self._changed:
            self._streams.setdefault(self._key(stream), deque()).append(work)

    def _key(self, stream: Stream) -> Hashable:
        return (stream, threading.get_ident()) if stream is Stream.LOAD else stream

    # The engine's steps

    def begin_step(self) -> None:
        """Queue a step behind what is queued."""
        self._steps.append(StepEnd())
        self._append(Stream.COMPUTE, self._steps[-1])

    def end_step(self) -> None:
        """The oldest step ends, if there is any, and what was queued before it is done."""
        with self._changed:
            if self._steps:
                self._steps.popleft().reached = True
            while self._can_run(Stream.COMPUTE):
                self._run(Stream.COMPUTE)
            self._changed.notify_all()

    def stall(self, *, stalled: bool) -> None:
        """The streams that copy stop, or go on."""
        with self._changed:
            self.stalled = stalled
            self._changed.notify_all()

    # Threads that wait

    def run_until(self, event: DeviceEvent) -> None:
        """Run streams at random until the event is reached, as far as steps have ended."""
        with self._changed:
            self.waits[threading.get_ident()] += not event.done
            self._awaited.append(event)
            while not event.done:
                if able := self._able():
                    self._run(self._chance.choice(able))
                else:
                    self._changed.notify_all()
                    assert self._changed.wait(WITHIN), "a thread waits for a device that does nothing"
            self._awaited.remove(event)
            self._changed.notify_all()

    @property
    def blocked(self) -> bool:
        """Whether a thread waits for what only the end of a step or of a stall can bring."""
        with self._changed:
            return not self._able() and any(not event.done for event in self._awaited)

    def _able(self) -> list[Hashable]:
        return [stream for stream in self._streams if self._can_run(stream)]

    def _can_run(self, stream: Hashable) -> bool:
        queue = self._streams[stream]
        first = queue[0] if queue else None
        if first is None or (self.stalled and stream is not Stream.COMPUTE):
            return False
        if isinstance(first, Barrier):
            return first.event.done
        return not isinstance(first, StepEnd) or first.reached

    def _run(self, stream: Hashable) -> None:
        first = self._streams[stream].popleft()
        if isinstance(first, DeviceEvent):
            first.done = True
        elif callable(first):
            first()

    def settle(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, or until a thread waits for the device and nothing else runs."""
        until = time.monotonic() + WITHIN
        with self._changed:
            while not self._changed.wait_for(lambda: done() or self.blocked, 0.01):
                assert time.monotonic() < until, "neither is it done, nor does a thread wait for the device"
