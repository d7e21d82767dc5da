"""The HTTP requests that run here: what a router or an operator may list and move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foreword.engine.request import Delta, MigratedTo, Request
from foreword.errors import CannotMove, NotFound, did_you_mean
from foreword.server.job import Job


@dataclass(slots=True, eq=False)
class Running:
    """One HTTP request. `departure` says where it went on, if it did; then this server only passes on what comes from there."""

    job: Job
    tokens: int = 0
    departure: MigratedTo | None = None

    @property
    def request(self) -> Request:
        return self.job.requests[0]

    @property
    def movable(self) -> bool:
        return self.departure is None and len(self.job.requests) == 1 and self.job.n == 1

    def names(self) -> tuple[str, ...]:
        """The engine's id, the answer's id, and what the client called it."""
        answer = str(self.job.head["id"])
        return self.request.id, answer, answer.partition("-")[2]

    def check_movable(self) -> None:
        """Raises CannotMove."""
        if self.departure is not None:
            raise CannotMove(f"the request has moved to {self.departure.to} already, as {self.departure.request_id!r}")
        if not self.movable:
            raise CannotMove("only requests with one prompt and one answer (n=1) can move")

    def note(self, delta: Delta) -> None:
        self.tokens += len(delta.tokens)
        if delta.moved is not None:
            self.departure = delta.moved

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        shown: dict[str, Any] = {
            "id": self.request.id,
            "answer": self.job.head["id"],
            "object": self.job.head["object"],
            "created": self.job.head["created"],
            "prompt_tokens": sum(len(request.tokens) for request in self.job.requests),
            "output_tokens": self.tokens,
            "stream": self.job.streams,
            "movable": self.movable,
        }
        if self.departure is not None:
            shown["moved"] = {"to": self.departure.to, "request_id": self.departure.request_id}
        return shown


class InFlight:
    """Everything here runs on the event loop's thread."""

    def __init__(self) -> None:
        self._running: dict[Running, None] = {}

    @contextmanager
    def enter(self, job: Job) -> Iterator[Running]:
        """Known until the end of the block."""
        running = Running(job, job.resumed or 0)
        self._running[running] = None
        try:
            yield running
        finally:
            del self._running[running]

    def all(self, salt: bytes | None = None) -> list[Running]:
        """A tenant's, or everybody's."""
        return [one for one in self._running if salt is None or one.request.salt == salt]

    def find(self, name: str, salt: bytes | None = None) -> Running:
        """By the engine's id, the answer's, or the client's `X-Request-Id`. Raises NotFound, CannotMove if it is not unique."""
        mine = self.all(salt)
        exact = [one for one in mine if one.request.id == name]
        found = exact or [one for one in mine if name in one.names()]
        if not found:
            raise NotFound(f"no request {name!r} runs here{did_you_mean(name, [one.request.id for one in mine])}")
        if len(found) > 1:
            raise CannotMove(f"{len(found)} requests are called {name!r}; give one's own id (GET /v1/requests)")
        return found[0]
