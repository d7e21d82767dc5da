"""Streams of a device that run as late as they may, in any order that events allow: work that is used before it is done is
wrong, or missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from foreword.offload.device import Event, Stream


@dataclass
class LazyEvent:
    """A point in a stream."""

    queues: LazyQueues
    done: bool = False

    def synchronize(self) -> None:
        self.queues.run_until(self)


class LazyQueues:
    """Runs nothing until an event is waited for, and then streams at random until it is reached.

    Args:
        meanwhile: what other threads may do while one waits.
    """

    def __init__(self, seed: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._chance = random.Random(seed)
        self._work: dict[Stream, list[Callable[[], object] | LazyEvent | tuple[Event]]] = {one: [] for one in Stream}

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        self._work[stream].append(work)

    def record(self, stream: Stream) -> Event:
        event = LazyEvent(self)
        self._work[stream].append(event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._work[stream].append((event,))

    def run_until(self, event: LazyEvent) -> None:
        while not event.done:
            self._step(self._chance.choice([stream for stream in Stream if self._can_run(stream)]))
            self._meanwhile()

    def _can_run(self, stream: Stream) -> bool:
        first = self._work[stream][0] if self._work[stream] else None
        return first is not None and not (isinstance(first, tuple) and not first[0].done)  # type: ignore[attr-defined]

    def _step(self, stream: Stream) -> None:
        first = self._work[stream].pop(0)
        if isinstance(first, LazyEvent):
            first.done = True
        elif not isinstance(first, tuple):
            first()
