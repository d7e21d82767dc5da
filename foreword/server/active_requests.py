"""The HTTP requests that run now. Clients list them; routers and operators migrate them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foreword.errors import CannotMigrate, NotFound, did_you_mean
from foreword.server.job import Job


class ActiveRequests:
    """Runs on the event loop's thread."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}

    @contextmanager
    def track(self, job: Job) -> Iterator[None]:
        """List a job until the end of the block."""
        self._jobs[job] = None
        try:
            yield
        finally:
            del self._jobs[job]

    def all(self, salt: bytes | None = None) -> list[Job]:
        """The jobs of the tenant with this salt; of all tenants if it is None."""
        return [job for job in self._jobs if salt is None or job.owner == salt]

    def find(self, name: str, salt: bytes | None = None) -> Job:
        """By the engine's id, the answer's id or the client's `X-Request-Id`. Raises NotFound, or CannotMigrate for a name that
        several requests have."""
        visible = self.all(salt)
        exact = [job for job in visible if job.requests[0].id == name]
        found = exact or [job for job in visible if name in _names(job)]
        if not found:
            raise NotFound(
                f"no request {name!r} runs here{did_you_mean(name, [job.requests[0].id for job in visible])}"
            )
        if len(found) > 1:
            raise CannotMigrate(f"{len(found)} requests are called {name!r}; use the id from GET /v1/requests")
        return found[0]


def describe(job: Job) -> dict[str, Any]:
    """An active request as JSON."""
    shown: dict[str, Any] = {
        "id": job.requests[0].id,
        "answer": job.head.id,
        "dialect": job.request.dialect,
        "created": job.head.created,
        "prompt_tokens": job.prompt_tokens,
        "output_tokens": job.output_tokens,
        "stream": job.streams,
        "movable": job.movable,
    }
    if job.departure is not None:
        shown["moved"] = {"to": job.departure.to, "request_id": job.departure.request_id}
    return shown


def _names(job: Job) -> tuple[str, str]:
    answer = job.head.id
    return answer, answer.partition("-")[2]
